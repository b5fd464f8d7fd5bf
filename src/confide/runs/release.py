"""From a research run to the same run for a release: noise of the operating system, after a look at what it promises.

A research run has seeded noise, so that it can be repeated; whoever knows the seed can subtract it. Its settings are
worth keeping, its model is not. `release` reads what the run promised, lists what somebody has to know or to answer
for before a model leaves, and trains the same recipe with `privacy.source: system` in a new folder. What speaks against
a release stops it; what only the owner can judge is said, and does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from confide.errors import UserError
from confide.privacy.accountant import shown, strength, too_large
from confide.privacy.guarantee import STARTING_MODEL, Statement
from confide.recipe import Recipe, parse
from confide.runs import folder
from confide.runs.folder import WritePage
from confide.runs.stated import differences, stated, summary_if_finished


@dataclass(frozen=True)
class Point:
    """One point of the checklist."""

    name: str
    verdict: Literal["ok", "look", "stop"]  # look: only the owner can judge it
    said: str


def checklist(run: Path) -> list[Point]:
    """What has to hold, or to be looked at, before a run like this one is made for a release.

    Args:
        run: the folder of a finished run.

    Returns:
        The points, in the order in which they are shown.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.folder import train
        >>> from confide.runs.release import checklist
        >>> _ = train(load("convex/digits", ["run.steps=5"]), Path("runs/research"), quiet=True)
        >>> {point.name: point.verdict for point in checklist(Path("runs/research"))}["delta"]
        'ok'
    """
    recipe, summary = folder.held_recipe(run), summary_if_finished(run)
    if summary is None:
        raise UserError(f"{run} is not finished; go on with `confide resume {run}`, and look at it before a release")
    folder.check_unedited(run, recipe)
    found = stated(run, curve=False)
    if wrong := differences(run, stated(run)):
        raise UserError(f"{wrong[0]}: this folder was edited; start from a run whose files belong together")
    return [*_promise(found, summary), *_people(recipe, found, summary), *_use(run, summary)]


def _promise(found: Statement, summary: dict[str, Any]) -> Iterator[Point]:
    """Epsilon, delta and the noise."""
    if found.epsilon is None:
        yield Point(
            "guarantee", "stop", "the run gives none; train with privacy.mechanism: gaussian and a bounding rule"
        )
        return
    population = summary["population"]
    word = strength(found.epsilon, found.delta, population)
    verdict: Literal["ok", "look", "stop"] = "ok" if word in ("strong", "moderate") else "look"
    more = "" if verdict == "ok" else ": think of more users in a cohort, fewer steps, or more noise"
    yield Point("epsilon", verdict, f"{shown(found.epsilon)}, {word}{more}")
    if too_large(found.delta, population):
        yield Point(
            "delta", "stop", f"{found.delta:g} is above 1/population = {1 / population:.3g}; lower privacy.delta"
        )
    else:
        yield Point("delta", "ok", f"{found.delta:g}, below 1/population = {1 / population:.3g}")
    if found.noise.for_release:
        yield Point("noise", "stop", "it is the operating system's already: publish this run with `confide publish`")
    else:
        yield Point("noise", "ok", "seeded in this run; of the operating system in the new one, and never drawn again")


def _people(recipe: Recipe, found: Statement, summary: dict[str, Any]) -> Iterator[Point]:
    """Whom the guarantee protects, and what else was taken from them."""
    unit = found.unit
    if unit.person:
        yield Point("unit", "ok", f"{unit.name}: everything that one person contributed is protected together")
    else:
        yield Point("unit", "look", f"{unit.name}, which is no person: say so where the model is described")
    yield Point("population", "ok", f"{summary['population']} users; nobody may be in it under two names")
    if STARTING_MODEL in found.not_covered:
        yield Point("start", "look", "the run begins from another model, whose training data no guarantee here covers")
    else:
        yield Point("start", "ok", "the run begins from fresh weights, or from a frozen encoder that is named")
    if recipe.privacy.budget is None:
        said = "no budget is kept: earlier releases about the same users add up with this one (`confide budget`)"
        yield Point("budget", "look", said)
    else:
        yield Point("budget", "ok", "the new run is charged to the population's budget, step by step")
    said = "if they were chosen by looking at runs on these users, the guarantee does not cover that choice"
    yield Point("settings", "look", said)
    yield Point("trust", "ok" if found.trust != "central" else "look", _TRUST.get(found.trust, found.trust))


_TRUST = {"central": "central: the server sees every update, and has to be trusted with it"}


def _use(run: Path, summary: dict[str, Any]) -> Iterator[Point]:
    """Whether the model is worth releasing."""
    start = summary.get("start")
    if start and (start.get("gain") or 0.0) < 0:
        yield Point("gain", "stop", f"the run ended {start['said']}; `confide diagnose {run}` says what holds it back")
    elif start and start.get("said"):
        yield Point("gain", "ok", start["said"])


def release(
    run: Path, out: Path, workers: int = 1, quiet: bool = True, page: WritePage | None = None
) -> dict[str, Any]:
    """Train a finished research run again with noise of the operating system, if nothing speaks against it.

    Args:
        run: the folder of the research run.
        out: the folder of the new run; it must be new.
        workers: how many processes train clients.
        quiet: whether to leave out the progress bar.
        page: writes the page that the run leaves behind.

    Returns:
        The checklist, and the summary of the new run.

    Raises:
        UserError: a point of the checklist says stop.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.folder import train
        >>> from confide.runs.release import release
        >>> _ = train(load("convex/digits", ["run.steps=5"]), Path("runs/to-release"), quiet=True)
        >>> release(Path("runs/to-release"), Path("runs/released"))["summary"]["noise_source"]
        'system'
    """
    points = checklist(run)
    if stops := [point for point in points if point.verdict == "stop"]:
        said = "; ".join(f"{point.name}: {point.said}" for point in stops)
        raise UserError(f"{run} is not ready for a release, and nothing was trained. {said}")
    summary = folder.train(for_release(folder.held_recipe(run)), out, workers, quiet, page=page)
    return {"checklist": [asdict(point) for point in points], "summary": summary}


def for_release(recipe: Recipe) -> Recipe:
    """The same recipe with noise of the operating system."""
    document = recipe.model_dump(mode="json")
    document["privacy"]["source"] = "system"
    return parse(document, "the recipe of the release")
