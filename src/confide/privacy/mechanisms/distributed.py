"""`gaussian` with distributed trust: users add the noise in shares, and the server sees only their noisy sum.

In a deployment the shares are made by `confide.privacy.trust.own_noise` and hidden by secure aggregation; the server
tops them up, so that every release has the same variance: twice the one that the ledger states, which is what the
server itself is kept from knowing a user by. In one process the noise has the same distribution, from one place.
"""

from __future__ import annotations

import math

from torch import Tensor

from confide.privacy.events import Event
from confide.privacy.mechanisms.base import Asked, Mechanism, Occasion

RELEASED = 2
"""The variance of every release of distributed trust, in units of the one that the ledger states."""


class Distributed(Mechanism):
    name = "gaussian"
    summary = "independent noise at every step"
    trust = "distributed"

    def add_independent(self, total: Tensor, deviation: float, occasion: Occasion) -> float:
        return super().add_independent(total, math.sqrt(RELEASED) * deviation, occasion)

    def variance(self, event: Event) -> float:
        return RELEASED * super().variance(event)

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        if asked.uniform and asked.privacy.noise_scale is None:
            return []
        return [
            "privacy.trust=distributed: a client's share of the noise is made for uniform weights and for "
            "noise_multiplier or target_epsilon; leave users.weights and privacy.noise_scale out"
        ]

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return "Not extrapolated for distributed trust, whose server knows the cohorts."


def top_up(scale: float, least: int, arrived: int) -> float:
    """The deviation of the noise that the server adds to `arrived` shares, each of this scale and made for `least`.

    The shares together have arrived / least of the variance that the ledger states, a number that would tell whoever
    sees the models how large the cohort was; amplification by sampling needs that secret. `least` is more than half of
    a cohort, so the shares never reach twice the stated variance, and the server brings the sum up to exactly that.
    """
    return scale * math.sqrt(RELEASED * least - arrived)
