"""`confide train`, `resume` and `demo`: making runs, also over the ranks that torchrun starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Device, Folder, Json, Listening, RecipeName, Send, Sets, Workers
from confide.commands.printing import print_json, print_summary
from confide.engines.ranks import Place, choose_device, dismiss, place
from confide.errors import UserError


def train(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(help="A new folder for everything that the run leaves.")],
    set_: Sets = None,
    workers: Workers = 1,
    device: Device = None,
    listener: Listening = None,
    send: Send = False,
    as_json: Json = False,
) -> None:
    """Train a model as a recipe says.

    The folder gets the recipe, a checkpoint, the privacy ledger, metrics, TensorBoard events, and at the end the
    model, a summary, figures and a page. Ctrl-C stops after saving; `confide resume` goes on.

    Over several nodes: `torchrun --nnodes 2 --nproc-per-node 8 ... -m confide train RECIPE --out RUN`, with the same
    result. Rank 0 writes the folder. With `--max-restarts 3` the run goes on by itself when a rank is lost; one that
    does not answer for CONFIDE_RANK_TIMEOUT seconds (1800) is given up.

    On a machine with a GPU, users are trained there if the task allows it; `--device cpu` keeps them on the processor.

    Example: `confide train convex/digits --out runs/a --set privacy.target_epsilon=2 --set run.seed=1`
    """
    from confide.recipe import load
    from confide.report.page import write_report
    from confide.runs import folder
    from confide.runs.listening import chosen

    here, wanted, listeners = _rank(workers, device), load(recipe, set_ or []), chosen(listener, send)
    summary = folder.train(wanted, out, workers, as_json, here, page=write_report, listeners=listeners)
    print_summary(summary, out, as_json)


def demo(
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo"),
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Speech recognition that is private as trained, in a few minutes, from nothing.

    Fetches a pretrained encoder, simulates 5,000 people who say digits, and trains a small head on the frozen encoder
    without privacy and at epsilon 8, 2 and 1. Closes with a table, a picture of what privacy costs, and the command
    that transcribes a recording of yours. A stopped demo goes on where it was.
    """
    from confide.reproduce.demo import demo as show

    made = show(out, workers, quiet=as_json)
    if as_json:
        print_json({"runs": [row.to_json() for row in made.rows], "page": str(made.page)})
        return
    print(f"\n{made.text()}")


def resume(
    run: Folder, workers: Workers = 1, device: Device = None, listener: Listening = None, send: Send = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Go on with a run that was stopped or killed. It ends exactly as if it had never stopped.

    The number of workers, or of ranks (`torchrun ... -m confide resume RUN`), need not be that of the start. Listeners
    are not remembered: name them again.
    """
    from confide.report.page import write_report
    from confide.runs import folder
    from confide.runs.listening import chosen

    here, listeners = _rank(workers, device), chosen(listener, send)
    summary = folder.resume(run, workers, as_json, here, page=write_report, listeners=listeners)
    print_summary(summary, run, as_json)


@contextmanager
def rank_0_alone(command: list[str]) -> Iterator[None]:
    """Let rank 0 alone do what is inside; the other ranks train for it where the command trains, and end with it."""
    here, trains = place(), command in (["train"], ["resume"])
    if here is not None and here.rank > 0:
        if not trains:
            sys.exit(0)
        from confide.build import make_trainer_from
        from confide.engines.distributed import follow

        sys.exit(follow(here, make_trainer_from))
    try:
        yield
    finally:
        if here is not None and here.ranks > 1 and trains:
            dismiss(here)


def _rank(workers: int, device: str | None) -> Place | None:
    """Which rank of torchrun this process is, if any; ranks have no workers, and all read their device in one place."""
    here = place()
    if here is not None and device is not None:
        raise UserError(
            f"--device {device} together with torchrun would be known to rank 0 alone; set CONFIDE_DEVICE={device} in "
            "the environment of torchrun"
        )
    choose_device(device)
    if here is not None and workers > 1:
        raise UserError(
            f"--workers {workers} together with torchrun: every rank is one process; choose how many there are with "
            "--nproc-per-node and leave --workers out"
        )
    return here
