"""The files that a run writes while it goes (metrics, norms of each tensor, seconds), and who listens beside them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from confide.files import write_atomically
from confide.run import Loop
from confide.runs.listening import NOBODY, Audience, Listeners
from confide.runs.records import Record, json_safe

METRICS, LAYERS, TIMES = "metrics.jsonl", "layers.jsonl", "times.jsonl"
RELEASED = "released.jsonl"
"""The figures of `privacy.metrics`: the one record of steps that the guarantee covers."""


class Recording:
    """Open files of a run; use it in a `with`. Lines of steps that will be made again are cut off at the start."""

    def __init__(self, folder: Path, loop: Loop, step: int, listeners: Listeners = NOBODY) -> None:
        self.folder, self.loop, self.step, self.listeners = folder, loop, step, listeners
        self.stack = ExitStack()
        self.released: TextIO | None = None

    def __enter__(self) -> Recording:
        for name in (METRICS, LAYERS, TIMES, RELEASED):
            _cut_after(self.folder / name, self.step)
        audience = Audience(self.folder, self.loop.recipe, self.step, self.listeners)
        self.audience = self.stack.enter_context(audience)
        self.metrics, self.layers, self.times = (
            self.stack.enter_context((self.folder / name).open("a")) for name in (METRICS, LAYERS, TIMES)
        )
        if self.layers.tell() == 0:
            layout = self.loop.layout
            _write_line(self.layers, {"step": 0, "names": layout.names, "sizes": layout.sizes})
        if self.loop.measures.bounds:
            self.released = self.stack.enter_context((self.folder / RELEASED).open("a"))
        return self

    def __exit__(self, *problem: object) -> None:
        self.stack.close()

    def write(self, record: Record, seconds: dict[str, float]) -> None:
        """One step: its record, and the seconds of its parts."""
        if "layers" in record:
            _write_line(self.layers, record.pop("layers"))
        released = record.pop("released", {})
        if self.released is not None:
            _write_line(self.released, released)
        _write_line(self.metrics, record)
        spent = {name: round(each, 5) for name, each in seconds.items()}
        _write_line(self.times, {"step": record["step"], **spent})
        groups = {"evaluation": record.get("evaluation", {}), "released": released}
        flat = {**record, **{f"{group}/{k}": v for group, own in groups.items() for k, v in own.items()}}
        told = {name: value for name, value in flat.items() if name not in ("step", "released/step")}
        self.audience.hear(record["step"], told)

    def begin(self, metrics: Mapping[str, float | None]) -> None:
        """The starting model's evaluation, so that curves begin where the run does."""
        self.audience.hear(0, {f"evaluation/{name}": value for name, value in metrics.items()})

    def sync(self) -> None:
        """Have everything on disk."""
        for file in (self.metrics, self.layers, self.times, self.released):
            if file is not None:
                os.fsync(file.fileno())


def _cut_after(path: Path, step: int) -> None:
    """Steps after the checkpoint are made again; their lines go, and a torn line with them."""
    if path.exists():
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
        write_atomically(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _write_line(file: TextIO, record: Record) -> None:
    file.write(json.dumps(json_safe(record), allow_nan=False) + "\n")
    file.flush()
