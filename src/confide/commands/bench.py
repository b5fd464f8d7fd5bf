"""`confide bench`: this project beside others, on made-up workloads."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from confide.commands.options import Json
from confide.errors import UserError

SCALING = "scaling"


def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A (many small clients), B (a speech client), C (a large model), D (heads on kept states), "
            "E (a head that retrieves), scaling; all unless given."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where rows, raw times and figures go.")] = Path("results/bench"),
    peers: Annotated[
        Path,
        typer.Option(help="Where `benchmarks/setup_peers.sh FOLDER` made the environments of pfl, Flower, fedjax."),
    ] = Path(".peers"),
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each candidate.")] = 20,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones; they do not count.")] = 3,
    parameters: Annotated[
        int, typer.Option(min=1000, help="C and scaling: parameters of the largest model.")
    ] = 255_000_000,
    only: Annotated[
        str | None, typer.Option(help="Systems besides confide, with commas; for example pfl,fedjax. Default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time this project beside pfl, Flower, fedjax and plain PyTorch, in one run, round by round in turn.

    Every workload goes through the same loop as `confide train`. A ratio of 8 means that the other takes 8 times as
    long. A system whose environment is missing is named and left out. Ratios need a machine that does nothing else.

    Example: `confide bench A --rounds 20 --peers .peers`
    """
    from confide.bench.compare import WORKLOADS, as_text

    chosen = what or [*WORKLOADS, SCALING]
    unknown = [each for each in chosen if each not in (*WORKLOADS, SCALING)]
    if unknown:
        raise UserError(f"cannot bench {unknown[0]!r}; expected any of {', '.join(WORKLOADS)} and {SCALING}")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for workload in (each for each in WORKLOADS if each in chosen):
        found = _side_by_side(workload, out, peers, rounds, warm_up, parameters, only)
        rows += found
        if not as_json:
            print(f"\n{workload}, {WORKLOADS[workload]}\n{as_text(found)}")
    if rows:
        from confide.bench.figures import draw_ratios

        _write_csv(out / "ratios.csv", rows)
        draw_ratios(out / "ratios.png", rows)
        result["rows"] = rows
    if SCALING in chosen:
        result["scaling"] = _scaling(out, rounds, parameters, as_json)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print(f"\nwritten: {out}")


def _side_by_side(
    workload: str, out: Path, peers: Path, rounds: int, warm_up: int, parameters: int, only: str | None
) -> list[dict[str, Any]]:
    from confide.bench import compare

    wanted = None if only is None else {name.strip() for name in only.split(",")}
    unknown = [] if wanted is None else sorted(wanted - {*compare.PEERS, "floors", ""})
    if unknown:
        raise UserError(f"--only {only}: there is no {unknown[0]!r}; expected {', '.join(compare.PEERS)} or floors")
    chosen = [
        candidate
        for candidate in compare.candidates(workload, parameters)
        if wanted is None or candidate.system == compare.OURS or (candidate.environment or "floors") in wanted
    ]
    results = compare.compare(chosen, peers, rounds, warm_up, _say)
    (out / f"{workload}.json").write_text(json.dumps(compare.as_json(results), indent=1))
    return compare.table(workload, results)


def _scaling(out: Path, rounds: int, parameters: int, quiet: bool) -> dict[str, Any]:
    import os
    from dataclasses import asdict

    from confide.bench import scaling
    from confide.bench.figures import draw_scaling

    processes = tuple(n for n in (1, 2, 4, 8, 16) if n <= max(2, os.cpu_count() or 1))
    points = scaling.scale(processes, parameters, min(rounds, 5), _say)
    rows = [asdict(point) for point in points]
    _write_csv(out / "scaling.csv", rows)
    draw_scaling(out / "scaling.png", points)
    grown = [found for curve in dict.fromkeys(p.curve for p in points) if (found := scaling.growth(points, curve))]
    if not quiet:
        print("\nscaling")
        for point in points:
            peak = "" if point.peak_mib is None else f"{point.peak_mib:,.0f} MiB"
            print(f"  {point.curve:<24} {point.x:>12,} {point.seconds:>10.4f} s {peak:>12}")
    return {"points": rows, "growth": grown}


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
