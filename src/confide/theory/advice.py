"""What to change, from the terms of a diagnosis: settings to try, what they should gain, and what privacy they cost.

Bounds and splits are tried out on the probed users' own updates: for each candidate the floor (the squared gradient
that a long run is left with) is computed anew, with the central rate changed so that steps stay as long as they are.
The noise multiplier stays, so the guarantee of a candidate is that of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from confide.federated.bounding import Adaptive, Bounder, Bounding, allocate, bounder
from confide.federated.optimisers import Sgd
from confide.federated.schedules import Constant
from confide.privacy.plan import Plan
from confide.recipe import Recipe
from confide.theory.measure import Measured, per_layer
from confide.theory.terms import Centre, Parts, aggregate, dominant, noise_squares, split_error

WORTH = 1.15
"""A candidate is named if it lowers the floor by this factor."""
_RULES = {
    "normalise": "normalise instead of clipping",
    "clip": "clip instead of normalising",
    "per_layer_clip": "clip every tensor on its own",
}
FREE = "none: the noise multiplier and who takes part stay"
LEARNED_QUANTILE = 0.8


@dataclass(frozen=True)
class Advice:
    """One change."""

    what: str
    why: str
    settings: tuple[str, ...]
    """For `--set`."""
    gain: float | None
    """By this factor the floor should fall; none where it is not about the floor."""
    privacy: str = FREE
    loss: float | None = None
    """Of users who took no part, in a rehearsal of this change; none where it was not rehearsed."""


@dataclass(frozen=True)
class Case:
    """A run at a checkpoint, what was measured there, and the terms that its error was split into."""

    recipe: Recipe
    measured: Measured
    rule: Bounder
    plan: Plan
    centre: Centre
    parts: Parts


def advise(case: Case) -> list[Advice]:
    """Changes for the cause that dominates, the first one to try first."""
    cause = dominant(case.parts.sums)
    if cause == "optimisation":
        return [_go_faster(case)]
    if cause == "drift":
        return [_drift_less(case)]
    if cause == "clipping":
        return _change_bound(case, cause) or [_raise_bound(case.recipe)]
    if cause == "users":
        return _enlarge_cohort(case) + _lower_rate(case)
    first = _enlarge_batches(case.recipe) if cause == "batches" else _change_bound(case, cause)
    return first + _lower_rate(case) + _enlarge_cohort(case)


def _go_faster(case: Case) -> Advice:
    """Advise longer steps where there is room, otherwise more of them."""
    recipe, measured, parts, sums = case.recipe, case.measured, case.parts, case.parts.sums
    longest = float((case.centre.rates * parts.shortened).max()) * measured.reach * measured.smoothness
    # What fluctuates grows with the rate.
    room = min(0.5 / max(longest, 1e-12), (sums["optimisation"] / max(2 * parts.fluctuation, 1e-300)) ** 0.5, 10.0)
    share = sums["optimisation"] / max(sum(sums.values()), 1e-300)
    why = f"{share:.0%} of the squared gradient is explained by no error: the run has not come to its floor"
    if room > 1.3:
        change = f"central.learning_rate={recipe.central.learning_rate * room:.4g}"
        return Advice(f"raise the central learning rate {room:.2g} times", why, (change,), None)
    cost = "every step costs; see `confide plan epsilon`, or calibrate with privacy.target_epsilon"
    return Advice("take more central steps", why, (f"run.steps={2 * recipe.run.steps}",), None, cost)


def _drift_less(case: Case) -> Advice:
    """Advise fewer local steps or, where there is only one step or epoch, shorter ones."""
    recipe, local, drift = case.recipe, case.recipe.local, case.parts.sums["drift"]
    key, now = ("steps", local.steps) if local.steps is not None else ("epochs", local.epochs or 1)
    why = "users drift towards their own minima while they take their local steps"
    rest = max(case.parts.floor - drift, 0.0)
    wanted = max(1, min(now // 2, round(now * (rest / drift) ** 0.5)))
    if wanted < now:
        gain = case.parts.floor / (drift * (wanted / now) ** 2 + rest)
        changes = (f"local.{key}={wanted}", *_central_rate(recipe, now / wanted))
        return Advice(f"fewer local {key}: {wanted} instead of {now}", why, changes, gain)
    central = [] if local.divide_by_learning_rate else _central_rate(recipe, 4.0)
    changes = (f"local.learning_rate={local.learning_rate / 4:.4g}", *central)
    return Advice("a lower local learning rate", why, changes, None)


def _change_bound(case: Case, cause: str) -> list[Advice]:
    """Advise the bound or split whose floor is least, if it is worth it."""
    now, floor = case.recipe.bounding, case.parts.floor
    tried = [(*_floor_with(case, each), each) for each in _candidates(now, len(case.measured.layout.names))]
    if not tried:
        return []
    least, rate, chosen = min(tried, key=lambda each: each[0])
    if least * WORTH > floor:
        return []
    why = {
        "clipping": "the bound bends the aggregate: it changes users' lengths by different factors",
        "noise": "the noise is long for what the users send within this bound",
    }[cause]
    changes = (*_changes(now, chosen), *_central_rate(case.recipe, rate))
    return [Advice(_describe(now, chosen), why, changes, floor / least)]


def _candidates(now: Bounding, layers: int) -> list[Bounding]:
    if now.bound is None:
        return []
    fixed = {"adaptive": None, "split": "dim" if now.split == "learned" else now.split}
    rules = [now if now.adaptive is None else now.model_copy(update=fixed)]
    if now.rule == "clip":
        rules.append(Bounding(rule="normalise", bound=now.bound))
    if now.rule == "normalise":
        rules.append(Bounding(rule="clip", bound=now.bound))
    if layers > 1:
        rules += [Bounding(rule="per_layer_clip", bound=now.bound, split=s) for s in ("uniform", "dim", "root")]
        learned = Adaptive(quantile=LEARNED_QUANTILE)
        rules.append(Bounding(rule="per_layer_clip", bound=now.bound, split="learned", adaptive=learned))
    factors = (1.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 2.0, 4.0, 8.0, 16.0)
    return [each.model_copy(update={"bound": now.bound * factor}) for each in rules for factor in factors]


def _floor_with(case: Case, candidate: Bounding) -> tuple[float, float]:
    """Compute the floor under a candidate, and the factor of the central rate that keeps steps as long as they are."""
    measured, plan, centre, parts = case.measured, case.plan, case.centre, case.parts
    layout = measured.layout
    made, extra = bounder(candidate, layout), 1.0
    if candidate.split == "learned":  # what the private estimate would find, and at most what it costs
        norms = per_layer(layout, measured.moving).sqrt().flatten(0, 1)
        wanted = torch.quantile(norms, LEARNED_QUANTILE, dim=0).clamp(min=1e-30)
        assert made.roots is not None
        made, extra = replace(made, layer_bounds=allocate(made.sensitivity, wanted, made.roots)), 0.8**-0.5
    if isinstance(case.recipe.central, Sgd):
        first = split_error(measured, made, plan, centre, extra)
        # Where no gradient is left, every tensor counts alike.
        weight = parts.signal if float(parts.signal.sum()) > 0 else torch.ones_like(parts.signal)
        old, new = (float((p.shortened * weight).sum()) for p in (parts, first))
        rate = old / max(new, 1e-300)
        rates = centre.rates * rate
    else:  # steps as long as the optimiser makes them, whatever the aggregate's length
        old_length, new_length = (  # (layers,) of each tensor of the aggregate, noise included
            (per_layer(layout, aggregate(measured, each)) + noise_squares(plan, each, layout) * more**2).sqrt()
            for each, more in ((case.rule, 1.0), (made, extra))
        )
        rate, rates = 1.0, centre.rates * old_length / new_length.clamp(min=1e-300)
    return split_error(measured, made, plan, replace(centre, rates=rates), extra).floor, rate


def _describe(now: Bounding, chosen: Bounding) -> str:
    parts = []
    if chosen.rule != now.rule:
        parts.append(_RULES[chosen.rule])
    if chosen.per_layer and (chosen.split != now.split or chosen.rule != now.rule):
        parts.append(f"split the bound by {chosen.split}")
    if chosen.bound != now.bound and chosen.bound is not None and now.bound is not None:
        parts.append(f"{'raise' if chosen.bound > now.bound else 'lower'} the bound to {chosen.bound:.4g}")
    return ", ".join(parts) or "a fixed bound"


def _changes(now: Bounding, chosen: Bounding) -> list[str]:
    before, after = now.model_dump(), chosen.model_dump()
    if chosen.adaptive is not None:
        after["adaptive"] = {"quantile": LEARNED_QUANTILE}
    changed = [key for key in ("rule", "bound", "split", "adaptive") if before[key] != after[key]]
    return [f"bounding.{key}={_yaml(after[key])}" for key in changed]


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"
    return "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _central_rate(recipe: Recipe, factor: float) -> list[str]:
    """Raise the central rate for an aggregate that is shorter by `factor`; optimisers that rescale need no change."""
    if not isinstance(recipe.central, Sgd) or 0.9 < factor < 1.1:
        return []
    return [f"central.learning_rate={recipe.central.learning_rate * factor:.4g}"]


def _lower_rate(case: Case) -> list[Advice]:
    """Errors of mean zero average out over shorter steps."""
    steps, floor = case.recipe.run.steps, case.parts.floor
    if not isinstance(case.recipe.central.schedule, Constant) or steps < 4:
        return []
    half = steps // 2
    schedule = f"{{kind: exponential, rate: 0.1, start: {half}, transition: {steps - half}}}"
    what = "let the central learning rate fall to a tenth over the second half"
    why = "errors that change from step to step average out over shorter steps"
    return [Advice(what, why, (f"central.schedule={schedule}",), floor / (floor - 0.9 * case.parts.fluctuation))]


def _enlarge_cohort(case: Case) -> list[Advice]:
    """A larger cohort averages chance and noise over more users."""
    plan, parts, now = case.plan, case.parts, case.recipe.sampling.cohort
    larger = min(4 * now, len(plan.weights))
    if larger <= now:
        more = "more users: all of them already take part in every step"
        cost = "more users at this cohort share lower the noise and not the guarantee"
        return [Advice(more, "noise and chance fall with the number of users", (), None, cost)]
    ratio, noise = larger / now, parts.sums["noise"]
    after = parts.floor - parts.fluctuation + (parts.fluctuation - noise) / ratio + noise / ratio**2
    cost = "none: there is no noise"
    if plan.mechanism.multiplier > 0:
        cost = (
            "epsilon grows with the share of users in a step, unless the population grows with the cohort; see "
            "`confide plan epsilon`"
        )
    what, why = f"a larger cohort: {larger} instead of {now}", "the mean over more users has less chance and less noise"
    return [Advice(what, why, (f"sampling.cohort={larger}",), parts.floor / max(after, 1e-300), cost)]


def _enlarge_batches(recipe: Recipe) -> list[Advice]:
    why = "a user's batches differ, and its steps with them"
    for key, now in (("batch_size", recipe.local.batch_size), ("batch_seconds", recipe.local.batch_seconds)):
        if now is not None:
            return [Advice("larger local batches", why, (f"local.{key}={4 * now:g}",), None)]
    return []


def _raise_bound(recipe: Recipe) -> Advice:
    bound = 2 * (recipe.bounding.bound or 1.0)
    why = "users are shortened by different factors, and noise is not what limits"
    return Advice(f"raise the bound to {bound:.4g}", why, (f"bounding.bound={bound:.4g}",), None)
