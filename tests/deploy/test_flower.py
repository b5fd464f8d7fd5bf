"""The Flower app gives the model of one process, and travels as codes and arrays; the grid here carries no network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower app needs Flower: pip install 'confide[flower]'")

from safetensors.torch import load_file

from confide.deploy import flower
from confide.deploy.parcels import Parcel
from confide.errors import UserError
from confide.privacy.budget import Budget
from confide.recipe import load
from confide.runs import folder
from confide.runs.simulation import simulate

RECIPE = """\
task: {kind: convex/quadratics, users: 2, dimension: 6, rank: 3}
sampling: {kind: fixed, cohort: 2}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: TRUST}
central: {kind: adam, learning_rate: 0.1}
run: {steps: 3}
"""


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SuperExec tells an app's process before it begins."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Two nodes that answer at once, each message by an app that has just begun."""

    def __init__(self, place: Path) -> None:
        self.place, self.numbers, self.replies = place, itertools.count(), dict[str, Any]()

    def get_node_ids(self) -> list[int]:
        return [70, 71]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        names = []
        for message in messages:
            names.append(f"m{next(self.numbers)}")
            user = message.metadata.dst_node_id - 70
            config = {"policy": str(self.place / f"policy-{user}.yaml"), "users": str(user)}
            message.metadata.__dict__["_message_id"] = names[-1]
            self.replies[names[-1]] = flower.answer(message, SimpleNamespace(node_config=config))
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        return [self.replies.pop(name) for name in names if name in self.replies]


def written(place: Path, trust: str, least: str = "central") -> dict[str, Any]:
    (place / "recipe.yaml").write_text(RECIPE.replace("TRUST", trust))
    for user in range(2):
        policy = {
            "servers": [{"address": "flower"}], "state": f"state-{user}", "trust": least, "noise_multiplier": 0.1,
            "epsilon": 100, "delta": 1e-5, "population": {"least": 2, "most": 2}, "rehearsal": True,
        }  # fmt: skip
        (place / f"policy-{user}.yaml").write_text(json.dumps(policy))
    return {"recipe": str(place / "recipe.yaml"), "out": str(place / "run"), "users": 2, "wait-for": 2, "minimum": 1.0}


@pytest.mark.parametrize("trust", ["central", "local"])
def test_a_run_in_flower_has_the_model_of_one_process(trust: str, tmp_path: Path) -> None:
    config = written(tmp_path, trust)
    flower.main(Grid(tmp_path), SimpleNamespace(run_config=config))
    alone, state = simulate(load(config["recipe"]))
    found = load_file(tmp_path / "run" / folder.MODEL)
    whole = np.concatenate([found[name].numpy().reshape(-1) for name in alone.layout.names])
    assert np.allclose(whole, state.parameters.numpy(), rtol=1e-6)
    assert folder.summary_of(tmp_path / "run")["steps"] == 3
    for user in range(2):  # one that a server claims for the whole run, or one for each answer
        assert (
            len(Budget.read(tmp_path / f"state-{user}" / "budget.jsonl").charges) == {"central": 1, "local": 3}[trust]
        )


def test_what_a_policy_refuses_travels_as_a_code(tmp_path: Path) -> None:
    written(tmp_path, "central", least="local")
    grid = Grid(tmp_path)
    (name,) = flower.GridLink(grid).grid.push_messages([_question({"told": "{}", "population": 2})])
    code, parcel, _ = flower.unpacked(grid.replies[name].content)
    assert (code or parcel.facts["refuses"]) in ("recipe", "trust")
    (tmp_path / "policy-0.yaml").write_text("servers: [{address: elsewhere:1}]")
    (name,) = grid.push_messages([_question({})])
    assert flower.unpacked(grid.replies[name].content)[0] == "failed"


def _question(facts: dict[str, Any]) -> Any:
    from flwr.app import Message

    return Message(flower.packed("join", Parcel(facts)), dst_node_id=70, message_type="train")


def test_distributed_trust_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keeps nothing between two messages"):
        flower.main(Grid(tmp_path), SimpleNamespace(run_config=written(tmp_path, "distributed")))
