"""How each test item was answered: what intervals, comparisons and tables by speaker or class are made of.

A metric is scale * sum(counts) / sum(sizes): errors over words for a word error rate, right answers over queries for an
accuracy. `test` names the test set by its content, so that runs on different ones are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confide.errors import UserError
from confide.files import write_atomically

FILE = "scores.json"
_WORDS = {"wer": "word error rate, %", "cer": "character error rate, %", "test_loss": "test loss"}


def in_words(metric: str) -> str:
    """A metric's name for people; files and JSON keep the short one."""
    return _WORDS.get(metric, metric)


def measured(metric: str, value: float) -> str:
    """A metric with its value in a sentence: `word error rate 7.25 %`."""
    name = in_words(metric)
    return f"{name.removesuffix(', %')} {value:.4g}" + (" %" if name.endswith(", %") else "")


@dataclass(frozen=True)
class Items:
    """One entry per test item."""

    metric: str
    better: Literal["higher", "lower"]
    scale: float
    """1 for a share, 100 where the metric is in percent."""
    group: str
    """What the groups are: speaker, class, document."""
    clustered: bool
    """Whether items of a group resemble each other: the bootstrap then draws groups, else items."""
    names: tuple[str, ...]  # of the groups
    groups: np.ndarray  # (items,) int64, places in names
    counts: np.ndarray  # (items,) float64
    sizes: np.ndarray  # (items,) float64
    test: str
    worst: tuple[tuple[str, str, str, float], ...] = ()
    """Items that were answered worst: group, what was right, what was answered, and the metric of the item alone."""

    def __post_init__(self) -> None:
        if not len(self.groups) == len(self.counts) == len(self.sizes) > 0:
            raise UserError(f"{len(self.groups)} groups for {len(self.counts)} items; expected one each, at least one")

    @property
    def groups_called(self) -> str:
        return f"{self.group}es" if self.group.endswith("s") else f"{self.group}s"

    @property
    def value(self) -> float:
        return float(self.scale * self.counts.sum() / self.sizes.sum())

    def sums(self, by: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts and sizes summed over the items that share a number in `by`."""
        return np.bincount(by, weights=self.counts), np.bincount(by, weights=self.sizes)

    @property
    def units(self) -> np.ndarray:
        """The unit that the bootstrap draws each item with: its group if items are clustered, else the item itself.

        A single group would leave nothing to draw from, so its items are drawn.
        """
        return self.groups if self.clustered and len(self.names) > 1 else np.arange(len(self.counts))

    def table(self) -> list[tuple[str, float, int, float]]:
        """Of each group: name, metric, items and size, the worst first. Groups of size 0 have no metric."""
        counts, sizes = self.sums(self.groups)
        items = np.bincount(self.groups, minlength=len(self.names))
        rows = [
            (name, self.scale * count / size, many, size)
            for name, count, size, many in zip(
                self.names, counts.tolist(), sizes.tolist(), items.tolist(), strict=False
            )
            if size
        ]
        return sorted(rows, key=lambda row: (row[1] if self.better == "higher" else -row[1], row[0]))

    def to_json(self) -> dict[str, Any]:
        order = ("metric", "better", "scale", "group", "clustered", "test", "names")
        arrays = {"groups": self.groups.tolist(), "counts": _short(self.counts), "sizes": _short(self.sizes)}
        return {name: vars(self)[name] for name in order} | arrays | ({"worst": self.worst} if self.worst else {})

    @staticmethod
    def from_json(document: dict[str, Any]) -> Items:
        kinds = {"groups": np.int64, "counts": np.float64, "sizes": np.float64}
        arrays = {key: np.array(document[key], dtype=kind) for key, kind in kinds.items()}
        worst = tuple((str(a), str(b), str(c), float(d)) for a, b, c, d in document.get("worst", ()))
        return Items(**{**document, **arrays, "names": tuple(document["names"]), "worst": worst})


def number_names(names: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Sort the different names, and give each entry the place of its name among them."""
    unique, places = np.unique(np.asarray(names, dtype=np.str_), return_inverse=True)
    return tuple(map(str, unique)), places.astype(np.int64)


def write(folder: Path, items: Items) -> None:
    write_atomically(folder / FILE, (json.dumps(items.to_json(), separators=(",", ":")) + "\n").encode())


def read(folder: Path) -> Items | None:
    """What a run's folder says about its test items; none where it says nothing."""
    path = folder / FILE
    try:
        return Items.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it and run `confide report {folder}` again") from None


def _short(values: np.ndarray) -> list[float]:
    return [int(v) if float(v).is_integer() else float(v) for v in values.tolist()]
