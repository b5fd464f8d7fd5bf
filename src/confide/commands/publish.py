"""`confide publish`: what may leave the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from confide.commands.options import FinishedRun, Json
from confide.commands.printing import print_json


def publish(
    run: FinishedRun,
    out: Annotated[Path, typer.Argument(help="The folder to write; new, or empty.")],
    name: Annotated[str, typer.Option(help="For the card: what the model is called.")] = "",
    data: Annotated[
        str, typer.Option(help="For the card: what the data are, in your words; never a sample of them.")
    ] = "",
    use: Annotated[str, typer.Option(help="For the card: what the model is meant for.")] = "",
    license: Annotated[str, typer.Option(help="For the card: under which licence, such as apache-2.0.")] = "",
    with_test_metrics: Annotated[
        bool,
        typer.Option(
            "--with-test-metrics",
            help="Publish the metrics on the test data too. They have no noise: only where nobody whose data trained "
            "the model is in the test data, and the people who are there agree.",
        ),
    ] = False,
    documents: Annotated[
        Literal["names", "texts"] | None,
        typer.Option(
            help="Of a retrieval model: publish its documents' names, or names and texts too, so that others can "
            "retrieve with it. No guarantee covers them. Without it neither leaves."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a new folder with only what the guarantee of a run covers. It alone may leave; the run's folder must not.

    It holds the model, the statement of the guarantee, a copy of the ledger without digests of the data, the recipe
    without your paths, a model card, and the figures with noise, if the recipe has `privacy.metrics`; of a retrieval
    model also its documents, if you say so. It holds no checkpoint, no metrics without noise, no times, no key. A run
    with seeded noise, without a guarantee, unfinished, or with files that do not belong together is refused.

    Example: `confide publish runs/digits public/digits --data "Digits, written by 287 people." --license apache-2.0`
    """
    from confide.files import SECRET
    from confide.privacy.accountant import protection, shown
    from confide.runs import publish as publishing
    from confide.runs.card import Words

    written = publishing.publish(run, out, Words(name, data, use, license), with_test_metrics, documents)
    if as_json:
        print_json(written)
        return
    print(f"{out} holds {', '.join(written['files'])}")
    if documents is not None:
        names = written["documents"]
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        print(
            f"documents.jsonl has {documents} of {len(names):,} documents ({some}), which no guarantee covers: read it"
        )
    spent, delta = written["epsilon"], written["delta"]
    stated = f"epsilon {shown(spent)} at delta {delta:g} ({protection(spent, delta)})"
    print(f"it states {stated} for every {written['unit']}")
    stay = sorted(path.name for path in run.iterdir() if path.name not in written["files"] and path.name != ".lock")
    print(f"what stays behind in {run}, and must not leave ({SECRET} least of all): {', '.join(stay)}")
