"""The page that lays runs side by side."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from confide.federated.items import Items, in_words
from confide.files import read_json_lines, write_atomically
from confide.report.charts import Chart, Line, number
from confide.report.sections import MOST_GROUPS
from confide.report.shell import Cell, document, table
from confide.runs.compared import ComparedRun
from confide.runs.comparison import Comparison
from confide.runs.folder import METRICS

_DOT = "<svg width=12 height=12 aria-hidden=true><circle cx=6 cy=6 r=5 class=bar /></svg> "


def write_page(path: Path, found: Comparison) -> Path:
    write_atomically(path, render(found).encode())
    return path


def render(found: Comparison, home: str = "") -> str:
    names = [side.name for side in found.sides]
    title = "Comparison: " + ("; " if any("," in name for name in names) else ", ").join(names)
    warnings = "".join(_said("note", note) for note in found.warnings)
    notes = "".join(_said("soft", note) for note in found.notes if note not in found.warnings)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        warnings,
        *_over_seeds(found),
        *([] if found.groups else [_runs(found)]),
        *_matrix(found),
        *_pairs(found),
        notes,
        *_recipes(found),
        "<h2>Curves</h2><div class=charts>",
        *(chart.svg() for chart in _charts(found)),
        "</div>",
        *([f"<details><summary>All {len(found.runs)} runs</summary>{_runs(found)}</details>"] if found.groups else []),
        *_groups(found),
    ]
    return document(title, body, home)


def _said(kind: str, said: str) -> str:
    return f"<p class={kind}>{html.escape(said[0].upper() + said[1:])}.</p>"


def _runs(found: Comparison) -> str:
    ends = [v for run in found.runs for v in (run.interval or ())]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    metrics = {in_words(run.metric) for run in found.runs}
    one = len(metrics) == 1  # then the column of values is called so
    rows = []
    for place, run in enumerate(found.runs):
        summary, (value, between, epsilon) = run.summary, run.shown
        start = run.against_start.replace(" than its start", "")  # the head of the column says that
        of = f"{summary['cohort']:,} of {summary['population']:,}"
        size = [f"{summary['steps']:,}", f"{summary['seconds']:.4g}", str(summary["seed"])]
        before = _plain_cells([*([] if one else [in_words(run.metric)]), value, between])
        before += f"<td class={run.strength}>{html.escape(epsilon)}</td>{_plain_cells([run.delta_shown])}"
        inner = f"{before}<td>{_whisker(run, low, high) if one else ''}</td>{_plain_cells([start, of, *size])}"
        rows.append(f"<tr class=c{place % 8}><th scope=row>{_DOT}{html.escape(run.name)}</th>{inner}</tr>")
    heads = (
        "run", *(metrics if one else ("metric", "value")), "95 % interval", "epsilon", "delta", "", "against its start",
        "cohort", "steps", "seconds", "seed",
    )  # fmt: skip
    top = "".join(f"<th scope=col>{head}</th>" for head in heads)
    return (
        f"<div class=scroll><table class=fit><thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _plain_cells(cells: list[str]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)


def _whisker(run: ComparedRun, low: float, high: float) -> str:
    """The interval on a scale that all runs share."""
    if run.interval is None or run.value is None or high <= low:
        return ""
    a, b, c = (4 + 132 * (v - low) / (high - low) for v in (*run.interval, run.value))
    line = f"<line class=whisker x1={a:.1f} x2={b:.1f} y1=8 y2=8 />"
    return f"<svg width=140 height=16 aria-hidden=true>{line}<circle class=bar cx={c:.1f} cy=8 r=4 /></svg>"


def _over_seeds(found: Comparison) -> list[str]:
    """The recipes, each with the mean of its seeds."""
    if not found.groups:
        return []
    rows: list[list[Cell]] = []
    for group in found.groups:
        value, between, epsilon = group.shown
        seeds = ", ".join(str(run.recipe.run.seed) for run in group.runs)
        rows.append(
            [
                group.name, in_words(group.metric), (group.value or 0.0, value), between, seeds,
                (math.inf if group.epsilon is None else group.epsilon, epsilon, group.strength), group.delta_shown,
            ]
        )  # fmt: skip
    heads = ["recipe", "metric", "mean", "95 % interval", "seeds", "epsilon", "delta"]
    return [
        "<p class=soft>Runs that differ in nothing but their seed are one recipe. Intervals are Student's, over seeds: "
        "what another seed would give.</p>",
        f"<div class=scroll>{table(heads, rows)}</div>",
    ]


def _matrix(found: Comparison) -> list[str]:
    """Side against side: what the row is beside the column, or that a difference is not shown."""
    if not found.pairs:
        return []
    heads = "".join(f"<th scope=col>{html.escape(side.name)}</th>" for side in found.sides)
    rows = []
    for i, (side, cells) in enumerate(zip(found.sides, found.matrix(), strict=True)):
        inner = "".join(f"<td class='{kind}'>{html.escape(words)}</td>" for words, kind in cells)
        rows.append(f"<tr class=c{i % 8}><th scope=row>{_DOT}{html.escape(side.name)}</th>{inner}</tr>")
    shows = "seeds" if found.groups else "test items"
    return [
        "<h2>Verdicts</h2><p class=soft>How a row is beside a column. A difference that is &ldquo;not shown&rdquo; may "
        f"be there: these {shows} do not show it.</p>",
        f"<div class=scroll><table id=verdicts><thead><tr><th></th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    ]


def _pairs(found: Comparison) -> list[str]:
    if not found.pairs:
        return []
    rows: list[list[Cell]] = [
        [
            found.verdict(pair), (pair.difference.value, f"{pair.difference.value:+.4g}"),
            (pair.difference.low, f"{pair.difference.low:+.4g} to {pair.difference.high:+.4g}"),
            (pair.p, f"{pair.p:.3g}"),
            "yes" if pair.real else "not shown",
        ]
        for pair in found.pairs
    ]  # fmt: skip
    first = found.runs[0].items
    units = "" if first is None else first.groups_called if first.clustered else "test items"
    paired, test = f"paired over the same {html.escape(units)}", "paired randomisation test"
    if found.groups:
        paired, test = "of the means over seeds, paired where both have the same seeds", "Student's t; else Welch's"
    return [
        "<h2>Differences</h2>",
        f"<p class=soft>Second minus first, {paired}; real where p, raised for the "
        f"{len(rows)} pair{'s' if len(rows) > 1 else ''} by Holm's method, is below 0.05 ({test}).</p>",
        f"<div class=scroll>{table(['verdict', 'difference', '95 % interval', 'p', 'real?'], rows)}</div>",
    ]


def _recipes(found: Comparison) -> list[str]:
    if not found.recipes:
        return ["<h2>Recipes</h2><p>The recipes are the same.</p>"]
    heads = ["setting", *(side.name for side in found.sides)]
    rows: list[list[Cell]] = [[name, *values] for name, values in found.recipes.items()]
    return ["<h2>Where the recipes differ</h2>", f"<div class=tall>{table(heads, rows, sortable=False)}</div>"]


def _charts(found: Comparison) -> list[Chart]:
    records = [read_json_lines(run.folder / METRICS) for run in found.runs]

    began = [run.beginning for run in found.runs]
    scores = [
        [
            *([{"step": 0, **start.metrics}] if start else []),
            *({"step": r["step"], **r.get("evaluation", {})} for r in own),
        ]
        for start, own in zip(began, records, strict=True)
    ]

    # Runs of one recipe have one colour.
    colours = {run.folder: place for place, group in enumerate(found.groups) for run in group.runs}
    lengths = {run.summary["steps"] for run in found.runs}
    axis = "step" if len(lengths) == 1 else "% of the run"  # of runs of unlike lengths the same share is compared

    def at(run: ComparedRun, step: float) -> float:
        return step if len(lengths) == 1 else 100 * step / run.summary["steps"]

    def lines(name: str, kept: list[list[dict[str, Any]]] = records) -> list[Line]:
        known = [[r for r in own if r.get(name) is not None] for own in kept]
        return [
            Line(
                run.name,
                [at(run, float(r["step"])) for r in own],
                [r[name] for r in own],
                colours.get(run.folder, place),
            )
            for place, (run, own) in enumerate(zip(found.runs, known, strict=True))
        ]

    metrics = dict.fromkeys(run.metric for run in found.runs)
    return [
        *(
            Chart(in_words(metric), "Of the central model on the test set.", lines(metric, scores), x=axis)
            for metric in metrics
        ),
        Chart("loss of the cohort", "Mean loss of the users, before they train.", lines("loss"), x=axis),
        Chart("privacy spent", "Epsilon so far.", lines("epsilon"), x=axis, log=True),
        Chart("signal-to-noise ratio", "Aggregate over noise.", lines("snr"), x=axis, log=True),
    ]


def _groups(found: Comparison) -> list[str]:
    """Speakers or classes side by side, for the runs that share the first one's test set."""
    kept: list[tuple[str, Items]] = [(run.name, run.items) for run in found.runs if run.items is not None]
    if not kept or len(kept[0][1].names) < 2:
        return []
    first = kept[0][1]
    kept = [(name, items) for name, items in kept if items.test == first.test]
    tables = [{row[0]: row[1] for row in items.table()} for _, items in kept]
    rows: list[list[Cell]] = [
        [group, *((own[group], number(own[group])) for own in tables)]
        for group in list(tables[0])[:MOST_GROUPS]
        if all(group in own for own in tables)
    ]
    heads = [first.group, *(name for name, _ in kept)]
    return [
        f"<section><h2>By {html.escape(first.group)}</h2>",
        f"<p><label>Find <input type=search placeholder='{html.escape(first.group, True)}'></label></p>",
        f"<div class=tall>{table(heads, rows)}</div></section>",
    ]
