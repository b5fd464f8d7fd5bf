"""Secure aggregation's arithmetic: bounded updates as integers modulo 2^bits, so that masks cancel and sums are exact.

Each user rounds its update to the nearest multiples of a grid step and adds masks that are uniform modulo 2^bits; the
server adds up what it receives, the masks cancel, and the sum of the rounded updates remains, exactly (Bonawitz et al.
2017, section 4). The server never needs a single user's update. `secure` is the protocol: who agrees on seeds with
whom, and what happens when somebody drops out.

Guarantee. For ||x|| <= C in d dimensions the rounded update has norm at most min(C + step sqrt(d) / 2, 2 C), because
rounding moves a coordinate by at most step / 2 and takes to 0 what is smaller than that. A plan must use this
`sensitivity` in place of C. C counts as larger by 1e-12 of itself, which covers that a norm is computed in double
precision.

No sum of up to `cohort` updates can leave the ring or what a double holds exactly: a ring that cannot promise this is
refused when it is made. A Poisson cohort has no largest size short of the population; give a size that is exceeded with
a probability that you would accept as a lost step.

Differs from the paper: masks come from AES in counter mode too, but a seed serves many steps, each with counters of its
own.

1. K. Bonawitz et al. Practical secure aggregation for privacy-preserving machine learning. CCS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.privacy.gaussian import keystream

Bits = Literal[32, 64]
Vector = np.ndarray[Any, np.dtype[Any]]
_EXACT_BITS = 52  # a double holds every integer of so many bits, and one bit more for its rounding
_SPARE = 2  # steps beyond the bound: one for rounding, one for the last bits of a norm
_SLACK = 1e-12


def sensitivity(bound: float, step: float, dimension: int) -> float:
    """The largest norm of an update of norm `bound` after rounding."""
    bound *= 1 + _SLACK
    return min(bound + step * math.sqrt(dimension) / 2, 2 * bound)


@dataclass(frozen=True)
class Ring:
    """The integers modulo 2^bits, and how updates are written in them. `make_ring` chooses the step."""

    bits: Bits
    step: float
    bound: float
    """C, the largest norm of an update before rounding."""
    cohort: int
    """The largest number of updates in a sum."""
    dimension: int

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
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")


def make_ring(bound: float, cohort: int, dimension: int, bits: Bits = 64) -> Ring:
    """The ring with the smallest step."""
    _check(bits, bound, cohort, dimension)
    room = _capacity(bits) // cohort - _SPARE  # what a coordinate may reach, in steps
    if room < 1:
        raise UserError(
            f"cohort={cohort} leaves no room for updates in a {bits}-bit ring; use more bits or fewer users"
        )
    step = math.ldexp(1.0, math.frexp(bound / room)[1] - 1)
    return Ring(bits, step if bound / step <= room else 2 * step, bound, cohort, dimension)


def prg(ring: Ring, seed: bytes, step: int) -> Vector:
    """A mask: AES in counter mode under a seed of 16 or 32 bytes, with counters that belong to this central step."""
    if len(seed) not in (16, 32) or not 0 <= step < 2**64:
        raise UserError(f"a mask needs a seed of 16 or 32 bytes and a step of 64 bits, not {len(seed)} and {step}")
    return np.frombuffer(keystream(seed, step).update(bytes(ring.dimension * ring.dtype.itemsize)), dtype=ring.dtype)


def mask(ring: Ring, user: int, pair_seeds: Mapping[int, bytes], step: int, self_seed: bytes | None = None) -> Vector:
    """What a user adds to its update: + the pair's mask towards later users, - towards earlier ones, + its own.

    Both users of a pair know the pair's seed, so its mask cancels in the sum. For a user who dropped out after the
    others had masked, the server adds `mask` over the pairs' seeds in its place; nothing of its update was sent.
    """
    total = prg(ring, self_seed, step).copy() if self_seed is not None else np.zeros(ring.dimension, dtype=ring.dtype)
    for other, seed in pair_seeds.items():
        if other == user:
            raise UserError(f"user {user} is paired with itself")
        add_or_take = np.add if other > user else np.subtract
        add_or_take(total, prg(ring, seed, step), out=total)
    return total


def dequantise(ring: Ring, total: Vector) -> Tensor:
    """The sum of the rounded updates, exactly, in double precision. `total` must have no mask left."""
    signed = total.view(np.dtype(f"<i{ring.bits // 8}"))
    return torch.from_numpy(signed.astype(np.float64)).mul_(ring.step)


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
