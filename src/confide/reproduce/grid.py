"""Grids of runs that go on after a stop: every finished cell is one synced line of `cells.jsonl`.

A cell is named by its recipe's digest and the package's version, so a changed recipe or program is run again and
everything else is not. Cells run in processes of one thread each, which end with the process that began them.

Cells that are runs in folders of their own (`train_once`, as in `confide sweep`) need no such file: the folder says
how far the run came, and Ctrl-C stops them after their step, where other cells are finished first.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from confide import __version__
from confide.build import make_task
from confide.errors import Stopped, UserError
from confide.federated.task import Task
from confide.files import write_atomically
from confide.progress import Reporter, Stop, stop_on_signal
from confide.recipe import Recipe
from confide.report.page import write_report
from confide.runs import folder as runs

_PATIENCE = 0.5  # seconds until Ctrl-C reaches the runs
Measure = Callable[[Recipe], dict[str, Any]]
"""Runs one cell. A function of a module, because it is called in another process."""


@dataclass
class Result:
    """What a `reproduce` command has to say."""

    rows: list[dict[str, Any]]
    claims: list[dict[str, Any]]
    text: str


def claim(text: str, value: float, threshold: float, holds: bool) -> dict[str, Any]:
    return {"claim": text, "value": value, "threshold": threshold, "holds": bool(holds)}


def run_cells(
    folder: Path, cells: Sequence[Recipe], measure: Measure, workers: int, label: str, quiet: bool
) -> list[dict[str, Any]]:
    """The measurements of all cells, in their order; those that are on disk already are not made again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cells.jsonl"
    done = _read(path)
    missing = list({_name(cell): cell for cell in cells if _name(cell) not in done}.values())  # each once
    if missing:
        with path.open("a") as file:

            def keep(cell: Recipe, value: dict[str, Any]) -> None:
                done[_name(cell)] = value
                file.write(json.dumps({"cell": _name(cell), "value": value}, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())

            measure_each(missing, measure, workers, label, quiet, keep, len(cells))
    return [done[_name(cell)] for cell in cells]


def measure_each(
    cells: Sequence[Recipe], measure: Measure, workers: int, label: str, quiet: bool,
    keep: Callable[[Recipe, dict[str, Any]], object], total: int,
) -> None:  # fmt: skip
    """Measure the cells that are left of so many, and have each kept as soon as it is there."""
    with Reporter(label, total, total - len(cells), quiet) as reporter, stop_on_signal() as stop:
        for cell, value in _run(cells, measure, workers, stop):
            keep(cell, value)
            reporter.advance("")
        if stop.asked:
            raise Stopped("stopped; everything that is finished is kept. The same command goes on from there")


def claim_text(one: dict[str, Any], form: str) -> str:
    """A claim with its number and its threshold in this form, and whether it holds."""
    mark = "holds" if one["holds"] else "DOES NOT HOLD"
    return f"{mark}: {one['claim']}: {one['value']:{form}} (threshold {one['threshold']:{form}})"


def run_groups(
    folder: Path, groups: Sequence[Sequence[Recipe]], measure: Measure, workers: int, label: str, quiet: bool
) -> list[list[dict[str, Any]]]:
    """The measurements of groups of cells, such as the seeds of each row of a table."""
    values = iter(run_cells(folder, [cell for group in groups for cell in group], measure, workers, label, quiet))
    return [[next(values) for _ in group] for group in groups]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table's rows to rows.csv in a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / "rows.csv", text.getvalue().encode())


def text_table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """These columns of the rows under their names, as lines of text."""
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in names}
    head = "  ".join(f"{name:>{widths[name]}}" for name in names)
    return [head, *("  ".join(f"{row[name]!s:>{widths[name]}}" for name in names) for row in rows)]


def train_once(recipe: Recipe, place: Path, workers: int, quiet: bool) -> dict[str, Any]:
    """The summary of a run, which is made, or taken up where it stopped, unless it is finished."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a process of a grid: a run knows how to stop
        signal.signal(signal.SIGINT, signal.default_int_handler)
    unfinished = (place / runs.RECIPE).exists() and not (place / runs.SUMMARY).exists()
    if unfinished:
        return runs.resume(place, workers, quiet, page=write_report)
    return runs.train(recipe, place, workers, quiet, page=write_report)


@lru_cache(maxsize=2)
def cached_task(settings: Any, seed: int) -> Task:
    """Cells that differ only in bounding, noise or rates share their users' data."""
    return make_task(settings, seed)


def _run(
    cells: Sequence[Recipe], measure: Measure, workers: int, stop: Stop
) -> Iterator[tuple[Recipe, dict[str, Any]]]:
    others = set(active_children())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker) as pool:
        waiting, running = list(cells)[::-1], dict[Future[dict[str, Any]], Recipe]()
        told = False
        while running or (waiting and not stop.asked):
            while waiting and len(running) < workers and not stop.asked:
                cell = waiting.pop()
                running[pool.submit(measure, cell)] = cell
            for future in wait(running, timeout=_PATIENCE, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                try:
                    yield cell, future.result()
                except (Stopped, KeyboardInterrupt):  # a run in a folder of its own, which goes on from there
                    stop.asked = True
            if stop.asked and not told:
                told = True
                for child in set(active_children()) - others:
                    if child.pid is not None:
                        os.kill(child.pid, signal.SIGINT)


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, which tells its children, and end when the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _name(cell: Recipe) -> str:
    return f"{__version__}/{cell.digest}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Finished cells; a torn last line is a cell that was not finished."""
    done: dict[str, dict[str, Any]] = {}
    if path.exists():
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                document = json.loads(line)
                done[document["cell"]] = document["value"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number}: not a finished cell; remove the line or the file") from None
        if torn:
            write_atomically(path, whole + b"\n" if whole else b"")
    return done
