"""`confide diagnose`: what holds a run back and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json


def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run that has reached a checkpoint; finished or not.")],
    users: Annotated[int, typer.Option(min=2, help="How many users to probe. More is slower and surer.")] = 16,
    draws: Annotated[
        int, typer.Option(min=1, help="How often each user trains, on other batches; 2 or more show what batches do.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed that draws the users and the batches.")] = 0,
    rehearse: Annotated[
        int,
        typer.Option(min=0, help="Steps of the rehearsals that advice is taken from; 0: from theory alone, at once."),
    ] = 200,
    as_json: Json = False,
) -> None:
    """What holds a run back, tensor by tensor, and what to change.

    Probes some users at the last checkpoint and splits what is left of the squared gradient into its causes, as the
    proofs of PFL-ASR do: optimisation (not there yet), drift (local steps), clipping, users (the cohort), batches, and
    noise (privacy). Names the one that dominates in each kind of tensor.

    Then rehearses what a person can change (rate, bound, cohort, steps, people, and what theory says), each at the
    run's own epsilon, and advises what made the loss of users who took no part in the rehearsal clearly lower. That
    takes as long as about a dozen runs of at most 200 steps with at most 64 users in each. docs/theory.md says more.

    It reads users' data, and nothing that it shows is covered by the run's epsilon: for simulations and research.

    Example: `confide diagnose runs/digits --users 32`
    """
    from confide.theory.diagnose import diagnose_run

    found = diagnose_run(run, users, draws, seed, rehearse)
    if as_json:
        print_json(found.to_json())
    else:
        print(found.to_text())
