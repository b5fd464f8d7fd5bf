"""The planner's answers for the page.

PLD answers first: it is the tighter bound and takes tenths of a second. RDP, the curves and the population that it
would take are asked for one by one afterwards, so that a moved slider never waits for all of them. Every answer is kept
by the accountant's own cache; sliders move in steps, so that the same values come again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from confide.errors import UserError
from confide.privacy import planner
from confide.privacy.accountant import protection, shown, strength, too_large
from confide.privacy.planner import Answer, Noise, Point
from confide.privacy.wording import meaning
from confide.report.charts import Chart, Line
from confide.report.figures.plan import AXES, ERRATUM, TABLE_1, along
from confide.report.headline import TARGET

DELTA = 1e-9
POINTS = 7
NAMES = {"noise_multiplier": "noise multiplier z", "population": "population", "cohort": "cohort", "rounds": "rounds"}


def presets() -> list[dict[str, Any]]:
    """PFL-ASR's Table 1, with the epsilon that it prints."""
    return [
        {
            "noise_multiplier": s * cohort / 1e6, "cohort": cohort, "population": population, "rounds": rounds,
            "delta": DELTA, "published": printed, "note": ERRATUM if printed == 1.3 else "", "sigma": s,
        }
        for s, cohort, population, rounds, printed in TABLE_1
    ]  # fmt: skip


def warm() -> None:
    """Answer the presets before anybody asks."""
    for row in presets():
        point_of({name: str(row[name]) for name in (*NAMES, "delta")}).spent("pld")


def point_of(given: Mapping[str, str]) -> Point:
    """A point from what the page sent, checked."""
    numbers: dict[str, float] = {}
    for name in (*NAMES, "delta"):
        try:
            numbers[name] = float(given[name])
        except (KeyError, ValueError):
            raise UserError(f"{name}={given.get(name)!r}: expected a number") from None
        if not math.isfinite(numbers[name]):
            raise UserError(f"{name}={given[name]}: expected a finite number")
    whole = {name: round(numbers[name]) for name in ("cohort", "population", "rounds")}
    if whole["population"] > planner.MOST_POPULATION:
        raise UserError(f"population={whole['population']:,}: expected at most {planner.MOST_POPULATION:,}")
    return Point(noise_multiplier=numbers["noise_multiplier"], delta=numbers["delta"], **whole)


def epsilon(given: Mapping[str, str]) -> dict[str, Any]:
    """Compute epsilon by PLD, and say what it means."""
    point = point_of(given)
    spent = point.spent("pld")
    answer = Answer("epsilon", point, {"pld": spent, "rdp": spent}, "pld")
    return {
        "epsilon": spent if math.isfinite(spent) else None,
        "shown": shown(spent),
        "strength": strength(spent, point.delta, point.population),
        "protection": protection(spent, point.delta, point.population),
        "large_delta": too_large(point.delta, point.population),
        "meaning": meaning(spent, point.delta) if math.isfinite(spent) else "PLD proves nothing here.",
        "warnings": list(answer.warnings),
        "noise_per_user": point.noise_multiplier / point.cohort,
        "rate": point.rate,
        "adjacency": point.event.adjacency,
        "sampler": point.event.sampler,
    }


def solve(given: Mapping[str, str]) -> dict[str, Any]:
    """Fix epsilon and find what is left out: noise, cohort, population or rounds."""
    point, wanted = point_of(given), given.get("for", "")
    try:
        target = float(given.get("target", ""))
    except ValueError:
        raise UserError(f"target={given.get('target')!r}: expected an epsilon, a number above 0") from None
    noise = Noise(per_user=point.noise_multiplier / point.cohort) if given.get("hold") == "s" else None
    fixed, (s, k, t, delta) = Noise(point.noise_multiplier), (point.cohort, point.population, point.rounds, point.delta)
    if wanted == "noise_multiplier":
        found = planner.noise(target, s, k, t, delta)
    elif wanted == "cohort":
        found = planner.cohort(target, noise or fixed, k, t, delta)
    elif wanted == "population":
        found = planner.population(target, fixed, s, t, delta)
    elif wanted == "rounds":
        found = planner.rounds(target, fixed, s, k, delta)
    else:
        raise UserError(f"for={wanted!r}: expected one of {', '.join(NAMES)}")
    return {name: getattr(found.point, name) for name in (*NAMES, "delta")}


def by_rdp(given: Mapping[str, str]) -> dict[str, Any]:
    spent = point_of(given).spent("rdp")
    return {"epsilon": spent if math.isfinite(spent) else None, "shown": shown(spent)}


def enough(given: Mapping[str, str]) -> dict[str, Any]:
    """Grow cohort and population together until epsilon is below 10."""
    point = point_of(given)
    found = planner.grow(point, TARGET)
    if found is None:
        return {"said": planner.too_few(point.delta)}
    if found.population == point.population:
        return {"said": f"Epsilon is below {TARGET:g} with these users."}
    return {
        "said": f"At the same noise per user and rate, epsilon falls below {TARGET:g} with {found.population:,} users "
        f"in cohorts of {found.cohort:,}."
    }


def curve(given: Mapping[str, str]) -> dict[str, str]:
    """Draw epsilon against one of the settings."""
    axis = given.get("axis", "")
    if axis not in AXES:
        raise UserError(f"axis={axis!r}: expected one of {', '.join(AXES)}")
    point = point_of(given)
    fixed = (
        Noise(per_user=point.noise_multiplier / point.cohort)
        if given.get("hold") == "s"
        else Noise(point.noise_multiplier)
    )
    span, centre = AXES[axis], float(getattr(point, axis))
    values = [centre * span ** (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]
    moved = [(x, at) for x, at in along(fixed, point, axis, values) if 1e-6 <= at.noise_multiplier <= 1e9]
    held = " (noise per user held)" if axis == "cohort" and given.get("hold") == "s" else ""
    line = Line("epsilon", [float(x) for x, _ in moved], [at.spent("pld") for _, at in moved])
    drawn = Chart(f"epsilon against {NAMES[axis]}", f"By PLD, all else as set{held}; dotted: where you are.", [line],
                  x=NAMES[axis], log=True, log_x=True, marks=[centre])  # fmt: skip
    return {"svg": drawn.svg() or "<p>PLD proves nothing along this line.</p>"}
