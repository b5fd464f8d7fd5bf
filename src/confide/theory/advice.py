"""What to change, from the terms of a diagnosis: settings to try, what they should gain, and what privacy they cost.

Bounds and splits are tried out on the probed users' own updates: for each candidate the floor (the squared gradient
that a long run is left with) is computed anew, with the central rate changed so that steps stay as long as they are.
The noise multiplier stays, so the guarantee of a candidate is that of the run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from confide.federated.bounding import Adaptive, Bounder, Bounding, allocated, bounder
from confide.federated.optimisers import Sgd
from confide.federated.schedules import Constant
from confide.privacy.plan import Plan
from confide.recipe import Recipe
from confide.theory.measure import Measured, per_layer
from confide.theory.terms import CAUSES, Centre, Parts, aggregate, noise_squares, split_error

WORTH = 1.15
"""A candidate is named if it lowers the floor by this factor."""
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
    privacy: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "settings": list(self.settings)}


def advise(recipe: Recipe, measured: Measured, rule: Bounder, plan: Plan, centre: Centre, parts: Parts) -> list[Advice]:
    """Changes for the cause that dominates, the first one to try first."""
    sums = dict(zip(CAUSES, parts.terms.sum(dim=0).tolist(), strict=True))
    cause = max(sums, key=lambda each: sums[each])
    found: list[Advice] = []
    if cause == "optimisation":
        return [_faster(recipe, measured, centre, parts, sums)]
    if cause == "drift":
        found += _stiller(recipe, sums)
    if cause in ("clipping", "noise"):
        found += _other_bound(recipe, measured, rule, plan, centre, parts, cause)
    if cause == "batches":
        found += _larger_batches(recipe)
    if cause in ("users", "batches", "noise"):
        lower = _settle(recipe, sums)
        larger = _larger_cohort(recipe, plan, sums)
        found += larger + lower if cause == "users" else lower + larger
    if cause == "clipping" and not found:
        found += [_raised(recipe)]
    return found


def _faster(recipe: Recipe, measured: Measured, centre: Centre, parts: Parts, sums: dict[str, float]) -> Advice:
    """Longer steps where there is room, otherwise more of them."""
    longest = float((centre.rates * parts.shortened).max()) * measured.reach * measured.smoothness
    moving = sum(sums[name] for name in ("users", "batches", "noise"))  # these grow with the rate
    room = min(0.5 / max(longest, 1e-12), (sums["optimisation"] / max(2 * moving, 1e-300)) ** 0.5, 10.0)
    share = sums["optimisation"] / max(sum(sums.values()), 1e-300)
    why = f"{share:.0%} of the squared gradient is explained by no error: the run has not come to its floor"
    if room > 1.3:
        return Advice(
            f"raise the central learning rate {room:.2g} times", why,
            (f"central.learning_rate={recipe.central.learning_rate * room:.4g}",), None, FREE,
        )  # fmt: skip
    return Advice(
        "take more central steps", why, (f"run.steps={2 * recipe.run.steps}",), None,
        "every step costs; see `confide plan epsilon`, or calibrate with privacy.target_epsilon",
    )  # fmt: skip


def _stiller(recipe: Recipe, sums: dict[str, float]) -> list[Advice]:
    local = recipe.local
    key, now = ("steps", local.steps) if local.steps is not None else ("epochs", local.epochs or 1)
    why = "users drift towards their own minima while they take their local steps"
    rest = sum(value for name, value in sums.items() if name not in ("drift", "optimisation"))
    wanted = max(1, min(now // 2, round(now * (rest / sums["drift"]) ** 0.5)))
    gain = (sums["drift"] + rest) / (sums["drift"] * (wanted / now) ** 2 + rest)
    if wanted < now:
        changes = [f"local.{key}={wanted}", *_rate(recipe, now / wanted)]
        return [Advice(f"fewer local {key}: {wanted} instead of {now}", why, tuple(changes), gain, FREE)]
    # One epoch is many steps; shorter ones keep it.
    changes = [f"local.learning_rate={local.learning_rate / 4:.4g}"]
    changes += [] if local.divide_by_learning_rate else _rate(recipe, 4.0)
    return [Advice("a lower local learning rate", why, tuple(changes), None, FREE)]


def _other_bound(
    recipe: Recipe, measured: Measured, rule: Bounder, plan: Plan, centre: Centre, parts: Parts, cause: str
) -> list[Advice]:
    """The candidate whose floor is least, if it is worth it."""
    best: tuple[float, float, Bounding] | None = None
    for candidate in _candidates(recipe.bounding, len(measured.layout.names)):
        floor, rate = _floor(recipe, candidate, measured, rule, plan, centre, parts)
        if best is None or floor < best[0]:
            best = floor, rate, candidate
    if best is None or best[0] * WORTH > parts.floor:
        return []
    _, rate, chosen = best
    why = {
        "clipping": "the bound bends the aggregate: users are shortened by different factors",
        "noise": "the noise is long for what the users send within this bound",
    }[cause]
    return [
        Advice(
            _named(recipe.bounding, chosen), why, (*_changes(recipe.bounding, chosen), *_rate(recipe, rate)),
            parts.floor / best[0], FREE,
        )
    ]  # fmt: skip


def _candidates(now: Bounding, layers: int) -> list[Bounding]:
    if now.bound is None:
        return []
    rules = [now] if now.adaptive is None else [now.model_copy(update={"adaptive": None, "split": _fixed(now.split)})]
    if now.rule == "clip":
        rules.append(Bounding(rule="normalise", bound=now.bound))
    if layers > 1:
        rules += [Bounding(rule="per_layer_clip", bound=now.bound, split=s) for s in ("uniform", "dim", "root")]
        learned = Adaptive(quantile=LEARNED_QUANTILE)
        rules.append(Bounding(rule="per_layer_clip", bound=now.bound, split="learned", adaptive=learned))
    factors = (1.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 2.0, 4.0, 8.0, 16.0)
    return [each.model_copy(update={"bound": now.bound * factor}) for each in rules for factor in factors]


def _fixed(split: str) -> str:
    return "dim" if split == "learned" else split


def _floor(
    recipe: Recipe, candidate: Bounding, measured: Measured, rule: Bounder, plan: Plan, centre: Centre, parts: Parts
) -> tuple[float, float]:
    """The floor under a candidate, and by what the central rate has to change for steps of the same length."""
    made, extra = bounder(candidate, measured.layout), 1.0
    if candidate.split == "learned":  # what the private estimate would find, and at most what it costs
        norms = per_layer(measured.layout, measured.moving).sqrt().flatten(0, 1)
        wanted = torch.quantile(norms, LEARNED_QUANTILE, dim=0).clamp(min=1e-30)
        assert made.roots is not None
        made, extra = replace(made, layer_bounds=allocated(made.sensitivity, wanted, made.roots)), 0.8**-0.5
    first = split_error(measured, made, plan, centre, extra)
    if isinstance(recipe.central, Sgd):
        old, new = (float((p.shortened * parts.signal).sum()) for p in (parts, first))
        rate = old / max(new, 1e-300)
        rates = centre.rates * rate
    else:  # steps as long as the optimiser makes them, whatever the aggregate's length
        lengths = [_length(measured, each, plan, more) for each, more in ((rule, 1.0), (made, extra))]
        rate, rates = 1.0, centre.rates * lengths[0] / lengths[1].clamp(min=1e-300)
    return split_error(measured, made, plan, replace(centre, rates=rates), extra).floor, rate


def _length(measured: Measured, rule: Bounder, plan: Plan, extra: float) -> Tensor:
    noise = noise_squares(plan, rule, measured.layout) * extra**2
    return (per_layer(measured.layout, aggregate(measured, rule)) + noise).sqrt()


def _named(now: Bounding, chosen: Bounding) -> str:
    parts = []
    if chosen.rule != now.rule:
        parts.append("normalise instead of clipping" if chosen.rule == "normalise" else "clip every tensor on its own")
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


def _rate(recipe: Recipe, factor: float) -> list[str]:
    """The central rate for an aggregate that is shorter by `factor`; optimisers that scale do without."""
    if not isinstance(recipe.central, Sgd) or 0.9 < factor < 1.1:
        return []
    return [f"central.learning_rate={recipe.central.learning_rate * factor:.4g}"]


def _settle(recipe: Recipe, sums: dict[str, float]) -> list[Advice]:
    """Errors of mean zero average out over shorter steps."""
    moving = sum(sums[name] for name in ("users", "batches", "noise"))
    if not isinstance(recipe.central.schedule, Constant) or recipe.run.steps < 4:
        return []
    half = recipe.run.steps // 2
    schedule = f"{{kind: exponential, rate: 0.1, start: {half}, transition: {recipe.run.steps - half}}}"
    total = sum(value for name, value in sums.items() if name != "optimisation")
    return [
        Advice(
            "let the central learning rate fall to a tenth over the second half",
            "errors that change from step to step average out over shorter steps",
            (f"central.schedule={schedule}",), total / (total - 0.9 * moving), FREE,
        )
    ]  # fmt: skip


def _larger_cohort(recipe: Recipe, plan: Plan, sums: dict[str, float]) -> list[Advice]:
    population, now = len(plan.weights), recipe.sampling.cohort
    larger = min(4 * now, population)
    private = plan.mechanism.multiplier > 0
    if larger <= now:
        more = "more users: all of them already take part in every step"
        cost = "more users at this cohort share lower the noise and not the guarantee"
        return [Advice(more, "noise and chance fall with the number of users", (), None, cost)]
    ratio = larger / now
    total = sum(value for name, value in sums.items() if name != "optimisation")
    left = total - sums["users"] - sums["batches"] - sums["noise"]
    after = left + (sums["users"] + sums["batches"]) / ratio + sums["noise"] / ratio**2
    cost = (
        "epsilon grows with the share of users in a step, unless the population grows with the cohort; see "
        "`confide plan epsilon`"
        if private
        else "none: there is no noise"
    )
    return [
        Advice(
            f"a larger cohort: {larger} instead of {now}", "the mean over more users has less chance and less noise",
            (f"sampling.cohort={larger}",), total / max(after, 1e-300), cost,
        )
    ]  # fmt: skip


def _larger_batches(recipe: Recipe) -> list[Advice]:
    local, why = recipe.local, "a user's batches differ, and its steps with them"
    for key in ("batch_size", "batch_seconds"):
        now = getattr(local, key)
        if now is not None:
            return [Advice("larger local batches", why, (f"local.{key}={4 * now:g}",), None, FREE)]
    return []


def _raised(recipe: Recipe) -> Advice:
    bound = 2 * (recipe.bounding.bound or 1.0)
    return Advice(
        f"raise the bound to {bound:.4g}", "users are shortened by different factors, and noise is not what limits",
        (f"bounding.bound={bound:.4g}",), None, FREE,
    )  # fmt: skip
