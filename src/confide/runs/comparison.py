"""Several runs side by side: their metrics with intervals, and which differences are real.

Runs are only compared where the content of their test sets is the same; the intervals of their differences are paired.
`confide.federated.intervals` says how a difference is judged. The judgement is about these models: a recipe that is
trained again with another seed gives another model, and only several seeds say how far apart two recipes are. So runs
that differ in nothing but their seed are one group (`confide.runs.compared`), and groups are compared in place of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confide.build import make_task
from confide.errors import UserError
from confide.federated import items as scores
from confide.federated.intervals import LEVEL, interval
from confide.federated.items import Items, in_words
from confide.privacy.accountant import shown
from confide.recipe import Recipe
from confide.runs import beginning
from confide.runs import folder as runs
from confide.runs.beginning import score_model
from confide.runs.compared import (
    REAL,
    ComparedRun,
    Group,
    Pair,
    Side,
    groups_of,
    pairs_of_groups,
    pairs_of_runs,
    recipe_differences,
)
from confide.runs.parameters import load_parameters_of


@dataclass(frozen=True)
class Comparison:
    runs: tuple[ComparedRun, ...]
    groups: tuple[Group, ...]
    """Runs by recipe, where some recipe has several seeds; else none."""
    pairs: tuple[Pair, ...]
    """Of groups, where there are any; else of runs."""
    recipes: dict[str, tuple[str, ...]]
    """Settings in which the recipes differ, with the value of each side."""
    notes: tuple[str, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        """What is compared in pairs."""
        return self.groups or self.runs

    def verdict(self, pair: Pair) -> str:
        """A pair in a sentence."""
        one, two = self.sides[pair.first].name, self.sides[pair.second].name
        match self._second_is_better(pair):
            case None:
                return f"no difference is shown between {one} and {two}"
            case True:
                return f"{two} is better than {one}"
            case _:
                return f"{one} is better than {two}"

    def matrix(self) -> list[list[tuple[str, str]]]:
        """Side against side: what the one of the row is beside the one of the column, in words and as a kind."""
        size = range(len(self.sides))
        cells = [[("", "") if i == j else ("not comparable", "soft") for j in size] for i in size]
        for pair in self.pairs:
            there, back = ("not shown", "soft"), ("not shown", "soft")
            second = self._second_is_better(pair)
            if second is not None:
                by = f"by {abs(pair.difference.value):.3g}"
                there, back = (f"worse {by}", "worse"), (f"better {by}", "better")
                if not second:
                    there, back = back, there
            cells[pair.first][pair.second], cells[pair.second][pair.first] = there, back
        return cells

    def _second_is_better(self, pair: Pair) -> bool | None:
        """None where a difference is not shown."""
        way, gap = self.sides[pair.first].better, pair.difference.value
        return None if way is None or gap == 0 or not pair.real else (gap > 0) == (way == "higher")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes that nobody should miss; they come first."""
        return tuple(note for note in self.notes if note.startswith("warning: "))

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
            "groups": [group.to_json() for group in self.groups],
            "pairs": [
                {
                    "first": _called(self.sides[p.first]), "second": _called(self.sides[p.second]),
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


def compare(folders: Sequence[Path], by_recipe: bool = False) -> Comparison:
    """Read finished runs and hold them against each other, by recipe also where all have the same, or one seed each."""
    if len({folder.resolve() for folder in folders}) < 2 and not by_recipe:
        raise UserError(f"{len(set(folders))} run was given; expected two or more different ones to compare")
    notes: list[str] = []
    found = [_read_run(folder, name, notes) for folder, name in zip(folders, _shortest_names(folders), strict=True)]
    groups = groups_of(found, notes, by_recipe)
    sides: Sequence[Side] = groups or found
    pairs = pairs_of_groups(groups) if groups else pairs_of_runs(found)
    notes += _explain_groups(groups, pairs) if groups else _explain_incomparable(found)
    notes[:0] = _unequal_epsilons(sides) + _stopped_early(found)
    notes += _units_of(found)
    if pairs and groups:
        notes.append("judged are recipes over their seeds, on these test people or items: others are another question")
    elif pairs:
        units = min(p.difference.units for p in pairs)
        if units < 6:
            notes.append(f"{units} independent test units are too few to call any difference real at {REAL:.0%}")
        notes.append(
            "judged are these models; trained again with another seed they would differ too, so compare recipes over "
            "several seeds"
        )
    recipes = recipe_differences([group.runs[0].recipe for group in groups] or [run.recipe for run in found])
    if groups:
        recipes.pop("run.seed", None)
    return Comparison(tuple(found), groups, tuple(pairs), recipes, tuple(notes))


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


def _called(side: Side) -> str:
    """What JSON calls one of a pair: a run by its folder, a group by its name."""
    return str(side.folder) if isinstance(side, ComparedRun) else side.name


def _explain_groups(groups: Sequence[Group], pairs: Sequence[Pair]) -> list[str]:
    """Which groups with seeds enough are not compared, and how the others are."""
    judged = {(pair.first, pair.second) for pair in pairs}
    several = [place for place, group in enumerate(groups) if len(group.runs) > 1]
    apart = [
        f"{groups[i].name} and {groups[j].name}" for i in several for j in several if i < j and (i, j) not in judged
    ]
    if not apart:
        return []
    return [f"not comparable, because test sets or metrics differ or a value is not finite: {'; '.join(apart)}"]


def _unequal_epsilons(found: Sequence[Side]) -> list[str]:
    """Warn where runs spent unlike epsilons: what is better may have paid for it with its users' privacy."""
    spent = {side.name: side.epsilon for side in found}
    known = [value for value in spent.values() if value is not None]
    if not known or (len(known) == len(spent) and max(known) <= 1.05 * min(known)):
        return []
    listed = "; ".join(f"{name}: {'none' if value is None else shown(value)}" for name, value in spent.items())
    return [f"warning: these spent unlike epsilons ({listed}): what is better may have paid with its users' privacy"]


def _stopped_early(found: Sequence[ComparedRun]) -> list[str]:
    """Warn of runs that a budget ended: what they lack may be steps, and not better settings."""
    return [
        f"warning: {run.name} made {run.summary['steps']:,} of {run.recipe.run.steps:,} steps, since its budget was "
        "spent: what it is worse by may be the steps"
        for run in found
        if run.summary.get("stopped_by_budget")
    ]


def _read_run(folder: Path, name: str, notes: list[str]) -> ComparedRun:
    recipe = runs.held_recipe(folder)
    summary = runs.summary_if_finished(folder)
    if summary is None:
        raise UserError(f"{folder} is not finished; go on with `confide resume {folder}`, or leave it out")
    runs.check_unedited(folder, recipe)
    items = None
    try:
        items = items_of(folder, recipe)
        if items is None:
            notes.append(f"{name} has no test items: its difference to others cannot be judged")
    except UserError as error:
        notes.append(f"{name} could not be scored item by item ({error}); its differences cannot be judged")
    between = None if items is None else interval(items)
    return ComparedRun(name, folder, recipe, summary, items, between, beginning.read(folder))


def _explain_incomparable(found: Sequence[ComparedRun]) -> list[str]:
    """What is not compared, and why."""
    tests: dict[tuple[str, str], list[str]] = {}
    for run in found:
        if run.items is not None:
            tests.setdefault((run.items.metric, run.items.test), []).append(run.name)
    if len(tests) < 2:
        return []
    sets = "; ".join(
        f"{', '.join(names)} ({in_words(metric)}, test set {test})" for (metric, test), names in tests.items()
    )
    return [f"not comparable, because their test sets or metrics differ: {sets}"]


def _shortest_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]
