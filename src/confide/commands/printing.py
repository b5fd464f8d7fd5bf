"""How commands print: JSON for programs, tables and numbers for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from confide.runs.compared import ComparedRun, Group
    from confide.runs.comparison import Comparison

Row = Sequence[str]
WIDTH = 110  # letters that a table of runs may take
_FEW = 4  # rows kept at either end of a long table


def print_json(document: Any, escape: bool = True) -> None:
    """One JSON document on standard output; without `escape`, letters beyond ASCII are printed as they are."""
    print(json.dumps(document, indent=2, ensure_ascii=escape, allow_nan=False))


def print_table(
    columns: Row,
    rows: Iterable[Row],
    *,
    title: str | None = None,
    left: int = 1,
    width: int = 0,
    overflow: Literal["fold", "ellipsis"] = "ellipsis",
) -> None:
    """A table whose first `left` columns are aligned to the left and the others to the right; no columns: no header.

    A narrow terminal would cut numbers, and a pipe has no width, so that the table may take at least `width` letters.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=bool(columns))
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, width)).print(table)


def ends(rows: Sequence[Row]) -> list[Row]:
    """The first and the last few rows, with a row between them that counts the others; all rows where they are few."""
    hidden = len(rows) - 2 * _FEW
    if hidden <= 1:
        return list(rows)
    between = [f"... {hidden:,} more ...", *[""] * (len(rows[0]) - 1)]
    return [*rows[:_FEW], between, *rows[-_FEW:]]


def counts(found: dict[str, int]) -> str:
    """Reasons with how often each occurred: `3 too long, 1 empty`."""
    return ", ".join(f"{count:,} {reason}" for reason, count in found.items())


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}"


def print_summary(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    """What a finished run reached and what privacy it spent."""
    _warn_of_large_delta(summary)
    _warn_of_worse_end(summary, out)
    if as_json:
        print_json(summary)
        return
    print_table((), _summary_rows(summary, out), title=f"{summary['task']}, seed {summary['seed']}")
    print(f"model, ledger and page: {out}/model.safetensors, {out}/ledger.jsonl, {out}/report.html")


def _warn_of_large_delta(summary: dict[str, Any]) -> None:
    delta, population = summary["delta"], summary["population"]
    if summary["epsilon"] is not None and delta * population >= 1:
        print(
            f"warning: delta {delta:g} is not below 1/population = {1 / population:.3g}: publishing all data of one "
            "random user would also be within it; lower privacy.delta",
            file=sys.stderr,
        )


def _warn_of_worse_end(summary: dict[str, Any], out: Path) -> None:
    start = summary.get("start")  # runs from before it was measured have none
    if start and (start["gain"] or 0.0) < 0:
        from confide.federated.items import in_words

        name = summary["metric"]
        print(
            f"warning: this run ended {start['said']} ({in_words(name)} {number(start['metrics'][name])} before the "
            f"first step, {number(summary['metrics'][name])} now); `confide diagnose {out}` says what holds it back",
            file=sys.stderr,
        )


def _summary_rows(summary: dict[str, Any], out: Path) -> Iterable[Row]:
    from confide.federated.items import in_words
    from confide.privacy.accountant import COLOURS, shown
    from confide.runs.stated import stated

    for name, value in summary["metrics"].items():
        yield in_words(name), number(value)
    if (start := summary.get("start")) and start["said"]:
        yield "against its start", f"{start['said']} ({number(start['metrics'][summary['metric']])})"
    for name, value in summary["metrics_mean_of_last"].items():
        yield f"{in_words(name)}, mean of the last steps", number(value)
    found = stated(out, curve=False)
    if found.epsilon is None:
        yield "privacy", found.said
    else:
        yield (
            "epsilon",
            f"{shown(found.epsilon)} at delta {found.delta:g}: [{COLOURS[found.strength]}]{found.protection}[/]",
        )
        yield "for every", f"{found.unit.name}. {found.unit.said}"
        if found.trust == "distributed":
            yield "against others", found.said_of_others
        for what in found.own_gaps:
            yield "not covered", what
        for what in found.own_public:
            yield "taken as public", what
        sampler = "" if found.sampler is None else f", {found.sampler.done or found.sampler.assumed}"
        yield "accounted by", f"{found.accountant.upper()}{sampler}, {found.adjacency}"
        yield "noise", f"multiplier {number(summary['noise_multiplier'])}, {found.noise.source}"
    for reason, count in summary.get("skipped", {}).items():
        yield f"left out: {reason}", str(count)
    yield "central steps", f"{summary['steps']} in {summary['seconds']:.1f} s"


def spent(side: ComparedRun | Group) -> str:
    """An epsilon of a comparison with its delta, and its word in its colour."""
    from confide.privacy.accountant import COLOURS, shown

    if side.epsilon is None:
        return f"[{COLOURS['none']}]no guarantee[/]"
    return f"{shown(side.epsilon)} at {side.delta_shown}: [{COLOURS[side.strength]}]{side.protection}[/]"


def print_notes(found: Comparison) -> None:
    """The notes of a comparison; warnings come first and say that they are such."""
    for note in found.notes:
        print(note if note in found.warnings else f"note: {note}")


def print_groups(found: Comparison) -> None:
    """The recipes of a comparison, each with the mean and interval over its seeds."""
    from confide.federated.items import in_words

    rows = []
    for group in found.groups:
        value, between, _ = group.shown
        seeds = ", ".join(str(run.recipe.run.seed) for run in group.runs)
        rows.append((group.name, in_words(group.metric), value, between, seeds, spent(group)))
    columns = ("recipe", "metric", "mean", "95 % interval", "seeds", "epsilon")
    print_table(columns, rows, left=2, width=WIDTH, overflow="fold")
