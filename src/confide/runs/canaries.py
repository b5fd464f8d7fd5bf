"""Canaries: planted users with an update of their own instead of data, and what trains them among the others.

A canary's update is a random direction, ten times as long as the bound allows. A fair coin decides whether it sends the
update or nothing; otherwise it is a user like any other, sampled, bounded, weighted, summed and noised by the same
code. It changes its sign from step to step by a pattern of its own, half plus and half minus: an auditor who adds up
with these signs finds what a canary sent in all its turns, while noise that is the same in every step cancels.

As long as the model has a coordinate for each, canaries share none, whatever the bounding rule does to the tensors, so
that no canary is seen in another's place. Directions live on 2,048 coordinates at most, spread over the whole model, so
that memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.build import make_task, user_weights
from confide.federated.bounding import Bounder, bounder
from confide.federated.cohort import PartTrainer, Tally
from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.randomness import generator
from confide.recipe import Recipe

_COORDINATES = 2048
_LENGTH = 10.0


@dataclass
class Canaries:
    """Directions on a few coordinates each."""

    layout: Layout
    places: Tensor  # (canaries, coordinates) int64
    values: Tensor  # (canaries, coordinates) of norm `_LENGTH` times the bound
    included: Tensor  # (canaries,) bool
    signs: Tensor  # (canaries, steps) of +1 and -1

    @staticmethod
    def plant(layout: Layout, count: int, steps: int, bound: float, seed: int) -> Canaries:
        draw = generator(seed, "audit")
        apart = count <= layout.size
        wide = min(_COORDINATES, layout.size // count if apart else layout.size)
        edges = np.linspace(0, layout.size, wide + 1).astype(np.int64)  # one coordinate from each stretch
        lengths = np.diff(edges)
        if apart:  # from anywhere in a stretch on, each canary takes the next coordinate
            offsets = np.arange(count)[:, None] + draw.integers(0, lengths)
        else:
            offsets = draw.integers(0, lengths, size=(count, wide))
        places = edges[:-1] + offsets % lengths
        values = draw.standard_normal((count, wide))
        values *= _LENGTH * bound / np.linalg.norm(values, axis=1, keepdims=True)
        included = draw.random(count) < 0.5
        signs = draw.permuted(np.where(np.arange(steps) % 2, -1.0, 1.0) * np.ones((count, 1)), axis=1)
        return Canaries(layout, *map(torch.from_numpy, (places, values, included, signs)))

    @property
    def apart(self) -> bool:
        """Whether no two canaries share a coordinate."""
        return len(self.places) <= self.layout.size

    @cached_property
    def layers(self) -> Tensor:
        """Which tensor each coordinate lies in."""  # (canaries, coordinates)
        found: Tensor = torch.bucketize(self.places, torch.tensor(self.layout.sizes).cumsum(0), right=True)
        return found

    @cached_property
    def norms(self) -> Tensor:
        """Of each canary's update, for each tensor."""  # (canaries, layers)
        squares = torch.zeros(len(self.places), len(self.layout.names), dtype=torch.float64)
        return squares.scatter_add_(1, self.layers, self.values.square()).sqrt()

    def bounded(self, rule: Bounder) -> Tensor:
        """What each canary's update looks like once bounded."""  # (canaries, coordinates)
        found: Tensor = self.values * rule.factors(self.norms).gather(1, self.layers)
        return found


@dataclass
class CanaryUpdates:
    """Updates of some canaries, as the cohort's trainer takes them."""

    canaries: Canaries
    which: Tensor  # (users,) int64
    step: int
    norms: Tensor = field(init=False)
    losses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sends = self.canaries.included[self.which].double()[:, None]  # 1 or 0
        self.norms = self.canaries.norms[self.which] * sends
        self.losses = torch.zeros(len(self.which), dtype=torch.float64)

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        sends = (self.canaries.included * self.canaries.signs[:, self.step])[self.which][:, None]
        scaled = self.canaries.values[self.which] * sends * factors.gather(1, self.canaries.layers[self.which])
        into.index_add_(0, self.canaries.places[self.which].flatten(), scaled.flatten().to(into.dtype))


class CanaryTask:
    """A task with canaries after its own users, or in their place. It is only ever asked for updates of its own."""

    at_most: int | None = None

    def __init__(self, task: Task, count: int, only: bool = False) -> None:
        """`only`: whether nobody takes part but canaries."""
        self.task, self.count, self.only = task, count, only
        self.name, self.metric = task.name, task.metric

    @property
    def examples(self) -> np.ndarray:
        planted = np.ones(self.count, dtype=np.int64)
        return planted if self.only else np.concatenate([self.task.examples, planted])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def seconds(self, user: int) -> np.ndarray | None:
        return self.task.seconds(user) if not self.only and user < len(self.task.examples) else None

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.task.initial_parameters()

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return self.task.fast_updates(parameters, users, local, learning_rate)


class Unbounded(Bounder):
    """A rule that leaves updates as they are, and says otherwise: to show that an audit finds it."""

    def factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class CanaryTrainer(PartTrainer):
    """Trains users as ever, and adds the canaries' updates."""

    canaries: Canaries
    alone: bool = False
    """Whether only canaries send something. The others' share is subtracted anyway, and takes nearly all the time."""
    unbounded: bool = False
    """Whether canaries are not bounded, on purpose."""

    def add_part(
        self, central: Tensor, users: np.ndarray, step: int, into: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        real, tally = users[users < self._own], Tally()
        if len(real) > 0 and not self.alone:
            tally.add(super().add_part(central, real, step, into, bounds))
        elif len(real) > 0:
            tally.add(Tally(users=len(real)))
        tally.add(self.add_canaries(users, step, into, bounds))
        return tally

    def add_canaries(self, users: np.ndarray, step: int, into: Tensor, bounds: Tensor | None = None) -> Tally:
        """Add what the canaries among these users send, bounded and weighted."""
        planted = users[users >= self._own]
        if len(planted) == 0:
            return Tally()
        updates = CanaryUpdates(self.canaries, torch.from_numpy(planted - self._own), step)
        rule = self.bounder.at(bounds)
        if self.unbounded:
            rule = Unbounded(**vars(rule))
        return self._add(updates, planted, into, rule, bounds is not None)

    @property
    def _own(self) -> int:
        """How many users are no canaries; these come first."""
        return len(self.weights) - len(self.canaries.included)


@dataclass(frozen=True)
class Planting:
    """What any process needs to train the users of an audited run, canaries included."""

    recipe: str
    """As JSON: that of the run with the canaries in it."""
    canaries: int
    only: bool
    """Whether nobody takes part but canaries."""
    alone: bool
    unbounded: bool

    def task(self, own: Task | None = None) -> CanaryTask:
        """The run's task; `own` is the recipe's, where it was made already."""
        wanted = Recipe.model_validate_json(self.recipe)
        return CanaryTask(own or make_task(wanted.task, wanted.run.seed), self.canaries, self.only)

    def trainer(self, task: CanaryTask | None = None) -> CanaryTrainer:
        """What trains a part of a cohort. Every process plants the same canaries."""
        wanted, planted = Recipe.model_validate_json(self.recipe), task or self.task()
        parameters, seed = planted.initial_parameters(), wanted.run.seed
        layout, like = Layout.of(parameters), flatten(parameters)
        rule, weights = bounder(wanted.bounding, layout), user_weights(wanted.users, planted)
        made = CanaryTrainer(planted, layout, wanted.local, rule, weights, seed, like)
        made.canaries = Canaries.plant(layout, self.canaries, wanted.run.steps, rule.sensitivity, seed)
        made.alone, made.unbounded = self.alone, self.unbounded
        return made
