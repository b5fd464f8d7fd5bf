"""Which noise to take? Independent or correlated, with sampling or without, compared at the same guarantee.

What decides how far noise carries a model away is the noise of prefix sums: after t rounds a model has moved by the sum
of t updates. An answer's error is the deviation of the noise in such a sum of averages over the cohort, in units of the
bound C: `rms` over all rounds, and `last` after the last one. Compared are

| kind           | noise       | who is in a round                          | epsilon is that of          |
|----------------|-------------|--------------------------------------------|-----------------------------|
| poisson        | independent | every user by a coin                       | T sampled Gaussians         |
| cyclic         | correlated  | groups that take turns, no sampling        | one Gaussian                |
| cyclic_poisson | correlated  | groups that take turns, and coins in these | T / bands sampled Gaussians |

(`confide.privacy.factorisation`; with one band the last is the first.) Correlated noise takes more bands at weak
guarantees, and amplification by sampling counts for more at strong ones, so the best number of bands grows with
epsilon (Choquette-Choo et al. 2023). Bands are tried in powers of two, because each costs
a vector as large as the model. Those that a quick bound of epsilon ranks first are then calibrated by the accountant.

Differs from the paper: the errors are of Toeplitz matrices, as the mechanism uses them, and not of its optimal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from confide.errors import UserError
from confide.privacy import accountant as accounting
from confide.privacy import factorisation
from confide.privacy.accountant import Accountant
from confide.privacy.events import Event
from confide.privacy.planner import Point
from confide.privacy.sampling import Kind

NAMES: dict[str, str] = {
    "poisson": "Poisson, independent noise",
    "cyclic": "turns, correlated noise",
    "cyclic_poisson": "sampled turns, correlated noise",
}
MOST_BANDS = 64
WORTH = 0.02
"""By what share correlated noise must be smaller to be recommended: it costs memory, and a stop costs accuracy."""
_FINALISTS = 2


@dataclass(frozen=True)
class Choice:
    """One mechanism, calibrated to an epsilon."""

    kind: Kind
    bands: int
    noise_multiplier: float
    rms: float
    last: float

    @property
    def recipe(self) -> dict[str, Any]:
        """What to write into a recipe."""
        if self.kind == "poisson":
            return {"sampling.kind": "poisson", "privacy.mechanism": "gaussian"}
        return {"sampling.kind": self.kind, "privacy.mechanism": "banded", "privacy.bands": self.bands}


@dataclass(frozen=True)
class Row:
    """The three mechanisms at one epsilon."""

    epsilon: float
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice:
        """The one with the least error; independent noise unless another is worth it."""
        least = min(self.choices, key=lambda choice: choice.rms)
        plain = self.choices[0]
        return least if least.rms < (1 - WORTH) * plain.rms else plain

    def to_json(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "choices": [{**asdict(choice), "recipe": choice.recipe} for choice in self.choices],
            "best": self.best.kind,
        }


def compare(
    cohort: int, population: int, rounds: int, delta: float, epsilons: Sequence[float], most_bands: int = MOST_BANDS,
    accountant: Accountant = "pld",
) -> Iterator[Row]:  # fmt: skip
    """Calibrate the three mechanisms to each epsilon, with the best number of bands up to `most_bands`.

    Examples:
        >>> from confide.privacy import advice
        >>> rows = advice.compare(20, 1000, 50, 1e-4, [4.0], most_bands=4)
        >>> [(row.best.kind, row.best.bands) for row in rows]
        [('cyclic_poisson', 4)]
    """
    Point(1.0, cohort, population, rounds, delta)  # refuses what makes no sense
    if most_bands < 1:
        raise UserError(f"most-bands={most_bands} must be at least 1")
    for epsilon in epsilons:
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise UserError(f"epsilons: {epsilon:g} cannot be reached; expected finite numbers above 0")
        yield _row(_Compared(cohort, population, rounds, delta, accountant), epsilon, most_bands)


@dataclass(frozen=True)
class _Compared:
    cohort: int
    population: int
    rounds: int
    delta: float
    accountant: Accountant

    @property
    def separation(self) -> int:
        return factorisation.cyclic_separation(self.population, self.cohort)

    def event(self, kind: Kind, bands: int) -> Event:
        apart = {"poisson": 0, "cyclic": self.separation}.get(kind, bands)
        rate = 1 / self.separation if kind == "cyclic" else self.cohort / self.population
        sampler = "everyone" if kind == "poisson" and rate == 1 else kind
        rounds = self.rounds if apart else 0
        return Event(
            sampler, rate, self.cohort, self.population, 0.0, 1.0, separation=apart, rounds=rounds,
            bands=bands if apart else 0,
        )  # fmt: skip

    def per_unit(self, kind: Kind, bands: int) -> np.ndarray:
        """The deviation of each prefix sum of averages at z = 1."""  # (rounds,)
        coefficients = factorisation.optimised_coefficients(bands, self.rounds)
        rounds = self.rounds if kind == "cyclic" else min(self.rounds, bands)
        column = factorisation.sensitivity(coefficients, rounds, max(self.separation, bands))
        users = self.event(kind, bands).rate * self.population
        found: np.ndarray = column * np.sqrt(factorisation.prefix_variance(coefficients, self.rounds)) / users
        return found

    def choice(self, kind: Kind, bands: int, epsilon: float) -> Choice:
        event = self.event(kind, bands)
        charges = 1 if event.whole_run else self.rounds
        z = accounting.noise_multiplier(epsilon, self.delta, charges, self.accountant, event)
        errors = z * self.per_unit(kind, bands)
        return Choice(kind, bands, z, float(np.sqrt(np.square(errors).mean())), float(errors[-1]))

    def rough(self, bands: int, epsilon: float) -> float:
        """The error of sampled turns, by a loose bound of epsilon that takes milliseconds."""
        event = self.event("cyclic_poisson", bands)
        low, high = 1e-2, 1e4
        while high > 1.02 * low:
            z = math.sqrt(low * high)
            spent = accounting.rough_epsilon([(event.turn_rate, z, event.turns)], self.delta)
            low, high = (low, z) if spent <= epsilon else (z, high)
        return high * float(np.sqrt(np.square(self.per_unit("cyclic_poisson", bands)).mean()))


def _row(given: _Compared, epsilon: float, most_bands: int) -> Row:
    limit = min(most_bands, given.separation, given.rounds)
    bands = sorted({*(2**n for n in range(limit.bit_length())), limit})
    turns = min(bands, key=lambda b: float(np.square(given.per_unit("cyclic", b)).sum()))
    finalists = sorted((b for b in bands if b > 1), key=lambda b: given.rough(b, epsilon))[:_FINALISTS]
    sampled = [given.choice("cyclic_poisson", b, epsilon) for b in finalists]
    return Row(
        epsilon,
        (
            given.choice("poisson", 1, epsilon),
            given.choice("cyclic", turns, epsilon),
            *([min(sampled, key=lambda choice: choice.rms)] if sampled else []),
        ),
    )


def sentence(rows: Sequence[Row]) -> str:
    """What to take, in a sentence."""
    said: list[str] = []
    last = ""
    for row in rows:
        best, at = row.best, f"{row.epsilon:g}"
        if best.kind != "poisson":
            at += f" ({best.bands} bands: {100 * (1 - best.rms / row.choices[0].rms):.0f} % less noise)"
        said.append(f", {at}" if best.kind == last else f"; {NAMES[best.kind]} at epsilon {at}")
        last = best.kind
    less = " Less than Poisson sampling with independent noise has at the same epsilon." if "less" in str(said) else ""
    return f"Take {''.join(said)[2:]}.{less}"
