"""Error against epsilon as a PNG: the chart of `confide plan frontier`, for documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confide.report.charts import Chart
from confide.report.figures.sheets import sheet

_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#475569", "#0e7490", "#be123c", "#4d7c0f")


_TICKS = (0.5, 1, 2, 4, 8, 16)
_ERRORS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw_frontier(path: Path, charts: Sequence[Chart]) -> Path:
    """Draw charts side by side: trained points as dots, planned curves as lines, the level without privacy."""
    size = (6.4, 4.2) if len(charts) == 1 else (3.9 * len(charts), 4.2)
    drawn = [y for chart in charts for line in chart.lines for y in line.ys if y is not None]
    with sheet(path, 1, len(charts), size) as (figure, axes):
        ends = [x for chart in charts for line in chart.lines for x in line.xs]
        for axis, chart in zip(axes[0], charts, strict=True):
            _draw(axis, chart)
            axis.set_xlim(0.9 * min(ends), 1.1 * max(ends))
            if chart.log:
                axis.set_yscale("log")
                axis.set_yticks(_ERRORS, [f"{y:g}" for y in _ERRORS])
                axis.set_ylim(0.8 * min(drawn), 1.2 * max(drawn))
                axis.minorticks_off()
            elif chart.from_zero:
                axis.set_ylim(0, 1.05 * max(drawn))
            name, _, people = chart.title.rpartition(", ") if len(charts) > 1 else (chart.title, "", "")
            axis.set(title=people, ylabel=name if axis is axes[0][0] else "")
        if len(charts) == 1:
            axes[0][0].legend()
        else:  # dots of a legend among the curves would pass for measured ones
            figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return path


def _draw(axis: Any, chart: Chart) -> None:
    for line in chart.lines:
        look = {"color": _COLOURS[line.colour % len(_COLOURS)], "label": line.label}
        if line.dots:
            axis.plot(line.xs, line.ys, "o", **look)
        else:
            axis.plot(line.xs, line.ys, "--" if line.dashed else "-", lw=1.2, **look)
    if chart.level is not None:
        axis.axhline(chart.level, color="#555", lw=0.8, ls=":", label="no privacy")
    axis.set(xscale="log", xlabel=chart.x)
    axis.minorticks_off()
    axis.set_xticks(_TICKS, [f"{x:g}" for x in _TICKS])
