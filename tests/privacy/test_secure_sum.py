"""Sums of masked integers are exact, never overflow and hide their terms; rounding stays within its sensitivity."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from confide.errors import UserError
from confide.privacy.trust.secure import clamp
from confide.privacy.trust.secure_sum import Bits, Ring, Vector, dequantise, make_ring, mask, prg, sensitivity

BITS: st.SearchStrategy[Bits] = st.sampled_from([32, 64])
SEEDS = st.integers(0, 2**32 - 1)
BOUNDS = st.floats(1e-6, 1e6)


def updates(ring: Ring, count: int, seed: int, kind: torch.dtype = torch.float64) -> list[Tensor]:
    """Updates at the bound, some spread over all coordinates and some on a few."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, ring.dimension)) ** random.choice([1, 5], size=(count, 1))
    rows *= ring.bound * (1 - 1e-9) / np.linalg.norm(rows, axis=1, keepdims=True)
    return [torch.from_numpy(row).to(kind) for row in rows]


def rounded(ring: Ring, update: Tensor) -> Vector:
    """As a client sends it, without noise and masks."""
    return clamp(ring, np.rint(update.double().numpy() / ring.step))


def add_up(ring: Ring, vectors: list[Vector]) -> Vector:
    """As the server does."""
    total = np.zeros(ring.dimension, dtype=ring.dtype)
    for vector in vectors:
        total += vector
    return total


def integers(ring: Ring, vector: np.ndarray) -> list[int]:
    return [int(v) for v in vector.view(f"<i{ring.bits // 8}")]


def pairwise_seeds(users: list[int]) -> dict[int, dict[int, bytes]]:
    seeds: dict[int, dict[int, bytes]] = {user: {} for user in users}
    for a, b in combinations(users, 2):
        seeds[a][b] = seeds[b][a] = os.urandom(32)
    return seeds


@settings(deadline=None, max_examples=60)
@given(BITS, st.integers(1, 6), st.integers(1, 40), BOUNDS, SEEDS)
def test_unmasked_sum_is_exact(bits: Bits, cohort: int, dimension: int, bound: float, seed: int) -> None:
    ring = make_ring(bound, cohort, dimension, bits)
    sent = [rounded(ring, u) for u in updates(ring, cohort, seed)]
    exact = [sum(column) for column in zip(*(integers(ring, r) for r in sent), strict=True)]
    total = add_up(ring, sent)
    assert integers(ring, total) == exact
    assert [v / ring.step for v in dequantise(ring, total).tolist()] == exact


@settings(deadline=None, max_examples=40)
@given(BITS, st.sets(st.integers(0, 10**9), min_size=1, max_size=7), st.integers(1, 30), SEEDS, st.integers(0, 2**40))
def test_masks_cancel_for_any_cohort(bits: Bits, users: set[int], dimension: int, seed: int, step: int) -> None:
    cohort = list(users)
    ring = make_ring(1.0, len(cohort), dimension, bits)
    bare = [rounded(ring, u) for u in updates(ring, len(cohort), seed)]
    pairs, own = pairwise_seeds(cohort), {user: os.urandom(16) for user in cohort}
    sent = [r + mask(ring, u, pairs[u], step, own[u]) for u, r in zip(cohort, bare, strict=True)]
    total = add_up(ring, sent) - add_up(ring, [prg(ring, own[user], step) for user in cohort])
    np.testing.assert_array_equal(total, add_up(ring, bare))


def test_masks_of_a_user_who_dropped_out_are_taken_off_again() -> None:
    cohort = [3, 5, 8, 13]
    ring = make_ring(1.0, 4, 50)
    pairs = pairwise_seeds(cohort)
    bare = {user: rounded(ring, u) for user, u in zip(cohort, updates(ring, 4, 0), strict=True)}
    for dropped in cohort:
        stayed = [user for user in cohort if user != dropped]
        total = add_up(ring, [bare[u] + mask(ring, u, pairs[u], 7) for u in stayed])
        total += mask(ring, dropped, pairs[dropped], 7)
        np.testing.assert_array_equal(total, add_up(ring, [bare[u] for u in stayed]))


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 300), BOUNDS, st.integers(0, 12), SEEDS, st.sampled_from([0.0, 0.3, 0.5, 0.999, 1.0]))
def test_rounded_norm_never_exceeds_the_stated_sensitivity(
    dimension: int, bound: float, coarseness: int, seed: int, fraction: float
) -> None:
    """Coarse grids, where rounding matters most, and updates that lie just where it goes up."""
    step = math.ldexp(1.0, math.frexp(bound)[1] - coarseness)
    ring = Ring(64, step, bound, 1, dimension)
    for update in (*updates(ring, 2, seed), *updates(ring, 2, seed, torch.float32), _just_at(ring, fraction)):
        length = float(update.double().norm())
        norm = step * math.sqrt(sum(k * k for k in integers(ring, rounded(ring, update))))
        assert norm <= sensitivity(max(length, bound), step, dimension)


def _just_at(ring: Ring, fraction: float) -> Tensor:
    """As many coordinates at this fraction of a step as the bound allows."""
    value = max(fraction, 1e-6) * ring.step
    row = torch.zeros(ring.dimension, dtype=torch.float64)
    row[: int((ring.bound / value) ** 2)] = value
    return row * (1 - 1e-12)


def test_sensitivity_is_nearly_reached() -> None:
    """The bound cannot be lowered much: this update comes close."""
    row = torch.full((10_000,), 0.5001 * 2.0**-6, dtype=torch.float64)
    ring = Ring(64, 2.0**-6, float(row.norm()) * (1 + 1e-9), 1, 10_000)
    norm = float(dequantise(ring, rounded(ring, row)).norm())
    assert norm > 0.999 * sensitivity(ring.bound, ring.step, ring.dimension)


@settings(deadline=None, max_examples=60)
@given(BITS, st.integers(1, 50), BOUNDS, st.sampled_from([-1.0, 1.0]))
def test_no_overflow_when_all_users_reach_the_bound_in_one_coordinate(
    bits: Bits, cohort: int, bound: float, sign: float
) -> None:
    """The step is the smallest possible one, so in 32 bits this fills more than a quarter of the ring."""
    ring = make_ring(bound, cohort, 3, bits)
    spike = torch.tensor([0.0, sign * bound, 0.0], dtype=torch.float64)
    total = add_up(ring, [rounded(ring, spike)] * cohort)
    value = float(dequantise(ring, total)[1])
    assert abs(value - cohort * sign * bound) <= cohort * ring.step
    assert bits == 64 or abs(integers(ring, total)[1]) > 2**29


@settings(deadline=None, max_examples=60)
@given(BITS, st.integers(1, 2**31 - 1), BOUNDS)
def test_largest_sum_of_any_cohort_fits(bits: Bits, cohort: int, bound: float) -> None:
    assume(bits == 64 or cohort < 2**29)
    ring = make_ring(bound, cohort, 3, bits)
    largest = cohort * (math.floor(bound / ring.step) + 2)
    assert largest < 2 ** (bits - 1)
    assert largest <= 2**53
    with pytest.raises(UserError, match="overflow"):
        Ring(bits, ring.step / 4, bound, cohort, 3)


@settings(deadline=None, max_examples=60)
@given(BITS, st.integers(1, 8), st.integers(1, 60), BOUNDS, SEEDS)
def test_sum_is_within_half_a_step_per_user(bits: Bits, cohort: int, dimension: int, bound: float, seed: int) -> None:
    ring = make_ring(bound, cohort, dimension, bits)
    given_ = updates(ring, cohort, seed)
    total = dequantise(ring, add_up(ring, [rounded(ring, u) for u in given_]))
    exact = [math.fsum(column) for column in zip(*(u.tolist() for u in given_), strict=True)]
    allowed = cohort * ring.step * 0.5 + 1e-15 * cohort * bound
    assert max(abs(a - b) for a, b in zip(total.tolist(), exact, strict=True)) <= allowed


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_vector_looks_uniform_and_does_not_depend_on_the_update(bits: Bits) -> None:
    ring = make_ring(1.0, 2, 100_000, bits)
    peak = torch.zeros(ring.dimension, dtype=torch.float64)
    peak[0] = 1.0
    flat = torch.full((ring.dimension,), -1 / math.sqrt(ring.dimension), dtype=torch.float64)
    counts = []
    for update in (peak, flat):
        sent = rounded(ring, update) + mask(ring, 1, {2: os.urandom(32)}, 0, os.urandom(32))
        shifts = [(sent >> np.array(s, dtype=ring.dtype)) & np.array(255, dtype=ring.dtype) for s in range(0, bits, 8)]
        counts.append([np.bincount(s.astype(np.int64), minlength=256) for s in shifts])
    for first, second in zip(*counts, strict=True):
        assert stats.chisquare(first).pvalue > 1e-6
        assert stats.chi2_contingency([first, second]).pvalue > 1e-6
    bare = rounded(ring, flat)
    assert stats.chisquare(np.bincount((bare & np.array(255, dtype=ring.dtype)).astype(np.int64))).pvalue < 1e-6


def test_masks_differ_between_steps_and_seeds_and_repeat_for_the_same() -> None:
    ring = make_ring(1.0, 2, 64)
    seed, other = bytes(16), bytes(15) + b"\1"
    np.testing.assert_array_equal(prg(ring, seed, 3), prg(ring, seed, 3))
    assert not np.intersect1d(prg(ring, seed, 3), prg(ring, seed, 4)).size
    assert not np.intersect1d(prg(ring, seed, 3), prg(ring, other, 3)).size


RING = make_ring(1.0, 2, 3)


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
        (lambda: Ring(32, 0.3, 1.0, 2, 3), "power of two"),
        (lambda: Ring(32, -0.5, 1.0, 2, 3), "power of two"),
        (lambda: Ring(32, 2.0**-31, 1.0, 2, 3), "overflow 32 bits"),
        (lambda: prg(RING, b"short", 0), "16 or 32 bytes"),
        (lambda: mask(RING, 1, {1: bytes(16)}, 0), "itself"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mistake()
