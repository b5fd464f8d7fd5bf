"""The engine of ranks against the one of this process: the same sum, in memory that does not grow with the cohort."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.engines import distributed
from confide.engines.distributed import Distributed, follow
from confide.engines.engine import InProcess
from confide.engines.ranks import place
from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer, Tally, parts
from confide.federated.custom import BasicTask
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout, flatten

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and reads /proc")
USERS = 200


class Pulls(BasicTask):
    """Every user pulls a model of this size its own way; each time, the memory in use is looked at."""

    name, metric = "pulls", "none"
    examples = np.arange(USERS) % 7 + 1

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, list[int]()

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(self.size)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        self.seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return (torch.from_numpy(np.random.default_rng(user).normal(size=self.size).astype(np.float32)),)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return (batch[0] * parameters["w"]).sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def trainer_of(task: Pulls) -> PartTrainer:
    layout = Layout.of(task.initial_parameters())
    rule, weights = bounder(Bounding(rule="clip", bound=1.0), layout), np.full(USERS, 1 / USERS)
    local = LocalTraining(steps=1, learning_rate=1.0)
    return PartTrainer(task, layout, local, rule, weights, 0, flatten(task.initial_parameters()))


def summed(ranks: int, size: int, slots: int, cohorts: list[np.ndarray], at: Path) -> tuple[list[Tensor], list[int]]:
    """Each cohort's sum from forked ranks, and by how much the memory of each rank grew after its first users."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    members = [
        context.Process(target=_rank, args=(rank, ranks, port, size, slots, cohorts, at)) for rank in range(ranks)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
    assert [member.exitcode for member in members] == [0] * ranks
    growth = [json.loads((at / f"seen{rank}").read_text()) for rank in range(ranks)]
    return torch.load(at / "sums", weights_only=True), growth


def _rank(rank: int, ranks: int, port: int, size: int, slots: int, cohorts: list[np.ndarray], at: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed._SLOTS, task, here = slots, Pulls(size), place()
    assert here is not None
    if rank == 0:
        engine, sums = Distributed("{}", trainer_of(task), here), list[Tensor]()
        for step, cohort in enumerate(cohorts):
            sums.append(torch.full((size,), torch.nan))
            engine.train(torch.zeros(size), cohort, step, sums[-1])
        engine.close()
        torch.save(sums, at / "sums")
    else:
        assert follow(here, lambda *_: trainer_of(task)) == 0
    grown = max(task.seen[10:], default=0) - task.seen[10] if len(task.seen) > 10 else 0
    (at / f"seen{rank}").write_text(json.dumps(grown))


@pytest.mark.parametrize(("ranks", "slots"), [(2, 64), (3, 2), (4, 1)])
def test_sums_are_those_of_one_process_to_the_bit_for_cohorts_of_any_size(
    ranks: int, slots: int, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    cohorts = [np.sort(draw.choice(USERS, size, replace=False)) for size in (0, 1, 2, 3, 17, 60)]
    alone, expected = InProcess(trainer_of(Pulls(37))), []
    for step, cohort in enumerate(cohorts):
        expected.append(torch.empty(37))
        alone.train(torch.zeros(37), cohort, step, expected[-1])
    sums, _ = summed(ranks, 37, slots, cohorts, tmp_path)
    for one, other in zip(sums, expected, strict=True):
        assert torch.equal(one, other)
    shuffled = torch.empty(37)
    alone.train(torch.zeros(37), cohorts[-1][::-1].copy(), 5, shuffled)
    assert not torch.equal(shuffled, expected[-1]), "the order of addition does not show in these cohorts"


def test_memory_of_a_rank_does_not_grow_with_the_cohort(tmp_path: Path) -> None:
    _, growth = summed(2, 250_000, 2, [np.arange(USERS)], tmp_path)  # all updates would take 200 MB
    assert max(growth) < 10e6


def test_a_tally_survives_its_way_over_the_wire_exactly() -> None:
    tally = Tally(3, 1, 2, 0.1, 1 / 3, float("inf"), -0.0, [0.1, 0.2], [1e-300, 5e-324], [3.0, 0.7], [1.0, 2.0],
                  0.7, [0.3, 1 / 7], [0.5, -0.5, 0.5])  # fmt: skip
    other = Tally(1, raw_norms=[0.1, 1e-300])
    rows: list[distributed.Row] = [(0.25, tally), (1e-9, other), None]
    assert distributed._unpack(distributed._pack(rows)) == rows


@pytest.mark.parametrize(("size", "count"), [(1, 312), (32, 10), (51, 8), (80, 4), (311, 2), (312, 1), (500, 1)])
def test_parts_are_equal_and_as_many_as_two_workers_can_share(size: int, count: int) -> None:
    """A part that is left over would keep one of them waiting."""
    cohort = np.arange(312)
    found = parts(cohort, size)
    assert len(found) == count
    assert max(map(len, found)) <= size
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert np.concatenate(found).tolist() == cohort.tolist()
    assert parts(cohort[:0], size) == []
