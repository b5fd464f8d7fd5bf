"""How time and memory of a central step grow: with workers, ranks, users, cohort, parameters, lines of the ledger.

Every point is a new process. Memory is the peak of the process and its workers together. Only what is on the axis of a
curve changes along it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from confide.bench.compare import Candidate, Runner, Say, importable_folder, peak_mib
from confide.errors import UserError

USERS = (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000)
COHORTS = (16, 100, 1000, 10_000, 204_800)
PARAMETERS = (10_000, 100_000, 1_000_000, 8_000_000, 64_000_000, 255_000_000)
LINES = (10, 100, 1000, 10_000, 100_000)
POPULATION = 1_000_000
_RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node")
_OURS = "confide.bench.ours"
_ENOUGH = 60.0  # seconds of rounds: a point whose rounds take long has fewer of them


@dataclass(frozen=True)
class Point:
    """One run: what was varied, and what a step took."""

    curve: str
    x: int
    seconds: float
    peak_mib: float | None


def curves(processes: tuple[int, ...], largest: int) -> list[tuple[str, int, tuple[str, ...]]]:
    """Name, place on the axis, and command of each point."""
    workers = [(f"processes, workload {w}", n, (_OURS, w, "--workers", str(n))) for n in processes for w in "AB"]
    ranks = [(f"ranks, workload {w}", n, (*_RANKS, str(n), "-m", _OURS, w)) for n in processes for w in "AB"]
    all_users = ("--users", str(POPULATION))
    users = [("users, workload A", n, (_OURS, "A", "--users", str(n))) for n in USERS]
    cohorts = [("cohort, workload A", n, (_OURS, "A", "--cohort", str(n), *all_users)) for n in COHORTS]
    sizes = [("parameters, workload C", n, (_OURS, "C", "--parameters", str(n))) for n in PARAMETERS if n <= largest]
    lines = [("lines of the ledger, workload A", n, (_OURS, "A", "--lines", str(n))) for n in LINES]
    return [*workers, *ranks, *users, *cohorts, *sizes, *lines]


def scale(processes: tuple[int, ...], largest: int, rounds: int, say: Say) -> list[Point]:
    found = []
    for curve, x, command in curves(processes, largest):
        say(f"{curve}: {x:,}")
        found.append(measure(curve, x, command, rounds))
    return found


def measure(curve: str, x: int, command: tuple[str, ...], rounds: int) -> Point:
    candidate, times = Candidate("confide", "", command), list[float]()
    with importable_folder() as package:
        runner = Runner(candidate, Path(sys.executable), package, package / "log")
        try:
            runner.next_answer()
            runner.round()
            while not times or (len(times) < rounds and sum(times) < _ENOUGH):
                times.append(float(runner.round()["seconds"]))
            return Point(curve, x, median(times), peak_mib(runner.process.pid))
        except UserError as error:
            raise UserError(f"{curve} at {x:,}: {error}") from None
        finally:
            runner.end()


def growth(points: list[Point], curve: str) -> dict[str, Any]:
    """From the first to the last point of a curve: factors of time and memory."""
    own = sorted((p for p in points if p.curve == curve), key=lambda p: p.x)
    if len(own) < 2:
        return {}
    first, last = own[0], own[-1]
    memory = None if first.peak_mib is None or last.peak_mib is None else last.peak_mib / first.peak_mib
    return {"curve": curve, "from": first.x, "to": last.x, "time": last.seconds / first.seconds, "memory": memory}
