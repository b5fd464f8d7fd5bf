"""`confide release`: a research run once more, with noise that may leave."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.options import FinishedRun, Json, Workers
from confide.commands.printing import print_json, print_summary

if TYPE_CHECKING:
    from confide.runs.release import Point

_MARKS = {"ok": "[x]", "look": "[?]", "stop": "[!]"}


def release(
    run: FinishedRun,
    out: Annotated[Path | None, typer.Option(help="A new folder for the run that may be published.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only show the checklist.")] = False,
    workers: Workers = 1,
    as_json: Json = False,
) -> None:
    """Train a research run again for a release: the same recipe, with noise of the operating system.

    First comes a checklist: epsilon, delta, the unit, the population, the starting model, the budget. \\[x] is fine,
    [?] is for you to judge, [!] stops the release. A research run's own model must not leave: whoever knows the seed
    can subtract its noise. The new run cannot be repeated, and each of its steps is paid for once.

    Example: `confide release runs/digits --out runs/digits-release`
    """
    from confide.errors import UserError
    from confide.report.page import write_report
    from confide.runs import release as releasing

    points = releasing.checklist(run)
    if not as_json:
        _show(points)
    if check:
        if as_json:
            print_json({"checklist": [asdict(point) for point in points]})
        if any(point.verdict == "stop" for point in points):
            raise typer.Exit(1)
        return
    if out is None:
        raise UserError("no --out was given; expected a new folder for the run, or --check for the list alone")
    made = releasing.release(run, out, workers, as_json, write_report)
    if as_json:
        print_json(made)
        return
    print_summary(made["summary"], out, False)
    print(f"next: `confide guarantee {out}`, then `confide publish {out} PUBLIC`, and give away nothing but PUBLIC")


def _show(points: list[Point]) -> None:
    width = max(len(point.name) for point in points)
    for point in points:
        print(f"{_MARKS[point.verdict]} {point.name:<{width}}  {point.said}")
