"""Figures of CAR's experiments: accuracy of each row beside the paper's, and curves over central steps."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from confide.report.figures.sheets import panel

OURS, PAPER = "#1d4ed8", "#a8a29e"
_COLOURS = (
    "#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#57534e", "#be185d", "#0e7490", "#a16207", "#000000", "#dc2626",
)  # fmt: skip

Runs = list[list[dict[str, Any]]]
"""Of each row, the measurements of every seed."""


def draw_bars(path: Path, names: list[str], runs: Runs, paper: list[float | None], what: str) -> Path:
    """Mean accuracy of each row with its seeds as dots, and the paper's figure where it has one."""
    with panel(path, (9, 1.2 + 0.55 * len(names))) as axis:
        for place, (own, other) in enumerate(zip(runs, paper, strict=True)):
            scores = [run["accuracy"] for run in own]
            axis.barh(place - 0.18, mean(scores), 0.34, color=OURS, label="here, mean; dots are seeds")
            axis.plot(scores, [place - 0.18] * len(scores), "o", color="black", ms=3)
            axis.text(max(scores) + 1, place - 0.18, f"{mean(scores):.2f}", va="center", fontsize=8)
            if other is not None:
                axis.barh(place + 0.18, other, 0.34, color=PAPER, label="the paper, larger encoders")
                axis.text(other + 1, place + 0.18, f"{other:.2f}", va="center", fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set(xlabel="test accuracy, %", xlim=(0, 112), title=f"CAR {what}")
        labels = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(labels.values(), labels, loc="upper center", bbox_to_anchor=(0.4, -0.9 / len(names)), ncol=2)
    return path


def draw_curves(path: Path, names: list[str], runs: Runs, what: str) -> Path:
    """Test accuracy after central steps, mean over seeds, of the rows that train."""
    with panel(path, (8, 4.4)) as axis:
        for name, own, colour in zip(names, runs, _COLOURS, strict=False):
            if own[0]["curve"]:
                steps = [step for step, _ in own[0]["curve"]]
                means = [mean(run["curve"][place][1] for run in own) for place in range(len(steps))]
                axis.plot(steps, means, marker="o", ms=3, lw=1.4, color=colour, label=name)
        axis.set(xlabel="central step", ylabel="test accuracy, %", title=f"CAR {what}")
        axis.legend(fontsize=7, loc="lower right")
    return path
