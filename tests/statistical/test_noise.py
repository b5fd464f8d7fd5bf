"""Claims about the noise: standard normal, independent everywhere, and a test of it that sees an error of 2 %.

Every draw has a fixed seed, so nothing here can fail by chance; every claim is also made of noise that is wrong.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from confide.privacy.gaussian import BLOCK, SEEDED_END, SYSTEM_END, Address, Seeded, Source, System

torch.set_num_threads(1)

Values = NDArray[np.float64]
MANY = 1_000_000
# Two blocks, and a third that is not full.
OVER = 2 * BLOCK + 1000


def draw(
    size: int = MANY, seed: int = 0, step: int = 0, user: int = 0, attempt: int = 0, dtype: torch.dtype = torch.float32
) -> Values:
    out = torch.empty(size, dtype=dtype)
    Seeded(seed).fill(out, Address(step, user, attempt))
    return out.double().numpy()


def is_standard_normal(values: Values) -> bool:
    """Kolmogorov-Smirnov. Of a million values it sees a scale that is off by 0.6 %."""
    return float(stats.kstest(values, "norm", method="asymp").pvalue) > 1e-3


def are_uncorrelated(one: Values, other: Values) -> bool:
    """The correlation of n independent pairs has deviation 1 / sqrt(n)."""
    return abs(float(np.corrcoef(one, other)[0, 1])) < 4 / math.sqrt(len(one))


@pytest.fixture(scope="module")
def sample() -> Values:
    return draw()


@pytest.fixture(scope="module")
def over() -> Values:
    return draw(OVER)


# Distribution


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("address", [{}, {"seed": 7}, {"step": 1999}, {"user": 3}, {"attempt": 2}], ids=str)
def test_noise_is_standard_normal(dtype: torch.dtype, address: dict[str, int]) -> None:
    assert is_standard_normal(draw(dtype=dtype, **address))


@pytest.mark.parametrize("scale", [0.98, 0.99, 1.01, 1.02])
def test_noise_of_another_scale_is_told_apart(sample: Values, scale: float) -> None:
    assert is_standard_normal(sample)
    assert not is_standard_normal(sample * scale)


def test_noise_that_is_moved_or_of_another_shape_is_told_apart(sample: Values) -> None:
    assert not is_standard_normal(sample + 0.01)
    assert not is_standard_normal(np.sign(sample))
    assert not is_standard_normal(sample * np.sqrt(4 / np.random.default_rng(0).chisquare(4, MANY) / 2))


@pytest.mark.parametrize(
    "moment", [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)], ids=lambda m: str(m[0])
)
def test_moments_are_those_of_the_normal(sample: Values, moment: tuple[int, float, float]) -> None:
    power, mean, variance = moment
    deviation = math.sqrt(variance / MANY)
    assert abs(float(np.mean(sample**power)) - mean) < 4 * deviation
    if power % 2 == 0:
        assert abs(float(np.mean((0.98 * sample) ** power)) - mean) > 4 * deviation


@pytest.mark.parametrize("threshold", [2.0, 3.0, 4.0])
def test_tails_are_those_of_the_normal(sample: Values, threshold: float) -> None:
    """A generator that cuts its tails would weaken delta, where the guarantee lives."""
    for tail in (sample > threshold, sample < -threshold):
        expected = float(stats.norm.sf(threshold))
        assert stats.binomtest(int(tail.sum()), MANY, expected).pvalue > 1e-3
    cut = np.clip(sample, -threshold, threshold)
    assert stats.binomtest(int((cut > threshold).sum()), MANY, float(stats.norm.sf(threshold))).pvalue < 1e-3


class Ones:
    """A keystream of ones alone: the uniform nearest to 0 and an angle of almost 0, so the largest value there is."""

    def update_into(self, zeros: bytes, buffer: memoryview) -> None:
        buffer[: len(zeros)] = b"\xff" * len(zeros)


@pytest.mark.parametrize(
    ("source", "dtype", "end", "rounded"),
    [
        (Seeded(0), torch.float32, SEEDED_END, 6.56),
        (Seeded(0), torch.float64, 9.3454, 9.35),
        (System(), torch.float32, SYSTEM_END, 12.7),
        (System(), torch.float64, SYSTEM_END, 12.7),
    ],
    ids=["seeded", "seeded, double", "system", "system, double"],
)
def test_noise_ends_where_the_documents_say(
    source: Source, dtype: torch.dtype, end: float, rounded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("confide.privacy.gaussian.keystream", lambda key, block: Ones())
    monkeypatch.setattr("confide.privacy.gaussian.os.urandom", bytes)  # the fresh bits that reach deepest
    out = torch.empty(2, dtype=dtype)
    source.fill(out, Address(0))
    largest = float(out.abs().max())
    assert largest == pytest.approx(end, abs=2e-3)  # a grid of system noise is 2^-10 wide
    assert largest == pytest.approx(rounded, abs=0.05)


@pytest.mark.parametrize("place", ["docs/guarantee.md", "src/confide/privacy/gaussian.py"])
def test_the_figures_of_what_the_end_gives_away_are_right(place: str) -> None:
    text = " ".join((Path(__file__).parents[2] / place).read_text().split())
    beyond = [f"{stats.norm.sf(SEEDED_END - 1 / z):.1e}".replace("e-0", "e-") for z in (1.0, 0.5)]
    said = [
        f"{beyond[0]} ",
        f"at z = 1 and {beyond[1]} at z = 0.5",
        f"{stats.norm.pdf(SEEDED_END):.1e} sqrt(d) / z",  # the mass that a small shift moves over the end
        f"{2000 * 255e6 / 2 * math.exp(-(SYSTEM_END**2) / 2):.0e}",  # of pairs
    ]
    assert [part for part in said if part not in text] == []


def test_no_value_comes_too_often(sample: Values) -> None:
    """float32 has some 2^24 values within one deviation: a million draws repeat a few of them, never many times."""
    _, counts = np.unique(sample, return_counts=True)
    assert counts.max() < 8
    assert len(counts) > 0.9 * MANY
    assert len(np.unique(draw(dtype=torch.float64))) == MANY


# Independence


def test_a_small_correlation_would_be_seen(sample: Values) -> None:
    other = draw(step=1)
    assert are_uncorrelated(sample, other)
    assert not are_uncorrelated(sample, other + 0.01 * sample)


@pytest.mark.parametrize(
    "address",
    [
        {"step": 1},
        {"step": 2},
        {"user": 1},
        {"user": 2},
        {"attempt": 1},
        {"attempt": 2},
        {"seed": 1},
        {"step": 1, "user": 1},
    ],
    ids=str,
)
def test_noise_at_two_addresses_is_uncorrelated(sample: Values, address: dict[str, int]) -> None:
    other = draw(dtype=torch.float32, **address)
    assert are_uncorrelated(sample, other)
    assert are_uncorrelated(sample**2, other**2)
    assert are_uncorrelated(sample[1:], other[:-1])
    assert not np.any(sample[:1000] == other[:1000])


def test_no_two_addresses_share_a_stretch_of_their_streams() -> None:
    """Streams that overlap at some shift show no correlation in place, but whoever has one knows the other."""
    near = [{}, *({key: far} for key in ("seed", "step", "user", "attempt") for far in (1, 2, 3))]
    found = np.concatenate([draw(100_000, dtype=torch.float64, **address) for address in near])
    assert len(np.unique(found)) == len(found)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 64, 1024])
def test_coordinates_are_uncorrelated_with_their_neighbours(sample: Values, lag: int) -> None:
    assert are_uncorrelated(sample[:-lag], sample[lag:])
    assert are_uncorrelated(sample[:-lag] ** 2, sample[lag:] ** 2)


def test_the_blocks_of_a_long_vector_are_uncorrelated(over: Values) -> None:
    first, second = over[:BLOCK], over[BLOCK : 2 * BLOCK]
    assert are_uncorrelated(first, second)
    assert are_uncorrelated(first[:1000], over[2 * BLOCK :])
    assert not np.any(first == second), "float32 repeats a value somewhere else, but not at the same place of a million"


def test_a_long_vector_is_standard_normal_to_its_last_value(over: Values) -> None:
    assert is_standard_normal(over)
    assert is_standard_normal(over[2 * BLOCK :])
    assert np.all(np.isfinite(over))


def test_blocks_of_one_attempt_are_not_those_of_another(over: Values) -> None:
    again = draw(OVER, attempt=1)
    pieces = [v[start : start + 1000] for v in (over, again) for start in (0, BLOCK, 2 * BLOCK)]
    for index, one in enumerate(pieces):
        for other in pieces[:index]:
            assert not np.any(one == other)


def test_the_sum_over_steps_grows_like_its_square_root() -> None:
    """Noise that was reused would add up linearly."""
    total = np.zeros(20_000)
    for step in range(100):
        total += draw(20_000, step=step)
    assert float(total.std()) == pytest.approx(10.0, rel=0.02)


# Repetition


def test_the_same_address_repeats_bit_for_bit(sample: Values, over: Values) -> None:
    assert np.array_equal(sample, draw())
    assert np.array_equal(over, draw(OVER))


def test_other_randomness_in_between_changes_nothing(sample: Values) -> None:
    torch.manual_seed(1234)
    np.random.default_rng(5).random(10)
    torch.randn(10)
    assert np.array_equal(sample, draw())
