"""What a run came to, in three cards: the metric, epsilon with what it means, and how many users it would take.

What epsilon means is said in the form that holds for everyone: whoever sees the model and has to guess, with even odds
beforehand, whether a given person took part, is right with probability at most (e^epsilon + delta) / (1 + e^epsilon),
by the definition of differential privacy for two hypotheses of equal weight (Kairouz, Oh and Viswanath 2015).
"""

from __future__ import annotations

import html
import math
from typing import Any

from confide.errors import UserError
from confide.federated.intervals import interval
from confide.federated.items import Items
from confide.privacy.accountant import shown
from confide.privacy.gaussian import SEEDED_END
from confide.privacy.mechanisms.base import AS_PUBLIC, NOT_COVERED
from confide.privacy.mechanisms.none import NOTHING_TO_EXTRAPOLATE, Nothing
from confide.privacy.planner import Point, grow
from confide.privacy.trust.server_view import against_server
from confide.recipe import Recipe
from confide.report.shell import card
from confide.runs.comparison import main_metric
from confide.runs.folder import mechanism_for

TARGET = 10.0
NAMES = {"wer": "word error rate, %", "accuracy": "accuracy", "suboptimality": "suboptimality"}


def headline(recipe: Recipe, summary: dict[str, Any] | None, items: Items | None) -> str:
    if summary is None:
        return "<p class=note>This run is not finished. What is below is what it has recorded so far.</p>"
    cards = [_metric(summary, items), _epsilon(recipe, summary), _population(recipe, summary)]
    return f"<div class=cards>{''.join(cards)}</div>{_promise(recipe, summary)}"


def guess(epsilon: float, delta: float) -> float:
    """How often a guess about one person's part in it can be right at best; a coin is right half of the time."""
    if epsilon > 700:
        return 1.0
    return min(1.0, (math.exp(epsilon) + delta) / (1 + math.exp(epsilon)))


def meaning(epsilon: float, delta: float) -> str:
    """Epsilon in one sentence, rounded to the unsafe side."""
    right = math.ceil(1000 * guess(epsilon, delta)) / 10
    if right >= 99.95:
        return (
            "Whoever sees the model and wants to know whether you took part may be right practically always: this "
            "protects nobody."
        )
    return (
        f"Whoever sees the model and guesses whether you took part is right at most {right:.4g} % of the time; a coin "
        "is right 50 %."
    )


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
        return grow(point, TARGET) or "Even 10 billion users would be too few for this noise."
    except UserError as error:
        return f"Cannot be extrapolated: {error}"


def _metric(summary: dict[str, Any], items: Items | None) -> str:
    name = main_metric(summary)
    value = summary["metrics"][name]
    if value is None:
        return card(NAMES.get(name, name), "not finite", "The model has diverged.")
    big = f"{value:.2f}" if name == "wer" else f"{value:.4g}"
    if items is None:
        return card(NAMES.get(name, name), big, "How each test item was answered is not on record: no interval.")
    low, high = interval(items)
    units = len(set(items.units.tolist()))
    what = items.groups_called if items.clustered and len(items.names) > 1 else "test items"
    return card(
        NAMES.get(name, name), big,
        f"95 % interval {low:.4g} to {high:.4g}, from drawing the {units:,} {html.escape(what)} of the test set again; "
        f"{items.better} is better.",
    )  # fmt: skip


def _epsilon(recipe: Recipe, summary: dict[str, Any]) -> str:
    if summary["epsilon"] is None:
        quiet = mechanism_for(recipe) is Nothing
        why = "No noise was added." if quiet else "This kind of noise buys no guarantee."
        return card("privacy spent: epsilon", "no guarantee", f"{why} The model may give its users away.")
    big = shown(summary["epsilon"])
    return card(
        "privacy spent: epsilon", big, f"at delta {summary['delta']:g}", meaning(summary["epsilon"], summary["delta"])
    )


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


def _promise(recipe: Recipe, summary: dict[str, Any]) -> str:
    if summary["epsilon"] is None:
        return f"<p class=note>{mechanism_for(recipe).why_none(recipe.privacy)}</p>"
    seeded = "" if summary["for_release"] else _seeded(summary["noise_multiplier"])
    known = (
        f" That holds against whoever sees the models alone. <b>It is {html.escape(against_server(summary))}.</b>"
        if "epsilon_server" in summary
        else ""
    )
    before = f" It does not cover {NOT_COVERED}." if summary.get("begins_elsewhere") else ""
    if summary.get("public_weights"):
        before += f" It takes as public {AS_PUBLIC}."
    return (
        f"<p class='note{' promise' if summary['epsilon'] <= TARGET else ''}'>The final model is "
        f"<b>({shown(summary['epsilon'])}, {summary['delta']:g})</b>-differentially private for every user "
        f"({html.escape(summary['adjacency'])}), by {html.escape(summary['accountant'].upper())} accounting of "
        f"{summary['releases']} releases with noise multiplier {summary['noise_multiplier']:.4g}; cohorts of "
        f"{summary['cohort']} of {summary['population']} users ({html.escape(summary['sampler'])})."
        f"{known}{before}{seeded}</p>"
    )


def _seeded(multiplier: float) -> str:
    """What seeded noise does not promise; in double precision it ends later, so that this holds there as well."""
    beyond = math.erfc((SEEDED_END - 1 / multiplier) / math.sqrt(2)) / 2
    return (
        " The noise was seeded, which makes the run repeatable: whoever knows the seed can subtract it. In single "
        f"precision it also ends at {SEEDED_END:.3g} deviations, which delta does not count: an update on one "
        f"coordinate shows beyond that end with probability {beyond:.1e} in a step. "
        "<b>For research, not for a release to others.</b>"
    )
