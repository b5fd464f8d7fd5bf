"""CAR's adaptive local noise (`bounding.adaptive: {kind: car}`): noise on every message, and no formal guarantee.

The rule of the bounds (`confide.federated.bounds`) says how much noise each message gets, from the user's raw norm,
which nothing protects. So the event has a noise multiplier of 0 and no sensitivity, and nothing can take it for a
guarantee.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from confide.privacy.events import Event, Sampler
from confide.privacy.mechanisms.base import Asked, CommonSettings, Mechanism, Occasion
from confide.privacy.mechanisms.none import NOTHING_TO_EXTRAPOLATE

NO_GUARANTEE = (
    "no formal guarantee: CAR's adaptive rule takes bound and noise from the raw norms, which nothing protects; with a "
    "guarantee: bounding.adaptive.kind: quantile, or a fixed bound with privacy.trust: local"
)


class CarNoise(Mechanism):
    name = "none"
    summary = "no noise, and no guarantee"
    trust = "local"
    guaranteed = False

    @classmethod
    def takes(cls, privacy: CommonSettings, follows: str | None) -> bool:
        return follows == "car"

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        privacy = asked.privacy
        if privacy.trust == "distributed":
            return [
                "bounding.adaptive.kind=car: every client noises its own message; it goes with privacy.trust: local"
            ]
        given = privacy.given
        given += ["delta"] if privacy.delta is not None else []
        given += ["source"] if privacy.source == "system" else []
        given += ["trust"] if privacy.trust == "local" else []
        return [
            f"privacy.{n}: bounding.adaptive.kind=car brings its own noise (its noise_multiplier) and has "
            "no formal guarantee; leave the privacy section out, or use a rule with a guarantee (adaptive.kind: "
            "quantile, or a fixed bound with privacy.trust: local)"
            for n in (["mechanism"] if privacy.mechanism != "none" else given)
        ]

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        return [
            "bounding.adaptive.kind=car: needs every client's raw norm at the server and has no guarantee; it is for "
            "simulation. Use kind: quantile, or a fixed bound with trust: local"
        ]

    @property
    def sampler(self) -> Sampler:
        return "local"

    def largest_contribution(self) -> float:
        return math.inf  # what bounds a message follows from the data: nothing can be stated

    def calibrate(self, bare: Event) -> float:
        return 0.0

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        if occasion.own is None or not occasion.own.any():
            return None
        given = self.setting
        return self.add_from_users(total, occasion.own * given.weights[occasion.cohort] / given.rate, occasion)

    @classmethod
    def label(cls) -> str:
        return "car adaptive"

    @classmethod
    def progress(cls, epsilon: float | None) -> str:
        return "no formal guarantee"

    @classmethod
    def words(cls, privacy: Any) -> str:
        return NO_GUARANTEE

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return NOTHING_TO_EXTRAPOLATE
