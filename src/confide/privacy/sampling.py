"""Who takes part in a central step. The sampler that runs is the one that is accounted for.

A Poisson cohort takes every user whose own 32 random bits fall below the rate: one coin per user, not a count and then
a choice. The bits are a keystream of AES in counter mode, whose key is a hash of seed and step or, for a release, comes
from the operating system: amplification by sampling holds only while nobody knows who took part, so whoever knows the
recipe must not be able to work it out. The rate is rounded down to a multiple of 2^-32, which can only spend less.
"""

from __future__ import annotations

import hashlib
import os
from typing import Literal

import numpy as np
from pydantic import Field

from confide.privacy.factorisation import cyclic_cohort
from confide.privacy.gaussian import keystream
from confide.randomness import generator
from confide.settings import Section

Kind = Literal["poisson", "fixed", "everyone", "cyclic"]
_BLOCK = 1 << 18


class Sampling(Section):
    """How the cohort of a central step is drawn."""

    kind: Literal["poisson", "fixed", "cyclic"] = Field(
        "poisson",
        description="poisson: every user independently; fixed: exactly `cohort` users without replacement; "
        "cyclic: fixed groups of at least `cohort` users, one after the other",
    )
    cohort: int = Field(gt=0, description="S, the expected (poisson), exact (fixed) or least (cyclic) number of users")


def sampler_of(settings: Sampling, population: int) -> Kind:
    """Name the sampler; a cohort of everybody is the plain Gaussian mechanism, whichever kind was asked for."""
    if settings.kind == "cyclic":
        return "cyclic"
    return "everyone" if settings.cohort == population else settings.kind


def draw_cohort(kind: Kind, cohort: int, population: int, seed: int | None, step: int, attempt: int = 0) -> np.ndarray:
    """Draw the cohort's users, in rising order. Without a seed nobody can foretell them or draw them again.

    Every attempt at a step has a cohort of its own: an accountant takes two releases for independent draws.
    """
    if kind == "everyone" or cohort == population:
        return np.arange(population)
    if kind == "cyclic":
        return cyclic_cohort(population, cohort, seed or 0, step)  # the schedule is public in any case
    if kind == "poisson":
        return _bernoulli(cohort / population, population, seed, _place(step, attempt))
    purpose = f"cohort of attempt {attempt}" if attempt else "cohort"
    draw = generator(int.from_bytes(os.urandom(16)) if seed is None else seed, purpose, step)
    return np.sort(draw.choice(population, size=cohort, replace=False))


def _place(step: int, attempt: int) -> str:
    return f"{step}/{attempt}" if attempt else str(step)


def _bernoulli(rate: float, population: int, seed: int | None, at: str) -> np.ndarray:
    place = f"{seed}/cohort/{at}".encode()
    key = os.urandom(16) if seed is None else hashlib.blake2b(place, digest_size=16, person=b"confide cohort").digest()
    stream = keystream(key, 0)
    threshold = np.uint32(int(rate * 2**32))
    zeros, bits = bytes(4 * _BLOCK), np.empty(4 * _BLOCK + 16, dtype=np.uint8)
    chosen = []
    for start in range(0, population, _BLOCK):
        stream.update_into(zeros, bits.data)
        block = bits[: 4 * _BLOCK].view("<u4")[: population - start]
        chosen.append(np.flatnonzero(block < threshold) + start)
    return np.concatenate(chosen)
