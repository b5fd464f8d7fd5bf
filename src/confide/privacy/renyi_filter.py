"""A privacy filter: it takes releases one after the other, and refuses the one that would pass a lifetime's epsilon.

Over the life of a population somebody looks at one run and then chooses the next: its noise, its sampling, its length.
Ordinary composition, by PLD or RDP, takes these as fixed beforehand. A filter does not:

* For a fixed Renyi order a and a budget B, releases whose Renyi divergences of order a, each given everything before
  it, sum to at most B are (a, B)-RDP together, although every one was chosen after the others were seen (Feldman and
  Zrnic 2021, "Individual privacy accounting via a Renyi filter": their filter stops before the sum would pass B).
* Runs that go on at the same time, step by step between each other, are covered too: a filter for RDP of a fixed order
  is one for the concurrent composition of interactive mechanisms (Haney et al. 2023).
* No single order suits all runs, so there are K of them, each with delta / K (of the nine tenths of delta that are not
  kept for truncated cohorts). A release is taken while any order has
  room. If E_k is the event that order k lasted longest, then on E_k the whole is what filter k alone let through, so
  P(S) = sum_k P(S and E_k) <= sum_k (e^epsilon P'(S and E_k) + delta / K) <= e^epsilon P'(S) + delta.

Cohorts with a largest size. Let c be the sum of the releases' `overflow`, on any past. Two runs that draw the same
coins differ only where a cohort was cut down, which happens with probability c at most, on either data set. So what
holds at delta' for plain Poisson sampling holds at delta' + (1 + e^epsilon) c, and a release is refused with which
(1 + e^epsilon) c would pass the tenth of delta that is kept for it.

What the filter promises is the epsilon and delta that were fixed beforehand, for all that it lets through. It says
nothing of a smaller epsilon for what was let through so far: a filter is no odometer. Two numbers say how far it is:

* `used`, the share of the budget of the order that lasts longest (or of the delta for overflow, if more of that is).
* `loss`, a bound on the privacy loss that holds at every time at once. For a fixed order a, exp((a - 1) (L - R)) is a
  supermartingale, L being the log of how much likelier what was released is with the user's data than without, and R
  the sum of the releases' divergences, each given everything before it. It starts at 1, so by Ville's inequality
  L > R + log(K / delta) / (a - 1) ever happens with probability delta / K at most; and for all K orders with delta
  (odometers of Renyi divergence: Feldman and Zrnic 2021; Lecuyer 2021). It needs no fixed end, but the
  coupling above moves probabilities and not losses: where a cohort may have been cut down, no loss is stated.

Conditions: the epsilon and delta of the filter are fixed before the first release; every release is charged before it
is made; a release's divergence is bounded for every past, which holds here since an event's cost follows from its noise
and sampling alone. Order and delta give epsilon by Canonne, Kamath and Steinke (2020), Proposition 12:
epsilon = r + log(1 - 1/a) - log(delta a) / (a - 1).

PLD has no such theorem: the filter that stops at the exact (epsilon, delta) of a composition can be wrong when privacy
parameters are chosen adaptively. What PLD gives is stated beside it, for runs that were all planned beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from confide.privacy.accountant import renyi_cost
from confide.privacy.events import Event

ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
_FOR_OVERFLOW = 0.1
"""The share of delta that is kept for cohorts that are cut down to a largest size, which cost delta and no epsilon."""


@dataclass
class RenyiFilter:
    """A filter for one (epsilon, delta), and what it has taken.

    Examples:
        >>> from confide.privacy.events import Event
        >>> from confide.privacy.renyi_filter import RenyiFilter
        >>> step = Event("everyone", 1.0, 10, 10, noise_multiplier=4.0, sensitivity=1.0)
        >>> life = RenyiFilter(epsilon=3.0, delta=1e-5)
        >>> while life.takes(step):
        ...     life.take(step)
        >>> 5 < life.taken < 9, 0.8 < life.used <= 1
        (True, True)
    """

    epsilon: float
    delta: float
    costs: list[float] = field(default_factory=lambda: [0.0] * len(ORDERS))
    """The sum of Renyi divergences, by order."""
    taken: int = 0
    overflow: float = 0.0
    """The probability that some cohort was cut down to its largest size."""

    def takes(self, event: Event, count: int = 1) -> bool:
        """Whether so many of these releases are within the budget."""
        return self._used(self._with(event, count), self.overflow + count * event.overflow) <= 1

    def take(self, event: Event, count: int = 1) -> None:
        self.costs, self.taken = self._with(event, count), self.taken + count
        self.overflow += count * event.overflow

    def _with(self, event: Event, count: int) -> list[float]:
        return [cost + count * more for cost, more in zip(self.costs, _cost(event), strict=True)]

    def room(self, event: Event, most: int) -> int:
        """How many of these releases are within the budget, up to `most`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.takes(event, middle) else (low, middle - 1)
        return low

    @property
    def used(self) -> float:
        """The share of the budget that is used, from 0 to 1. It is no epsilon: the promise is `epsilon` as a whole."""
        return self._used(self.costs, self.overflow)

    @property
    def loss(self) -> float:
        """What no privacy loss has passed at any time so far, but with probability delta; infinite where none holds."""
        if self.overflow > 0:
            return math.inf
        room = math.log(len(ORDERS) / self.delta)
        return min(cost + room / (order - 1) for cost, order in zip(self.costs, ORDERS, strict=True))

    def _used(self, costs: list[float], overflow: float) -> float:
        share = (1 - _FOR_OVERFLOW) * self.delta / len(ORDERS)
        budgets = [self.epsilon - math.log1p(-1 / a) + math.log(share * a) / (a - 1) for a in ORDERS]
        orders = (cost / room for cost, room in zip(costs, budgets, strict=True) if room > 0)
        cut = overflow * (1 + math.exp(min(self.epsilon, 700.0))) / (_FOR_OVERFLOW * self.delta)
        return max(min(orders, default=math.inf), cut)


def _cost(event: Event) -> tuple[float, ...]:
    return renyi_cost(event, ORDERS) if event.private else (math.inf,) * len(ORDERS)
