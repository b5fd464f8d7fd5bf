"""NORM Theorems 2 to 6 and Proposition 1: clipping against normalising users' updates in convex problems.

Users have convex L-smooth f_i, take E full-batch steps and send u_i = (w - w_E) / eta, clipped to C or normalised to C;
C^ = C / E. With gamma > 0 and alpha >= 1 of our choice, C^ >= 4 sqrt(L max Delta_i*), E <= alpha / (2 rho),
eta = rho / (2 alpha L) and K = 2 alpha gamma / (C^ E rho^2) rounds (eqs 6 and 14),

    E mean_i progress_i <= A + B,
    A = C^ (L ||w_0 - w*||^2 / gamma + gamma / L) rho                                      effect of initialisation
    B = 3 E / (2 alpha)  E mean_i [within] Delta_i*  rho                                   heterogeneity, clipping
    B = E mean_i [within] (C^^2 / (2 alpha L) + C^ E / ||u_i|| Delta_i* rho E / alpha^2) E rho    the same, normalising

where [within] is 1 for users with ||u_i|| <= C^ E, progress_i of the others is 3 C^ ||u_i|| / (8 L E) and of these is
(2 - rho E / alpha - rho^2 E^2 / alpha^2) (f_i(w) - f_i(w*)) for clipping and
(2 - rho^2 E^2 / alpha^2) C^ E / ||u_i|| (f_i(w) - f_i(w*)) for normalising.

rho = sqrt(q d log(1/delta)) / (n epsilon) (eq. 3), the constant q of Theorem 1 being open. Theorem 1's noise on the
average is sigma^2 = q K C^2 log(1/delta) / (n epsilon)^2, so rho = (sigma / C) sqrt(d / K): `rho_of_noise` takes the
noise that an accountant calibrated and needs no constant.

Differs from the paper: eq. 15 repeats term B without Delta_i*; eq. 6 has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Convex:
    """A problem and the choices that the theorems leave open."""

    rho: float
    smoothness: float  # L
    bound: float  # C^ = C / E
    local_steps: int  # E
    distance: float  # ||w_0 - w*||
    gamma: float | None = None  # None: L ||w_0 - w*||, which makes A least
    alpha: float = 1.0

    @property
    def balance(self) -> float:
        return self.smoothness * self.distance if self.gamma is None else self.gamma

    @property
    def learning_rate(self) -> float:
        """eta, of users and server alike."""
        return self.rho / (2 * self.alpha * self.smoothness)

    @property
    def rounds(self) -> float:
        """K"""
        return 2 * self.alpha * self.balance / (self.bound * self.local_steps * self.rho**2)

    @property
    def initialisation(self) -> float:
        """Term A."""
        sides = self.smoothness * self.distance**2 / self.balance + self.balance / self.smoothness
        return self.bound * sides * self.rho

    def unmet(self, gaps: Sequence[float]) -> list[str]:
        """The conditions of the theorems that do not hold; `gaps` are the Delta_i*."""
        least = 4 * math.sqrt(self.smoothness * max(gaps, default=0.0))
        most = self.alpha / (2 * self.rho)
        problems = []
        if not 0 < self.rho < 1:
            problems.append(f"rho={self.rho:.4g} is not between 0 and 1: too few users for this privacy")
        if self.alpha < 1:
            problems.append(f"alpha={self.alpha:.4g} is below 1")
        if self.bound < least:
            problems.append(f"C/E={self.bound:.4g} is below 4 sqrt(L max Delta)={least:.4g}")
        if self.local_steps > most:
            problems.append(f"E={self.local_steps} is above alpha/(2 rho)={most:.4g}")
        return problems


@dataclass(frozen=True)
class Bound:
    initialisation: float  # A
    heterogeneity: float  # B

    @property
    def total(self) -> float:
        return self.initialisation + self.heterogeneity


def rho(dimension: int, delta: float, users: int, epsilon: float, constant: float = 1.0) -> float:
    """Eq. 3."""
    return math.sqrt(constant * dimension * math.log(1 / delta)) / (users * epsilon)


def rho_of_noise(noise: float, dimension: int, rounds: int) -> float:
    """rho from the deviation of the noise on the average, in units of C, of a run of so many rounds."""
    return noise * math.sqrt(dimension / rounds)


def theorem2(problem: Convex, norms: Sequence[float], gaps: Sequence[float]) -> Bound:
    """DP-FedAvg with clipping (eq. 6), from each user's ||u_i|| at a random round and its Delta_i*."""
    whole = problem.bound * problem.local_steps
    within = [gap if norm <= whole else 0.0 for norm, gap in zip(norms, gaps, strict=True)]
    weight = 3 * problem.local_steps / (2 * problem.alpha)
    return Bound(problem.initialisation, weight * _mean(within) * problem.rho)


def theorem3(problem: Convex, gaps: Sequence[float]) -> Bound:
    """The simplified form (eq. 7), with 1 for the constants that it hides; its left side is `simplified_progress`."""
    return Bound(problem.bound * problem.distance * problem.rho, problem.local_steps * _mean(gaps) * problem.rho)


def theorem4(problem: Convex, norms: Sequence[float], gaps: Sequence[float]) -> Bound:
    """DP-NormFedAvg (eq. 14). A user with a zero update makes it infinite unless its Delta_i* is 0 too."""
    whole, steps, alpha = problem.bound * problem.local_steps, problem.local_steps, problem.alpha
    own = problem.bound**2 / (2 * alpha * problem.smoothness)

    def cost(norm: float, gap: float) -> float:
        return (own + _over(whole, norm) * gap * problem.rho * steps / alpha**2 if gap else own) * steps

    costs = [cost(norm, gap) if norm <= whole else 0.0 for norm, gap in zip(norms, gaps, strict=True)]
    return Bound(problem.initialisation, _mean(costs) * problem.rho)


def theorem5(problem: Convex, rounds: float, norms: Sequence[float], gaps: Sequence[float]) -> Bound:
    """Theorem 2 with any number of rounds K above 2 gamma / (C^ E rho); eta is then gamma / (C^ L E K rho)."""
    share, whole = _share(problem, rounds), problem.bound * problem.local_steps
    within = [gap if norm <= whole else 0.0 for norm, gap in zip(norms, gaps, strict=True)]
    return Bound(problem.initialisation, share * (1 + share) * _mean(within))


def theorem6(problem: Convex, rounds: float, norms: Sequence[float], gaps: Sequence[float]) -> Bound:
    """Theorem 4 with any number of rounds K."""
    share, whole = _share(problem, rounds), problem.bound * problem.local_steps
    own = problem.balance * problem.bound / (problem.smoothness * rounds * problem.rho)

    def cost(norm: float, gap: float) -> float:
        return own + _over(whole, norm) * share**2 * gap if gap else own

    costs = [cost(norm, gap) if norm <= whole else 0.0 for norm, gap in zip(norms, gaps, strict=True)]
    return Bound(problem.initialisation, _mean(costs))


def heterogeneity_at(problem: Convex, factor: float, norms: Sequence[float], gaps: Sequence[float]) -> float:
    """Eq. 17: term B_2 of normalising where C^ = c sqrt(L max Delta), whatever the problem's own bound; c >= 4."""
    bound = factor * math.sqrt(problem.smoothness * max(gaps))
    return theorem4(replace(problem, bound=bound, gamma=problem.balance), norms, gaps).heterogeneity


def _share(problem: Convex, rounds: float) -> float:
    """2 gamma / (C^ K rho), which is rho E / alpha at the K of Theorems 2 and 4."""
    share = 2 * problem.balance / (problem.bound * rounds * problem.rho)
    if share >= problem.local_steps:
        raise ValueError(f"rounds={rounds:.4g}: expected more than 2 gamma / (C^ E rho)")
    return share


def clipped_progress(problem: Convex, norms: Sequence[float], excess: Sequence[float]) -> float:
    """The left side of eq. 6; `excess` are the f_i(w) - f_i(w*)."""
    share = problem.rho * problem.local_steps / problem.alpha
    return _progress(problem, norms, [(2 - share - share**2) * e for e in excess])


def normalised_progress(problem: Convex, norms: Sequence[float], excess: Sequence[float]) -> float:
    """The left side of eq. 14."""
    share, whole = problem.rho * problem.local_steps / problem.alpha, problem.bound * problem.local_steps
    return _progress(problem, norms, [(2 - share**2) * _over(whole, n) * e for n, e in zip(norms, excess, strict=True)])


def simplified_progress(problem: Convex, gradients: Sequence[float], excess: Sequence[float]) -> float:
    """The left side of eq. 7, with 1 for the constant that it hides; `gradients` are the ||grad f_i(w)||."""
    scale = problem.bound / problem.smoothness
    return _mean([min(e, scale * g) for g, e in zip(gradients, excess, strict=True)])


def lipschitz(problem: Convex, gaps: Sequence[float]) -> float:
    """Eq. 8: f(w) - f(w*) at most, for G-Lipschitz f_i and C^ = G, so that nothing is clipped."""
    weight = 3 * problem.local_steps / (2 * problem.alpha)
    return 0.8 * (problem.initialisation + weight * _mean(gaps) * problem.rho)


def unclipped_bound(lipschitz: float, local_steps: int, rho: float, curvature: float, smoothness: float) -> float:
    """Proposition 1: the C^ that clips nobody, with alpha = 1 and lambda = `curvature`; it falls as E grows."""
    if local_steps > 1 / (2 * rho):
        raise ValueError(f"local_steps={local_steps} is above 1/(2 rho)={1 / (2 * rho):.4g}")
    return lipschitz * (1 - 11 * (local_steps - 1) * rho / 64 * (curvature / smoothness) ** 2)


def local_steps_bound(
    local_steps: float, lipschitz: float, distance: float, rho: float, curvature: float, smoothness: float, gap: float
) -> float:
    """Eq. 11: f(w) - f(w*) at most with Proposition 1's bound; `gap` is the mean of the Delta_i*."""
    gain = 11 * lipschitz * distance * rho / 48 * (curvature / smoothness) ** 2
    return (2 * lipschitz * distance + 1.2 * local_steps * (gap - gain)) * rho


def best_local_steps(
    lipschitz: float, distance: float, rho: float, curvature: float, smoothness: float, gap: float
) -> int:
    """The E that makes eq. 11 least: as many as allowed, 1 / (2 rho), if users are alike enough, otherwise 1."""
    ends = (1, max(1, math.floor(1 / (2 * rho))))
    return min(ends, key=lambda e: local_steps_bound(e, lipschitz, distance, rho, curvature, smoothness, gap))


def _progress(problem: Convex, norms: Sequence[float], within: Sequence[float]) -> float:
    slope = 3 * problem.bound / (8 * problem.smoothness * problem.local_steps)
    whole = problem.bound * problem.local_steps
    return _mean([w if n <= whole else slope * n for n, w in zip(norms, within, strict=True)])


def _over(whole: float, norm: float) -> float:
    return whole / norm if norm > 0 else math.inf


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
