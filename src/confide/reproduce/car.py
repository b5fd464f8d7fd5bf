"""CAR's experiments on encoders and data at hand: Figure 2, Tables 1 to 3, Figures 5 to 7, with the paper's rows.

| what    | rows                                                                                            |
|---------|-------------------------------------------------------------------------------------------------|
| figure2 | SMS spam: search, adapter + search, head, adapter + head                                        |
| table1  | SMS spam, head and adapter + head: central, two clients, two clients with local noise           |
| table2  | SMS spam, one, two and three clients: accuracy, and how much faster clients at once are         |
| table3  | AG News, head on mean-pooled vectors: central, with a ReLU before it, three clients, with noise |
| figure6 | AG News, head: encoder by pooling (Figures 5 and 6)                                             |
| figure7 | arXiv, head: encoder by pooling, top 1 and top 10                                               |
| start   | SMS spam, adapter + head: an adapter that begins as the identity, and one that begins at random |
| folds   | figure2 over folds (`--seeds 5`), equal epochs, heads that begin as search; folds-arxiv: arXiv's titles |

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

import math
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from confide.build import make_loop
from confide.engines.engine import InProcess
from confide.errors import UserError
from confide.files import write_atomically
from confide.privacy.accountant import shown
from confide.randomness import generator
from confide.recipe import Recipe, changed_by, load
from confide.report.figures.retrieval import draw_bars, draw_curves
from confide.reproduce.car_claims import GOAL, claims_of
from confide.reproduce.car_tables import ENCODERS, METHODS, SPEED_UPS, TABLES, Cell
from confide.reproduce.grid import Result, cached_task, claim_text, run_groups, text_table, write_rows
from confide.retrieval.retriever import ADAPTER
from confide.runs.records import evaluate


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
    what: str, folder: Path, encoder: str, limit: int | None, seeds: int, workers: int, quiet: bool = False,
    method: str | None = None,
) -> Result:  # fmt: skip
    """Choose rates on held-out training rows, run the cells of a table, and lay them beside the paper's."""
    if what not in TABLES:
        raise UserError(f"cannot reproduce car/{what}; expected one of {', '.join(TABLES)}")
    table = [cell for cell in TABLES[what]() if method is None or cell.row.get("method") == method]
    if not table:
        raise UserError(f"car/{what} has no row with method {method!r}; expected one of {', '.join(METHODS)}")
    common = [] if what in ENCODERS else [f"task.encoder.source={encoder}"]
    if limit is not None:
        common.append(f"task.data.{'per_category' if what in ('figure7', 'folds-arxiv') else 'limit'}={limit}")
    place, label = folder.parent / "car-cells", f"car/{what}"
    rates = _choose_rates(table, common, place, seeds, workers, label, quiet)
    cells = [
        [
            _begin_at_random(recipe, place) if cell.random_adapter else recipe
            for recipe in (_recipe(cell, common, rate, seed) for seed in range(seeds))
        ]
        for cell, rate in zip(table, rates, strict=True)
    ]
    runs = run_groups(place, cells, measure, workers, label, quiet)
    rows = [_row(cell, rate, own) for cell, rate, own in zip(table, rates, runs, strict=True)]
    if what in ("table2", "table3"):
        _add_speed_ups(rows, runs)
    if what == "start":
        for row, own in zip(rows, runs, strict=True):
            row["steps"] = " ".join(str(_steps_to(run["curve"], GOAL)) for run in own)
    write_rows(folder, rows)
    names = [", ".join(str(value) for value in cell.row.values()) for cell in table]
    drawn = [
        draw_bars(folder / "accuracy.png", names, runs, [cell.paper for cell in table], what),
        draw_curves(folder / "curves.png", names, runs, what),
    ]
    claims = claims_of(what, rows)
    return Result(rows, claims, _text(what, encoder, seeds, rows, claims, folder, drawn))


def _recipe(cell: Cell, common: list[str], rate: float | None, seed: int, *more: str) -> Recipe:
    chosen = [] if rate is None else [f"local.learning_rate={rate}"]
    numbers = ["run.seed=0", f"task.data.fold={seed}"] if cell.folds else [f"run.seed={seed}"]
    return load(cell.base, [*cell.changes, *common, *chosen, *numbers, *more])


def _choose_rates(
    table: list[Cell], common: list[str], place: Path, seeds: int, workers: int, label: str, quiet: bool
) -> list[float | None]:
    """The rate of each row: the best on a fifth of the training rows that was left out of training, over all seeds.

    Over folds it is the first fold's: all rows are test rows of some fold.
    """
    tried = [(cell, rate) for cell in table for rate in cell.rates if len(cell.rates) > 1]
    held = "task.data.held_out=0.2"
    cells = [
        [_recipe(cell, common, rate, seed, held) for seed in range(1 if cell.folds else seeds)] for cell, rate in tried
    ]
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
        "highest": round(max(scores), 2), "each": " ".join(f"{score:.2f}" for score in scores),
        "deviation": round(stdev(scores), 2) if len(scores) > 1 else "",
        "top_k": round(mean(run["top_k"] for run in runs), 2), "paper": "" if cell.paper is None else cell.paper,
        "seconds": round(mean(run["seconds"] for run in runs), 1), "rate": "" if rate is None else rate,
        "epsilon": "no formal guarantee" if any("kind: car" in change for change in cell.changes) else stated,
    }  # fmt: skip


def _add_speed_ups(rows: list[dict[str, Any]], runs: list[list[dict[str, Any]]]) -> None:
    """How much sooner m clients at once are through than one with all the data."""
    both = list(zip(rows, runs, strict=True))
    alone: dict[str | None, float] = {}
    for row, own in both:
        if row["clients"] == 1:  # the first of its method; the next has a larger head
            alone.setdefault(row.get("method"), mean(run["seconds"] for run in own))
    for row, own in both:
        method = row.get("method")
        faster = alone[method] / mean(run["at_once"] for run in own)
        row["speed_up"] = round(faster, 2) if row["clients"] > 1 else ""
        row["speed_up_paper"] = SPEED_UPS.get((method, row["clients"]), "") if row["noise"] == "none" else ""


def _steps_to(curve: list[tuple[int, float]], goal: float) -> int:
    """The first step whose accuracy is not below the goal; one more than there are if none is."""
    return next((step for step, accuracy in curve if accuracy >= goal), len(curve) + 1)


def _begin_at_random(recipe: Recipe, folder: Path) -> Recipe:
    """The same run from an adapter of Gaussian numbers that keeps lengths on average, and the same fresh head."""
    from safetensors.torch import save

    seed = recipe.run.seed
    fresh: dict[str, torch.Tensor] = cached_task(recipe.task, seed).initial_parameters()
    side = len(fresh[ADAPTER])
    drawn = generator(seed, "random adapter").standard_normal((side, side)) / math.sqrt(side)
    place = folder / f"random-{recipe.digest}.safetensors"
    write_atomically(place, save(fresh | {ADAPTER: torch.from_numpy(drawn).float()}))
    return changed_by(recipe, [f"task.start={place}"])


def _text(
    what: str, encoder: str, seeds: int, rows: list[dict[str, Any]], claims: list[dict[str, Any]], folder: Path,
    drawn: list[Path],
) -> str:  # fmt: skip
    who = "" if what in ENCODERS else f" on {encoder}"
    lines = [f"CAR {what}{who}: test accuracy, %, mean of {seeds} seeds; the paper's beside it"]
    lines += text_table(rows, list(rows[0]))
    lines += [claim_text(one, ".2f") for one in claims]
    return "\n".join([*lines, f"figures: {', '.join(map(str, drawn))}; rows: {folder / 'rows.csv'}"])
