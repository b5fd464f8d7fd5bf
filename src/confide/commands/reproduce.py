"""`confide reproduce`: a paper's experiment beside ours."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from confide.commands.options import Json, parse_numbers
from confide.commands.printing import print_json
from confide.errors import UserError


def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="norm/quadratics, norm/table1, or pfl-asr/ with table1 (noise, clipping), table4 (cohort, seed), "
            "table6 (IID), table7 (LayerNorm), table8 (optimisers), table13 (FedProx), table15 (seed quality), "
            "table21 (sizes), figure5 (norms), figure13 (norms over steps), imbalance (constructed starts), groups "
            "(noise on some tensors), weighted (bound for MLPs), bounds (C), clients (IID, FedProx), transfer (rates), "
            "starts (imbalance of models), pretrained (LoRA by rule), optimisers (LAMB, Adam under noise), product (C "
            "times sigma), local (how much users train), central (gradients of central training), precision "
            "(bfloat16); or car/ with figure2 (four combinations), table1 (FL, DP), table2 (clients), table3 (AG "
            "News), figure6 (encoders on AG News), figure7 (on arXiv), start (of the adapter), folds and folds-arxiv "
            "(figure2 over --seeds folds)."
        ),
    ],
    dataset: Annotated[
        str | None,
        typer.Option(help="norm/table1: digits, fashion-mnist or cifar10; pfl-asr: synthetic or audiomnist."),
    ] = None,
    encoder: Annotated[str, typer.Option(help="car: the frozen encoder; `confide encoder list`.")] = "minilm",
    limit: Annotated[
        int | None, typer.Option(min=2, help="car: so many examples only (arXiv: papers of each category).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="car: only the rows of one way, for example head, which runs no encoder.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs each figure is the mean of.")] = 3,
    epsilons: Annotated[str, typer.Option(help="For norm/table1: which epsilons, for example 5 or 5,1.5.")] = "5,1.5",
    bounds: Annotated[
        str | None, typer.Option(help="For norm/table1: C of a part of the grid, for example 15.625,31.25.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="For norm/table1: rates of a part of the grid, for example 0.016,0.032.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results are kept; default results/WHAT.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Cells of the grid at a time, one thread each.")] = 2,
    as_json: Json = False,
) -> None:
    """Run a paper's experiment and show its numbers beside ours.

    Every finished cell is kept, so a stopped grid goes on where it was. Rows are written as CSV, with figures.
    """
    from confide.reproduce import car, norm, pfl_asr

    def place(*variant: object) -> Path:
        return out or Path("results") / "-".join([what.replace("/", "-"), *map(str, variant)])

    paper, _, table = what.partition("/")
    if paper == "pfl-asr":
        corpus = dataset or "synthetic"
        result = pfl_asr.reproduce(table, place(corpus), corpus, seeds, workers, quiet=as_json)
    elif paper == "car":
        kept = place(encoder) if limit is None else place(encoder, limit)
        result = car.reproduce(table, kept, encoder, limit, seeds, workers, quiet=as_json, method=method)
    elif what == "norm/quadratics":
        result = norm.quadratics(place(), seeds, workers, quiet=as_json)
    elif what == "norm/table1":
        levels, data = _positive("epsilons", epsilons), dataset or "digits"
        parts = {name: _positive(name, given) for name, given in (("bounds", bounds), ("rates", rates)) if given}
        result = norm.table1(place(data), data, seeds, levels, workers, quiet=as_json, **parts)
    else:
        raise UserError(
            f"cannot reproduce {what!r}; expected norm/quadratics, norm/table1, pfl-asr/TABLE or car/TABLE; see --help"
        )
    if as_json:
        own = {"dataset": dataset, "limit": limit, "seeds": seeds} | (
            {"encoder": encoder, "method": method} if paper == "car" else {}
        )
        own |= {"epsilons": epsilons, "bounds": bounds, "rates": rates} if what == "norm/table1" else {}
        said = [f"--{name} {quote(str(value))}" for name, value in own.items() if value is not None]
        command = " ".join(["confide reproduce", what, *said])
        print_json({"command": command, "rows": result.rows, "claims": result.claims})
        return
    print(result.text)


def _positive(name: str, given: str) -> list[float]:
    expected = "numbers above 0 separated by commas, for example 5,1.5"
    return parse_numbers(name, given, float, lambda found: all(0 < each < float("inf") for each in found), expected)
