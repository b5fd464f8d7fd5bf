"""Sums of masked integers are exact, never overflow and hide their terms; rounding stays within its sensitivity."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from confide.errors import UserError
from confide.privacy.trust.secure_sum import (
    Ring,
    Rounding,
    add_up,
    dequantise,
    make_ring,
    mask,
    prg,
    quantise,
    sensitivity,
)

BITS: st.SearchStrategy[Literal[32, 64]] = st.sampled_from([32, 64])
ROUNDINGS: st.SearchStrategy[Rounding] = st.sampled_from(["nearest", "stochastic", "conditional"])
SEEDS = st.integers(0, 2**32 - 1)
BOUNDS = st.floats(1e-6, 1e6)


def updates(ring: Ring, count: int, seed: int, kind: torch.dtype = torch.float64) -> list[Tensor]:
    """Updates at the bound, some spread over all coordinates and some on a few."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, ring.dimension)) ** random.choice([1, 5], size=(count, 1))
    rows *= ring.bound * (1 - 1e-9) / np.linalg.norm(rows, axis=1, keepdims=True)
    return [torch.from_numpy(row).to(kind) for row in rows]


def integers(ring: Ring, vector: np.ndarray) -> list[int]:
    return [int(v) for v in vector.view(f"<i{ring.bits // 8}")]


def pairwise_seeds(users: list[int]) -> dict[int, dict[int, bytes]]:
    seeds: dict[int, dict[int, bytes]] = {user: {} for user in users}
    for a, b in combinations(users, 2):
        seeds[a][b] = seeds[b][a] = os.urandom(32)
    return seeds


@settings(deadline=None, max_examples=60)
@given(BITS, ROUNDINGS, st.integers(1, 6), st.integers(1, 40), BOUNDS, SEEDS)
def test_unmasked_sum_is_exact(
    bits: Literal[32, 64], rounding: Rounding, cohort: int, dimension: int, bound: float, seed: int
) -> None:
    ring = make_ring(bound, cohort, dimension, bits, rounding)
    random = np.random.default_rng(seed)
    rounded = [quantise(ring, u, random) for u in updates(ring, cohort, seed)]
    exact = [sum(column) for column in zip(*(integers(ring, r) for r in rounded), strict=True)]
    total = add_up(ring, rounded)
    assert integers(ring, total) == exact
    assert [v / ring.step for v in dequantise(ring, total).tolist()] == exact


@settings(deadline=None, max_examples=40)
@given(BITS, st.sets(st.integers(0, 10**9), min_size=1, max_size=7), st.integers(1, 30), SEEDS, st.integers(0, 2**40))
def test_masks_cancel_for_any_cohort(
    bits: Literal[32, 64], users: set[int], dimension: int, seed: int, step: int
) -> None:
    cohort = list(users)
    ring = make_ring(1.0, len(cohort), dimension, bits)
    random = np.random.default_rng(seed)
    rounded = [quantise(ring, u, random) for u in updates(ring, len(cohort), seed)]
    pairs, own = pairwise_seeds(cohort), {user: os.urandom(16) for user in cohort}
    sent = [r + mask(ring, u, pairs[u], step, own[u]) for u, r in zip(cohort, rounded, strict=True)]
    total = add_up(ring, sent) - add_up(ring, [prg(ring, own[user], step) for user in cohort])
    np.testing.assert_array_equal(total, add_up(ring, rounded))


def test_masks_of_a_user_who_dropped_out_are_taken_off_again() -> None:
    cohort = [3, 5, 8, 13]
    ring = make_ring(1.0, 4, 50)
    pairs = pairwise_seeds(cohort)
    rounded = {
        user: quantise(ring, u, np.random.default_rng(user))
        for user, u in zip(cohort, updates(ring, 4, 0), strict=True)
    }
    for dropped in cohort:
        stayed = [user for user in cohort if user != dropped]
        total = add_up(ring, [rounded[u] + mask(ring, u, pairs[u], 7) for u in stayed]) + mask(
            ring, dropped, pairs[dropped], 7
        )
        np.testing.assert_array_equal(total, add_up(ring, [rounded[u] for u in stayed]))


@settings(deadline=None, max_examples=150)
@given(ROUNDINGS, st.integers(1, 300), BOUNDS, st.integers(0, 12), SEEDS, st.sampled_from([0.0, 0.3, 0.5, 0.999, 1.0]))
def test_rounded_norm_never_exceeds_the_stated_sensitivity(
    rounding: Rounding, dimension: int, bound: float, coarseness: int, seed: int, fraction: float
) -> None:
    """Coarse grids, where rounding matters most, and updates that lie just where it goes up."""
    step = math.ldexp(1.0, math.frexp(bound)[1] - coarseness)
    ring = Ring(64, step, bound, 1, dimension, rounding)
    random = np.random.default_rng(seed)
    for update in (*updates(ring, 2, seed), *updates(ring, 2, seed, torch.float32), _just_at(ring, fraction)):
        norm = ring.step * math.sqrt(sum(k * k for k in integers(ring, quantise(ring, update, random))))
        assert norm <= ring.sensitivity


def _just_at(ring: Ring, fraction: float) -> Tensor:
    """As many coordinates at this fraction of a step as the bound allows."""
    value = max(fraction, 1e-6) * ring.step
    row = torch.zeros(ring.dimension, dtype=torch.float64)
    row[: int((ring.bound / value) ** 2)] = value
    return row * (1 - 1e-12)


def test_sensitivity_of_nearest_and_stochastic_rounding_is_nearly_reached() -> None:
    """The bounds cannot be lowered much: these updates come close."""
    ring = Ring(64, 2.0**-6, 1.0, 1, 10_000, "nearest")
    row = torch.full((10_000,), 0.5001 * ring.step, dtype=torch.float64)
    tight = Ring(64, 2.0**-6, float(row.norm()) * (1 + 1e-9), 1, 10_000, "nearest")
    norm = dequantise(tight, quantise(tight, row, np.random.default_rng(0))).norm()
    assert float(norm) > 0.999 * tight.sensitivity
    assert sensitivity(1.0, 2.0**-6, 10_000, "conditional") < sensitivity(1.0, 2.0**-6, 10_000, "stochastic")


def test_conditional_rounding_is_what_makes_32_bits_enough_for_255_million_parameters() -> None:
    size = 255_000_000
    assert make_ring(1.0, 1024, size, 32, "stochastic").sensitivity > 1.01
    assert make_ring(1.0, 1024, size, 32, "conditional").sensitivity < 1.0001
    assert make_ring(1.0, 1024, size).bits == 32
    assert make_ring(1.0, 204_800, size).bits == 64


@settings(deadline=None, max_examples=60)
@given(BITS, ROUNDINGS, st.integers(1, 50), BOUNDS, st.sampled_from([-1.0, 1.0]))
def test_no_overflow_when_all_users_reach_the_bound_in_one_coordinate(
    bits: Literal[32, 64], rounding: Rounding, cohort: int, bound: float, sign: float
) -> None:
    """The step is the smallest possible one, so in 32 bits this fills more than a quarter of the ring."""
    ring = make_ring(bound, cohort, 3, bits, rounding)
    random = np.random.default_rng(0)
    spike = torch.tensor([0.0, sign * bound, 0.0], dtype=torch.float64)
    total = add_up(ring, [quantise(ring, spike, random) for _ in range(cohort)])
    value = float(dequantise(ring, total)[1])
    assert abs(value - cohort * sign * bound) <= cohort * ring.step
    assert bits == 64 or abs(integers(ring, total)[1]) > 2**29


@settings(deadline=None, max_examples=60)
@given(BITS, ROUNDINGS, st.integers(1, 2**31 - 1), BOUNDS)
def test_largest_sum_of_any_cohort_fits(bits: Literal[32, 64], rounding: Rounding, cohort: int, bound: float) -> None:
    assume(bits == 64 or cohort < 2**29)
    ring = make_ring(bound, cohort, 3, bits, rounding)
    largest = cohort * (math.floor(bound / ring.step) + 2)
    assert largest < 2 ** (bits - 1)
    assert largest <= 2**53
    with pytest.raises(UserError, match="overflow"):
        Ring(bits, ring.step / 4, bound, cohort, 3, rounding)


@settings(deadline=None, max_examples=60)
@given(BITS, ROUNDINGS, st.integers(1, 8), st.integers(1, 60), BOUNDS, SEEDS)
def test_sum_is_within_a_step_per_user(
    bits: Literal[32, 64], rounding: Rounding, cohort: int, dimension: int, bound: float, seed: int
) -> None:
    ring = make_ring(bound, cohort, dimension, bits, rounding)
    given_ = updates(ring, cohort, seed)
    random = np.random.default_rng(seed)
    total = dequantise(ring, add_up(ring, [quantise(ring, u, random) for u in given_]))
    exact = [math.fsum(column) for column in zip(*(u.tolist() for u in given_), strict=True)]
    allowed = cohort * ring.step * (0.5 if rounding == "nearest" else 1.0) + 1e-15 * cohort * bound
    assert max(abs(a - b) for a, b in zip(total.tolist(), exact, strict=True)) <= allowed


@pytest.mark.parametrize("value", [0.3, -0.3])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(value: float) -> None:
    size = 200_000
    row = torch.full((size,), value, dtype=torch.float64)
    means = {}
    for rounding in ("stochastic", "nearest"):
        ring = Ring(64, 1.0, 1000.0, 1, size, rounding)
        means[rounding] = float(dequantise(ring, quantise(ring, row, np.random.default_rng(1))).mean())
    assert abs(means["stochastic"] - value) < 5 * math.sqrt(0.21 / size)
    assert means["nearest"] == 0.0


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_vector_looks_uniform_and_does_not_depend_on_the_update(bits: Literal[32, 64]) -> None:
    ring = make_ring(1.0, 2, 100_000, bits, "nearest")
    random = np.random.default_rng(0)
    peak = torch.zeros(ring.dimension, dtype=torch.float64)
    peak[0] = 1.0
    flat = torch.full((ring.dimension,), -1 / math.sqrt(ring.dimension), dtype=torch.float64)
    counts = []
    for update in (peak, flat):
        sent = quantise(ring, update, random) + mask(ring, 1, {2: os.urandom(32)}, 0, os.urandom(32))
        shifts = [(sent >> np.array(s, dtype=ring.dtype)) & np.array(255, dtype=ring.dtype) for s in range(0, bits, 8)]
        counts.append([np.bincount(s.astype(np.int64), minlength=256) for s in shifts])
    for first, second in zip(*counts, strict=True):
        assert stats.chisquare(first).pvalue > 1e-6
        assert stats.chi2_contingency([first, second]).pvalue > 1e-6
    bare = quantise(ring, flat, random)
    assert stats.chisquare(np.bincount((bare & np.array(255, dtype=ring.dtype)).astype(np.int64))).pvalue < 1e-6


def test_masks_differ_between_steps_and_seeds_and_repeat_for_the_same() -> None:
    ring = make_ring(1.0, 2, 64)
    seed, other = bytes(16), bytes(15) + b"\1"
    np.testing.assert_array_equal(prg(ring, seed, 3), prg(ring, seed, 3))
    assert not np.intersect1d(prg(ring, seed, 3), prg(ring, seed, 4)).size
    assert not np.intersect1d(prg(ring, seed, 3), prg(ring, other, 3)).size


def test_a_norm_that_single_precision_left_above_the_bound_is_taken_back() -> None:
    ring = make_ring(1.0, 1, 1000, 64, "nearest")
    row = torch.full((1000,), 1.000001 / math.sqrt(1000))
    assert float(row.double().norm()) > 1.0
    assert float(dequantise(ring, quantise(ring, row, np.random.default_rng(0))).norm()) <= ring.sensitivity


RING = make_ring(1.0, 2, 3)
ZERO = np.zeros(3, dtype=RING.dtype)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: make_ring(0.0, 2, 3), "bound=0"),
        (lambda: make_ring(math.inf, 2, 3), "bound=inf"),
        (lambda: make_ring(math.nan, 2, 3), "bound=nan"),
        (lambda: make_ring(1.0, 0, 3), "cohort=0"),
        (lambda: make_ring(1.0, 2, 0), "dimension=0"),
        (lambda: make_ring(1.0, 2, 3, 16), "bits=16"),  # type: ignore[arg-type]
        (lambda: make_ring(1.0, 2**31, 3, 32), "no room"),
        (lambda: make_ring(1.0, 204_800, 10**9, growth=1e-13), "no ring keeps"),
        (lambda: Ring(32, 0.3, 1.0, 2, 3), "power of two"),
        (lambda: Ring(32, -0.5, 1.0, 2, 3), "power of two"),
        (lambda: Ring(32, 2.0**-31, 1.0, 2, 3), "overflow 32 bits"),
        (lambda: quantise(RING, torch.ones(3), np.random.default_rng(0)), "bound it first"),
        (lambda: quantise(RING, torch.full((3,), math.nan), np.random.default_rng(0)), "bound it first"),
        (lambda: quantise(RING, torch.zeros(4), np.random.default_rng(0)), "dimension 3"),
        (lambda: add_up(RING, [ZERO] * 3), "cohort=2"),
        (lambda: add_up(RING, [ZERO.astype(np.uint64)]), "not one of this ring"),
        (lambda: prg(RING, b"short", 0), "16 or 32 bytes"),
        (lambda: mask(RING, 1, {1: bytes(16)}, 0), "itself"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mistake()
