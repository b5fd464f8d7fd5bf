"""What is promised: sampler, mechanism and accounting event, made together so that they cannot disagree.

The plan draws the cohort, says what one release costs, adds the noise, and states the epsilon. The loop never sees a
noise scale, and the accountant never sees anything but the plan's own event.

Four mechanisms. `gaussian`: independent noise at every step, with amplification by sampling. `banded`: noise that is
correlated over steps, for a schedule in place of sampling (DP-FTRL; see `factorisation`). `partial`: the noise of
`gaussian`, value for value, but on some tensors only, to see what it does to them (PFL-ASR Figures 15 and 16); its
event has a noise multiplier of 0, so nothing can take it for a guarantee. `none`: no noise and no guarantee. Three
kinds of trust. `central`: the noise is on the sum that the server releases. `distributed`: users add it in shares and
the server sees only their noisy sum, in a deployment; in one process the result has the same distribution as `central`,
and is made in the same way. `local`: every user's message carries its own, and the server itself is kept from knowing
(CAR's local DP with a fixed bound).

With CAR's adaptive rule (`bounding.adaptive: {kind: car}`) the messages carry noise too, but its scale follows the raw
norms: the event has a noise multiplier of 0 and no sensitivity, so that nothing can take it for a guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from confide.errors import UserError
from confide.federated.bounding import Adaptive
from confide.federated.car_adaptive import CarAdaptive, multiplier
from confide.federated.parameters import Layout, norm
from confide.privacy import factorisation, noise
from confide.privacy.accountant import Accountant, check_supported, epsilon, noise_multiplier
from confide.privacy.events import Event
from confide.privacy.gaussian import Address, Seeded, Source, System
from confide.privacy.sampling import Kind, Sampling, draw_cohort, sampler_of

Probability = Annotated[float, Field(gt=0, lt=1)]
CURVE_POINTS = 10
BANDS = 16
"""Bands of correlated noise where the recipe does not say: each costs a vector as large as the model."""
Spans = tuple[tuple[int, int], ...]
"""Stretches of the flat vector, each from its first coordinate to the one after its last."""


class Privacy(BaseModel):
    """The noise and the guarantee that it buys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mechanism: Literal["gaussian", "banded", "partial", "none"] = Field(
        "none",
        description="gaussian: independent noise at every step; banded: noise correlated over steps for "
        "sampling.kind cyclic, which assumes no sampling (DP-FTRL); partial: noise on `tensors` only, for analysis, "
        "without any guarantee; none: no noise, and no guarantee",
    )
    trust: Literal["central", "distributed", "local"] = Field(
        "central",
        description="central: noise on the sum; distributed: the same noise in shares of the users, whose single "
        "updates secure aggregation hides (confide deploy); local: noise on every user's message, against the server",
    )
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="calibrate the noise to this epsilon; give this, noise_multiplier or noise_scale"
    )
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="z, the noise on the sum (local: on a message) in units of a user's largest contribution"
    )
    noise_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="PFL-ASR's sigma at `placement`, in units of the bound C"
    )
    placement: Literal["sum", "average", "client"] = Field("sum", description="where the noise is added")
    bands: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description=f"for banded: over how many steps noise is correlated; none: up to {BANDS}"
    )
    tensors: tuple[str, ...] = Field((), description="for partial: patterns of names of the tensors that get noise")
    all_but: bool = Field(False, description="for partial: noise on all tensors but these")
    elsewhere: float = Field(
        0.0, ge=0, lt=1, description="for partial: the deviation on the other tensors, as a share (Figure 16 has 0.5)"
    )
    delta: Probability | None = Field(None, description="delta of the guarantee; at most 1 / population is wise")
    accountant: Accountant = Field("pld", description="pld: tighter; rdp: moments accountant")
    source: Literal["seeded", "system"] = Field(
        "seeded",
        description="seeded: repeatable, for research, not for release; system: keyed by the operating system, for "
        "release, never drawn again",
    )


@dataclass(frozen=True)
class Plan:
    """Sampler, mechanism and event of a run."""

    seed: int
    steps: int
    sampler: Kind
    cohort_size: int
    weights: np.ndarray  # (population,) with sum 1
    placement: noise.Placement
    event: Event
    """The cost of one central step, for the bound that the run begins with."""
    delta: float | None
    accountant: Accountant
    source: Source
    reach: float
    """The largest norm that one user adds to what is released, for a bound of 1."""
    coefficients: tuple[float, ...] = ()
    """Of the banded mechanism: how the noise of a step depends on that of the steps before it."""
    spans: Spans = ()
    """Of the partial mechanism: where the noise goes."""
    partial_multiplier: float = 0.0
    """Of the partial mechanism: z there. The event does not have it, because it buys nothing."""
    elsewhere: float = 0.0
    """Of the partial mechanism: the share of that deviation on all other coordinates."""

    @property
    def rate(self) -> float:
        """The expected share of the population in a step, which the sum is divided by."""
        return self.event.rate

    def cohort(self, step: int) -> np.ndarray:
        seed = self.seed if self.source.repeatable else None
        return draw_cohort(self.sampler, self.cohort_size, len(self.weights), seed, step)

    def event_at(self, bound: float) -> Event:
        """The cost of a step whose updates are bounded to this. Only the scale of the noise depends on it."""
        sensitivity = bound * self.reach
        return replace(self.event, sensitivity=sensitivity if math.isfinite(sensitivity) else None)

    def noise_memory(self, like: Tensor) -> dict[str, Tensor]:
        """What correlated noise has to remember; part of the run's state."""
        return factorisation.init(len(self.coefficients), like) if self.coefficients else {}

    def release(
        self,
        total: Tensor,
        event: Event,
        cohort: np.ndarray,
        step: int,
        attempt: int,
        memory: dict[str, Tensor],
        own: np.ndarray | None = None,
    ) -> float | None:
        """Add the noise to g = (1/q) sum w_k Delta_k, in place, and return the noise's norm; none without noise.

        `own`, of CAR's adaptive rule, is the deviation on each user's message. Call only once the ledger has the
        release.
        """
        if own is not None:
            if not own.any():
                return None
            return self._from_users(total, cohort, own * self.weights[cohort] / self.rate, step, attempt)
        if self.spans and event.sensitivity is not None:
            return self._partial(total, self.partial_multiplier * event.sensitivity, cohort, step, attempt)
        if not event.private or event.sensitivity is None:
            return None
        spread = event.update_multiplier * event.sensitivity
        if event.sampler == "local":
            # A message has z C of its own; the aggregate weighs messages by w_k / q.
            return self._from_users(total, cohort, spread * self.weights[cohort] / self.rate, step, attempt)
        if self.coefficients:
            return self._correlated(total, spread, step, attempt, memory)
        return self._independent(total, spread, cohort, step, attempt)

    def noisy_sizes(self, sizes: list[int]) -> list[float]:
        """How many coordinates of each tensor get noise, if there is any; a share of it counts by its square."""
        if not self.spans:
            return [float(size) for size in sizes]
        ends = np.cumsum(sizes).tolist()
        inside = [
            sum(max(0, min(end, stop) - max(end - size, start)) for start, stop in self.spans)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return [noisy + self.elsewhere**2 * (size - noisy) for noisy, size in zip(inside, sizes, strict=True)]

    def _independent(self, total: Tensor, spread: float, cohort: np.ndarray, step: int, attempt: int) -> float:
        if self.placement == "client" and len(cohort) > 0:
            # Each user adds s_client C; the weights turn the sum of these into exactly `spread`.
            own = self.weights[cohort] / np.sqrt(np.square(self.weights[cohort]).sum())
            return self._from_users(total, cohort, spread * own, step, attempt)
        return math.sqrt(self.source.add(total, spread, Address(step, attempt=attempt)))

    def _partial(self, total: Tensor, spread: float, cohort: np.ndarray, step: int, attempt: int) -> float:
        """All of the noise is drawn, so that runs with noise on other tensors can be compared value for value."""
        fresh = torch.zeros_like(total)
        self._independent(fresh, spread, cohort, step, attempt)
        end = 0
        for start, stop in (*self.spans, (len(fresh), len(fresh))):
            fresh[end:start].mul_(self.elsewhere)
            end = stop
        total.add_(fresh)
        return norm(fresh)

    def _from_users(self, total: Tensor, cohort: np.ndarray, scales: np.ndarray, step: int, attempt: int) -> float:
        squares = 0.0
        for user, scale in zip(cohort.tolist(), scales.tolist(), strict=True):
            squares += self.source.add(total, scale, Address(step, user + 1, attempt))
        return math.sqrt(squares)  # in expectation: independent noises add up by their squares

    def _correlated(self, total: Tensor, spread: float, step: int, attempt: int, memory: dict[str, Tensor]) -> float:
        coefficients = np.array(self.coefficients)
        deviation = spread * factorisation.sensitivity(coefficients, self.event.rounds, self.event.separation)
        fresh = torch.empty_like(total)
        self.source.fill(fresh, Address(step, attempt=attempt))
        correlated = factorisation.next_noise(coefficients, memory, fresh, step)
        total.add_(correlated, alpha=deviation)
        return float(correlated.norm()) * deviation

    def noisy_shares(self, counts: Tensor, event: Event, step: int, attempt: int) -> Tensor:
        """Of each counter, the share of users within the bound, from the sum of their +1/2 and -1/2.

        Divided by the expected cohort, never the realised one, which nobody may learn.
        """
        noisy = counts.clone()
        if event.private:
            self.source.add(noisy, event.count_noise, Address(step, attempt=attempt, purpose="clip count"))
        return noisy / (self.rate * len(self.weights)) + 0.5

    def epsilon(self, charges: int) -> float:
        """Epsilon after so many charges: one a step, or one for a whole run of correlated noise."""
        if self.delta is None:
            return math.inf
        return epsilon([self.event] * charges, self.delta, self.accountant)

    def charges(self, steps: int) -> int:
        return min(steps, 1) if self.event.whole_run else steps

    def epsilon_so_far(self, charges: int) -> float:
        """Epsilon for the progress display: rounded up to one of a few points of the run, exact at its end."""
        all_charges = self.charges(self.steps)
        stride = -(-all_charges // CURVE_POINTS)
        return self.epsilon(max(charges, min(all_charges, -(-charges // stride) * stride)))


def make_plan(
    privacy: Privacy,
    sampling: Sampling,
    weights: np.ndarray,
    bound: float,
    steps: int,
    seed: int,
    adaptive: Adaptive | CarAdaptive | None = None,
    counters: int = 0,
    spans: Spans = (),
) -> Plan:
    """Build the plan, calibrate its noise and refuse what cannot be accounted for, before anything is trained."""
    population = len(weights)
    if isinstance(adaptive, CarAdaptive):
        multiplier(adaptive, population)  # refuses a noise that leaves nothing for the update
        if privacy.mechanism != "none":
            raise UserError("bounding.adaptive.kind=car brings its own noise; it needs privacy.mechanism=none")
    if sampling.cohort > population:
        raise UserError(
            f"sampling.cohort={sampling.cohort} is larger than the population of {population} users; "
            "lower the cohort or use more users"
        )
    kind = sampler_of(sampling, population)
    separation = factorisation.cyclic_separation(population, sampling.cohort) if kind == "cyclic" else 0
    rate = 1 / separation if separation else sampling.cohort / population
    local = privacy.trust == "local" or isinstance(adaptive, CarAdaptive)
    # One user moves g = (1/q) sum w_k Delta_k by at most this; a message is moved by the bound itself.
    reach = 1.0 if local else float(weights.max()) / rate
    if isinstance(adaptive, CarAdaptive):
        reach = math.inf  # what bounds a message follows from the data: nothing can be stated
    sensitivity = bound * reach
    bare = Event(
        "local" if local else kind, rate, sampling.cohort, population, 0.0,
        sensitivity if math.isfinite(sensitivity) else None, separation=separation,
    )  # fmt: skip
    coefficients: tuple[float, ...] = ()
    if privacy.mechanism == "banded":
        bands = privacy.bands or max(1, min(BANDS, separation, steps))
        coefficients = tuple(factorisation.optimised_coefficients(bands, steps).tolist())
        factorisation.sensitivity(np.array(coefficients), steps, separation)  # refuses bands beyond the separation
        bare = replace(bare, rounds=steps, bands=bands)
    z = 0.0 if privacy.mechanism == "none" else _multiplier(privacy, bare, weights, steps)
    partial = privacy.mechanism == "partial"
    if partial and (not spans or local or adaptive is not None):
        raise UserError(
            "privacy.mechanism=partial needs tensors to add noise to, privacy.trust=central and no adaptive bound"
        )
    event = replace(bare, noise_multiplier=0.0 if partial else z)
    if isinstance(adaptive, Adaptive):
        # A twentieth of the cohort, as its authors advise, but never so little that the counters take more than a
        # fifth of the budget.
        least = max(rate * population / 20, z * math.sqrt(counters / 0.8))
        own = least if adaptive.count_noise is None else adaptive.count_noise
        event = replace(event, counters=counters, count_noise=own)
    if event.private:
        _ = event.update_multiplier  # refuses counters that leave nothing
    source: Source = System() if privacy.source == "system" else Seeded(seed)
    return Plan(
        seed, steps, kind, sampling.cohort, weights, privacy.placement, event, privacy.delta, privacy.accountant,
        source, reach, coefficients, spans if partial else (), z if partial else 0.0, privacy.elsewhere,
    )  # fmt: skip


def spans_of(privacy: Privacy, layout: Layout) -> Spans:
    """Where noise on some tensors goes; of other mechanisms nothing, which stands for everywhere."""
    if privacy.mechanism != "partial":
        return ()
    for pattern in privacy.tensors:
        if not any(fnmatchcase(name, pattern) for name in layout.names):
            raise UserError(
                f"privacy.tensors: no tensor of the model matches {pattern!r}; there are {len(layout.names)}, "
                f"for example {', '.join(layout.names[:: max(1, len(layout.names) // 6)])}"
            )
    spans = tuple(
        (end - size, end)
        for name, size, end in zip(layout.names, layout.sizes, np.cumsum(layout.sizes).tolist(), strict=True)
        if any(fnmatchcase(name, pattern) for pattern in privacy.tensors) != privacy.all_but
    )
    if not spans:
        raise UserError("privacy.all_but: the patterns of privacy.tensors match every tensor; none is left for noise")
    return spans


def _multiplier(privacy: Privacy, bare: Event, weights: np.ndarray, steps: int) -> float:
    guaranteed = privacy.mechanism != "partial"
    if guaranteed:
        check_supported(bare, privacy.accountant)
    _check_mechanism(privacy, bare)
    if bare.sensitivity is None or (guaranteed and privacy.delta is None):
        raise UserError("noise needs a bounding rule with a bound and privacy.delta")
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.noise_scale is not None:
        if privacy.trust == "local":
            return privacy.noise_scale
        average = noise.average_scale(privacy.noise_scale, privacy.placement, bare.rate, weights)
        return noise.multiplier_of_average(average, bare.rate, weights)
    if not guaranteed:
        raise UserError("privacy.mechanism=partial needs noise_multiplier or noise_scale; it has no epsilon")
    if privacy.target_epsilon is None or privacy.delta is None:
        raise UserError(f"privacy.mechanism={privacy.mechanism} needs target_epsilon, noise_multiplier or noise_scale")
    charges = 1 if bare.whole_run else steps
    return noise_multiplier(privacy.target_epsilon, privacy.delta, charges, privacy.accountant, bare)


def _check_mechanism(privacy: Privacy, bare: Event) -> None:
    if (privacy.mechanism == "banded") != (bare.sampler == "cyclic"):
        raise UserError(
            f"privacy.mechanism={privacy.mechanism} has no accounting with sampler {bare.sampler}; correlated noise "
            "(banded) goes with sampling.kind=cyclic and nothing else does (bands: 1 is independent noise)"
        )
    if privacy.mechanism == "banded" and privacy.source == "system":
        raise UserError("privacy.source=system: the noise of banded has to be kept in checkpoints; use gaussian")
    if privacy.mechanism == "partial" and privacy.source == "system":
        raise UserError("privacy.source=system: is for releases, and partial has no guarantee to release with")
