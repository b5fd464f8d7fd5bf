"""What a mechanism is: settings, refusals, accounting event, release, memory and statement, in one object.

A mechanism decides what is added to the sum of a central step and what that costs. To write one, subclass `Mechanism`
and add it to the registry in `confide.privacy.mechanisms`, or name it in a recipe with `privacy.mechanism: python`.
The recipe asks it what it refuses, the plan takes its event and its release, a deployment asks what cannot be kept
there, and the pages print what it states; none of them repeats a check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from confide.errors import UserError
from confide.privacy import noise
from confide.privacy.accountant import Accountant, noise_multiplier, shown, too_large
from confide.privacy.events import Event, Sampler
from confide.privacy.gaussian import Address, Source
from confide.privacy.guarantee import NO_GUARANTEE
from confide.privacy.metrics import NoisyMetrics
from confide.privacy.sampling import Kind, Sampling
from confide.settings import FunctionName, LocalPath, Section

Probability = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NOISE_KEYS = ("target_epsilon", "noise_multiplier", "noise_scale")


class CommonSettings(Section):
    """The keys of the privacy section that do not belong to one mechanism."""

    mechanism: str = "none"
    trust: Literal["central", "distributed", "local"] = Field(
        "central",
        description="central: noise on the sum; distributed: the same noise in shares of the users, whose single "
        "updates secure aggregation hides (confide deploy); local: noise on every user's message, against the server",
    )
    target_epsilon: Positive | None = Field(
        None, description="calibrate the noise to this epsilon; give this, noise_multiplier or noise_scale"
    )
    noise_multiplier: Positive | None = Field(
        None, description="z, the noise on the sum (local: on a message) in units of a user's largest contribution"
    )
    noise_scale: Positive | None = Field(None, description="PFL-ASR's sigma at `placement`, in units of the bound C")
    placement: Literal["sum", "average", "client"] = Field("sum", description="where the noise is added")
    delta: Probability | None = Field(None, description="delta of the guarantee; at most 1 / population")
    accountant: Accountant = Field("pld", description="pld: tighter; rdp: moments accountant")
    source: Literal["seeded", "system"] = Field(
        "seeded",
        description="seeded: repeatable, for research, not for release; system: keyed by the operating system, for "
        "release, never drawn again",
    )
    # Left out of a dump where they are not used, so that recipes from before they were there keep their digest.
    large_delta: bool = Field(
        False, exclude_if=lambda value: not value,
        description="whether delta may be above 1 / population, where publishing a random user's data is within it",
    )  # fmt: skip
    metrics: NoisyMetrics | None = Field(
        None, exclude_if=lambda value: value is None,
        description="figures about the cohort that every step also releases, with noise, under the same budget",
    )  # fmt: skip
    budget: LocalPath | None = Field(
        None, exclude_if=lambda value: value is None,
        description="the file of the population's lifetime budget, which the run charges (`confide budget --init`)",
    )  # fmt: skip
    factory: FunctionName | None = Field(
        None, exclude_if=lambda value: value is None,
        description="for python: module:Class, a subclass of confide.privacy.mechanisms.Mechanism",
    )  # fmt: skip
    options: dict[str, Any] = Field(
        default_factory=dict, exclude_if=lambda value: not value, description="for python: whatever the class reads"
    )

    @property
    def given(self) -> list[str]:
        """Which of the three ways to say how much noise there is were used."""
        return [name for name in NOISE_KEYS if getattr(self, name) is not None]


@dataclass(frozen=True)
class Asked:
    """What a recipe asks of a mechanism, for the mechanism to refuse."""

    privacy: CommonSettings
    sampling: Sampling
    bounded: bool = True
    """Whether a rule bounds every update."""
    follows: str | None = None
    """What the bound follows from step to step (quantile, car); none if it stays."""
    population: int | None = None
    """The number of users, where it is known."""
    uniform: bool = True
    """Whether all users weigh the same."""
    private_weights: bool = False
    """Whether the weights follow from the users' data, and nobody declared these public."""

    @property
    def everyone(self) -> bool:
        return self.sampling.cohort == self.population


@dataclass(frozen=True)
class Setting:
    """What a mechanism is built for, once the task is there."""

    privacy: CommonSettings
    sampler: Kind
    rate: float
    """The expected share of the population in a step."""
    cohort: int
    separation: int
    """Cyclic cohorts: central steps from one turn of a user to the next."""
    weights: np.ndarray  # (population,) with sum 1
    bound: float
    """The bound that the run begins with; infinite if nothing bounds an update."""
    steps: int
    source: Source
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    """Names and sizes of the model's tensors."""
    counters: int = 0
    """How many sums of the users' bounded values a step releases: counts of an adaptive bound, and figures."""
    count_noise: float | None = None
    """The deviation of the noise on each sum, where the recipe says it."""
    most: int = 0
    """The largest cohort, to which larger draws are cut down; 0 where there is none."""


@dataclass(frozen=True)
class Occasion:
    """One release: of which step, at which attempt, over which cohort, and what it costs."""

    event: Event
    cohort: np.ndarray  # (users,) int64
    step: int
    attempt: int
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What correlated noise remembers; part of the run's state."""
    line: int | None = None
    """Which release of the ledger it is; none: the one after the last that the memory knows."""
    own: np.ndarray | None = None  # (users,)
    """CAR: the deviation of the noise on each user's message."""


class Mechanism:
    """Independent Gaussian noise on the sum, and the base of every other mechanism, which changes what differs.

    `event` is the cost of one central step at the bound that the run begins with; `reach` is the largest norm that one
    user adds to what is released, for a bound of 1.

    Examples:
        >>> from confide.privacy.mechanisms import Mechanism
        >>> class Halving(Mechanism):
        ...     name, summary = "halving", "noise that halves after step 100"
        ...     def multiplier_at(self, step):  # what is added and what is charged
        ...         return self.multiplier if step < 100 else self.multiplier / 2
        >>> Halving.progress(epsilon=1.5)
        'epsilon 1.5'
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the recipe's schema."""
    trust: ClassVar[str] = "central"
    keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the privacy section that only this mechanism uses."""
    guaranteed: ClassVar[bool] = True
    """Whether its noise buys a guarantee."""
    samplers: ClassVar[tuple[str, ...]] = ("poisson", "fixed", "everyone")
    centred: ClassVar[bool] = False
    """Whether what all users have in common is in the aggregate whoever is drawn, for theory."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.reach = self.largest_contribution()
        self.multiplier = self.calibrate(self.bare_event())
        self.event = self.charge(self.bare_event(), self.multiplier)
        if self.event.private:
            _ = self.event.update_multiplier  # refuses counters that leave nothing for the update

    # Settings and what it refuses.

    @classmethod
    def takes(cls, privacy: CommonSettings, follows: str | None) -> bool:
        """Whether this is the mechanism that a recipe means; one for central trust refuses another trust by itself."""
        return privacy.mechanism == cls.name and cls.trust in ("central", privacy.trust)

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        """What cannot be had with this mechanism: a line for each problem."""
        return [*cls.noise_refusals(asked), *cls.sampler_refusals(asked), *cls.trust_refusals(asked)]

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        """What cannot be kept when the users are on other machines."""
        if asked.privacy.metrics is None:
            return []
        return ["privacy.metrics: clients on other machines are not asked for these figures; leave it out"]

    @classmethod
    def metrics_refusals(cls, asked: Asked) -> list[str]:
        """Why figures cannot be released beside the update."""
        if asked.privacy.metrics is None:
            return []
        if not asked.privacy.metrics.bounds:
            return ["privacy.metrics: names no figure; give loss, norm, bounded or accuracy, or leave it out"]
        if not cls.guaranteed:
            return [
                "privacy.metrics: figures under a guarantee need noise with one; use privacy.mechanism: gaussian, or "
                "leave it out (metrics.jsonl has them without noise)"
            ]
        if cls.trust != "central":
            return [
                "privacy.metrics: their noise is added by the server; they cannot be used with privacy.trust: "
                f"{cls.trust}"
            ]
        return []

    @classmethod
    def noise_refusals(cls, asked: Asked) -> list[str]:
        privacy, problems = asked.privacy, []
        if len(privacy.given) != 1:
            options = "target_epsilon, noise_multiplier" if cls.guaranteed else "noise_multiplier"
            names = " and ".join(privacy.given) or "none of them"
            problems.append(f"privacy: give exactly one of {options} and noise_scale (given: {names})")
        if cls.guaranteed and privacy.delta is None:
            problems.append("privacy.delta: required with noise, between 0 and 1, for example 1e-5")
        problems += cls._delta_refusals(asked)
        if not asked.bounded:
            problems.append(
                "bounding.rule=none: noise protects nobody unless every update is bounded; choose clip or normalise"
            )
        if cls.guaranteed and asked.private_weights:
            problems.append(
                "users.weights=examples: removing a user would change everybody's weight and the noise, which no "
                "guarantee covers; use weights: uniform, or say users.public: true if everybody may know how many "
                "examples each user has"
            )
        return problems

    @classmethod
    def _delta_refusals(cls, asked: Asked) -> list[str]:
        """Refuse a delta under which all data of one random user may be published, unless it is asked for."""
        delta, users = asked.privacy.delta, asked.population
        if not cls.guaranteed or delta is None or users is None or asked.privacy.large_delta:
            return []
        if not too_large(delta, users):
            return []
        return [
            f"privacy.delta={delta:g} is above 1 / population = {1 / users:.3g} ({users:,} users): publishing all data "
            "of one random user would be within it; lower it, or ask for it with privacy.large_delta=true"
        ]

    @classmethod
    def sampler_refusals(cls, asked: Asked) -> list[str]:
        problems = []
        if asked.privacy.accountant == "pld" and asked.sampling.kind == "fixed" and not asked.everyone:
            problems.append(
                "privacy.accountant=pld: has no proof for cohorts of fixed size; "
                "use accountant: rdp, or sampling.kind: poisson"
            )
        if asked.sampling.kind.startswith("cyclic") and asked.sampling.kind not in cls.samplers:
            problems.append(
                f"sampling.kind={asked.sampling.kind}: independent noise gains nothing from a schedule; "
                "use privacy.mechanism: banded (bands: 1 is independent noise), or sampling.kind: poisson"
            )
        return problems

    @classmethod
    def trust_refusals(cls, asked: Asked) -> list[str]:
        trust = asked.privacy.trust
        if trust != cls.trust:
            if trust == "distributed":
                return [f"privacy.trust=distributed: shares of the noise are for mechanism gaussian, not {cls.name}"]
            return [f"privacy.trust={trust}: cannot be combined with privacy.mechanism: {cls.name}"]
        if trust != "central" and asked.follows == "quantile":
            return [
                f"bounding.adaptive: its counts are noised by the server; it cannot be used with privacy.trust: {trust}"
            ]
        return []

    # What a step costs.

    @property
    def sampler(self) -> Sampler:
        """The word under which an accountant knows how users are drawn."""
        return self.setting.sampler

    def largest_contribution(self) -> float:
        """One user moves g = (1/q) sum w_k Delta_k by at most this, for a bound of 1."""
        return float(self.setting.weights.max()) / self.setting.rate

    def divisor(self, cohort: np.ndarray) -> float:
        """What the sum over this cohort is divided by: the expected cohort's share, never the realised one's."""
        return self.setting.rate

    def bare_event(self) -> Event:
        """The event of a step without noise."""
        given = self.setting
        return Event(
            self.sampler, given.rate, given.cohort, len(given.weights), 0.0, self.sensitivity(given.bound),
            separation=given.separation, most=given.most,
        )  # fmt: skip

    def sensitivity(self, bound: float) -> float | None:
        """The largest norm that one user adds to what is released; none where nothing bounds it."""
        whole = bound * self.reach
        return whole if math.isfinite(whole) else None

    def calibrate(self, bare: Event) -> float:
        """z, from whichever of the three ways the recipe uses."""
        privacy, weights = self.setting.privacy, self.setting.weights
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        if privacy.noise_scale is not None:
            return self.multiplier_of_scale(privacy.noise_scale, bare.rate, weights)
        if privacy.target_epsilon is None or privacy.delta is None:
            raise UserError(f"privacy.mechanism={self.name} needs target_epsilon, noise_multiplier or noise_scale")
        charges = 1 if bare.whole_run else self.setting.steps
        return noise_multiplier(privacy.target_epsilon, privacy.delta, charges, privacy.accountant, bare)

    def multiplier_of_scale(self, scale: float, rate: float, weights: np.ndarray) -> float:
        average = noise.average_scale(scale, self.setting.privacy.placement, rate, weights)
        return noise.multiplier_of_average(average, rate, weights)

    def charge(self, bare: Event, z: float) -> Event:
        """The event of a step with noise z, and with the counts of an adaptive bound and the figures."""
        given, event = self.setting, replace(bare, noise_multiplier=z)
        if not given.counters:
            return event
        # A twentieth of the cohort, as Andrew et al. advise, but never so little that the counters take more than a
        # fifth of the budget.
        least = max(given.rate * len(given.weights) / 20, z * math.sqrt(given.counters / 0.8))
        return replace(
            event, counters=given.counters, count_noise=least if given.count_noise is None else given.count_noise
        )

    def multiplier_at(self, step: int) -> float:
        """z of one central step, counted from 0; 0 buys nothing."""
        return self.event.noise_multiplier

    def event_at(self, step: int, bound: float) -> Event:
        """The cost of one central step whose updates are bounded to this."""
        return replace(self.event, noise_multiplier=self.multiplier_at(step), sensitivity=self.sensitivity(bound))

    # The release.

    def start_memory(self, like: Tensor) -> dict[str, Tensor]:
        """What the mechanism has to remember from step to step."""
        return {}

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        """Add the noise to g = (1/q) sum w_k Delta_k, in place; the noise's norm, or none where there is no noise.

        Only to be called once the ledger has the release.
        """
        event = occasion.event
        if not event.private or event.sensitivity is None:
            return None
        return self.add_independent(total, event.update_multiplier * event.sensitivity, occasion)

    def add_independent(self, total: Tensor, deviation: float, occasion: Occasion) -> float:
        """Noise of this deviation on every coordinate, from the server or in shares of the users of the cohort."""
        cohort = occasion.cohort
        # From the operating system it is drawn at once: rounding for each user would tell how many there were.
        if self.setting.privacy.placement == "client" and len(cohort) > 0 and self.setting.source.repeatable:
            # Each user adds s_client C; the weights turn the sum of these into exactly `deviation`.
            weights = self.setting.weights[cohort]
            return self.add_from_users(total, deviation * (weights / np.sqrt(np.square(weights).sum())), occasion)
        address = Address(occasion.step, attempt=occasion.attempt)
        return math.sqrt(self.setting.source.add(total, deviation, address))

    def add_from_users(self, total: Tensor, deviations: np.ndarray, occasion: Occasion) -> float:
        """Noise that each user of the cohort adds to its own message."""  # deviations (users,)
        squares = 0.0
        for user, deviation in zip(occasion.cohort.tolist(), deviations.tolist(), strict=True):
            address = Address(occasion.step, user + 1, occasion.attempt)
            squares += self.setting.source.add(total, deviation, address)
        return math.sqrt(squares)  # in expectation: independent noises add up by their squares

    def noisy_sizes(self, sizes: Sequence[int]) -> list[float]:
        """How many coordinates of each tensor get noise; one with a share of the deviation counts by its square."""
        return [float(size) for size in sizes]

    def variance(self, event: Event) -> float:
        """The variance of the noise on one noisy coordinate of g, for theory."""
        if not event.private or event.sensitivity is None:
            return 0.0
        return (event.update_multiplier * event.sensitivity) ** 2

    # What it states to a reader.

    @classmethod
    def label(cls) -> str:
        return cls.name

    @classmethod
    def progress(cls, epsilon: float | None) -> str:
        """What the line of a running job says."""
        return "no privacy" if epsilon is None else f"epsilon {shown(epsilon)}"

    @classmethod
    def words(cls, privacy: Any) -> str:
        """What the mechanism says of its promise in words of its own; where it promises nothing, why.

        The ledger's first line keeps them, and the statement (`confide.privacy.guarantee`) repeats them. Numbers do not
        belong here: they are computed from the ledger. Empty: the statement says all there is.
        """
        return "" if cls.guaranteed else NO_GUARANTEE

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        """Why epsilon cannot be stated for more users at the same noise on the average; none where it can."""
        if sampler in ("poisson", "everyone"):
            return None
        how = f"{cls.name} noise with {sampler} cohorts"
        return f"Not extrapolated for {how}; `confide plan` answers for Poisson sampling."
