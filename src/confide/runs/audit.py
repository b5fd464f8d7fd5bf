"""`confide audit`: plant canary users in a run, and let what it releases say how private it can be at most.

The auditor sees every released aggregate and, as the guarantee allows, knows everything but the canaries' coins and the
cohorts: the other users' contributions are subtracted. Each canary's score is the sum of the projections of the
releases on its bounded direction, with its own signs (`runs/canaries.py`). The auditor guesses that a canary is
included if its score is above half of what an included canary sends on average: a threshold that is known before any
coin is tossed. Where canaries share coordinates or the bound moves, the mean of all scores takes its place, which comes
from the release as well.

`privacy/one_run.py` turns the guesses into a lower bound on epsilon. Canaries enlarge the population; the cohort grows
with it so that the rate is that of the recipe, rounded down, and the noise multiplier is the recipe's own. So the
recipe's own claim holds for the audited run. `privacy/noise_check.py` asks, beside the canaries, whether the noise
follows the cohorts.

The run is made in this process, with several worker processes, or by a deployment (`deploy/audit.py`).

Differs from the papers: their canaries are examples of a model's training set; a user-level guarantee is audited with
users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from confide.build import RemoteEngine, make_loop, make_task, user_weights
from confide.engines.costs import expected_costs
from confide.engines.engine import Engine, InProcess
from confide.engines.processes import Processes
from confide.errors import UserError
from confide.federated.bounding import Adaptive
from confide.federated.task import Task
from confide.privacy import noise_check, one_run
from confide.privacy.accountant import shown
from confide.privacy.plan import Plan
from confide.recipe import Recipe
from confide.run import Loop
from confide.runs.broken import Break, break_loop
from confide.runs.canaries import CanaryTask, CanaryTrainer, Planting
from confide.runs.witness import Noise, Witness, stated_variance

Deploy = Callable[[Planting], RemoteEngine]
"""Starts clients that answer as canaries, and makes the engine that asks them."""
ERROR = 0.05
USUAL = 1000
"""Canaries, where the claim does not need more and the model has a coordinate for each."""
MOST = 100_000
MEASURED: tuple[Break, ...] = ("tenth-noise", "half-noise", "cohort-variance")
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
    cohort_chance: float | None = None
    """How likely noise is that seems to follow the cohort's size as much as here, if it does not; none if not asked."""

    @property
    def follows_cohort(self) -> bool:
        """Whether the noise tells how large the cohorts were, so that there is no amplification."""
        return self.cohort_chance is not None and self.cohort_chance < noise_check.LEVEL

    @property
    def passed(self) -> bool:
        return self.lower_bound <= self.claimed and not self.follows_cohort

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
    workers: int = 1,
    deploy: Deploy | None = None,
) -> Audit:
    """Make the run of a recipe with canaries in it, and hold what it gives away against what it claims.

    `canaries`: as many as the claim needs, if not given. `broken` breaks the mechanism on purpose, to see whether the
    audit finds it. `alone` leaves the recipe's own users untrained, which is quick, and changes nothing else: what they
    send is subtracted anyway. `task` is the recipe's, where it was made already. `workers` processes train users, with
    the result of one. `deploy` starts clients on a real network, all of whose users are canaries.
    """
    if recipe.privacy.mechanism == "none" or recipe.privacy.delta is None:
        raise UserError(
            "privacy.mechanism=none, or no privacy.delta: the recipe claims no guarantee, so there is nothing to audit"
        )
    if recipe.privacy.mechanism == "realised":
        raise UserError(
            "privacy.mechanism=realised: canaries of one cohort share its divisor, and one run cannot tell them apart; "
            "audit the recipe with privacy.mechanism=gaussian"
        )
    task = task or make_task(recipe.task, recipe.run.seed)
    honest = make_loop(recipe, task=task)
    curve = _claimed_curve(honest.plan)
    apart = _tells_of_each_alone(recipe, honest.plan)
    count = _choose_count(canaries, curve, honest.layout.size, apart)
    larger = _with_canaries(recipe, task, honest.plan, count, deploy is not None)
    planting = Planting(larger.model_dump_json(), count, deploy is not None, alone, broken == "unbounded")
    loop, witness = _make_loop(larger, planting, task, workers, deploy)
    if broken is not None:
        loop = break_loop(loop, lambda: witness.arrived, broken)
    independent = apart and witness.trainer.canaries.apart
    try:
        score, noise = _score(loop, witness, independent, watch)
    finally:
        loop.engine.close()
    included = witness.trainer.canaries.included.numpy()
    found = one_run.audit_guesses(score, included, curve, ERROR, independent)
    best = one_run.best_possible(count, curve, ERROR, independent)
    claimed, delta = curve[0]
    follows = noise.chance(loop.layout.size)
    return Audit(
        claimed, found[0].epsilon, delta, 1 - ERROR, count, best, recipe.run.steps, broken, tuple(found), follows
    )


def measure_power(recipe: Recipe, canaries: int, task: Task) -> dict[Break, bool]:
    """Whether an audit of this size would have caught too little noise: it is made again, broken on purpose.

    Only the canaries take part, so that this costs the noise of so many runs, but no training. Where the claim does not
    rest on secret cohorts, noise that follows them is not asked for.
    """
    found = {kind: audit(recipe, canaries, broken=kind, alone=True, task=task) for kind in MEASURED}
    return {
        kind: not each.passed
        for kind, each in found.items()
        if kind != "cohort-variance" or each.cohort_chance is not None
    }


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


def _score(
    loop: Loop, witness: Witness, independent: bool, watch: Callable[[int], None] | None
) -> tuple[np.ndarray, Noise]:
    """Make the run and give each canary a score, above 0 for a guess that it is included; and keep the noise's size."""
    recipe, planted = loop.recipe, witness.trainer.canaries
    bounded = planted.bounded(loop.bounds.bounder)  # (canaries, coordinates)
    lengths = torch.linalg.vector_norm(bounded, dim=1)
    filters = bounded / lengths[:, None]
    state, score, noise = loop.start(), torch.zeros(len(lengths), dtype=torch.float64), Noise()
    for done in range(recipe.run.steps):
        variance = stated_variance(loop, state)
        loop.step(state)
        seen = loop.total.double() - witness.known.double() / loop.plan.rate
        score += planted.signs[:, done] * (seen[planted.places] * filters).sum(dim=1)
        if Noise.is_checked(loop) and witness.complete:
            noise.take(seen - witness.planted.double() / loop.plan.rate, variance, witness.arrived)
        if watch is not None:
            watch(done + 1)
    sent = lengths * float(loop.plan.weights[-1]) * recipe.run.steps  # in all turns: a share `rate`, of 1 / rate each
    middle = sent / 2 if independent else score.mean()
    guessed: np.ndarray = (score - middle).numpy()
    return guessed, noise


def _with_canaries(recipe: Recipe, task: Task, plan: Plan, canaries: int, only: bool) -> Recipe:
    """The recipe with its own rate and noise, over its users and the canaries, or over canaries only."""
    own = user_weights(recipe.users, task)
    weights = np.concatenate([own, np.full(canaries, own.max())])
    population = canaries if only else len(weights)
    cohort = max(1, plan.cohort_size * population // len(own))
    adaptive, metrics = recipe.bounding.adaptive, recipe.privacy.metrics
    noise = plan.event.count_noise * cohort / plan.cohort_size  # in proportion, as for the recipe itself
    if metrics is not None:
        metrics = metrics.model_copy(update={"noise": None if isinstance(adaptive, Adaptive) else noise})
    if isinstance(adaptive, Adaptive):
        adaptive = adaptive.model_copy(update={"count_noise": noise})
    z = plan.event.noise_multiplier
    changes = {
        "users": {} if only else {"weights": tuple(weights.tolist())},
        "sampling": {"cohort": cohort},
        "bounding": {"adaptive": adaptive},
        "privacy": {"noise_multiplier": z, "noise_scale": None, "target_epsilon": None, "metrics": metrics},
    }
    updated = {name: section.model_copy(update=changes[name]) for name, section in recipe if name in changes}
    return recipe.model_copy(update=updated)


def _make_loop(
    larger: Recipe, planting: Planting, task: Task, workers: int, deploy: Deploy | None
) -> tuple[Loop, Witness]:
    """Make the loop of the run with canaries, and an engine in it that an auditor can look at."""
    planted: Any = planting.task(task)
    trainer = planting.trainer(planted)
    loop = make_loop(larger, task=planted, remote=None if deploy is None else deploy(planting))
    engine = loop.engine if deploy is not None else _engine(loop, trainer, planting, planted, workers)
    witness = Witness(engine, trainer, loop.total)
    return replace(loop, engine=witness), witness


def _engine(loop: Loop, trainer: CanaryTrainer, planting: Planting, task: CanaryTask, workers: int) -> Engine:
    if workers == 1:
        return InProcess(trainer)
    planted: Any = task
    costs = expected_costs(planted, loop.recipe.local)
    return Processes(
        partial(Planting.trainer, planting), workers, loop.total, trainer.part_size, costs, trainer.kernels
    )
