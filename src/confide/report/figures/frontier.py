"""Error against epsilon as a PNG: the chart of `confide plan frontier`, for documents."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import ScalarFormatter

from confide.report.charts import Chart
from confide.report.figures.sheets import panel

_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490", "#be123c", "#4d7c0f")


def draw_frontier(path: Path, chart: Chart) -> Path:
    """Draw trained points as dots, planned curves as lines, and the error without privacy as a level."""
    with panel(path, (6.4, 4.2)) as axis:
        for line in chart.lines:
            look = {"color": _COLOURS[line.colour % len(_COLOURS)], "label": line.label}
            if line.dots:
                axis.plot(line.xs, line.ys, "o", **look)
            else:
                axis.plot(line.xs, line.ys, "--" if line.dashed else "-", lw=1.2, **look)
        if chart.level is not None:
            axis.axhline(chart.level, color="#555", lw=0.8, ls=":", label="no privacy")
        axis.set(xscale="log", xlabel=chart.x, ylabel=chart.title)
        if chart.from_zero:
            axis.set_ylim(bottom=0)
        ticks = sorted({x for line in chart.lines for x in (0.5, 1, 2, 4, 8, 16) if min(line.xs) <= x <= max(line.xs)})
        axis.set_xticks(ticks)
        axis.get_xaxis().set_major_formatter(ScalarFormatter())
        axis.minorticks_off()
        axis.legend()
    return path
