"""`gaussian` with local trust: every user's message carries its own noise (CAR's local DP with a fixed bound).

The server itself learns no user's update, so nothing is gained from sampling, and any two data sets of a user are
compared. A message is moved by the bound itself; the aggregate weighs messages by w_k / q.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from confide.privacy.events import Event, Sampler
from confide.privacy.mechanisms.base import Asked, Mechanism, Occasion


class Local(Mechanism):
    name = "gaussian"
    summary = "independent noise at every step"
    trust = "local"

    @classmethod
    def sampler_refusals(cls, asked: Asked) -> list[str]:
        if asked.sampling.most is None:
            return []
        return ["sampling.most: with privacy.trust=local it is not accounted for, as no sampling is; leave it out"]

    @property
    def sampler(self) -> Sampler:
        return "local"

    def largest_contribution(self) -> float:
        return 1.0

    def multiplier_of_scale(self, scale: float, rate: float, weights: np.ndarray) -> float:
        return scale

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        event, given = occasion.event, self.setting
        if not event.private or event.sensitivity is None:
            return None
        deviation = event.update_multiplier * event.sensitivity  # z C
        return self.add_from_users(total, deviation * given.weights[occasion.cohort] / given.rate, occasion)

    def variance(self, event: Event) -> float:
        return super().variance(event) * float((self.setting.weights**2).sum()) / self.setting.rate

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return "With local trust every message has its own noise: more users do not lower epsilon."
