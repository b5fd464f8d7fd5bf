"""Both sources of noise are Gaussian, independent everywhere and the same on any number of threads; only one repeats.

The system source is given fixed keys where a claim is statistical, so nothing here can fail by chance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from confide.errors import UserError
from confide.privacy import gaussian
from confide.privacy.gaussian import BLOCK, Address, Seeded, Source, System, grid

Values = NDArray[np.float64]
MANY = 1_000_000
HERE = Address(step=0)
SOURCES: list[Source] = [Seeded(0), System()]
KINDS = [torch.float32, torch.float64]
LENGTHS = [0, 1, 2, 3, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1005]

both = pytest.mark.parametrize("source", SOURCES, ids=["seeded", "system"])
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=["float32", "float64"])


@pytest.fixture
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the system source that are the same in every run of the tests."""
    random = np.random.default_rng(0)
    monkeypatch.setattr("confide.privacy.gaussian.os.urandom", random.bytes)


@dataclass
class Words:
    """Stands for the keystream."""

    make: Callable[[int], bytes]

    def update_into(self, zeros: bytes, buffer: memoryview) -> None:
        buffer[: len(zeros)] = self.make(len(zeros))


def draw(source: Source, size: int = MANY, at: Address = HERE, kind: torch.dtype = torch.float32) -> Values:
    out = torch.empty(size, dtype=kind)
    source.fill(out, at)
    return out.double().numpy()


def is_standard_normal(values: Values) -> bool:
    return float(stats.kstest(values, "norm", method="asymp").pvalue) > 1e-3


def are_uncorrelated(one: Values, other: Values) -> bool:
    """The correlation of n independent pairs has deviation 1 / sqrt(n)."""
    return abs(float(np.corrcoef(one, other)[0, 1])) < 4 / math.sqrt(len(one))


@both
@both_kinds
@pytest.mark.usefixtures("fixed_keys")
def test_the_scale_is_one_and_two_per_cent_off_is_seen(source: Source, kind: torch.dtype) -> None:
    values = draw(source, kind=kind)
    assert is_standard_normal(values)
    assert not is_standard_normal(values * 1.02)
    assert not is_standard_normal(values * 0.98)


@both
@pytest.mark.usefixtures("fixed_keys")
def test_added_noise_has_the_scale_asked_for(source: Source) -> None:
    for scale in (3e-8, 0.7, 1.0, 300.0):
        out = torch.zeros(MANY // 4)
        source.add(out, scale, HERE)
        assert is_standard_normal(out.double().numpy() / scale)


@both
@both_kinds
@pytest.mark.usefixtures("fixed_keys")
def test_moments_and_tails_are_those_of_a_gaussian(source: Source, kind: torch.dtype) -> None:
    size = 1 << 23
    values = draw(source, size, kind=kind)
    power = np.ones(size)
    for mean, variance in ((0, 1), (1, 2), (0, 15), (3, 96)):
        power *= values
        assert abs(float(power.mean()) - mean) < 4 * math.sqrt(variance / size)
    for edge in (3.0, 4.0, 5.0):
        for beyond in (int((values > edge).sum()), int((values < -edge).sum())):
            expected = size * float(stats.norm.sf(edge))
            assert stats.poisson.cdf(beyond, expected) > 1e-4
            assert stats.poisson.sf(beyond - 1, expected) > 1e-4


@both
@pytest.mark.usefixtures("fixed_keys")
def test_coordinates_are_uncorrelated_and_so_are_their_squares(source: Source) -> None:
    values = draw(source, 3 * BLOCK)
    for lag in (1, 2, 3, 16, BLOCK // 2, BLOCK // 2 + 1, BLOCK):
        assert are_uncorrelated(values[lag:], values[:-lag])
        assert are_uncorrelated(values[lag:] ** 2, values[:-lag] ** 2)
    assert not are_uncorrelated(values[1:] + 0.01 * values[:-1], values[:-1])


@both
@pytest.mark.usefixtures("fixed_keys")
def test_steps_users_attempts_purposes_and_seeds_are_uncorrelated(source: Source) -> None:
    places = [HERE, Address(1), Address(0, user=1), Address(0, attempt=1), Address(0, purpose="canary"), Address(1, 1)]
    draws = [draw(source, 200_000, place) for place in places] + [draw(Seeded(1), 200_000)]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert are_uncorrelated(one, other)


@both_kinds
def test_seeded_noise_repeats_and_does_not_depend_on_threads(kind: torch.dtype) -> None:
    size = 5 * BLOCK + 12_345
    results = []
    for threads in (1, 2, 3, 8, None):
        out = torch.ones(size, dtype=kind)
        squares = Seeded(3, threads).add(out, 0.5, Address(4, 5, 6))
        results.append((squares, hashlib.sha256(out.numpy().tobytes()).digest()))
    assert len(set(results)) == 1


def test_seeded_noise_is_the_transform_of_the_keystream() -> None:
    """The plain reference: counters encrypted one by one, and Box and Muller's formula in double precision."""
    length = 2 * BLOCK + 10_000
    values = draw(Seeded(9), length, Address(2, 3, 4, "test"))
    key = hashlib.blake2b(b"9/test/2/3/4", digest_size=16, person=b"confide noise").digest()
    for block in (0, 2):
        got = values[block * BLOCK : (block + 1) * BLOCK]
        pairs = len(got) // 2
        counters = b"".join(((block << 64) + i).to_bytes(16, "big") for i in range(pairs // 2))
        words = np.frombuffer(Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters), dtype=np.int32)
        words = words.astype(np.int64)
        radius = np.sqrt(-2 * np.log((2**31 - (words[:pairs] & 0x7FFFFFFF)) * 2.0**-31))
        turn = words[pairs:] * (math.pi * 2.0**-31)
        expected = np.concatenate([radius * np.cos(turn), radius * np.sin(turn)])
        # Single precision resolves a radius near 0 least: its square to 2^-24.
        np.testing.assert_allclose(got, expected, rtol=0, atol=4e-4)
        assert np.abs(got - expected).mean() < 1e-6


@both
@both_kinds
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_is_filled_to_its_end_and_no_further(source: Source, kind: torch.dtype, length: int) -> None:
    room = torch.full((length + 4,), math.pi, dtype=kind)
    inside = room[2 : length + 2]
    squares = source.fill(inside, HERE)
    assert room[:2].tolist() == room[-2:].tolist() == [room.new_tensor(math.pi).item()] * 2
    assert bool(torch.isfinite(inside).all())
    assert not bool((inside == math.pi).any())
    assert length < 1000 or len(np.unique(inside[-500:].numpy())) > 400
    direct = float(inside.double().square().sum())
    # The system source rounds to a thousandth, which is felt when there are few values.
    rounding = 2**-9 * math.sqrt(length * direct) + length * 2**-20 if length <= 1000 else 0.0
    assert squares == pytest.approx(direct, rel=1e-5, abs=rounding)


def test_adding_is_filling_and_scaling() -> None:
    filled, added = torch.empty(100_001, dtype=torch.float64), torch.full((100_001,), 5.0, dtype=torch.float64)
    squares = Seeded(1).fill(filled, HERE)
    assert Seeded(1).add(added, 0.25, HERE) == pytest.approx(squares / 16)
    assert torch.allclose(added, 5.0 + 0.25 * filled, rtol=1e-12, atol=1e-12)


def test_a_scale_is_never_rounded_down_and_the_grid_follows_it() -> None:
    for scale in np.exp(np.random.default_rng(0).uniform(-34, 34, size=1000)).tolist():
        assert scale <= float(gaussian._rounded_up(scale, np.dtype(np.float32))) <= scale * (1 + 2**-22)
        assert 2**-11 < grid(scale) / scale <= 2**-10
        assert math.frexp(grid(scale))[0] == 0.5


def test_system_noise_never_repeats() -> None:
    """Neither between calls with the same address nor between blocks or threads of one."""
    draws = [draw(System(threads), 2 * BLOCK + 999) for threads in (1, 2, 2)]
    parts = [v[start : start + 999].tobytes() for v in draws for start in (0, BLOCK // 2, BLOCK, 2 * BLOCK)]
    assert len(set(parts)) == len(parts)
    assert not System().repeatable
    assert Seeded(0).repeatable


def test_every_call_takes_a_key_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's generator held still the noise stands still: nothing else goes into it, and no address."""
    urandom = Mock(side_effect=bytes)
    monkeypatch.setattr("confide.privacy.gaussian.os.urandom", urandom)
    one, other = draw(System(1), 3 * BLOCK), draw(System(3), 3 * BLOCK, Address(9, 9, 9, "other"))
    np.testing.assert_array_equal(one, other)
    assert urandom.call_args_list == [call(32), call(32)]


def lowest_bits_attack(released: Values) -> float:
    """The share of values near 0 that are no multiple of the spacing of single precision below 1 (Mironov 2012)."""
    near = released[np.abs(released) < 0.125] * 2.0**24
    return float(np.mean(near != np.rint(near)))


def test_the_attack_on_the_lowest_bits_works_on_plain_noise() -> None:
    """A sum of 1.0 gives only multiples of 2^-24 there, a sum of 0.2 gives others: one value tells them apart."""
    noise = torch.empty(MANY).normal_(generator=torch.Generator().manual_seed(0))
    assert lowest_bits_attack((1.0 + noise).double().numpy()) == 0.0
    assert lowest_bits_attack((torch.tensor(0.2) + noise).double().numpy()) > 0.5


def release(value: float, kind: torch.dtype, size: int = MANY, scale: float = 1.0) -> Tensor:
    out = torch.full((size,), value, dtype=kind)
    System().add(out, scale, HERE)
    return out


@both_kinds
@pytest.mark.usefixtures("fixed_keys")
def test_system_noise_withstands_it(kind: torch.dtype) -> None:
    """Whatever the sum, only multiples of the grid are released, and their lowest bits are evenly distributed."""
    rest = []
    for value in (1.0, 0.2, 1e-9, -math.pi):
        steps = release(value, kind).double().numpy() / grid(1.0)
        assert bool((steps == np.rint(steps)).all())
        counts = np.bincount(steps.astype(np.int64) % 32, minlength=32)
        assert stats.chisquare(counts).pvalue > 1e-3
        rest.append(counts)
    assert stats.chi2_contingency(rest).pvalue > 1e-3


@both_kinds
@pytest.mark.usefixtures("fixed_keys")
def test_every_multiple_of_the_grid_is_released_as_often_as_it_should_be(kind: torch.dtype) -> None:
    scale, value, size = 0.75, 0.2, 1 << 22
    step, middle = grid(scale), np.arange(-200, 200)
    steps = np.rint(release(value, kind, size, scale).double().numpy() / step)
    seen = np.histogram(steps, bins=np.arange(-200.5, 200))[0]
    expected = size * step * stats.norm.pdf(middle * step, value, scale)
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3
    assert abs(seen.sum() - expected.sum()) < 4 * math.sqrt(expected.sum())
    assert seen.min() > 0


def test_rounding_is_dithered_evenly_between_two_multiples_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Gaussian held at 0, three tenths of the way give the upper multiple three times in ten."""
    centre_then_dither = Words(lambda size: bytes(size - size // 4) + np.random.default_rng(0).bytes(size // 4))
    monkeypatch.setattr(gaussian, "keystream", lambda *_: centre_then_dither)
    for kind in KINDS:
        steps = release(5.3 * grid(1.0), kind, BLOCK).double().numpy() / grid(1.0)
        assert set(steps.tolist()) == {5.0, 6.0}
        assert abs(float(steps.mean()) - 5.3) < 4 * math.sqrt(0.21 / BLOCK)


def test_large_and_small_sums_keep_their_value() -> None:
    for value in (1e6, -2.5e4, 3e3, 1e-12):
        for kind in KINDS:
            moved = (release(value, kind, 100_000).double() - value).mean()
            assert abs(float(moved)) < 5 / math.sqrt(100_000) + abs(value) * 2**-24


def test_radii_that_single_precision_cannot_resolve_get_more_bits() -> None:
    small = np.full(10_000, -1, dtype=np.float32)
    gaussian._open_tail(small)
    assert -1e-3 < small.max() < 0
    assert stats.kstest(-small, "uniform").pvalue > 1e-9
    large = np.array([-(2.0**24), -(2.0**40), -5.0], dtype=np.float32)
    gaussian._open_tail(large)
    assert large[:2].tolist() == [-(2.0**24), -(2.0**40)]
    assert 4 < -large[2] < 5


def test_words_of_nothing_but_zeros_or_ones_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones are the deepest tail, which the system source fills with fresh bits; zeros are the centre."""
    for byte in (b"\0", b"\xff"):
        stuck = Words(byte.__mul__)
        monkeypatch.setattr(gaussian, "keystream", lambda *_, stuck=stuck: stuck)
        for source in SOURCES:
            for kind in KINDS:
                values = draw(source, 1000, kind=kind)
                assert np.isfinite(values).all()
                assert np.abs(values).max() < 13
                assert (np.abs(values).max() > 6.5) == (byte == b"\xff")
                assert (len(np.unique(values)) > 50) == (byte == b"\xff" and not source.repeatable)


@both
def test_mistakes_are_named(source: Source) -> None:
    wrong = [torch.zeros(2, 2), torch.zeros(3, dtype=torch.float16), torch.zeros(3, device="meta"), torch.tensor(1.0)]
    for out in wrong:
        with pytest.raises(UserError, match="flat float32 or float64"):
            source.add(out, 1.0, HERE)
    for scale in (0.0, -1.0, math.nan, math.inf, 1e-20):
        with pytest.raises(UserError, match="noise scale="):
            source.add(torch.zeros(3), scale, HERE)
