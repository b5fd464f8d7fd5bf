"""Flower's simulation: FedAvg inside its own strategy for central differential privacy with clipping by the clients.

Ray gets one processor for each client that trains, so that as many train at a time as there are processors. Workload C
calls what clipping mod and strategy call for one client (half of what it takes to aggregate two) and for the noise.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from flwr.simulation import run_simulation
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, compute_clip_model_update

from confide.bench.protocol import Gate, serve
from peers.floors import COHORT, workload
from peers.flower_client import app as client_app

ROUNDS, TENSORS = 100_000, 300


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


def large(parameters: int) -> None:
    """C: difference, clipping and addition of one client, and the noise."""
    central = np.array_split(np.full(parameters, 1e-3, dtype=np.float32), min(TENSORS, parameters))
    sent = [
        RecordDict({"arrays": ArrayRecord(numpy_ndarrays=central), "metrics": MetricRecord({"n": 1.0})})
        for _ in range(2)
    ]

    def one_round() -> dict[str, float]:
        own = [part + np.float32(1e-4) for part in central]
        times = [time.perf_counter()]
        compute_clip_model_update(own, central, 0.5)
        times.append(time.perf_counter())
        aggregate_arrayrecords(sent, "n")
        times.append(time.perf_counter())
        add_gaussian_noise_inplace(own, 0.5)
        times.append(time.perf_counter())
        return {"client": times[1] - times[0] + (times[2] - times[1]) / 2, "noise": times[3] - times[2]}

    serve(one_round)


def main() -> None:
    if sys.argv[1] == "C":
        large(int(sys.argv[3]))
        return
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
