"""What is promised: sampler, mechanism and accounting event, made together so that they cannot disagree.

The plan draws the cohort, says what one release costs, adds the noise, and states the epsilon. The loop never sees a
noise scale, and the accountant never sees anything but the mechanism's own events. What is particular to one mechanism
is in its file under `confide.privacy.mechanisms`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat

import numpy as np
from torch import Tensor

from confide.errors import UserError
from confide.privacy import factorisation
from confide.privacy.accountant import Accountant, epsilon
from confide.privacy.events import Event
from confide.privacy.gaussian import Address, Seeded, Source, System
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import Asked, Mechanism, Occasion, Privacy, Setting, mechanism_of, refusals
from confide.privacy.sampling import Kind, Sampling, draw_cohort, sampler_of

CURVE_POINTS = 10
"""How often a run computes what it has spent so far."""


@dataclass(frozen=True)
class Plan:
    """Sampler, mechanism and guarantee of a run, made together by `make_plan` so that they cannot disagree.

    `cohort(step)` draws the users of a step, `mechanism` adds the noise, `event` is what one step costs, and
    `epsilon(charges)` is what so many steps cost.

    Examples:
        >>> import numpy as np
        >>> from confide.privacy.mechanisms import Privacy
        >>> from confide.privacy.plan import make_plan
        >>> from confide.privacy.sampling import Sampling
        >>> privacy = Privacy(mechanism="gaussian", target_epsilon=2, delta=1e-5)
        >>> weights = np.full(1000, 1 / 1000)
        >>> plan = make_plan(privacy, Sampling(kind="poisson", cohort=100), weights, bound=1.0, steps=20, seed=0)
        >>> plan.rate, plan.epsilon(20) <= 2
        (0.1, True)
    """

    seed: int
    steps: int
    sampler: Kind
    cohort_size: int
    weights: np.ndarray  # (population,) with sum 1
    delta: float | None
    accountant: Accountant
    source: Source
    mechanism: Mechanism

    @property
    def event(self) -> Event:
        """The cost of one central step, for the bound that the run begins with."""
        return self.mechanism.event

    @property
    def rate(self) -> float:
        """The expected share of the population in a step."""
        return self.event.rate

    def cohort(self, step: int, attempt: int = 0) -> np.ndarray:
        seed, population = self.seed if self.source.repeatable else None, len(self.weights)
        groups, most = self.event.separation, self.event.most
        return draw_cohort(self.sampler, self.cohort_size, population, seed, step, attempt, groups, most)

    def noisy_shares(self, counts: Tensor, event: Event, step: int, attempt: int) -> Tensor:
        """Of each counter, the mean over users of what they count for, 0 to 1, from the sum of their -1/2 to +1/2.

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
        counts = Counter(self._multipliers[:charges])
        counts[self._multipliers[0]] += max(charges - self.steps, 0)
        events = chain.from_iterable(repeat(replace(self.event, noise_multiplier=z), n) for z, n in counts.items())
        return epsilon(events, self.delta, self.accountant)

    @cached_property
    def _multipliers(self) -> list[float]:
        """z of every step, the least noise first: lines of steps that were made again must not state too little."""
        return sorted(self.mechanism.multiplier_at(step) for step in range(self.steps))

    def charges(self, steps: int) -> int:
        return min(steps, 1) if self.event.whole_run else steps

    def accounted(self, step: int) -> bool:
        """Whether epsilon is computed after this step, counted from 1: that takes longer than many a step does."""
        return step == self.steps or step % -(-self.steps // CURVE_POINTS) == 0


@dataclass
class Release:
    """One release of a step: its line in the ledger, and the noise that belongs to it."""

    plan: Plan
    event: Event
    cohort: np.ndarray
    step: int
    ledger: Ledger
    environment: str
    repeatable: bool
    from_users: bool
    """Whether users add their noise themselves. What they send is then the release, and is charged before they send."""
    attempt: int = -1

    def record(self) -> Release:
        """Have the line on disk. A second call changes nothing."""
        if self.attempt < 0:
            self.attempt = self.ledger.record(self.step, self.event, self.environment, self.repeatable)
        return self

    def add_noise(self, total: Tensor, memory: dict[str, Tensor], own: np.ndarray | None = None) -> float | None:
        """Add the server's noise, in place; its norm, or none where there is none or the users added theirs."""
        self._check_recorded()
        if self.from_users:
            return None
        line = self.ledger.line_of(self.step)
        occasion = Occasion(self.event, self.cohort, self.step, self.attempt, memory, line, own)
        return self.plan.mechanism.release(total, occasion)

    def noisy_shares(self, counts: Tensor) -> Tensor:
        """The share of users within each bound, and the figures, with the noise that the event charges for.

        Once for a release: update and counters are one vector, and the line stands for that.
        """
        self._check_recorded()
        return self.plan.noisy_shares(counts, self.event, self.step, self.attempt)

    def _check_recorded(self) -> None:
        if self.attempt < 0:
            raise RuntimeError("noise was asked for before the ledger had the release")


def check_cohort(sampling: Sampling, population: int | None) -> None:
    """Refuse a cohort that is larger than the population, if somebody knows it yet."""
    if population is not None and sampling.cohort > population:
        raise UserError(
            f"sampling.cohort={sampling.cohort} is larger than the population of {population} users; "
            "lower the cohort or use more users"
        )


def make_plan(
    privacy: Privacy,
    sampling: Sampling,
    weights: np.ndarray,
    bound: float,
    steps: int,
    seed: int,
    *,
    follows: str | None = None,
    counters: int = 0,
    count_noise: float | None = None,
    names: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> Plan:
    """Build the plan, calibrate its noise and refuse what cannot be accounted for, before anything is trained.

    `follows` says what the bound follows from step to step (quantile, car), `counters` and `count_noise` what a
    quantile releases in each step beside the figures of `privacy.metrics`, `names` and `sizes` are the model's tensors.
    """
    population = len(weights)
    check_cohort(sampling, population)
    problems = refusals(Asked(privacy, sampling, math.isfinite(bound), follows, population))
    if problems:
        raise UserError("; ".join(problems))
    if privacy.metrics is not None:
        counters += len(privacy.metrics.bounds)
        if count_noise is not None and privacy.metrics.noise is not None:
            raise UserError(
                "bounding.adaptive.count_noise and privacy.metrics.noise: one noise is on all counts; give one of them"
            )
        count_noise = count_noise or privacy.metrics.noise
    kind = sampler_of(sampling, population)
    grouped = kind in ("cyclic", "cyclic_poisson")
    separation = factorisation.cyclic_separation(population, sampling.cohort) if grouped else 0
    rate = 1 / separation if kind == "cyclic" else sampling.cohort / population
    most = sampling.most or 0 if kind in ("poisson", "cyclic_poisson") else 0
    source: Source = System() if privacy.source == "system" else Seeded(seed)
    mechanism = mechanism_of(privacy, follows)(
        Setting(
            privacy, kind, rate, sampling.cohort, separation, weights, bound, steps, source, names, sizes, counters,
            count_noise, most,
        )
    )  # fmt: skip
    plan = Plan(seed, steps, kind, sampling.cohort, weights, privacy.delta, privacy.accountant, source, mechanism)
    if most and plan.event.private and math.isinf(plan.epsilon(plan.charges(steps))):
        raise UserError(
            f"sampling.most={most}: {steps} cohorts have to be cut down to that with a probability of "
            f"{plan.charges(steps) * plan.event.overflow:.2g}, which is too much for delta={privacy.delta:g}; raise it"
        )
    return plan
