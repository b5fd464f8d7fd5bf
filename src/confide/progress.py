"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 5.0


class Reporter:
    """Counts up to a total and says what is worth saying beside it."""

    def __init__(self, label: str, total: int, done: int = 0, quiet: bool = False) -> None:
        self.label, self.total, self.done, self.quiet = label, total, done, quiet
        self.began, self.start, self.said = time.monotonic(), done, time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Reporter:
        if not self.quiet:
            self._draw()
        return self

    def _draw(self) -> None:
        """Begin a bar, on a terminal. Workers import this module too, and never draw: they are spared rich."""
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            note, label = progress.TextColumn("{task.fields[note]}"), progress.TextColumn("{task.description}")
            times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
            done = progress.BarColumn(), progress.MofNCompleteColumn()
            self.bar = progress.Progress(label, *done, note, *times, console=console)
            self.bar.start()
            self.bar.add_task(self.label, total=self.total, completed=self.done, note="")

    def advance(self, note: str) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, note=note)
        elif not self.quiet and (time.monotonic() - self.said > QUIET_SECONDS or self.done == self.total):
            self.said = time.monotonic()
            left = (self.said - self.began) / (self.done - self.start) * (self.total - self.done)
            print(f"{self.label} {self.done}/{self.total} {note} ({left:.0f} s left)", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


class Stop:
    """Set once somebody asked the program to stop."""

    asked = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """The first Ctrl-C (or SIGTERM) asks for a clean stop; the second one ends the program at once."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        print("stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
