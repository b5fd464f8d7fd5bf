"""`confide report`, `compare` and `watch`: looking at runs. Heavy imports happen only where they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from confide.runs.comparison import Comparison

Folder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]


def mount(app: typer.Typer) -> None:
    """Add the commands to the main one."""
    app.command()(report)
    app.command()(compare)
    app.command()(watch)


def report(
    run: Folder,
    figures: Annotated[
        bool, typer.Option("--figures", help="Draw the curves as PNG files too, in RUN/figures.")
    ] = False,
) -> None:
    """Write the page of a run again: one HTML file that opens from disk, without a network."""
    from confide.report import page
    from confide.runs import folder

    print(page.write_report(run, folder.held_recipe(run), folder.summary_if_finished(run)))
    if figures:
        for path in page.draw_figures(run):
            print(path)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, two or more.")],
    out: Annotated[Path | None, typer.Option(help="Write a page to this HTML file too.")] = None,
    as_json: Json = False,
) -> None:
    """Lay runs side by side, with 95 % intervals, and say which differences are real.

    Intervals come from drawing the test speakers (speech) or test items again; runs on the same test set are compared
    in pairs. A difference is real where a paired randomisation test, corrected for the number of pairs, finds it.
    Runs on different test sets are shown, and said to be not comparable.

    Example: `confide compare runs/demo/global runs/demo/per-layer --out comparison.html`
    """
    from confide.report.comparison import write_page
    from confide.runs.comparison import compare as compared

    found = compared(runs)
    if out is not None:
        write_page(out, found)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    _show(found)
    if out is not None:
        print(f"page: {out}")


def watch(run: Folder) -> None:
    """Follow a run that another process makes, until it ends. Ctrl-C ends the watching and leaves the run alone.

    Example: `confide watch runs/a`
    """
    from confide.runs.watch import command

    command(run)


def _show(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from confide.privacy.accountant import shown

    console = Console(width=max(Console().width, 110))
    table = Table()
    for name in ("run", "metric", "value", "95 % interval", "epsilon", "cohort", "steps", "seconds"):
        table.add_column(name, justify="left" if name in ("run", "metric") else "right", overflow="fold")
    for run in found.runs:
        summary = run.summary
        between = "" if run.interval is None else f"{run.interval[0]:.4g} to {run.interval[1]:.4g}"
        epsilon = (
            "no guarantee" if summary["epsilon"] is None else f"{shown(summary['epsilon'])} at {summary['delta']:g}"
        )
        table.add_row(
            run.name, run.metric, "not finite" if run.value is None else f"{run.value:.4g}", between, epsilon,
            f"{summary['cohort']:,} of {summary['population']:,}", f"{summary['steps']:,}", f"{summary['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    _show_recipes(console, found)
    if found.pairs:
        pairs = Table()
        for name in ("verdict", "difference", "95 % interval", "p", "real?"):
            pairs.add_column(name, justify="left" if name == "verdict" else "right", overflow="fold")
        for pair in found.pairs:
            gap = pair.difference
            pairs.add_row(
                found.verdict(pair), f"{gap.value:+.4g}", f"{gap.low:+.4g} to {gap.high:+.4g}", f"{pair.p:.3g}",
                "yes" if pair.real else "not shown",
            )  # fmt: skip
        console.print(pairs)
    for note in found.notes:
        print(f"note: {note}")


def _show_recipes(console: Any, found: Comparison) -> None:
    from rich.table import Table

    if not found.recipes:
        print("the recipes are the same")
        return
    table = Table(title="where the recipes differ")
    for name in ("setting", *(run.name for run in found.runs)):
        table.add_column(name, overflow="fold")
    for name, values in found.recipes.items():
        table.add_row(name, *values)
    console.print(table)
