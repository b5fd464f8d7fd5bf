"""Random runs whose dominant term is known, because each cause can be taken away and the run made again.

A trial is a run on layered quadratics with all causes in some measure and one of them large. What a cause costs is the
final suboptimality less that of the same run without it:

| cause        | taken away by                                                                          |
|--------------|----------------------------------------------------------------------------------------|
| optimisation | beginning at the minimum                                                               |
| drift        | one local step as long as all of them                                                  |
| clipping     | a bound that nobody reaches, with the same noise                                       |
| users        | everybody in every step, with the same noise and the same variance because of batches  |
| batches      | all of a user's data in every local step                                               |
| noise        | no noise                                                                               |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from confide.federated.state import State
from confide.recipe import Recipe, parse
from confide.runs.records import mean_of_recent
from confide.runs.simulation import simulate
from confide.theory.diagnose import Diagnosis, diagnose
from confide.theory.terms import CAUSES
from support.problems import Layered, Shape

CLEAR = 1.3
"""A term is known to dominate if it costs this many times what any other does."""


@dataclass(frozen=True)
class Trial:
    cause: str
    """The one that was made large."""
    seed: int
    shape: Shape
    document: dict[str, Any]

    def recipe(self, seed: int = 0) -> Recipe:
        return parse({**self.document, "run": {**self.document["run"], "seed": seed}})

    def task(self) -> Layered:
        return Layered(self.shape, self.seed)

    def run(self, seed: int = 0) -> tuple[float, State]:
        """Suboptimality, the mean over the last steps, and where the run ended."""
        _, state = simulate(self.recipe(seed), task=self.task())
        return mean_of_recent(state)["suboptimality"], state

    def diagnose(self, seed: int = 0, users: int = 24) -> Diagnosis:
        draws = 1 if self.document["local"].get("batch_size") is None else 3
        return diagnose(self.recipe(seed), self.run(seed)[1], users, draws, seed, self.task())

    def changed(self, settings: tuple[str, ...]) -> Trial:
        """The same trial with `section.key=value` changes, as advice gives them."""
        document = copy.deepcopy(self.document)
        for setting in settings:
            path, _, value = setting.partition("=")
            *sections, key = path.split(".")
            place = document
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = yaml.safe_load(value)
        return replace(self, document=document)


def trial(cause: str, seed: int) -> Trial:
    """A run with every cause in some measure and this one large."""
    draw = np.random.default_rng([seed, CAUSES.index(cause)])
    users = int(draw.integers(40, 61))
    layers = {"first": int(draw.integers(10, 41)), "second": int(draw.integers(40, 161))}
    shape = Shape(layers, users, distance=1.0, between=float(draw.uniform(0.1, 0.3)), uneven=0.2)
    length = (sum(layers.values())) ** 0.5
    document: dict[str, Any] = {
        "task": {"kind": "convex/quadratics", "users": users, "dimension": 1, "rank": 1},
        "sampling": {"kind": "poisson", "cohort": users // 2},
        "local": {"steps": 2, "learning_rate": 0.2},
        "bounding": {"rule": "clip", "bound": float(draw.uniform(0.5, 1.0)) * length},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": float(draw.uniform(0.01, 0.05)), "delta": 1e-5},
        "central": {"kind": "sgd", "learning_rate": float(draw.uniform(0.4, 0.6))},
        "evaluation": {"every": 1000, "last": 5},
        "run": {"steps": int(draw.integers(50, 91))},
    }
    large = float(draw.uniform(1.0, 2.0))
    if cause == "optimisation":
        document["central"]["learning_rate"] = 3.0 / document["run"]["steps"] / large
    if cause == "drift":
        shape = replace(shape, between=0.5 * large, uneven=0.6)
        document["local"] = {"steps": int(draw.integers(10, 21)), "learning_rate": 0.15}
        document["sampling"]["cohort"] = users - 1
        document["bounding"]["bound"] = 5 * length * large
        document["privacy"]["noise_multiplier"] = 0.005
    if cause == "clipping":
        shape = replace(shape, between=0.5 * large, uneven=0.6)
        document["local"] = {"steps": 1, "learning_rate": 0.3}
        document["sampling"]["cohort"] = users - 1
        document["bounding"]["bound"] = 0.05 * length
        document["central"]["learning_rate"] *= 6
    if cause == "users":
        shape = replace(shape, between=large)
        document["sampling"]["cohort"] = int(draw.integers(4, 8))
        document["bounding"]["bound"] = 5 * length
        document["privacy"]["noise_multiplier"] = 0.01
    if cause == "batches":
        shape = replace(shape, between=0.05, examples=6, within=2 * large, users=16)
        document["task"]["users"] = 16
        document["sampling"]["cohort"] = 6
        document["local"] = {"steps": 1, "learning_rate": 0.4, "batch_size": 1}
        document["bounding"]["bound"] = 10 * length
        document["privacy"]["noise_multiplier"] = 0.005
        document["run"]["steps"] = 25
    if cause == "noise":
        document["privacy"]["noise_multiplier"] = 3 * large
    return Trial(cause, seed, shape, document)


def without(given: Trial, cause: str) -> Trial:
    """The same trial with one cause taken away."""
    document, shape = copy.deepcopy(given.document), given.shape
    users, cohort = shape.users, document["sampling"]["cohort"]
    if cause == "optimisation":
        shape = replace(shape, distance=0.0)
    if cause == "drift":
        steps, rate = document["local"]["steps"], document["local"]["learning_rate"]
        curves = given.task().curvature[:, 0].numpy()
        taken = (1 - (1 - rate * curves) ** steps) / (rate * steps * curves)  # what all steps are of one long one
        document["local"] |= {"steps": 1, "learning_rate": rate * steps}
        document["central"]["learning_rate"] *= float(taken.mean())
        # Bound and noise stay what they were, relative to the updates.
        document["bounding"]["bound"] /= float(taken.mean())
    if cause == "clipping":
        document["bounding"]["bound"] *= 1e4
        document["privacy"]["noise_multiplier"] *= 1e-4
        document["central"]["learning_rate"] *= _clip_factor(given)
        document["privacy"]["noise_multiplier"] /= _clip_factor(given)
    if cause == "users":
        document["sampling"]["cohort"] = users
        document["privacy"]["noise_multiplier"] *= users / cohort
        shape = replace(shape, within=shape.within * (users / cohort) ** 0.5)
    if cause == "batches":
        document["local"].pop("batch_size", None)
    if cause == "noise":
        document["privacy"] = {"mechanism": "none"}
    return replace(given, shape=shape, document=document)


def _clip_factor(given: Trial) -> float:
    """By how much clipping shortens updates at the end of the run; without it steps should be as long as with it."""
    _, state = given.run()
    task, recipe = given.task(), given.recipe()
    found = task.fast_updates(
        task.layout.views(state.parameters), np.arange(given.shape.users), recipe.local, recipe.local.rate(0)
    )
    if found is None or recipe.bounding.bound is None:
        return 1.0
    return float((recipe.bounding.bound / found.norms.norm(dim=1)).clamp(max=1.0).mean())


def costs(given: Trial, seeds: int = 2) -> dict[str, float]:
    """What each cause costs: the final suboptimality less that without it."""
    whole = _mean(given, seeds)
    return {cause: whole - _mean(without(given, cause), seeds) for cause in CAUSES}


def known(given: Trial, seeds: int = 2) -> str | None:
    """The cause that costs the most, if it is clear."""
    found = costs(given, seeds)
    first, second = sorted(found, key=lambda each: -found[each])[:2]
    return first if found[first] > CLEAR * max(found[second], 0.0) and found[first] > 0 else None


def _mean(given: Trial, seeds: int) -> float:
    return sum(given.run(seed)[0] for seed in range(seeds)) / seeds
