"""Models that are a chain of linear layers: where it is cheaper, users train factors in place of whole matrices.

A task says that its model is such a chain by having `chain`. The engine looks at the chain and at the local settings
and takes `low_rank` where it is cheaper, and autograd everywhere else; for the rest of the loop nothing changes.

A user who takes T steps on batches of b examples moves every weight matrix by a matrix of rank at most r = T b: the sum
over those examples of an outer product, the gradient at a layer's output with its input. For a layer of m by n the two
factors are r (m + n) numbers in place of m n. With r below the layers' width that is less to read and write, and nobody
has to hold a user's weights at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout
from confide.federated.task import Task

Activation = Literal["none", "relu", "tanh"]
_ROWS = 1024  # of examples at a time: enough for an efficient product of matrices, few enough to keep workers busy
_MOST_USERS = 256
_LOOKED_AT = 1 << 16  # users, for the typical one


def activate(kind: Activation, x: Tensor) -> Tensor:
    if kind == "none":
        return x
    return torch.relu(x) if kind == "relu" else torch.tanh(x)


@dataclass(frozen=True)
class Affine:
    """x -> activation(x W' + b), by the names of the tensors W (out, in) and b (out)."""

    weight: str
    bias: str | None
    activation: Activation = "none"


@dataclass(frozen=True)
class Chain:
    """Layers from input to logits; the loss is the mean cross-entropy of a batch."""

    layers: tuple[Affine, ...]
    draws: Callable[[np.random.Generator], object] | None = None
    """What `Task.batch` draws for every batch besides the order of the examples, and this chain has no use for."""


@runtime_checkable
class ChainTask(Protocol):
    """A task that can also hand out its examples in bulk."""

    def chain(self) -> Chain | None:
        """The model as a chain of linear layers; none if these settings make it something else."""
        ...

    def rows(self, user: int) -> np.ndarray:
        """Where the user's examples are, in the task's own numbering."""  # (examples,) int64
        ...

    def inputs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs of the first layer and labels of the examples at `rows`."""  # (rows, wide), (rows,) int64
        ...


class Ranks:
    """Which users of a task are trained in low rank, and how many at a time. Depends on task and settings alone."""

    def __init__(self, chain: Chain, layout: Layout, local: LocalTraining, examples: np.ndarray) -> None:
        self.chain, self.local, self.examples = chain, local, examples
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        weights = [shapes[layer.weight] for layer in chain.layers]
        named = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
        self.fits = sorted(named) == sorted(layout.names) and local.batch_seconds is None
        self.most = sum(out * wide for out, wide in weights) // sum(out + wide for out, wide in weights)
        """Above this rank the factors are larger than what they stand for."""

    def of(self, held: int) -> int:
        """The rank of a user's update: how many examples its steps see, each counted as often as it is seen."""
        local = self.local
        return held * local.epochs if local.epochs else (local.steps or 0) * min(local.batch_size or held, held)

    def takes(self, user: int) -> bool:
        """Whether this user is trained in low rank."""
        return self.fits and 0 < self.of(int(self.examples[user])) <= self.most

    def users_at_once(self) -> int:
        """Users in a part; 0 if a typical user is better off without."""
        rank = self.of(int(np.median(self.examples[:_LOOKED_AT]))) if self.fits and len(self.examples) else 0
        return min(_MOST_USERS, max(1, _ROWS // rank)) if 0 < rank <= self.most else 0


def ranks_of(task: Task, local: LocalTraining, layout: Layout) -> Ranks | None:
    """Which users to train in low rank; none where the model is no chain or low rank does not pay for most users."""
    chain = task.chain() if isinstance(task, ChainTask) else None
    if chain is None:
        return None
    found = Ranks(chain, layout, local, task.examples)
    return found if found.users_at_once() else None
