"""Norms of local gradients (PFL-ASR Figures 13 and 14): those of a plain loop, and nobody sees them unasked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide import recipe
from confide.federated.central import CentralStep
from confide.federated.cohort import PartTrainer
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.one_pass import OnePassTrainer
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask
from confide.runs.simulation import simulate
from confide.speech.model import ModelSettings
from support.utterances import Utterances

ASKED = "local.gradient_norms=true"


class Curves(BasicTask):
    """Users with one example each and a loss that bends, so that every step has another gradient."""

    name, metric = "curves", "value"
    data = torch.tensor([[1.0, -2.0], [0.5, 3.0], [torch.inf, 0.0]], dtype=torch.float64)

    @property
    def examples(self) -> np.ndarray:
        return np.ones(3, dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        return {name: torch.tensor([0.5, -0.3], dtype=torch.float64) for name in ("one", "other", "unused")}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return (self.data[user],)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return (batch[0] * parameters["one"]).sum().square() + (parameters["other"] ** 4 * batch[0] ** 2).sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"value": 0.0}


def by_hand(user: int, steps: int, rate: float, clip: float, mu: float) -> list[float]:
    """The norms of the whole gradient and of each tensor, mean over steps, by a loop that knows nothing of ours."""
    task = Curves()
    start = task.initial_parameters()
    weights, seen = {name: value.clone() for name, value in start.items()}, []
    for _ in range(steps):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        task.loss(leaves, (task.data[user],)).backward()  # type: ignore[no-untyped-call]
        found = {
            n: (0 if leaf.grad is None else leaf.grad) + mu * (weights[n] - start[n]) for n, leaf in leaves.items()
        }
        norms = [float(each.square().sum()) ** 0.5 for each in found.values()]
        whole = math.hypot(*norms)
        seen.append([whole, *norms])
        weights = {name: weights[name] - rate * min(1.0, clip / whole) * found[name] for name in weights}
    return [sum(column) / steps for column in zip(*seen, strict=True)]


def watched(*sets: str) -> list[dict[str, Any]]:
    """The records of a run on the digits."""
    records: list[dict[str, Any]] = []
    made = recipe.load("convex/digits", ["evaluation={every: 1}", *sets])
    simulate(made, watch=lambda loop, state, record: records.append(record))
    return records


def plain(**changes: Any) -> PlainTrainer:
    local = LocalTraining.model_validate({"steps": 3, "learning_rate": 0.1, "gradient_norms": True, **changes})
    task = Curves()
    return PlainTrainer(task, Layout.of(task.initial_parameters()), local, 0, flatten(task.initial_parameters()))


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("user", [0, 1])
def test_norms_are_those_of_a_plain_loop_before_the_clip_and_with_the_pull(user: int, mu: float) -> None:
    central = flatten(Curves().initial_parameters())
    update = plain(gradient_clip=0.5, proximal=mu).update(central, user, 0)
    assert update.watched is not None
    expected = by_hand(user, 3, 0.1, 0.5, mu)
    assert update.watched[0].tolist() == pytest.approx(expected, rel=1e-9)
    assert expected[0] > 0.5, "the clip shortens this gradient, and the norm is from before"


def test_what_is_watched_changes_no_update_and_nobody_watches_unasked() -> None:
    central = flatten(Curves().initial_parameters())
    asked, unasked = plain(gradient_clip=0.5), plain(gradient_clip=0.5, gradient_norms=False)
    delta = asked.update(central, 0, 0).delta.clone()
    assert torch.equal(delta, unasked.update(central, 0, 0).delta)
    assert unasked.update(central, 0, 0).watched is None


def test_one_pass_sees_the_gradients_that_the_plain_loop_sees() -> None:
    model = ModelSettings(layers=2, width=16, mlp=24, heads=2, mels=8, tokens=6)
    task = Utterances(model, [[40, 31], [90], [12, 55, 33]])
    layout, central = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    settings = {"steps": 1, "learning_rate": 0.1, "gradient_clip": 0.05, "gradient_norms": True}
    local, users = LocalTraining.model_validate(settings), np.arange(3)
    found = OnePassTrainer(task, layout, local, 0).updates(central, users, 0).watched
    reference = PlainTrainer(task, layout, local, 0, central)
    assert found is not None
    for row, user in zip(found, users, strict=True):
        expected = reference.update(central, int(user), 0).watched
        assert expected is not None
        torch.testing.assert_close(row, expected[0], rtol=2e-4, atol=2e-5 * float(expected[0, 0]))


def test_the_record_has_the_mean_over_users_whose_numbers_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    original = PartTrainer._add

    def add(trainer: PartTrainer, updates: Any, *others: Any) -> Any:
        seen.append(updates.watched)
        if len(seen) == 1:
            updates.losses[:] = torch.nan  # such a user counts for nothing
        return original(trainer, updates, *others)

    monkeypatch.setattr(PartTrainer, "_add", add)
    (record,) = watched("run={steps: 1}", "privacy={mechanism: none}", "local.steps=2", ASKED)
    whole, *tensors = torch.cat(seen[1:]).mean(dim=0).tolist()
    assert record["not_finite"] == 1
    assert record["gradient_norm"] == pytest.approx(whole, rel=1e-12)
    assert record["layers"]["gradient"] == pytest.approx(tensors, rel=1e-5)


def test_nothing_is_recorded_unasked_and_an_empty_cohort_has_a_record_too() -> None:
    sets = ("run={steps: 1}", "privacy={mechanism: none}")
    (unasked,) = watched(*sets)
    assert "gradient_norm" not in unasked
    assert "gradient" not in unasked["layers"]
    few = watched("run={steps: 6}", "privacy={mechanism: none}", ASKED, "sampling={kind: poisson, cohort: 1}")
    empty = [record for record in few if record["cohort"] == 0]
    assert 0 < len(empty) < len(few)
    assert all((each["gradient_norm"], each["layers"]["gradient"]) == (0.0, [0.0, 0.0]) for each in empty)


def test_the_norms_with_noise_are_those_of_what_moves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[list[float]] = []
    original = CentralStep.move

    def move(central: CentralStep, state: Any, gradient: Tensor) -> None:
        moved.append([float(piece.double().norm()) for piece in central.layout.pieces(gradient)])
        original(central, state, gradient)

    monkeypatch.setattr(CentralStep, "move", move)
    records = watched("run={steps: 2}", "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}")
    for record, norms in zip(records, moved, strict=True):
        assert record["layers"]["noisy"] == pytest.approx(norms, rel=1e-5)
        assert record["layers"]["noisy"] != pytest.approx(record["layers"]["signal"], rel=1e-3)


def test_short_cuts_leave_the_work_to_ways_that_can_be_watched() -> None:
    records: dict[bool, float] = {}
    for asked in (False, True):
        sets = ["run={steps: 2}", "evaluation={every: 1}", f"local.gradient_norms={str(asked).lower()}"]
        loop, state = simulate(recipe.load("convex/digits", sets))
        records[asked] = float(state.parameters.norm())
        assert loop.recipe.local.plain is not asked
    assert records[True] == pytest.approx(records[False], rel=1e-4)
