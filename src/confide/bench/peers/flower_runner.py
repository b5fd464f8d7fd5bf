"""Flower's simulation: FedAvg inside its own strategy for central differential privacy with clipping by the clients.

Ray gets one processor for each client that trains, so that as many train at a time as there are processors.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

from confide.bench.floors import COHORT, workload
from confide.bench.peers.flower_client import app as client_app
from confide.bench.protocol import Gate

ROUNDS = 100_000


class Gated(DifferentialPrivacyClientSideFixedClipping):
    gate: Gate

    def configure_train(self, *given: Any, **named: Any) -> Any:
        if not self.gate.open():
            os._exit(0)
        return super().configure_train(*given, **named)

    def aggregate_train(self, *given: Any, **named: Any) -> Any:
        found = super().aggregate_train(*given, **named)
        self.gate.close()
        return found


def main() -> None:
    gate, name = Gate(), sys.argv[1]
    model, _, _, users = workload(name)
    app = ServerApp()

    @app.main()
    def serve(grid: Any, context: Any) -> None:
        inner = FedAvg(
            fraction_train=COHORT[name] / users, fraction_evaluate=0.0, min_train_nodes=COHORT[name],
            min_available_nodes=users,
        )  # fmt: skip
        strategy = Gated(inner, noise_multiplier=1.0, clipping_norm=0.5, num_sampled_clients=COHORT[name])
        strategy.gate = gate
        gate.ready()
        strategy.start(grid, ArrayRecord(model.state_dict()), ROUNDS, train_config=ConfigRecord({"workload": name}))

    run_simulation(app, client_app, users, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0}})


if __name__ == "__main__":
    main()
