"""What `confide compare` holds against each other: runs, and groups of runs that differ in nothing but their seed.

A group is what a recipe is worth, and not one model of it. Its value is the mean over seeds, with a t interval. Two
groups with the same seeds are paired by seed, so that what makes a seed hard for both cancels; others are compared by
Welch's test. Only values of one test set are held against each other; where a seed decides the test set too, they are
so by pairing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Protocol

from confide.federated.intervals import Difference, difference, difference_of_means, holm, interval_of_mean
from confide.federated.items import Items
from confide.privacy.accountant import Strength, protection, rated, strength
from confide.recipe import Recipe
from confide.runs.beginning import Beginning

REAL = 0.05
_LONGEST_NAME = 60
_NOT_THE_RECIPE = {"description", "chosen"}


class Side(Protocol):
    """One of those that are compared."""

    @property
    def name(self) -> str: ...

    @property
    def better(self) -> Literal["higher", "lower"] | None:
        """Which way the metric is good; none where nobody says."""
        ...

    @property
    def value(self) -> float | None: ...

    @property
    def interval(self) -> tuple[float, float] | None: ...

    @property
    def epsilon(self) -> float | None:
        """None without a guarantee."""
        ...

    @property
    def terms(self) -> tuple[float | None, float | None, int]:
        """Epsilon, delta and how many users there are: what the scale of words takes."""
        ...


class _Shown:
    @property
    def shown(self: Side) -> tuple[str, str, str]:
        """The value, its interval and epsilon with its word, as a table shows them."""
        return (
            "not finite" if self.value is None else f"{self.value:.4g}",
            "" if self.interval is None else f"{self.interval[0]:.4g} to {self.interval[1]:.4g}",
            rated(*self.terms),
        )

    @property
    def strength(self: Side) -> Strength:
        return strength(*self.terms)

    @property
    def protection(self: Side) -> str:
        """Its epsilon on the scale of words."""
        return protection(*self.terms)

    @property
    def delta_shown(self: Side) -> str:
        """Empty without a guarantee."""
        epsilon, delta, _ = self.terms
        return "" if epsilon is None or delta is None else f"{delta:g}"


@dataclass(frozen=True)
class ComparedRun(_Shown):
    """One run, judged on its test items."""

    name: str
    folder: Path
    recipe: Recipe
    summary: dict[str, Any]
    items: Items | None
    interval: tuple[float, float] | None
    beginning: Beginning | None = None

    @property
    def metric(self) -> str:
        return main_metric(self.summary)

    @property
    def value(self) -> float | None:
        found: float | None = self.summary["metrics"][self.metric]
        return found

    @property
    def epsilon(self) -> float | None:
        found: float | None = self.summary["epsilon"]
        return found

    @property
    def better(self) -> Literal["higher", "lower"] | None:
        if self.items is not None:
            return self.items.better
        return None if self.beginning is None else self.beginning.better

    @property
    def against_start(self) -> str:
        """Whether the run ended better than it began, in words; empty where that is not on record."""
        return "where it began was not recorded" if self.beginning is None else self.beginning.said(self.value)

    @property
    def terms(self) -> tuple[float | None, float | None, int]:
        return self.summary["epsilon"], self.summary["delta"], self.summary["population"]

    @property
    def test(self) -> object:
        """What its value can be held against: the test set by its content, or by the recipe where it has no items."""
        return (self.metric, self.recipe.task.model_dump_json() if self.items is None else self.items.test)


@dataclass(frozen=True)
class Group(_Shown):
    """Runs of one recipe with different seeds."""

    name: str
    runs: tuple[ComparedRun, ...]
    """In the order of their seeds."""

    @property
    def values(self) -> dict[int, float]:
        """The metric by seed, where it is finite."""
        return {run.recipe.run.seed: run.value for run in self.runs if run.value is not None}

    @property
    def metric(self) -> str:
        return self.runs[0].metric

    @property
    def better(self) -> Literal["higher", "lower"] | None:
        return self.runs[0].better

    @property
    def value(self) -> float | None:
        known = list(self.values.values())
        return sum(known) / len(known) if len(known) == len(self.runs) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        known = list(self.values.values())
        return interval_of_mean(known) if len(known) == len(self.runs) > 1 else None

    @property
    def epsilon(self) -> float | None:
        spent = [run.epsilon for run in self.runs]
        return None if None in spent else max(each for each in spent if each is not None)

    @property
    def terms(self) -> tuple[float | None, float | None, int]:
        """As of the seed that protects least."""
        deltas = [run.summary["delta"] for run in self.runs if run.summary["delta"] is not None]
        most = max(run.summary["population"] for run in self.runs)
        return self.epsilon, max(deltas, default=None), most

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.name, "runs": [str(run.folder) for run in self.runs],
            "seeds": [run.recipe.run.seed for run in self.runs], "metric": self.metric,
            "values": [run.value for run in self.runs], "mean": self.value,
            "interval": None if self.interval is None else list(self.interval), "epsilon": self.epsilon,
        }  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two runs on one test set, or two groups, by their places."""

    first: int
    second: int
    difference: Difference
    p: float
    """Raised for the number of pairs (Holm)."""

    @property
    def real(self) -> bool:
        return self.p < REAL


def main_metric(summary: dict[str, Any]) -> str:
    """The metric that sums the task up; runs from before it was recorded have it first."""
    return str(summary.get("metric") or next(iter(summary["metrics"])))


def pairs_of_runs(found: Sequence[ComparedRun]) -> list[Pair]:
    """All pairs of runs on one test set, with p-values raised for their number."""
    gaps = {}
    for (i, first), (j, second) in combinations(enumerate(found), 2):
        if first.items is not None and second.items is not None and first.test == second.test:
            gaps[i, j] = difference(first.items, second.items)
    return _raised(gaps)


def pairs_of_groups(groups: Sequence[Group]) -> list[Pair]:
    """All pairs of groups whose values can be compared, with p-values raised for their number."""
    gaps = {}
    for (i, first), (j, second) in combinations(enumerate(groups), 2):
        if _comparable(first, second):
            gaps[i, j] = difference_of_means(first.values, second.values)
    return _raised(gaps)


def groups_of(found: Sequence[ComparedRun], notes: list[str], always: bool = False) -> tuple[Group, ...]:
    """The runs by recipe, where there are several recipes and some run of another seed, or always; else nothing."""
    by_recipe: dict[str, dict[int, ComparedRun]] = {}
    repeated = []
    for run in found:
        own = by_recipe.setdefault(_without_seed(run.recipe), {})
        if run.recipe.run.seed in own:
            repeated.append(run.name)
        own.setdefault(run.recipe.run.seed, run)
    if not always and (len(by_recipe) < 2 or all(len(own) == 1 for own in by_recipe.values())):
        return ()
    if repeated:
        notes.append(f"of runs with the same recipe and seed the first counts; left out of groups: {_list(repeated)}")
    grouped = [tuple(own[seed] for seed in sorted(own)) for own in by_recipe.values()]
    names = _names(grouped)
    groups = tuple(Group(name, runs) for name, runs in zip(names, grouped, strict=True))
    alone = [group.name for group in groups if len(group.runs) == 1]
    if alone:
        notes.append(f"one seed alone says nothing of a recipe; train others of {'; '.join(alone)} to have it judged")
    return groups


def recipe_differences(recipes: Sequence[Recipe]) -> dict[str, tuple[str, ...]]:
    """Settings in which recipes differ, with the value of each."""
    flat = [_flatten(recipe.model_dump(mode="json", exclude=_NOT_THE_RECIPE)) for recipe in recipes]
    rows = {name: tuple(each.get(name, "") for each in flat) for own in flat for name in own}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _raised(gaps: dict[tuple[int, int], Difference]) -> list[Pair]:
    raised = holm([gap.p for gap in gaps.values()])
    return [Pair(i, j, gap, p) for ((i, j), gap), p in zip(gaps.items(), raised, strict=True)]


def _comparable(first: Group, second: Group) -> bool:
    """Whether both have seeds enough, a metric whose good direction is known, and one test set, at least by seed."""
    if first.value is None or second.value is None or first.better is None:
        return False
    if min(len(first.runs), len(second.runs)) < 2:
        return False
    if first.values.keys() == second.values.keys():
        return all(one.test == two.test for one, two in zip(first.runs, second.runs, strict=True))
    return len({run.test for run in (*first.runs, *second.runs)}) == 1


def _without_seed(recipe: Recipe) -> str:
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": 0}), "description": ""}).digest


def _names(groups: Sequence[Sequence[ComparedRun]]) -> list[str]:
    """What tells groups apart: the settings that differ, or else what the names of their runs have in common."""
    differing = recipe_differences([runs[0].recipe for runs in groups])
    differing.pop("run.seed", None)
    short = {name: name.rpartition(".")[2] for name in differing}
    keys = {name: end if list(short.values()).count(end) == 1 else name for name, end in short.items()}
    names = [
        ", ".join(f"{keys[name]}={values[place]}" for name, values in differing.items() if values[place])
        for place in range(len(groups))
    ]
    if all(name and len(name) <= _LONGEST_NAME for name in names):
        return names
    common = [os.path.commonprefix([run.name for run in runs]).strip("-_/. ") for runs in groups]  # noqa: RUF071
    common = [name.removesuffix("seed").strip("-_/. ") for name in common]
    if len(set(common)) == len(groups) and all(common):
        return common
    return [f"recipe {_without_seed(runs[0].recipe)[:8]}" for runs in groups]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _flatten(document: dict[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= _flatten(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = "none" if value is None else str(value)
    return found
