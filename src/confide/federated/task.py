"""What the loop asks of a task: a model, users with data, a loss, and an evaluation. Nothing about privacy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from confide.federated.local import LocalTraining, Updates


class Task(Protocol):
    """A learning problem split over users.

    A task may also have a `fingerprint`: digests of what it was made from, by name (see `confide.runs.fingerprint`);
    and `starting_parameters`: what a run begins with, where that is not the fresh model of `initial_parameters`.
    """

    name: str
    metric: str
    """The evaluation that sums the task up, for example `accuracy`."""

    @property
    def examples(self) -> np.ndarray:
        """How many examples each user holds; its length is the population."""  # (population,) int64
        ...

    def initial_parameters(self) -> dict[str, Tensor]: ...

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        """The user's examples with these indices, or all of them; `draw` is for augmentation and dropout."""
        ...

    def seconds(self, user: int) -> np.ndarray | None:
        """How long each of the user's examples lasts, for batches by seconds; none if that has no meaning."""
        ...

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        """Mean loss of a batch, a scalar that can be differentiated."""
        ...

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]: ...

    def users_at_once(self, local: LocalTraining) -> int:
        """How many users `fast_updates` should get at a time; 0 if it has no short cut for these settings."""
        ...

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        """The updates of many users at once, if the task knows an exact short cut for these settings."""
        ...
