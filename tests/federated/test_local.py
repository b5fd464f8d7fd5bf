"""Local training does what PFL-ASR's Algorithm 1 and NORM's Algorithm 1 say a user does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask


class Lines(BasicTask):
    """A task with known gradients: the loss of an example x at w is w . x, so a step adds -eta times the mean of x."""

    name = "lines"
    metric = "value"

    def __init__(self, held: int = 5) -> None:
        self.data = torch.from_numpy(np.random.default_rng(1).standard_normal((2, held, 3)))
        self.seen: list[list[float]] = []

    @property
    def examples(self) -> np.ndarray:
        return np.full(2, self.data.shape[1], dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(3, dtype=torch.float64)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        chosen = self.data[user] if examples is None else self.data[user][torch.from_numpy(examples)]
        self.seen.append(sorted(chosen[:, 0].tolist()))
        return (chosen,)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return (batch[0] @ parameters["w"]).mean()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"value": 0.0}


def _update(task: Lines, step: int = 0, user: int = 0, central: Tensor | None = None, **changes: Any) -> Tensor:
    local = LocalTraining.model_validate({"learning_rate": 0.5, **changes})
    start = flatten(task.initial_parameters()) if central is None else central
    trainer = PlainTrainer(task, Layout.of(task.initial_parameters()), local, seed=7, like=start)
    return trainer.update(start, user, step).delta.clone()


def test_delta_is_central_minus_local() -> None:
    task = Lines()
    torch.testing.assert_close(_update(task, steps=4), 4 * 0.5 * task.data[0].mean(dim=0))


def test_delta_over_eta_does_not_depend_on_eta_for_linear_losses() -> None:
    task = Lines()
    small = _update(task, steps=4, learning_rate=0.01, divide_by_learning_rate=True)
    torch.testing.assert_close(small, _update(task, steps=4, divide_by_learning_rate=True))


def test_the_local_rate_follows_its_schedule_over_central_steps() -> None:
    task = Lines()
    schedule = {"kind": "per_round", "factor": 0.9}
    torch.testing.assert_close(
        _update(task, step=3, steps=1, schedule=schedule), 0.9**3 * _update(task, step=0, steps=1, schedule=schedule)
    )


def test_each_local_gradient_is_clipped() -> None:
    task = Lines()
    size = float(task.data[0].mean(dim=0).norm())
    clipped = _update(task, steps=3, gradient_clip=size / 2)
    assert float(clipped.norm()) == pytest.approx(3 * 0.5 * size / 2)
    torch.testing.assert_close(_update(task, steps=3, gradient_clip=size * 2), _update(task, steps=3))


def test_fedprox_pulls_towards_the_central_model() -> None:
    task = Lines()
    g, eta, mu = task.data[0].mean(dim=0), 0.5, 0.8
    central = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    w = central.clone()
    for _ in range(3):
        w = w - eta * (g + mu * (w - central))
    torch.testing.assert_close(_update(task, steps=3, proximal=mu, central=central), central - w)


def test_an_epoch_of_mini_batches_sees_every_example_once() -> None:
    task = Lines()
    _update(task, epochs=2, batch_size=2)
    assert [len(batch) for batch in task.seen] == [2, 2, 1, 2, 2, 1]
    everything = sorted(task.data[0][:, 0].tolist())
    assert sorted(x for batch in task.seen[:3] for x in batch) == everything
    assert sorted(x for batch in task.seen[3:] for x in batch) == everything
    assert task.seen[:3] != task.seen[3:]


def test_local_steps_limit_the_batches_of_a_user() -> None:
    task = Lines()
    _update(task, steps=4, batch_size=2)
    assert [len(batch) for batch in task.seen] == [2, 2, 1, 2]


def test_batches_are_keyed_by_step_and_user() -> None:
    orders = []
    for step, user in [(0, 0), (0, 0), (1, 0)]:
        task = Lines(held=30)
        _update(task, step=step, user=user, epochs=1, batch_size=3)
        orders.append(task.seen)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_a_batch_size_beyond_the_users_data_means_all_of_it() -> None:
    task = Lines()
    torch.testing.assert_close(_update(task, epochs=3, batch_size=100), _update(task, steps=3))


def test_training_does_not_change_the_central_model() -> None:
    central = torch.ones(3, dtype=torch.float64)
    _update(Lines(), steps=3, central=central)
    torch.testing.assert_close(central, torch.ones(3, dtype=torch.float64))
