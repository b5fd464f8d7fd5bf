"""The norms of a run's tensors, read back from layers.jsonl (PFL-ASR Figures 5, 10, 13, 14).

A tensor's kind is what it is in its block (wqkv, wf, w1, w2, ln1, ln2), its depth the number of the block. The norm of
a kind is the root of the sum of squares over its tensors. There is a line for every central step after which the model
was evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from confide.files import read_json_lines
from confide.runs.folder import LAYERS
from confide.speech.model import kind_of

Array = NDArray[np.float64]
FEWEST = 5
"""Tensors that a model must have to be worth a figure."""


@dataclass(frozen=True)
class Layers:
    """The norms of a run's tensors over the recorded steps."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]  # (steps,)
    users: Array  # (steps,)
    values: dict[str, Array]  # each (steps, tensors)

    @property
    def kinds(self) -> dict[str, list[int]]:
        """Of each kind the places of its tensors, in the order of the model."""
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.names):
            found.setdefault(kind(name), []).append(place)
        return found

    def norm(self, what: str, places: Sequence[int]) -> Array:
        """Of all these tensors together, at each step."""  # (steps,)
        return np.asarray(np.sqrt(np.square(self.values[what][:, list(places)]).sum(axis=1)))

    def ratios(self) -> dict[str, Array]:
        """Signal over noise at each step, of each kind that has noise."""  # (steps,)
        noises = {what: self.norm("noise", places) for what, places in self.kinds.items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            return {what: self.norm("signal", self.kinds[what]) / own for what, own in noises.items() if own.any()}


def kind(name: str) -> str:
    """What a tensor is, wherever in the model it stands."""
    return kind_of(name) if "." in name else name


def depth(name: str) -> int | None:
    """The number of a tensor's block; none outside the blocks."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(found[1]) if found else None


def layers_to_draw(folder: Path) -> Layers | None:
    """What a run recorded of its tensors; none where no step, too few tensors or no update is on record."""
    layers = read_layers(folder / LAYERS)
    worth = layers is not None and len(layers.names) >= FEWEST and (layers.values["delta"] > 0).any()
    return layers if worth else None


def read_layers(path: Path) -> Layers | None:
    """A run's record; none if there is not a single step in it."""
    lines = read_json_lines(path)
    if len(lines) < 2:
        return None
    first, *records = lines
    known = ("delta", "delta_deviation", "bounded", "clipped", "signal", "noise", "noisy", "weights", "gradient")
    fields = [field for field in known if field in records[0]]
    return Layers(
        tuple(first["names"]),
        np.array([record["step"] for record in records]),
        np.array([record["users"] for record in records], dtype=np.float64),
        {field: np.array([record[field] for record in records], dtype=np.float64) for field in fields},  # null is nan
    )


def over_steps(layers: Layers) -> tuple[Array, Array]:
    """Mean and deviation of each tensor's update over all users of all recorded steps."""  # (tensors,), (tensors,)
    share = (layers.users / max(layers.users.sum(), 1.0))[:, None]
    means, deviations = layers.values["delta"], layers.values["delta_deviation"]
    mean = (share * means).sum(axis=0)
    square = (share * (np.square(means) + np.square(deviations))).sum(axis=0)
    return mean, np.sqrt(np.maximum(square - np.square(mean), 0.0))
