"""How time and memory of a central step grow with processes, cohort and parameters. Every point is a new process.

Memory is the peak of the process and its workers together. Every point of a curve has the same population, so that only
what is on the axis changes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from confide.bench.compare import Candidate, Runner, Say, importable_folder, peak_mib
from confide.errors import UserError

COHORTS = (16, 100, 1000, 10_000)
PARAMETERS = (1_000_000, 8_000_000, 64_000_000, 255_000_000)
POPULATION = 10_000


@dataclass(frozen=True)
class Point:
    """One run: what was varied, and what a step took."""

    curve: str
    x: int
    seconds: float
    peak_mib: float | None


def curves(processes: tuple[int, ...], largest: int) -> list[tuple[str, int, tuple[str, ...]]]:
    """Name, place on the axis, and arguments of each point."""
    workers = [(f"processes, workload {w}", n, (w, "--workers", str(n))) for n in processes for w in "AB"]
    users = ("--users", str(POPULATION))
    cohorts = [("cohort, workload A", n, ("A", "--cohort", str(n), *users)) for n in COHORTS]
    sizes = [("parameters, workload C", n, ("C", "--parameters", str(n))) for n in PARAMETERS if n <= largest]
    return [*workers, *cohorts, *sizes]


def scale(processes: tuple[int, ...], largest: int, rounds: int, say: Say) -> list[Point]:
    found = []
    for curve, x, arguments in curves(processes, largest):
        say(f"{curve}: {x:,}")
        found.append(measure(curve, x, arguments, rounds))
    return found


def measure(curve: str, x: int, arguments: tuple[str, ...], rounds: int) -> Point:
    candidate = Candidate("confide", "", ("confide.bench.ours", *arguments))
    with importable_folder() as package:
        runner = Runner(candidate, Path(sys.executable), package, package / "log")
        try:
            runner.next_answer()
            times = [float(runner.round()["seconds"]) for _ in range(rounds + 1)][1:]
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
