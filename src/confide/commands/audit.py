"""`confide audit`: an attempt to disprove a recipe's guarantee."""

from __future__ import annotations

import math
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.deploy import needs_grpc
from confide.commands.options import Json, Sets, Workers, recipe_argument
from confide.commands.printing import print_json

if TYPE_CHECKING:
    from confide.runs.audit import Audit
    from confide.runs.broken import Break


class BreakName(StrEnum):
    """The ways to break a mechanism, as the command line offers them."""

    no_noise = "no-noise"
    tenth_noise = "tenth-noise"
    half_noise = "half-noise"
    same_noise = "same-noise"
    unbounded = "unbounded"
    cohort_variance = "cohort-variance"


def audit(
    recipe: Annotated[str, recipe_argument("Name of a shipped recipe or path of a YAML file, with a guarantee.")],
    set_: Sets = None,
    canaries: Annotated[
        int | None, typer.Option(help="Users that are planted; as many as the claim needs, if left out.")
    ] = None,
    break_: Annotated[
        BreakName | None, typer.Option("--break", help="Break the mechanism on purpose, to see the alarm ring.")
    ] = None,
    power: Annotated[
        bool, typer.Option(help="Measure whether too little noise would have been caught (no training needed).")
    ] = True,
    workers: Workers = 1,
    deployed: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="CLIENTS",
            help="Audit a deployment: a server and this many clients in processes of their own, over gRPC with TLS.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try to disprove a recipe's guarantee: plant canary users, train once, and bound epsilon from below.

    The methods are one-run audits (Steinke, Nasr, Jagielski 2023; Mahloujifar, Melis, Chaudhuri 2024) and, where
    canaries cannot influence each other, an exact binomial test. A lower bound above the claimed epsilon proves a
    defect, at 95 % confidence, and the command fails. A lower bound below it proves nothing: the guarantee rests on the
    accounting, and the audit is a smoke alarm for it. `--break` tests the alarm with smoke.

    Where the claim rests on secret cohorts, an exact test asks besides whether the noise's variance follows the
    cohort's size, which would give the secret away: a p-value below 0.001 fails the command as well.

    Example: `confide audit convex/digits --break half-noise`
    """
    from confide.build import make_task
    from confide.progress import Reporter
    from confide.recipe import load
    from confide.runs import audit as auditing

    wanted = load(recipe, set_ or [])
    broken: Break | None = None if break_ is None else break_.value
    task = make_task(wanted.task, wanted.run.seed)
    with Reporter(f"audit of {recipe}", wanted.run.steps, 0, as_json) as reporter:

        def watch(step: int) -> None:
            reporter.advance("")

        if deployed is None:
            found = auditing.audit(wanted, canaries, watch, broken=broken, task=task, workers=workers)
        else:
            needs_grpc()
            from confide.deploy.audit import audit_deployed

            found = audit_deployed(wanted, deployed, canaries, watch, broken=broken, task=task)
    began, caught = time.monotonic(), None
    if power and broken is None:
        caught = auditing.measure_power(wanted, found.canaries, task)
    if as_json:
        print_json(found.to_json() | {"would_catch": caught})
    else:
        _print(found, caught, time.monotonic() - began)
    if not found.passed:
        print(
            f"THE AUDIT FAILED: {_reason(found)}. "
            + ("Do not release it" if broken is None else f"It was broken on purpose ({broken}): the alarm works"),
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _print(found: Audit, caught: dict[Break, bool] | None, seconds: float) -> None:
    from confide.privacy.accountant import shown
    from confide.runs.broken import BREAKS

    best = found.findings[0]
    if found.broken is not None:
        print(f"BROKEN ON PURPOSE, not the recipe's own mechanism: {BREAKS[found.broken]}")
    print(
        f"claimed: epsilon at most {shown(found.claimed)} at delta {found.delta:g}\n"
        f"audited: epsilon at least {_rounded_down(found.lower_bound)} at {found.confidence:.0%} confidence, from one "
        f"run with {found.canaries} canaries ({best.right} of {best.guesses} guesses right)\n"
        f"with every guess right, {_rounded_down(found.best_possible)} would have been shown"
    )
    if found.cohort_chance is not None:
        verdict = "FOLLOWS the cohort's size" if found.follows_cohort else "does not follow the cohort's size"
        print(f"the noise's variance {verdict} (p-value {found.cohort_chance:.4g})")
    for kind, was_caught in (caught or {}).items():
        print(f"would have caught {BREAKS[kind]}: {'yes' if was_caught else 'no'}")
    if caught:
        print(f"(measured in {seconds:.0f} s with canaries alone; --no-power leaves it out)")
    if found.broken is not None and found.passed:
        print("the alarm did not ring: this audit cannot see what was broken")


def _reason(found: Audit) -> str:
    if found.lower_bound > found.claimed:
        return "this run gave away more than it claims"
    return (
        "the noise's variance follows the cohort's size, so that the models tell what amplification by sampling needs "
        "secret, and the claim has no ground"
    )


def _rounded_down(bound: float) -> str:
    """A lower bound for people, rounded down: rounded up, it would not hold."""
    return f"{math.floor(1000 * bound) / 1000:.3f}"
