"""Try changes out before they are advised: the run made again in memory, on users who are held apart.

Theory says where to look; how much a change gains is measured. A rehearsal is the run itself with one change, from its
own start, with the noise that keeps the run's epsilon. Some users are held apart: they send nothing in any rehearsal,
and how well their data are explained at the end is what changes are chosen by. The test set is never looked at. The
changes that look best are made once more with another seed, and what does not hold up is not advised.

Differs from a run: at most `MOST_STEPS` steps, and at most `MOST_COHORT` users in a step. The noise on the average
of a step stays what it would be, so the noise multiplier of a smaller cohort is smaller by the same factor. Another
number of steps is tried only where all of them can be rehearsed. A user's loss counts up to `MOST_LOSS` times the loss
that nine users in ten stay below: one recording with a wrong text would outweigh what everybody else gains. None of
this is private: it reads users' data, as the whole diagnosis does, and releases nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from confide.build import make_loop
from confide.engines.engine import Engine, Traits
from confide.errors import UserError
from confide.federated.cohort import Tally
from confide.federated.local import cut_into_batches
from confide.federated.schedules import Linear
from confide.federated.task import Task
from confide.privacy import accountant
from confide.privacy.plan import Plan
from confide.randomness import generator
from confide.recipe import Recipe, changed_by
from confide.theory.advice import FREE, Advice

MOST_STEPS, MOST_COHORT, MOST_APART, MOST_LOSS = 200, 64, 48, 3.0
CLEAR = 1.5
"""A gain is taken for one if it is this many times its standard error over the users who are held apart."""
WORTH = 0.01
"""A gain below this share of the loss is not worth a setting."""
FINALISTS = 3


class _Sparing:
    """An engine whose users who are held apart send nothing, whoever is drawn."""

    def __init__(self, engine: Engine, apart: np.ndarray) -> None:
        self.engine, self.apart = engine, apart

    @property
    def traits(self) -> Traits:
        return self.engine.traits

    def gather(self, cohort: np.ndarray, step: int) -> None:
        self.engine.gather(cohort, step)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        kept = ~np.isin(cohort, self.apart)
        total.zero_()
        tally = self.engine.train(central, cohort[kept], step, total, bounds)
        if tally.raw_norms:  # a rule with a bound for each user wants one norm for each
            norms = np.full(len(cohort), math.nan)
            norms[kept] = tally.raw_norms
            tally.raw_norms = norms.tolist()
        return tally

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Rehearsed:
    """What a change came to: losses of the users who were held apart, one each and each the mean over the seeds."""

    advice: Advice
    losses: np.ndarray  # (users,)

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def gain(self, before: Rehearsed) -> tuple[float, float]:
        """By how much the loss fell, and the standard error of that, paired over users."""
        gaps = before.losses - self.losses
        if not np.isfinite(gaps).all():
            return -math.inf, 0.0
        return float(gaps.mean()), float(gaps.std(ddof=1) / len(gaps) ** 0.5)


@dataclass(frozen=True)
class Stage:
    """One run to rehearse changes of."""

    recipe: Recipe
    task: Task
    apart: np.ndarray
    steps: int
    """At most so many in a rehearsal."""
    most: float = math.inf
    """What a finite loss of one user counts for, at most."""

    def limited(self, losses: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(losses), np.minimum(losses, self.most), losses)

    def losses(self, changed: Recipe, seed: int, ease: float = 1.0) -> np.ndarray:
        """The losses of the users held apart after a rehearsal; `ease` divides the noise on the average."""
        wanted = changed_by(changed, [f"run.seed={seed}"])
        loop = make_loop(_smaller(wanted, make_loop(wanted, task=self.task).plan, ease), task=self.task)
        loop.engine = _Sparing(loop.engine, self.apart)
        state = loop.start()
        for _ in range(min(self.steps, changed.run.steps)):
            loop.step(state)
        model = loop.layout.views(loop.final.model(state))
        with torch.no_grad():
            return self.limited(np.array([self._loss(model, changed, int(user)) for user in self.apart]))

    def _loss(self, model: dict[str, Tensor], recipe: Recipe, user: int) -> float:
        held, draw = int(self.task.examples[user]), generator(0, "rehearsal", 0, user)
        whole = recipe.local.batch_size is None and recipe.local.batch_seconds is None
        batches = [None] if whole else cut_into_batches(self.task, recipe.local, user, np.arange(held))
        found = [
            (held if each is None else len(each), float(self.task.loss(model, self.task.batch(user, each, draw))))
            for each in batches
        ]
        return sum(many * loss for many, loss in found) / sum(many for many, _ in found)


def rehearse(
    recipe: Recipe, task: Task, theory: Sequence[Advice], seed: int = 0, steps: int = MOST_STEPS
) -> list[Advice]:
    """The changes that made the run better, the best first, with what they gained; none if none did."""
    stage = Stage(recipe, task, _apart(task, seed), steps)
    plan = make_loop(recipe, task=task).plan
    tried: list[tuple[Rehearsed, Recipe, float]] = []
    before = stage.losses(recipe, seed)
    stage = replace(stage, most=MOST_LOSS * float(np.quantile(before, 0.9)))
    before = stage.limited(before)
    base = Rehearsed(Advice("nothing", "", (), None), before)
    for advice, ease in [*((each, 1.0) for each in theory if _costs_nothing(each)), *changes(recipe, plan, steps)]:
        try:
            changed = changed_by(recipe, advice.settings)
            losses = stage.losses(changed, seed, ease)
        except UserError:  # what a recipe refuses cannot be advised
            continue
        one = Rehearsed(advice, losses)
        if one.gain(base)[0] > 0:
            tried.append((one, changed, ease))
    tried.sort(key=lambda each: each[0].loss)
    if not tried:
        return []
    again = Rehearsed(base.advice, (before + stage.losses(recipe, seed + 1)) / 2)
    sure = []
    for one, changed, ease in _best_of_each(tried)[:FINALISTS]:
        both = replace(one, losses=(one.losses + stage.losses(changed, seed + 1, ease)) / 2)
        gain, error = both.gain(again)
        if gain > max(CLEAR * error, WORTH * again.loss):
            sure.append((both.loss, _told(both, again, stage)))
    found = [advice for _, advice in sorted(sure, key=lambda each: each[0])]
    return [*(each for each in found if each.settings), *(each for each in found if not each.settings)]


def _costs_nothing(advice: Advice) -> bool:
    """Whether a change keeps who takes part and how often; others are tried with the noise that they need."""
    return bool(advice.settings) and not any(
        word.startswith(("sampling.", "run.", "privacy.")) for word in advice.settings
    )


def _best_of_each(tried: Sequence[tuple[Rehearsed, Recipe, float]]) -> list[tuple[Rehearsed, Recipe, float]]:
    """Keep the best change of each setting: a rate twice and four times as high are one advice."""
    found: dict[tuple[str, ...], tuple[Rehearsed, Recipe, float]] = {}
    for each in tried:
        found.setdefault(tuple(s.partition("=")[0] for s in each[0].advice.settings), each)
    return list(found.values())


def _told(one: Rehearsed, before: Rehearsed, stage: Stage) -> Advice:
    share = (before.loss - one.loss) / before.loss if before.loss > 0 else 0.0
    part = "" if stage.steps >= stage.recipe.run.steps else f", over the first {stage.steps} steps"
    said = (
        f"rehearsed{part}: the loss of {len(stage.apart)} users who took no part fell from {before.loss:.4g} to "
        f"{one.loss:.4g} ({share:.0%}); {one.advice.why}"
    )
    return replace(one.advice, why=said, gain=before.loss / one.loss if one.loss > 0 else None, loss=one.loss)


def _apart(task: Task, seed: int) -> np.ndarray:
    held = np.flatnonzero(task.examples > 0)
    if len(held) < 8:
        raise UserError(f"a rehearsal holds users apart; {len(held)} with data are too few. Leave it out: --rehearse 0")
    return np.sort(generator(seed, "rehearsal users").permutation(held)[: min(MOST_APART, len(held) // 4)])


def changes(recipe: Recipe, plan: Plan, most: int = MOST_STEPS) -> Iterator[tuple[Advice, float]]:
    """What a person can do: rate, bound, cohort, steps (up to `most`), population; each at the run's own epsilon."""
    rate = recipe.central.learning_rate
    for factor in (0.5, 2.0, 4.0):
        word = "raise" if factor > 1 else "lower"
        what = f"{word} the central learning rate {max(factor, 1 / factor):g} times"
        why = "steps are too short for the steps that there are" if factor > 1 else "errors add up over long steps"
        yield Advice(what, why, (f"central.learning_rate={rate * factor:.4g}",), None), 1.0
    bound = recipe.bounding.bound
    if bound is not None and recipe.bounding.rule != "normalise":  # where it would be another rate
        for factor in (0.5, 2.0):
            what = f"{'raise' if factor > 1 else 'lower'} the bound to {bound * factor:.4g}"
            why = "users are shortened too much" if factor > 1 else "the noise grows with the bound"
            yield Advice(what, why, (f"bounding.bound={bound * factor:.4g}",), None), 1.0
    cohort, people, steps = recipe.sampling.cohort, len(plan.weights), recipe.run.steps
    if (larger := min(2 * cohort, people)) > cohort:
        what, why = f"a larger cohort: {larger:,} instead of {cohort:,}", "the mean over more users has less chance"
        yield from _at_equal_epsilon(recipe, plan, what, why, larger, steps)
    for many, why in ((2 * steps, "the run is not there yet"), (steps // 2, "fewer releases need less noise each")):
        if many >= 2 and max(many, steps) <= most:
            what = f"{'more' if many > steps else 'fewer'} central steps: {many:,} instead of {steps:,}"
            yield from _at_equal_epsilon(recipe, plan, what, why, cohort, many)
    if plan.mechanism.multiplier > 0 and plan.event.sampler == "poisson":
        z = _noise(recipe, plan, 4 * cohort, steps, 4 * people)
        what = f"more people: {4 * people:,} instead of {people:,}, in cohorts of {4 * cohort:,}"
        why = "at the same epsilon the noise on the average falls with the number of people"
        yield Advice(what, why, (), None, "none: epsilon stays"), 4 * plan.mechanism.multiplier / z


def _at_equal_epsilon(
    recipe: Recipe, plan: Plan, what: str, why: str, cohort: int, steps: int
) -> Iterator[tuple[Advice, float]]:
    settings = [] if cohort == recipe.sampling.cohort else [f"sampling.cohort={cohort}"]
    settings += [] if steps == recipe.run.steps else [f"run.steps={steps}", *_stretched(recipe, steps)]
    privacy = FREE
    if plan.mechanism.multiplier > 0:
        privacy = "none: the noise is chosen for the run's epsilon"
        if recipe.privacy.target_epsilon is None:
            if plan.event.sampler != "poisson":
                return
            z = _noise(recipe, plan, cohort, steps, len(plan.weights))
            settings.append(f"privacy.noise_multiplier={z:.6g}")
    yield Advice(what, why, tuple(settings), None, privacy), 1.0


def _stretched(recipe: Recipe, steps: int) -> list[str]:
    """A schedule that falls to the run's end falls to the new end."""
    schedule = recipe.central.schedule
    fits = isinstance(schedule, Linear) and schedule.steps == recipe.run.steps
    return [f"central.schedule.steps={steps}"] if fits else []


def _noise(recipe: Recipe, plan: Plan, cohort: int, steps: int, people: int) -> float:
    """The noise multiplier that spends what the run spends."""
    spent = plan.epsilon(recipe.run.steps)
    event = replace(plan.event, cohort=cohort, population=people, rate=cohort / people)
    assert plan.delta is not None
    return math.ceil(1e5 * accountant.noise_multiplier(spent, plan.delta, steps, plan.accountant, event)) / 1e5


def _smaller(recipe: Recipe, plan: Plan, ease: float) -> Recipe:
    """The recipe with at most `MOST_COHORT` users in a step and the same noise on their average."""
    cohort = recipe.sampling.cohort
    fewer = MOST_COHORT if plan.event.sampler == "poisson" and cohort > MOST_COHORT else cohort
    if (fewer == cohort and ease == 1.0) or plan.mechanism.name not in ("gaussian", "none"):
        return recipe
    settings = [f"sampling.cohort={fewer}"]
    if plan.mechanism.multiplier > 0:
        z = plan.mechanism.multiplier * fewer / cohort / ease
        settings += [f"privacy.noise_multiplier={z:.9g}", "privacy.target_epsilon=null", "privacy.noise_scale=null"]
    return changed_by(recipe, settings)
