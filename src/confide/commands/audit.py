"""`confide audit`: an attempt to disprove a recipe's guarantee."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from confide.commands.options import Json, Sets, recipe_argument
from confide.commands.printing import print_json


def audit(
    recipe: Annotated[str, recipe_argument("Name of a shipped recipe or path of a YAML file, with a guarantee.")],
    set_: Sets = None,
    canaries: Annotated[
        int, typer.Option(min=10, help="Users that are planted. More can prove a larger epsilon.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Try to disprove a recipe's guarantee: plant canary users, train once, and bound epsilon from below.

    The method is one-run auditing (Steinke, Nasr, Jagielski 2023). A lower bound above the claimed epsilon proves a
    defect, at 95 % confidence, and the command fails. A lower bound below it proves nothing: the guarantee rests on the
    accounting, and the audit is a smoke alarm for it.

    Example: `confide audit convex/digits --set privacy.target_epsilon=3`
    """
    from confide.privacy.accountant import shown
    from confide.progress import Reporter
    from confide.recipe import load
    from confide.runs import audit as auditing

    wanted = load(recipe, set_ or [])
    with Reporter(f"audit of {recipe}", wanted.run.steps, 0, as_json) as reporter:
        found = auditing.audit(wanted, canaries, lambda step: reporter.advance(""))
    if as_json:
        print_json(found.to_json())
    else:
        best = found.findings[0]
        print(
            f"claimed: epsilon at most {shown(found.claimed)} at delta {found.delta:g}\n"
            f"audited: epsilon at least {found.lower_bound:.3f} at {found.confidence:.0%} confidence, from one run "
            f"with {found.canaries} canaries ({best.right} of {best.guesses} guesses right)\n"
            f"with every guess right, {found.best_possible:.2f} would have been shown"
            + ("" if found.best_possible > found.claimed else ": too few canaries to disprove the claim")
        )
    if not found.passed:
        print("THE AUDIT FAILED: this run gave away more than it claims. Do not release it", file=sys.stderr)
        raise typer.Exit(1)
