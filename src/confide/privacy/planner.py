"""What does it take? Noise, cohort, population, rounds and epsilon: give all but one, get that one.

Every answer states epsilon by both accountants (RDP and PLD, user-level add-or-remove adjacency, Poisson sampling at
the rate q = S / K, or the plain Gaussian mechanism where everybody takes part). An inverse query searches with one of
them and never exceeds the target: noise and population are rounded up, rounds and cohort down.

The noise can be held in two ways while the cohort S changes (PFL-ASR appendix H.1): a fixed multiplier z of the sum's
noise, or a fixed noise s on the average, PFL-ASR's sigma_DP, for which z = s S. With z fixed a larger cohort costs
privacy; with s fixed it saves privacy, because the noise on the sum grows with it: there the cohort is rounded up.

Examples:
    >>> from confide.privacy import planner
    >>> answer = planner.epsilon(planner.Noise(multiplier=1.0), 100, population=10_000, rounds=100, delta=1e-6)
    >>> {name: round(value, 2) for name, value in answer.epsilon.items()}
    {'rdp': 1.51, 'pld': 0.95}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

from confide.errors import UserError
from confide.privacy import accountant as accounting
from confide.privacy.accountant import Accountant
from confide.privacy.events import Event, Sampler

LEAST_NOISE, MOST_NOISE = 1e-3, 1e6
MOST_POPULATION, MOST_ROUNDS = 10**10, 10**5  # with more rounds the Fourier transform inside PLD loses too many digits
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Noise:
    """What is held fixed: the multiplier z of the sum, or the noise s per user of the average, in units of C."""

    multiplier: float | None = None
    per_user: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.multiplier, self.per_user) if value is not None]
        if len(given) != 1:
            raise UserError("give the noise once: noise-multiplier (z), or noise-per-user (s = z / cohort)")
        if not (math.isfinite(given[0]) and given[0] > 0):
            raise UserError(f"noise={given[0]:g} gives no guarantee; expected a finite number above 0")

    def at(self, cohort: int) -> float:
        """z for a cohort of this size."""
        return self.multiplier if self.multiplier is not None else float(self.per_user or 0) * cohort


@dataclass(frozen=True)
class Point:
    """A run as an accountant sees it."""

    noise_multiplier: float
    cohort: int
    population: int
    rounds: int
    delta: float

    def __post_init__(self) -> None:
        if not 1e-6 <= self.noise_multiplier <= 1e9:
            raise UserError(f"noise-multiplier={self.noise_multiplier:g} is out of range; expected 1e-6 to 1e9")
        if self.cohort < 1:
            raise UserError(f"cohort={self.cohort} has no users; expected at least 1")
        if self.cohort > self.population:
            raise UserError(
                f"cohort={self.cohort} is larger than the population of {self.population} users (a sampling rate above "
                "1); lower the cohort or raise the population"
            )
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise UserError(f"rounds={self.rounds} is out of range; expected 1 to {MOST_ROUNDS:,}")
        if not 0 < self.delta < 1:
            raise UserError(
                f"delta={self.delta:g}: expected a probability above 0 and below 1; give one below 1 / population"
            )

    @property
    def rate(self) -> float:
        return self.cohort / self.population

    @property
    def event(self) -> Event:
        sampler: Sampler = "everyone" if self.cohort == self.population else "poisson"
        # z is measured in the largest contribution, which is therefore 1 here.
        return Event(sampler, self.rate, self.cohort, self.population, self.noise_multiplier, 1.0)

    def spent(self, accountant: Accountant) -> float:
        """Epsilon at the end."""
        # A counter stands for that many equal events, without a list of them.
        return accounting.epsilon(Counter({self.event: self.rounds}), self.delta, accountant)

    def both(self) -> dict[Accountant, float]:
        """Epsilon by each accountant: the same guarantee, two upper bounds; infinite where one has no proof."""
        return {"rdp": self.spent("rdp"), "pld": self.spent("pld")}


@dataclass(frozen=True)
class Answer:
    """One complete set of numbers that hold together."""

    asked: str
    point: Point
    epsilon: dict[Accountant, float]
    accountant: Accountant
    """The one that searched, and that the warnings speak of."""
    target_epsilon: float | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        found, point, name = [], self.point, self.accountant.upper()
        if point.rate > 0.5:
            found.append(f"the sampling rate {point.rate:.3g} is above 0.5: sampling hardly adds to the privacy.")
        if accounting.too_large(point.delta, point.population):
            found.append(
                f"delta {point.delta:g} is above 1/K = {1 / point.population:.3g}: a mechanism that publishes all data "
                "of one random user can be within it."
            )
        if accounting.accountant_used("pld", point.delta) == "rdp":
            found.append(f"PLD is no bound below delta {accounting.PLD_DELTA:g}: both epsilons are by RDP.")
        if math.isinf(self.epsilon[self.accountant]):
            found.append(f"{name} proves nothing here (too little noise or delta): ask the other accountant.")
        elif (word := accounting.strength(self.epsilon[self.accountant])) in ("weak", "none"):
            limit = accounting.SCALE["moderate" if word == "weak" else "weak"]
            said = accounting.protection(self.epsilon[self.accountant])
            found.append(f"epsilon is above {limit:g} by {name}: {said}.")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "epsilon": {name: value if math.isfinite(value) else None for name, value in self.epsilon.items()},
            **asdict(self.point),
            "noise_per_user": self.point.noise_multiplier / self.point.cohort,
            "rate": self.point.rate,
            "target_epsilon": self.target_epsilon,
            "accountant": self.accountant,
            "adjacency": self.point.event.adjacency,
            "sampler": self.point.event.sampler,
            "warnings": list(self.warnings),
        }


def epsilon(
    noise: Noise, cohort: int, population: int, rounds: int, delta: float, accountant: Accountant = "pld"
) -> Answer:
    """What so many rounds spend."""
    return _answer("epsilon", Point(noise.at(cohort), cohort, population, rounds, delta), accountant)


def noise(
    target: float, cohort: int, population: int, rounds: int, delta: float, accountant: Accountant = "pld"
) -> Answer:
    """The smallest noise multiplier that stays within the target, rounded up to six digits."""
    point = Point(1.0, cohort, population, rounds, delta)
    values = _Range(
        LEAST_NOISE, MOST_NOISE, 1.0, False, f"noise multipliers end at {MOST_NOISE:,.0f}",
        "a higher target, a higher delta or the other accountant",
    )  # fmt: skip
    found = _search(lambda z: replace(point, noise_multiplier=z), target, accountant, values).noise_multiplier
    if found == LEAST_NOISE:
        raise UserError(
            f"target-epsilon={target:g} is met by any noise multiplier down to {LEAST_NOISE:g}, where the search ends; "
            "only a lower target means something"
        )
    place = Decimal(1).scaleb(Decimal(found).adjusted() - 5)
    z = Decimal(found).quantize(place, ROUND_CEILING)
    while (answer := replace(point, noise_multiplier=float(z))).spent(accountant) > target:
        z += place  # PLD is only monotone up to the rounding of a Fourier transform
    return _answer("noise", answer, accountant, target)


def cohort(
    target: float, noise: Noise, population: int, rounds: int, delta: float, accountant: Accountant = "pld"
) -> Answer:
    """With z fixed the largest cohort within the target; with s = z / S fixed the smallest one."""
    if noise.per_user is None:
        stop, help_ = "a cohort has at least one user", "more noise, a larger population or fewer rounds"
        values = _Range(1, population, population // 100, True, stop, help_)
    else:
        # Far below z = 1 there is nothing to find.
        least = min(population, math.ceil(LEAST_NOISE / noise.per_user))
        stop, help_ = f"all {population:,} users take part already", "more noise per user, more users or fewer rounds"
        values = _Range(least, population, min(1 / noise.per_user, population), False, stop, help_)
    found = _search(
        lambda size: Point(noise.at(int(size)), int(size), population, rounds, delta), target, accountant, values
    )
    return _answer("cohort", found, accountant, target)


def population(
    target: float, noise: Noise, cohort: int, rounds: int, delta: float, accountant: Accountant = "pld"
) -> Answer:
    """The smallest population from which such a cohort stays within the target.

    None above 1 / delta: there a user is drawn so rarely that delta alone hides whether it was, and the noise nothing.
    """
    point = Point(noise.at(cohort), cohort, cohort, rounds, delta)
    most = max(cohort, most_population(delta))
    if most == MOST_POPULATION:
        stop, help_ = f"populations end at {most:,} users", "more noise, a smaller cohort or fewer rounds"
    else:
        stop = f"with more than {most:,} users delta would be above 1 / population and hide them by itself"
        help_ = "more noise, a smaller cohort, fewer rounds or a lower delta"
    values = _Range(cohort, most, 100 * cohort, False, stop, help_)
    found = _search(lambda size: replace(point, population=int(size)), target, accountant, values)
    return _answer("population", found, accountant, target)


def most_population(delta: float) -> int:
    """The largest population that is offered: with more, delta would be above 1 / population."""
    return min(MOST_POPULATION, math.floor(1 / delta))


def rounds(
    target: float, noise: Noise, cohort: int, population: int, delta: float, accountant: Accountant = "pld"
) -> Answer:
    """The largest number of rounds within the target."""
    point = Point(noise.at(cohort), cohort, population, 1, delta)
    stop, help_ = "a run has at least one round", "more noise, a smaller cohort or a larger population"
    values = _Range(1, MOST_ROUNDS, 1000, True, stop, help_)
    found = _search(lambda count: replace(point, rounds=int(count)), target, accountant, values)
    if found.rounds == MOST_ROUNDS:
        raise UserError(
            f"target-epsilon={target:g} is not used up after {MOST_ROUNDS:,} rounds, where the search ends; "
            "less noise, a larger cohort or a lower target would bring the end closer"
        )
    return _answer("rounds", found, accountant, target)


def grow(point: Point, target: float, accountant: Accountant = "pld") -> Point | None:
    """Grow cohort and population together, at the same noise on the average, until the target is met.

    PFL-ASR's extrapolation: z = s S grows with the cohort, the rate S / K stays, and so does what the noise does to the
    model. The factor is found to within 5 %, never too small; none if even `most_population` is too few.
    """
    most = max(point.population, most_population(point.delta))

    def scale(factor: float) -> Point:
        cohort = math.ceil(point.cohort * factor)
        people = max(cohort, math.ceil(point.population * factor))
        z = point.noise_multiplier * cohort / point.cohort
        return replace(point, cohort=cohort, population=people, noise_multiplier=z)

    def rough(at: Point) -> float:
        return accounting.rough_epsilon([(at.rate, at.noise_multiplier, at.rounds)], at.delta)

    high = 1.0
    while rough(scale(high)) > target:
        if point.population * high > most:
            return None
        high *= 2
    low = high / 2
    while low >= 1 and scale(low).spent(accountant) <= target:
        low, high = low / 2, low
    if high == 1:
        return point
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if scale(middle).spent(accountant) <= target else (middle, high)
    found = scale(high)
    return found if found.population <= most else None


def too_few(delta: float) -> str:
    """Why `grow` finds nothing."""
    most = most_population(delta)
    why = "" if most == MOST_POPULATION else f"; with more, a delta of {delta:g} would be above 1 / population"
    return f"Even {most:,} users would be too few for this noise{why}."


def _answer(asked: str, point: Point, accountant: Accountant, target: float | None = None) -> Answer:
    return Answer(asked, point, point.both(), accountant, target)


@dataclass(frozen=True)
class _Range:
    """Where a search may look, and what to say when nothing in it is within the target."""

    least: float
    most: float
    start: float
    rising: bool
    """Whether epsilon rises with the value; then the largest value is wanted, else the smallest."""
    stop: str
    help_: str

    @property
    def whole(self) -> bool:
        return isinstance(self.least, int)

    def clip(self, value: float) -> float:
        value = min(max(value, self.least), self.most)
        return round(value) if self.whole else value


def _search(point_at: Callable[[float], Point], target: float, accountant: Accountant, values: _Range) -> Point:
    """Find the point nearest to the target that is still within it. Its epsilon was itself computed.

    Epsilon is monotone: from the start on, a bracket grows by ever larger factors until one end is within the target
    and the other is not.
    """
    if not (math.isfinite(target) and target > 0):
        raise UserError(f"target-epsilon={target:g} cannot be reached; expected a finite number above 0")

    def excess(value: float) -> float:
        spent = point_at(value).spent(accountant)
        return math.log(spent / target) if spent > 0 else -math.inf

    here = values.clip(values.start)
    over, factor = excess(here), 4.0
    within = over <= 0
    upwards = values.rising == within
    while here != (values.most if upwards else values.least):
        last = (here, over)
        here = values.clip(here * factor if upwards else here / factor)
        over, factor = excess(here), factor**2
        if (over <= 0) != within:
            safe, bold = (last, (here, over)) if within else ((here, over), last)
            return point_at(_narrow(excess, safe, bold, values.whole))
    if within:
        return point_at(here)
    best = point_at(here).spent(accountant)
    there = (
        f"epsilon is {accounting.shown(best)} there"
        if math.isfinite(best)
        else "there is no bound with so little noise"
    )
    raise UserError(
        f"target-epsilon={target:g} cannot be reached by {accountant.upper()}: {values.stop}, and {there}; "
        f"{values.help_} would help"
    )


def _narrow(
    excess: Callable[[float], float], safe: tuple[float, float], bold: tuple[float, float], whole: bool
) -> float:
    """Shrink a bracket by false position in the logarithms (Illinois: an end that stays counts half).

    Aiming a little beyond the guess brings the far end close too; every fourth step is a plain bisection, so that the
    search ends however epsilon bends.
    """
    (low, low_over), (high, high_over) = safe, bold  # low is within the target, whichever is the larger number
    side = turn = 0
    while abs(high - low) > max(1.0 if whole else 0.0, TOLERANCE * high):
        turn += 1
        width = math.log(high / low)
        little = max(0.4 * TOLERANCE, 0.5 / high if whole else 0.0) / abs(width)
        share = low_over / (low_over - high_over) if turn % 4 and math.isfinite(low_over - high_over) else 0.5
        share = min(max(share - side * little, little), 1 - little)
        middle = low * math.exp(share * width)
        if whole:
            middle = min(max(round(middle), min(low, high) + 1), max(low, high) - 1)
        over = excess(middle)
        if over <= 0:
            low, low_over, high_over, side = middle, over, high_over / (2 if side < 0 else 1), -1
        else:
            high, high_over, low_over, side = middle, over, low_over / (2 if side > 0 else 1), 1
    return low
