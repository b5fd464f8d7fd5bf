"""`confide budget`: what people have spent over all runs with their data, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json, print_table
from confide.errors import UserError


def budget(
    file: Annotated[Path, typer.Argument(help="The budget: of a population, or budget.jsonl of a client's state.")],
    init: Annotated[bool, typer.Option("--init", help="Begin a budget in a new file.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="With --init: what a lifetime may cost.")] = None,
    delta: Annotated[float | None, typer.Option(help="With --init: its delta.")] = None,
    population: Annotated[str | None, typer.Option(help="With --init: whose it is, in your words.")] = None,
    as_json: Json = False,
) -> None:
    """Show the lifetime budget of a population or a client, and check every line of it.

    Runs with `privacy.budget: FILE` in their recipe charge it before each release, and stop when it is spent.
    """
    from confide.privacy.accountant import shown
    from confide.privacy.budget import Budget, by_run
    from confide.runs.folder import finite

    given = (epsilon, delta, population)
    if init:
        if epsilon is None or delta is None or population is None:
            raise UserError("--init: give --epsilon, --delta and --population, for example 8, 1e-5 and a name")
        Budget.create(file, epsilon, delta, population)
    elif any(value is not None for value in given):
        raise UserError("--epsilon, --delta and --population begin a budget, with --init; one that is begun is fixed")
    people = Budget.read(file)
    head, spent, runs = people.header, people.spent(), by_run(people)
    left = max(0.0, head["epsilon"] - spent["filter"])
    if as_json:
        runs = [run | {"epsilon": finite(run["epsilon"])} for run in runs]
        print_json({
            **{name: head[name] for name in ("id", "population", "epsilon", "delta")},
            "spent": finite(spent["filter"]), "left": left, "spent_if_planned": finite(spent["planned"]),
            "releases": spent["releases"], "runs": runs,
        })  # fmt: skip
        return
    print(
        f"{head['population']}: epsilon {shown(spent['filter'])} of {head['epsilon']:g} is spent at delta "
        f"{head['delta']:g}, by {spent['releases']} releases; {left:.4g} is left\n"
        f"that holds whoever chose the runs, and after what (a Renyi filter); had all been planned beforehand: "
        f"{shown(spent['planned'])}"
    )
    if runs:
        rows = [
            (run["run"], run["what"] + (" (claimed, not enforced)" if run["claimed"] else ""), str(run["releases"]),
             shown(run["epsilon"])) for run in runs
        ]  # fmt: skip
        print_table(("run", "what", "releases", "epsilon alone"), rows, left=2, width=100)
