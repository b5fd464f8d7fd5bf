"""An engine keeps sums, never a list of updates: its memory does not grow with the cohort."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.engines.engine import InProcess
from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer
from confide.federated.custom import BasicTask
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout, flatten

SIZE, USERS = 250_000, 400  # a list of all updates would take 400 MB


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watched(BasicTask):
    """Every user pulls the model its own way; each time, the memory in use is looked at."""

    name, metric = "watched", "none"
    examples = np.ones(USERS, dtype=np.int64)

    def __init__(self) -> None:
        self.seen: list[int] = []

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(SIZE)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        self.seen.append(resident())
        return (torch.tensor(float(user + 1)),)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return batch[0] * parameters["w"].sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_cohort() -> None:
    task, local = Watched(), LocalTraining(steps=1, learning_rate=1.0)
    layout, like = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    rule = bounder(Bounding(rule="clip", bound=1.0), layout)
    engine = InProcess(PartTrainer(task, layout, local, rule, np.full(USERS, 1 / USERS), 0, like))
    total = torch.empty_like(like)
    tally = engine.train(like, np.arange(USERS), 0, total)
    assert tally.users == len(task.seen) == USERS
    assert float(total.norm()) == pytest.approx(1.0, rel=1e-4), "everybody pulls the same way, up to the bound"
    assert max(task.seen[20:]) - task.seen[20] < 20e6


def test_plain_updates_are_added_to_one_sum_as_if_each_had_been_a_sum_of_its_own() -> None:
    """So a large model is held once less, and workers, who send sums, come to the same bytes."""
    task, local = Watched(), LocalTraining(steps=1, learning_rate=0.3)
    layout, like = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    like.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    rule, weights = bounder(Bounding(rule="clip", bound=7.0), layout), np.linspace(0.1, 1.0, USERS)
    trainer = PartTrainer(task, layout, local, rule, weights, 0, like)
    engine, found, wanted = InProcess(trainer), torch.empty_like(like), torch.zeros_like(like)
    engine.train(like, np.arange(20), 0, found)
    assert trainer.one_by_one
    assert engine._part is None
    for user in range(20):
        own = torch.zeros_like(like)
        trainer.add_part(like, np.array([user]), 0, own)
        wanted += own
    assert torch.equal(found, wanted)
