"""`confide sweep`: a recipe over settings and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json, RecipeName
from confide.commands.printing import print_groups, print_json, print_notes


def sweep(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(help="The folder for the runs, one folder each, and for the comparison.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE,VALUE,...",
            help="Change one value of the recipe, or try several: central.learning_rate=1,3,10. May be repeated; all "
            "combinations are tried.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting: run.seed and those after it.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 1,
    held_out: Annotated[
        int,
        typer.Option(
            min=0,
            max=49,
            help="Percent of the training people to choose by: they are evaluated and do not train. 0: evaluate as the "
            "recipe does.",
        ),
    ] = 20,
    as_json: Json = False,
) -> None:
    """Try settings with several seeds, and say which is best on people held out.

    Every run is one of `confide train`, in a folder under --out. After a stop (Ctrl-C, or the machine) the same command
    goes on; more values or seeds can be added to a sweep that has finished. Closes with mean and 95 % interval of each
    setting, a page, and the command that trains with the best.

    Each run sees the users' data. The choice between runs is not covered by the guarantee of any of them; a recipe
    with privacy.budget charges every run to it.

    Example: `confide sweep convex/digits --out results/rates --set central.learning_rate=0.5,1,2 --seeds 3`
    """
    from confide.reproduce.sweep import sweep as run

    swept = run(recipe, set_ or [], seeds, out, workers, held_out, quiet=as_json)
    if as_json:
        print_json(swept.to_json())
        return
    print_groups(swept.found)
    best = swept.best
    if best is None:
        print("none is chosen: no mean is finite, or nobody says which way the metric is good")
    else:
        print(f"best: {best.name}")
        if swept.not_worse:
            print(f"not shown to be worse than it: {'; '.join(swept.not_worse)}")
        print(f"train with it: {swept.command}")
    print_notes(swept.found)
    print(f"page: {swept.page}")
