"""`confide budget`: what is promised to people over all runs with their data, and how much of it is used."""

from __future__ import annotations

import math
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
    from confide.privacy.budget import NEIGHBOURS, Budget, by_run, percent
    from confide.runs.folder import finite

    given = (epsilon, delta, population)
    if init:
        if epsilon is None or delta is None or population is None:
            raise UserError("--init: give --epsilon, --delta and --population, for example 8, 1e-5 and a name")
        Budget.create(file, epsilon, delta, population)
    elif any(value is not None for value in given):
        raise UserError("--epsilon, --delta and --population begin a budget, with --init; one that is begun is fixed")
    people = Budget.read(file)
    head, so_far, runs = people.header, people.summary(), by_run(people)
    if as_json:
        runs = [run | {"epsilon": finite(run["epsilon"])} for run in runs]
        print_json({
            **{name: head[name] for name in ("id", "population", "epsilon", "delta")},
            "adjacency": NEIGHBOURS, "used": finite(so_far["used"]), "loss_so_far": finite(so_far["loss"]),
            "epsilon_if_planned": finite(so_far["planned"]), "releases": so_far["releases"], "runs": runs,
        })  # fmt: skip
        return
    releases = f"{so_far['releases']} release{'s' if so_far['releases'] != 1 else ''}"
    print(
        f"{head['population']}: epsilon {head['epsilon']:g} at delta {head['delta']:g} is promised for their whole "
        "life, whoever chooses the runs, and after what (a Renyi filter)\n"
        f"{percent(so_far['used'])} of it is used, by {releases}"
    )
    if so_far["releases"]:
        loss = (
            "none is stated, since cohorts had a largest size" if math.isinf(so_far["loss"]) else shown(so_far["loss"])
        )
        print(
            f"privacy loss so far: {loss}{'' if math.isinf(so_far['loss']) else _odometer(head['delta'])}\n"
            f"epsilon, had all releases been planned beforehand: {shown(so_far['planned'])}"
        )
    print(f"neighbours: {NEIGHBOURS}\n{_against(head['shared'])}")
    if runs:
        rows = [
            (run["run"], run["what"] + (" (claimed, not enforced)" if run["claimed"] else ""), str(run["releases"]),
             shown(run["epsilon"])) for run in runs
        ]  # fmt: skip
        print_table(("run", "what", "releases", "epsilon alone"), rows, left=2, width=100)


def _odometer(delta: float) -> str:
    return f" or less, at all times at once, with probability 1 - {delta:g}"


def _against(shared: bool) -> str:
    if shared:
        return (
            "against whoever sees the models, and not against the server of distributed trust (`confide guarantee RUN`)"
        )
    return "against the server, where this client adds noise; what is claimed, against whoever sees the models"
