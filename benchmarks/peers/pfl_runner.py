"""pfl 0.6 (Apple's pfl-research): FederatedAveraging in its SimulatedBackend with a central Gaussian mechanism.

With two processes it is started by `torchrun`, which pfl finds by itself; rank 0 obeys the gate and the other follows.
Workload C calls what the backend calls for one client and for the noise, on all threads.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.base import SumAggregator
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from confide.bench.protocol import Gate, serve
from peers.floors import COHORT, USERS_OF_D, SpeechModel, ctc

ROUNDS, TENSORS = 100_000, 300


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def loss(self, features: Any, labels: Any, eval: bool = False) -> Any:
        return torch.nn.functional.cross_entropy(self.layers(features), labels)

    def metrics(self, features: Any, labels: Any, eval: bool = False) -> dict[str, Any]:
        return {}


class Recogniser(SpeechModel):
    def loss(self, features: Any, labels: Any, eval: bool = False) -> Any:
        return ctc(self(features), labels)

    def metrics(self, features: Any, labels: Any, eval: bool = False) -> dict[str, Any]:
        return {}


class Head(torch.nn.Module):
    """D and E: one linear layer on what a frozen encoder made."""

    def __init__(self, out: int, criterion: Any) -> None:
        super().__init__()
        self.layer, self.criterion = torch.nn.Linear(384, out), criterion

    def loss(self, features: Any, labels: Any, eval: bool = False) -> Any:
        return self.criterion(self.layer(features), labels)

    def metrics(self, features: Any, labels: Any, eval: bool = False) -> dict[str, Any]:
        return {}


def workload(name: str) -> tuple[Any, list[tuple[Any, Any]], dict[str, Any]]:
    """Module, the data of those users that have their own, and what a user does."""
    from confide.workloads import data

    if name == "A":
        return Perceptron(), _users(data.small_clients()), {"local_num_epochs": 1, "local_batch_size": 10}
    if name == "B":
        return Recogniser(), _users(data.speech_clients()), {"local_num_epochs": 2, "local_batch_size": None}
    once = {"local_num_epochs": 1, "local_batch_size": None}
    if name == "D":
        return Head(29, ctc), _users(data.kept_states()), once
    return Head(2, torch.nn.functional.cross_entropy), _users(data.query_vectors()), once


def _users(made: tuple[np.ndarray, np.ndarray]) -> list[tuple[Any, Any]]:
    return list(zip(*map(torch.from_numpy, made), strict=True))


class Large(torch.nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        sizes = [len(part) for part in np.array_split(np.empty(parameters, dtype=np.int8), min(TENSORS, parameters))]
        self.parts = torch.nn.ParameterList(torch.full((size,), 1e-3) for size in sizes)

    def loss(self, eval: bool = False) -> Any:
        return self.parts[0].sum()

    def metrics(self, eval: bool = False) -> dict[str, Any]:
        return {}


def large(parameters: int) -> None:
    """C: difference, clipping and addition of one client, and the noise."""
    torch.set_num_threads(os.cpu_count() or 1)
    module = Large(parameters)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    central, mechanism, adder = model.get_parameters(), GaussianMechanism(0.5, 1.0), SumAggregator()
    with torch.no_grad():
        for part in module.parts:
            part.add_(1e-4)
    total = model.get_model_difference(central, clone=True)

    def one_round() -> dict[str, float]:
        nonlocal total
        with torch.no_grad():
            times = [time.perf_counter()]
            bounded, _ = mechanism.constrain_sensitivity(model.get_model_difference(central))
            total = adder.accumulate(accumulated=total, user_stats=bounded)
            times.append(time.perf_counter())
            mechanism.add_noise(total, 1)
            times.append(time.perf_counter())
        return {"client": times[1] - times[0], "noise": times[2] - times[1]}

    serve(one_round)


class Gated(TrainingProcessCallback):
    """Stands between the rounds. Other ranks wait for the first one, or they would train their share of the next round
    in the turn of another system."""

    def __init__(self, gate: Gate | None) -> None:
        self.gate = gate

    def on_train_begin(self, *, model: Any) -> Any:
        if self.gate is not None:
            self.gate.ready()
        self._wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        if self.gate is not None:
            self.gate.close()
        self._wait()
        return False, Metrics()

    def _wait(self) -> None:
        if self.gate is not None and not self.gate.open():
            os._exit(0)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def main() -> None:
    if sys.argv[1] == "C":
        large(int(sys.argv[3]))
        return
    torch.set_num_threads(1)
    gate = Gate() if os.environ.get("RANK", "0") == "0" else None
    np.random.seed(0)  # noqa: NPY002, which is what pfl draws from
    torch.manual_seed(0)
    module, held, trains = workload(sys.argv[1])
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = list(range(USERS_OF_D if sys.argv[1] == "D" else len(held)))
    made = {user: PyTorchTensorDataset(held[user % len(held)]) for user in users}
    dataset = FederatedDataset(made.__getitem__, get_user_sampler("minimize_reuse", users))
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.5, 1.0))
    backend = SimulatedBackend(dataset, dataset, [mechanism])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS,
            train_cohort_size=COHORT[sys.argv[1]],
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(local_learning_rate=0.1, **trains),
        None,
        [Gated(gate)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
