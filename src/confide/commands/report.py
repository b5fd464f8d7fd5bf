"""`confide report`, `compare` and `watch`: looking at runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.options import Folder, Json
from confide.commands.printing import WIDTH, Row, print_groups, print_json, print_notes, print_table, spent

if TYPE_CHECKING:
    from confide.runs.comparison import Comparison


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

    Runs that differ in nothing but `run.seed` are one recipe: with several recipes their means over seeds are compared
    in place of runs (Student's t, paired by seed where both have the same seeds).

    Example: `confide compare runs/demo/global runs/demo/per-layer --out comparison.html`

    Example: `confide compare runs/clip-seed* runs/normalise-seed*`
    """
    from confide.report.comparison import write_page
    from confide.runs import comparison

    found = comparison.compare(runs)
    if out is not None:
        write_page(out, found)
    if as_json:
        print_json(found.to_json())
        return
    _show(found)
    if out is not None:
        print(f"page: {out}")


def watch(run: Folder) -> None:
    """Follow a run that another process makes, until it ends. Ctrl-C ends the watching and leaves the run alone.

    Example: `confide watch runs/a`
    """
    from confide.runs.watch import follow, read_run

    try:
        how = follow(run)
    except KeyboardInterrupt:
        print("no longer watching; the run goes on", file=sys.stderr)
        return
    if how == "stopped":
        step, steps = (seen := read_run(run)).step, seen.recipe.run.steps
        print(f"nobody works in {run}: it stopped after step {step} of {steps}; `confide resume {run}` goes on")
    else:
        said = read_run(run).to_json()["against_start"]
        print(f"finished{f', {said}' if said else ''}; its page is {run / 'report.html'}")


def _show(found: Comparison) -> None:
    if found.groups:
        print_groups(found)
    else:
        _show_runs(found)
    names = [side.name for side in found.sides]
    if found.recipes:
        differing = [(name, *values) for name, values in found.recipes.items()]
        title, columns = "where the recipes differ", ("setting", *names)
        print_table(columns, differing, title=title, left=len(columns), width=WIDTH, overflow="fold")
    else:
        print("the recipes are the same")
    if found.pairs and len(names) > 2:
        matrix = [(name, *(words for words, _ in row)) for name, row in zip(names, found.matrix(), strict=True)]
        title, columns = "the row beside the column", ("", *names)
        print_table(columns, matrix, title=title, left=len(columns), width=WIDTH, overflow="fold")
    if found.pairs:
        verdicts = [
            (
                found.verdict(pair), f"{pair.difference.value:+.4g}",
                f"{pair.difference.low:+.4g} to {pair.difference.high:+.4g}", f"{pair.p:.3g}",
                "yes" if pair.real else "not shown",
            )
            for pair in found.pairs
        ]  # fmt: skip
        columns = ("verdict", "difference", "95 % interval", "p", "real?")
        print_table(columns, verdicts, width=WIDTH, overflow="fold")
    print_notes(found)


def _show_runs(found: Comparison) -> None:
    from confide.federated.items import in_words

    rows = []
    for run in found.runs:
        summary, (value, between, _) = run.summary, run.shown
        cohort = f"{summary['cohort']:,} of {summary['population']:,}"
        steps, seconds = f"{summary['steps']:,}", f"{summary['seconds']:.1f}"
        rows.append((run.name, in_words(run.metric), value, between, spent(run), cohort, steps, seconds))
    columns: Row = ("run", "metric", "value", "95 % interval", "epsilon", "cohort", "steps", "seconds")
    print_table(columns, rows, left=2, width=WIDTH, overflow="fold")
    for run in found.runs:
        if run.against_start:
            print(f"{run.name}: {run.against_start}")
