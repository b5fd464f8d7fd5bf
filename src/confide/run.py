"""Algorithm 1: sample, train, bound, add noise, aggregate, step, record (PFL-ASR Algorithm 1; NORM Algorithms 1-3).

`Loop.step` is the algorithm, line by line. A run is a pure function of its recipe: the state after t steps does not
depend on stops in between, on the number of workers, or on what was recorded on the way. `confide.build` makes a loop
from a recipe, and `confide.runs` sees it through and writes down what it gives.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from confide.engines.engine import Abandoned, Engine
from confide.federated.bounding import Bounder
from confide.federated.bounds import Bounds
from confide.federated.central import CentralStep
from confide.federated.cohort import Tally
from confide.federated.final import FinalModel
from confide.federated.measures import Measures
from confide.federated.parameters import Layout, flatten
from confide.federated.probe import Probe, Signal
from confide.federated.state import State
from confide.federated.symmetry import balanced
from confide.federated.task import Task
from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Plan, Release
from confide.recipe import Recipe


@dataclass(frozen=True)
class Step:
    """What happened in one central step; records are made from it. The guarantee covers `released` and nothing else."""

    number: int
    """Counted from 1."""
    bound: float
    tally: Tally
    signal: Signal
    noise: float | None
    """The norm of the noise; none where there is none, or where users added their own."""
    noisy: Tensor | None = None  # (layers,)
    """The norms of the tensors of what was released, where they are recorded and there is noise."""
    released: dict[str, float] = field(default_factory=dict)
    """The figures of `privacy.metrics`, with their noise."""


@dataclass
class Loop:
    """What a run is made of. Nothing here changes from step to step but buffers and the ledger."""

    recipe: Recipe
    task: Task
    layout: Layout
    plan: Plan
    bounds: Bounds
    measures: Measures
    engine: Engine
    central: CentralStep
    final: FinalModel
    probe: Probe
    ledger: Ledger
    environment: str
    """What a step's bytes depend on beside the recipe; where they cannot be repeated, this process alone."""
    total: Tensor  # (parameters,) the cohort's sum, and then the pseudo-gradient, made once
    kernels: str = "none"
    """Which compiled kernels users are trained with."""

    def start(self) -> State:
        start = self.task.starting_parameters()
        parameters = flatten(balanced(start, self.task.scalings) if self.recipe.bounding.balance else start)
        state = State(0, parameters, self.central.start(parameters))
        state.noise = self.plan.mechanism.start_memory(parameters)
        self.bounds.start(state, len(self.plan.weights))
        return state

    def step(self, state: State) -> Step:
        """One central step, in place: PFL-ASR Algorithm 1, lines 3-16."""
        t, rule = state.step, self.bounds.rule(state)  # C of this step
        event = self.plan.mechanism.event_at(t, rule.sensitivity)
        cohort = self._sample(state, event)  # 3
        tally, release = self._train(state, cohort, rule, event)  # 4-12: train, bound, sum; the ledger has the release
        gradient = self.total.div_(self.plan.mechanism.divisor(cohort))  # 14: by q, unless the mechanism says otherwise
        signal = self.probe.measure(t, state.parameters, gradient)
        own = self.bounds.own_noise(state, tally, cohort)
        noise = release.add_noise(gradient, state.noise, own)  # 13
        noisy = None if noise is None else self.probe.layers(t, gradient)
        shares, figures = self._shares(tally, release)
        self.bounds.follow(state, tally, cohort, shares)
        self.final.keep(state)  # w_t, before it is left
        self.central.move(state, gradient)  # 16
        state.step, state.pending = t + 1, None
        return Step(t + 1, self.bounds.shown(state, rule), tally, signal, noise, noisy, figures)

    def _shares(self, tally: Tally, release: Release) -> tuple[Tensor, dict[str, float]]:
        """Release what users counted, all at once: the shares within each adaptive bound, and the figures."""
        counters, figures = self.bounds.counters, len(self.measures.bounds)
        sums = [*(tally.votes or [0.0] * counters), *(tally.measures or [0.0] * figures)]
        if not sums:
            return torch.empty(0), {}
        shares = release.noisy_shares(torch.tensor(sums, dtype=torch.float64))
        return shares[:counters], self.measures.in_units(shares[counters:])

    def _sample(self, state: State, event: Event) -> np.ndarray:
        """Draw the cohort of this attempt at the step, or return the one that too few users answered for."""
        unreleased = self.engine.traits.noisy or state.step not in self.ledger.latest  # a kill may have come after it
        if state.pending is not None and unreleased:
            return np.asarray(state.pending.numpy())
        attempt = self.ledger.next_attempt(state.step, event, self.environment, self._repeats)
        return self.plan.cohort(state.step, attempt if self.ledger.fresh_cohorts else 0)

    @property
    def _repeats(self) -> bool:
        """Whether a step that is made again gives the same bytes."""
        return self.plan.source.repeatable and self.engine.traits.repeatable

    def _train(self, state: State, cohort: np.ndarray, rule: Bounder, event: Event) -> tuple[Tally, Release]:
        """Train the cohort and have the release in the ledger, before any of it is seen.

        The server's noise comes after the sum, so the line is written in between, and a round that was abandoned
        costs nothing. Noise of the users is in what they send, so the line comes first, for every time that they are
        asked. The cohort stays the same: to draw until enough users answer would not be the sampler accounted for.
        """
        traits, t = self.engine.traits, state.step
        for left in reversed(range(traits.tries)):
            release = Release(
                self.plan, event, cohort, t, self.ledger, self.environment, self._repeats, from_users=traits.noisy
            )
            try:
                self.engine.gather(cohort, t)  # whoever is not there was not asked, and nothing of it was released
                if traits.noisy:
                    release.record()
                tally = self.engine.train(state.parameters, cohort, t, self.total, rule.told)
            except Abandoned as too_few:
                if left == 0:
                    state.pending = torch.from_numpy(cohort)
                    raise
                print(f"{too_few}; asking again, {left} more times at most", file=sys.stderr, flush=True)
            else:
                return tally, release.record()
        raise AssertionError("unreachable: the last try returns or raises")

    @property
    def charges(self) -> int:
        """How many charges the ledger holds: one a step, or one for a whole run of correlated noise."""
        return len(self.ledger.charged()) if self.plan.event.whole_run else self.ledger.count

    @property
    def epsilon_so_far(self) -> float:
        """Epsilon of the ledger as it is now, which is what `confide ledger` says of it."""
        delta = self.plan.delta
        return math.inf if delta is None else epsilon(self.ledger.counted(), delta, self.plan.accountant)
