"""Workers take the longest users first, and the sum does not know it. Threads stand in for processes here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.engines import processes
from confide.engines.costs import expected_costs
from confide.engines.engine import InProcess
from confide.engines.processes import Processes
from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer
from confide.federated.custom import BasicTask
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout, flatten

LOCAL = LocalTraining(steps=1, learning_rate=1.0)
SIZES = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


class Skewed(BasicTask):
    """Users of different sizes, whose updates differ enough that the order of addition shows in the last bits."""

    name, metric = "skewed", "none"
    examples = SIZES

    def __init__(self, pace: float = 0.0) -> None:
        self.pace, self.begun = pace, list[int]()

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(101)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        self.begun.append(user)
        time.sleep(self.pace * int(self.examples[user]))
        return (torch.from_numpy(np.random.default_rng(user).normal(size=101).astype(np.float32)) * 10.0**user,)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return (batch[0] * parameters["w"]).sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def trainer_of(task: Skewed) -> PartTrainer:
    layout = Layout.of(task.initial_parameters())
    rule = bounder(Bounding(rule="none"), layout)
    weights = np.full(len(SIZES), 1 / len(SIZES))
    return PartTrainer(task, layout, LOCAL, rule, weights, 0, flatten(task.initial_parameters()))


Maker = Callable[[Skewed, int], Processes]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    made: list[Processes] = []

    def worker(target: Any, args: tuple[Any, ...], daemon: bool) -> threading.Thread:
        # As a process would, it keeps an end of the pipe of its own, which stays open when the given one is closed.
        make, pipe, *memory = args
        own = Connection(os.dup(pipe.fileno()))
        return threading.Thread(target=target, args=(make, own, *memory), daemon=daemon)

    def make(task: Skewed, workers: int) -> Processes:
        made.append(Processes(lambda: trainer_of(task), workers, torch.zeros(101), 1, expected_costs(task, LOCAL)))
        return made[-1]

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=worker)
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    yield make
    for engine in made:
        engine.close()


COHORT = np.array([0, 2, 4, 5, 6, 7, 8, 11])
LONGEST_FIRST = [5, 11, 7, 4, 8, 2, 0, 6]


def test_one_worker_trains_the_longest_user_first(engine_of: Maker) -> None:
    task = Skewed()
    engine_of(task, 1).train(torch.zeros(101), COHORT, 0, torch.empty(101))
    assert task.begun == LONGEST_FIRST


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [1 << 27, 0, 4 * 448], ids=["many slots", "one a worker", "four"])
def test_neither_workers_nor_slots_nor_the_schedule_change_a_bit(
    workers: int, slot_bytes: int, engine_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = torch.empty(101), torch.full((101,), torch.nan)
    tally = InProcess(trainer_of(Skewed())).train(torch.zeros(101), COHORT, 0, expected)
    monkeypatch.setattr(processes, "_SLOT_BYTES", slot_bytes)
    task = Skewed(pace=0.0005)
    engine = engine_of(task, workers)
    for _ in range(2):
        assert engine.train(torch.zeros(101), COHORT, 0, found) == tally
        assert torch.equal(found, expected)
    assert sorted(task.begun) == sorted(COHORT.tolist() * 2)
    reordered = sum(reversed(list(_single_sums())), start=torch.zeros(101))
    assert not torch.equal(reordered, expected), "the order of addition does not show in this cohort"


def _single_sums() -> list[Tensor]:
    sums = []
    for user in COHORT:
        sums.append(torch.zeros(101))
        trainer_of(Skewed()).add_part(torch.zeros(101), np.array([user]), 0, sums[-1])
    return sums


def test_of_two_workers_one_begins_with_the_longest_user_and_the_other_does_not_wait_for_it(engine_of: Maker) -> None:
    """Eleven users of one unit each and then one of eleven: 22 units of work for two."""
    task = Skewed(pace=0.02)
    task.examples = np.array([1] * 11 + [11])
    engine_of(task, 2).train(torch.zeros(101), np.arange(12), 0, torch.empty(101))
    assert 11 in task.begun[:2]
