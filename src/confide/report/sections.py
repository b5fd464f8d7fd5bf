"""The sections of a run's page: curves, tensors, speakers or classes, time, and how to run it again."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from confide.federated.items import Items, in_words
from confide.recipe import Recipe
from confide.report.charts import COLOURS, Chart, Line, number
from confide.report.layers import Layers, depth, layers_to_draw, over_steps
from confide.report.shell import Cell, facts, table

Record = dict[str, Any]
MOST_GROUPS = 1000
PARTS = {
    "train": "users train", "release": "ledger and noise", "move": "central step", "evaluate": "evaluation",
}  # fmt: skip


def _known(records: list[Record], name: str) -> tuple[list[float], list[float | None]]:
    """Steps and values where a record has one."""
    known = [(float(r["step"]), r[name]) for r in records if name in r]
    return [step for step, _ in known], [value for _, value in known]


def curves(records: list[Record], recipe: Recipe, metric: str, began: Mapping[str, float | None]) -> list[str]:
    """How the run went, step by step; `began` is the evaluation of the model that it began with."""
    steps = [float(r["step"]) for r in records]

    def of(name: str, label: str, colour: int = 0, dashed: bool = False) -> Line:
        return Line(label, steps, [r.get(name) for r in records], colour, dashed)

    scores = [(0.0, began)] if began else []
    scores += [(float(r["step"]), r["evaluation"]) for r in records if "evaluation" in r]
    values = [e.get(metric) for _, e in scores]
    others = sorted({name for _, e in scores for name in e} - {metric})
    rate = recipe.sampling.kind
    cohorts = [float(r["cohort"]) for r in records]
    size = f"on average {np.mean(cohorts):.4g} users"
    charts = [
        Chart(
            in_words(metric), "Of the central model on the test set.",
            [Line(in_words(metric), [s for s, _ in scores], values)],
            log=metric == "suboptimality" and all(v is not None and v > 0 for v in values),
        ),
        *(
            Chart(in_words(name), "Of the central model on the test set.",
                  [Line(in_words(name), [s for s, _ in scores], [e.get(name) for _, e in scores])])
            for name in others
        ),
        Chart("loss of the cohort", "Mean loss of the users at the central model, before they train.",
              [of("loss", "loss")]),
        Chart("norm of a user's update", "Mean over the cohort before and after bounding, and the bound in force.",
              [of("update_norm", "before bounding", 7), of("bounded_norm", "after bounding", 0),
               of("bound", "bound", 1, True)], log=True),
        Chart("norm of a local gradient", "Mean over the cohort and every user's local steps, before it is clipped.",
              [of("gradient_norm", "local gradients")], log=True),
        Chart("share bounded", "Share of the cohort whose updates were changed by bounding. Near 1 the bound decides "
              "how far every user moves the model; near 0 it only guards.",
              [of("share_bounded", "share")], from_zero=True),
        Chart("signal-to-noise ratio", "Norm of the aggregated updates divided by the norm of the noise on them.",
              [of("snr", "snr")], from_zero=True),
        Chart("privacy spent", "Epsilon of the ledger so far, at a few points of the run.",
              [Line("epsilon", *_known(records, "epsilon"))], from_zero=True),
        Chart("users in the cohort", f"How many users took part in each step ({rate}): {size}.",
              [Line("users", steps, list(cohorts))], from_zero=True),
    ]  # fmt: skip
    drawn = [chart.svg() for chart in charts]
    return ["<h2 id=curves>Curves</h2><div class=charts>", *drawn, "</div>"]


def tensors(folder: Path) -> list[str]:
    """Updates, signal and noise by kind of tensor, where there are enough tensors to compare."""
    layers = layers_to_draw(folder)
    if layers is None:
        return []
    steps = [float(s) for s in layers.steps]
    charts = [_ratios(layers, steps)] if "noise" in layers.values else []
    charts += [_depths(layers)] if any(depth(name) is not None for name in layers.names) else []
    charts += [_norms(layers, what, places, steps) for what, places in layers.kinds.items()]
    return [
        "<h2 id=tensors>Tensors</h2><details><summary>Norms of updates, signal and noise, kind by kind</summary>",
        f"<p class=soft>{len(layers.names)} tensors by kind, on the {len(steps)} steps after which the model was "
        "evaluated (PFL-ASR Figures 5, 10, 13 and 14).</p>",
        f"<div class=scroll style='margin-bottom:1rem'>{_kinds(layers)}</div>",
        "<div class=charts>",
        *(chart.svg() for chart in charts),
        "</div></details>",
    ]


def groups(items: Items | None) -> list[str]:
    """The metric of every speaker, class or document, the worst first."""
    if items is None or len(items.names) < 2:
        return []
    rows = items.table()
    ranks = [float(i + 1) for i in range(len(rows))]
    chart = Chart(
        f"{in_words(items.metric)} by {items.group}", f"Every {items.group} of the test set, the worst on the left.",
        [Line(in_words(items.metric), ranks, [row[1] for row in rows], dots=True)], x=f"{items.group}, by rank",
        from_zero=True, level=items.value,
    )  # fmt: skip
    shown: list[list[Cell]] = [
        [name, (value, f"{value:.4g}"), (float(many), f"{many:,}"), (size, f"{size:,.0f}")]
        for name, value, many, size in rows[:MOST_GROUPS]
    ]
    cut = f" The {MOST_GROUPS:,} worst are listed." if len(rows) > MOST_GROUPS else ""
    heads = [items.group, in_words(items.metric), "items", "words" if items.metric == "wer" else "size"]
    return [
        f"<section><h2 id=groups>By {html.escape(items.group)}</h2>",
        f"<p class=soft>{len(rows):,} {html.escape(items.groups_called)} of the test set; dotted: all together, "
        f"{items.value:.4g}.{cut}</p><div class=charts>{chart.svg()}<div>",
        f"<p><label>Find <input type=search placeholder='{html.escape(items.group, True)}'></label></p>"
        if len(rows) > 12
        else "",
        f"<div class=tall>{table(heads, shown)}</div></div></div></section>",
    ]


def worst(items: Items | None) -> list[str]:
    """The test items that were answered worst, with what was right and what was answered."""
    if items is None or not items.worst:
        return []
    rows: list[list[Cell]] = [
        [reference or "(nothing)", answer or "(nothing)", group, (rate, f"{rate:.4g}")]
        for group, reference, answer, rate in items.worst
    ]
    heads = ["reference", "answer", items.group, in_words(items.metric)]
    return [
        "<h2 id=worst>What was heard worst</h2>",
        f"<p class=soft>The {len(rows)} test utterances with the most errors for their words.</p>",
        f"<div class='tall wrap'>{table(heads, rows)}</div>",
    ]


def times(records: list[Record], parts: list[Record]) -> list[str]:
    """What took how long, and the slowest steps."""
    records = [r for r in records if "seconds" in r]
    if not records:
        return []
    ends = [float(r["seconds"]) for r in records]
    each = np.diff([0.0, *ends])
    # After a stop, the first step's line follows one of another process, but seconds go on: no difference is negative.
    steps = [int(r["step"]) for r in records]
    curve = Chart("seconds per step", f"In all {ends[-1]:,.4g} s for {len(steps):,} steps, without evaluation.",
                  [Line("seconds", [float(s) for s in steps], [max(float(e), 0.0) for e in each])],
                  from_zero=True)  # fmt: skip
    totals = {name: sum(float(p.get(name) or 0) for p in parts) for name in PARTS}
    whole = sum(totals.values())
    out = ["<h2 id=time>Time</h2>"]
    if whole > 0:
        ordered = sorted(totals, key=lambda name: -totals[name])
        bar = "".join(
            f"<span class=c{list(PARTS).index(n)} style='flex:{totals[n] / whole:.5f}' title='{PARTS[n]}'></span>"
            for n in ordered
        )
        cells: list[list[Cell]] = [
            [PARTS[n], (totals[n], f"{totals[n]:,.3g} s"), (totals[n] / whole, f"{100 * totals[n] / whole:.1f} %")]
            for n in ordered
        ]
        out += [f"<div class=parts aria-hidden=true>{bar}</div>", table(["part", "seconds", "share"], cells)]
    else:
        out.append("<p class=soft>The parts of a step were not timed in this run.</p>")
    slow = [int(i) for i in np.argsort(-each)[:5]]
    rows: list[list[Cell]] = [
        [
            (float(steps[i]), str(steps[i])),
            (float(each[i]), f"{each[i]:.4g} s"),
            (float(records[i]["cohort"]), f"{records[i]['cohort']:,}"),
        ]
        for i in slow
    ]
    slowest = f"<div><h3>The slowest steps</h3>{table(['step', 'seconds', 'users'], rows)}</div>"
    return [*out, f"<div class=charts style='margin-top:1rem'>{curve.svg()}{slowest}</div>"]


def again(folder: Path, recipe: Recipe, summary: Record | None) -> list[str]:
    """The command that makes this run again, what it ran on, and the recipe with every default."""
    where = str(folder)
    command = shlex.join(["confide", "train", f"{where}/recipe.yaml", "--out", f"{where}-again"])
    repeat = (
        "The noise came from the operating system: the run can be made again, its noise cannot."
        if recipe.privacy.source == "system"
        else "The same recipe and seed give the same model, byte for byte, where the environment's key is the same."
    )
    ran = (summary or {}).get("environment")
    rows = list(ran.items()) if ran else [("environment", "not recorded in this run")]
    return [
        "<h2 id=again>Run it again</h2>",
        f"<pre id=command>{html.escape(command)}</pre>",
        f"<p><button type=button class=copy data-copy=command>Copy</button> <span class=soft>{repeat}</span></p>",
        "<h3>Environment</h3>",
        facts(rows),
        f"<h2 id=recipe>Recipe</h2><pre>{html.escape(recipe.to_yaml())}</pre>",
    ]


def _norms(layers: Layers, what: str, places: list[int], steps: list[float]) -> Chart:
    fields = (("delta", "update", 7), ("bounded", "bounded", 0), ("signal", "aggregate", 2), ("noise", "noise", 1),
              ("gradient", "local gradient", 3))  # fmt: skip
    lines = [
        Line(label, steps, _finite(layers.norm(field, places)), colour, dashed=field == "noise")
        for field, label, colour in fields
        if field in layers.values
    ]
    return Chart(what, f"{len(places)} tensor{'s' if len(places) > 1 else ''} of kind {what}: norm of the users' "
                 "updates, of their aggregate and of the noise.", lines, log=True)  # fmt: skip


def _ratios(layers: Layers, steps: list[float]) -> Chart:
    places = {what: place for place, what in enumerate(layers.kinds)}
    lines = [
        Line(what, steps, _finite(ratio), places[what], places[what] >= COLOURS)
        for what, ratio in layers.ratios().items()
    ]
    lines.sort(key=lambda line: -(line.ys[-1] or 0.0))
    return Chart("signal-to-noise ratio by kind", "The aggregate's norm over the noise's expected norm, in the order "
                 "of the last step. A kind far below the others is drowned first when the noise grows.", lines,
                 log=True, level=1.0)  # fmt: skip


def _depths(layers: Layers) -> Chart:
    mean, deviation = over_steps(layers)
    lines: list[Line] = []
    for what, places in layers.kinds.items():
        rows = [i for i in places if depth(layers.names[i]) is not None and not layers.names[i].endswith("bias")]
        if len(rows) < 2:
            continue
        at = [float(depth(layers.names[i]) or 0) for i in rows]
        lines.append(Line(what, at, _finite(mean[rows]), len(lines), low=_finite((mean - deviation)[rows]),
                          high=_finite((mean + deviation)[rows])))  # fmt: skip
    return Chart("updates over depth", "Norm of the users' updates before bounding, mean and deviation over all "
                 "recorded steps, by block; biases left out.", lines, x="block", log=True)  # fmt: skip


def _kinds(layers: Layers) -> str:
    """The last recorded step in numbers."""
    fields = [f for f in ("delta", "bounded", "signal", "noise", "weights") if f in layers.values]
    names = {"delta": "update", "bounded": "bounded", "signal": "aggregate", "noise": "noise", "weights": "weights"}
    rows: list[list[Cell]] = []
    for what, places in layers.kinds.items():
        norms = {f: float(layers.norm(f, places)[-1]) for f in fields}
        cells: list[Cell] = [what, (float(len(places)), str(len(places)))]
        cells += [(norms[f], number(norms[f])) for f in fields]
        if "noise" in fields:
            ratio = norms["signal"] / norms["noise"] if norms["noise"] else 0.0
            cells.append((ratio, number(ratio) if norms["noise"] else "no noise"))
        rows.append(cells)
    heads = ["kind", "tensors", *(names[f] for f in fields), *(["signal / noise"] if "noise" in fields else [])]
    return table(heads, rows)


def _finite(values: Iterable[float]) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]
