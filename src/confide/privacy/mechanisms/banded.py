"""`banded`: noise that is correlated over steps, for a schedule of turns in place of sampling (DP-FTRL).

The whole run is one Gaussian release (`confide.privacy.factorisation` has the mathematics and its assumptions), so the
event carries the number of rounds and the ledger charges all steps together. The last fresh vectors of noise are part
of the run's state, which is why noise of the operating system is refused: it must never be written down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.privacy import factorisation
from confide.privacy.events import Event
from confide.privacy.gaussian import Address
from confide.privacy.mechanisms.base import Asked, CommonSettings, Mechanism, Occasion, Setting

BANDS = 16
"""Bands where the recipe does not say: each costs a vector as large as the model."""


class BandedSettings(CommonSettings):
    bands: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description=f"for banded: over how many steps noise is correlated; none: up to {BANDS}"
    )


class Banded(Mechanism):
    name = "banded"
    summary = "noise correlated over steps for sampling.kind cyclic, which assumes no sampling (DP-FTRL)"
    keys = ("bands",)
    samplers: ClassVar[tuple[str, ...]] = ("cyclic",)

    def __init__(self, setting: Setting) -> None:
        bands = setting.privacy.bands if isinstance(setting.privacy, BandedSettings) else None
        self.bands = bands or max(1, min(BANDS, setting.separation, setting.steps))
        self.coefficients = factorisation.optimised_coefficients(self.bands, setting.steps)
        # Refuses bands beyond the separation.
        self.column = factorisation.sensitivity(self.coefficients, setting.steps, setting.separation)
        super().__init__(setting)

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        privacy, problems = asked.privacy, cls.noise_refusals(asked)
        if asked.sampling.kind != "cyclic":
            problems.append(
                f"sampling.kind={asked.sampling.kind}: privacy.mechanism=banded needs a user's turns to be far apart; "
                "use sampling.kind: cyclic"
            )
        problems += cls.trust_refusals(asked)
        if privacy.source == "system":
            problems.append(
                "privacy.source=system: cannot be combined with privacy.mechanism: banded, whose noise has to be kept "
                "in checkpoints; use gaussian"
            )
        if privacy.placement == "client":
            problems.append("privacy.placement=client: cannot be combined with privacy.mechanism: banded")
        if privacy.noise_scale is not None:
            problems.append(
                "privacy.noise_scale: not defined for banded noise; give noise_multiplier or target_epsilon"
            )
        if asked.follows is not None:
            problems.append("bounding.adaptive: banded noise is made for one bound; leave it out")
        return problems

    @classmethod
    def metrics_refusals(cls, asked: Asked) -> list[str]:
        if asked.privacy.metrics is None:
            return []
        return ["privacy.metrics: banded noise is made for the update alone; use privacy.mechanism: gaussian"]

    def bare_event(self) -> Event:
        return replace(super().bare_event(), rounds=self.setting.steps, bands=self.bands)

    def start_memory(self, like: Tensor) -> dict[str, Tensor]:
        return factorisation.init(len(self.coefficients), like)

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        event = occasion.event
        if not event.private or event.sensitivity is None:
            return None
        deviation = event.update_multiplier * event.sensitivity * self.column
        fresh = torch.empty_like(total)
        self.setting.source.fill(fresh, Address(occasion.step, attempt=occasion.attempt))
        correlated = factorisation.next_noise(np.asarray(self.coefficients), occasion.memory, fresh, occasion.step)
        total.add_(correlated, alpha=deviation)
        return float(correlated.norm()) * deviation
