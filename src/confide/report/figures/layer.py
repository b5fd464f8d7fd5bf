"""Where in a model the updates, the signal and the noise are: the figures of a run's tensors (PFL-ASR 5, 10, 13, 14).

`confide.report.layers` reads what is drawn and says what a tensor's kind and depth are.

Differs from the paper: Figures 5 and 10 average over all central steps, here over those on record, and the last of them
is shown beside the average. Figures 13 and 14 are of the whole model; here each kind has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from confide.report.figures.sheets import sheet
from confide.report.layers import Array, Layers, depth, kind, layers_to_draw, over_steps

_COLUMNS = 4
_PAIR = ("#1d4ed8", "#c2410c", "#15803d", "#7c3aed")
_CURVES = (
    ("delta", "update, before bounding", "#57534e", "-"),
    ("bounded", "update, after bounding", "#1d4ed8", "-"),
    ("signal", "aggregate, before noise", "#15803d", "-"),
    ("noise", "noise", "#c2410c", "--"),
    ("noisy", "aggregate, with noise", "#7c3aed", ":"),
    ("gradient", "local gradient", "#b45309", "-."),
)


def draw_layers(folder: Path) -> list[tuple[Path, str]]:
    """The figures of the tensors of the run in `folder`, each with the sentence that says what it shows."""
    layers = layers_to_draw(folder)
    if layers is None:
        return []
    drawn = [_depths(folder, layers), _curves(folder, layers)]
    if layers.values.get("clipped", np.zeros(1)).any():
        drawn.append(_clipped(folder, layers))
    return [*drawn, _ratios(folder, layers)] if "noise" in layers.values else drawn


def _depths(folder: Path, layers: Layers) -> tuple[Path, str]:
    """Figures 5 and 10."""
    path = folder / "figures" / "layers_depth.png"
    inside = {
        what: places for what, places in layers.kinds.items() if all(depth(layers.names[i]) is not None for i in places)
    }
    outside = [i for i, name in enumerate(layers.names) if kind(name) not in inside]
    mean, deviation = over_steps(layers)
    last = layers.values["delta"][-1]
    title = "Norm of the users' updates, tensor by tensor, before bounding"
    with _panels(path, len(inside) + bool(outside), title) as (_, used):
        for axis, (what, places) in zip(used, inside.items(), strict=False):
            parts = _parts(layers.names, places)
            for (part, rows), colour in zip(parts.items(), _PAIR * len(parts), strict=False):
                at = [depth(layers.names[i]) for i in rows]
                low, high = np.maximum(mean[rows] - deviation[rows], mean[rows] / 10), mean[rows] + deviation[rows]
                axis.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
                axis.plot(at, _positive(mean[rows]), color=colour, lw=1.5, marker="o", ms=3, label=part)
                axis.plot(at, _positive(last[rows]), color=colour, lw=1, ls=":")
            axis.set(title=what, xlabel="block")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len(parts) > 1:
                axis.legend()
        if outside:
            axis, at = used[-1], list(range(len(outside)))
            low = np.minimum(deviation[outside], 0.9 * mean[outside])
            axis.errorbar(
                at, _positive(mean[outside]), [low, deviation[outside]], fmt="o", ms=4, color=_PAIR[0], capsize=3
            )
            axis.plot(at, _positive(last[outside]), ls="", marker="_", ms=9, color=_PAIR[0])
            axis.set_title("outside the blocks" if inside else "tensors")
            axis.set_xticks(at, [layers.names[i] for i in outside], rotation=90)
        for axis in used[::_COLUMNS]:
            axis.set_ylabel("norm of a user's update")
    return path, (
        f"Norm of the users' updates before bounding: mean over the users of {len(layers.steps)} recorded steps, with "
        f"their standard deviation; dotted lines and dashes are step {layers.steps[-1]} alone."
    )


def _curves(folder: Path, layers: Layers) -> tuple[Path, str]:
    """Figures 13 and 14, kind by kind."""
    path, kinds = folder / "figures" / "layers_norms.png", layers.kinds
    with _panels(path, len(kinds), "Updates, aggregate and noise by kind of tensor") as (figure, used):
        for axis, (what, places) in zip(used, kinds.items(), strict=True):
            for field, label, colour, style in _CURVES:
                if field in layers.values:
                    norms, look = _positive(layers.norm(field, places)), {"color": colour, "ls": style, "label": label}
                    axis.plot(layers.steps, norms, lw=1.4, marker=_marker(layers), ms=3, **look)
            axis.set_title(what)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in used[-_COLUMNS:]:
            axis.set_xlabel("central step")
        for axis in used[::_COLUMNS]:
            axis.set_ylabel("norm")
        handles, labels = used[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return path, (
        "By kind of tensor: mean norm of the users' updates before and after bounding, norm of their aggregate, "
        "expected norm of the noise that was added to it, and norm of the two together; with `local.gradient_norms`, "
        "also the mean norm of the users' local gradients."
    )


def _clipped(folder: Path, layers: Layers) -> tuple[Path, str]:
    path = folder / "figures" / "layers_clipped.png"
    shares = {what: 100 * layers.values["clipped"][:, places].mean(axis=1) for what, places in layers.kinds.items()}
    with _curves_by_kind(path, layers, shares) as axis:
        axis.set(title="users whose update was shortened, %", ylim=(-3, 103))
    return path, (
        "Share of users whose update was shortened, by kind of tensor (mean over its tensors). Global clipping "
        "shortens all tensors of a user or none; a tensor that per-layer clipping never shortens leaves a part of its "
        "bound unused."
    )


def _ratios(folder: Path, layers: Layers) -> tuple[Path, str]:
    path = folder / "figures" / "layers_snr.png"
    everything = range(len(layers.names))
    whole = layers.norm("signal", everything) / layers.norm("noise", everything)
    ratios = {what: _positive(ratio) for what, ratio in layers.ratios().items()}
    with _curves_by_kind(path, layers, ratios) as axis:
        axis.plot(layers.steps, _positive(whole), color="black", lw=2, ls="--", label="whole model")
        axis.axhline(1, color="#a8a29e", lw=0.8, zorder=0)
        axis.set(title="signal-to-noise ratio by kind of tensor", yscale="log")
    return path, (
        "Norm of the aggregated updates divided by the expected norm of the noise, by kind of tensor; a kind far below "
        "the others is drowned first when the noise grows."
    )


@contextmanager
def _curves_by_kind(path: Path, layers: Layers, curves: dict[str, Array]) -> Iterator[Any]:
    """An axis with a curve of each kind; the legend is in the order of the curves' ends."""
    with sheet(path, 1, 1, (7.5, 4.2)) as (figure, axes):
        axis, marker, kinds = axes[0][0], _marker(layers), list(curves)
        for what in sorted(kinds, key=lambda each: -np.nan_to_num(curves[each][-1])):
            colour = f"C{kinds.index(what) % 10}"
            axis.plot(layers.steps, curves[what], color=colour, lw=1.4, marker=marker, ms=3, label=what)
        yield axis
        axis.set_xlabel("central step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside right center")


def _parts(names: Sequence[str], places: Sequence[int]) -> dict[str, list[int]]:
    """A kind's tensors by the last word of their names: scale and bias are curves of their own."""
    parts: dict[str, list[int]] = {}
    for place in places:
        parts.setdefault(names[place].rsplit(".", 1)[-1], []).append(place)
    return parts


@contextmanager
def _panels(path: Path, panels: int, title: str) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, all with one logarithmic scale, so that kinds can be compared."""
    rows, columns = math.ceil(panels / _COLUMNS), min(panels, _COLUMNS)
    with sheet(path, rows, columns, (2.8 * columns, 2.3 * rows + 0.8), title) as (figure, axes):
        used, empty = list(axes.flat[:panels]), axes.flat[panels:]
        for axis in empty:
            axis.remove()
        for place, axis in enumerate(used):
            axis.set_yscale("log")
            axis.yaxis.set_minor_locator(NullLocator())  # half of the time to draw, for ticks that nobody reads
            if place > 0:
                axis.sharey(used[0])
            axis.tick_params(labelleft=place % _COLUMNS == 0)
        yield figure, used


def _positive(values: Array) -> Array:
    """A logarithmic axis has no place for zero."""
    return np.where(values > 0, values, np.nan)


def _marker(layers: Layers) -> str | None:
    return "o" if len(layers.steps) < 15 else None
