"""Several runs side by side: their metrics with intervals, and which differences are real.

Runs are only compared where the content of their test sets is the same; the intervals of their differences are paired.
`confide.federated.intervals` says how a difference is judged. The judgement is about these models: a recipe that is
trained again with another seed gives another model, and only several seeds say how far apart two recipes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from confide.build import make_task
from confide.errors import UserError
from confide.federated import items as scores
from confide.federated.intervals import LEVEL, Difference, difference, holm, interval
from confide.federated.items import Items
from confide.privacy.accountant import protection, shown
from confide.recipe import Recipe
from confide.runs import beginning
from confide.runs import folder as runs
from confide.runs.beginning import Beginning, score_model
from confide.runs.parameters import load_parameters_of

REAL = 0.05


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared."""

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
    def against_start(self) -> str:
        """Whether the run ended better than it began, in words; empty where that is not on record."""
        return "where it began was not recorded" if self.beginning is None else self.beginning.said(self.value)

    @property
    def shown(self) -> tuple[str, str, str]:
        """The value, its interval and epsilon, as a table shows them."""
        spent = self.summary["epsilon"]
        return (
            "not finite" if self.value is None else f"{self.value:.4g}",
            "" if self.interval is None else f"{self.interval[0]:.4g} to {self.interval[1]:.4g}",
            "no guarantee" if spent is None else shown(spent),
        )

    @property
    def protection(self) -> str:
        """Its epsilon on the scale of words."""
        return protection(*(self.summary[name] for name in ("epsilon", "delta", "population")))


@dataclass(frozen=True)
class Pair:
    """Two runs on one test set, by their places."""

    first: int
    second: int
    difference: Difference
    p: float
    """Raised for the number of pairs (Holm)."""

    @property
    def real(self) -> bool:
        return self.p < REAL


@dataclass(frozen=True)
class Comparison:
    runs: tuple[ComparedRun, ...]
    pairs: tuple[Pair, ...]
    recipes: dict[str, tuple[str, ...]]
    """Settings in which the recipes differ, with the value of each run."""
    notes: tuple[str, ...]

    def verdict(self, pair: Pair) -> str:
        """A pair in a sentence."""
        one, two, gap = self.runs[pair.first], self.runs[pair.second], pair.difference
        items = one.items
        if items is None or gap.value == 0 or not pair.real:
            return f"no difference is shown between {one.name} and {two.name}"
        better = two if (gap.value > 0) == (items.better == "higher") else one
        worse = one if better is two else two
        return f"{better.name} is better than {worse.name}"

    def words_of(self, pair: Pair) -> tuple[tuple[str, str], tuple[str, str]]:
        """What the first is beside the second and the other way round: better, worse or not shown; and that again."""
        items, gap = self.runs[pair.first].items, pair.difference.value
        if items is None or gap == 0 or not pair.real:
            return ("not shown", "not shown"), ("soft", "soft")
        second = (gap > 0) == (items.better == "higher")
        size = f"by {abs(gap):.3g}"
        words = (f"worse {size}", f"better {size}") if second else (f"better {size}", f"worse {size}")
        return words, ("worse", "better") if second else ("better", "worse")

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "run": str(run.folder), "metric": run.metric, "value": run.value,
                    "interval": None if run.interval is None else list(run.interval), "level": LEVEL,
                    "test": None if run.items is None else run.items.test,
                    **{name: run.summary[name] for name in _FIELDS}, "unit": run.summary.get("unit"),
                    "start": run.summary.get("start"),
                }
                for run in self.runs
            ],
            "pairs": [
                {
                    "first": str(self.runs[p.first].folder), "second": str(self.runs[p.second].folder),
                    "difference": p.difference.value, "interval": [p.difference.low, p.difference.high],
                    "p": p.difference.p, "p_adjusted": p.p, "units": p.difference.units, "real": p.real,
                    "verdict": self.verdict(p),
                }
                for p in self.pairs
            ],
            "recipes": {name: list(values) for name, values in self.recipes.items()},
            "notes": list(self.notes),
        }  # fmt: skip


_FIELDS = (
    "task", "metrics", "epsilon", "delta", "accountant", "noise_multiplier", "cohort", "population", "steps", "seconds",
    "seed", "recipe",
)  # fmt: skip


def compare(folders: Sequence[Path]) -> Comparison:
    """Read finished runs and hold them against each other."""
    if len({folder.resolve() for folder in folders}) < 2:
        raise UserError(f"{len(set(folders))} run was given; expected two or more different ones to compare")
    notes: list[str] = []
    found = [_read_run(folder, name, notes) for folder, name in zip(folders, _shortest_names(folders), strict=True)]
    pairs = _compare_pairs(found)
    notes += _explain_incomparable(found)
    notes += _units_of(found) + _unequal_epsilons(found)
    if pairs:
        units = min(p.difference.units for p in pairs)
        if units < 6:
            notes.append(f"{units} independent test units are too few to call any difference real at {REAL:.0%}")
        notes.append(
            "judged are these models; trained again with another seed they would differ too, so compare recipes over "
            "several seeds"
        )
    return Comparison(tuple(found), tuple(pairs), _recipe_differences([run.recipe for run in found]), tuple(notes))


def main_metric(summary: dict[str, Any]) -> str:
    """The metric that sums the task up; runs from before it was recorded have it first."""
    return str(summary.get("metric") or next(iter(summary["metrics"])))


def items_of(folder: Path, recipe: Recipe) -> Items | None:
    """How a finished run answered each test item; scored now, and kept, where that is not on record."""
    held = scores.read(folder)
    if held is not None:
        return held
    task = make_task(recipe.task, recipe.run.seed)
    _, found = score_model(task, load_parameters_of(folder, task))
    if found is not None:
        scores.write(folder, found)
    return found


def _units_of(found: Sequence[ComparedRun]) -> list[str]:
    """Say what is protected, where an epsilon is stated: those of unlike units cannot be compared."""
    private = [run for run in found if run.summary["epsilon"] is not None]
    units = {
        run.name: str(run.summary.get("unit", {}).get("name", "user, of which no more is said")) for run in private
    }
    if len(set(units.values())) < 2:
        return [f"epsilon is for every {unit}" for unit in set(units.values())]
    listed = "; ".join(f"{name}: {unit}" for name, unit in units.items())
    return [f"epsilons are for unlike units and cannot be compared ({listed})"]


def _unequal_epsilons(found: Sequence[ComparedRun]) -> list[str]:
    """Warn where runs spent unlike epsilons: what is better may have paid for it with its users' privacy."""
    spent = {run.name: run.summary["epsilon"] for run in found}
    known = [value for value in spent.values() if value is not None]
    if not known or (len(known) == len(spent) and max(known) <= 1.05 * min(known)):
        return []
    listed = ", ".join(f"{name} {'none' if value is None else shown(value)}" for name, value in spent.items())
    return [f"warning: the runs spent unlike epsilons ({listed}): a run that is better may have paid with privacy"]


def _read_run(folder: Path, name: str, notes: list[str]) -> ComparedRun:
    recipe = runs.held_recipe(folder)
    summary = runs.summary_if_finished(folder)
    if summary is None:
        raise UserError(f"{folder} is not finished; go on with `confide resume {folder}`, or leave it out")
    items = None
    try:
        items = items_of(folder, recipe)
        if items is None:
            notes.append(f"{name} has no test items: its difference to others cannot be judged")
    except UserError as error:
        notes.append(f"{name} could not be scored item by item ({error}); its differences cannot be judged")
    between = None if items is None else interval(items)
    return ComparedRun(name, folder, recipe, summary, items, between, beginning.read(folder))


def _compare_pairs(found: Sequence[ComparedRun]) -> list[Pair]:
    """All pairs on one test set, with p-values raised for their number."""
    places, gaps = [], []
    for i, j in combinations(range(len(found)), 2):
        one, two = found[i].items, found[j].items
        if one is not None and two is not None and (one.test, one.metric) == (two.test, two.metric):
            places.append((i, j))
            gaps.append(difference(one, two))
    raised = holm([gap.p for gap in gaps])
    return [Pair(i, j, gap, p) for (i, j), gap, p in zip(places, gaps, raised, strict=True)]


def _explain_incomparable(found: Sequence[ComparedRun]) -> list[str]:
    """What is not compared, and why."""
    tests: dict[tuple[str, str], list[str]] = {}
    for run in found:
        if run.items is not None:
            tests.setdefault((run.items.metric, run.items.test), []).append(run.name)
    if len(tests) < 2:
        return []
    sets = "; ".join(f"{', '.join(names)} ({metric}, test set {test})" for (metric, test), names in tests.items())
    return [f"not comparable, because their test sets or metrics differ: {sets}"]


def _recipe_differences(recipes: Sequence[Recipe]) -> dict[str, tuple[str, ...]]:
    flat = [_flatten(recipe.model_dump(mode="json", exclude={"description", "chosen"})) for recipe in recipes]
    rows = {name: tuple(each.get(name, "") for each in flat) for own in flat for name in own}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _flatten(document: dict[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= _flatten(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = "none" if value is None else str(value)
    return found


def _shortest_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]
