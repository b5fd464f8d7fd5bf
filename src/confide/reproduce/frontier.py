"""What does privacy cost, with the people one has? Error against epsilon, measured, and planned between and beyond.

Each recipe is trained at every epsilon that is asked for, and once without noise. A run's error depends on the noise
on the average of the cohort, s = z / S, and not on how that noise came about (PFL-ASR appendix H.1). So between the
measured points the planner finds the s of any other epsilon, and the error is read off the measured ones; and for a
larger population, whose cohort grows with it, the same s buys a smaller epsilon. Nothing is drawn outside of what was
measured: at less noise than the least, the curve goes on to the run without noise, and at more than the most it ends.

Delta falls as the population grows, so that the expected number of people whom it leaves out stays the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from confide import recipe as recipes
from confide.errors import UserError
from confide.federated.items import in_words
from confide.files import write_atomically
from confide.privacy import planner
from confide.privacy.accountant import rated, shown, strength
from confide.recipe import Recipe
from confide.report.charts import Chart, Line
from confide.report.shell import Cell, document, table
from confide.reproduce.grid import cached_task, run_groups, text_table, write_rows
from confide.runs.beginning import score_model
from confide.runs.folder import finite
from confide.runs.simulation import simulate

EPSILONS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.7, 8.0, 11.3, 16.0)
"""Where curves have points."""
FACTORS = (1, 4, 16)
_WIDE = 8
"""Where one recipe's worst is above so many times another's best, the scale is logarithmic."""
_DOTS = "Large dots were trained; curves follow from the noise that the planner finds."


@dataclass(frozen=True)
class Spot:
    """One recipe at one epsilon, as it was trained."""

    recipe: str
    epsilon: float | None
    """As trained; none without noise."""
    values: tuple[float, ...]
    """The task's metric on its test set, for each seed."""
    metric: str
    noise_multiplier: float
    cohort: int
    population: int
    steps: int
    delta: float | None
    poisson: bool

    @property
    def value(self) -> float:
        return mean(self.values)

    @property
    def rated(self) -> str:
        """Its epsilon with its word."""
        return "no privacy" if self.epsilon is None else rated(self.epsilon, self.delta, self.population)

    @property
    def noise(self) -> float:
        """s, the noise on the average."""
        return self.noise_multiplier / self.cohort


@dataclass(frozen=True)
class Frontier:
    """Measured spots of one or more recipes, with the curves through them."""

    spots: tuple[Spot, ...]

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(spot.recipe for spot in self.spots))

    def of(self, recipe: str) -> list[Spot]:
        return [spot for spot in self.spots if spot.recipe == recipe]

    def curve(self, recipe: str, factor: int) -> list[tuple[float, float]]:
        """Pairs of epsilon and error for a population `factor` times as large, where the planner can say."""
        return [(epsilon, found) for epsilon in EPSILONS if (found := self.at(recipe, epsilon, factor)) is not None]

    def at(self, recipe: str, epsilon: float, factor: int = 1) -> float | None:
        """The error that the measured spots lead to expect at this epsilon; none outside of what they say."""
        spots = sorted(self.of(recipe), key=lambda spot: spot.noise)
        one = spots[-1]
        if one.epsilon is None or one.delta is None or not one.poisson:
            return None
        z = _noise(epsilon, one.cohort * factor, one.population * factor, one.steps, one.delta / factor)
        if z is None:
            return None
        s = z / (one.cohort * factor)
        known = [spot.noise for spot in spots]
        if not known[0] * (1 - 1e-6) <= s <= known[-1] * (1 + 1e-6):
            return None
        return float(np.interp(s, known, [spot.value for spot in spots]))

    def to_json(self) -> dict[str, Any]:
        curves = [
            {"recipe": recipe, "population": self.of(recipe)[0].population * factor, "points": curve}
            for recipe in self.recipes
            for factor in FACTORS
            if (curve := self.curve(recipe, factor))
        ]
        return {"measured": [asdict(spot) | {"value": spot.value} for spot in self.spots], "curves": curves}

    def text(self) -> str:
        """The measured spots as a table, for a terminal."""
        rows = [
            {
                "recipe": spot.recipe, "epsilon": spot.rated,
                "delta": "" if spot.epsilon is None else f"{spot.delta:g}", spot.metric: f"{spot.value:.2f}",
                "runs": len(spot.values), "users": f"{spot.population:,}", "cohort": f"{spot.cohort:,}",
            }
            for spot in self.spots
        ]  # fmt: skip
        return "\n".join(text_table(rows, list(rows[0])))


def measure_frontier(
    names: Sequence[str], overrides: Sequence[str], epsilons: Sequence[float], seeds: int, out: Path, workers: int,
    quiet: bool = False,
) -> Frontier:  # fmt: skip
    """Train every recipe without noise and at each epsilon, and write rows, page and figure into `out`.

    Finished runs are kept there, so that the same command goes on after a stop.
    """
    bases = [recipes.load(name, overrides) for name in names]
    levels = (None, *sorted(set(epsilons), reverse=True))
    wanted = [
        (name, [_at(base, level, seed) for seed in range(seeds)])
        for name, base in zip(names, bases, strict=True)
        for level in levels
    ]
    found = run_groups(out, [cells for _, cells in wanted], _measure, workers, "runs", quiet)
    spots = tuple(_spot(name, values) for (name, _), values in zip(wanted, found, strict=True))
    frontier = Frontier(spots)
    write_frontier(frontier, out)
    return frontier


def write_frontier(frontier: Frontier, out: Path) -> Path:
    """Write rows.csv, frontier.json, frontier.html and, where matplotlib is, frontier.png; the page's path."""
    write_rows(out, [{**asdict(spot), "value": spot.value} for spot in frontier.spots])
    write_atomically(out / "frontier.json", (json.dumps(frontier.to_json(), indent=2) + "\n").encode())
    if find_spec("matplotlib") is not None:
        from confide.report.figures.frontier import draw_frontier

        draw_frontier(out / "frontier.png", charts(frontier))
    page = out / "frontier.html"
    write_atomically(page, document("What privacy costs", [*page_parts(frontier)]).encode())
    return page


def page_parts(frontier: Frontier) -> list[str]:
    """The figure with its sentence and table, as parts of a page."""
    rows: list[list[Cell]] = [
        [
            spot.recipe, (spot.epsilon or math.inf, spot.rated, strength(spot.epsilon, spot.delta, spot.population)),
            "" if spot.epsilon is None else f"{spot.delta:g}",
            (spot.value, f"{spot.value:.4g}"), (len(spot.values), str(len(spot.values))),
            (spot.cohort, f"{spot.cohort:,}"), (spot.population, f"{spot.population:,}"),
        ]
        for spot in frontier.spots
    ]  # fmt: skip
    metric = frontier.spots[0].metric
    heads = ["recipe", "epsilon as trained", "delta", in_words(metric), "runs", "cohort", "users"]
    return [
        "<h1>What privacy costs</h1>",
        *(f"<p>{sentence}</p>" for sentence in sentences(frontier)),
        f"<div class=charts>{''.join(chart.svg() for chart in charts(frontier))}</div>",
        f"<h2>Measured</h2><div class=scroll>{table(heads, rows)}</div>",
    ]


def charts(frontier: Frontier) -> list[Chart]:
    """Measured dots, and the curves that the planner draws through them.

    One recipe has one chart, with a curve for each population. Several have a chart for each population, so that they
    can be told apart.
    """
    metric = frontier.spots[0].metric
    name = in_words(metric)
    if len(frontier.recipes) == 1:
        (recipe,) = frontier.recipes
        lines = [_trained(frontier, recipe), *(_planned(frontier, recipe, factor) for factor in FACTORS)]
        free = [spot.value for spot in frontier.spots if spot.epsilon is None]
        said = f"{_DOTS} The thin line is without privacy." if free else _DOTS
        return [_chart(name, said, lines, free[0] if free else None)]
    found = []
    values = [spot.value for spot in frontier.spots]
    log = max(values) > _WIDE * min(values) > 0
    for factor in FACTORS:
        lines = [_planned(frontier, recipe, factor, place) for place, recipe in enumerate(frontier.recipes)]
        if factor == 1:
            lines += [_trained(frontier, recipe, place) for place, recipe in enumerate(frontier.recipes)]
        people = " or ".join(sorted({f"{spot.population * factor:,}" for spot in frontier.spots}))
        said = _DOTS if factor == 1 else "Nothing was trained with so many: curves follow from the planner's noise."
        found.append(_chart(f"{name}, {people} users", said, lines, log=log))
    return [chart for chart in found if chart.lines]


def _chart(title: str, said: str, lines: Sequence[Line], level: float | None = None, log: bool = False) -> Chart:
    drawn = [line for line in lines if len(line.xs)]
    from_zero = "accuracy" not in title and not log
    return Chart(title, said, drawn, x="epsilon", log_x=True, log=log, from_zero=from_zero, level=level)


def _trained(frontier: Frontier, recipe: str, place: int | None = None) -> Line:
    spots = [spot for spot in frontier.of(recipe) if spot.epsilon]
    who = f"{frontier.of(recipe)[0].population:,} users" if place is None else recipe
    return Line(f"{who}, trained", [spot.epsilon or 0.0 for spot in spots], [spot.value for spot in spots],
                place or 0, dots=True)  # fmt: skip


def _planned(frontier: Frontier, recipe: str, factor: int, place: int | None = None) -> Line:
    curve = frontier.curve(recipe, factor)
    who = f"{frontier.of(recipe)[0].population * factor:,} users" if place is None else recipe
    colour = FACTORS.index(factor) if place is None else place
    return Line(f"{who}, planned", [x for x, _ in curve], [y for _, y in curve], colour, dashed=factor > 1)


def sentences(frontier: Frontier) -> list[str]:
    """What privacy costs each recipe, in words."""
    found = []
    for recipe in frontier.recipes:
        spots = frontier.of(recipe)
        free = next((spot for spot in spots if spot.epsilon is None), None)
        least = min((spot for spot in spots if spot.epsilon), key=lambda spot: spot.epsilon or 0.0, default=None)
        if free is None or least is None:
            continue
        what = in_words(free.metric).removesuffix(", %")
        found.append(
            f"{recipe}: with {least.population:,} users, epsilon {shown(least.epsilon)} at delta {least.delta:g} "
            f"moves the {what} from {free.value:.3g} to {least.value:.3g}."
        )
    return found


def spot_of_run(name: str, summary: dict[str, Any]) -> Spot:
    """A finished run as a spot."""
    metric, trained = summary["metric"], summary["epsilon"] if summary["mechanism"] != "none" else None
    return Spot(
        name, trained, (summary["metrics"][metric],), metric, summary["noise_multiplier"], summary["cohort"],
        summary["population"], summary["steps"], summary["delta"], summary["sampler"] == "poisson",
    )  # fmt: skip


def _at(base: Recipe, epsilon: float | None, seed: int) -> Recipe:
    """The recipe at this epsilon, or without noise."""
    changed = base.model_dump(mode="json")
    changed["run"]["seed"] = seed
    if epsilon is None:
        changed["privacy"] = {"mechanism": "none"}
        return recipes.parse(changed)
    if base.privacy.mechanism == "none" or base.privacy.delta is None:
        raise UserError(
            "privacy.mechanism=none: the recipe has no noise to vary; give a private recipe, or --set "
            "'privacy={mechanism: gaussian, target_epsilon: 8, delta: 1e-5}'"
        )
    changed["privacy"] |= {"target_epsilon": epsilon, "noise_multiplier": None, "noise_scale": None}
    return recipes.parse(changed)


def _measure(cell: Recipe) -> dict[str, Any]:
    loop, state = simulate(cell, cached_task(cell.task, cell.run.seed))
    metrics, _ = score_model(loop.task, loop.layout.views(loop.final.model(state)))
    plan = loop.plan
    return {
        "metric": loop.task.metric, "value": metrics[loop.task.metric],
        "epsilon": finite(plan.epsilon(plan.charges(plan.steps))), "noise_multiplier": plan.event.noise_multiplier,
        "cohort": plan.cohort_size, "population": len(plan.weights), "steps": plan.steps, "delta": plan.delta,
        "poisson": plan.sampler == "poisson",
    }  # fmt: skip


def _spot(name: str, values: list[dict[str, Any]]) -> Spot:
    one = values[0]
    spent = [each["epsilon"] for each in values if each["epsilon"] is not None]
    return Spot(
        name, max(spent) if spent else None, tuple(each["value"] for each in values), one["metric"],
        one["noise_multiplier"], one["cohort"], one["population"], one["steps"], one["delta"], one["poisson"],
    )  # fmt: skip


@cache
def _noise(epsilon: float, cohort: int, population: int, steps: int, delta: float) -> float | None:
    try:
        return planner.noise(epsilon, cohort, population, steps, delta).point.noise_multiplier
    except UserError:
        return None
