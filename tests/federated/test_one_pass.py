"""Users in one pass: their gradients agree with autograd, one user after the other, for every setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.engines.costs import expected_costs
from confide.engines.engine import InProcess
from confide.engines.processes import Processes
from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer, part_size
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.one_pass import OnePassTrainer, users_at_once
from confide.federated.parameters import Layout, flatten
from confide.federated.taps import Derived, Taps, layer_norm, linear
from confide.speech import together
from confide.speech.augment import SpecAugment
from confide.speech.model import ModelSettings
from support.utterances import Utterances

SMALL: dict[str, Any] = {"layers": 2, "width": 16, "mlp": 24, "heads": 2, "mels": 8, "tokens": 6}
USERS = [[40, 31], [90], [12, 55, 33], [2], [61, 61]]


def _local(**changes: Any) -> LocalTraining:
    """The plain path takes the update from weights that were rounded; at a large rate that does not show."""
    return LocalTraining.model_validate({"steps": 1, "learning_rate": 1000.0, **changes})


def _task(frames: Sequence[Sequence[int]] = USERS, augmented: SpecAugment | None = None, **model: Any) -> Utterances:
    return Utterances(ModelSettings(**{**SMALL, **model}), frames, augmented)


def _close(one: Tensor, other: Tensor, whole: float) -> None:
    assert float((one - other).norm()) <= 1e-4 * float(other.norm()) + 1e-5 * whole


def _agrees_with_autograd(task: Utterances, local: LocalTraining, start: Tensor | None = None) -> None:
    layout, central = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    central = central if start is None else start
    users, step = np.arange(len(task.examples)), 3
    updates = OnePassTrainer(task, layout, local, seed=2).updates(central, users, step)
    plain = PlainTrainer(task, layout, local, seed=2, like=central)
    for row, user in enumerate(users):
        reference = plain.update(central, int(user), step)
        whole = float(reference.norms.norm())
        factors = torch.zeros(len(users), len(layout.names), dtype=torch.float64)
        factors[row] = 1.0
        found = torch.zeros_like(central)
        updates.weighted_sum(factors, found)
        for one, other in zip(layout.pieces(found), layout.pieces(reference.delta), strict=True):
            _close(one, other, whole)
        torch.testing.assert_close(updates.norms[row], reference.norms[0], rtol=2e-4, atol=2e-5 * whole)
        assert bool((layout.norms(found) <= updates.norms[row] * (1 + 1e-6)).all())  # what is bounded is what is sent
        torch.testing.assert_close(updates.losses[row], reference.losses[0], rtol=1e-5, atol=1e-6)


@given(
    frames=st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=3), min_size=1, max_size=5),
    norm=st.sampled_from(["pre", "post"]),
    local=st.fixed_dictionaries(
        {},
        optional={
            "gradient_clip": st.sampled_from([0.05, 1.0, 1e9]),
            "divide_by_learning_rate": st.just(True),
            "proximal": st.just(0.5),
            "batch_size": st.integers(1, 3),
            "batch_seconds": st.floats(0.1, 2),
        },
    ),
    augmented=st.booleans(),
    shift=st.sampled_from([0.0, 30.0]),
)
@settings(max_examples=30, deadline=None)
def test_one_pass_equals_autograd(
    frames: list[list[int]], norm: str, local: dict[str, Any], augmented: bool, shift: float
) -> None:
    masks = SpecAugment(frequency_width=3, time_masks=2) if augmented else None
    task = _task(frames, masks, norm=norm, cape_shift=shift)
    try:
        _agrees_with_autograd(task, _local(**local))
    except AssertionError:  # a ReLU that is zero but for rounding may fall on either side: not so a little further on
        start = flatten(task.initial_parameters())
        nudge = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
        _agrees_with_autograd(task, _local(**local), start + 1e-4 * nudge)


def test_it_is_exact_away_from_the_start_too() -> None:
    """A fresh model has scales of one and biases of zero, which hide what is forgotten of them."""
    task = _task()
    start = flatten(task.initial_parameters())
    start += 0.3 * torch.from_numpy(np.random.default_rng(0).normal(size=len(start)).astype(np.float32))
    _agrees_with_autograd(task, _local(), start)


def test_it_is_exact_where_products_are_large_enough_for_another_library() -> None:
    _agrees_with_autograd(Utterances(ModelSettings(layers=1), [[200, 160], [300], [120, 130]]), _local())


def test_the_bounds_of_a_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_PASS_SECONDS", 0.9)
    _agrees_with_autograd(_task(), _local())


def _trainers(task: Utterances, local: LocalTraining, bounding: dict[str, Any]) -> tuple[PartTrainer, PartTrainer]:
    layout, central = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    rule, weights = bounder(Bounding.model_validate(bounding), layout), np.arange(1.0, len(task.examples) + 1)
    fast, plain = (PartTrainer(task, layout, local, rule, weights, 1, central) for _ in range(2))
    assert fast.one_pass is not None
    plain.one_pass = None
    return fast, plain


@pytest.mark.parametrize("rule", ["clip", "per_layer_clip", "normalise", "per_layer_normalise", "none"])
def test_a_part_is_the_same_with_every_bounding_rule(rule: str) -> None:
    task, local = _task(), _local(gradient_clip=0.7)
    trainers = _trainers(task, local, {"rule": rule, "bound": None if rule == "none" else 300.0})
    central = flatten(task.initial_parameters())
    sums = [torch.zeros_like(central) for _ in trainers]
    tallies = [t.add_part(central, np.arange(5), 0, total) for t, total in zip(trainers, sums, strict=True)]
    _close(sums[0], sums[1], float(sums[1].norm()))
    for name in ("users", "bounded", "not_finite"):
        assert getattr(tallies[0], name) == getattr(tallies[1], name)
    for name in ("loss", "norm", "bounded_norm", "layer_norms", "layer_bounded"):
        assert getattr(tallies[0], name) == pytest.approx(getattr(tallies[1], name), rel=2e-4)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_user_whose_numbers_are_not_finite_adds_nothing_and_spoils_nobody(bad: float, clip: float | None) -> None:
    task, local = _task([[40, 31], [35, 33], [38]]), _local(gradient_clip=clip)
    central = flatten(task.initial_parameters())
    good = torch.zeros_like(central)
    fast, plain = _trainers(task, local, {"rule": "clip", "bound": 1.0})
    for user in (0, 2):
        plain.add_part(central, np.array([user]), 0, good)
    task.features[1][1][7] = bad
    total = torch.zeros_like(central)
    tally = fast.add_part(central, np.arange(3), 0, total)
    assert (tally.users, tally.not_finite) == (3, 1)
    _close(total, good, float(good.norm()))


def test_a_target_too_long_for_its_frames_adds_zero() -> None:
    task = _task([[40, 31], [9], [30]])
    task.labels[0][1], task.labels[1][0] = np.tile([1, 2], 20), np.tile([3, 4], 9)
    _agrees_with_autograd(task, _local())
    updates = OnePassTrainer(task, Layout.of(task.initial_parameters()), _local(), 2).updates(
        flatten(task.initial_parameters()), np.arange(3), 0
    )
    assert float(updates.norms[1].norm()) == 0.0 < float(updates.norms[0].norm())


def _make() -> PartTrainer:
    return _trainers(_task(USERS * 12), _local(), {"rule": "clip", "bound": 1.0})[0]


def test_two_workers_give_the_bytes_of_one() -> None:
    trainer, cohort = _make(), np.random.default_rng(0).permutation(60)[:41]
    central = flatten(trainer.task.initial_parameters())
    one, two = torch.empty_like(central), torch.empty_like(central)
    InProcess(trainer).train(central, cohort, 0, one)
    costs = expected_costs(trainer.task, trainer.local)
    engine = Processes(partial(_make), 2, central, trainer.part_size, costs)
    try:
        engine.train(central, cohort, 0, two)
    finally:
        engine.close()
    assert trainer.part_size < len(cohort)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("model", "local"),
    [
        ({"dropout": 0.1}, {}),
        ({"layer_drop": 0.1}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"checkpoint_activations": True}, {}),
        ({}, {"steps": 2}),
        ({}, {"steps": None, "epochs": 2}),
        ({}, {"steps": None, "epochs": 1, "batch_size": 1}),
        ({"preset": "baseline", "width": 768, "mlp": 3072, "layers": 36}, {}),
    ],
)
def test_where_one_pass_would_be_wrong_or_large_the_plain_path_is_taken(
    model: dict[str, Any], local: dict[str, Any]
) -> None:
    task = _task(**model)
    layout = Layout.of(task.initial_parameters()) if "preset" not in model else Layout(("w",), ((255_000_000,),))
    assert users_at_once(_task(), _local(), Layout.of(_task().initial_parameters())) > 1
    assert users_at_once(task, _local(**local), layout) == 0


def test_users_with_much_data_go_one_by_one() -> None:
    """A pool of users with a large batch each, as central training has, keeps parts that many workers can share."""
    few, many = _task([[150, 150]] * 9), _task([[300] * 9] * 3)
    layout = Layout.of(few.initial_parameters())
    assert part_size(few, _local(), layout) == 10
    assert part_size(few, _local(batch_size=1), layout) == 21
    assert part_size(many, _local(), layout) == 1
    assert part_size(many, _local(batch_seconds=4), layout) == 8


def test_a_tensor_that_is_used_without_a_tap_is_refused() -> None:
    start = {"w": torch.ones(2, 3), "s": torch.ones(2)}
    taps = Taps(start, {name: torch.zeros(1, *value.shape) for name, value in start.items()})
    taps.begin([0])
    torch.autograd.backward((linear(taps, torch.ones(1, 4, 3), "w") * taps["s"]).sum())
    with pytest.raises(TypeError, match="s was used without a tap"):
        taps.finish()


def test_a_tensor_that_is_used_twice_gets_both_gradients() -> None:
    """As shared weights do, once as they are and once through a function of them."""
    draw = np.random.default_rng(0)
    start = {"w": torch.from_numpy(draw.normal(size=(3, 3))), "b": torch.from_numpy(draw.normal(size=3))}
    x = torch.from_numpy(draw.normal(size=(4, 5, 3)))
    double = Derived(lambda weight: 2 * weight.T, ("w",))

    def losses(parameters: Any) -> Tensor:
        inner = torch.tanh(linear(parameters, x, "w", "b"))
        inner = layer_norm(parameters, linear(parameters, inner, double, Derived(torch.exp, ("b",))), "b", "b", 1e-5)
        return inner.square().sum(dim=(1, 2))

    owners = [0, 1, 1, 0]
    taps = Taps(start, {name: torch.zeros(2, *value.shape, dtype=torch.float64) for name, value in start.items()})
    taps.begin(owners)
    torch.autograd.backward(losses(taps).sum())
    taps.finish()
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    for user in range(2):
        mine = losses(leaves)[torch.tensor(owners) == user].sum()
        for name, expected in zip(leaves, torch.autograd.grad(mine, list(leaves.values())), strict=True):
            torch.testing.assert_close(taps.gradients[name][user], expected)


# What users in one pass have to do with each other


def test_who_else_is_in_a_cohort_changes_the_last_bits_of_what_a_user_adds_and_no_more() -> None:
    draw, largest = np.random.default_rng(0), 0.0
    for _ in range(3):
        frames = [draw.integers(2, 90, size=draw.integers(1, 4)).tolist() for _ in range(8)]
        task, local = _task(frames), _local()
        layout, central = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
        trainer = OnePassTrainer(task, layout, local, seed=2)
        for user in range(2):
            sent = []
            for users in (7, 8):  # with the last user and without
                factors, into = torch.zeros(users, len(layout.names), dtype=torch.float64), torch.zeros_like(central)
                factors[user] = 1.0
                trainer.updates(central, np.arange(users), 3).weighted_sum(factors, into)
                sent.append(into.double())
            largest = max(largest, float((sent[0] - sent[1]).norm() / sent[0].norm()))
    assert largest < 1e-5
