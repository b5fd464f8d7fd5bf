"""DP-FTRL by a banded matrix factorisation: noise that is correlated over rounds, with or without sampling.

What training needs are prefix sums of the aggregated updates, A G with A the lower-triangular matrix of ones. The
matrix mechanism factorises A = B C, adds noise to C G and multiplies by B; a server that runs any optimiser does the
same by adding the rows of C^-1 Z to the rows of G (Denisov et al. 2022; Kairouz et al. 2021 for the tree). Later rounds
then take back part of the noise of earlier ones, and a prefix sum carries far less than with independent noise.

C is lower-triangular Toeplitz with `bands` coefficients c_0 = 1, c_1, ... (Choquette-Choo et al. 2023, "(Amplified)
banded matrix factorization"; c_0 = 1 is no restriction, a factor on C cancels). They begin as the square root of A,
c_j = binom(2j, j) / 4^j (Kalinin and Lampert 2024), and may be optimised for a number of rounds.

The guarantee. Let every contribution of a user be bounded to norm 1, with at least `bands` rounds from one to the next.
Changing all contributions of one user to zero then moves C G by at most `sensitivity`, and the whole run is one
Gaussian mechanism with z = (deviation of Z) / sensitivity, however many rounds there are and although each update
depends on the releases before it (Denisov et al. 2022, Theorem 2.1). Epsilon is that of one plain Gaussian release.

It assumes that
* the schedule does not depend on data. Adjacency is zero-out: the others keep their rounds when a user is taken out.
  That is add-or-remove with the assignment of rounds, and the population that it is made for, as public facts;
* a user who misses a round adds zero; taking part less often or in a smaller norm never costs more;
* no more than `rounds` rounds are released. Stopping earlier is covered, and costs what those rounds cost;
* each fresh normal vector is used for one release. If a round is made again with other noise, both releases count:
  runs in which no round was made more than m times cost no more than m of these Gaussian mechanisms.

Amplified (`sampling.kind: cyclic_poisson`; Choquette-Choo et al. 2023). Deal the users into
b groups, b being at least the number of bands. In round t every user of group t mod b takes part with probability p,
independently of all other draws. Then T rounds are no worse than ceil(T / b) Gaussian mechanisms one after the other,
each of them Poisson-sampled with rate p, with z = (deviation of Z) / (norm of a column of C). Why: a user who takes
part in round t moves the rows t to t + bands - 1 of C G, by that column times its contribution, which the releases
before t decide. Its next chance comes in round t + b, whose rows are others. So the rows t to t + b - 1 are one sampled
Gaussian release given what came before, and a user has ceil(T / b) chances. It assumes beside the points above that
* the groups do not depend on data, and neither does p: both are public. Adjacency is leaving out one user as before;
* nobody who sees a release knows who was drawn.
With b = 1 this is DP-SGD with Poisson sampling, and with p = 1 it is nearly the schedule of turns without sampling.

Where noise cannot be drawn again, it begins anew after a stop (`start`): rows after it do not know the rows before it.
A column that a stop cuts is shorter, and each release of a round is one turn of its group, also where a round is made
again. So a run costs what the turns in its ledger cost, the most of any group, and a stop by itself costs nothing. It
costs accuracy: the noise of the rounds before the stop is not taken back any more.

Differs from the papers: C is Toeplitz also when optimised (the first paper optimises every entry), so that a few
numbers describe it and a round needs no table; sensitivity counts the columns at the end of the run at their true,
shorter length.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.errors import UserError
from confide.randomness import generator

Array = NDArray[np.float64]
DECIMALS = 6


# The matrix C.


def root_coefficients(bands: int) -> Array:
    """The first coefficients of the square root of A (Kalinin and Lampert 2024): binom(2j, j) / 4^j."""
    _check_positive("bands", bands)
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


def optimised_coefficients(bands: int, rounds: int) -> Array:
    """Coefficients with the least total variance of all prefix sums of `rounds` rounds at equal privacy.

    The separation does not matter: with disjoint columns it multiplies every candidate's variance by the same number of
    participations. Rounded to six decimals, so that another machine's last bits do not make another matrix.
    """
    _check_positive("bands", bands)
    _check_positive("rounds", rounds)
    return np.array(_optimise(bands, rounds))


@lru_cache(maxsize=64)
def _optimise(bands: int, rounds: int) -> tuple[float, ...]:
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    start = root_coefficients(bands)
    scale, _ = _loss(start, rounds)  # L-BFGS stops by absolute tolerances

    def objective(free: Array) -> tuple[float, Array]:
        loss, gradient = _loss(np.concatenate([[1.0], free]), rounds)
        return loss / scale, gradient[1:] / scale

    with np.errstate(over="ignore", invalid="ignore"):  # a line search may try coefficients whose inverse grows
        options = {"maxiter": 60}
        found = minimize(objective, start[1:], jac=True, method="L-BFGS-B", options=options).x if bands > 1 else []
    best = np.concatenate([[1.0], np.round(found, DECIMALS)])
    return tuple((best if _loss(best, rounds)[0] < scale else start).tolist())


def _loss(coefficients: Array, rounds: int) -> tuple[float, Array]:
    """||c||^2 ||B||_F^2 and its gradient, by one solve with C and one with its transpose."""
    column = solve(coefficients, np.ones(rounds))  # (rounds,) first column of B = A C^-1, which is Toeplitz too
    weight = np.arange(rounds, 0, -1.0)  # how often each of its entries occurs in B
    energy, total = float(coefficients @ coefficients), float(weight @ np.square(column))
    adjoint = solve(coefficients, (2 * weight * column)[::-1])[::-1]
    inner = [float(adjoint[j:] @ column[: max(rounds - j, 0)]) for j in range(len(coefficients))]
    return energy * total, 2 * coefficients * total - energy * np.array(inner)


def solve(coefficients: Array, right: Array) -> Array:
    """Find x with C x = right."""
    back = len(coefficients) - 1
    backwards = coefficients[:0:-1].copy()  # c_back .. c_1
    x = np.zeros(back + len(right))  # zeros stand for the rounds before the first
    for t, value in enumerate(right):
        x[back + t] = value - backwards @ x[t : back + t]
    return x[back:]


# Sensitivity and accounting.


def sensitivity(coefficients: Array, rounds: int, separation: int) -> float:
    """The largest ||C x||, x being one user's contributions of norm up to 1, at least `separation` rounds apart.

    Two columns of C that a user touches have no row in common, so the squares of their norms add up whatever the
    contributions' directions and signs: no assumption on the coefficients' signs is needed. k full columns give
    sqrt(k) ||c||; those that begin in the last rounds are cut, so the earliest and densest schedule is the worst
    (Choquette-Choo et al. 2023; Kalinin and Lampert 2024, Theorem 2, whose columns may overlap).
    """
    _check_coefficients(coefficients)
    _check_positive("rounds", rounds)
    _check_positive("separation", separation)
    if separation < len(coefficients):
        raise UserError(
            f"bands={len(coefficients)} is more than the separation of {separation} rounds between a user's "
            "participations; lower bands, or lower the cohort so that a user's turn comes less often"
        )
    left = rounds - np.arange(0, rounds, separation)
    energy = np.cumsum(np.square(coefficients))
    return math.sqrt(float(energy[np.minimum(left, len(coefficients)) - 1].sum()))


def prefix_variance(coefficients: Array, rounds: int) -> Array:
    """(rounds,) the variance of each prefix sum of C^-1 Z: squared norms of the rows of B = A C^-1."""
    return np.cumsum(np.square(solve(coefficients, np.ones(rounds))))


# Streaming noise.


def init(bands: int, like: Tensor) -> dict[str, Tensor]:
    """The state before round 0: the last bands - 1 outputs, and the round that comes next."""
    _check_positive("bands", bands)
    return {"ring": like.new_zeros((bands - 1, *like.shape)), "step": torch.zeros((), dtype=torch.int64)}


def start(state: dict[str, Tensor]) -> None:
    """Begin again with round 0, in place: what follows does not know what came before."""
    state["ring"].zero_()
    state["step"].zero_()


def next_noise(coefficients: Array, state: dict[str, Tensor], fresh: Tensor, step: int) -> Tensor:
    """Row `step` of C^-1 Z, by y_t = z_t - sum_j c_j y_(t-j) (Choquette-Choo et al. 2023, Algorithm 9).

    `fresh` is z_t, standard normal; it is overwritten and returned. Sums run coordinate by coordinate in a fixed order:
    the result does not depend on threads. Rounds come in order and once each: with another history the noise would not
    be the one that is accounted for.
    """
    if step != int(state["step"]):
        raise ValueError(f"step={step} but the noise has been drawn up to step {int(state['step'])}")
    take_back(coefficients, state, fresh)
    remember(state, fresh)
    return fresh


def take_back(coefficients: Array, state: dict[str, Tensor], out: Tensor, scale: float = 1.0) -> None:
    """Subtract the share of the earlier rows that the next row takes back, in place: scale sum_j c_j y_(t-j)."""
    _check_coefficients(coefficients)
    ring, step = state["ring"], int(state["step"])  # (bands - 1, parameters)
    if len(ring) != len(coefficients) - 1 or ring.shape[1:] != out.shape or ring.dtype != out.dtype:
        raise ValueError(f"a ring of {tuple(ring.shape)} {ring.dtype} for {tuple(out.shape)} {out.dtype}")
    for lag, coefficient in enumerate(coefficients[1:].tolist(), start=1):
        out.sub_(ring[(step - lag) % len(ring)], alpha=scale * coefficient)


def remember(state: dict[str, Tensor], row: Tensor) -> None:
    """Keep y_t for the rows after it."""
    ring, step = state["ring"], int(state["step"])
    if len(ring) > 0:
        ring[step % len(ring)].copy_(row)
    state["step"].add_(1)


# The schedule.


def cyclic_separation(population: int, cohort: int) -> int:
    """Rounds from one turn of a user to the next. A round has population / separation users, which is >= cohort."""
    _check_positive("cohort", cohort)
    if cohort > population:
        raise UserError(
            f"cohort={cohort} is larger than the population of {population} users; lower cohort or use more users"
        )
    return population // cohort


def cyclic_cohort(population: int, cohort: int, seed: int, step: int) -> NDArray[np.int64]:
    """The users of round `step`, in rising order: one of `cyclic_separation` groups.

    Sizes of groups differ by at most one, so the share of users in a round is 1 / separation, not cohort / population.
    """
    return group_of(population, cyclic_separation(population, cohort), seed, step)


def group_of(population: int, groups: int, seed: int, step: int) -> NDArray[np.int64]:
    """The users of group (step mod groups), in rising order, of a division that was made once, without any data."""
    group = step % groups
    small, larger = divmod(population, groups)
    first = group * small + min(group, larger)
    return np.sort(_order(population, seed)[first : first + small + (group < larger)])


@lru_cache(maxsize=1)
def _order(population: int, seed: int) -> NDArray[np.int64]:
    order = generator(seed, "cohort/cyclic").permutation(population)
    order.flags.writeable = False
    return order


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name}={value} must be at least 1")


def _check_coefficients(coefficients: Array) -> None:
    if len(coefficients) < 1 or coefficients[0] != 1 or not np.isfinite(coefficients).all():
        raise UserError(f"coefficients={coefficients} must be finite numbers that begin with 1")
