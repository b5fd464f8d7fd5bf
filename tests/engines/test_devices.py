"""Which device a rank takes, how the central model gets there, and that a ledger's line never stands for two values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.bench import recipes
from confide.build import make_loop, make_task, make_trainer
from confide.engines.distributed import RankTrainer
from confide.engines.engine import InProcess, OnDevice
from confide.engines.environment import environment
from confide.engines.ranks import Place, device
from confide.errors import UserError
from confide.privacy.ledger import Ledger
from confide.recipe import load

RECIPE = recipes.mlp(2, cohort=3, users=9, width=30, hidden=20, examples=4)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "cuda:0"),
        ({"LOCAL_RANK": "3"}, "cuda:3"),
        ({"LOCAL_RANK": "5"}, "cuda:1"),
        ({"LOCAL_RANK": "3", "CONFIDE_DEVICE": "cpu"}, "cpu"),
        ({"CONFIDE_DEVICE": "cuda"}, "cuda:0"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number(environ: dict[str, str], expected: str) -> None:
    assert str(device(environ)) == expected


def test_without_a_gpu_a_rank_trains_on_the_processor_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(device({"LOCAL_RANK": "1"})) == "cpu"
    with pytest.raises(UserError, match="finds no GPU"):
        device({"CONFIDE_DEVICE": "cuda"})
    with pytest.raises(UserError, match="double precision"):
        device({"CONFIDE_DEVICE": "mps"})
    with pytest.raises(UserError, match="expected auto, cpu or cuda"):
        device({"CONFIDE_DEVICE": "tpu"})


def test_the_central_model_goes_to_where_a_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands in for a GPU: another device, to which a copy can be made."""
    sent: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: sent.append(tensor))
    trainer = make_trainer(RECIPE)
    member, central = RankTrainer(trainer, Place(0, 1)), torch.zeros(trainer.layout.size)
    assert member.receive(central) is central  # no copy where both are in main memory
    member.central = member.central.to("meta")
    assert str(member.receive(central).device) == "meta"
    assert str(member.receive(None).device) == "meta"
    assert [str(tensor.device) for tensor in sent] == ["cpu", "meta", "meta"]


def test_buffers_are_made_where_the_trainer_trains() -> None:
    trainer = make_trainer(RECIPE, "meta")
    member = RankTrainer(trainer, Place(0, 2))
    assert {str(t.device) for t in (trainer.plain.theta, member.sums, member.arrived, member.slice)} == {"meta"}


def test_a_step_made_anew_by_another_process_is_a_release_of_its_own_where_training_does_not_repeat() -> None:
    ledgers: list[Ledger] = []

    def make(header: dict[str, Any]) -> Ledger:
        ledgers.append(Ledger.create(None, header))
        return ledgers[-1]

    loop = make_loop(RECIPE, make)
    first, same, other = loop.start(), loop.start(), loop.start()
    loop.step(first)
    replace(loop).step(same)
    assert (loop.ledger.count, torch.equal(first.parameters, same.parameters)) == (1, True)
    replace(loop, environment="another process").step(other)
    assert loop.ledger.count == 2
    assert not torch.equal(first.parameters, other.parameters)  # other noise


@pytest.mark.usefixtures("four_gpus")
def test_ranks_on_gpus_mark_their_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the devices is real: the plan must not take a GPU's step for one that repeats itself."""
    monkeypatch.setattr("confide.build.Distributed", lambda *_: None)
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self)
    monkeypatch.setattr("confide.build.torch.empty_like", lambda like: like)
    marks = {make_loop(RECIPE, here=Place(0, 1)).environment for _ in range(2)}
    assert len(marks) == 2
    assert environment() not in marks


# One process


def test_training_by_way_of_a_device_gives_the_very_model_and_ledger_of_training_in_place() -> None:
    """The device is main memory here, to which everything is copied as it would be to a GPU."""
    plain, moved = make_loop(RECIPE), make_loop(RECIPE)
    assert isinstance(plain.engine, InProcess)
    moved.engine = OnDevice(make_trainer(RECIPE, "cpu"), torch.empty(moved.layout.size))
    one, other = plain.start(), moved.start()
    for _ in range(2):
        plain.step(one)
        moved.step(other)
    assert torch.equal(one.parameters, other.parameters)
    assert [e.event for e in plain.ledger.entries] == [e.event for e in moved.ledger.entries]


def test_only_the_sum_comes_back_from_a_device() -> None:
    trainer = make_trainer(RECIPE, "meta")
    engine, like = OnDevice(trainer, torch.empty(trainer.layout.size)), torch.empty(trainer.layout.size)
    assert not engine.traits.repeatable
    seen: list[str] = []

    def train(self: InProcess, central: Tensor, cohort: Any, step: int, total: Tensor, bounds: Any = None) -> str:
        seen.extend([str(central.device), str(total.device)])
        engine._total = torch.ones(trainer.layout.size)  # what a GPU would hold
        return "tally"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcess, "train", train)
        found: Any = engine.train(torch.zeros_like(like), np.arange(2), 0, like)
    assert (found, seen, float(like.sum())) == ("tally", ["meta", "meta"], trainer.layout.size)


@pytest.mark.usefixtures("four_gpus")
def test_a_plain_run_takes_the_gpu_that_is_there_and_marks_its_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the device is real: what is made for the GPU is made on `meta`."""
    monkeypatch.setattr("confide.build.device", lambda: torch.device("meta"))
    loops = [make_loop(RECIPE) for _ in range(2)]
    assert all(isinstance(loop.engine, OnDevice) for loop in loops)
    assert len({environment(), *(loop.environment for loop in loops)}) == 3
    assert str(loops[0].total.device) == "cpu"  # noise is added, and the central step made, in main memory


@pytest.mark.usefixtures("four_gpus")
def test_what_cannot_use_a_gpu_trains_on_the_processor_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shortcut = load("convex/digits")
    assert isinstance(make_loop(shortcut).engine, InProcess)
    assert not isinstance(make_loop(shortcut).engine, OnDevice)
    assert make_loop(shortcut).environment == environment()
    monkeypatch.setenv("CONFIDE_DEVICE", "cuda")
    with pytest.raises(UserError, match="has a short cut for these local steps"):
        make_loop(shortcut)
    with pytest.raises(UserError, match="2 workers train on the processor; drop --workers"):
        make_loop(RECIPE, workers=2)
    task = make_task(RECIPE.task, 0)
    monkeypatch.setattr(type(task), "on_gpu", False)
    with pytest.raises(UserError, match="computes its loss on the processor"):
        make_loop(RECIPE)


def test_the_command_refuses_a_device_that_is_not_there(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    monkeypatch.setenv("CONFIDE_DEVICE", "auto")  # and put back afterwards
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["train", "convex/digits", "--out", tmp_path / "run", "--set", "run.steps=5"]
    for name, said in (("cuda", "torch finds no GPU here"), ("mps", "double precision")):
        code, _, err = command(*words, "--device", name)
        assert (code, said in err, (tmp_path / "run").exists()) == (2, True, False)
    code, _, err = command(*words, "--device", "cpu")
    assert code == 0, err
