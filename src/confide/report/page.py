"""The page that a run leaves behind: one HTML file with everything in it, readable without a network."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.federated.car_adaptive import NO_GUARANTEE, CarAdaptive
from confide.files import write_atomically
from confide.privacy.accountant import shown
from confide.recipe import Recipe
from confide.report.figures import draw_run
from confide.report.layer_figures import draw_layers

_STYLE = """
body{font:15px/1.55 system-ui,sans-serif;max-width:62rem;margin:2.5rem auto;padding:0 1.2rem;color:#1c1917}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2.2rem}.sub{color:#57534e;margin-top:0}
table{border-collapse:collapse}td{padding:.25rem 1.2rem .25rem 0;border-bottom:1px solid #e7e5e4;vertical-align:top}
td:first-child{color:#57534e}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1.2rem}
.wide{grid-template-columns:1fr}figure{margin:0}img{width:100%}figcaption{color:#57534e;font-size:.85rem}
.note{border-left:4px solid #c2410c;background:#fff7ed;padding:.6rem 1rem}
.promise{border-color:#1d4ed8;background:#eff6ff}
pre{background:#fafaf9;border:1px solid #e7e5e4;padding:1rem;overflow:auto;font-size:.8rem}
"""


def write_report(folder: Path, recipe: Recipe, summary: dict[str, Any] | None) -> Path:
    """Draw the figures and write the page; an unfinished run gets one too."""
    records = _records(folder / "metrics.jsonl")
    metric = next((next(iter(r["evaluation"])) for r in records if "evaluation" in r), "metric")
    figures = draw_run(folder, records, metric)
    title = html.escape(recipe.task.kind)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p class=sub>{html.escape(recipe.description)}</p>",
        _promise(recipe, summary),
        "<h2>Results</h2>",
        _table(_results(summary)) if summary else "<p class=note>This run is not finished.</p>",
        "<h2>Curves</h2><div class=figures>",
        *(_figure(path, said) for path, said in figures),
        "</div>",
        *_tensors(folder),
        "<p>These curves come from the users' data and are <b>not</b> covered by the privacy guarantee.</p>",
        f"<h2>Recipe</h2><pre>{html.escape(recipe.to_yaml())}</pre></html>",
    ]
    path = folder / "report.html"
    write_atomically(path, "\n".join(parts).encode())
    return path


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the metrics; a run that was killed may have left a part of one at the end."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if not lines:
        raise UserError(f"{path} has no step in it yet; there is nothing to draw")
    return [json.loads(line) for line in lines]


def _tensors(folder: Path) -> list[str]:
    """Figures of the model's tensors, where there are enough of them to be compared."""
    figures = draw_layers(folder)
    if not figures:
        return []
    return ["<h2>Tensors</h2><div class='figures wide'>", *(_figure(path, said) for path, said in figures), "</div>"]


def _promise(recipe: Recipe, summary: dict[str, Any] | None) -> str:
    if recipe.privacy.mechanism == "partial":
        which = html.escape(", ".join(recipe.privacy.tensors))
        return (
            f"<p class=note>Noise was added only to {'all tensors but ' if recipe.privacy.all_but else ''}{which}, to "
            "see what it does there: this run gives <b>no privacy guarantee</b>.</p>"
        )
    if summary is None:
        return ""
    if isinstance(recipe.bounding.adaptive, CarAdaptive):
        return (
            f"<p class=note>Every message carried noise, but this run has <b>{html.escape(NO_GUARANTEE)}</b>; there is "
            "no epsilon to state. With a guarantee: <code>bounding.adaptive.kind: quantile</code>, or a fixed bound "
            "with <code>privacy.trust: local</code>.</p>"
        )
    if summary["epsilon"] is None:
        return "<p class=note>No noise was added: this run gives <b>no privacy guarantee</b>.</p>"
    seeded = (
        " The noise was seeded, which makes the run repeatable: whoever knows the seed can subtract it. "
        "<b>For research, not for a release to others.</b>"
        if not summary["for_release"]
        else ""
    )
    return (
        "<p class='note promise'>The final model is "
        f"<b>({shown(summary['epsilon'])}, {summary['delta']:g})</b>-differentially private for every user "
        f"({html.escape(summary['adjacency'])}), by {summary['accountant'].upper()} accounting of "
        f"{summary['releases']} releases with noise multiplier {summary['noise_multiplier']:.4g}; cohorts of "
        f"{summary['cohort']} of {summary['population']} users ({html.escape(summary['sampler'])}).{seeded}</p>"
    )


def _results(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, _number(value)) for name, value in summary["metrics"].items()]
    rows += [
        (f"{name}, mean over the last steps", _number(value)) for name, value in summary["metrics_mean_of_last"].items()
    ]
    rows += [
        ("central steps", str(summary["steps"])),
        ("seconds in steps", f"{summary['seconds']:.1f}"),
        *(((f"left out: {reason}"), str(count)) for reason, count in summary.get("skipped", {}).items()),
        ("seed", str(summary["seed"])),
        ("ledger's last hash", summary["ledger_head"]),
    ]
    return rows


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _table(rows: list[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{body}</table>"


def _figure(path: Path, said: str) -> str:
    image, said = base64.b64encode(path.read_bytes()).decode(), html.escape(said)
    return f"<figure><img alt='{said}' src='data:image/png;base64,{image}'><figcaption>{said}</figcaption></figure>"
