"""Epsilon from events, by dp-accounting: Renyi (RDP) or privacy-loss distributions (PLD).

Both give proven upper bounds for a composition of Gaussian releases; PLD is the tighter one. dp-accounting does the
mathematics. It composes PLDs by a Fourier transform in double precision, whose rounding moves delta by up to 2e-13 in
either direction. Down to `PLD_DELTA` that is less than the room that the grid of losses leaves. Below it PLD is no
upper bound any more, and RDP, which computes with logarithms, answers in its place. A cohort of fixed size is only
known to the RDP accountant, with replace-one adjacency. Steps of correlated noise are one Gaussian together, or one
sampled Gaussian for each turn of a group: their ledger hands over one event for all of them (`Ledger.charged`).

Cohorts that are cut down to a largest size (`Event.most`) differ from Poisson cohorts only where more users were drawn,
which in a run happens with a probability of at most c, the sum of the events' `overflow`, on either of two adjacent
data sets. So epsilon of plain Poisson sampling at delta' holds at delta = delta' + (1 + e^epsilon) c (Chua et al. 2024,
"Scalable DP-SGD: shuffling vs. Poisson subsampling"). It holds for both accountants and any adjacency.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Any, Literal

from confide.errors import UserError
from confide.privacy import renyi
from confide.privacy.events import Event, Sampler

Accountant = Literal["pld", "rdp"]
_Key = tuple[Sampler, float, int, float, float]
"""The part of an event that decides its loss: sampler, cohort, population, rate and noise multiplier."""
# dp-accounting's own orders, and larger ones, without which no epsilon much below 0.3 can be proven.
_ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024]


PLD_DELTA = 5e-10
"""The least delta that PLD is used for. Against the exact epsilon of the Gaussian, over 2 to 300,000 releases, PLD was
never too small from 2e-10 on, and first was at 1e-10 (`tests/privacy/test_accountant.py` has such cases)."""


def accountant_used(accountant: Accountant, delta: float) -> Accountant:
    """Which accountant answers where `accountant` is asked for."""
    return "rdp" if delta < PLD_DELTA else accountant


def epsilon(events: Iterable[Event], delta: float, accountant: Accountant) -> float:
    """The smallest epsilon proven for all these releases together; infinite where there is no guarantee.

    Releases may be given one by one, or counted: a mapping from an event to how often it occurred.
    """
    counts = Counter(events)
    if not all(event.private for event in counts):
        return math.inf
    if len({event.adjacency for event in counts}) > 1:
        raise UserError("events with different adjacency cannot be composed: a run uses one sampler")
    merged, overflow = Counter[_Key](), 0.0
    for event, count in counts.items():
        merged[_key(event)] += count * event.turns
        overflow += count * event.overflow
    return _with_overflow(tuple(sorted(merged.items())), delta, accountant, overflow)


def noise_multiplier(target_epsilon: float, delta: float, steps: int, accountant: Accountant, template: Event) -> float:
    """The smallest noise multiplier with which `steps` events like `template` stay within the target."""
    releases, overflow = steps * template.turns, steps * template.overflow
    return _calibrate(target_epsilon, delta, releases, accountant, _key(template)[:4], overflow)


def shown(value: float | None) -> str:
    """An epsilon for people: four digits, rounded up, because a bound that was rounded down is none."""
    if value is None or math.isinf(value):
        return "none"
    if value == 0:
        return "0"
    place = Decimal(1).scaleb(Decimal(value).adjusted() - 3)
    return f"{float(Decimal(value).quantize(place, ROUND_CEILING)):.4g}"


Strength = Literal["strong", "moderate", "weak", "none"]
SCALE: dict[Strength, float] = {"strong": 1.0, "moderate": 10.0, "weak": 50.0}
"""The one scale of words: up to which epsilon each may be said. Above the last, and without a guarantee: none."""
COLOURS: dict[Strength, str] = {"strong": "green", "moderate": "blue", "weak": "yellow", "none": "red"}


def too_large(delta: float | None, population: int | None) -> bool:
    """Whether delta is above 1 / population: publishing all data of one random user would be within it."""
    return delta is not None and population is not None and delta * population > 1


def strength(epsilon: float | None, delta: float | None = None, population: int | None = None) -> Strength:
    """How well an epsilon protects, in a word; none also where delta is too large for the population."""
    if epsilon is None or too_large(delta, population):
        return "none"
    return next((word for word, most in SCALE.items() if epsilon <= most), "none")


def protection(epsilon: float | None, delta: float | None = None, population: int | None = None) -> str:
    """The word with its noun, and with the reason where it is delta's: `moderate protection`."""
    word = strength(epsilon, delta, population)
    if epsilon is not None and too_large(delta, population):
        return "no protection: delta is above 1 / population"
    return "no protection" if word == "none" else f"{word} protection"


def rated(epsilon: float | None, delta: float | None = None, population: int | None = None) -> str:
    """An epsilon with its word, for a table: `5 moderate`."""
    return "no guarantee" if epsilon is None else f"{shown(epsilon)} {strength(epsilon, delta, population)}"


def rough_epsilon(releases: Iterable[tuple[float, float, int]], delta: float) -> float:
    """A loose upper bound, in milliseconds, from whole Renyi orders alone: to begin a search or choose a grid by.

    A release is given as (rate, noise multiplier, how many).
    """
    import dp_accounting

    engine = dp_accounting.rdp.RdpAccountant([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256])
    for rate, z, count in releases:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        engine.compose(dp_accounting.SelfComposedDpEvent(event, count))
    return float(engine.get_epsilon(delta))


def renyi_cost(event: Event, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Upper bounds of the Renyi divergence of one release, one for each order; infinite where none is known."""
    return _renyi_cost(event.cost, orders)


@lru_cache(maxsize=4096)
def _renyi_cost(event: Event, orders: tuple[float, ...]) -> tuple[float, ...]:
    import dp_accounting

    logging.getLogger("absl").setLevel(logging.ERROR)
    sampler, cohort, population, rate, z = _key(event)
    if sampler in ("local", "cyclic"):
        z, sampler = z * (0.5 if sampler == "local" else 1.0), "everyone"
    relation = dp_accounting.NeighboringRelation
    adjacency = relation.REPLACE_ONE if sampler == "fixed" else relation.ADD_OR_REMOVE_ONE
    one = dp_accounting.GaussianDpEvent(z / 2 if sampler == "fixed" else z)
    if sampler == "poisson":
        one = dp_accounting.PoissonSampledDpEvent(rate, one)
    elif sampler == "fixed":
        one = dp_accounting.SampledWithoutReplacementDpEvent(population, int(cohort), one)
    elif sampler != "everyone":
        return (math.inf,) * len(orders)
    engine = dp_accounting.rdp.RdpAccountant(list(orders), adjacency).compose(one)
    return tuple(math.inf if math.isnan(cost) else event.turns * float(cost) for cost in engine.rdp)


def _key(event: Event) -> _Key:
    kind, rate = event.sampler, event.turn_rate
    if kind == "cyclic_poisson":  # a turn is a Poisson-sampled release like any other
        kind = "poisson" if rate < 1 else "everyone"
    if kind == "everyone":
        rate = 1.0  # nothing is amplified, whatever a line says
    return kind, event.cohort, event.population, rate, event.noise_multiplier


def _with_overflow(
    counts: tuple[tuple[_Key, int], ...], delta: float, accountant: Accountant, overflow: float
) -> float:
    """Epsilon where cohorts were cut down with this probability: a part of delta goes to that, never too small."""
    share = 0.0
    while share < 1:
        left = delta * (1 - share)
        found = _epsilon(counts, left, accountant_used(accountant, left))
        needed = overflow * (1 + math.exp(min(found, 700.0))) / delta
        if needed <= share:
            return found
        share = 1.25 * needed
    return math.inf


@lru_cache(maxsize=4096)
def _epsilon(counts: tuple[tuple[_Key, int], ...], delta: float, accountant: Accountant) -> float:
    if not counts:
        return 0.0
    kind = counts[0][0][0]
    if kind in ("local", "cyclic"):
        # Local: any two data sets of a user are compared, so a message moves by up to twice what z is measured in.
        share = 0.5 if kind == "local" else 1.0
        counts = tuple((("everyone", cohort, k, 1.0, z * share), n) for (_, cohort, k, _, z), n in counts)
    releases = [(rate, z, count) for (_, _, _, rate, z), count in counts]
    interval = None
    if accountant == "pld":
        interval = _interval(releases, any(sampler == "poisson" for (sampler, *_), _ in counts), delta)
        if interval is None:
            return math.inf
    found = float(_composed(counts, interval).get_epsilon(delta))
    if accountant == "pld" or kind == "fixed":
        return found
    # Both are upper bounds; at little noise dp-accounting leaves out the very orders that matter.
    return min(found, renyi.epsilon(releases, delta))


@lru_cache(maxsize=8)
def _composed(counts: tuple[tuple[_Key, int], ...], interval: float | None) -> Any:
    """Compose the releases by PLD with a grid of this width, or by RDP; deltas of one curve share what comes of it."""
    import dp_accounting

    # dp-accounting warns about every Renyi order that it leaves out; leaving one out keeps the bound valid.
    logging.getLogger("absl").setLevel(logging.ERROR)
    replace = counts[0][0][0] == "fixed"
    relation = dp_accounting.NeighboringRelation
    adjacency = relation.REPLACE_ONE if replace else relation.ADD_OR_REMOVE_ONE
    engine: Any
    if interval is None:
        engine = dp_accounting.rdp.RdpAccountant(None if replace else _ORDERS, adjacency)
    else:
        engine = dp_accounting.pld.PLDAccountant(adjacency, value_discretization_interval=interval)
    for (sampler, cohort, population, rate, z), count in counts:
        # Replacing a user moves the sum by up to twice the bound that z is measured in.
        event = dp_accounting.GaussianDpEvent(z / 2 if replace else z)
        if sampler == "poisson":
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        elif sampler == "fixed":
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, int(cohort), event)
        try:
            engine.compose(dp_accounting.SelfComposedDpEvent(event, count))
        except dp_accounting.UnsupportedEventError:
            raise UserError(
                f"privacy.accountant={'rdp' if interval is None else 'pld'} has no proof for sampling.kind={sampler}; "
                "use privacy.accountant=rdp, or sampling.kind=poisson"
            ) from None
    return engine


def _interval(releases: list[tuple[float, float, int]], sampled: bool, delta: float) -> float | None:
    """Choose the width of PLD's grid of losses. The bound holds at any width: a wide grid is quick, but loose.

    Composing n sampled releases, a width h adds about n h^2 / 4 to epsilon: h is chosen to keep that to a few
    thousandths for some thousand releases, and to keep the grid short where there is little noise. (Releases without
    sampling are one Gaussian together.) The widths are powers of two: a finer grid contains the coarser one, so that
    epsilon stays monotone where the width changes with it. 64 is the widest that dp-accounting can take; none where
    the grid would still be too long, far above any epsilon worth having.
    """
    rough = rough_epsilon(releases, delta)
    least = min(z for _, z, _ in releases)
    reach = 1 / (2 * least**2) + 10 / least if sampled else rough  # the largest loss of one draw of noise
    if reach > 1e8 or rough > 3e9:
        return None
    wanted = max(4e-4 * math.sqrt(rough), 3e-5 * reach) if sampled else 4e-2 * math.sqrt(rough)
    return float(2.0 ** math.floor(math.log2(min(max(wanted, 1e-6 * rough, 1e-4), 100.0))))


@lru_cache(maxsize=256)
def _calibrate(
    target: float, delta: float, steps: int, accountant: Accountant, sampled: tuple[Sampler, float, int, float],
    overflow: float,
) -> float:  # fmt: skip
    def spent(z: float) -> float:
        return _with_overflow((((*sampled, z), steps),), delta, accountant, overflow)

    # Epsilon falls as the noise grows: bracket the target, then halve, always keeping the side that is within it.
    high = 1.0
    while spent(high) > target:
        high *= 2
        if high > 1e7:
            raise UserError(
                f"privacy.target_epsilon={target} cannot be reached at delta={delta} with {steps} central steps; "
                "raise the target, or lower run.steps or sampling.cohort"
                + (", or raise sampling.most" if overflow else "")
            )
    low = high / 2
    while low > 1e-2 and spent(low) <= target:
        low, high = low / 2, low
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high
