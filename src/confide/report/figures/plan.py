"""The planner's table and figure: PFL-ASR's Table 1 beside ours, and epsilon around a point.

Table 1 extrapolates. A model was trained with a cohort of 1,024 out of 34,753 users (Common Voice, English) and noise
sigma_DP = s on the average of the updates; S and K are then scaled at the same s, so that z = s S on the sum grows
(appendix H.1), "assuming the training dynamic remains unchanged". The rows below are the table's own: sigma_DP in units
of 1e-6, S, K, T and the printed epsilon at delta = 1e-9; the WER columns and the rows without noise are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from confide.errors import UserError, require
from confide.privacy import planner
from confide.privacy.accountant import Accountant
from confide.privacy.advice import NAMES, Row
from confide.privacy.planner import Answer, Noise, Point

TABLE_1 = (
    (30, 1_024, 34_753, 2_006, 1.1e6),
    (30, 10_240, 347_530, 2_006, 3.7e2),
    (30, 51_200, 1_737_650, 2_006, 6.5),
    (20, 1_024, 34_753, 2_006, 2.6e6),
    (20, 51_200, 1_737_650, 2_006, 1.3),
    (20, 102_400, 3_475_300, 2_006, 4.5),
    (10, 1_024, 34_753, 2_006, 1.1e7),
    (10, 51_200, 1_737_650, 2_006, 7.2e1),
    (10, 102_400, 3_475_300, 2_006, 1.3e1),
    (10, 204_800, 6_950_600, 2_006, 4.5),
    (3, 1_024, 34_753, 2_006, 1.2e8),
    (3, 102_400, 3_475_300, 2_006, 3.7e2),
    (3, 204_800, 6_950_600, 2_006, 4.2e1),
    (3, 204_800, 69_506_000, 2_034, 7.2),
    (3, 204_800, 695_060_000, 3_390, 3.7),
    (1, 1_024, 34_753, 2_006, 1.1e9),
    (1, 204_800, 6_950_600, 2_006, 1.1e3),
    (1, 204_800, 69_506_000, 2_034, 2.7e2),
    (1, 204_800, 695_060_000, 3_390, 9.4e1),
)
ERRATUM = "the paper prints 1.3 for sigma 20e-6, S = 51,200; the same z, rate and steps give 13 elsewhere in its table"
KINDS = {"poisson": "#57534e", "cyclic": "#c2410c", "cyclic_poisson": "#1d4ed8"}
LINES = {"rdp": ("RDP", "#c2410c"), "pld": ("PLD", "#1d4ed8")}
AXES = {"rounds": 10.0, "noise_multiplier": 4.0, "cohort": 10.0, "population": 10.0}
"""What the four curves run over, and by which factor to either side."""


@dataclass(frozen=True)
class Scaled:
    """A row: a point, what it spends, and how many users such a cohort needs for the target."""

    answer: Answer
    least_population: int | None
    """None: no population that was tried reaches the target."""
    published: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        row = {**self.answer.to_json(), "least_population": self.least_population}
        return row | {"published": self.published, "note": self.note}


def published_points(delta: float) -> list[tuple[Point, float, str]]:
    """PFL-ASR's Table 1 as points, with the printed epsilon and a note where it is wrong."""
    return [
        (Point(s * cohort / 1e6, cohort, population, rounds, delta), printed, ERRATUM if printed == 1.3 else "")
        for s, cohort, population, rounds, printed in TABLE_1
    ]


def scaled_points(point: Point, cohort_factors: Iterable[float], population_factors: Iterable[float]) -> list[Point]:
    """Scale S by one factor and K by the same one times another, at the same noise s = z / S on the average.

    Populations for which delta is above 1 / K are left out: there delta alone hides a user, and the noise nothing.
    """
    points, most = [], max(point.population, planner.most_population(point.delta))
    for factor, spread in product(cohort_factors, population_factors):
        if not (0 < factor < math.inf and 0 < spread < math.inf):
            raise UserError(f"factors {factor:g} and {spread:g}: expected finite numbers above 0")
        cohort = round(point.cohort * factor)
        z = point.noise_multiplier * cohort / point.cohort
        people = round(point.population * factor * spread)
        if people <= most:
            points.append(Point(z, cohort, people, point.rounds, point.delta))
    if not points:
        raise UserError(
            f"delta={point.delta:g} is above 1 / population for every population that was asked for; expected "
            f"populations of at most {most:,}: lower --delta, or the factors"
        )
    return points


def extrapolate(rows: Iterable[tuple[Point, float | None, str]], target: float, accountant: Accountant) -> list[Scaled]:
    """PFL-ASR's Table 1 for these points, with the smallest population within the target for each cohort."""
    return [
        Scaled(
            planner.epsilon(
                Noise(point.noise_multiplier), point.cohort, point.population, point.rounds, point.delta, accountant
            ),
            _least_population(point, target, accountant),
            published,
            note,
        )
        for point, published, note in rows
    ]


def _least_population(point: Point, target: float, accountant: Accountant) -> int | None:
    try:
        return planner.population(
            target, Noise(point.noise_multiplier), point.cohort, point.rounds, point.delta, accountant
        ).point.population
    except UserError:
        if not (math.isfinite(target) and target > 0):
            raise
        return None


def curves(noise: Noise, point: Point, count: int = 9) -> dict[str, list[dict[str, float | None]]]:
    """Epsilon against rounds, noise, cohort and population, one of them changing at a time.

    While the cohort changes, `noise` says what is held fixed: z, or s = z / S.
    """
    drawn: dict[str, list[dict[str, float | None]]] = {}
    for name, span in AXES.items():
        centre = getattr(point, name)
        values = [centre * span ** (2 * i / (count - 1) - 1) for i in range(count)]
        drawn[name] = [
            {"x": x, **{by: e if math.isfinite(e) else None for by, e in at.both().items()}}
            for x, at in along(noise, point, name, values)
        ]
    return drawn


def along(noise: Noise, point: Point, name: str, values: Iterable[float]) -> list[tuple[float, Point]]:
    """Points along one axis; those that no run can have (a cohort above the population) are left out."""
    if name == "noise_multiplier":
        return [(x, replace(point, noise_multiplier=x)) for x in values]
    most = {"rounds": planner.MOST_ROUNDS, "cohort": point.population}.get(name, math.inf)
    least = point.cohort if name == "population" else 1
    whole = sorted({round(x) for x in values if least <= round(x) <= most})
    if name == "cohort":
        return [(x, replace(point, cohort=x, noise_multiplier=noise.at(x))) for x in whole]
    return [(x, replace(point, **{name: x})) for x in whole]


def draw_curves(path: Path, drawn: dict[str, list[dict[str, float | None]]], point: Point, held: str) -> None:
    """The four curves as one sheet of PNG."""
    require("figures", "a PNG file of the curves")
    from matplotlib.ticker import LogLocator

    from confide.report.figures.sheets import sheet

    about = (
        f"epsilon at delta {point.delta:g} around z = {point.noise_multiplier:g}, S = {point.cohort:,}, "
        f"K = {point.population:,}, T = {point.rounds:,}; Poisson sampling, add-or-remove one user"
    )
    with sheet(path, 2, 2, (8.4, 6), about, title_size=9) as (_, axes):
        for axis, (name, points) in zip(axes.flat, drawn.items(), strict=True):
            for by, (label, colour) in LINES.items():
                known = [(p["x"], p[by]) for p in points if p[by] is not None]
                axis.plot([x for x, _ in known], [y for _, y in known], "o-", color=colour, lw=1.5, ms=3, label=label)
            axis.axvline(getattr(point, name), color="#57534e", lw=0.8, ls=":")
            title = name.replace("_", " ") + (f", {held} fixed" if name == "cohort" else "")
            axis.set(xlabel=title, ylabel="epsilon", xscale="log", yscale="log")
            axis.minorticks_off()
            for ruler in (axis.xaxis, axis.yaxis):
                ruler.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ruler.set_major_formatter("{x:g}")
        axes[0][0].legend()


def draw_advice(path: Path, rows: Sequence[Row], about: str) -> None:
    """The error of each mechanism over epsilon, and the bands that are best there."""
    require("figures", "a PNG file of the comparison")
    from confide.report.figures.sheets import sheet

    with sheet(path, 1, 1, (7.2, 4.2), about, title_size=9) as (_, axes):
        axis = axes[0][0]
        for kind, colour in KINDS.items():
            found = [(row.epsilon, one) for row in rows for one in row.choices if one.kind == kind]
            errors = [one.rms for _, one in found]
            axis.plot([x for x, _ in found], errors, "o-", color=colour, lw=1.6, ms=4, label=NAMES[kind])
            if kind == "cyclic_poisson":
                for x, one in found:
                    axis.annotate(
                        f"{one.bands} bands", (x, one.rms), (0, -13), textcoords="offset points", ha="center",
                        fontsize=8, color=colour,
                    )  # fmt: skip
        axis.set(xlabel="epsilon", ylabel="rms noise of a prefix sum, in units of C", xscale="log", yscale="log")
        axis.set_xticks([row.epsilon for row in rows], [f"{row.epsilon:g}" for row in rows])
        axis.margins(0.07, 0.12)
        axis.minorticks_off()
        axis.legend()
