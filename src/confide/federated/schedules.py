"""How a learning rate changes over central steps: multipliers of the base rate, as they stand in a recipe.

Implements, for the 0-based central step t:

* PFL-ASR section 4 and Figures 2-3, a constant rate "with further exponential decay": 1 before step t0,
  then r^((t - t0) / tau), without a jump at t0;
* PFL-ASR appendix F, central training: "step-wise (by 2x) decay every 50k steps started at 40k-330k", the first drop at
  t0 (staircase);
* NORM appendix G, eta_k = 0.99^k eta_0: factor^t;
* a straight line down to nothing after so many steps, 1 - t / steps, for short runs of a small model: what is left of
  the noise in the last iterates is that of small steps;
* PFL-ASR appendix G.3, the linear warm-up of post-LayerNorm models: (t + 1) / warmup while t < warmup.

Differs from the paper: the released PFL-ASR code starts its warm-up at (almost) zero and counts the decay
from the end of the warm-up. Here the first step already moves the model, because its privacy has been paid
for, and warm-up multiplies the schedule, so that `start` always means a central step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from confide.settings import Section

__all__ = ["Constant", "Exponential", "Linear", "PerRound", "Schedule"]


class _Schedule(Section, ABC):
    """What every schedule shares: a warm-up, and being called with a step."""

    model_config = ConfigDict(allow_inf_nan=False)

    # Declared here so that it comes first in the schema that users read.
    kind: str
    warmup: int = Field(default=0, ge=0, description="Steps of linear warm-up before the full rate; 0 for none.")

    def __call__(self, step: int) -> float:
        """The multiplier of the base learning rate at the 0-based `step`."""
        if step < 0:
            raise ValueError(f"step={step} is negative; steps count from 0")
        ramp = (step + 1) / self.warmup if step < self.warmup else 1.0
        return ramp * self._decay(step)

    @abstractmethod
    def _decay(self, step: int) -> float:
        """The multiplier without warm-up."""


class Constant(_Schedule):
    """The base learning rate at every step."""

    kind: Literal["constant"] = Field(default="constant", description="The same rate at every step.")

    def _decay(self, step: int) -> float:
        return 1.0


class Exponential(_Schedule):
    """The base learning rate until `start`, then multiplied by `rate` every `transition` steps, smoothly."""

    kind: Literal["exponential"] = Field(
        default="exponential", description="Constant first, then an exponential decay."
    )
    rate: float = Field(gt=0, le=1, description="What the learning rate is multiplied by every `transition` steps.")
    start: int = Field(ge=0, description="The central step from which the rate decays.")
    transition: float = Field(gt=0, description="The number of steps that it takes to decay once by `rate`.")
    staircase: bool = Field(
        default=False, description="Decay at once at `start` and then every `transition` steps, in place of smoothly."
    )

    def _decay(self, step: int) -> float:
        if step < self.start:
            return 1.0
        times = (step - self.start) / self.transition
        return math.pow(self.rate, math.floor(times) + 1 if self.staircase else times)


class PerRound(_Schedule):
    """The base learning rate multiplied by `factor` after every central step."""

    kind: Literal["per_round"] = Field(default="per_round", description="A decay by one factor at every step.")
    factor: float = Field(gt=0, le=1, description="What the learning rate is multiplied by after every step.")

    def _decay(self, step: int) -> float:
        return math.pow(self.factor, step)


class Linear(_Schedule):
    """The base learning rate at first, then a straight line down to 1 / `steps` of it at the last of these steps."""

    kind: Literal["linear"] = Field(default="linear", description="A straight line down to the last step.")
    steps: int = Field(ge=1, description="How many steps it takes; usually run.steps. Later ones stay at the end.")

    def _decay(self, step: int) -> float:
        return 1.0 - min(step, self.steps - 1) / self.steps


Schedule = Annotated[Constant | Exponential | Linear | PerRound, Field(discriminator="kind")]
