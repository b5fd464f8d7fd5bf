"""A lower bound on epsilon from one run (Steinke, Nasr, Jagielski: Privacy auditing with one (1) training run, 2023).

m canaries are each included by a fair coin. From what the run released, an auditor guesses some of the coins and
abstains on the others. If the run is (epsilon, delta)-private, every guess is right with a chance of at most
e^epsilon / (1 + e^epsilon) given the others, so that the number of right guesses is no larger than a binomial one, but
for delta (their Theorem 5.2). More right guesses than that allows, at the wanted confidence, prove a larger epsilon.

Nothing here knows how the guesses were made: whatever a clever or clumsy auditor does, the bound is valid, and a
clumsy one only proves less. Guessing many or few of the coins shares the error probability equally (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARES = (1.0, 0.3, 0.1)
"""Of the canaries, how many are guessed: all, or those with the most telling scores only."""


@dataclass(frozen=True)
class Finding:
    """What one way of guessing proved."""

    guesses: int
    right: int
    epsilon: float
    """Lower bound at the confidence asked for, after sharing it with the other ways."""


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of so many right guesses or more, for an (epsilon, delta)-private run."""
    from scipy import stats  # type: ignore[import-untyped]

    if right <= 0:
        return 1.0
    p = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, p))
    near = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, p))
    worst = float((near / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * worst)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest epsilon that so many right guesses rule out, being wrong with probability `error` at most."""
    if chance(canaries, guesses, right, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, 1.0
    while chance(canaries, guesses, right, high, delta) <= error:
        low, high = high, 2 * high
        if high > 100:
            return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if chance(canaries, guesses, right, middle, delta) <= error else (low, middle)
    return low


def best_possible(canaries: int, delta: float, error: float) -> float:
    """The epsilon that would be proven if every guess were right; an audit of this size can prove no more."""
    counts = [guesses_of(canaries, share) for share in SHARES]
    return max(lower_bound(canaries, n, n, delta, error / len(SHARES)) for n in counts)


def guesses_of(canaries: int, share: float) -> int:
    """The number of canaries to guess for a share of them: even, half as included and half as left out."""
    return max(2, 2 * round(canaries * share / 2))


def findings(score: NDArray[np.float64], included: NDArray[np.bool_], delta: float, error: float) -> list[Finding]:
    """Guess by the score (large: included) for each share of the canaries, best first."""
    order = np.argsort(score, kind="stable")
    found = []
    for share in SHARES:
        half = guesses_of(len(included), share) // 2
        right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        found.append(Finding(2 * half, right, lower_bound(len(included), 2 * half, right, delta, error / len(SHARES))))
    return sorted(found, key=lambda f: f.epsilon, reverse=True)
