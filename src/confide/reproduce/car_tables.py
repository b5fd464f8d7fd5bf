"""The rows of CAR's tables and figures that are run here, with the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

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
COLD = (WARM[0].replace(", warm_up: 3", ""),)
DEEP_RATES = (0.01, 0.03)
DEEPER = (
    "task.head={pre_classifier: 512, activation: relu, dropout: 0.5, scale: layer}", "run.steps=24",
    "local.schedule={kind: exponential, rate: 0.85, start: 8, transition: 1}",
)  # fmt: skip
SIZES, POOLINGS = ("minilm", "smollm2"), ("mean", "last")
"""Encoders from the smaller to the larger one, and poolings from the better to the worse one in the paper."""
ADAPTER_EPOCHS = 2
FOLD_EPOCHS = 2
SMALL_ROUNDS = (  # for two clients as many examples as two epochs
    "run.steps=10", "local={steps: 28, batch_size: 16, learning_rate: 0.3, gradient_clip: 1}", "evaluation.every=5",
    "central.learning_rate=0.15",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One row: its name, recipe, rates to choose from and figure in the paper, and whether its runs are folds."""

    row: dict[str, Any]
    base: str
    changes: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    paper: float | None = None
    folds: bool = False
    random_adapter: bool = False
    """Whether its adapter begins at random, not as the identity."""


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


SPEED_UPS = {(HEAD, 2): "1.11", (HEAD, 3): "1.11", (BOTH, 2): "1.75", (BOTH, 3): "2.62", (None, 3): "2.38"}
"""By method, none for the head on AG News, and clients; without noise."""


def table3() -> list[Cell]:
    base, unit = "retrieval/agnews-federated", "task.head.scale=unit"
    alone = ("task.clients.clients=1", "sampling.cohort=1", "local.epochs=1", "run.steps=50")
    one, three = {"clients": 1, "noise": "none"}, {"clients": 3, "noise": "none"}
    noisy = {"clients": 3, "noise": "adaptive"}
    return [
        Cell({"scenario": "central", **one}, base, alone, NEWS_RATES, 94.18),
        Cell({"scenario": "central, pre-classifier", **one}, base, (*alone, *DEEPER), DEEP_RATES),
        Cell({"scenario": "FL, 3 clients", **three}, base, (), NEWS_RATES, 93.39),
        Cell({"scenario": "FL + DP, adaptive, warm-up", **noisy}, base, (*WARM, unit), UNIT_RATES, 92.92),
        Cell({"scenario": "FL + DP, adaptive, no warm-up", **noisy}, base, (*COLD, unit), UNIT_RATES),
    ]


def start() -> list[Cell]:
    """An adapter that begins as the identity and one that begins at random (section 6.1), in steps of three batches."""
    short = ("task.method=adapter_head", "run.steps=12", "evaluation.every=1",
             "local={steps: 3, batch_size: 16, learning_rate: 0.3, gradient_clip: 1}")  # fmt: skip
    return [
        Cell({"adapter": name}, "retrieval/sms-both", short, random_adapter=random)
        for name, random in (("identity", False), ("random", True))
    ]


def encoders(corpus: str) -> list[Cell]:
    """Two encoders by two poolings; the paper's figures 5 to 7 have curves without numbers."""
    kinds = {
        "ag-news": ("retrieval/agnews-federated", ("run.steps=10", "evaluation.every=10"), NEWS_RATES),
        "arxiv": ("retrieval/arxiv", (), (0.03, 0.1, 0.3)),
    }
    base, own, rates = kinds[corpus]
    return [
        Cell({"encoder": encoder, "pooling": pooling}, base,
             (*own, f"task.encoder.source={encoder}", f"task.encoder.pooling={pooling}"), rates)
        for encoder, pooling in product(SIZES, POOLINGS)
    ]  # fmt: skip


def folds(corpus: str) -> list[Cell]:
    """Figure 2's four ways over folds of one corpus, at equal epochs, with heads that begin as search."""
    search, unit = "task.search={normalise: true, temperature: 0.1}", "task.head={scale: unit, start: documents}"
    kinds = {"sms": ("retrieval/sms-both", ()), "arxiv": ("retrieval/arxiv", ("task.data.text=title",))}
    base, own = kinds[corpus]
    common = (
        *own, "task.clients.clients=1", "sampling.cohort=1", f"run.steps={FOLD_EPOCHS}", "evaluation.every=2",
        "local={epochs: 1, batch_size: 16, learning_rate: 1, gradient_clip: 1}",
    )  # fmt: skip
    ways = {
        SEARCH: ((), ()),
        SOFT_SEARCH: (("task.negatives=15",), (0.3, 1.0)),
        HEAD: ((unit,), (0.3, 1.0, 3.0, 10.0)),
        BOTH: ((unit, "local.rates={adapter: 0.3}"), (1.0, 3.0)),
    }
    return [
        Cell({"method": method}, base, (*common, f"task.method={METHODS[method]}", search, *more), rates, folds=True)
        for method, (more, rates) in ways.items()
    ]


ENCODERS = ("figure6", "figure7")
"""Tables whose rows name their encoders."""

TABLES: dict[str, Callable[[], list[Cell]]] = {
    "figure2": figure2, "table1": table1, "table2": table2, "table3": table3, "figure6": partial(encoders, "ag-news"),
    "figure7": partial(encoders, "arxiv"), "start": start, "folds": partial(folds, "sms"),
    "folds-arxiv": partial(folds, "arxiv"),
}  # fmt: skip
