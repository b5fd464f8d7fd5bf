"""PFL-ASR's tables at a small scale: a tiny recogniser, a seed model, and speakers that it has not heard.

`audiomnist` is 60 real people who say digits, 48 of them users and 12 only for testing, from a seed trained on six
other people (FSDD). `synthetic` is the embedded corpus, which needs nothing: users and test speakers have other accents
and voices than the seed's. A table is a list of cells, each a recipe with some values changed; the paper's figures
stand beside ours. They are not comparable as numbers (255M parameters, 34,753 users, thousands of steps there); what
should agree is which setting is better.

Noise is given as s, its deviation on the average in units of C: the paper's sigma_DP. The paper's models hold 600 times
as many parameters, so the same loss of signal needs an s that is about 25 times (the root) larger here, and with
cohorts of 16 instead of 1,024 the signal itself is noisier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from confide.build import make_loop
from confide.errors import UserError
from confide.privacy.accountant import shown
from confide.recipe import Recipe, load
from confide.report.figures.layer import draw_layers
from confide.report.figures.speech import draw_clipping
from confide.reproduce.grid import Result, run_groups, text_table, train_once, write_rows
from confide.run import Loop
from confide.runs.records import evaluate
from confide.runs.simulation import simulate
from confide.speech.model import kind_of

BASES = {"audiomnist": "speech/digits", "synthetic": "speech/embedded"}
CLIPPING = {
    "global": "bounding.rule=clip",
    "uniform": "bounding={rule: per_layer_clip, bound: 0.01, split: uniform}",
    "dim": "bounding={rule: per_layer_clip, bound: 0.01, split: dim}",
    "normalise": "bounding={rule: per_layer_normalise, bound: 0.01, split: dim}",
}
FRESH = "none"
SEED = "seed"
WEAK = "seed-20%"
TUNED = {  # central learning rates, of which the best is reported as the paper does
    "lamb": (0.01, 0.02, 0.04, 0.08), "adam": (0.002, 0.004, 0.008, 0.016), "lars": (3.0, 10.0, 30.0, 60.0),
    "sgd": (30.0, 100.0, 300.0, 1000.0),
}  # fmt: skip
SIZES = {
    "narrow": "{preset: tiny, width: 64, mlp: 256, cape_shift: 0.5}",
    "shallow": "{preset: tiny, layers: 2, cape_shift: 0.5}",
    "baseline": "{preset: tiny, cape_shift: 0.5}",
    "wide": "{preset: tiny, width: 144, mlp: 576, cape_shift: 0.5}",
    "deep": "{preset: tiny, layers: 6, cape_shift: 0.5}",
}


@dataclass(frozen=True)
class Cell:
    """One row of a table: what identifies it, what it changes, which seed model it begins from, what the paper has."""

    row: dict[str, Any]
    changes: tuple[str, ...] = ()
    start: str = SEED
    paper: str = ""
    best_of: tuple[tuple[str, ...], ...] = ((),)
    """Further changes of which the one that is best in the first run is used: a rate tuned for this row alone."""


def noisy(s: float) -> tuple[str, ...]:
    """Noise of deviation s C on the average."""
    if s == 0:
        return ("privacy.mechanism=none",)
    return ("privacy.mechanism=gaussian", f"privacy.noise_scale={s}", "privacy.placement=average", "privacy.delta=1e-9")


def table1() -> list[Cell]:
    """Noise by kind of clipping; the paper's noises are in units of 1e-6, its rows test WERs on Common Voice."""
    paper = {
        ("global", 3e-3): "31.1 at 3e-6", ("global", 1e-2): "35.2 at 10e-6", ("uniform", 3e-3): "21.2 at 3e-6",
        ("uniform", 1e-2): "25.0 at 10e-6", ("dim", 3e-3): "20.4 at 3e-6", ("dim", 1e-2): "23.7 at 10e-6",
    }  # fmt: skip
    return [
        Cell({"noise": s, "clipping": rule}, (CLIPPING[rule], *noisy(s)), paper=paper.get((rule, s), ""))
        for s, rule in [(0.0, "global"), *product((1e-3, 3e-3, 1e-2), CLIPPING)]
    ]


def table4() -> list[Cell]:
    """Cohort size with and without a seed model."""
    paper = {(SEED, 4): "28.8 at 8", (SEED, 8): "26.3 at 16", (SEED, 16): "23.9 at 32", (SEED, 32): "22.0 at 64"}
    fresh = {(FRESH, 4): "66.7 at 8", (FRESH, 8): "56.5 at 16", (FRESH, 16): "46.3 at 32", (FRESH, 32): "38.0 at 64"}
    return [
        Cell({"seed": start, "cohort": size}, (f"sampling.cohort={size}",), start, (paper | fresh)[start, size])
        for start, size in product((FRESH, SEED), (4, 8, 16, 32))
    ]


def table6() -> list[Cell]:
    """Each utterance to a random user, in place of its speaker."""
    paper = {
        (FRESH, 8, "speakers"): "56.5 at 16", (FRESH, 8, "iid"): "55.0 at 16", (FRESH, 16, "speakers"): "46.3 at 32",
        (FRESH, 16, "iid"): "45.8 at 32", (SEED, 8, "speakers"): "26.3 at 16", (SEED, 8, "iid"): "25.0 at 16",
        (SEED, 16, "speakers"): "23.9 at 32", (SEED, 16, "iid"): "22.7 at 32",
    }  # fmt: skip
    return [
        Cell({"seed": start, "cohort": size, "users": users}, (f"sampling.cohort={size}", f"task.users={users}"), start,
             paper[start, size, users])
        for start, size, users in product((FRESH, SEED), (8, 16), ("speakers", "iid"))
    ]  # fmt: skip


def table8() -> list[Cell]:
    """Central optimisers under one schedule, each at its best rate; a weak seed stands for the paper's "no seed"."""
    paper = {
        (WEAK, "lamb"): "17.5 (LibriSpeech, cohort 8, no seed)", (WEAK, "lars"): "31.6", (WEAK, "adam"): "31.0",
        (SEED, "lamb"): "10.3", (SEED, "lars"): "10.6", (SEED, "adam"): "10.5",
    }  # fmt: skip
    rest = "schedule: {kind: exponential, rate: 0.5, start: 20, transition: 16}"
    own = {"lamb": ", bias_correction: true"}  # as Adam has it: these updates are of the size of LAMB's xi
    return [
        Cell({"seed": start, "optimiser": kind}, (), start, paper.get((start, kind), ""),
             tuple((f"central={{kind: {kind}, learning_rate: {rate}, {rest}{own.get(kind, '')}}}",) for rate in rates))
        for start, (kind, rates) in product((WEAK, SEED), TUNED.items())
    ]  # fmt: skip


def table13() -> list[Cell]:
    """FedProx."""
    paper = {0.0: "17.5 (LibriSpeech, cohort 8)", 0.1: "17.5"}
    return [Cell({"mu": mu}, (f"local.proximal={mu}",), paper=paper.get(mu, "")) for mu in (0.0, 1e-3, 1e-2, 0.1, 1.0)]


def table15() -> list[Cell]:
    """Seed models that were stopped early."""
    paper = {"none": "100.0 to 44.7", "seed-5%": "87.8 to 37.8", "seed-20%": "81.1 to 38.2", "seed": "61.2 to 23.9"}
    return [Cell({"seed": start}, (), start, paper[start]) for start in paper]


def table21() -> list[Cell]:
    """Sizes of the model, with and without noise."""
    paper = {
        ("narrow", 0): "18.2", ("narrow", "global"): "31.7", ("narrow", "uniform"): "23.2", ("baseline", 0): "17.6",
        ("baseline", "global"): "34.6", ("baseline", "uniform"): "23.3", ("wide", 0): "16.6",
        ("wide", "global"): "24.7", ("wide", "uniform"): "23.7", ("shallow", 0): "19.8", ("shallow", "global"): "35.1",
        ("shallow", "uniform"): "24.8", ("deep", 0): "17.2", ("deep", "global"): "25.7", ("deep", "uniform"): "26.4",
    }  # fmt: skip
    cells = []
    for size, model in SIZES.items():
        for rule, s in (("global", 0.0), ("global", 1e-2), ("uniform", 1e-2)):
            key = (size, rule if s else 0)
            changes = (f"task.model={model}", CLIPPING[rule], *noisy(s))
            cells.append(Cell({"model": size, "noise": s, "clipping": rule}, changes, f"seed-{size}", paper[key]))
    return cells


TABLES = {
    "table1": table1, "table4": table4, "table6": table6, "table8": table8, "table13": table13, "table15": table15,
    "table21": table21,
}  # fmt: skip


def measure(recipe: Recipe) -> dict[str, Any]:
    """One run: error rates before and after, the epsilon that its noise buys, and signal-to-noise by kind of tensor."""
    curve: list[tuple[int, float]] = []
    ratios: dict[str, list[float]] = {}

    def watch(loop: Loop, state: Any, record: dict[str, Any]) -> None:
        if "evaluation" in record:
            curve.append((record["step"], record["evaluation"]["wer"]))
        if "noise" in record.get("layers", {}):
            for kind, value in _ratios(loop.layout.names, record["layers"]).items():
                ratios.setdefault(kind, []).append(value)

    before = make_loop(recipe)
    start = evaluate(before, before.start())
    loop, state = simulate(recipe, before.task, watch)
    end = loop.task.evaluate(loop.layout.views(loop.final.model(state)))
    epsilon = loop.plan.epsilon(loop.charges) if loop.plan.event.private else None
    return {
        "start": start["wer"], "wer": end["wer"], "cer": end["cer"], "curve": curve, "seconds": state.seconds,
        "epsilon": epsilon, "snr": {kind: mean(values) for kind, values in ratios.items()},
        "parameters": loop.layout.size,
    }  # fmt: skip


def _ratios(names: Sequence[str], layers: dict[str, Any]) -> dict[str, float]:
    """Norm of the aggregate over the expected norm of its noise, for the tensors of each kind together."""
    squares: dict[str, list[float]] = {}
    for name, signal, noise in zip(names, layers["signal"], layers["noise"], strict=True):
        own = squares.setdefault(kind_of(name), [0.0, 0.0])
        own[0] += signal**2
        own[1] += noise**2
    return {kind: math.sqrt(signal / noise) for kind, (signal, noise) in squares.items()}


def reproduce(what: str, folder: Path, dataset: str, seeds: int, workers: int, quiet: bool = False) -> Result:
    """Train the seed models that a table needs, run its cells, and lay them beside the paper's.

    Finished cells of all tables of a dataset are in one file beside the tables, because some tables share runs.
    """
    if what not in (*TABLES, "figure5"):
        raise UserError(f"cannot reproduce pfl-asr/{what}; expected one of {', '.join(TABLES)}, figure5")
    if dataset not in BASES:
        raise UserError(f"--dataset {dataset}: expected one of {', '.join(BASES)}")
    if what == "figure5":
        return _figure5(folder, dataset, workers, quiet)
    table, base = TABLES[what](), BASES[dataset]
    starts = {cell.start for cell in table} - {FRESH}
    places = {start: _seed_model(base, start, folder.parent / f"{dataset}-seeds", workers, quiet) for start in starts}

    kept, label = folder.parent / f"{dataset}-cells", f"pfl-asr/{what} ({dataset})"

    def recipe_of(cell: Cell, tried: tuple[str, ...], seed: int) -> Recipe:
        changes = [*_begin(cell.start, places), *resolve(cell.changes), *tried, f"run.seed={seed}"]
        return load(f"{base}/federated", changes)

    tries = [[recipe_of(cell, tried, 0) for tried in cell.best_of if len(cell.best_of) > 1] for cell in table]
    tuned = run_groups(kept, tries, measure, workers, label, quiet)
    best = [
        min(zip((value["wer"] for value in own), cell.best_of, strict=True))[1] if own else cell.best_of[0]
        for cell, own in zip(table, tuned, strict=True)
    ]
    cells = [[recipe_of(cell, tried, n) for n in range(seeds)] for cell, tried in zip(table, best, strict=True)]
    groups = run_groups(kept, cells, measure, workers, label, quiet)
    rows = [_row(*row) for row in zip(table, best, groups, strict=True)]
    write_rows(folder, rows)
    if what == "table1":
        names = [(cell.row["noise"], cell.row["clipping"]) for cell in table]
        draw_clipping(folder / "table1.png", dict(zip(names, groups, strict=True)))
    return Result(rows, [], _text(what, dataset, seeds, rows, folder))


def _figure5(folder: Path, dataset: str, workers: int, quiet: bool) -> Result:
    """One run without noise, whose page has the norms of the users' updates by kind of tensor and depth."""
    base = BASES[dataset]
    start = _seed_model(base, SEED, folder.parent / f"{dataset}-seeds", workers, quiet)
    place = folder / "run"
    wanted = load(f"{base}/federated", [*_begin(SEED, {SEED: start}), *noisy(0), "evaluation.every=5"])
    summary = train_once(wanted, place, workers, quiet)
    figure, shows = next(found for found in draw_layers(place) if found[0].name == "layers_depth.png")
    text = f"PFL-ASR figure 5 on {dataset}: norms of updates by kind of tensor and depth\n{shows}\nfigure: {figure}"
    return Result([{"wer": summary["metrics"]["wer"], "figure": str(figure)}], [], text)


def _begin(start: str, places: dict[str, Path]) -> tuple[str, ...]:
    return ("task.start=null",) if start == FRESH else (f"task.start={places[start]}",)


def resolve(changes: Sequence[str]) -> list[str]:
    """`task.users=iid` stands for the corpus's own field, which keeps its other values."""
    return [change.replace("task.users=", "task.corpus.users=") for change in changes]


def _seed_model(base: str, start: str, folder: Path, workers: int, quiet: bool) -> Path:
    """Train a seed model once: the whole one, one that was stopped early, or one of another size."""
    changes = []
    if start.endswith("%"):
        whole = load(f"{base}/seed").run.steps
        changes = [f"run.steps={round(whole * int(start.removesuffix('%').split('-')[1]) / 100)}"]
    elif start != SEED:
        changes = [f"task.model={SIZES[start.split('-')[1]]}"]
    train_once(load(f"{base}/seed", changes), folder / start, workers, quiet)
    return folder / start


def _row(cell: Cell, chosen: tuple[str, ...], values: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over runs."""
    wers = [v["wer"] for v in values]
    row = {
        **cell.row, "start": round(mean(v["start"] for v in values), 2), "wer": round(mean(wers), 2),
        "deviation": round(stdev(wers), 2) if len(wers) > 1 else "", "cer": round(mean(v["cer"] for v in values), 2),
        "epsilon": shown(values[0]["epsilon"]), "paper": cell.paper,
    }  # fmt: skip
    row["chosen"] = " ".join(chosen)
    row["snr"] = " ".join(f"{kind} {mean(v['snr'][kind] for v in values):.3g}" for kind in values[0]["snr"])
    return row


def _text(what: str, dataset: str, seeds: int, rows: list[dict[str, Any]], folder: Path) -> str:
    shown = [name for name in rows[0] if name not in ("snr", "chosen")]
    title = f"PFL-ASR {what} on {dataset}: word error rate, %, mean of {seeds} runs; the paper's test WER beside it"
    return "\n".join([title, *text_table(rows, shown), "", f"rows: {folder / 'rows.csv'}"])
