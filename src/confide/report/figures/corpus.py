"""Histograms of how much each speaker says: PFL-ASR's Figure 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confide.report.figures.sheets import sheet

if TYPE_CHECKING:
    from confide.speech.statistics import Statistics

# Speakers who differ by more than this factor are shown on a logarithmic axis, as those of Common Voice need it.
_WIDE = 30.0
_BINS = 30


def draw_corpora(path: Path, corpora: Sequence[Statistics]) -> Path:
    """Minutes (top) and utterances (bottom) per speaker, one column for each corpus."""
    with sheet(path, 2, len(corpora), (max(4.4 * len(corpora), 5.2), 5.4)) as (_, axes):
        for column, corpus in enumerate(corpora):
            _histogram(axes[0][column], corpus.minutes_per_speaker, "minutes per speaker", whole=False)
            _histogram(axes[1][column], corpus.utterances_per_speaker, "utterances per speaker", whole=True)
            who = "1 speaker" if corpus.speakers == 1 else f"{corpus.speakers:,} speakers"
            axes[0][column].set_title(f"{corpus.name}: {who}, {_hours(corpus.hours)}")
        for row in axes:
            row[0].set_ylabel("speakers")
    return path


def _histogram(axis: Any, values: Sequence[float], label: str, whole: bool) -> None:
    low, high = float(min(values)), float(max(values))
    mean, middle = float(np.mean(values)), float(np.median(values))
    wide = low > 0 and high / low > _WIDE
    axis.hist(values, bins=_edges(values, wide, whole), color="#1d4ed8", alpha=0.8, edgecolor="white", lw=0.4)
    axis.axvline(mean, color="#c2410c", lw=1.4, label=f"mean {mean:.3g}")
    axis.axvline(middle, color="#15803d", lw=1.4, ls="--", label=f"median {middle:.3g}")
    axis.set(xlabel=label)
    axis.yaxis.get_major_locator().set_params(integer=True)
    if wide:
        axis.set_xscale("log")
    elif whole:
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlim(min(low - 2, axis.get_xlim()[0]), max(high + 2, axis.get_xlim()[1]))
    axis.legend()


def _edges(values: Sequence[float], wide: bool, whole: bool) -> Any:
    """The bins' limits: as many bins as the number of speakers fills."""
    low, high = float(min(values)), float(max(values))
    bins = int(np.clip(2 * np.sqrt(len(values)), 5, _BINS))
    if wide:
        edges = np.geomspace(low, high * 1.001, bins + 1)
        # Limits between whole numbers, or counts would show gaps that are not there.
        return np.unique(np.append(np.floor(edges[:-1]), high + 1)) - 0.5 if whole else edges
    if whole:
        step = max(1, int(np.ceil((high - low + 1) / bins)))
        return np.arange(low - 0.5, high + step + 0.5, step)
    return np.linspace(low, high, bins + 1) if high > low else np.array([0.95 * low, 1.05 * low])


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
