"""Move the bounds of the users' updates over a run: they stay, follow a private quantile, or follow CAR's rule.

`bounds_for` chooses one class for each way from `bounding.adaptive`. The loop asks it for the rule of a step and, after
the release, lets the bounds follow what was released. To add a way: its settings, its class, a line in `bounds_for`.

Quantile (Andrew et al. 2021, "Differentially private learning with adaptive clipping", eq. 3 and Algorithm 1). After
every step

    C <- C exp(-eta (b - gamma)),

where b is the released share of users whose norm was at most C; per layer, each C_h has a counter of its own. The plan
adds the noise to the counts and charges for them.

CAR's rule (appendix C, eqs 7, 39 and 40; `confide.federated.car_adaptive` has the formulas): a bound for every user,
which follows the user's own norms; noise of its own, and no formal guarantee.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from confide.federated import car_adaptive
from confide.federated.bounding import Adaptive, Bounder, Bounding, bounder
from confide.federated.car_adaptive import CarAdaptive, Clients
from confide.federated.cohort import Tally
from confide.federated.parameters import Layout
from confide.federated.state import State


class Bounds:
    """Bounds that stay as the recipe has them. What others remember from step to step is in the run's state."""

    follows: str | None = None
    """What they follow, in the words of `bounding.adaptive.kind`; none if they stay."""
    counters = 0
    """How many counts of users they have released in each step."""
    count_noise: float | None = None
    """The deviation of the noise on each count, where the recipe says it."""

    def __init__(self, bounder: Bounder) -> None:
        self.bounder = bounder

    def check(self, population: int) -> None:
        """Refuse what this many users cannot have."""

    def start(self, state: State, population: int) -> None:
        """Put what has to be remembered into the state of a new run."""

    def rule(self, state: State) -> Bounder:
        """The rule that bounds the updates of this step."""
        return self.bounder

    def own_noise(self, state: State, tally: Tally, cohort: np.ndarray) -> np.ndarray | None:
        """The deviation of the noise on each user's message, where the rule decides it."""  # (users,)
        return None

    def follow(self, state: State, tally: Tally, cohort: np.ndarray, shares: Tensor) -> None:
        """Move the bounds after a step, in the state; `shares` are those of users within them, as released."""

    def shown(self, state: State, rule: Bounder) -> float:
        """The bound that the records show for a step, once it is made."""
        return rule.sensitivity


class QuantileBounds(Bounds):
    """Bounds that follow a private quantile of the users' norms."""

    follows = "quantile"

    def __init__(self, bounder: Bounder, settings: Adaptive) -> None:
        super().__init__(bounder)
        self.settings = settings
        self.counters, self.count_noise = len(bounder.bounds), settings.count_noise

    def start(self, state: State, population: int) -> None:
        state.bounds = self.bounder.bounds

    def rule(self, state: State) -> Bounder:
        return self.bounder.at(state.bounds)

    def follow(self, state: State, tally: Tally, cohort: np.ndarray, shares: Tensor) -> None:
        if state.bounds is not None:
            state.bounds = next_bounds(state.bounds, shares, self.settings, self.bounder.bounds)


class CarBounds(Bounds):
    """A bound for every user that follows the user's own norms; it never leaves the user."""

    follows = "car"

    def __init__(self, bounder: Bounder, settings: CarAdaptive) -> None:
        super().__init__(bounder)
        self.settings = settings

    def check(self, population: int) -> None:
        car_adaptive.multiplier(self.settings, population)  # refuses a noise that leaves nothing for the update

    def start(self, state: State, population: int) -> None:
        state.clients = {**vars(car_adaptive.start(self.bounder.sensitivity, population))}

    def rule(self, state: State) -> Bounder:
        return self.bounder.at(car_adaptive.bounds_at(self.settings, Clients(**state.clients), state.step))

    def own_noise(self, state: State, tally: Tally, cohort: np.ndarray) -> np.ndarray | None:
        return car_adaptive.noise_scales(*self._taking_part(state, tally, cohort), state.step).numpy()

    def follow(self, state: State, tally: Tally, cohort: np.ndarray, shares: Tensor) -> None:
        after = car_adaptive.next_clients(*self._taking_part(state, tally, cohort), state.step)
        state.clients = {**vars(after)}

    def _taking_part(
        self, state: State, tally: Tally, cohort: np.ndarray
    ) -> tuple[CarAdaptive, Clients, Tensor, Tensor]:
        """The settings, what the clients remember, and the cohort with its raw norms."""
        norms = torch.tensor(tally.raw_norms, dtype=torch.float64)
        return self.settings, Clients(**state.clients), torch.from_numpy(cohort), norms

    def shown(self, state: State, rule: Bounder) -> float:
        return float(state.clients["bounds"].mean())


def bounds_for(settings: Bounding, layout: Layout) -> Bounds:
    """The bounds of a recipe, for a model with these tensors."""
    rule = bounder(settings, layout)
    if isinstance(settings.adaptive, Adaptive):
        return QuantileBounds(rule, settings.adaptive)
    if isinstance(settings.adaptive, CarAdaptive):
        return CarBounds(rule, settings.adaptive)
    return Bounds(rule)


def next_bounds(bounds: Tensor, shares: Tensor, settings: Adaptive, start: Tensor) -> Tensor:
    """The bounds of the next step, kept within a factor of a billion of the first."""
    moved = bounds * torch.exp(-settings.learning_rate * (shares - settings.quantile))
    return moved.clamp(start * 1e-9, start * 1e9)
