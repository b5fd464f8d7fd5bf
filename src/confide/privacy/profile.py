"""The whole privacy profile of a run: epsilon over delta, and the Gaussian-DP mu that covers it.

One pair (epsilon, delta) is one point of a curve, and two runs with the same point can differ elsewhere. Every point
here is an upper bound by the accountant of the run.

mu-GDP (Dong, Roth and Su 2022) says that the models tell no more than one draw from N(0, 1) or N(mu, 1) would. Its
profile is delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu) (their Corollary 1).
Without sampling a run of Gaussian releases is exactly mu-GDP with mu^2 = sum z_i^-2 (their Corollary 2), for releases
that are moved by up to one deviation in z. With sampling it is not mu-GDP for any small mu, so the mu that is given is
the smallest one whose profile lies on or above every point of the grid that has an epsilon above 0. That sums up the
curve on the grid of deltas; between and beyond its points it is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from confide.errors import UserError
from confide.privacy import accountant
from confide.privacy.accountant import Accountant, accountant_used
from confide.privacy.events import Event
from confide.settings import Section

DELTAS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3)
"""The grid; the delta of the run is added to it."""
_GAUSSIAN = {"everyone": 1.0, "cyclic": 1.0, "local": 2.0}
"""Samplers that accountants take for plain Gaussians: what a user moves a release by, in units of what z is for."""


class Point(Section):
    """One point of the profile."""

    delta: float
    epsilon: float = Field(description="an upper bound")
    accountant: Accountant


class Mu(Section):
    """Gaussian differential privacy."""

    value: float
    exact: bool = Field(
        description="true: the run is mu-GDP; false: the smallest mu whose profile lies on or above the points of this "
        "statement's profile with an epsilon above 0, and no proof between and beyond them"
    )


def epsilon_by(events: Sequence[Event], delta: float, kind: Accountant) -> float | None:
    """Epsilon by one accountant; none where it has no proof, or is not used at so small a delta."""
    if accountant_used(kind, delta) != kind:
        return None
    try:
        found = accountant.epsilon(events, delta, kind)
    except UserError:
        return None
    return found if math.isfinite(found) else None


def profile(events: Sequence[Event], delta: float, kind: Accountant) -> list[Point]:
    """Epsilon at every delta of the grid, and at `delta`."""
    points = []
    for at in sorted({*DELTAS, delta}):
        by = accountant_used(kind, at)
        found = accountant.epsilon(events, at, by)
        if math.isfinite(found):
            points.append(Point(delta=at, epsilon=found, accountant=by))
    return points


def gaussian_mu(events: Sequence[Event], points: Sequence[Point]) -> Mu | None:
    """mu of the releases: exact where they are Gaussians without sampling, otherwise the one that covers the points."""
    if events and all(event.private and event.sampler in _GAUSSIAN for event in events):
        squares = math.fsum((_GAUSSIAN[event.sampler] / event.noise_multiplier) ** 2 for event in events)
        return Mu(value=math.sqrt(squares) * (1 + 1e-12), exact=True)
    found = [covering_mu(point.epsilon, point.delta) for point in points if point.epsilon > 0]
    return Mu(value=max(found), exact=False) if found else None


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta of mu-GDP at this epsilon (Dong, Roth and Su 2022, Corollary 1)."""
    from scipy.special import log_ndtr  # type: ignore[import-untyped]

    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return max(first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)), 0.0)


def covering_mu(epsilon: float, delta: float) -> float:
    """The smallest mu (to a millionth, rounded up) whose profile at `epsilon` is at least `delta`."""
    high = 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(middle, epsilon) >= delta else (middle, high)
    return high
