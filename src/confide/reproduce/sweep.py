"""A sweep: one recipe over settings and seeds, each a run in a folder of its own, and which settings to take.

Runs are those of `confide train`: they go on after a stop, charge the budget that the recipe names (`privacy.budget`),
and leave ledger and page. Settings are compared over their seeds as `confide compare` does it.

Which settings are best is chosen on people who are neither trained nor tested on, where the task can hold some of the
training people out (`TaskSection.held_out`). Settings that were chosen on the test people flatter the figure on them.

The choice itself is not covered by any guarantee: every run has seen the users, and the one that is kept says by its
settings something of what the others gave (Papernot and Steinke 2022, "Hyperparameter tuning with Renyi DP").
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from confide.errors import Stopped, UserError
from confide.files import digest
from confide.recipe import Recipe, changed_by, load
from confide.report.comparison import write_page
from confide.reproduce.grid import measure_each, train_once, write_rows
from confide.runs import folder as runs
from confide.runs.compared import Group
from confide.runs.comparison import Comparison, compare
from confide.settings import read_yaml

HELD_OUT = 20
"""Percent of the training people who are held out to choose by."""
PAGE = "comparison.html"
_MOST = 10_000
_LONGEST = 80


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    changes: tuple[str, ...]
    """What it has of its own, as --set takes it."""
    recipes: tuple[Recipe, ...]
    """One for each seed."""
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class Swept:
    """What a sweep has to say."""

    recipe: str
    fixed: tuple[str, ...]
    settings: tuple[Setting, ...]
    found: Comparison
    warnings: tuple[str, ...]
    page: Path

    @property
    def best(self) -> Group | None:
        """The best mean; none where the metric's good direction is not known or no mean is finite."""
        known = [group for group in self.found.groups if group.value is not None and group.better is not None]
        sign = -1 if known and known[0].better == "lower" else 1
        return max(known, key=lambda group: sign * (group.value or 0.0), default=None)

    @property
    def not_worse(self) -> list[str]:
        """Settings with a finite mean that the best is not shown to be better than."""
        groups, best = self.found.groups, self.best
        if best is None:
            return []
        place = groups.index(best)
        real = {frozenset((pair.first, pair.second)) for pair in self.found.pairs if pair.real}
        others = (other for other, group in enumerate(groups) if other != place and group.value is not None)
        return [groups[other].name for other in others if frozenset((place, other)) not in real]

    @property
    def command(self) -> str | None:
        """The command that trains with the best settings, on everybody the recipe trains on."""
        best = self.best
        if best is None:
            return None
        (own,) = [one for one in self.settings if best.runs[0].folder in one.folders]
        sets = " ".join(f"--set {shlex.quote(change)}" for change in (*self.fixed, *own.changes))
        return f"confide train {shlex.quote(self.recipe)} {sets} --out RUN".replace("  ", " ")

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "settings": [group.to_json() for group in self.found.groups],
            "best": None if best is None else best.name, "not_shown_to_be_worse": self.not_worse,
            "command": self.command, "warnings": list(self.warnings), "page": str(self.page),
            "pairs": self.found.to_json()["pairs"], "notes": list(self.found.notes),
        }  # fmt: skip


def sweep(
    recipe: str, sets: Sequence[str], seeds: int, out: Path, workers: int = 1, held_out: int = HELD_OUT,
    quiet: bool = False,
) -> Swept:  # fmt: skip
    """Train a recipe at every combination of settings with every seed, and compare them.

    `sets` are as `--set` takes them; `section.key=1,3,10` tries three values. Finished runs are kept, and unfinished
    ones go on. `held_out` percent of the training people are evaluated and do not train; 0 evaluates as the recipe
    does.
    """
    fixed, tried = _read(sets)
    base = load(recipe, [*fixed, *(f"{name}={values[0]}" for name, values in tried.items())])
    aside = {f"task.{key}": value for key, value in (_aside(base, held_out) or {}).items()}
    settings = _settings(base, recipe, [*fixed, *_as_sets(aside)], tried, seeds, out)
    warnings = _warnings(base, bool(aside), len(settings) * seeds)
    for warning in () if quiet else warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    folders = {cell.digest: place for one in settings for cell, place in zip(one.recipes, one.folders, strict=True)}
    cells = [cell for one in settings for cell in one.recipes]
    missing = [cell for cell in cells if runs.summary_if_finished(folders[cell.digest]) is None]
    for cell in cells:  # before any is trained: is there another run in a folder that is wanted?
        if (folders[cell.digest] / runs.RECIPE).exists():
            _check_same(folders[cell.digest], cell)
    if missing:
        out.mkdir(parents=True, exist_ok=True)
        try:
            measure = partial(_train, folders={cell.digest: folders[cell.digest] for cell in missing})
            measure_each(missing, measure, workers, "runs", quiet, lambda cell, summary: None, len(cells))
        except Stopped as stop:
            raise Stopped(f"{stop}; runs are in {out}") from None
        except UserError as error:
            if not aside or not any(word in str(error) for word in ("cohort=", "clients=")):
                raise
            raise UserError(
                f"{error}. A sweep holds {held_out} % of the training people out: lower it by --set for the sweep "
                "alone, or take --held-out 0 to evaluate as the recipe does"
            ) from None
    found = compare([folders[cell.digest] for cell in cells], by_recipe=True)
    write_rows(out, [_row(group) for group in found.groups])
    return Swept(recipe, tuple(fixed), settings, found, warnings, write_page(out / PAGE, found))


def _read(sets: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Changes that hold everywhere, and the values that are tried, each as YAML."""
    fixed, tried = [], {}
    for given in sets:
        name, equals, text = given.partition("=")
        try:
            values = read_yaml(f"[{text}]") if equals else []
        except Exception:
            values = []  # whatever is wrong with it, `load` says it
        if len(values) > 1:
            if name.strip() in ("run.seed", "run"):
                raise UserError(f"--set {given}: seeds are not tried by a list; use --seeds, and --set run.seed=FIRST")
            tried[name.strip()] = [json.dumps(value) for value in values]
        else:
            fixed.append(given)
    return fixed, tried


def _settings(
    base: Recipe, recipe: str, fixed: Sequence[str], tried: Mapping[str, list[str]], seeds: int, out: Path
) -> tuple[Setting, ...]:
    """Every combination, checked before anything is trained."""
    if seeds < 1:
        raise UserError(f"seeds={seeds}: expected at least one")
    points = list(product(*tried.values()))
    if len(points) * seeds > _MOST:
        raise UserError(f"{len(points)} settings with {seeds} seeds are more than {_MOST:,} runs; try fewer values")
    settings: dict[str, Setting] = {}
    for values in points:
        changes = tuple(f"{name}={value}" for name, value in zip(tried, values, strict=True))
        first = load(recipe, [*fixed, *changes])
        recipes = tuple(changed_by(first, [f"run.seed={base.run.seed + seed}"]) for seed in range(seeds))
        name = _folder_name(tried, values)
        folders = tuple(out / f"{name}seed{each.run.seed}" for each in recipes)
        settings.setdefault(recipes[0].digest, Setting(changes, recipes, folders))
    return tuple(settings.values())


def _folder_name(tried: Mapping[str, list[str]], values: Sequence[str]) -> str:
    """Readable where the values are: learning_rate=3-; a digest stands for what is too long or no part of a name."""
    if not tried:
        return ""
    ends = [name.rpartition(".")[2] for name in tried]
    names = [end if ends.count(end) == 1 else name for name, end in zip(tried, ends, strict=True)]
    whole = "-".join(f"{name}={value.strip(chr(34))}" for name, value in zip(names, values, strict=True))
    safe = re.sub(r"[^A-Za-z0-9=._+-]+", "_", whole)[:_LONGEST].strip("._")
    return f"{safe}-" if safe == whole else f"{safe}-{digest([*tried, *values])[:8]}-"


def _aside(base: Recipe, percent: int) -> dict[str, Any] | None:
    if percent == 0:
        return None
    if not 0 < percent < 50:
        raise UserError(f"held_out={percent}: expected a percentage from 1 to 49, or 0 to evaluate as the recipe does")
    return base.task.held_out(percent)


def _as_sets(changes: Mapping[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in changes.items()]


def _warnings(base: Recipe, aside: bool, count: int) -> tuple[str, ...]:
    """What whoever chooses by this sweep has to know."""
    found = []
    if not aside:
        found.append(
            "settings are compared on the people (or examples) that the recipe evaluates on. If these are the test "
            "people, a figure on them is flattered by the choice; have a task.test of others by --set"
        )
    if runs.mechanism_for(base).guaranteed:
        budget = base.privacy.budget
        spent = "no budget is charged (privacy.budget)" if budget is None else f"each charges {budget}"
        found.append(
            f"all {count} runs train on the users' data, and no guarantee covers the choice between them: the epsilon "
            f"of a run is for that run alone; {spent}. Choose on public or simulated data where you can"
        )
    return tuple(found)


def _check_same(place: Path, cell: Recipe) -> None:
    held = runs.held_recipe(place)
    if held.digest != cell.digest:
        raise UserError(
            f"{place} holds a run of another recipe (recipe {held.digest}, not {cell.digest}); nothing was done. Take "
            "another --out for other settings"
        )


def _train(cell: Recipe, folders: Mapping[str, Path]) -> dict[str, Any]:
    return train_once(cell, folders[cell.digest], 1, quiet=True)


def _row(group: Group) -> dict[str, Any]:
    low, high = group.interval or (None, None)
    return {
        "setting": group.name, "metric": group.metric, "mean": group.value, "low": low, "high": high,
        "seeds": len(group.runs), "epsilon": group.epsilon,
    }  # fmt: skip
