"""CAR's experiments on the encoders and the data at hand: Figure 2, Tables 1 to 3 and Figure 7, with the paper's rows.

| what    | rows                                                                                            |
|---------|-------------------------------------------------------------------------------------------------|
| figure2 | SMS spam: search, adapter + search, head, adapter + head                                        |
| table1  | SMS spam, head and adapter + head: central, two clients, two clients with local noise           |
| table2  | SMS spam, one, two and three clients: accuracy, and how much faster clients at once are         |
| table3  | AG News, head on mean-pooled vectors: central, with a ReLU before it, three clients, with noise |
| figure7 | arXiv, head: encoder by pooling, top 1 and top 10                                               |

All of them share one file of finished cells, so that a run which two tables have is made once. Rates are chosen on a
part of the training rows (`task.data.held_out`), never on the test rows, by the mean over seeds; where a row has one
rate only, as those with an adapter, it was chosen in that way before.

Differs from the paper: its encoders are TinyLlama-1.1B and Llama-3.2-3B, ours is whatever `--encoder` names; plain
gradient descent with batches of 16; adapters train for two epochs; heads with noise have ten rounds of one epoch where
the paper has five of two, and adapters with noise ten of a fifth of one at a central rate of 0.15, which was better on
held-out rows. Time is the processor time of each client; "at once" counts the slowest client of each round and the
server's share, without the network, where the paper's is a clock's over machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from confide.build import make_loop
from confide.engines.engine import InProcess
from confide.errors import UserError
from confide.privacy.accountant import shown
from confide.recipe import Recipe, load
from confide.report.figures.retrieval import draw_bars, draw_curves
from confide.reproduce.grid import Result, cached_task, claim, claim_text, run_groups, text_table, write_rows
from confide.runs.records import evaluate

SEARCH, SOFT_SEARCH, HEAD, BOTH = "search", "adapter + search", "head", "adapter + head"
METHODS = {SEARCH: "search", SOFT_SEARCH: "adapter_search", HEAD: "head", BOTH: "adapter_head"}
FIXED = (
    "bounding={rule: clip, bound: 1}",
    "privacy={mechanism: gaussian, trust: local, noise_multiplier: 0.1, delta: 1e-5}",
    "users.public=true",
    "users.unit=random share of the messages",
)
ADAPTIVE = ("bounding={rule: clip, bound: 1, adaptive: {kind: car, noise_multiplier: 0.1, decay: 0}}",)
WARM = ("bounding={rule: clip, bound: 1, adaptive: {kind: car, noise_multiplier: 0.1, decay: 0.9, warm_up: 3}}",)
HEAD_RATES, UNIT_RATES, NEWS_RATES = (0.3, 1.0, 3.0), (5.0, 20.0, 60.0), (0.03, 0.1, 0.3)
DEEP_RATES = (0.01, 0.03)
DEEPER = (
    "task.head={pre_classifier: 512, activation: relu, dropout: 0.5, scale: layer}", "run.steps=24",
    "local.schedule={kind: exponential, rate: 0.85, start: 8, transition: 1}",
)  # fmt: skip
ADAPTER_EPOCHS = 2
SMALL_ROUNDS = (  # for two clients as many examples as two epochs
    "run.steps=10", "local={steps: 28, batch_size: 16, learning_rate: 0.3, gradient_clip: 1}", "evaluation.every=5",
    "central.learning_rate=0.15",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One row: what identifies it, its recipe, the rates to choose from, and what the paper has."""

    row: dict[str, Any]
    base: str
    changes: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    paper: float | None = None


def _clients(count: int) -> tuple[str, ...]:
    return f"task.clients.clients={count}", f"sampling.cohort={count}", "users.weights=examples"


def _sms(method: str, row: dict[str, Any], paper: float | None, clients: int = 1, noise: tuple[str, ...] = ()) -> Cell:
    """A cell on SMS spam. Noise needs vectors of a common length: the bound of 1 is then that of a known update."""
    shared = (*_clients(clients), *noise) if clients > 1 else noise
    if method == HEAD:
        unit = ("task.head.scale=unit",) if noise else ()
        # Ten epochs in all, as the paper; noise is borne better in ten small rounds than in five of two epochs.
        rounds = ("run.steps=5", "local.epochs=2") if clients > 1 and not noise else ()
        return Cell(row, "retrieval/sms-head", (*shared, *unit, *rounds), UNIT_RATES if noise else HEAD_RATES, paper)
    length = SMALL_ROUNDS if noise else (f"run.steps={ADAPTER_EPOCHS}",)
    changes = (f"task.method={METHODS[method]}", *length, *shared)
    return Cell(row, "retrieval/sms-both", changes, (), paper)


def figure2() -> list[Cell]:
    paper = {SEARCH: 12.36, SOFT_SEARCH: 96.79, HEAD: 97.02, BOTH: 99.95}
    return [_sms(method, {"method": method}, paper[method]) for method in METHODS]


def table1() -> list[Cell]:
    scenarios = {"central": (1, ()), "FL": (2, ()), "FL + DP, fixed": (2, FIXED), "FL + DP, adaptive": (2, ADAPTIVE)}
    paper = {HEAD: (97.02, 97.24, None, 91.96), BOTH: (99.95, 99.50, 99.64)}  # no adaptive noise with an adapter
    return [
        _sms(method, {"method": method, "scenario": scenario}, found, *scenarios[scenario])
        for method, own in paper.items()
        for scenario, found in zip(scenarios, own, strict=False)
    ]


def table2() -> list[Cell]:
    paper = {
        (HEAD, 1, ""): 99.64, (HEAD, 2, ""): 99.28, (HEAD, 2, "adaptive"): 99.19, (HEAD, 3, ""): 99.37,
        (HEAD, 3, "adaptive"): 98.80, (BOTH, 1, ""): 99.80, (BOTH, 2, ""): 99.87, (BOTH, 2, "fixed"): 99.55,
        (BOTH, 3, ""): 99.25, (BOTH, 3, "fixed"): 99.52,
    }  # fmt: skip
    noises = {"": (), "adaptive": ADAPTIVE, "fixed": FIXED}
    return [
        _sms(method, {"method": method, "clients": clients, "noise": noise or "none"}, found, clients, noises[noise])
        for (method, clients, noise), found in paper.items()
    ]


SPEED_UPS = {(HEAD, 2): "1.11", (HEAD, 3): "1.11", (BOTH, 2): "1.75", (BOTH, 3): "2.62"}


def table3() -> list[Cell]:
    base, unit = "retrieval/agnews-federated", "task.head.scale=unit"
    alone = ("task.clients.clients=1", "sampling.cohort=1", "local.epochs=1", "run.steps=50")
    return [
        Cell({"scenario": "central"}, base, alone, NEWS_RATES, 94.18),
        Cell({"scenario": "central, pre-classifier"}, base, (*alone, *DEEPER), DEEP_RATES),
        Cell({"scenario": "FL, 3 clients"}, base, (), NEWS_RATES, 93.39),
        Cell({"scenario": "FL + DP, adaptive, warm-up"}, base, (*WARM, unit), UNIT_RATES, 92.92),
    ]


def figure7() -> list[Cell]:
    """The paper's figure has curves without numbers."""
    return [
        Cell(
            {"encoder": encoder, "pooling": pooling}, "retrieval/arxiv",
            (f"task.encoder.source={encoder}", f"task.encoder.pooling={pooling}"), (0.03, 0.1, 0.3),
        )
        for encoder in ("minilm", "smollm2")
        for pooling in ("mean", "last")
    ]  # fmt: skip


TABLES: dict[str, Callable[[], list[Cell]]] = {
    "figure2": figure2, "table1": table1, "table2": table2, "table3": table3, "figure7": figure7,
}  # fmt: skip


def measure(recipe: Recipe) -> dict[str, Any]:
    """One run: shares of the test in per cent after each step and at the end, processor seconds, epsilon."""
    torch.set_num_threads(1)
    if recipe.task.method == "search":  # type: ignore[union-attr]
        return _measure_search(recipe)
    loop = make_loop(recipe, task=cached_task(recipe.task, recipe.run.seed))
    engine = loop.engine
    if not isinstance(engine, InProcess):
        raise ValueError("a cell trains in one process")
    clients: list[float] = []
    original = engine.trainer.add_part

    def timed(*given: Any) -> Any:
        began = time.process_time()
        tally = original(*given)
        clients.append(time.process_time() - began)
        return tally

    engine.trainer.add_part = timed  # type: ignore[assignment,method-assign]
    state, curve, seconds, at_once = loop.start(), [], 0.0, 0.0
    while state.step < recipe.run.steps:
        clients.clear()
        began = time.process_time()
        loop.step(state)
        whole = time.process_time() - began
        seconds, at_once = seconds + whole, at_once + whole - sum(clients) + max(clients)
        if recipe.is_evaluated(state.step):
            curve.append((state.step, 100 * evaluate(loop, state)["accuracy"]))
    end = loop.task.evaluate(loop.layout.views(loop.final.model(state)))
    return {
        "accuracy": 100 * end["accuracy"], "top_k": 100 * end["top_k"], "loss": end["test_loss"], "curve": curve,
        "seconds": seconds, "at_once": at_once, "parameters": loop.layout.size,
        "epsilon": loop.plan.epsilon(loop.charges) if loop.plan.event.private else None,
    }  # fmt: skip


def _measure_search(recipe: Recipe) -> dict[str, Any]:
    from confide.runs.evaluation import evaluate_retrieval
    from confide.runs.library import open_search

    began = time.process_time()
    found = evaluate_retrieval(open_search(recipe, "search", quiet=True))
    return {
        "accuracy": 100 * found.scores.top_1, "top_k": 100 * found.scores.top_k, "loss": found.loss, "curve": [],
        "seconds": time.process_time() - began, "at_once": 0.0, "parameters": 0, "epsilon": None,
    }  # fmt: skip


def reproduce(
    what: str, folder: Path, encoder: str, limit: int | None, seeds: int, workers: int, quiet: bool = False
) -> Result:
    """Choose rates on held-out training rows, run the cells of a table, and lay them beside the paper's."""
    if what not in TABLES:
        raise UserError(f"cannot reproduce car/{what}; expected one of {', '.join(TABLES)}")
    table = TABLES[what]()
    common = [] if what == "figure7" else [f"task.encoder.source={encoder}"]
    if limit is not None:
        common.append(f"task.data.{'per_category' if what == 'figure7' else 'limit'}={limit}")
    place, label = folder.parent / "car-cells", f"car/{what}"
    rates = _choose_rates(table, common, place, seeds, workers, label, quiet)
    cells = [
        [_recipe(cell, common, rate, seed) for seed in range(seeds)] for cell, rate in zip(table, rates, strict=True)
    ]
    runs = run_groups(place, cells, measure, workers, label, quiet)
    rows = [_row(cell, rate, own) for cell, rate, own in zip(table, rates, runs, strict=True)]
    if what == "table2":
        _add_speed_ups(rows, runs)
    write_rows(folder, rows)
    names = [", ".join(str(value) for value in cell.row.values()) for cell in table]
    drawn = [
        draw_bars(folder / "accuracy.png", names, runs, [cell.paper for cell in table], what),
        draw_curves(folder / "curves.png", names, runs, what),
    ]
    claims = _claims(what, rows)
    return Result(rows, claims, _text(what, encoder, seeds, rows, claims, folder, drawn))


def _recipe(cell: Cell, common: list[str], rate: float | None, seed: int, *more: str) -> Recipe:
    chosen = [] if rate is None else [f"local.learning_rate={rate}"]
    return load(cell.base, [*cell.changes, *common, *chosen, f"run.seed={seed}", *more])


def _choose_rates(
    table: list[Cell], common: list[str], place: Path, seeds: int, workers: int, label: str, quiet: bool
) -> list[float | None]:
    """The rate of each row: the best on a fifth of the training rows that was left out of training, over all seeds."""
    tried = [(cell, rate) for cell in table for rate in cell.rates if len(cell.rates) > 1]
    held = "task.data.held_out=0.2"
    cells = [[_recipe(cell, common, rate, seed, held) for seed in range(seeds)] for cell, rate in tried]
    groups = run_groups(place, cells, measure, workers, f"{label}, rates", quiet)
    scores = [(mean(v["accuracy"] for v in own), -mean(v["loss"] for v in own)) for own in groups]

    def best(cell: Cell) -> float | None:
        found = [(score, rate) for (own, rate), score in zip(tried, scores, strict=True) if own is cell]
        return max(found)[1] if found else next(iter(cell.rates), None)

    return [best(cell) for cell in table]


def _row(cell: Cell, rate: float | None, runs: list[dict[str, Any]]) -> dict[str, Any]:
    scores = [run["accuracy"] for run in runs]
    stated = shown(runs[0]["epsilon"])
    return {
        **cell.row, "accuracy": round(mean(scores), 2), "lowest": round(min(scores), 2),
        "highest": round(max(scores), 2), "deviation": round(stdev(scores), 2) if len(scores) > 1 else "",
        "top_k": round(mean(run["top_k"] for run in runs), 2), "paper": "" if cell.paper is None else cell.paper,
        "seconds": round(mean(run["seconds"] for run in runs), 1), "rate": "" if rate is None else rate,
        "epsilon": "no formal guarantee" if any("kind: car" in change for change in cell.changes) else stated,
    }  # fmt: skip


def _add_speed_ups(rows: list[dict[str, Any]], runs: list[list[dict[str, Any]]]) -> None:
    """How much sooner m clients at once are through than one with all the data."""
    both = list(zip(rows, runs, strict=True))
    alone = {row["method"]: mean(run["seconds"] for run in own) for row, own in both if row["clients"] == 1}
    for row, own in both:
        faster = alone[row["method"]] / mean(run["at_once"] for run in own)
        row["speed_up"] = round(faster, 2) if row["clients"] > 1 else ""
        row["speed_up_paper"] = SPEED_UPS.get((row["method"], row["clients"]), "") if row["noise"] == "none" else ""


def _claims(what: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    score = {tuple(row[name] for name in ("method", "scenario") if name in row): row["accuracy"] for row in rows}
    if what == "figure2":
        plain, soft, head, both = (score[method,] for method in METHODS)
        return [
            claim("untrained search is 5 points below the least of the trained", plain, min(soft, head, both) - 5,
                  plain <= min(soft, head, both) - 5),
            claim("head", head, 97.0, head >= 97),
            claim("adapter + search", soft, 95.0, soft >= 95),
            claim("adapter + head", both, 98.5, both >= 98.5),
            claim("adapter + head is the best of the four", both, max(soft, head), both > max(plain, soft, head)),
        ]  # fmt: skip
    if what == "table1":
        found = []
        for method in (HEAD, BOTH):
            central = score[method, "central"]
            for scenario, points in (("FL", 0.5), ("FL + DP, fixed", 1.0)):
                lost = central - score[method, scenario]
                found.append(claim(f"{method}: points that {scenario} loses", lost, points, lost <= points))
        return found
    if what == "table2":
        return _together_claims(rows)
    if what == "table3":
        return [claim(row["scenario"], row["accuracy"], 88.0, row["accuracy"] >= 88) for row in rows[:2]]
    if what == "figure7":
        return [
            claim(f"{row['encoder']}, {row['pooling']}: top 10 over top 1", row["top_k"] / row["accuracy"], 2.2,
                  row["top_k"] >= 2.2 * row["accuracy"])
            for row in rows
        ]  # fmt: skip
    return []


def _together_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That several clients at once are sooner through than one, and lose at most half a point."""
    plain = {(row["method"], row["clients"]): row for row in rows if row["noise"] == "none"}
    found = []
    for (method, clients), row in plain.items():
        if clients > 1:
            sooner, lost = row["speed_up"], round(plain[method, 1]["accuracy"] - row["accuracy"], 2)
            found.append(claim(f"{method}: {clients} clients at once are faster than one", sooner, 1.0, sooner > 1))
            found.append(claim(f"{method}: points that {clients} clients lose", lost, 0.5, lost <= 0.5))
    return found


def _text(
    what: str, encoder: str, seeds: int, rows: list[dict[str, Any]], claims: list[dict[str, Any]], folder: Path,
    drawn: list[Path],
) -> str:  # fmt: skip
    who = "" if what == "figure7" else f" on {encoder}"
    lines = [f"CAR {what}{who}: test accuracy, %, mean of {seeds} seeds; the paper's beside it"]
    lines += text_table(rows, list(rows[0]))
    lines += [claim_text(one, ".2f") for one in claims]
    return "\n".join([*lines, f"figures: {', '.join(map(str, drawn))}; rows: {folder / 'rows.csv'}"])
