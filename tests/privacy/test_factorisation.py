"""Claims about correlated noise: it is C^-1 Z, its sensitivity is brute force's, and users keep their distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from confide.errors import UserError
from confide.privacy import factorisation as f
from confide.randomness import generator
from support import prefix_sums
from support.prefix_sums_figure import draw_factorisation

Array = NDArray[np.float64]
SIGNED = np.array([1.0, -0.6, 0.3])


def dense(coefficients: Array, rounds: int) -> Array:
    """C, written out."""
    matrix = np.zeros((rounds, rounds))
    for lag, value in enumerate(coefficients[:rounds]):
        matrix += value * np.eye(rounds, k=-lag)
    return matrix


def stream(coefficients: Array, fresh: Array, dtype: torch.dtype = torch.float64) -> Array:
    """Every row of the noise, from the rows of `fresh`: (rounds, parameters)."""
    state = f.init(len(coefficients), torch.zeros(fresh.shape[1], dtype=dtype))
    rows = (torch.tensor(row, dtype=dtype) for row in fresh)
    return np.stack([f.next_noise(coefficients, state, z, t).double().numpy() for t, z in enumerate(rows)])


def patterns(rounds: int, separation: int) -> Iterator[tuple[int, ...]]:
    """Every set of rounds that are at least `separation` apart."""
    for bits in itertools.product((0, 1), repeat=rounds):
        chosen = tuple(np.flatnonzero(bits).tolist())
        if chosen and all(b - a >= separation for a, b in itertools.pairwise(chosen)):
            yield chosen


# The matrix.


def test_square_root_coefficients_square_to_prefix_sums() -> None:
    root = dense(f.root_coefficients(30), 30)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((30, 30))), atol=1e-14)
    assert f.root_coefficients(5)[4] == pytest.approx(math.comb(8, 4) / 4**4)


@pytest.mark.parametrize(("bands", "rounds"), [(2, 40), (8, 200), (20, 100), (12, 12), (16, 10)])
def test_optimised_coefficients_are_a_minimum_and_no_worse_than_the_root(bands: int, rounds: int) -> None:
    def total(coefficients: Array) -> float:
        inverse = np.linalg.inv(dense(coefficients, rounds))
        return float(coefficients @ coefficients * np.square(np.tril(np.ones((rounds, rounds))) @ inverse).sum())

    best = f.optimised_coefficients(bands, rounds)
    least = total(best)
    assert least <= total(f.root_coefficients(bands))
    for lag in range(1, min(bands, rounds)):
        for change in (-0.02, 0.02):
            moved = best.copy()
            moved[lag] += change
            assert total(moved) > least


def test_optimising_pays_when_bands_are_few() -> None:
    root, best = f.root_coefficients(8), f.optimised_coefficients(8, 500)
    assert prefix_sums.banded_variance(best, 500, 50).sum() < 0.85 * prefix_sums.banded_variance(root, 500, 50).sum()


def test_one_band_has_nothing_to_optimise() -> None:
    assert f.optimised_coefficients(1, 100).tolist() == [1.0]


# Streaming.


@pytest.mark.parametrize(
    "coefficients", [f.root_coefficients(1), f.root_coefficients(2), f.optimised_coefficients(7, 40), SIGNED]
)
def test_streamed_noise_is_the_dense_inverse_times_fresh_noise(coefficients: Array) -> None:
    fresh = generator(0, "test").standard_normal((40, 5))
    expected = np.linalg.solve(dense(coefficients, 40), fresh)
    np.testing.assert_allclose(stream(coefficients, fresh), expected, atol=1e-12)


def test_single_precision_does_not_drift_over_two_thousand_rounds() -> None:
    coefficients = f.optimised_coefficients(8, 2000)
    fresh = generator(1, "test").standard_normal((2000, 3)).astype(np.float32).astype(np.float64)
    exact, rounded = stream(coefficients, fresh), stream(coefficients, fresh, torch.float32)
    assert np.abs(exact - rounded).max() < 1e-5
    assert np.abs(np.cumsum(exact - rounded, axis=0)).max() < 1e-3


def test_one_band_is_independent_noise_bit_for_bit() -> None:
    fresh = torch.randn(50, generator=torch.Generator().manual_seed(3))
    state = f.init(1, fresh)
    for step in range(3):
        assert torch.equal(f.next_noise(f.root_coefficients(1), state, fresh.clone(), step), fresh)


def covariance_misfit(made_with: Array, claimed: Array) -> float:
    """Largest deviation of the noise's covariance over rounds from C^-1 C^-T, in standard errors."""
    rounds, samples = 6, 200_000
    noise = stream(made_with, generator(2, "test").standard_normal((rounds, samples)))
    inverse = np.linalg.inv(dense(claimed, rounds))
    expected = inverse @ inverse.T
    variances = np.diag(expected)
    error = np.sqrt((np.outer(variances, variances) + expected**2) / samples)
    return float(np.abs((noise @ noise.T / samples - expected) / error).max())


def test_covariance_over_rounds_is_the_claimed_one_and_not_that_of_a_coefficient_a_little_off() -> None:
    right = f.root_coefficients(3)
    assert covariance_misfit(right, right) < 4
    for lag in (1, 2):
        wrong = right.copy()
        wrong[lag] += 0.03
        assert covariance_misfit(wrong, right) > 6


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_a_resumed_stream_is_the_same_bit_for_bit(bands: int) -> None:
    coefficients, like = f.root_coefficients(bands), torch.zeros(9)

    def fresh(step: int) -> Tensor:
        return torch.from_numpy(generator(4, "test", step).standard_normal(9, dtype=np.float32))

    whole, state = f.init(bands, like), f.init(bands, like)
    expected = [f.next_noise(coefficients, whole, fresh(t), t) for t in range(20)]
    for step in range(20):
        if step in (3, 11):
            state = safetensors.torch.load(safetensors.torch.save(state))
        assert torch.equal(f.next_noise(coefficients, state, fresh(step), step), expected[step])


def test_a_step_works_in_place_and_the_state_never_grows() -> None:
    fresh = torch.zeros(6)
    state = f.init(4, fresh)
    place = state["ring"].data_ptr()
    for step in range(20):
        assert f.next_noise(f.root_coefficients(4), state, fresh, step) is fresh
    assert (state["ring"].data_ptr(), state["ring"].shape, set(state)) == (place, (3, 6), {"ring", "step"})


def test_a_round_out_of_order_or_a_foreign_state_is_refused() -> None:
    coefficients, fresh = f.root_coefficients(3), torch.zeros(4)
    state = f.init(3, fresh)
    f.next_noise(coefficients, state, fresh, 0)
    for step in (0, 2):
        with pytest.raises(ValueError, match="drawn up to step 1"):
            f.next_noise(coefficients, state, fresh, step)
    for other in (f.init(4, fresh), f.init(3, torch.zeros(1)), f.init(3, fresh.double())):
        with pytest.raises(ValueError, match="a ring of"):
            f.next_noise(coefficients, other, fresh, 0)


# Sensitivity and accounting.


@pytest.mark.parametrize("coefficients", [f.root_coefficients(1), f.root_coefficients(3), SIGNED])
@pytest.mark.parametrize(("rounds", "separation"), [(1, 3), (7, 3), (9, 4), (10, 3), (10, 5), (12, 12)])
def test_sensitivity_is_the_maximum_over_all_patterns_and_directions(
    coefficients: Array, rounds: int, separation: int
) -> None:
    matrix, draw, worst = dense(coefficients, rounds), generator(5, "test"), 0.0
    for pattern in patterns(rounds, separation):
        columns = matrix[:, pattern]
        vectors = draw.standard_normal((len(pattern), 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        signs = draw.choice([-1.0, 1.0], (len(pattern), 1))
        moved = float(np.linalg.norm(columns @ vectors))
        # Disjoint columns: no choice of directions or signs is better than another.
        assert moved == pytest.approx(float(np.linalg.norm(columns @ signs)))
        worst = max(worst, moved)
    claimed = f.sensitivity(coefficients, rounds, separation)
    assert claimed == pytest.approx(worst, rel=1e-12)
    assert claimed <= math.sqrt(prefix_sums.participations(rounds, separation)) * np.linalg.norm(coefficients) + 1e-12


def test_full_columns_give_root_of_participations_times_the_norm_of_the_coefficients() -> None:
    coefficients = f.root_coefficients(16)
    expected = math.sqrt(20) * np.linalg.norm(coefficients)
    assert f.sensitivity(coefficients, 2000, 100) == pytest.approx(expected, rel=1e-12)


def test_a_separation_below_the_bands_would_break_the_formula_and_is_refused() -> None:
    coefficients, rounds = f.root_coefficients(4), 12
    overlapping = np.linalg.norm(dense(coefficients, rounds)[:, ::3].sum(axis=1))
    assert overlapping > math.sqrt(4) * np.linalg.norm(coefficients) * 1.05
    with pytest.raises(UserError, match="bands=4 is more than the separation of 3 rounds"):
        f.sensitivity(coefficients, rounds, 3)


@pytest.mark.parametrize("released", [1, 4, 5, 10, 12])
def test_no_user_moves_what_was_released_by_more_than_one_over_z_deviations_of_its_noise(released: int) -> None:
    """From the outside: the noise that the stream makes, and the farthest that one user can shift the releases."""
    coefficients, rounds, separation, z = f.optimised_coefficients(4, 12), 12, 4, 0.7
    deviation = z * f.sensitivity(coefficients, rounds, separation)
    responses = deviation * stream(coefficients, np.eye(rounds))[:released]  # of each release to each fresh value
    precision = np.linalg.inv(responses @ responses.T)
    farthest = 0.0
    for pattern in patterns(released, separation):
        shift = np.zeros(released)
        shift[list(pattern)] = 1
        farthest = max(farthest, float(np.sqrt(shift @ precision @ shift)))
    assert farthest == pytest.approx(f.sensitivity(coefficients, released, separation) / deviation)
    assert farthest <= 1 / z + 1e-12
    assert released < rounds or farthest == pytest.approx(1 / z)


# The schedule.


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 120), st.integers(0, 2**31))
def test_groups_partition_the_users_and_turns_are_exactly_the_separation_apart(
    data: st.DataObject, population: int, seed: int
) -> None:
    cohort = data.draw(st.integers(1, population))
    separation = f.cyclic_separation(population, cohort)
    rounds = [f.cyclic_cohort(population, cohort, seed, step) for step in range(3 * separation)]
    sizes = {len(users) for users in rounds}
    assert min(sizes) >= cohort
    assert max(sizes) - min(sizes) <= 1
    assert np.sort(np.concatenate(rounds[:separation])).tolist() == list(range(population))
    for step, users in enumerate(rounds):
        assert users.tolist() == sorted(users.tolist()) == rounds[step % separation].tolist()


def test_the_schedule_is_a_shuffle_that_the_seed_decides() -> None:
    first = [f.cyclic_cohort(100, 10, seed, 0).tolist() for seed in (0, 1, 0)]
    assert first[0] == first[2] != first[1]
    assert list(range(10)) not in first
    # Over seeds a user is in round 0 one time in ten: five standard errors are 0.034.
    share = np.mean([17 in f.cyclic_cohort(100, 10, seed, 0) for seed in range(2000)])
    assert abs(share - 0.1) < 0.034


# Comparison.


def dense_trees(rounds: int, separation: int, length: int) -> float:
    """Total variance of trees that are written out node by node, with Honaker's weights found by inverse variance."""
    total, counts, base = 0.0, np.zeros(separation), 0.0
    for start in range(0, rounds, length):
        leaves, height = min(length, rounds - start), 0
        estimate: dict[int, float] = {}
        while 2**height <= leaves:
            below = 2 * estimate[height - 1] if height else math.inf
            estimate[height] = 1 / (1 + 1 / below)
            for left in range(0, leaves - 2**height + 1, 2**height):
                for user in range(separation):
                    inside = sum((start + left + i) % separation == user for i in range(2**height))
                    counts[user] += inside**2
            height += 1
        for prefix in range(1, leaves + 1):
            value = base + sum(estimate[h] for h in range(height) if prefix & 2**h)
            total += value
        base = value
    return float(counts.max() * total)


@pytest.mark.parametrize(("rounds", "separation"), [(1, 1), (8, 8), (13, 4), (30, 7), (40, 3)])
def test_tree_variance_is_that_of_trees_written_out(rounds: int, separation: int) -> None:
    expected = min(dense_trees(rounds, separation, length) for length in (rounds, separation))
    assert prefix_sums.tree_variance(rounds, separation).sum() == pytest.approx(expected)


def test_independent_noise_is_the_factorisation_with_one_band() -> None:
    np.testing.assert_allclose(
        prefix_sums.independent_variance(50, 7), prefix_sums.banded_variance(f.root_coefficients(1), 50, 7), rtol=1e-12
    )


def test_banded_variance_is_that_of_the_prefix_sums_of_the_streamed_noise() -> None:
    coefficients = f.optimised_coefficients(5, 30)
    sums = np.cumsum(stream(coefficients, np.eye(30)), axis=0) * f.sensitivity(coefficients, 30, 6)
    np.testing.assert_allclose(prefix_sums.banded_variance(coefficients, 30, 6), np.square(sums).sum(axis=1))


def test_banded_noise_beats_independent_noise_and_trees_at_the_same_privacy() -> None:
    total = {name: float(variance.sum()) for name, variance in prefix_sums.compare(200, 20, (16, 20)).items()}
    for name in ("square root, 16 bands", "optimised, 16 bands", "optimised, 20 bands"):
        assert total[name] < 0.13 * total["independent noise"]
        assert total[name] < 0.40 * total["binary tree"]


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    tables = {rounds: prefix_sums.compare(rounds, 10, (2, 4)) for rounds in (10, 30)}
    path = draw_factorisation(tmp_path / "figures" / "error.png", 10, tables)
    assert path.read_bytes().startswith(b"\x89PNG")


# Bad input.

ROOT = f.root_coefficients(2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: f.root_coefficients(0), "bands=0"),
        (lambda: f.optimised_coefficients(0, 5), "bands=0"),
        (lambda: f.optimised_coefficients(3, 0), "rounds=0"),
        (lambda: f.init(0, torch.zeros(1)), "bands=0"),
        (lambda: f.sensitivity(ROOT, 0, 4), "rounds=0"),
        (lambda: f.sensitivity(ROOT, 9, 0), "separation=0"),
        (lambda: f.sensitivity(np.array([]), 9, 4), "coefficients="),
        (lambda: f.sensitivity(np.array([2.0, 1.0]), 9, 4), "begin with 1"),
        (lambda: f.sensitivity(np.array([1.0, math.nan]), 9, 4), "finite"),
        (lambda: f.cyclic_separation(10, 0), "cohort=0"),
        (lambda: f.cyclic_cohort(10, 11, 0, 0), "cohort=11 is larger than the population of 10"),
    ],
)
def test_bad_input_is_said_in_words(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call()
