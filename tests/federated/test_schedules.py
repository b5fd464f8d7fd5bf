"""Claims about learning-rate schedules: their closed forms, their joints, and what a recipe may not say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from confide.federated.schedules import Constant, Exponential, PerRound, Schedule

READER: TypeAdapter[Schedule] = TypeAdapter(Schedule)

# PFL-ASR Table 3, from scratch.
SCRATCH = Exponential(rate=0.6, start=1000, transition=500)
STAIRS = Exponential(rate=0.5, start=40_000, transition=50_000, staircase=True)

# Bounds keep the true multiplier above the smallest float, about 1e-308.
warmups = st.integers(0, 500)
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(Constant, warmup=warmups),
    st.builds(
        Exponential,
        rate=st.floats(1e-2, 1),
        start=st.integers(0, 5000),
        transition=st.floats(100, 5000),
        staircase=st.booleans(),
        warmup=warmups,
    ),
    st.builds(PerRound, factor=st.floats(0.95, 1), warmup=warmups),
)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (Constant(), 0, 1.0),
        (Constant(), 10**6, 1.0),
        (SCRATCH, 0, 1.0),
        (SCRATCH, 999, 1.0),
        (SCRATCH, 1250, 0.6**0.5),
        (SCRATCH, 1500, 0.6),
        (SCRATCH, 2000, 0.36),
        (Exponential(rate=0.5, start=0, transition=0.5), 3, 0.5**6),
        (STAIRS, 39_999, 1.0),
        (STAIRS, 40_000, 0.5),
        (STAIRS, 89_999, 0.5),
        (STAIRS, 90_000, 0.25),
        (PerRound(factor=0.99), 0, 1.0),
        (PerRound(factor=0.99), 1, 0.99),
        (PerRound(factor=0.99), 499, 0.99**499),
    ],
)
def test_multiplier_has_its_closed_form(schedule: Schedule, step: int, expected: float) -> None:
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


def test_exponential_leaves_one_without_a_jump() -> None:
    assert SCRATCH(1000) == 1.0
    ratios = [SCRATCH(step + 1) / SCRATCH(step) for step in range(1000, 1100)]
    assert ratios == pytest.approx([0.6 ** (1 / 500)] * 100, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "plain"),
    [
        (Constant(warmup=4), Constant()),
        (PerRound(factor=0.9, warmup=4), PerRound(factor=0.9)),
        (Exponential(rate=0.5, start=2, transition=3, warmup=4), Exponential(rate=0.5, start=2, transition=3)),
    ],
)
def test_warm_up_multiplies_the_schedule_by_a_linear_ramp(schedule: Schedule, plain: Schedule) -> None:
    ramp = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [schedule(step) for step in range(6)] == pytest.approx(
        [factor * plain(step) for step, factor in enumerate(ramp)]
    )


@given(schedule=schedules, step=st.integers(0, 10_000))
def test_multiplier_is_positive_and_never_raises_the_rate(schedule: Schedule, step: int) -> None:
    assert 0 < schedule(step) <= 1


@given(schedule=schedules, step=st.integers(0, 10_000))
def test_multiplier_never_grows_after_warm_up(schedule: Schedule, step: int) -> None:
    step += schedule.warmup
    assert schedule(step + 1) <= schedule(step)


@pytest.mark.parametrize("schedule", [Constant(), SCRATCH, PerRound(factor=0.9)])
def test_a_negative_step_is_refused(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match=r"step=-1 is negative; steps count from 0"):
        schedule(-1)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"kind": "constant"}, Constant()),
        ({"kind": "constant", "warmup": 3}, Constant(warmup=3)),
        ({"kind": "exponential", "rate": 0.6, "start": 1000, "transition": 500}, SCRATCH),
        ({"kind": "per_round", "factor": 0.99}, PerRound(factor=0.99)),
    ],
)
def test_a_recipe_names_its_schedule_by_kind(document: dict[str, Any], expected: Schedule) -> None:
    assert READER.validate_python(document) == expected
    assert READER.validate_json(READER.dump_json(expected)) == expected


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"warmup": 3},
        {"kind": "cosine"},
        {"kind": "constant", "rate": 0.5},
        {"kind": "constant", "warmup": -1},
        {"kind": "constant", "warmup": 1.5},
        {"kind": "exponential"},
        {"kind": "exponential", "rate": 0, "start": 0, "transition": 1},
        {"kind": "exponential", "rate": 1.01, "start": 0, "transition": 1},
        {"kind": "exponential", "rate": float("nan"), "start": 0, "transition": 1},
        {"kind": "exponential", "rate": 0.5, "start": -1, "transition": 1},
        {"kind": "exponential", "rate": 0.5, "start": 0, "transition": 0},
        {"kind": "exponential", "rate": 0.5, "start": 0, "transition": float("inf")},
        {"kind": "per_round", "factor": 0},
        {"kind": "per_round", "factor": 1.5},
    ],
)
def test_what_no_schedule_can_mean_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        READER.validate_python(document)


def test_a_schedule_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SCRATCH.rate = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("model", [Constant, Exponential, PerRound])
def test_every_field_says_what_it_is_and_kind_comes_first(model: type[Constant]) -> None:
    properties = model.model_json_schema()["properties"]
    assert next(iter(properties)) == "kind"
    assert all(field["description"].endswith(".") for field in properties.values())
