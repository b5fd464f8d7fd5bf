"""Secure aggregation's arithmetic: bounded updates as integers modulo 2^bits, so that masks cancel and sums are exact.

Each user rounds its update to multiples of a grid step and adds masks that are uniform modulo 2^bits; the server adds
up what it receives, the masks cancel, and the sum of the rounded updates remains, exactly (Bonawitz et al. 2017,
section 4). The server never needs a single user's update. Who agrees on seeds with whom, and who drops out, is a matter
of protocol and not of this module.

Guarantee. For ||x|| <= C in d dimensions the rounded update has, for every outcome of the rounding, norm at most

    nearest       min(C + step sqrt(d) / 2, 2 C)
    stochastic    C + step sqrt(d)
    conditional   sqrt(C^2 + step^2 d / 4 + sqrt(2 log(1 / beta)) step (C + step sqrt(d) / 2)),

and this, `Ring.sensitivity`, is what a plan must use in place of C. Why: nearest rounding moves a coordinate by at most
step / 2 and takes to 0 what is smaller than that; stochastic rounding moves it by less than a step. Stochastic rounding
is unbiased, with variance at most step^2 / 4 per coordinate, so Hoeffding's inequality for the sum of squares gives the
third line with probability 1 - beta; `conditional` draws again until it holds (Kairouz et al. 2021, Algorithm 1 and
Theorem 1). That costs a small bias, and in many dimensions buys a far smaller sensitivity. C counts as larger by 1e-12
of itself, which covers that a norm is computed in double precision.

No sum of up to `cohort` updates can leave the ring or what a double holds exactly: a ring that cannot promise this is
refused when it is made, and a larger cohort is refused when it is added up. A Poisson cohort has no largest size short
of the population; give a size that is exceeded with a probability that you would accept as a lost step.

Differs from the papers: Kairouz et al. let users add discrete noise and rotate the updates first, and accept that a sum
can wrap around; here noise is added to the sum, and no sum wraps. Masks come from AES in counter mode, as in Bonawitz
et al., but a seed serves many steps, each with counters of its own.

1. K. Bonawitz et al. Practical secure aggregation for privacy-preserving machine learning. CCS 2017.
2. P. Kairouz, Z. Liu, T. Steinke. The distributed discrete Gaussian mechanism for federated learning with secure
   aggregation. ICML 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from confide.errors import UserError

Rounding = Literal["nearest", "stochastic", "conditional"]
Vector = np.ndarray[Any, np.dtype[Any]]
BETA = math.exp(-0.5)
"""Share of conditional roundings that may have to be drawn again, at most."""
_EXACT_BITS = 52  # a double holds every integer of so many bits, and one bit more for its rounding
_SPARE = 2  # steps beyond the bound: one for rounding, one for the last bits of a norm
_BLOCK = 1 << 20
_SLACK = 1e-12
_TRIES = 1000  # BETA to this power is 1e-217


def sensitivity(bound: float, step: float, dimension: int, rounding: Rounding) -> float:
    """The largest norm of a rounded update; the formulas are in the module's docstring."""
    bound, spread = bound * (1 + _SLACK), step * math.sqrt(dimension)
    if rounding == "nearest":
        return min(bound + spread / 2, 2 * bound)
    if rounding == "stochastic":
        return bound + spread
    return math.sqrt(bound**2 + spread**2 / 4 + math.sqrt(2 * math.log(1 / BETA)) * step * (bound + spread / 2))


@dataclass(frozen=True)
class Ring:
    """The integers modulo 2^bits, and how updates are written in them. `make_ring` chooses the step."""

    bits: Literal[32, 64]
    step: float
    bound: float
    """C, the largest norm of an update before rounding."""
    cohort: int
    """The largest number of updates in a sum."""
    dimension: int
    rounding: Rounding = "conditional"

    def __post_init__(self) -> None:
        _check(self.bits, self.bound, self.cohort, self.dimension)
        if not self.step > 0 or math.frexp(self.step)[0] != 0.5:
            raise UserError(f"step={self.step!r} must be a power of two, so that scaling by it is exact")
        if self.cohort * (math.floor(self.bound / self.step) + _SPARE) > _capacity(self.bits):
            raise UserError(
                f"step={self.step:g} is too small: a sum of cohort={self.cohort} updates of bound={self.bound:g} could "
                f"overflow {self.bits} bits; use a larger step, more bits or a smaller cohort"
            )

    @property
    def sensitivity(self) -> float:
        """The largest norm that one user adds to the sum. A plan takes this in place of the bound."""
        return sensitivity(self.bound, self.step, self.dimension, self.rounding)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")


def make_ring(
    bound: float,
    cohort: int,
    dimension: int,
    bits: Literal[32, 64] | None = None,
    rounding: Rounding = "conditional",
    growth: float = 0.01,
) -> Ring:
    """The ring with the smallest step. Without `bits`: 32 if that enlarges C by at most the share `growth`, else 64."""
    choices: tuple[Literal[32, 64], ...] = (32, 64) if bits is None else (bits,)
    for choice in choices:
        _check(choice, bound, cohort, dimension)
        room = _capacity(choice) // cohort - _SPARE  # what a coordinate may reach, in steps
        if room >= 1:
            step = math.ldexp(1.0, math.frexp(bound / room)[1] - 1)
            step = step if bound / step <= room else 2 * step
            ring = Ring(choice, step, bound, cohort, dimension, rounding)
            if bits is not None or ring.sensitivity <= bound * (1 + growth):
                return ring
    if bits is None:
        raise UserError(
            f"no ring keeps the sensitivity within {growth:.3g} of bound={bound:g} for cohort={cohort} in "
            f"{dimension} dimensions; allow more growth, or lower the cohort"
        )
    raise UserError(f"cohort={cohort} leaves no room for updates in a {bits}-bit ring; use more bits or fewer users")


def quantise(ring: Ring, update: Tensor, random: np.random.Generator) -> Vector:
    """An update as integers modulo 2^bits. Nearest rounding draws nothing from `random`."""
    if update.dim() != 1 or update.numel() != ring.dimension:
        raise UserError(f"update of shape {tuple(update.shape)} given to a ring of dimension {ring.dimension}")
    values = update.detach().numpy()
    scale = _within_bound(ring, values) / ring.step
    limit = (ring.sensitivity / ring.step) ** 2 * (1 - _SLACK / 10)
    out = np.empty(ring.dimension, dtype=ring.dtype)
    for _ in range(_TRIES):
        squares = 0.0
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK].astype(np.float64) * scale  # in steps
            whole = np.rint(part) if ring.rounding == "nearest" else _round_at_random(part, random)
            squares += float(np.square(whole).sum())
            out[start : start + _BLOCK] = whole.astype(np.int64)  # negative ones wrap around
        if ring.rounding != "conditional" or squares <= limit:
            return out
    raise RuntimeError("conditional rounding did not come to an end: the random generator is not random")


def prg(ring: Ring, seed: bytes, step: int) -> Vector:
    """A mask: AES in counter mode under a seed of 16 or 32 bytes, with counters that belong to this central step."""
    if len(seed) not in (16, 32) or not 0 <= step < 2**64:
        raise UserError(f"a mask needs a seed of 16 or 32 bytes and a step of 64 bits, not {len(seed)} and {step}")
    stream = Cipher(algorithms.AES(seed), modes.CTR((step << 64).to_bytes(16, "big"))).encryptor()
    return np.frombuffer(stream.update(bytes(ring.dimension * ring.dtype.itemsize)), dtype=ring.dtype)


def mask(ring: Ring, user: int, pair_seeds: Mapping[int, bytes], step: int, self_seed: bytes | None = None) -> Vector:
    """What a user adds to its update: + the pair's mask towards later users, - towards earlier ones, + its own.

    Both users of a pair know the pair's seed, so its mask cancels in the sum. For a user who dropped out after the
    others had masked, the server adds `mask` over the pairs' seeds in its place; nothing of its update was sent.
    """
    total = prg(ring, self_seed, step).copy() if self_seed is not None else np.zeros(ring.dimension, dtype=ring.dtype)
    for other, seed in pair_seeds.items():
        if other == user:
            raise UserError(f"user {user} is paired with itself")
        if other > user:
            total += prg(ring, seed, step)
        else:
            total -= prg(ring, seed, step)
    return total


def add_up(ring: Ring, vectors: Iterable[Vector]) -> Vector:
    """The sum modulo 2^bits, masked or not."""
    total = np.zeros(ring.dimension, dtype=ring.dtype)
    for count, vector in enumerate(vectors, start=1):
        if count > ring.cohort:
            raise UserError(f"more than cohort={ring.cohort} updates in a sum could wrap around; make a larger ring")
        if vector.dtype != ring.dtype or vector.shape != total.shape:
            raise UserError(
                f"a vector of {vector.dtype} and shape {vector.shape} is not one of this ring, which has {ring.dtype} "
                f"and shape {total.shape}"
            )
        total += vector
    return total


def dequantise(ring: Ring, total: Vector) -> Tensor:
    """The sum of the rounded updates, exactly, in double precision. `total` must have no mask left."""
    signed = total.view(np.dtype(f"<i{ring.bits // 8}"))
    return torch.from_numpy(signed.astype(np.float64)).mul_(ring.step)


def _round_at_random(values: Vector, random: np.random.Generator) -> Vector:
    """Up with the probability of the fraction, else down: the mean is the value."""
    down = np.floor(values)
    return np.asarray(down + (random.random(len(values)) < values - down))


def _within_bound(ring: Ring, values: Vector) -> float:
    """1, or the factor that takes off what single precision may have left above the bound."""
    norm = math.sqrt(math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in _blocks(values)))
    if not norm <= ring.bound * (1 + 1e-5):
        raise UserError(f"an update of norm {norm:g} was given to a ring of bound={ring.bound:g}; bound it first")
    return min(1.0, ring.bound / norm) if norm else 1.0


def _blocks(values: Vector) -> Iterable[Vector]:
    return (values[start : start + _BLOCK] for start in range(0, len(values), _BLOCK))


def _capacity(bits: int) -> int:
    """The largest sum, in steps, that has a sign in the ring and is exact in a double."""
    return int(2 ** min(bits - 1, _EXACT_BITS)) - 1


def _check(bits: int, bound: float, cohort: int, dimension: int) -> None:
    if bits not in (32, 64):
        raise UserError(f"bits={bits}: a ring has 32 or 64 bits")
    if not 1e-100 <= bound <= 1e100:
        raise UserError(f"bound={bound}: only updates with a bound between 1e-100 and 1e100 can be summed securely")
    if cohort < 1 or dimension < 1:
        raise UserError(f"cohort={cohort} and dimension={dimension} must be at least 1")
