"""The error of correlated noise beside independent noise and binary trees, all with the same guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confide.report.figures.sheets import sheet

Array = NDArray[np.float64]
BASELINES = {"independent noise": "#57534e", "binary tree": "#15803d"}
SHADES = ("#93c5fd", "#3b82f6", "#1e3a8a", "#7c3aed", "#c026d3")


def draw_factorisation(path: Path, separation: int, tables: Mapping[int, Mapping[str, Array]]) -> Path:
    """`tables`: number of rounds -> mechanism -> variance of each prefix sum, as `prefix_sums.compare` returns it.

    Left, how the error grows with the number of rounds; right, the totals of the longest run.
    """
    rounds = sorted(tables)
    longest = tables[rounds[-1]]
    looks = _looks(longest)
    with sheet(path, 1, 2, (11, 4.2)) as (figure, axes):
        left, right = axes[0]
        for name, (colour, line) in looks.items():
            error = [float(np.sqrt(tables[count][name].mean())) for count in rounds]
            left.plot(rounds, error, line, color=colour, lw=1.6, marker="o", ms=3, label=name)
        left.set(
            xscale="log",
            yscale="log",
            xlabel="rounds in the run",
            ylabel="root mean square error of a prefix sum",
            title="error against the number of rounds",
        )
        left.set_xticks(rounds, [f"{count:,}" for count in rounds])
        left.minorticks_off()
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.legend(loc="upper left", handlelength=3.5)
        _bars(right, longest, {name: colour for name, (colour, _) in looks.items()})
        right.set_title(f"totals over {rounds[-1]:,} rounds")
        figure.suptitle(
            f"z = 1 for the whole run, contributions of norm 1, a user's turn every {separation} rounds, "
            "no amplification by sampling",
            fontsize=9,
        )
    return path


def _bars(axis: Any, table: Mapping[str, Array], colours: Mapping[str, str]) -> None:
    totals = {name: float(variance.sum()) for name, variance in table.items()}
    share = [100 * total / totals["independent noise"] for total in totals.values()]
    names: Sequence[str] = list(totals)
    places = range(len(names))
    bars = axis.barh(places, share, color=[colours[name] for name in names], height=0.7)
    for place, value, bar in zip(places, share, bars, strict=True):
        axis.text(value + 1, place, f"{value:.3g} %", va="center", fontsize=8)
        if names[place].startswith("square root"):
            bar.set(hatch="///", edgecolor="white")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set(xlim=(0, 115), xlabel="total variance, % of independent noise")
    axis.grid(False, axis="y")


def _looks(table: Mapping[str, Array]) -> dict[str, tuple[str, str]]:
    """Colour and line of each mechanism: the darker, the more bands; the plain square root is dashed, or hatched."""
    bands = [name.split(", ")[1] for name in table if name.startswith("optimised")]
    shade = dict(zip(bands, SHADES, strict=False))
    looks: dict[str, tuple[str, str]] = {}
    for name in table:
        if name in BASELINES:
            looks[name] = BASELINES[name], "-"
        else:
            kind, count = name.split(", ")
            looks[name] = shade[count], "-" if kind == "optimised" else "--"
    return looks
