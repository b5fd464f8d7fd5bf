"""`confide audit`: plant canary users in a run, and let what it releases say how private it can be at most.

The auditor sees every released aggregate and, as the guarantee allows, knows everything but the canaries' coins and the
cohorts: the other users' contributions are subtracted. Each canary's score is the sum of the projections of the
releases on its bounded direction, with its own signs (`runs/canaries.py`). The auditor guesses that a canary is
included if its score is above half of what an included canary sends on average: a threshold that is known before any
coin is tossed. Where canaries share coordinates or the bound moves, the mean of all scores takes its place, which comes
from the release as well.

`privacy/one_run.py` turns the guesses into a lower bound on epsilon. Canaries enlarge the population; the cohort grows
with it so that the rate is that of the recipe, rounded down, and the noise multiplier is the recipe's own. So the
recipe's own claim holds for the audited run.

Differs from the papers: their canaries are examples of a model's training set; a user-level guarantee is audited with
users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from confide.build import make_loop, make_task, user_weights
from confide.engines.engine import InProcess
from confide.errors import UserError
from confide.federated.bounding import Adaptive
from confide.federated.parameters import flatten
from confide.federated.task import Task
from confide.privacy import one_run
from confide.privacy.accountant import shown
from confide.privacy.plan import Plan
from confide.recipe import Recipe
from confide.run import Loop
from confide.runs.broken import Break, break_loop
from confide.runs.canaries import Canaries, CanaryTask, CanaryTrainer

ERROR = 0.05
USUAL = 1000
"""Canaries, where the claim does not need more and the model has a coordinate for each."""
MOST = 100_000
MEASURED: tuple[Break, ...] = ("tenth-noise", "half-noise")
"""What the power of an audit is measured with."""
_MARGIN = 1.2
"""With every guess right, this many times the claim has to be shown."""
_DELTAS = (1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Where the claimed curve is taken, beside the recipe's own delta."""


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
    broken: Break | None
    """How the mechanism was broken on purpose; none for the recipe's own."""
    findings: tuple[one_run.Finding, ...]
    """By each bound and number of guesses, best first."""

    @property
    def passed(self) -> bool:
        return self.lower_bound <= self.claimed

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def audit(
    recipe: Recipe,
    canaries: int | None = None,
    watch: Callable[[int], None] | None = None,
    *,
    broken: Break | None = None,
    alone: bool = False,
    task: Task | None = None,
) -> Audit:
    """Make the run of a recipe with canaries in it, and hold what it gives away against what it claims.

    `canaries`: as many as the claim needs, if not given. `broken` breaks the mechanism on purpose, to see whether the
    audit finds it. `alone` leaves the recipe's own users untrained, which is quick, and changes nothing else: what they
    send is subtracted anyway. `task` is the recipe's, where it was made already.
    """
    if recipe.privacy.mechanism == "none" or recipe.privacy.delta is None:
        raise UserError(
            "privacy.mechanism=none, or no privacy.delta: the recipe claims no guarantee, so there is nothing to audit"
        )
    task = task or make_task(recipe.task, recipe.run.seed)
    honest = make_loop(recipe, task=task)
    curve = _claimed_curve(honest.plan)
    apart = _tells_of_each_alone(recipe, honest.plan)
    count = _choose_count(canaries, curve, honest.layout.size, apart)
    loop, trainer = _make_loop(recipe, task, honest, count)
    trainer.alone = alone
    if broken is not None:
        loop = break_loop(loop, trainer, broken)
    independent = apart and trainer.canaries.apart
    score = _score(loop, trainer, independent, watch)
    included = trainer.canaries.included.numpy()
    found = one_run.audit_guesses(score, included, curve, ERROR, independent)
    best = one_run.best_possible(count, curve, ERROR, independent)
    claimed, delta = curve[0]
    return Audit(claimed, found[0].epsilon, delta, 1 - ERROR, count, best, recipe.run.steps, broken, tuple(found))


def measure_power(recipe: Recipe, canaries: int, task: Task) -> dict[Break, bool]:
    """Whether an audit of this size would have caught too little noise: it is made again, broken on purpose.

    Only the canaries take part, so that this costs the noise of so many runs, but no training.
    """
    return {kind: not audit(recipe, canaries, broken=kind, alone=True, task=task).passed for kind in MEASURED}


def _claimed_curve(plan: Plan) -> one_run.Curve:
    """The epsilon that is claimed, and those that the same accountant states at larger deltas."""
    charges, stated = plan.charges(plan.steps), plan.delta or 0.0
    pairs = [(plan.epsilon(charges), stated)]
    for delta in _DELTAS:
        if delta > stated:  # once epsilon is 0, it stays 0
            pairs.append((replace(plan, delta=delta).epsilon(charges) if pairs[-1][0] > 0 else 0.0, delta))
    if not 0 < pairs[0][0] < math.inf:
        raise UserError(f"the recipe claims an epsilon of {pairs[0][0]:g}: there is nothing to audit; add noise")
    return tuple(pairs)


def _tells_of_each_alone(recipe: Recipe, plan: Plan) -> bool:
    """Whether the mechanism that is claimed tells of each canary by itself, if canaries share no coordinate."""
    return (
        plan.sampler != "fixed"  # where one user is drawn in another's place
        and recipe.bounding.adaptive is None  # which moves with all of them
        and recipe.privacy.mechanism in ("gaussian", "banded")
        and recipe.privacy.trust != "local"  # whose noise grows with the cohort
    )


def _choose_count(given: int | None, curve: one_run.Curve, coordinates: int, apart: bool) -> int:
    """How many canaries to plant, or a refusal if they could not disprove the claim even with every guess right.

    `apart`: whether canaries that share no coordinate are independent of each other, so that fewer are enough.
    """
    claimed = curve[0][0]
    needed = one_run.canaries_needed(_MARGIN * claimed, curve, ERROR, min(coordinates, MOST), True) if apart else None
    needed = needed or one_run.canaries_needed(_MARGIN * claimed, curve, ERROR, MOST, False)
    if needed is None:
        raise UserError(
            f"epsilon {shown(claimed)} is claimed, and {MOST:,} canaries, the most that an audit plants, could not "
            "disprove that even if every guess were right; lower privacy.target_epsilon"
        )
    count = given if given is not None else max(needed, min(USUAL, coordinates))
    independent = apart and count <= coordinates
    if not 1 <= count <= MOST or one_run.best_possible(count, curve, ERROR, independent) < _MARGIN * claimed:
        raise UserError(
            f"canaries={count}: expected {needed:,} to {MOST:,}, so that the claimed epsilon of {shown(claimed)} can "
            "be disproved; leave --canaries out for a number that fits"
        )
    return count


def _score(loop: Loop, trainer: CanaryTrainer, independent: bool, watch: Callable[[int], None] | None) -> np.ndarray:
    """Make the run and give each canary a score, above 0 for a guess that it is included."""
    recipe, planted = loop.recipe, trainer.canaries
    bounded = planted.bounded(loop.bounds.bounder)  # (canaries, coordinates)
    lengths = torch.linalg.vector_norm(bounded, dim=1)
    filters = bounded / lengths[:, None]
    state, score = loop.start(), torch.zeros(len(lengths), dtype=torch.float64)
    for done in range(recipe.run.steps):
        trainer.known.zero_()
        loop.step(state)
        seen = loop.total.double() - trainer.known.double() / loop.plan.rate
        score += planted.signs[:, done] * (seen[planted.places] * filters).sum(dim=1)
        if watch is not None:
            watch(done + 1)
    sent = lengths * float(loop.plan.weights[-1]) * recipe.run.steps  # in all turns: a share `rate`, of 1 / rate each
    middle = sent / 2 if independent else score.mean()
    guessed: np.ndarray = (score - middle).numpy()
    return guessed


def _make_loop(recipe: Recipe, task: Task, honest: Loop, canaries: int) -> tuple[Loop, CanaryTrainer]:
    """Make the recipe's own loop, with its own rate and noise, over its users and the canaries."""
    own = user_weights(recipe.users, task)
    weights = np.concatenate([own, np.full(canaries, own.max())])
    cohort = max(1, honest.plan.cohort_size * len(weights) // len(own))
    adaptive, metrics = recipe.bounding.adaptive, recipe.privacy.metrics
    noise = honest.plan.event.count_noise * cohort / honest.plan.cohort_size  # in proportion, as for the recipe itself
    if metrics is not None:
        metrics = metrics.model_copy(update={"noise": None if isinstance(adaptive, Adaptive) else noise})
    if isinstance(adaptive, Adaptive):
        adaptive = adaptive.model_copy(update={"count_noise": noise})
    z = honest.plan.event.noise_multiplier
    changes = {
        "users": {"weights": tuple(weights.tolist())},
        "sampling": {"cohort": cohort},
        "bounding": {"adaptive": adaptive},
        "privacy": {"noise_multiplier": z, "noise_scale": None, "target_epsilon": None, "metrics": metrics},
    }
    updated = {name: section.model_copy(update=changes[name]) for name, section in recipe if name in changes}
    larger, seed = CanaryTask(task, canaries), recipe.run.seed
    loop = make_loop(recipe.model_copy(update=updated), task=larger)
    rule, like = loop.bounds.bounder, flatten(task.initial_parameters())
    trainer = CanaryTrainer(larger, loop.layout, recipe.local, rule, loop.plan.weights, seed, like)
    trainer.canaries = Canaries.plant(loop.layout, canaries, recipe.run.steps, rule.sensitivity, seed)
    trainer.known = torch.zeros_like(like)
    return replace(loop, engine=InProcess(trainer)), trainer
