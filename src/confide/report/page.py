"""The page that a run leaves behind: one HTML file with everything in it, readable without a network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.federated import items as scores
from confide.federated.items import in_words
from confide.files import read_json_lines, write_atomically
from confide.privacy.guarantee import Statement
from confide.recipe import Recipe
from confide.report import guarantee, sections
from confide.report.headline import headline
from confide.report.shell import card, document, facts
from confide.runs import beginning
from confide.runs.compared import main_metric
from confide.runs.folder import METRICS, TIMES
from confide.runs.stated import stated
from confide.runs.watch import Watched, busy, duration

FILE = "report.html"
_PLACES = {
    "curves": "Curves",
    "worst": "Worst answers",
    "groups": "Groups",
    "results": "Results",
    "guarantee": "Guarantee",
    "tensors": "Tensors",
    "time": "Time",
    "again": "Again",
}


def write_report(folder: Path, recipe: Recipe, summary: dict[str, Any] | None) -> Path:
    """Write the page of a run; an unfinished run gets one too."""
    path = folder / FILE
    write_atomically(path, render(folder, recipe, summary).encode())
    return path


def render(folder: Path, recipe: Recipe, summary: dict[str, Any] | None, home: str = "") -> str:
    """The page, from what the folder holds now; with `home`, the address of the page that lists runs, it leads back."""
    records = read_json_lines(folder / METRICS)
    if not records:
        raise UserError(f"{folder / METRICS} has no step in it yet; there is nothing to draw")
    items = scores.read(folder) if summary is not None else None
    metric = main_metric(summary) if summary is not None else _first_metric(records)
    title = f"{recipe.task.kind}: {folder.resolve().name}"
    promised = _stated(folder)
    body = [
        *sections.curves(records, recipe, metric, {} if (began := beginning.read(folder)) is None else began.metrics),
        *sections.worst(items),
        *sections.groups(items),
        *(["<h2 id=results>Results in numbers</h2>", facts(_results(summary))] if summary else []),
        *guarantee.section(promised),
        *sections.tensors(folder),
        "<p class=note>Curves and tables on this page are from the users' and the test data and are <b>not</b> covered "
        "by the privacy guarantee. Only the final model is.</p>",
        *sections.times(records, read_json_lines(folder / TIMES)),
        *sections.again(folder, recipe, summary),
    ]
    text = "".join(body)
    links = "".join(f"<a href=#{place}>{name}</a>" for place, name in _PLACES.items() if f"id={place}>" in text)
    head = [
        f"<h1>{html.escape(title)}</h1><p class=sub>{html.escape(recipe.description)}</p>",
        *([f"<p>How settings were chosen: {html.escape(recipe.chosen)}.</p>"] if recipe.chosen else []),
        headline(recipe, summary, items, promised) if summary else _so_far(folder, recipe, records),
        f"<nav class=toc aria-label='Sections'>{links}</nav>",
    ]
    return document(title, [*head, *body], home, refresh=bool(home) and summary is None and busy(folder))


def _so_far(folder: Path, recipe: Recipe, records: list[dict[str, Any]]) -> str:
    """Progress, metric and epsilon of a run that is not finished."""
    now = Watched(folder, recipe, records).to_json()
    left = "" if now["seconds_left"] is None else f"About {duration(now['seconds_left'])} left at this pace."
    done = f"<progress max={now['steps']} value={now['step']}></progress>"
    value = "not yet" if now["value"] is None else f"{now['value']:.4g}"
    delta = "" if now["delta"] is None else f"at delta {now['delta']:g}, after {now['step']:,} steps"
    spent = ("no guarantee", "none") if now["epsilon"] is None else (now["epsilon_shown"], now["strength"])
    cards = [
        card("central steps so far", f"{now['step']:,} of {now['steps']:,}", done, left if now["state"] == "running"
             else f"Nobody works on it: <code>confide resume {html.escape(str(folder))}</code> goes on."),
        card(now["metric_said"] or "metric", value, html.escape(now["against_start"])),
        card("privacy spent so far: epsilon", spent[0],
             f"<b class={spent[1]}>{html.escape(now['protection'].capitalize())}</b>", delta, kind=spent[1]),
    ]  # fmt: skip
    said = "This run is not finished. What is below is what it has recorded so far."
    return f"<div class=cards>{''.join(cards)}</div><p class=note>{said}</p>"


def draw_figures(folder: Path) -> list[Path]:
    """The curves as PNG files, for papers and slides."""
    from confide.report.figures.layer import draw_layers
    from confide.report.figures.sheets import draw_run

    records = read_json_lines(folder / METRICS)
    return [*draw_run(folder, records, _first_metric(records)), *(path for path, _ in draw_layers(folder))]


def _stated(folder: Path) -> Statement | str:
    """The run's statement, or why there is none."""
    try:
        return stated(folder)
    except UserError as error:
        return f"No guarantee can be stated: {error}"


def _first_metric(records: list[dict[str, Any]]) -> str:
    return next((next(iter(r["evaluation"])) for r in records if "evaluation" in r), "metric")


def _results(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(in_words(name), _number(value)) for name, value in summary["metrics"].items()]
    rows += [
        (f"{in_words(name)}, mean over the last steps", _number(value))
        for name, value in summary["metrics_mean_of_last"].items()
    ]
    rows += [
        ("central steps", f"{summary['steps']:,}"),
        ("seconds in steps", f"{summary['seconds']:.1f}"),
        ("users", f"{summary['population']:,}, {summary['cohort']:,} in a cohort on average"),
        *(((f"left out: {reason}"), str(count)) for reason, count in summary.get("skipped", {}).items()),
        ("seed", str(summary["seed"])),
        ("ledger's last hash", summary["ledger_head"]),
    ]
    return rows


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"
