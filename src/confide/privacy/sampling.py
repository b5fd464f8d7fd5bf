"""Who takes part in a central step. The sampler that runs is the one that is accounted for.

A Poisson cohort takes every user whose own 32 random bits fall below the rate: one coin per user, not a count and then
a choice. The bits are a keystream of AES in counter mode, whose key is a hash of seed and step or, for a release, comes
from the operating system: amplification by sampling holds only while nobody knows who took part, so whoever knows the
recipe must not be able to work it out. The rate is rounded down to a multiple of 2^-32, which can only spend less.
A cohort of fixed size, and the part of a larger draw that `most` keeps, are drawn by Philox from seed and step or, for
a release, by such a keystream too.

With `cyclic_poisson` the users are dealt into groups that take turns, and the coins are tossed for the users of one
group (`confide.privacy.factorisation` has the theorem). With `most` a draw of more users than that is cut down to a
uniformly random part of it, which costs a little of delta (`confide.privacy.accountant` says how much).
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Literal

import numpy as np
from pydantic import Field

from confide.privacy.events import turn_rate
from confide.privacy.factorisation import cyclic_cohort, group_of
from confide.privacy.gaussian import keystream
from confide.randomness import generator
from confide.settings import Section

Kind = Literal["poisson", "fixed", "everyone", "cyclic", "cyclic_poisson"]
_BLOCK = 1 << 18


class Sampling(Section):
    """How the cohort of a central step is drawn."""

    kind: Literal["poisson", "fixed", "cyclic", "cyclic_poisson"] = Field(
        "poisson",
        description="poisson: every user independently; fixed: exactly `cohort` users without replacement; "
        "cyclic: fixed groups of at least `cohort` users, one after the other; cyclic_poisson: every user of one of "
        "`privacy.bands` fixed groups independently, one group after the other",
    )
    cohort: int = Field(gt=0, description="S, the expected (poisson), exact (fixed) or least (cyclic) number of users")
    # Left out of a dump where it is not used, so that recipes from before it was there keep their digest.
    most: int | None = Field(
        None, gt=0, exclude_if=lambda value: value is None,
        description="for poisson and cyclic_poisson: the largest cohort; of a larger draw a random part is kept",
    )  # fmt: skip

    @property
    def refusals(self) -> list[str]:
        """Why no cohorts can be drawn like this."""
        if self.most is None:
            return []
        if self.kind not in ("poisson", "cyclic_poisson"):
            return [f"sampling.most: cohorts of kind {self.kind} have one size; leave it out"]
        if self.most < self.cohort:
            enough = math.ceil(self.cohort + 8 * math.sqrt(self.cohort))
            return [f"sampling.most={self.most} is below the expected cohort of {self.cohort}; give about {enough}"]
        return []


def sampler_of(settings: Sampling, population: int) -> Kind:
    """Name the sampler; a cohort of everybody is the plain Gaussian mechanism, whichever kind was asked for."""
    if settings.kind in ("cyclic", "cyclic_poisson"):
        return settings.kind
    return "everyone" if settings.cohort == population else settings.kind


def draw_cohort(
    kind: Kind, cohort: int, population: int, seed: int | None, step: int, attempt: int = 0, groups: int = 1,
    most: int = 0,
) -> np.ndarray:  # fmt: skip
    """Draw the cohort's users, in rising order. Without a seed nobody can foretell them or draw them again.

    Every attempt at a step has a cohort of its own: an accountant takes two releases for independent draws. `groups` is
    for cyclic_poisson; `most` is the largest cohort, where there is one.
    """
    if kind == "everyone" or cohort == population:
        return np.arange(population)
    if kind == "cyclic":
        return cyclic_cohort(population, cohort, seed or 0, step)  # the schedule is public in any case
    purpose = f"cohort of attempt {attempt}" if attempt else "cohort"
    if kind == "fixed":
        return _some(population, cohort, seed, purpose, step)
    if kind == "poisson":
        drawn = _bernoulli(cohort / population, population, seed, _place(step, attempt))
    else:
        users = group_of(population, groups, seed or 0, step)  # the groups are public in any case
        drawn = users[_bernoulli(turn_rate(cohort / population, groups), len(users), seed, _place(step, attempt))]
    return drawn[_some(len(drawn), most, seed, purpose, step)] if 0 < most < len(drawn) else drawn


def _place(step: int, attempt: int) -> str:
    return f"{step}/{attempt}" if attempt else str(step)


def _some(count: int, size: int, seed: int | None, purpose: str, step: int) -> np.ndarray:
    """A uniformly random part of the first `count` numbers, in rising order."""
    if seed is not None:
        return np.sort(generator(seed, purpose, step).choice(count, size=size, replace=False))
    # Who has the smallest tickets of 64 bits. Two are alike with a probability of count^2 2^-65.
    tickets = np.frombuffer(keystream(os.urandom(16), 0).update(bytes(8 * count)), dtype="<u8")
    return np.sort(np.argpartition(tickets, size)[:size])


def _bernoulli(rate: float, population: int, seed: int | None, at: str) -> np.ndarray:
    if rate >= 1:  # 32 bits do not hold its threshold
        return np.arange(population)
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
