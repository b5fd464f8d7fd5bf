"""`confide guarantee`: what a run promises, to whom, against whom, and what not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json


def guarantee(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run, or a published one.")] = None,
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of --json and stop.")] = False,
) -> None:
    """State what a run promises, from its ledger alone: the unit, epsilon, the whole curve, and every adversary.

    The summary is held against the ledger. Where they differ, or a line of the ledger was edited, the command says so
    and fails.
    """
    from confide.errors import UserError
    from confide.privacy import wording
    from confide.privacy.guarantee import Statement
    from confide.runs.stated import differences, stated

    if schema:
        print_json(Statement.model_json_schema())
        return
    if run is None:
        raise UserError("no RUN was given; expected the folder of a run, as in `confide guarantee runs/digits`")
    found = stated(run)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(wording.text(found))
    wrong = differences(run, found)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("this folder was edited: believe the ledger, or nothing", file=sys.stderr)
        raise typer.Exit(1)
