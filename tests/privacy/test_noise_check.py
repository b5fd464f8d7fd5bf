"""Claims about the test of noise against cohorts: right as often as promised, and it sees what it should."""

from __future__ import annotations

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from confide.privacy.noise_check import LEVEL, chance_of_following

STEPS, DIMENSION = 30, 200


def chance(seed: int, power: float) -> float:
    """The p-value for noise whose variance is the stated one times (cohort / 40)^power."""
    draw = np.random.default_rng(seed)
    sizes = draw.binomial(200, 0.2, STEPS)
    squares = draw.chisquare(DIMENSION, STEPS) * (sizes / 40) ** power
    found = chance_of_following(squares.tolist(), sizes.tolist(), DIMENSION)
    assert found is not None
    return found


def test_honest_noise_has_uniform_p_values() -> None:
    assert stats.kstest([chance(seed, 0.0) for seed in range(200)], "uniform").pvalue > 1e-3


def test_noise_that_grows_or_shrinks_with_the_cohort_is_found() -> None:
    for seed in range(10):
        assert chance(seed, 1.0) < LEVEL
        assert chance(seed, -1.0) < LEVEL


def test_noise_that_hardly_follows_is_not_always_found_but_lowers_the_p_value() -> None:
    assert np.mean([chance(seed, 0.2) for seed in range(100)]) < 0.4


def test_less_noise_that_does_not_follow_is_left_to_the_canaries() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.binomial(200, 0.2, STEPS).tolist()
    assert chance_of_following([0.0] * STEPS, sizes, DIMENSION) == 1.0
    assert (chance_of_following((draw.chisquare(DIMENSION, STEPS) / 4).tolist(), sizes, DIMENSION) or 0) > LEVEL


def test_cohorts_of_one_size_tell_nothing() -> None:
    assert chance_of_following([210.0, 190.0], [40, 40], DIMENSION) is None
    assert chance_of_following([], [], DIMENSION) is None
