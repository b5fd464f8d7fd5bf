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


def mlp(steps: int, cohort: int = 100, **task: Any) -> Recipe:
    """A: one epoch of two batches of ten, at rate 0.1."""
    return parse(
        {
            "task": {"kind": "bench/mlp", **task},
            "sampling": {"kind": "fixed", "cohort": cohort},
            "local": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1},
            "run": {"steps": steps},
            **_PRIVATE,
        }
    )


def speech(steps: int, cohort: int = 16, **task: Any) -> Recipe:
    """B: two steps on all of a user's utterances."""
    return parse(
        {
            "task": {"kind": "bench/speech", **task},
            "sampling": {"kind": "fixed", "cohort": cohort},
            "local": {"steps": 2, "learning_rate": 0.1},
            "run": {"steps": steps},
            **_PRIVATE,
        }
    )


def vector(steps: int, cohort: int = 4, **task: Any) -> Recipe:
    """C: one step that hardly trains, so that what is measured is what privacy costs."""
    return parse(
        {
            "task": {"kind": "bench/vector", **task},
            "sampling": {"kind": "fixed", "cohort": cohort},
            "local": {"steps": 1, "learning_rate": 0.1},
            "run": {"steps": steps},
            **_PRIVATE,
        }
    )
