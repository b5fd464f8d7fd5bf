"""The workloads as recipes (shared with `confide train`, which takes them from a file)."""

from __future__ import annotations

from typing import Any

from confide.recipe import Recipe, parse

_PRIVATE: dict[str, Any] = {
    "bounding": {"rule": "clip", "bound": 0.5},
    "privacy": {"mechanism": "gaussian", "noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
    "central": {"kind": "sgd", "learning_rate": 1.0},
    "evaluation": {"every": 10**9, "last": 1},
}


def _recipe(steps: int, cohort: int, task: dict[str, Any], local: dict[str, Any], sampler: str = "fixed") -> Recipe:
    sampling, most = {"kind": sampler, "cohort": cohort}, 1.0 / task.get("users", 1)  # a delta above means nothing
    privacy = _PRIVATE["privacy"] | {"delta": min(1e-5, most)}
    run = {"steps": steps}
    return parse(_PRIVATE | {"task": task, "sampling": sampling, "local": local, "run": run, "privacy": privacy})


def mlp(steps: int, cohort: int = 100, **task: Any) -> Recipe:
    """A: one epoch of two batches of ten, at rate 0.1."""
    local = {"epochs": 1, "batch_size": 10, "learning_rate": 0.1}
    return _recipe(steps, cohort, {"kind": "bench/mlp", **task}, local)


def speech(steps: int, cohort: int = 16, **task: Any) -> Recipe:
    """B: two steps on all of a user's utterances."""
    return _recipe(steps, cohort, {"kind": "bench/speech", **task}, {"steps": 2, "learning_rate": 0.1})


def vector(steps: int, cohort: int = 4, **task: Any) -> Recipe:
    """C: one step that hardly trains, so that what is measured is what privacy costs."""
    return _recipe(steps, cohort, {"kind": "bench/vector", **task}, {"steps": 1, "learning_rate": 0.1})


def states(steps: int, cohort: int = 312, **task: Any) -> Recipe:
    """D: one step on all of a user's utterances."""
    return _recipe(steps, cohort, {"kind": "bench/states", **task}, {"steps": 1, "learning_rate": 0.1})


def queries(steps: int, cohort: int = 4459, **task: Any) -> Recipe:
    """E: one step on a user's one query; everybody takes part, as in `retrieval/sms-private`."""
    local = {"epochs": 1, "learning_rate": 0.1}
    return _recipe(steps, cohort, {"kind": "bench/queries", **task}, local, "poisson")


MAKE = {"A": mlp, "B": speech, "C": vector, "D": states, "E": queries}
"""The recipe of each workload of `confide bench`."""
