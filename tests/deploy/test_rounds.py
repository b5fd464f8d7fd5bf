"""Whatever clients send, a round neither stops nor lets one user move the sum beyond its bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.deploy.parcels import Identity, Parcel
from confide.deploy.rounds import (
    ACCEPTED,
    HELD,
    LATE,
    MALFORMED,
    NOT_FINITE,
    OTHER_CLIENT,
    OTHER_ROUND,
    STRANGER,
    TWICE,
    Books,
    Call,
    Round,
)  # fmt: skip
from confide.deploy.sums import Sum
from confide.engines.engine import Abandoned
from confide.federated.bounding import Bounder, Bounding, bounder
from confide.federated.parameters import Layout

LAYOUT = Layout(("a", "b"), ((3, 2), (5,)))
SIZE, USERS, BOUND = 11, 6, 2.0
IDENTITY = Identity("1", "recipe", "layout")
RULES = ("clip", "per_layer_clip", "normalise", "per_layer_normalise")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(rule: str = "clip", vote: bool = False, weights: np.ndarray | None = None) -> tuple[Round, Clock]:
    clock = Clock()
    books = Books(LAYOUT, np.full(USERS, 1 / USERS) if weights is None else weights, torch.full((SIZE,), 9.0))
    settings = Bounding.model_validate({"rule": rule, "bound": BOUND})
    call = Call("run", IDENTITY, 4, "nonce")
    cohort: dict[int, int | str | None] = {user: 100 + user for user in range(USERS - 1)}  # the last user is not drawn
    return Round(call, cohort, books, bounder(settings, LAYOUT), 10.0, vote, clock=clock), clock


def answer(user: Any = 0, **changed: Any) -> Parcel:
    facts: dict[str, Any] = {
        "run": "run",
        "step": 4,
        "nonce": "nonce",
        **IDENTITY.facts(),
        "user": user,
        "loss": 1.0,
        "votes": [],
        "norms": [0.2, 0.3],
    }
    arrays: dict[str, Any] = {"update": np.full(SIZE, 0.01, dtype=np.float32), "sum": ...}
    facts |= {name: value for name, value in changed.items() if name not in arrays}
    arrays |= {name: value for name, value in changed.items() if name in arrays}
    return Parcel({k: v for k, v in facts.items() if v is not ...}, {k: v for k, v in arrays.items() if v is not ...})


def test_an_honest_answer_is_added_as_it_is() -> None:
    held, _ = make()
    assert held.take(100, answer()) == ACCEPTED
    assert torch.equal(held.sum.read(), torch.full((SIZE,), 0.01))
    assert held.close(1).users == 1


@pytest.mark.parametrize(
    ("changed", "node", "verdict"),
    [
        ({"run": "other"}, 100, OTHER_ROUND),
        ({"nonce": "earlier"}, 100, OTHER_ROUND),
        ({"step": 3}, 100, OTHER_ROUND),
        ({"version": "0"}, 100, OTHER_CLIENT),
        ({"recipe": "x"}, 100, OTHER_CLIENT),
        ({"layout": ...}, 100, OTHER_CLIENT),
        ({"user": 5}, 105, STRANGER),
        ({"user": 1}, 100, STRANGER),
        ({"user": -1}, 100, STRANGER),
        ({"user": True}, 101, STRANGER),
        ({"user": [0]}, 100, STRANGER),
        ({"loss": ...}, 100, MALFORMED),
        ({"loss": 1e300}, 100, MALFORMED),
        ({"votes": [0.5]}, 100, MALFORMED),
        ({"norms": [1.0]}, 100, MALFORMED),
        ({"norms": [1.0, "2"]}, 100, MALFORMED),
        ({"norms": [1.0, -1.0]}, 100, MALFORMED),
        ({"norms": [1.0, -math.inf]}, 100, MALFORMED),
        (
            {"users": [0], "tally": {"users": 1}, "sum": np.zeros(SIZE, "<i8"), "user": ..., "update": ...},
            100,
            STRANGER,
        ),
        ({"update": ...}, 100, MALFORMED),
        ({"update": np.zeros(SIZE)}, 100, MALFORMED),
        ({"update": np.zeros(SIZE + 1, dtype=np.float32)}, 100, MALFORMED),
        ({"update": np.zeros((1, SIZE), dtype=np.float32)}, 100, MALFORMED),
        ({"update": [0.0] * SIZE}, 100, MALFORMED),
    ],
)
def test_what_does_not_belong_here_adds_nothing(changed: dict[str, Any], node: int, verdict: str) -> None:
    held, _ = make()
    assert held.take(node, answer(**changed)) == verdict
    assert not held.sum.read().any()
    with pytest.raises(Abandoned, match="0 of 5 users answered and at least 1 are needed"):
        held.close(1)


@pytest.mark.parametrize(
    "changed",
    [
        {"update": np.full(SIZE, np.nan, dtype=np.float32)},
        {"update": np.full(SIZE, -np.inf, dtype=np.float32)},
        {"loss": math.nan},
        {"norms": [math.inf, 0.0]},
    ],
)
def test_who_has_no_finite_update_has_answered_adds_nothing_and_is_named(changed: dict[str, Any]) -> None:
    held, _ = make()
    assert held.take(100, answer(**changed)) == NOT_FINITE
    tally = held.close(1)
    assert not held.books.total.any()
    assert (tally.users, tally.not_finite) == (1, 1)
    assert held.notes == ["node 100: not finite: user 0"]


def test_a_user_without_a_finite_update_answers_where_bounds_adapt_too() -> None:
    held, _ = make(vote=True)
    assert held.take(100, answer(loss=math.nan, votes=[0.0])) == NOT_FINITE
    assert (held.done, held.tally.users, held.tally.not_finite, held.tally.votes) == ({0}, 1, 1, [])
    assert held.take(101, answer(1, votes=[0.0])) == MALFORMED


def test_only_the_first_answer_of_a_user_counts() -> None:
    held, _ = make()
    assert [held.take(100, answer()) for _ in range(3)] == [ACCEPTED, TWICE, TWICE]
    assert float(held.sum.read()[0]) == pytest.approx(0.01)


def test_an_answer_after_the_deadline_is_late() -> None:
    held, clock = make()
    assert held.take(100, answer()) == ACCEPTED
    clock.now = 10.0
    assert not held.open
    assert held.take(101, answer(1)) == LATE
    assert held.close(1).users == 1
    assert held.counts["missing"] == 4


def test_a_round_with_too_few_answers_leaves_nothing_behind() -> None:
    held, _ = make()
    held.take(100, answer())
    with pytest.raises(Abandoned, match="nothing was released"):
        held.close(2)
    assert not held.sum.read().any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e30, 3e38])
def test_an_update_that_was_not_bounded_is_held_to_the_bound(rule: str, size: float) -> None:
    held, _ = make(rule)
    update = np.linspace(-1, 1, SIZE, dtype=np.float32) * np.float32(size)
    assert held.take(100, answer(update=update)) == ACCEPTED
    limit = BOUND / USERS
    norm = float(held.sum.read().double().norm())
    assert norm <= limit
    if size > 1:
        assert held.counts[HELD] == 1
        assert norm > 0.5 * limit  # held to the bound, not thrown away


def test_votes_are_counted_when_the_bound_adapts() -> None:
    held, _ = make(vote=True)
    assert held.take(100, answer(votes=[0.5])) == ACCEPTED
    assert held.take(101, answer(1, votes=[-0.5])) == ACCEPTED
    assert held.take(102, answer(2, votes=[-0.5])) == ACCEPTED
    assert held.take(103, answer(3, votes=[50.0])) == MALFORMED
    assert held.close(1).votes == [-0.5]


_numbers = st.one_of(st.floats(width=32), st.floats(), st.integers(), st.booleans())
_anything = st.one_of(
    _numbers, st.none(), st.text(max_size=5), st.binary(max_size=5), st.lists(_numbers, max_size=4),
    st.dictionaries(st.text(max_size=3), _numbers, max_size=2), st.just(...),
)  # fmt: skip
_shapes = st.one_of(st.just((SIZE,)), st.just(()), st.lists(st.integers(0, 12), max_size=3).map(tuple))
_types = st.sampled_from(["f4", "f4", "f8", "f2", ">f4", "i8", "u1", "b1", "c8", "U3", "O"])
_fills = st.one_of(st.floats(width=32), st.sampled_from([0.0, np.nan, np.inf, -np.inf, 3e38, 1e-45, -1e30]))


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """An array of any kind, an honest one with a few odd entries, or no array at all."""
    if draw(st.booleans()):
        values = draw(st.lists(_fills, min_size=SIZE, max_size=SIZE))
        with np.errstate(over="ignore"):
            return np.array(values, dtype=np.float32)
    if draw(st.booleans()):
        kind = draw(_types)
        made = np.zeros(draw(_shapes), dtype=kind)
        if made.dtype.kind in "fc" and made.size:
            with np.errstate(over="ignore", invalid="ignore"):
                made[...] = draw(_fills)
        return made
    return draw(_anything)


@st.composite
def messages(draw: st.DrawFn) -> tuple[int, Any]:
    """An honest answer with some of it replaced; sometimes nothing like an answer."""
    if draw(st.integers(0, 30)) == 0:
        return draw(st.integers()), draw(
            st.one_of(st.none(), st.just(Parcel()), st.builds(Parcel, _anything, _anything))
        )
    user = draw(st.one_of(st.integers(0, USERS - 1), _anything))
    changed: dict[str, Any] = {}
    for name in draw(
        st.sets(st.sampled_from(["run", "step", "nonce", "version", "layout", "loss", "votes", "norms"]), max_size=2)
    ):
        changed[name] = draw(_anything)
    if draw(st.booleans()):
        changed["update"] = draw(arrays())
    node = 100 + user if type(user) is int and draw(st.integers(0, 5)) else draw(st.integers(95, 110))
    return node, answer(user, **changed)


@given(st.lists(messages(), min_size=1, max_size=8), st.sampled_from(RULES), st.booleans())
@settings(max_examples=500, deadline=None)
def test_hostile_messages_neither_stop_a_round_nor_move_it_beyond_the_bound(
    hostile: list[tuple[int, Any]], rule: str, uneven: bool
) -> None:
    weights = np.arange(1, USERS + 1) / 21 if uneven else np.full(USERS, 1 / USERS)
    held, _ = make(rule, weights=weights)
    before = held.sum.read().clone()
    for node, parcel in hostile:
        done = set(held.done)
        verdict = held.take(node, parcel)
        moved = float((held.sum.read() - before).double().norm())
        new = held.done - done
        assert len(new) == (1 if verdict in (ACCEPTED, NOT_FINITE) else 0)
        # Not by a bit beyond one user's share, and by nothing at all unless the answer was accepted.
        slack = 1e-6 * float(before.double().norm())  # of the subtraction in single precision
        assert moved <= (weights[next(iter(new))] * BOUND if verdict == ACCEPTED else 0.0) + slack
        assert all(100 + user == node for user in new)
        before = held.sum.read().clone()
    assert bool(torch.isfinite(held.sum.read()).all())
    assert float(held.sum.read().double().norm()) <= BOUND * sum(weights[user] for user in held.done) * (1 + 1e-6)
    assert sum(held.counts.values()) - held.counts[HELD] == len(hostile)
    assert held.tally.users == len(held.done)
    assert all(math.isfinite(value) for value in (held.tally.loss, held.tally.norm, held.tally.bounded_norm))
    assert min([held.tally.norm, held.tally.bounded_norm, *held.tally.layer_norms, *held.tally.layer_bounded]) >= 0


@given(
    st.sampled_from(RULES),
    st.lists(st.one_of(st.just(0.0), st.floats(1e-45, 1e30)), min_size=2, max_size=2),  # norms of single precision
    st.floats(1e-3, 1e3),
)
def test_holding_changes_nothing_that_the_rule_has_bounded(rule: str, norms: list[float], bound: float) -> None:
    made: Bounder = bounder(Bounding.model_validate({"rule": rule, "bound": bound}), LAYOUT)
    given = torch.tensor([norms], dtype=torch.float64)
    sent = given * made.factors(given)
    assert bool((made.held(sent) == 1).all())
    held = given * made.held(given)
    assert float(held.norm()) <= bound


def test_the_sum_is_the_same_bytes_in_whatever_order_answers_come() -> None:
    draw = np.random.default_rng(0)
    updates = [draw.normal(size=300).astype(np.float32) * 10.0 ** draw.integers(-9, 0) for _ in range(50)]
    sums = []
    for order in (range(50), draw.permutation(50), draw.permutation(50)):
        held = Sum(torch.empty(300), 1000.0)
        for place in order:
            held.into().add_(torch.from_numpy(updates[place]))
            held.added()
        sums.append(held.read().clone())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    exact = torch.from_numpy(np.sum([update.astype(np.float64) for update in updates], axis=0)).float()
    assert torch.allclose(sums[0], exact, rtol=1e-6, atol=1e-12)
