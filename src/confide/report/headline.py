"""What a run came to, in three cards: the metric, epsilon with what it means, and how many users it would take.

Everything about the guarantee is taken from the run's statement (`confide.privacy.guarantee`).
"""

from __future__ import annotations

import html
from typing import Any

from confide.errors import UserError
from confide.federated.intervals import interval
from confide.federated.items import Items, in_words
from confide.privacy.accountant import SCALE, shown, too_large
from confide.privacy.guarantee import NO_GUARANTEE, Statement
from confide.privacy.mechanisms.none import NOTHING_TO_EXTRAPOLATE
from confide.privacy.planner import Point, grow, too_few
from confide.privacy.wording import NOT_FOR_RELEASE, meaning, seeded
from confide.recipe import Recipe
from confide.report.shell import card
from confide.runs.compared import main_metric
from confide.runs.folder import mechanism_for

TARGET = SCALE["moderate"]


def headline(recipe: Recipe, summary: dict[str, Any], items: Items | None, stated: Statement | str) -> str:
    """The cards and the promise; `stated` is the run's statement, or why there is none."""
    if isinstance(stated, str):
        spent, promise = card("privacy spent: epsilon", "not known"), f"<p class=note>{html.escape(stated)}</p>"
    else:
        spent, promise = _epsilon(stated), _promise(stated, summary)
    cards = [_metric(summary, items), spent, _population(recipe, summary)]
    return f"<div class=cards>{''.join(cards)}</div>{promise}"


def enough(recipe: Recipe, summary: dict[str, Any]) -> Point | str:
    """Cohort and population that keep epsilon below 10 at the same noise on the average, or why that is not said."""
    if summary["epsilon"] is None:
        return NOTHING_TO_EXTRAPOLATE
    why_not = mechanism_for(recipe).extrapolates(summary["sampler"])
    if why_not is not None:
        return why_not
    try:
        point = Point(
            summary["noise_multiplier"], summary["cohort"], summary["population"], summary["steps"], summary["delta"]
        )
        return grow(point, TARGET) or too_few(point.delta)
    except UserError as error:
        return f"Cannot be extrapolated: {error}"


def _metric(summary: dict[str, Any], items: Items | None) -> str:
    name = main_metric(summary)
    value = summary["metrics"][name]
    if value is None:
        return card(in_words(name), "not finite", "The model has diverged.")
    big = f"{value:.2f}" if name == "wer" else f"{value:.4g}"
    start = summary.get("start") or {}
    said = [html.escape(start["said"][0].upper() + start["said"][1:]) + "."] if start.get("said") else []
    if items is None:
        return card(in_words(name), big, "How each test item was answered is not on record: no interval.", *said)
    low, high = interval(items)
    units = len(set(items.units.tolist()))
    what = items.groups_called if items.clustered and len(items.names) > 1 else "test items"
    return card(
        in_words(name), big,
        f"95 % interval {low:.4g} to {high:.4g}, from drawing the {units:,} {html.escape(what)} of the test set again; "
        f"{items.better} is better.",
        *said,
    )  # fmt: skip


def _epsilon(found: Statement) -> str:
    if found.epsilon is None or found.delta is None:
        return card("privacy spent: epsilon", "no guarantee", "The model may give its users away.", kind="none")
    said = meaning(found.epsilon, found.delta, found.unit, found.adjacency)
    large = too_large(found.delta, found.population)
    delta = f"<span class={'none' if large else 'plain'}>at delta {found.delta:g}</span>"
    whom = f"{delta}, for every {html.escape(found.unit.name)}"
    word = f"<b class={found.strength}>{html.escape(found.protection.capitalize())}</b>"
    return card("privacy spent: epsilon", shown(found.epsilon), word, whom, html.escape(said), kind=found.strength)


def _population(recipe: Recipe, summary: dict[str, Any]) -> str:
    found = enough(recipe, summary)
    label = f"users needed for epsilon below {TARGET:g}"
    if isinstance(found, str):
        return card(label, "no number", html.escape(found))
    if found.population == summary["population"]:
        return card(label, f"{found.population:,}", "These users are enough.")
    return card(
        label, f"{found.population:,}",
        f"At the same noise on the average of the cohort and the same rate: cohorts of {found.cohort:,}, noise "
        f"multiplier {found.noise_multiplier:.4g}, epsilon {shown(found.spent('pld'))} after {found.rounds:,} steps "
        "(PFL-ASR's extrapolation; the model is taken to train alike).",
    )  # fmt: skip


def _promise(found: Statement, summary: dict[str, Any]) -> str:
    if found.epsilon is None:
        said = html.escape(found.words or NO_GUARANTEE)
        for marked in ("no privacy guarantee", "no formal guarantee"):
            said = said.replace(marked, f"<b>{marked}</b>", 1)
        return f"<p class=note>{said}</p>"
    stated = f"<b>({shown(found.epsilon)}, {found.delta:g})</b>-differentially private"
    parts = [
        f"The final model is {stated} for every {html.escape(found.unit.name)} "
        f"({html.escape(found.adjacency or '')}), by {found.accountant.upper()} accounting of {found.releases} "
        f"releases with noise multiplier {summary['noise_multiplier']:.4g}; cohorts of {summary['cohort']} of "
        f"{summary['population']} users ({html.escape(summary['sampler'])})."
    ]
    if not found.unit.person:
        parts.append(f"<b>{html.escape(found.unit.said)}</b>")
    if found.trust == "distributed":
        parts.append(
            f"That holds against whoever sees the models alone. <b>It is {html.escape(found.said_of_others)}.</b>"
        )
    parts += [f"It does not cover {html.escape(what)}." for what in found.own_gaps]
    parts += [f"It takes as public {html.escape(what)}." for what in found.own_public]
    if not found.noise.for_release:
        said = html.escape(seeded(found.noise.least_multiplier))
        parts.append(said.replace(NOT_FOR_RELEASE, f"<b>{NOT_FOR_RELEASE}</b>"))
    return f"<p class='note{' promise' if found.strength in ('strong', 'moderate') else ''}'>{' '.join(parts)}</p>"
