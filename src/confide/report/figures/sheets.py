"""Figures as PNG files, by matplotlib: it draws without a browser, which plotly's image export needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from confide.errors import UserError, explained
from confide.federated.items import in_words

try:
    import matplotlib as mpl
except ModuleNotFoundError as lost:
    raise UserError(explained(lost) or str(lost)) from None
mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

STARTS, RULES = ("I1", "I2"), ("clip", "normalise")
COLOURS = {"clip": "#c2410c", "normalise": "#1d4ed8"}
NAMES = {"clip": "clipping", "normalise": "normalisation"}
STYLE: Any = {
    "figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8,
    "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip


@contextmanager
def sheet(
    path: Path, rows: int, columns: int, size: tuple[float, float], title: str = "", title_size: float = 10
) -> Iterator[tuple[Figure, Any]]:
    """A grid of axes under a title, which is written to `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
        if title:
            figure.suptitle(title, fontsize=title_size)
        try:
            yield figure, axes
            figure.savefig(path)
        finally:
            plt.close(figure)


@contextmanager
def panel(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A sheet with one axis."""
    with sheet(path, 1, 1, size) as (_, axes):
        yield axes[0][0]


def draw_quadratics(
    folder: Path, values: dict[Any, Any], seeds: int, bounds: Sequence[float], rates: Sequence[float], path_rate: float
) -> list[Path]:
    """NORM's Figures 1 (suboptimality), 2 (SNR) and 3 (paths in the plane)."""
    files = [folder / f"figure{number}.png" for number in (1, 2, 3)]

    def plot_mean(axis: Any, what: str, start: str, bound: float, rate: float, rule: str, **look: Any) -> None:
        curves = [values[seed, start, bound, rate, rule][what] for seed in range(seeds)]
        axis.plot(np.mean(curves, axis=0), color=COLOURS[rule], **look)

    title = f"Suboptimality, mean of {seeds} runs; the darker, the larger the step size"
    with sheet(files[0], 2, len(bounds), (3.6 * len(bounds), 6), title) as (figure, axes):
        for axis, (start, bound) in zip(axes.flat, product(STARTS, bounds), strict=True):
            for (shade, rate), rule in product(enumerate(rates), RULES):
                strength, label = 0.35 + 0.65 * shade / (len(rates) - 1), f"{NAMES[rule]}, {rate:g}"
                plot_mean(axis, "suboptimality", start, bound, rate, rule, alpha=strength, lw=1.2, label=label)
            axis.set(title=f"{start}, C = {bound:g}", yscale="log", xlabel="central step")
        for row in axes:
            row[0].set_ylabel("f(w) - f(w*)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(rates))
    title = f"Signal-to-noise ratio at step size {path_rate:g}, mean of {seeds} runs"
    with sheet(files[1], 2, len(bounds), (3.6 * len(bounds), 5.5), title) as (_, axes):
        for axis, (start, bound) in zip(axes.flat, product(STARTS, bounds), strict=True):
            for rule in RULES:
                plot_mean(axis, "snr", start, bound, path_rate, rule, lw=1, label=NAMES[rule])
            axis.set(title=f"{start}, C = {bound:g}", xlabel="central step", ylim=(0, None))
        for row in axes:
            row[0].set_ylabel("signal-to-noise ratio")
        axes[0][0].legend()
    title = f"Paths in a plane, mean over 25 steps, step size {path_rate:g}; dots: where they end"
    with sheet(files[2], 1, 2, (9, 4.2), title) as (_, axes):
        for axis, start in zip(axes[0], STARTS, strict=True):
            for rule in RULES:
                path = np.array(values[0, start, 100.0, path_rate, rule]["path"])
                smooth = np.stack([np.convolve(c, np.ones(25) / 25, mode="valid") for c in path.T])
                axis.plot(*smooth, color=COLOURS[rule], lw=1.2, label=NAMES[rule])
                axis.plot(*smooth[:, -1], "o", color=COLOURS[rule], ms=5)
            axis.plot(0, 0, "k*", ms=11, label="optimum")
            axis.set(title=f"{start}, C = 100", xlabel="towards the start", ylabel="across")
            axis.set_aspect("equal", adjustable="datalim")
        axes[0][0].legend()
    return files


def draw_heat_maps(
    folder: Path,
    scores: dict[Any, list[float]],
    dataset: str,
    epsilons: Sequence[float],
    bounds: Sequence[float],
    rates: Sequence[float],
) -> list[Path]:
    """Accuracy over the grid of C and eta for both rules, and their difference."""

    def heat(axis: Any, grid: Any, title: str, colours: str, limits: tuple[float, float]) -> None:
        image = axis.imshow(grid, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
        axis.grid(False)
        axis.set(title=title, xlabel="eta", ylabel="C")
        axis.set_xticks(range(len(rates)), [f"{r:g}" for r in rates], rotation=45)
        axis.set_yticks(range(len(bounds)), [f"{b:g}" for b in bounds])
        for (i, j), value in np.ndenumerate(grid):
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
            axis.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)

    path = folder / "heatmap.png"
    size = (13, 3.9 * len(epsilons))
    with sheet(path, len(epsilons), 3, size, f"Test accuracy on {dataset}, %", title_size=11) as (_, axes):
        for row, level in enumerate(epsilons):
            grids = {
                rule: np.array([[mean(scores[rule, level, c, rate]) for rate in rates] for c in bounds])
                for rule in RULES
            }
            low, high = min(g.min() for g in grids.values()), max(g.max() for g in grids.values())
            for axis, rule in zip(axes[row], grids, strict=False):
                heat(axis, grids[rule], f"{NAMES[rule]}, epsilon {level:g}", "viridis", (low, high))
            gain = grids["normalise"] - grids["clip"]
            most = max(abs(gain).max(), 1e-9)
            heat(axes[row][2], gain, "normalisation - clipping, points", "RdBu", (-most, most))
    return [path]


def draw_run(folder: Path, records: list[dict[str, Any]], metric: str) -> list[Path]:
    """The curves of one run, each in a file of RUN/figures; a curve without a value gets none."""

    def points(name: str, of: Sequence[dict[str, Any]] = records) -> list[tuple[int, float]]:
        return [(r["step"], float(r[name])) for r in of if r.get(name) is not None]

    scores = points(metric, [{"step": r["step"], **r["evaluation"]} for r in records if r.get("evaluation")])
    norms = {"before bounding": points("update_norm"), "after bounding": points("bounded_norm")}
    curves: dict[str, tuple[str, dict[str, list[tuple[int, float]]], bool]] = {  # title, lines, logarithmic
        "metric": (
            in_words(metric),
            {in_words(metric): scores},
            metric == "suboptimality" and all(value > 0 for _, value in scores),
        ),
        "loss": ("mean loss of the cohort", {"loss": points("loss")}, False),
        "norms": ("norm of a user's update", norms, True),
        "snr": ("signal-to-noise ratio", {"snr": points("snr")}, False),
        "epsilon": ("epsilon so far", {"epsilon": points("epsilon")}, False),
        "cohort": ("users in the cohort", {"users": points("cohort")}, False),
    }
    drawn: list[Path] = []
    for name, (title, lines, log) in curves.items():
        if not any(lines.values()):
            continue
        drawn.append(folder / "figures" / f"{name}.png")
        with panel(drawn[-1], (6, 3.4)) as axis:
            for (label, own), colour in zip(lines.items(), ("#1d4ed8", "#c2410c", "#15803d"), strict=False):
                marker = "o" if len(own) < 15 else None
                axis.plot(*zip(*own, strict=True), color=colour, lw=1.5, label=label, marker=marker, ms=3)
            axis.set(title=title, xlabel="central step")
            if log:
                axis.set_yscale("log")
            if len(lines) > 1:
                axis.legend()
    return drawn
