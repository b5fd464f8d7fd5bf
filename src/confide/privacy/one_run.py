"""Lower bounds on epsilon from one run with m canaries, each of which is included by a fair coin.

From what the run released, an auditor guesses some of the coins and abstains on the others. `audit_guesses` tries three
bounds:

* "pure": if the run is (epsilon, delta)-private, every guess is right with a chance of at most
  e^epsilon / (1 + e^epsilon) given the others, so that the number of right guesses is no larger than a binomial one,
  but for delta (Steinke et al., Theorem 5.2). It needs nothing but the one pair that is claimed, and it takes many
  canaries: at epsilon 5 more than 600, all of them guessed right.
* "curve": an accountant states an epsilon for every delta, and all these pairs together bound the trade-off between the
  two errors of a guess: beta >= f(alpha) = max over pairs of 1 - delta - e^epsilon alpha and
  e^-epsilon (1 - delta - alpha). Mahloujifar et al. (Algorithm 3, with their limit on the number of guesses) bound the
  number of right guesses by a recursion over f, which is tighter for Gaussian noise.
* "independent": both of the above allow that one bad event gives all the coins away together. Where canaries share no
  coordinate and users are drawn independently of each other, Gaussian noise tells of each canary by itself. Each guess
  is then right with a chance of at most (1 + t) / 2, independently of the others, where t, the largest distance in
  total variation that the curve allows, is at most delta + (1 - delta) tanh(epsilon / 2) for each of its pairs. The
  exact binomial tail (Clopper and Pearson) of all guesses is a valid bound there, and by far the sharpest. It needs
  guesses that look at their own canary only, against a threshold that was fixed beforehand.

The first two do not ask how guesses were made: as long as these come from the release alone and their number was fixed
beforehand, the bounds are valid, and a clumsy auditor only proves less. They are tried for several numbers of guesses.

The last two speak of a curve, not of one epsilon. Their number is the epsilon of the largest curve that they rule out,
in a family that has the claimed curve among its members: `curve_for` moves the epsilon at every delta by as much as a
Gaussian mechanism's would move. Above the claim, this disproves that the run has the curve that the accountant states
for it. The error probability is shared equally among all that is tried (Bonferroni), so that the best of the bounds
holds at the confidence asked for.

1. T. Steinke, M. Nasr, M. Jagielski. Privacy auditing with one (1) training run. NeurIPS 2023.
2. S. Mahloujifar, L. Melis, K. Chaudhuri. Auditing f-differential privacy in one run. 2024.
3. C. Clopper, E. Pearson. The use of confidence or fiducial limits illustrated in the case of the binomial. 1934.

Differs from the papers: the second takes f from the Gaussian mechanisms alone; here the claimed curve itself is tested,
so that an alarm contradicts exactly what was stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SHARES = (1.0, 0.3, 0.1)
"""Of the canaries, how many are guessed: all, or those with the most telling scores only."""
_LARGEST = 500.0  # exponents beyond this say nothing any more, and would overflow

Curve = tuple[tuple[float, float], ...]
"""Pairs of epsilon and delta that all hold for the same run. The first is the claim as it is stated."""
Method = Literal["pure", "curve", "independent"]


@dataclass(frozen=True)
class Finding:
    """What one way of guessing proved by one of the bounds."""

    method: Method
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
    return _largest(lambda epsilon: chance(canaries, guesses, right, epsilon, delta) <= error)


@lru_cache(maxsize=4096)
def curve_for(claimed: Curve, epsilon: float) -> Curve:
    """The claimed curve, moved to this epsilon at the claim's delta as the curve of a Gaussian mechanism would move."""
    from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

    stated, delta = claimed[0]
    if epsilon <= 0:
        return tuple((0.0, d) for _, d in claimed)
    before, after = get_sigma_gaussian(stated, delta), get_sigma_gaussian(epsilon, delta)
    moved = [(e + get_epsilon_gaussian(after, d) - get_epsilon_gaussian(before, d), d) for e, d in claimed[1:]]
    return (epsilon, delta), *((max(e, 0.0), d) for e, d in moved)


def contradicts(canaries: int, guesses: int, right: int, curve: Curve, error: float) -> bool:
    """Whether so many right guesses have a probability below `error` if the run has this curve.

    r and h follow Mahloujifar et al.: walking down from the observed number of right guesses, they bound from below
    the probability mass of runs with more right or wrong guesses. More than all of it is a contradiction.
    """
    constants, slopes = _trade_off(curve)
    r, h = error * right / canaries, error * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        higher = float((constants + slopes * r).max())
        if higher <= h:  # then neither of them changes any more
            break
        r = min(1.0, r + i / (guesses - i) * (higher - h))
        h = higher
        if r + h > guesses / canaries:
            return True
    return r + h > guesses / canaries


def curve_bound(canaries: int, guesses: int, right: int, claimed: Curve, error: float) -> float:
    """The epsilon of the largest curve that so many right guesses rule out."""
    return _largest(lambda epsilon: contradicts(canaries, guesses, right, curve_for(claimed, epsilon), error))


def independent_bound(guesses: int, right: int, claimed: Curve, error: float) -> float:
    """The epsilon of the largest curve that so many right guesses rule out if they are independent of each other."""
    from scipy import stats

    def refuted(epsilon: float) -> bool:
        curve = curve_for(claimed, epsilon)
        distance = min(delta + (1 - delta) * math.tanh(e / 2) for e, delta in curve)
        return float(stats.binom.sf(right - 1, guesses, (1 + distance) / 2)) <= error

    return _largest(refuted)


def audit_guesses(
    score: NDArray[np.float64], included: NDArray[np.bool_], claimed: Curve, error: float, independent: bool
) -> list[Finding]:
    """Guess by the sign of the score (above 0: included), for each share of the canaries the most telling ones.

    Returns what each way proved, best first. Scores come from the release alone, so where they put their zero does not
    depend on the coins. `independent` says that each canary's score depends on nothing of the others.
    """
    order = np.argsort(-np.abs(score), kind="stable")
    right = np.cumsum((score > 0)[order] == included[order])
    counts = [_guesses(len(included), share) for share in SHARES]
    return _bounds(len(included), [(n, int(right[n - 1])) for n in counts], claimed, error, independent)


@lru_cache(maxsize=1024)
def best_possible(canaries: int, claimed: Curve, error: float, independent: bool) -> float:
    """The epsilon that is proven if every guess is right; an audit of this size can prove no more."""
    counts = [_guesses(canaries, share) for share in SHARES]
    return _bounds(canaries, [(n, n) for n in counts], claimed, error, independent)[0].epsilon


def canaries_needed(epsilon: float, claimed: Curve, error: float, most: int, independent: bool) -> int | None:
    """The least number of canaries, to two digits, whose right guesses prove this epsilon; none if beyond `most`."""
    steps = [int(digits * ten) for ten in (1, 10, 100, 1000, 10_000) for digits in range(10, 100)]
    sizes = [size for size in steps if size <= most]
    if not sizes or best_possible(sizes[-1], claimed, error, independent) < epsilon:
        return None
    low, high = -1, len(sizes) - 1  # more canaries prove more: halve
    while high - low > 1:
        middle = (low + high) // 2
        enough = best_possible(sizes[middle], claimed, error, independent) >= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return sizes[high]


def _guesses(canaries: int, share: float) -> int:
    return max(1, round(canaries * share))


def _bounds(
    canaries: int, outcomes: Sequence[tuple[int, int]], claimed: Curve, error: float, independent: bool
) -> list[Finding]:
    """What guesses prove by each bound, from pairs of their number and how many were right; best first.

    The first pair is for all canaries, the only one without a choice that looks at several of them.
    """
    each = error / (2 * len(outcomes) + independent)
    found = []
    for guesses, right in outcomes:
        pure = lower_bound(canaries, guesses, right, claimed[0][1], each)
        found.append(Finding("pure", guesses, right, pure))
        found.append(Finding("curve", guesses, right, curve_bound(canaries, guesses, right, claimed, each)))
    if independent:
        found.append(Finding("independent", *outcomes[0], independent_bound(*outcomes[0], claimed, each)))
    return sorted(found, key=lambda finding: finding.epsilon, reverse=True)


def _trade_off(curve: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """f(1 - x) as the largest of straight lines: their constants and slopes. f is its own inverse."""
    constants, slopes = [0.0], [0.0]
    for epsilon, delta in curve:
        factor = math.exp(min(epsilon, _LARGEST))
        constants += [1 - delta - factor, -delta / factor]
        slopes += [factor, 1 / factor]
    return np.array(constants), np.array(slopes)


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest epsilon that is refuted, by halving; 0 if none is, and never more than 100."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > 100:
            return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
