"""Where a run began: the starting model on the test data, and whether the run ended better than that.

A run evaluates the model of step 0 as it evaluates the last one, and start.json keeps it with how each test item was
answered. So the end can be held against the start in pairs, as `confide compare` holds two runs against each other.
Folders from before there was a start.json, and runs with `evaluation.start: false`, say nothing of their start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from confide.errors import UserError
from confide.federated.intervals import difference
from confide.federated.items import Items
from confide.federated.task import Task
from confide.files import write_atomically
from confide.runs.records import json_safe

FILE = "start.json"
REAL = 0.05
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Beginning:
    """The starting model's evaluation."""

    metric: str
    better: Literal["higher", "lower"] | None
    """Which way the metric is good; none where a task of somebody's own does not say."""
    metrics: Scores
    items: Items | None

    def gain(self, value: float | None) -> float | None:
        """How much better a value is than the start's, in the metric's own units; negative where it is worse."""
        began = self.metrics.get(self.metric)
        if value is None or began is None or self.better is None:
            return None
        return value - began if self.better == "higher" else began - value

    def said(self, value: float | None) -> str:
        """The gain in words: `better than its start by 3.2 points`. Empty where nothing can be said."""
        gain = self.gain(value)
        if gain is None:
            return ""
        if gain == 0:
            return "no better than its start, and no worse"
        way = "better" if gain > 0 else "worse"
        return f"{way} than its start by {self._amount(abs(gain))}"

    def verdict(self, metrics: Scores, items: Items | None) -> dict[str, Any]:
        """What a summary says of the start: its metrics, the gain, and whether the gain may be chance."""
        value = metrics.get(self.metric)
        found: dict[str, Any] = {"metrics": self.metrics, "gain": self.gain(value), "said": self.said(value)}
        if not found["gain"] or self.items is None or items is None:
            return found
        gap = difference(self.items, items)
        found["interval"] = sorted([gap.low, gap.high] if self.better == "higher" else [-gap.high, -gap.low])
        found["p"] = gap.p
        if gap.p >= REAL:
            found["said"] += f", which may be chance: {gap.units:,} {self._units} cannot tell (p {gap.p:.2g})"
        return found

    def _amount(self, gain: float) -> str:
        """A share or a percentage in points; anything else as a number."""
        if self.items is None:
            return f"{gain:.4g}"
        points = gain * 100 / self.items.scale
        return f"{points:.1f} points" if points >= 0.05 else "less than 0.1 points"

    @property
    def _units(self) -> str:
        clustered = self.items is not None and self.items.clustered and len(self.items.names) > 1
        return self.items.groups_called if clustered and self.items is not None else "test items"


def score_model(task: Task, model: dict[str, Tensor]) -> tuple[dict[str, float], Items | None]:
    """A model's evaluation, and how each test item was answered where the task has test items."""
    with torch.no_grad():
        found: tuple[dict[str, float], Items] | None = task.scored(model)
        return found or (task.evaluate(model), None)


def measure(folder: Path, task: Task, model: dict[str, Tensor]) -> Beginning:
    """Evaluate the starting model and keep it in the folder; one that is kept already is not made again."""
    kept = read(folder)
    if kept is not None:
        return kept
    metrics, items = score_model(task, model)
    better = task.better if items is None else items.better
    about = {"metric": task.metric, "better": better, "metrics": json_safe(metrics)}
    listed = None if items is None else items.to_json()
    content = json.dumps({**about, "items": listed}, separators=(",", ":"), allow_nan=False)
    write_atomically(folder / FILE, (content + "\n").encode())
    return Beginning(task.metric, better, about["metrics"], items)


def read(folder: Path) -> Beginning | None:
    """Where a run began; none where its folder does not say."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        items = None if found["items"] is None else Items.from_json(found["items"])
        return Beginning(found["metric"], found["better"], dict(found["metrics"]), items)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it: the run then says nothing of its start") from None
