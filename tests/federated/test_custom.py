"""Claims about tasks that a user brings. That one trains, is in the documents, which are run (test_docs)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from confide import recipe
from confide.errors import Stopped, UserError
from confide.federated.custom import PythonTaskSettings
from confide.runs import folder

pytestmark = pytest.mark.usefixtures("own_code")

MODULE = """
from confide.federated.custom import BasicTask

class Heir(BasicTask): ...

def heir(options, seed):
    return Heir()

class Half:
    name = "half"

    def loss(self, parameters, batch): ...

def make(options, seed):
    return Half()
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nowhere_to_be_found:make", "No module named 'nowhere_to_be_found'; run in the folder"),
        ("half_a_task:other", "half_a_task has no other"),
        ("half_a_task:heir", "Heir that it made has no name, metric, examples, initial_parameters, batch, loss"),
        ("half_a_task:make", "Half that it made has no metric, examples, initial_parameters, batch, evaluate"),
    ],
)
def test_what_is_missing_is_named(factory: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with pytest.raises(UserError, match=said):
        PythonTaskSettings(factory=factory).make(0)


@pytest.mark.parametrize("factory", ["mine", "mine:", ":make", "mine:make()", "os.path:join:x", "../mine:make"])
def test_a_factory_is_a_module_and_a_name(factory: str) -> None:
    with pytest.raises(UserError, match=r"task\.factory=.*: expected module:function"):
        recipe.load("convex/digits", [f"task={{kind: python, factory: '{factory}'}}"])


OUTSIDER = """
import numpy as np, torch

class Outsider:
    name, metric = "outsider", "loss"
    examples = np.ones(4, dtype=np.int64)

    def __init__(self, options, seed):
        self.start = float(options["start"])

    def initial_parameters(self):
        return {"w": torch.full((2,), self.start)}

    def batch(self, user, examples, draw):
        return (torch.tensor(float(user)),)

    def loss(self, parameters, batch):
        return (parameters["w"] - batch[0]).square().sum()

    def evaluate(self, parameters):
        return {"loss": float(self.loss(parameters, (torch.tensor(0.0),)))}

    def seconds(self, user):
        return np.array([1.5])
"""


def test_a_task_that_inherits_nothing_gets_the_defaults_for_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outsider_task.py").write_text(OUTSIDER)
    monkeypatch.chdir(tmp_path)
    sets = ["task={kind: python, factory: 'outsider_task:Outsider', options: {start: 3}}", "sampling.cohort=2"]
    plain = ["local={epochs: 1, learning_rate: 0.1}", "privacy={mechanism: none}", "run.steps=5"]
    wanted = recipe.load("convex/digits", [*sets, *plain])
    task = wanted.task.make(0)
    again = pickle.loads(pickle.dumps(task))  # noqa: S301  as for worker processes
    for each in (task, again):
        assert (each.name, each.fingerprint, each.left_out) == ("outsider", {}, {})
        assert each.scored(each.initial_parameters()) is None
        assert each.users_at_once(wanted.local) == 0
        seconds = each.seconds(0)
        assert seconds is not None
        assert seconds.tolist() == [1.5]
        assert each.starting_parameters()["w"].tolist() == [3.0, 3.0]
        assert each.begins_elsewhere is False
    assert folder.train(wanted, tmp_path / "run", quiet=True)["metrics"]["loss"] < 18


STARTS = """
import torch
from confide.federated.task import BasicTask
from outsider_task import Outsider

class Stranger(Outsider):  # inherits nothing of ours
    def starting_parameters(self):
        return {"w": torch.tensor([1.5, 1.5])}  # the mean of what the users hold

class Heir(Outsider, BasicTask):
    starting_parameters = Stranger.starting_parameters

class Bound(Outsider, BasicTask):
    def __init__(self, options, seed):
        super().__init__(options, seed)
        self.starting_parameters = lambda: {"w": torch.tensor([1.5, 1.5])}

class Plain(Outsider, BasicTask): ...
"""


@pytest.mark.parametrize(("name", "elsewhere"), [("Stranger", True), ("Heir", True), ("Bound", True), ("Plain", False)])
def test_a_task_that_brings_its_own_start_is_not_covered_by_the_guarantee(
    name: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    (tmp_path / "outsider_task.py").write_text(OUTSIDER)
    (tmp_path / "task_with_a_start.py").write_text(STARTS)
    monkeypatch.chdir(tmp_path)
    sets = [f"task={{kind: python, factory: 'task_with_a_start:{name}', options: {{start: 3}}}}", "sampling.cohort=2"]
    wanted = recipe.load("convex/digits", [*sets, "local={epochs: 1, learning_rate: 0.1}", "run.steps=5"])
    summary = folder.train(wanted, tmp_path / "run", quiet=True)
    assert summary["begins_elsewhere"] is elsewhere
    assert ("what the starting model was trained on" in summary["guarantee"]) is elsewhere


FINGERPRINTED = """
from pathlib import Path
from confide.files import digest
from outsider_task import Outsider

class Noted(Outsider):
    fingerprint = property(lambda self: {"the users' data": digest([Path("held.txt").read_text()])})
"""


@pytest.mark.parametrize(("module", "told"), [("noted_task:Noted", True), ("outsider_task:Outsider", False)])
def test_a_task_of_your_own_is_refused_over_changed_data_if_it_has_a_fingerprint(
    module: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None,
    signal_after: Callable[..., AbstractContextManager[None]],
) -> None:  # fmt: skip
    (tmp_path / "outsider_task.py").write_text(OUTSIDER)
    (tmp_path / "noted_task.py").write_text(FINGERPRINTED)
    (tmp_path / "held.txt").write_text("what the users hold")
    monkeypatch.chdir(tmp_path)
    sets = [f"task={{kind: python, factory: '{module}', options: {{start: 3}}}}", "sampling.cohort=2", "run.steps=6"]
    with signal_after(1), pytest.raises(Stopped):
        folder.train(
            recipe.load("convex/digits", [*sets, "local={epochs: 1, learning_rate: 0.1}"]), tmp_path / "run", quiet=True
        )
    (tmp_path / "held.txt").write_text("something else")
    if told:
        with pytest.raises(UserError, match="the users' data changed since the run began"):
            folder.resume(tmp_path / "run", quiet=True)
    else:
        assert folder.resume(tmp_path / "run", quiet=True)["steps"] == 6
