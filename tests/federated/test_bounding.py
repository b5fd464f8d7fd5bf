"""Claims about bounding: what a user really adds to the sum is never longer than C, whatever the update was.

The factors are put to work as the loop does it: through `PlainUpdate.weighted_sum` on float32 vectors, whose norm is
then taken in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from confide.errors import UserError
from confide.federated.bounding import ROUNDING, Adaptive, Bounder, Bounding, bounder
from confide.federated.cohort import PartTrainer, Tally
from confide.federated.local import LocalTraining, PlainUpdate, Updates
from confide.federated.measures import Measures
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask

torch.set_num_threads(1)

# A property holds on a busy machine as well.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

Rule = Literal["clip", "per_layer_clip", "normalise", "per_layer_normalise"]
Split = Literal["uniform", "dim", "root", "weighted", "learned"]
RULES: tuple[Rule, ...] = get_args(Rule)
SPLITS: tuple[Split, ...] = get_args(Split)
FLOAT32 = 1e-6
"""How closely a float32 vector can be scaled, and more."""

shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)
layouts = shapes.map(lambda found: Layout(tuple(f"layer{i}" for i in range(len(found))), tuple(found)))
bounds = st.floats(-4, 4).map(lambda exponent: 10.0**exponent)
exponents = st.floats(-15, 15)


@st.composite
def updates(draw: st.DrawFn, sizes: st.SearchStrategy[float] = exponents) -> PlainUpdate:
    """Tensors of very different lengths, some of them zero, in float32 as a user sends them."""
    layout = draw(layouts)
    values = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Sizes of their own for half of the updates; otherwise one for all tensors, so that none drowns the others.
    common = draw(st.one_of(st.none(), sizes))
    pieces = []
    for size in layout.sizes:
        length = 0.0 if draw(st.integers(0, 7)) == 0 else 10.0 ** (draw(sizes) if common is None else common)
        direction = values.standard_normal(size)
        pieces.append(length * direction / np.linalg.norm(direction))
    return update_of(torch.from_numpy(np.concatenate(pieces)).float(), layout)


def update_of(delta: Tensor, layout: Layout) -> PlainUpdate:
    return PlainUpdate(delta, layout, layout.norms(delta).unsqueeze(0), torch.zeros(1, dtype=torch.float64))


@st.composite
def rules(draw: st.DrawFn, names: tuple[str, ...] = RULES) -> Bounding:
    weights = draw(st.dictionaries(st.sampled_from(["layer0", "layer1", "*"]), st.floats(0.01, 100), max_size=3))
    return Bounding.model_validate(
        {
            "rule": draw(st.sampled_from(names)),
            "bound": draw(bounds),
            "split": draw(st.sampled_from(SPLITS)),
            "layer_weights": weights,
        }
    )


def rule_of(rule: str, bound: float | None = 1.0, split: str = "uniform", **more: Any) -> Bounding:
    return Bounding.model_validate({"rule": rule, "bound": bound, "split": split, **more})


def sent(update: PlainUpdate, rule: Bounder, weight: float = 1.0) -> Tensor:
    """What lands in the sum."""
    into = torch.zeros_like(update.delta)
    update.weighted_sum(rule.factors(update.norms) * weight, into)
    return into


def length(vector: Tensor) -> float:
    return float(vector.double().norm())


def lengths(vector: Tensor, layout: Layout) -> list[float]:
    return [length(piece) for piece in layout.pieces(vector)]


# The bound


@settings(CALM, max_examples=250)
@given(update=updates(), rule=rules(), weight=st.floats(1e-6, 1))
def test_what_is_sent_never_exceeds_the_bound(update: PlainUpdate, rule: Bounding, weight: float) -> None:
    made = bounder(rule, update.layout)
    assert rule.bound is not None
    assert made.sensitivity == rule.bound
    assert length(sent(update, made)) <= rule.bound
    assert length(sent(update, made, weight)) <= weight * rule.bound


@settings(CALM, max_examples=100)
@given(update=updates(), rule=rules(("per_layer_clip", "per_layer_normalise")))
def test_per_layer_rules_hold_every_tensor_that_they_scale_to_its_own_bound(
    update: PlainUpdate, rule: Bounding
) -> None:
    made = bounder(rule, update.layout)
    assert rule.bound is not None
    if rule.rule == "per_layer_clip" or length(update.delta) > rule.bound * (1 + FLOAT32):
        for found, limit in zip(lengths(sent(update, made), update.layout), made.layer_bounds.tolist(), strict=True):
            assert found <= limit


@pytest.mark.parametrize(("large", "small"), [(1, 1e-4), (1, 2.4e-4), (8, 2.4e-4), (64, 1e-4), (1, 0.7)])
def test_many_small_numbers_beside_a_large_one_count_towards_the_bound(large: int, small: float) -> None:
    """A sum of squares in float32 loses them: 1 + 1e-8 is 1, however often it is added."""
    layout = Layout(("w",), ((16_384,),))
    delta = torch.full((16_384,), small)
    delta[:large] = 1.0
    found = {rule: length(sent(update_of(delta, layout), bounder(rule_of(rule), layout))) for rule in RULES}
    assert max(found.values()) <= 1.0, found


class Stub(BasicTask):
    """A task of two users; the update of the first one is given, and the second one never takes part."""

    name, metric = "stub", "none"
    examples = np.ones(2, dtype=np.int64)

    def __init__(self, update: PlainUpdate) -> None:
        self.given = update

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.given.layout.views(torch.zeros_like(self.given.delta))

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        raise NotImplementedError

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return self.given


def added(update: PlainUpdate, rule: Bounding, weights: np.ndarray) -> tuple[Tensor, Tally]:
    """What the first user adds to the sum of its part."""
    task, like = Stub(update), torch.zeros_like(update.delta)
    local, made = LocalTraining(steps=1, learning_rate=1.0), bounder(rule, update.layout)
    trainer = PartTrainer(task, update.layout, local, made, weights, 0, like)
    into = like.clone()
    return into, trainer.add_part(like, np.array([0]), 0, into)


@settings(CALM, max_examples=200)
@given(
    update=updates(st.one_of(st.floats(-44, 38), st.floats(30, 38.4), st.floats(-44, -30))),
    rule=rules(),
    weight=st.floats(1e-6, 1),
)
def test_no_float32_at_all_breaks_the_bound(update: PlainUpdate, rule: Bounding, weight: float) -> None:
    """An update can be as long or as short as float32 allows: a user who diverged, or one who hardly moved."""
    assert rule.bound is not None
    into, _ = added(update, rule, np.array([weight, 1 - weight]))
    assert bool(torch.isfinite(into).all())
    assert length(into) <= weight * rule.bound


@pytest.mark.parametrize("rule", RULES)
def test_a_user_who_hardly_moved_is_no_error(rule: str) -> None:
    layout = Layout(("w",), ((2,),))
    into, _ = added(update_of(torch.tensor([1e-42, 2e-42]), layout), rule_of(rule), np.array([0.5, 0.5]))
    assert length(into) <= 0.5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bound", [1.0, 1e-2, 1e-5])
def test_a_user_who_diverged_stays_within_the_bound(rule: str, bound: float) -> None:
    layout = Layout(("w",), ((2,),))
    into, _ = added(update_of(torch.tensor([3e38, 1e38]), layout), rule_of(rule, bound), np.array([1e-3, 1 - 1e-3]))
    assert length(into) <= 1e-3 * bound


@pytest.mark.parametrize("rule", [*RULES, "none"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_update_that_is_not_finite_adds_nothing(rule: str, value: float) -> None:
    layout = Layout(("a", "b"), ((2,), (3,)))
    settings = rule_of(rule, None if rule == "none" else 1.0)
    into, tally = added(update_of(torch.tensor([1.0, 2.0, 3.0, value, 0.0]), layout), settings, np.array([0.5, 0.5]))
    assert not bool(into.any())
    assert (tally.users, tally.not_finite) == (1, 1)


# The split over layers


@settings(CALM, max_examples=60)
@given(layout=layouts, rule=rules())
def test_squares_of_the_layer_bounds_sum_to_the_square_of_the_bound(layout: Layout, rule: Bounding) -> None:
    assert rule.bound is not None
    made = bounder(rule, layout)
    assert float(made.layer_bounds.square().sum()) == pytest.approx(rule.bound**2, rel=1e-12)
    assert bool((made.layer_bounds > 0).all())


@settings(CALM, max_examples=60)
@given(layout=layouts, bound=bounds)
def test_weighted_with_all_weights_alike_is_dim(layout: Layout, bound: float) -> None:
    dim = bounder(rule_of("per_layer_clip", bound, "dim"), layout).layer_bounds
    for weights in ({}, {"*": 1.0}, {"layer0": 1.0}, {"*": 7.0}):
        weighted = rule_of("per_layer_clip", bound, "weighted", layer_weights=weights)
        torch.testing.assert_close(bounder(weighted, layout).layer_bounds, dim, rtol=1e-12, atol=0)


MODEL = Layout(("encoder.0.attention.wqkv", "encoder.0.norm", "encoder.1.norm", "head"), ((4, 3), (3,), (3,), (2, 3)))


@pytest.mark.parametrize(
    ("split", "weights", "shares"),
    [
        ("uniform", {}, [1, 1, 1, 1]),
        ("dim", {}, [12, 3, 3, 6]),
        ("root", {}, [12**0.5, 3**0.5, 3**0.5, 6**0.5]),
        ("weighted", {"*norm": 4.0}, [12, 12, 12, 6]),
        ("weighted", {"encoder.0.*": 2.0, "*norm": 4.0}, [24, 6, 12, 6]),
        ("weighted", {"*norm": 4.0, "encoder.0.*": 2.0}, [24, 12, 12, 6]),
        ("weighted", {"*": 3.0, "head": 100.0}, [12, 3, 3, 6]),
        ("weighted", {"head": 0.5, "*": 3.0}, [36, 9, 9, 3]),
        ("weighted", {"HEAD": 9.0, "nor?": 9.0, "norm": 9.0}, [12, 3, 3, 6]),
    ],
)
def test_layer_bounds_have_their_closed_form_and_the_first_pattern_counts(
    split: str, weights: dict[str, float], shares: list[float]
) -> None:
    found = bounder(rule_of("per_layer_clip", 5.0, split, layer_weights=weights), MODEL).layer_bounds
    assert found.tolist() == pytest.approx([5.0 * math.sqrt(share / sum(shares)) for share in shares], rel=1e-12)


def test_the_plain_share_of_the_dimension_would_not_keep_the_bound() -> None:
    """PFL-ASR section 3 prints C_h = C d_h / sum d; Definition 3's root is what has the sum of squares C^2."""
    found = bounder(rule_of("per_layer_clip", 1.0, "dim"), MODEL).layer_bounds
    printed = torch.tensor([12.0, 3.0, 3.0, 6.0], dtype=torch.float64) / 24
    assert float(found.square().sum()) == pytest.approx(1.0, rel=1e-12)
    assert float(printed.square().sum()) < 0.4


# Each rule is what its paper says


@settings(CALM, max_examples=100)
@given(update=updates(), bound=bounds)
def test_normalise_gives_every_update_the_length_of_the_bound(update: PlainUpdate, bound: float) -> None:
    found = sent(update, bounder(rule_of("normalise", bound), update.layout))
    if length(update.delta) == 0:
        assert not bool(found.any())
    else:
        assert length(found) == pytest.approx(bound * (1 - 1e-6), rel=2e-7)
        assert_same_direction(found, update.delta)


@settings(CALM, max_examples=100)
@given(update=updates(), bound=bounds)
def test_clip_leaves_short_updates_and_shortens_long_ones(update: PlainUpdate, bound: float) -> None:
    found = sent(update, bounder(rule_of("clip", bound), update.layout))
    if length(update.delta) <= bound:
        torch.testing.assert_close(found, update.delta, rtol=2 * FLOAT32, atol=0)
    else:
        assert length(found) == pytest.approx(bound, rel=2 * FLOAT32)
        assert_same_direction(found, update.delta)


@settings(CALM, max_examples=100)
@given(update=updates(), bound=bounds, split=st.sampled_from(SPLITS))
def test_per_layer_clip_clips_each_tensor_on_its_own(update: PlainUpdate, bound: float, split: str) -> None:
    made = bounder(rule_of("per_layer_clip", bound, split), update.layout)
    before, after = lengths(update.delta, update.layout), lengths(sent(update, made), update.layout)
    expected = [min(b, limit) for b, limit in zip(before, made.layer_bounds.tolist(), strict=True)]
    assert after == pytest.approx(expected, rel=2 * FLOAT32, abs=0)


@settings(CALM, max_examples=100)
@given(update=updates(), bound=bounds, split=st.sampled_from(SPLITS))
def test_per_layer_normalise_leaves_short_updates_and_sets_every_tensor_of_long_ones(
    update: PlainUpdate, bound: float, split: str
) -> None:
    made = bounder(rule_of("per_layer_normalise", bound, split), update.layout)
    found = sent(update, made)
    assume(abs(length(update.delta) / bound - 1) > FLOAT32)
    if length(update.delta) <= bound:
        torch.testing.assert_close(found, update.delta, rtol=2 * FLOAT32, atol=0)
        return
    for before, after, limit in zip(
        lengths(update.delta, update.layout), lengths(found, update.layout), made.layer_bounds.tolist(), strict=True
    ):
        assert after == pytest.approx(0.0 if before == 0 else limit, rel=2 * FLOAT32, abs=0)


@settings(CALM, max_examples=60)
@given(update=updates(), scale=st.floats(1e-3, 0.999))
def test_clip_is_normalise_for_updates_longer_than_the_bound(update: PlainUpdate, scale: float) -> None:
    bound = scale * length(update.delta) or 1.0
    clip, normalise = (sent(update, bounder(rule_of(rule, bound), update.layout)) for rule in ("clip", "normalise"))
    assert torch.equal(clip, normalise)


@settings(CALM, max_examples=60)
@given(update=updates(), split=st.sampled_from(SPLITS), scale=st.floats(0.01, 0.9))
def test_per_layer_clip_is_per_layer_normalise_when_every_tensor_is_too_long(
    update: PlainUpdate, split: str, scale: float
) -> None:
    shortest = min(lengths(update.delta, update.layout))
    bound = scale * shortest or 1.0
    clip, normalise = (
        sent(update, bounder(rule_of(f"per_layer_{kind}", bound, split), update.layout))
        for kind in ("clip", "normalise")
    )
    assert torch.equal(clip, normalise) or shortest == 0


@settings(CALM, max_examples=60)
@given(update=updates(), bound=st.none() | bounds)
def test_none_leaves_everything_as_it_is_and_promises_nothing(update: PlainUpdate, bound: float | None) -> None:
    made = bounder(rule_of("none", bound), update.layout)
    assert torch.equal(sent(update, made), update.delta)
    assert made.sensitivity == math.inf


@pytest.mark.parametrize("rule", RULES)
def test_nothing_stays_nothing(rule: str) -> None:
    zero = update_of(torch.zeros(MODEL.size), MODEL)
    made = bounder(rule_of(rule), MODEL)
    assert bool(torch.isfinite(made.factors(zero.norms)).all())
    assert not bool(sent(zero, made).any())


def test_factors_of_many_users_are_those_of_each() -> None:
    norms = torch.rand(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    for rule in RULES:
        made = bounder(rule_of(rule, 1.5, "dim"), MODEL)
        one_by_one = torch.cat([made.factors(row[None]) for row in norms])
        assert torch.equal(made.factors(norms), one_by_one)


@dataclass
class Case:
    rule: str
    factors: list[float]


@pytest.mark.parametrize(
    "case",
    [
        Case("clip", [0.4, 0.4]),
        Case("normalise", [0.4, 0.4]),
        Case("per_layer_clip", [math.sqrt(2) / 3, math.sqrt(2) / 4]),
        Case("per_layer_normalise", [math.sqrt(2) / 3, math.sqrt(2) / 4]),
        Case("none", [1 / ROUNDING, 1 / ROUNDING]),
    ],
    ids=lambda case: case.rule,
)
def test_factors_of_a_known_update(case: Case) -> None:
    """Norms 3 and 4, so 5 together, bound 2 and so sqrt(2) a tensor."""
    layout = Layout(("a", "b"), ((10,), (1,)))
    found = bounder(rule_of(case.rule, 2.0), layout).factors(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx([f * ROUNDING for f in case.factors], rel=1e-12)


def test_a_short_tensor_of_a_long_update_is_scaled_up_only_by_the_rules_that_normalise() -> None:
    layout = Layout(("a", "b"), ((1,), (1,)))
    norms = torch.tensor([[10.0, 0.01]], dtype=torch.float64)
    found = {rule: bounder(rule_of(rule), layout).factors(norms)[0, 1].item() for rule in RULES}
    assert found["per_layer_normalise"] == pytest.approx(math.sqrt(0.5) / 0.01, rel=1e-5)
    assert found["per_layer_clip"] == pytest.approx(1.0, rel=1e-5)
    assert found["clip"] == found["normalise"] == pytest.approx(0.1, rel=1e-3)


def assert_same_direction(found: Tensor, wanted: Tensor) -> None:
    one, other = found.double(), wanted.double()
    torch.testing.assert_close(one / one.norm(), other / other.norm(), rtol=0, atol=FLOAT32)


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "cut"},
        {"bound": 0},
        {"bound": -1},
        {"bound": math.inf},
        {"bound": math.nan},
        {"split": "even"},
        {"layer_weights": {"*": 0}},
        {"layer_weights": {"*": math.inf}},
        {"bounds": 1.0},
    ],
    ids=str,
)
def test_settings_that_bound_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bounding.model_validate({"rule": "clip", "bound": 1.0, **wrong})


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=3, max_size=3),
)
def test_a_rule_of_ones_own_is_held_to_the_bound_whatever_it_answers(
    rows: list[list[float]], answers: list[float]
) -> None:
    rule = Bounder(
        "python", 2.0, torch.full((3,), 2 / math.sqrt(3), dtype=torch.float64),
        function=lambda norms, bounds: torch.tensor(answers, dtype=torch.float64),
    )  # fmt: skip
    norms = torch.tensor(rows, dtype=torch.float64)
    factors = rule.factors(norms)
    assert bool(torch.isfinite(factors).all())
    assert float(torch.linalg.vector_norm(norms * factors, dim=1).max()) <= 2.0


def test_a_rule_of_ones_own_sees_one_user_at_a_time() -> None:
    seen = []

    def watch(norms: Tensor, bounds: Tensor) -> Tensor:
        seen.append(tuple(norms.shape))
        return torch.ones_like(norms)

    rule = Bounder("python", 1.0, torch.ones(2, dtype=torch.float64), function=watch)
    factors = rule.factors(torch.tensor([[0.3, 0.4], [3.0, 4.0]], dtype=torch.float64))
    assert seen == [(2,), (2,)]
    assert factors[0].tolist() == pytest.approx([1, 1], rel=1e-5)
    assert factors[1].tolist() == pytest.approx([0.2, 0.2], rel=1e-5)


def test_a_rule_of_ones_own_that_works_in_place_or_answers_one_number_cannot_escape_the_bound() -> None:
    norms = torch.tensor([[30.0, 40.0], [3.0, 4.0]], dtype=torch.float64)

    def in_place(own: Tensor, bounds: Tensor) -> Tensor:
        own /= own.norm()
        bounds *= 100
        return torch.ones_like(own)

    rule = Bounder("python", 1.0, torch.full((2,), 0.5**0.5, dtype=torch.float64), function=in_place)
    assert float(torch.linalg.vector_norm(norms * rule.factors(norms), dim=1).max()) <= 1.0
    assert norms[0].tolist() == [30.0, 40.0]
    with pytest.raises(UserError, match="expected one factor per"):
        replace(rule, function=lambda own, bounds: own.sum()).factors(norms)


# Users without data


class Decays(BasicTask):
    """A loss with a term for the model itself, which also pulls where there are no data. The second user has none."""

    name, metric = "decays", "none"
    examples = np.array([3, 0])

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.full((4,), 2.0)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return (torch.ones(int(self.examples[user])),)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return batch[0].sum() * parameters["w"].sum() + parameters["w"].square().sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def test_a_user_with_empty_data_adds_nothing_to_any_sum() -> None:
    """Of the pair that a guarantee compares, the one without the user's data; else a user moves a sum by 2 C."""
    task = Decays()
    layout, like = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    rule, measures = bounder(Bounding(rule="clip", bound=1.0, adaptive=Adaptive()), layout), Measures({"loss": 5.0})
    local = LocalTraining(steps=2, learning_rate=0.1)
    trainer = PartTrainer(task, layout, local, rule, np.full(2, 0.5), 0, like, measures)
    for user, adds in ((0, True), (1, False)):
        into = torch.zeros_like(like)
        tally = trainer.add_part(like.clone(), np.array([user]), 0, into, rule.bounds)
        assert [bool(into.any()), any(tally.votes), any(tally.measures)] == [adds] * 3
        assert tally.users == 1
