"""The files that a run writes while it goes: metrics, norms of each tensor, seconds, and TensorBoard's events."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from confide.errors import missing
from confide.files import write_atomically
from confide.run import Loop
from confide.runs.records import Record, json_safe

METRICS, LAYERS, TIMES = "metrics.jsonl", "layers.jsonl", "times.jsonl"
RELEASED = "released.jsonl"
"""The figures of `privacy.metrics`: the one record of steps that the guarantee covers."""


class Recording:
    """Open files of a run; use it in a `with`. Lines of steps that will be made again are cut off at the start."""

    def __init__(self, folder: Path, loop: Loop, step: int) -> None:
        self.folder, self.loop, self.step = folder, loop, step
        self.stack = ExitStack()
        self.released: TextIO | None = None

    def __enter__(self) -> Recording:
        for name in (METRICS, LAYERS, TIMES, RELEASED):
            _cut_after(self.folder / name, self.step)
        self.board = self.stack.enter_context(_events(self.folder, self.step + 1))
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
        if self.board is None:
            return
        groups = {"evaluation": record.get("evaluation", {}), "released": released}
        flat = {**record, **{f"{group}/{k}": v for group, own in groups.items() for k, v in own.items()}}
        for name, value in flat.items():
            if name not in ("step", "released/step") and isinstance(value, int | float):
                self.board.add_scalar(name, value, record["step"])

    def begin(self, metrics: Mapping[str, float | None]) -> None:
        """The starting model's evaluation, so that curves begin where the run does."""
        for name, value in metrics.items() if self.board is not None else ():
            if value is not None:
                self.board.add_scalar(f"evaluation/{name}", value, 0)

    def sync(self) -> None:
        """Have everything on disk."""
        for file in (self.metrics, self.layers, self.times, self.released):
            if file is not None:
                os.fsync(file.fileno())


@contextmanager
def _events(folder: Path, first_step: int) -> Iterator[Any]:
    """TensorBoard's writer, where TensorBoard is installed.

    Its thread meets a full disk too and would print a traceback beside our own message.
    """
    if missing("tensorboard"):
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter

    before = threading.excepthook

    def hook(problem: threading.ExceptHookArgs) -> None:
        if not isinstance(problem.exc_value, OSError):
            before(problem)

    threading.excepthook = hook
    try:
        board = SummaryWriter(str(folder), purge_step=first_step)
        try:
            yield board
        finally:
            board.close()
    finally:
        threading.excepthook = before


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
