"""What a run writes down about its steps: records of metrics, norms of each tensor, seconds of each part, scores."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.engines.engine import Engine, Traits
from confide.federated.central import CentralStep
from confide.federated.cohort import Tally
from confide.federated.state import State
from confide.run import Loop, Step

Record = dict[str, Any]


class Recorded:
    """A loop whose steps are timed and turned into records. Nothing here changes what a step computes."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._engine, self._central = _TimedEngine(loop.engine), _TimedCentral(loop.central)
        self._timed = replace(loop, engine=self._engine, central=self._central)
        self.seconds: dict[str, float] = {}
        """Of each part of the last step."""

    def step(self, state: State) -> Record:
        """One central step, in place, and its record."""
        began = time.perf_counter()
        made = self._timed.step(state)
        whole = time.perf_counter() - began
        state.seconds += whole
        train, move = self._engine.seconds, self._central.seconds
        self.seconds = {"train": train, "release": whole - train - move, "move": move}
        return record_of(self.loop, state, made)


@dataclass
class _TimedEngine:
    engine: Engine
    seconds: float = field(default=0.0, init=False)

    @property
    def traits(self) -> Traits:
        return self.engine.traits

    def gather(self, cohort: np.ndarray, step: int) -> None:
        self.engine.gather(cohort, step)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        began = time.perf_counter()
        tally = self.engine.train(central, cohort, step, total, bounds)
        self.seconds = time.perf_counter() - began
        return tally

    def close(self) -> None:
        self.engine.close()


class _TimedCentral(CentralStep):
    def __init__(self, central: CentralStep) -> None:
        super().__init__(central.settings, central.layout)
        self.seconds = 0.0

    def move(self, state: State, gradient: Tensor) -> None:
        began = time.perf_counter()
        super().move(state, gradient)
        self.seconds = time.perf_counter() - began


def record_of(loop: Loop, state: State, made: Step) -> Record:
    """The metrics of a step, and the norms of each tensor where the loop measured them."""
    tally, signal, noise = made.tally, made.signal, made.noise
    users = max(tally.users - tally.not_finite, 1)
    mean = tally.norm / users
    record: Record = {
        "step": made.number,
        "seconds": round(state.seconds, 4),
        "cohort": tally.users,
        "loss": tally.loss / users,
        "update_norm": mean,
        "update_norm_deviation": math.sqrt(max(tally.norm_squared / users - mean * mean, 0.0)),
        "bounded_norm": tally.bounded_norm / users,
        "share_bounded": tally.bounded / users,
        "not_finite": tally.not_finite,
        "signal": signal.norm,
        "local_learning_rate": loop.recipe.local.rate(made.number - 1),
    }
    if loop.recipe.local.gradient_norms:
        record["gradient_norm"] = tally.gradient / users
    if noise is not None:
        record |= {"noise": noise, "snr": signal.norm / noise}
    record["bound"] = made.bound
    if made.released:
        record["released"] = {"step": made.number, **made.released}
    if signal.layers is not None:
        record["layers"] = _layers(loop, made)
    return record


def _layers(loop: Loop, made: Step) -> Record:
    """Norms of each tensor (PFL-ASR Figures 5, 10, 13, 14).

    Mean and deviation over users of the update's norm, mean once bounded, share of users whose was shortened; norm of
    the aggregate; norm of the model that the users started from; expected norm of the noise, and norm of the aggregate
    with it. Where it is asked for, also the mean over users and their steps of the local gradient's norm.
    """
    tally, users = made.tally, made.tally.users - made.tally.not_finite
    nothing = [0.0] * len(loop.layout.names)
    mean, square, bounded, clipped = (
        torch.tensor(sums or nothing, dtype=torch.float64) / max(users, 1)  # (layers,)
        for sums in (tally.layer_norms, tally.layer_norms_squared, tally.layer_bounded, tally.layer_clipped)
    )
    record: Record = {
        "step": made.number,
        "users": users,
        "delta": _six_digits(mean),
        "delta_deviation": _six_digits((square - mean.square()).clamp(min=0).sqrt()),
        "bounded": _six_digits(bounded),
        "clipped": _six_digits(clipped),
        "signal": _six_digits(made.signal.layers),
        "weights": _six_digits(made.signal.weights),
    }
    if loop.recipe.local.gradient_norms:
        gradients = torch.tensor(tally.layer_gradients or nothing, dtype=torch.float64)
        record["gradient"] = _six_digits(gradients / max(users, 1))
    if made.noise is not None:  # spread evenly over the coordinates that have any
        sizes = torch.tensor(loop.plan.mechanism.noisy_sizes(loop.layout.sizes), dtype=torch.float64)
        record["noise"] = _six_digits(made.noise * (sizes / sizes.sum()).sqrt())
        record["noisy"] = _six_digits(made.noisy)
    return record


def _six_digits(values: Tensor | None) -> list[float]:
    return [] if values is None else [float(f"{value:.6g}") for value in values.tolist()]


def evaluate(loop: Loop, state: State) -> dict[str, float]:
    """Evaluate the central model, and remember the scores of the last steps in the state."""
    with torch.no_grad():
        scores = loop.task.evaluate(loop.layout.views(state.parameters))
    if state.step > loop.recipe.run.steps - loop.recipe.evaluation.last:
        state.recent.append(scores)
    return scores


def mean_of_recent(state: State) -> dict[str, float]:
    """The mean of the evaluations after each of the last steps."""
    if not state.recent:
        return {}
    return {name: sum(r[name] for r in state.recent) / len(state.recent) for name in state.recent[0]}


def finite(value: float) -> float | None:
    """JSON has no infinity; an epsilon without a guarantee is null."""
    return value if math.isfinite(value) else None


def json_safe(value: Any) -> Any:
    """The same with null for every number that is not finite."""
    if isinstance(value, dict):
        return {k: json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    return finite(value) if isinstance(value, float) else value
