"""`confide demo`: the whole of private federated speech recognition in a few minutes, on voices that it makes itself.

A seed recogniser is trained centrally on a few American voices. Sixty users with other accents and voices then adapt it
three times: without privacy, with noise and one bound for the whole update (global clipping), and with the same noise
and a bound for each tensor (PFL-ASR's per-layer clipping). Every model is tested on speakers that nobody trained on.

Sixty users cannot hide in each other: the noise that they can bear buys no epsilon worth the name, and the table says
so. It also says how many users the same noise would protect well (PFL-ASR's extrapolation): cohort and population grow
together, noise per coordinate and utility stay, epsilon falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.privacy.accountant import shown
from confide.privacy.planner import Point
from confide.recipe import load
from confide.reproduce.grid import train_once

NOISE = 2e-4
DELTA = 1e-9
PRIVATE = (
    "privacy.mechanism=gaussian", f"privacy.noise_scale={NOISE}", "privacy.placement=average", f"privacy.delta={DELTA}",
)  # fmt: skip
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "seed": ("seed model, not adapted", ()),
    "federated": ("federated, no privacy", ()),
    "global": ("private, global clipping", PRIVATE),
    "per-layer": (
        "private, per-layer clipping",
        (*PRIVATE, "bounding={rule: per_layer_clip, bound: 0.01, split: dim}"),
    ),
}


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo: a line of the closing table."""

    name: str
    wer: float
    cer: float
    epsilon: float | None
    population: int | None
    """The smallest population for which the same noise per coordinate gives an epsilon below 10."""
    epsilon_there: float | None
    report: Path


def demo(out: Path, workers: int, quiet: bool = False) -> list[DemoRun]:
    """Make the four runs in `out`, each only once, and sum them up."""
    rows = []
    for name, (said, changes) in RUNS.items():
        base = "speech/embedded/seed" if name == "seed" else "speech/embedded/federated"
        start = () if name == "seed" else (f"task.start={out / 'seed'}",)
        wanted, place = load(base, [*start, *changes]), out / name
        if not quiet:
            print(f"== {said}", flush=True)
        rows.append(_row(said, train_once(wanted, place, workers, quiet), place))
    return rows


def _row(said: str, summary: dict[str, Any], place: Path) -> DemoRun:
    metrics = summary["metrics"]
    privacy: tuple[float | None, int | None, float | None] = (None, None, None)
    if summary["mechanism"] != "none":
        privacy = (summary["epsilon"], *extrapolate(summary["cohort"], summary["population"], summary["steps"]))
    return DemoRun(said, metrics["wer"], metrics["cer"], *privacy, place / "report.html")


def extrapolate(cohort: int, population: int, steps: int, target: float = 10.0) -> tuple[int, float]:
    """Grow cohort and population together, by powers of two, until the noise that was trained with is enough.

    z = s S grows with the cohort at the same noise s on the average.
    """
    for power in range(40):
        size, people = cohort * 2**power, population * 2**power
        spent = Point(NOISE * size, size, people, steps, DELTA).spent("pld")
        if spent < target:
            return people, spent
    raise UserError(f"no population reaches epsilon {target} with noise {NOISE} on the average")


def table(rows: list[DemoRun]) -> str:
    """The closing table as text."""
    head = ("", "WER %", "CER %", "epsilon here", "epsilon with so many users")
    lines = [
        (
            row.name, f"{row.wer:.1f}", f"{row.cer:.1f}",
            "no guarantee" if row.epsilon is None else shown(row.epsilon),
            "" if row.population is None else f"{shown(row.epsilon_there)} with {row.population:,}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    padded = ("  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) for line in (head, *lines))
    return "\n".join(line.rstrip() for line in padded)
