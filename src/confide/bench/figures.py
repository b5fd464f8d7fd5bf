"""Time and memory of a central step against processes, cohort and parameters, and ratios to other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from confide.bench.scaling import Point
from confide.report.figures.sheets import panel, sheet

TIME, MEMORY = "#1d4ed8", "#b45309"
_ACROSS = 4
_LEVEL = 3  # times that differ by less are drawn from 0, so that chance does not look like growth


def draw_scaling(path: Path, points: list[Point]) -> Path:
    """A panel of two for each curve: seconds a step above, peak memory below."""
    curves = list(dict.fromkeys(point.curve for point in points))
    title = "one central step: training, bounding, addition, noise"
    wide, high = min(len(curves), _ACROSS), 2 * -(-len(curves) // _ACROSS)
    with sheet(path, high, wide, (3.6 * wide, 3 * high), title, title_size=9) as (_, axes):
        for axis in axes.flat:
            axis.set_axis_off()
        for number, curve in enumerate(curves):
            own = sorted((p for p in points if p.curve == curve), key=lambda p: p.x)
            row, column = 2 * (number // _ACROSS), number % _ACROSS
            places, (top, bottom) = [p.x for p in own], (axes[row][column], axes[row + 1][column])
            few = curve.startswith(("processes", "ranks"))
            top.plot(places, [p.seconds for p in own], "o-", color=TIME, lw=1.6, ms=4)
            memory = [(p.x, p.peak_mib) for p in own if p.peak_mib is not None]
            bottom.plot([x for x, _ in memory], [y for _, y in memory], "o-", color=MEMORY, lw=1.6, ms=4)
            for axis in (top, bottom):
                axis.set_axis_on()
                axis.set_xscale("linear" if few else "log")
                axis.set_xticks(places, [_short(x) for x in places])
                axis.minorticks_off()
                axis.margins(y=0.1)
                level = max(p.seconds for p in own) < _LEVEL * min(p.seconds for p in own)
                if few or level or axis is bottom:
                    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
                else:
                    axis.set_yscale("log")
            name, _, workload = curve.partition(", ")
            top.set(title=workload, ylabel="seconds a step" if column == 0 else "")
            bottom.set(xlabel=name, ylabel="peak memory, MiB" if column == 0 else "")
    return path


def draw_ratios(path: Path, rows: list[dict[str, Any]]) -> Path:
    """How many times as long as this project's best the others take."""
    shown = [row for row in rows if row["ratio"] is not None]
    names = [
        f"{row['workload']}: {row['candidate']}" + ("" if row["what"] == "round" else f", {row['what']}")
        for row in shown
    ]
    with panel(path, (8, 0.8 + 0.3 * max(len(shown), 1))) as axis:
        places = list(range(len(shown)))[::-1]
        colours = [TIME if row["candidate"].startswith("confide") else "#a8a29e" for row in shown]
        axis.barh(places, [row["ratio"] for row in shown], color=colours, height=0.7)
        for place, row in zip(places, shown, strict=True):
            axis.text(row["ratio"] * 1.03, place, f"{row['ratio']:.2f}", va="center", fontsize=8)
        axis.set_yticks(places, names)
        axis.set(xscale="log", xlabel="times as long as confide's best (log)")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.margins(x=0.15, y=0.01)
    return path


def _short(number: int) -> str:
    return f"{number / 1e6:g}M" if number >= 1_000_000 else f"{number:,}"
