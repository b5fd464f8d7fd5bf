"""PFL-ASR's tables at a small scale: a tiny recogniser, a seed model, and speakers that it has not heard.

`audiomnist` is 60 real people who say digits, 48 of them users and 12 only for testing, from a seed trained on six
other people (FSDD). `synthetic` is the embedded corpus, which needs nothing: users and test speakers have other accents
and voices than the seed's. A table is a list of cells (`speech_tables`), each a recipe with some values changed; the
paper's figures stand beside ours. They are not comparable as numbers (255M parameters, 34,753 users, thousands of steps
there); what should agree is which setting is better, and `speech_claims` says whether it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from confide.build import make_loop
from confide.errors import UserError
from confide.federated.symmetry import balancing_factors, imbalance
from confide.files import write_atomically
from confide.privacy.accountant import shown
from confide.randomness import generator
from confide.recipe import Recipe, load
from confide.report.figures.layer import draw_layers
from confide.report.figures.speech import draw_clipping, draw_course, draw_imbalance
from confide.reproduce.grid import Result, claim, claim_text, run_cells, run_groups, text_table, train_once, write_rows
from confide.reproduce.speech_claims import claims_of
from confide.reproduce.speech_tables import (
    BEHIND,
    CLIPPING,
    FRESH,
    LARS_SEEDS,
    POST,
    SEED,
    SIZES,
    SMALL,
    TABLES,
    TRAINED_HEAD,
    Cell,
    noisy,
)
from confide.run import Loop
from confide.runs.records import evaluate
from confide.runs.simulation import simulate
from confide.speech.model import initial_parameters, kind_of
from confide.speech.symmetry import model_scalings, unbalanced, whisper_scalings

BASES = {"audiomnist": "speech/digits", "synthetic": "speech/embedded"}
OTHERS = {
    "audiomnist": ("task.corpus.share=75", "task.test={kind: audiomnist, subset: train, share: 25}"),
    "synthetic": ("task.test.population=federated", "task.test.seed=1"),
}
"""Where rates are tried: on people of the users' kind who are not in the test; of AudioMNIST, on users left out."""
HEAD_STEPS = ("run.steps=60", "central.schedule.steps=60", "evaluation.every=60")
_WERS = {"wer before": "start", "wer after": "wer"}
_LAST = 8  # steps over which the training loss at the end is averaged


def measure(recipe: Recipe) -> dict[str, Any]:
    """One run: error rates before and after, training loss, epsilon; norms and signal over noise by kind of tensor."""
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    ratios: dict[str, list[float]] = {}
    deltas: dict[str, list[float]] = {}
    course: list[dict[str, float]] = []

    def watch(loop: Loop, state: Any, record: dict[str, Any]) -> None:
        losses.append(record["loss"])
        if recipe.local.gradient_norms:
            course.append(_course(record))
        if "evaluation" in record:
            curve.append((record["step"], record["evaluation"]["wer"]))
        if "layers" in record:
            for name, norm in zip(loop.layout.names, record["layers"]["delta"], strict=True):
                deltas.setdefault(kind_of(name), []).append(norm)
        if "noise" in record.get("layers", {}):
            for kind, value in _ratios(loop.layout.names, record["layers"]).items():
                ratios.setdefault(kind, []).append(value)

    before = make_loop(recipe)
    begun = before.start()
    start = evaluate(before, begun)
    loop, state = simulate(recipe, before.task, watch)
    end = loop.task.evaluate(loop.layout.views(loop.final.model(state)))
    proven = loop.plan.epsilon(loop.charges) if loop.plan.event.private else math.inf
    epsilon = proven if math.isfinite(proven) else None  # an accountant may prove nothing of so little noise
    watched = {"course": course} if course else {}
    return {
        "start": start["wer"], "wer": end["wer"], "cer": end["cer"], "curve": curve, "seconds": state.seconds,
        "epsilon": epsilon, "snr": {kind: mean(values) for kind, values in ratios.items()},
        "parameters": loop.layout.size, "loss": mean(losses[-_LAST:]), "test_loss": end["test_loss"],
        "deltas": {kind: mean(values) for kind, values in deltas.items()},
        "imbalance": imbalance(loop.layout.views(begun.parameters), loop.task.scalings), **watched,
    }  # fmt: skip


def _course(record: dict[str, Any]) -> dict[str, float]:
    """The norms of Figures 13 and 14 at one step; the one with noise only where tensors are recorded."""
    names = {"gradient": "gradient_norm", "update": "update_norm", "bounded": "bounded_norm", "aggregate": "signal"}
    found = {"step": record["step"]} | {name: record[field] for name, field in names.items()}
    if layers := record.get("layers"):
        found["noisy"] = math.hypot(*layers.get("noisy", layers["signal"]))
    return found


def _ratios(names: Sequence[str], layers: dict[str, Any]) -> dict[str, float]:
    """Norm of the aggregate over the expected norm of its noise, for the tensors of each kind together."""
    squares: dict[str, list[float]] = {}
    for name, signal, noise in zip(names, layers["signal"], layers["noise"], strict=True):
        own = squares.setdefault(kind_of(name), [0.0, 0.0])
        own[0] += signal**2
        own[1] += noise**2
    return {kind: math.sqrt(signal / noise) for kind, (signal, noise) in squares.items() if noise > 0}


def reproduce(what: str, folder: Path, dataset: str, seeds: int, workers: int, quiet: bool = False) -> Result:
    """Train the seed models that a table needs, run its cells, and lay them beside the paper's.

    Finished cells of all tables of a dataset are in one file beside the tables, because some tables share runs.
    """
    if what not in (*TABLES, "figure5", "starts"):
        raise UserError(f"cannot reproduce pfl-asr/{what}; expected one of {', '.join(TABLES)}, figure5, starts")
    if dataset not in BASES:
        raise UserError(f"--dataset {dataset}: expected one of {', '.join(BASES)}")
    if what == "figure5":
        return _figure5(folder, dataset, workers, quiet)
    if what == "starts":
        return _starts(folder, dataset, workers, quiet)
    if what == "pretrained" and dataset != "audiomnist":
        raise UserError(f"--dataset {dataset}: pfl-asr/pretrained has a recipe for audiomnist only")
    table, base = TABLES[what](), BASES[dataset]
    starts = {cell.start for cell in table} - {FRESH}
    places = {start: _seed_model(base, start, folder.parent / f"{dataset}-seeds", workers, quiet) for start in starts}

    kept, label = folder.parent / f"{dataset}-cells", f"pfl-asr/{what} ({dataset})"

    def recipe_of(cell: Cell, tried: tuple[str, ...], seed: int) -> Recipe:
        changes = [*_begin(cell.start, places), *resolve(cell.changes), *tried, f"run.seed={seed}"]
        return load(f"{base}/{cell.recipe}", changes)

    def tried_on_others(cell: Cell, tried: tuple[str, ...]) -> Recipe:
        return recipe_of(cell, (*tried, *OTHERS[dataset]), 0)

    wanted = [cell if len(cell.best_of) > 1 and not cell.chosen_by else None for cell in table]
    tries = [[tried_on_others(cell, tried) for tried in cell.best_of] if cell else [] for cell in wanted]
    best = _choose(table, run_groups(kept, tries, measure, workers, f"{label}, rates", quiet))
    cells = [[recipe_of(cell, tried, n) for n in range(seeds)] for cell, tried in zip(table, best, strict=True)]
    groups = run_groups(kept, cells, measure, workers, label, quiet)
    rows = [_row(*row) for row in zip(table, best, groups, strict=True)]
    write_rows(folder, rows)
    if what == "table1":
        names = [(cell.row["sigma"], cell.row["clipping"]) for cell in table]
        draw_clipping(folder / "table1.png", dict(zip(names, groups, strict=True)))
    if what == "imbalance":
        draw_imbalance(folder / "imbalance.png", rows)
    if what == "figure13":
        draw_course(
            folder / "figure13.png", [(row, [v["course"] for v in own]) for row, own in zip(rows, groups, strict=True)]
        )
    claims = claims_of(what, rows)
    return Result(rows, claims, _text(what, dataset, seeds, rows, claims, folder))


def _starts(folder: Path, dataset: str, workers: int, quiet: bool) -> Result:
    """How unbalanced models are that nobody constructed: fresh ones, our seeds, and Whisper's encoders.

    Of the recognisers, users' updates are measured too, in a cell of Table 1 without noise.
    """
    from safetensors.torch import load_file

    from confide.encoders.frames import FrameEncoder
    from confide.encoders.weights import find

    base = BASES[dataset]
    settings: Any = load(f"{base}/seed").task
    seeds = {f"seed of {dataset}, by Adam": SEED} | {
        f"seed of {dataset}, by LARS at 0.5, {times} times as many steps": start for start, times in LARS_SEEDS.items()
    }
    seeds[f"seed of {dataset}, by Adam, LayerNorms behind"] = BEHIND
    kept = folder.parent / f"{dataset}-seeds"
    places = {start: _seed_model(base, start, kept, workers, quiet) for start in seeds.values()}
    recognisers = {"fresh, 3 blocks": FRESH} | seeds
    begins = [
        (*_begin(start, places), *([POST] if start == BEHIND else []), *SMALL, CLIPPING["global"], *noisy(0))
        for start in recognisers.values()
    ]
    cells = [load(f"{base}/federated", changes) for changes in begins]
    ran = run_cells(folder.parent / f"{dataset}-cells", cells, measure, workers, f"pfl-asr/starts ({dataset})", quiet)
    updates = dict(zip(recognisers, ran, strict=True))
    models = {
        "fresh, 3 blocks": (initial_parameters(settings.model, generator(0, "model")), model_scalings(settings.model))
    }
    for name, start in seeds.items():
        model = settings.model.model_copy(update={"norm": "post"}) if start == BEHIND else settings.model
        models[name] = (load_file(places[start] / "model.safetensors"), model_scalings(model))
    for source in ("whisper-tiny.en", "whisper-base.en"):
        if find(source, "speech") is not None:
            encoder = FrameEncoder(source)
            blocks = [f"layers.{index}" for index in range(len(encoder.layers))]
            models[f"encoder of {source}"] = (encoder.model.state_dict(), whisper_scalings(blocks))
    rows: list[dict[str, Any]] = [
        {"start": name, "imbalance": round(imbalance(parameters, scalings), 2)}
        | {
            kind: round(math.exp(-2 * mean(math.log(factor) for factor in found)), 2) if found else ""
            for kind in ("attention", "mlp")
            for found in [[v for k, v in balancing_factors(parameters, scalings).items() if k.endswith(kind)]]
        }
        | {"norms": _norms([updates[name]["deltas"]]) if name in updates else ""}
        | {word: round(updates[name][own], 2) if name in updates else "" for word, own in _WERS.items()}
        for name, (parameters, scalings) in models.items()
    ]
    write_rows(folder, rows)
    most = max((row for row in rows), key=lambda row: float(row["imbalance"]))
    what = f"the most unbalanced of these ({most['start']}) is as unbalanced as the constructed start with c = 3"
    claims = [claim(what, most["imbalance"], 45.0, most["imbalance"] >= 45)]
    longest = max((row for row in rows if row["norms"] != ""), key=lambda row: float(row["norms"]))
    what = f"updates of LayerNorms over those of the attention, the most of these ({longest['start']}; 10 in the paper)"
    claims.append(claim(what, longest["norms"], 10.0, longest["norms"] >= 10))
    title = "Imbalance from the weights alone: of updates per coordinate, LayerNorms over the matrices behind them"
    return Result(
        rows, claims, "\n".join([title, *text_table(rows, list(rows[0])), *(claim_text(one, ".2f") for one in claims)])
    )


def _choose(table: Sequence[Cell], tuned: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """What each row uses: the least test loss of what was tried, which tells more than word errors near 100 %."""
    found = [
        min(zip((value["test_loss"] for value in own), cell.best_of, strict=True))[1] if own else cell.best_of[0]
        for cell, own in zip(table, tuned, strict=True)
    ]
    by_name = {cell.tuned: each for cell, each in zip(table, found, strict=True) if not cell.chosen_by}
    return [by_name[cell.chosen_by] if cell.chosen_by else each for cell, each in zip(table, found, strict=True)]


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
    """Make a start once: the seed model, one that was stopped early, one of another size or unbalanced, or a head."""
    if start.startswith(f"{SEED}-c"):
        return _unbalanced_seed(base, float(start.removeprefix(f"{SEED}-c")), folder, workers, quiet)
    if start == TRAINED_HEAD:
        train_once(load(f"{base}/pretrained", HEAD_STEPS), folder / start, workers, quiet)
        return folder / start
    changes = []
    if start.endswith("%"):
        whole = load(f"{base}/seed").run.steps
        changes = [f"run.steps={round(whole * int(start.removesuffix('%').split('-')[1]) / 100)}"]
    elif start in LARS_SEEDS:
        steps = load(f"{base}/seed").run.steps * LARS_SEEDS[start]
        falling = f"{{kind: exponential, rate: 0.5, start: {round(0.6 * steps)}, transition: {math.ceil(steps / 8)}}}"
        central = f"central={{kind: lars, learning_rate: 0.5, schedule: {falling}}}"
        changes = [central, f"run.steps={steps}"]
    elif start == BEHIND:
        changes = [POST]
    elif start != SEED:
        changes = [f"task.model={SIZES[start.split('-')[1]]}"]
    train_once(load(f"{base}/seed", changes), folder / start, workers, quiet)
    return folder / start


def _unbalanced_seed(base: str, c: float, folder: Path, workers: int, quiet: bool) -> Path:
    """The whole seed, scaled so that it computes the same with long updates of its LayerNorms."""
    from safetensors.torch import load_file, save

    whole, place = _seed_model(base, SEED, folder, workers, quiet), folder / f"{SEED}-c{c:g}.safetensors"
    settings: Any = load(f"{base}/seed").task
    write_atomically(place, save(unbalanced(load_file(whole / "model.safetensors"), settings.model, c)))
    return place


def _row(cell: Cell, chosen: tuple[str, ...], values: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over runs."""
    wers = [v["wer"] for v in values]
    row = {
        **cell.row, "start": round(mean(v["start"] for v in values), 2), "wer": round(mean(wers), 2),
        "deviation": round(stdev(wers), 2) if len(wers) > 1 else "", "cer": round(mean(v["cer"] for v in values), 2),
        "loss": round(mean(v["loss"] for v in values), 3), "epsilon": shown(values[0]["epsilon"]), "paper": cell.paper,
        "runs": len(wers), "norms": _norms([v["deltas"] for v in values]),
        "imbalance": round(values[0]["imbalance"], 3),
    }  # fmt: skip
    if "test_loss" in values[0]:
        losses = [v["test_loss"] for v in values]
        row["test_loss"] = round(mean(losses), 3)
        row["test_loss_deviation"] = round(stdev(losses), 3) if len(losses) > 1 else ""
    if "course" in values[0]:
        seen = [step for v in values for step in v["course"] if "noisy" in step]  # for all norms the same steps
        row |= {name: float(f"{mean(step[name] for step in seen):.4g}") for name in seen[0] if name != "step"}
    row["chosen"] = " ".join(chosen)
    row["snr"] = " ".join(f"{kind} {mean(v['snr'][kind] for v in values):.3g}" for kind in values[0]["snr"])
    return row


def _norms(runs: list[dict[str, float]]) -> float | str:
    """How many times as long the updates of LayerNorms are as those of the attention (the paper's Figure 5)."""
    if not {"wqkv", "wf", "ln1", "ln2"} <= runs[0].keys():  # a model that trains none of them
        return ""

    def ratio(deltas: dict[str, float]) -> float:
        return mean(deltas[kind] for kind in ("ln1", "ln2")) / mean(deltas[kind] for kind in ("wqkv", "wf"))

    return round(mean(map(ratio, runs)), 3)


def _text(
    what: str, dataset: str, seeds: int, rows: list[dict[str, Any]], claims: list[dict[str, Any]], folder: Path
) -> str:
    shown = [name for name in rows[0] if name not in ("snr", "chosen", "runs", "imbalance", "test_loss_deviation")]
    title = f"PFL-ASR {what} on {dataset}: word error rate, %, mean of {seeds} runs; the paper's test WER beside it"
    said = [claim_text(one, ".2f") for one in claims]
    return "\n".join([title, *text_table(rows, shown), "", *said, f"rows: {folder / 'rows.csv'}"])
