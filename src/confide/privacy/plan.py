"""What is promised: sampler, mechanism and accounting event, made together so that they cannot disagree.

The plan draws the cohort, says what one release costs, adds the noise, and states the epsilon. The loop never sees a
noise scale, and the accountant never sees anything but the plan's own event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from confide.errors import UserError
from confide.privacy import noise
from confide.privacy.accountant import Accountant, check_supported, epsilon, noise_multiplier
from confide.privacy.events import Event, Sampler
from confide.privacy.sampling import Sampling, draw_cohort, sampler_of

Probability = Annotated[float, Field(gt=0, lt=1)]
CURVE_POINTS = 10


class Privacy(BaseModel):
    """The noise and the guarantee that it buys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mechanism: Literal["gaussian", "none"] = Field("none", description="none: no noise, and no guarantee")
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="calibrate the noise to this epsilon; give this, noise_multiplier or noise_scale"
    )
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="z, the noise on the sum in units of the largest contribution of a user"
    )
    noise_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="PFL-ASR's sigma at `placement`, in units of the bound C"
    )
    placement: Literal["sum", "average", "client"] = Field("sum", description="where the noise is added")
    delta: Probability | None = Field(None, description="delta of the guarantee; at most 1 / population is wise")
    accountant: Accountant = Field("pld", description="pld: tighter; rdp: moments accountant")
    source: Literal["seeded"] = Field("seeded", description="seeded: repeatable, for research, not for release")


@dataclass(frozen=True)
class Plan:
    """Sampler, mechanism and event of a run."""

    seed: int
    steps: int
    sampler: Sampler
    cohort_size: int
    weights: np.ndarray  # (population,) with sum 1
    placement: noise.Placement
    event: Event
    """The cost of one central step."""
    delta: float | None
    accountant: Accountant

    @property
    def rate(self) -> float:
        return self.cohort_size / len(self.weights)

    def cohort(self, step: int) -> np.ndarray:
        return draw_cohort(self.sampler, self.cohort_size, len(self.weights), self.seed, step)

    def noise(self, like: Tensor, cohort: np.ndarray, step: int, attempt: int) -> Tensor | None:
        """The noise of the aggregate g = (1/q) sum w_k Delta_k. Call only once the ledger has the release."""
        if not self.event.private or self.event.sensitivity is None:
            return None
        spread = self.event.noise_multiplier * self.event.sensitivity
        if self.placement != "client" or len(cohort) == 0:
            return noise.gaussian(like, self.seed, step, attempt=attempt).mul_(spread)
        # Each user adds s_client C; the weights turn the sum of these into exactly `spread`.
        own = self.weights[cohort] / np.sqrt(np.square(self.weights[cohort]).sum())
        total = like.new_zeros(like.shape)
        for user, share in zip(cohort.tolist(), own.tolist(), strict=True):
            total.add_(noise.gaussian(like, self.seed, step, user + 1, attempt), alpha=share * spread)
        return total

    def epsilon(self, steps: int) -> float:
        """Epsilon after so many releases of this plan."""
        if self.delta is None:
            return math.inf
        return epsilon([self.event] * steps, self.delta, self.accountant)

    def epsilon_so_far(self, steps: int) -> float:
        """Epsilon for the progress display: rounded up to one of a few points of the run, exact at its end."""
        stride = -(-self.steps // CURVE_POINTS)
        return self.epsilon(max(steps, min(self.steps, -(-steps // stride) * stride)))


def make_plan(privacy: Privacy, sampling: Sampling, weights: np.ndarray, bound: float, steps: int, seed: int) -> Plan:
    """Build the plan, calibrate its noise and refuse what cannot be accounted for, before anything is trained."""
    population = len(weights)
    if sampling.cohort > population:
        raise UserError(
            f"sampling.cohort={sampling.cohort} is larger than the population of {population} users; "
            "lower the cohort or use more users"
        )
    rate = sampling.cohort / population
    # One user moves g = (1/q) sum w_k Delta_k by at most this.
    sensitivity = bound * float(weights.max()) / rate
    bare = Event(
        sampler_of(sampling, population), rate, sampling.cohort, population, 0.0,
        sensitivity if math.isfinite(sensitivity) else None,
    )  # fmt: skip
    z = 0.0 if privacy.mechanism == "none" else _multiplier(privacy, bare, weights, steps)
    event = Event(bare.sampler, rate, sampling.cohort, population, z, bare.sensitivity)
    return Plan(
        seed,
        steps,
        event.sampler,
        sampling.cohort,
        weights,
        privacy.placement,
        event,
        privacy.delta,
        privacy.accountant,
    )


def _multiplier(privacy: Privacy, bare: Event, weights: np.ndarray, steps: int) -> float:
    check_supported(bare, privacy.accountant)
    if bare.sensitivity is None or privacy.delta is None:
        raise UserError("noise needs a bounding rule with a bound and privacy.delta")
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.noise_scale is not None:
        average = noise.average_scale(privacy.noise_scale, privacy.placement, bare.rate, weights)
        return noise.multiplier_of_average(average, bare.rate, weights)
    if privacy.target_epsilon is None:
        raise UserError("privacy.mechanism=gaussian needs target_epsilon, noise_multiplier or noise_scale")
    return noise_multiplier(privacy.target_epsilon, privacy.delta, steps, privacy.accountant, bare)
