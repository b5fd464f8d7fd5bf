"""`banded`: noise that is correlated over steps, for groups of users that take turns (DP-FTRL).

Without sampling (`sampling.kind: cyclic`) the whole run is one Gaussian release, with it (`cyclic_poisson`) one sampled
Gaussian release for each turn of a group; `confide.privacy.factorisation` has the mathematics and its assumptions. The
event carries the number of rounds, and the ledger charges all steps together. With sampling there are as many groups as
bands: with fewer a user's turns would share noise, and more would only raise the rate within a group.

What must be remembered. A step takes back part of the noise of the bands - 1 steps before it, so these have to be
known. Whoever knows them can subtract them from the models.
* Seeded noise is research, and anybody with the recipe can draw it: it is kept in the checkpoint, and a run that was
  stopped goes on with the noise that it would have had.
* Noise of the operating system is kept in this object, in memory, and is written nowhere. After a stop it is gone, and
  the noise begins anew: a stop costs accuracy and no privacy, but for the one step that a kill may make twice, which
  the ledger counts as one more turn of its group. The other way would have been to encrypt it in the checkpoint. But
  then the key has to be on disk too, and a copy of the folder would undo the guarantee for ever after.
Memory that the system swaps to disk, or writes into a dump, is not protected by this.

Noise of either source also begins anew where a step is made again under other circumstances: from the same memory two
histories would go on, and one turn of a user would be in both (`Ledger.charged` counts on it).

How system noise is added. `System` dithers and rounds g + scale x, because the lowest bits of a sum tell of its terms.
Here it is given g_t minus what is taken back, and what is remembered is what came out minus g_t, with rounding and
dither in it. Multiplied by C, the release is then (C G)_t + sigma x_t, dithered, rounded and shifted by releases that
everybody knows: nothing but processing of the Gaussian release that is accounted for, but for the rounding of g_t minus
what is taken back (1e-7 of it in single precision), which like that of the sum over users comes before the noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.errors import UserError
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
    summary = "noise correlated over steps for sampling.kind cyclic or cyclic_poisson (DP-FTRL)"
    keys = ("bands",)
    samplers: ClassVar[tuple[str, ...]] = ("cyclic", "cyclic_poisson")

    def __init__(self, setting: Setting) -> None:
        bands = setting.privacy.bands if isinstance(setting.privacy, BandedSettings) else None
        self.bands = bands or max(1, min(BANDS, setting.separation, setting.steps))
        self.amplified = setting.sampler == "cyclic_poisson"
        if self.amplified and self.bands > setting.separation:
            raise UserError(
                f"privacy.bands={self.bands}: so many groups of {len(setting.weights)} users are smaller than the "
                f"cohort of {setting.cohort}; give at most {setting.separation} bands, or lower the cohort"
            )
        self.coefficients = factorisation.optimised_coefficients(self.bands, setting.steps)
        # What z is measured in: one column of C for a turn that is sampled, else all columns of a user together. Bands
        # beyond the separation are refused here.
        rounds = min(setting.steps, self.bands) if self.amplified else setting.steps
        self.column = factorisation.sensitivity(self.coefficients, rounds, setting.separation)
        self._unwritten: dict[str, Tensor] = {}
        super().__init__(setting)

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        privacy, problems = asked.privacy, cls.noise_refusals(asked)
        if asked.sampling.kind not in cls.samplers:
            problems.append(
                f"sampling.kind={asked.sampling.kind}: privacy.mechanism=banded needs a user's turns to be far apart; "
                "use sampling.kind: cyclic_poisson (amplified by sampling) or cyclic"
            )
        problems += cls.trust_refusals(asked)
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
        bare = replace(super().bare_event(), rounds=self.setting.steps, bands=self.bands)
        return replace(bare, separation=self.bands) if self.amplified else bare

    def start_memory(self, like: Tensor) -> dict[str, Tensor]:
        if not self.setting.source.repeatable:
            return {}  # what is returned here is written into checkpoints
        return _fresh_memory(len(self.coefficients), like)

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        event, source = occasion.event, self.setting.source
        if not event.private or event.sensitivity is None:
            return None
        deviation = event.update_multiplier * event.sensitivity * self.column
        address = Address(occasion.step, attempt=occasion.attempt)
        if not source.repeatable and not self._unwritten:
            self._unwritten = _fresh_memory(len(self.coefficients), total)
        memory = occasion.memory if source.repeatable else self._unwritten
        _go_on(memory, occasion.line)
        coefficients = np.asarray(self.coefficients)
        if source.repeatable:
            made = torch.empty_like(total)
            source.fill(made, address)
            factorisation.next_noise(coefficients, memory, made, int(memory["step"]))
            total.add_(made, alpha=deviation)
        else:
            made = total.neg()
            factorisation.take_back(coefficients, memory, total, deviation)
            source.add(total, deviation, address)
            made.add_(total).div_(deviation)
            factorisation.remember(memory, made)
        return float(made.norm()) * deviation


def _fresh_memory(bands: int, like: Tensor) -> dict[str, Tensor]:
    return {**factorisation.init(bands, like), "line": torch.full((), -1, dtype=torch.int64)}


def _go_on(memory: dict[str, Tensor], line: int | None) -> None:
    """Begin the noise anew, unless this release is the one right after the last that is remembered."""
    if "line" not in memory:
        raise UserError(
            "the checkpoint has correlated noise of an older version, which was accounted for in another way; "
            "start the run again in another folder"
        )
    follows = memory["line"] + 1
    if line is not None and line != int(follows):
        factorisation.start(memory)
        follows.fill_(line)
    memory["line"].copy_(follows)
