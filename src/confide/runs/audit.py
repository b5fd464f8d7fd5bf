"""`confide audit`: plant canary users in a run, and let what it releases say how private it can be at most.

Canaries are users with an update of their own instead of data: a random direction, ten times as long as the bound
allows. A fair coin decides whether a canary sends it or nothing; otherwise it is a user like any other, sampled,
bounded, weighted, summed and noised by the same code. The auditor sees every released aggregate and, as the guarantee
allows, knows everything but the coins: the other users' contributions are subtracted. Of each canary it keeps the
projections of the releases on its bounded direction. A canary changes its sign from step to step by a pattern of its
own, half plus and half minus, and the auditor adds the projections up with these signs: what a canary sent adds up
over its turns, independent noise adds up like a random walk, and noise that is the same in every step cancels.

`privacy/one_run.py` turns the guesses into a lower bound on epsilon. Canaries enlarge the population; the cohort grows
with it so that the rate, and with it the claimed epsilon, stays that of the recipe, with the recipe's own multiplier.

Differs from the paper: its canaries are examples of a model's training set; a user-level guarantee is audited with
users. Directions live on a few thousand coordinates, so that memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.build import make_loop, make_task, user_weights
from confide.engines.engine import InProcess
from confide.errors import UserError
from confide.federated.bounding import Adaptive, Bounder
from confide.federated.cohort import PartTrainer, Tally
from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.privacy import one_run
from confide.randomness import generator
from confide.recipe import Recipe
from confide.run import Loop

ERROR = 0.05
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
        wide = min(_COORDINATES, layout.size)
        edges = np.linspace(0, layout.size, wide + 1).astype(np.int64)  # one coordinate from each stretch
        places = draw.integers(edges[:-1], edges[1:], size=(count, wide))
        values = draw.standard_normal((count, wide))
        values *= _LENGTH * bound / np.linalg.norm(values, axis=1, keepdims=True)
        included = draw.random(count) < 0.5
        signs = draw.permuted(np.where(np.arange(steps) % 2, -1.0, 1.0) * np.ones((count, 1)), axis=1)
        return Canaries(layout, *map(torch.from_numpy, (places, values, included, signs)))

    @property
    def layers(self) -> Tensor:
        """Which tensor each coordinate lies in."""  # (canaries, coordinates)
        found: Tensor = torch.bucketize(self.places, torch.tensor(self.layout.sizes).cumsum(0), right=True)
        return found

    def norms(self) -> Tensor:
        squares = torch.zeros(len(self.places), len(self.layout.names), dtype=torch.float64)
        return squares.scatter_add_(1, self.layers, self.values.square()).sqrt()

    def filters(self, rule: Bounder) -> Tensor:
        """What each canary's update looks like once bounded, of norm 1."""  # (canaries, coordinates)
        bounded: Tensor = self.values * rule.factors(self.norms()).gather(1, self.layers)
        lengths: Tensor = torch.linalg.vector_norm(bounded, dim=1, keepdim=True)
        return bounded / lengths


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
        self.norms = self.canaries.norms()[self.which] * sends
        self.losses = torch.zeros(len(self.which), dtype=torch.float64)

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        sends = (self.canaries.included * self.canaries.signs[:, self.step])[self.which][:, None]
        scaled = self.canaries.values[self.which] * sends * factors.gather(1, self.canaries.layers[self.which])
        into.index_add_(0, self.canaries.places[self.which].flatten(), scaled.flatten().to(into.dtype))


class CanaryTask:
    """A task with canaries after its own users. It is only ever asked for updates of its own."""

    def __init__(self, task: Task, count: int) -> None:
        self.task, self.count = task, count
        self.name, self.metric = task.name, task.metric

    @property
    def examples(self) -> np.ndarray:
        return np.concatenate([self.task.examples, np.ones(self.count, dtype=np.int64)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.task.initial_parameters()

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return self.task.fast_updates(parameters, users, local, learning_rate)


class CanaryTrainer(PartTrainer):
    """Trains users as ever, adds the canaries', and keeps apart what the auditor is allowed to know."""

    canaries: Canaries
    known: Tensor
    """The other users' share of the step's sum."""

    def add_part(
        self, central: Tensor, users: np.ndarray, step: int, into: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        own = len(self.weights) - len(self.canaries.included)
        real, planted = users[users < own], users[users >= own]
        tally = Tally()
        if len(real) > 0:
            before = into.clone()
            tally.add(super().add_part(central, real, step, into, bounds))
            self.known += into - before
        if len(planted) > 0:
            updates = CanaryUpdates(self.canaries, torch.from_numpy(planted - own), step)
            tally.add(self._add(updates, planted, into, self.bounder.at(bounds), bounds is not None))
        return tally


@dataclass(frozen=True)
class Audit:
    """The claim, and what one run proved against it."""

    claimed: float
    lower_bound: float
    delta: float
    confidence: float
    canaries: int
    best_possible: float
    """The lower bound if every guess had been right."""
    steps: int
    findings: tuple[one_run.Finding, ...]

    @property
    def passed(self) -> bool:
        return self.lower_bound <= self.claimed

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def audit(recipe: Recipe, canaries: int = 1000, watch: Callable[[int], None] | None = None) -> Audit:
    """Make the run of a recipe with canaries in it, and hold what it gives away against what it claims."""
    if recipe.privacy.mechanism == "none" or recipe.privacy.delta is None:
        raise UserError(
            "privacy.mechanism=none, or no privacy.delta: the recipe claims no guarantee, so there is nothing to audit"
        )
    if not 10 <= canaries <= 1_000_000:
        raise UserError(f"canaries={canaries}: expected 10 to 1,000,000; a thousand can show an epsilon of about 5")
    loop, trainer = _make_loop(recipe, canaries)
    planted = trainer.canaries
    filters = planted.filters(loop.bounds.bounder)
    state, score = loop.start(), torch.zeros(canaries, dtype=torch.float64)
    steps = recipe.run.steps
    for done in range(steps):
        trainer.known.zero_()
        loop.step(state)
        seen = loop.total.double() - trainer.known.double() / loop.plan.rate
        score += planted.signs[:, done] * (seen[planted.places] * filters).sum(dim=1)
        if watch is not None:
            watch(done + 1)
    found = one_run.findings(score.numpy(), planted.included.numpy(), recipe.privacy.delta, ERROR)
    best = one_run.best_possible(canaries, recipe.privacy.delta, ERROR)
    claimed = loop.plan.epsilon(loop.charges)
    return Audit(claimed, found[0].epsilon, recipe.privacy.delta, 1 - ERROR, canaries, best, steps, tuple(found))


def _make_loop(recipe: Recipe, canaries: int) -> tuple[Loop, CanaryTrainer]:
    """Make the recipe's own loop, with its own rate and noise, over its users and the canaries."""
    task = make_task(recipe.task, recipe.run.seed)
    honest = make_loop(recipe, task=task)
    own = user_weights(recipe.users, task)
    weights = np.concatenate([own, np.full(canaries, own.max())])
    cohort = max(1, round(honest.plan.cohort_size * len(weights) / len(own)))
    adaptive = recipe.bounding.adaptive
    if isinstance(adaptive, Adaptive):  # in proportion to the cohort, as for the recipe itself
        noise = honest.plan.event.count_noise * cohort / honest.plan.cohort_size
        adaptive = adaptive.model_copy(update={"count_noise": noise})
    z = honest.plan.event.noise_multiplier
    changes = {
        "users": {"weights": tuple(weights.tolist())},
        "sampling": {"cohort": cohort},
        "bounding": {"adaptive": adaptive},
        "privacy": {"noise_multiplier": z, "noise_scale": None, "target_epsilon": None},
    }
    updated = {name: section.model_copy(update=changes[name]) for name, section in recipe if name in changes}
    larger, seed = CanaryTask(task, canaries), recipe.run.seed
    loop = make_loop(recipe.model_copy(update=updated), task=larger)
    rule, like = loop.bounds.bounder, flatten(task.initial_parameters())
    trainer = CanaryTrainer(larger, loop.layout, recipe.local, rule, loop.plan.weights, seed, like)
    trainer.canaries = Canaries.plant(loop.layout, canaries, recipe.run.steps, rule.sensitivity, seed)
    trainer.known = torch.zeros_like(like)
    return replace(loop, engine=InProcess(trainer)), trainer
