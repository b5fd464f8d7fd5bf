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
        >>> 5 < life.taken < 9, life.spent <= 3
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
        cut = self.overflow + count * event.overflow
        if cut > 0 and cut > _FOR_OVERFLOW * self.delta / (1 + math.exp(min(self.epsilon, 700.0))):
            return False
        return self._epsilon(self._with(event, count)) <= self.epsilon

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
    def spent(self) -> float:
        """The epsilon of what was taken; the filter's promise is `epsilon`, whoever chose what on the way."""
        return 0.0 if self.taken == 0 else self._epsilon(self.costs)

    def _epsilon(self, costs: list[float]) -> float:
        share = (1 - _FOR_OVERFLOW) * self.delta / len(ORDERS)
        return max(
            0.0,
            min(
                cost + math.log1p(-1 / order) - math.log(share * order) / (order - 1)
                for cost, order in zip(costs, ORDERS, strict=True)
            ),
        )


def _cost(event: Event) -> tuple[float, ...]:
    return renyi_cost(event, ORDERS) if event.private else (math.inf,) * len(ORDERS)
