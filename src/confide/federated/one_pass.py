"""Users who make one local step, in one pass: one way forward and one way back over the examples of many of them.

The update of such a user is delta = eta c g, with g the gradient of the mean loss of its one batch at the central model
and c the factor of the gradient clip; FedProx has no pull yet. The gradients of all users need the same weights, so
their examples go through the model together, and the layers of `taps` tell whose gradient is whose. Examples are
grouped by length and not by user: a user's gradient is the sum over its examples, wherever they are.

This is exact: `PlainTrainer` is the reference, and draws the same batches at the same addresses. No example sees
another one, so a user whose numbers are not finite spoils nobody else's. Only rounding knows who shares a pass:
products of matrices of another shape may differ in their last bits, as sums over users do. What is held is one gradient
for each user of a part; the number of users in a part follows from the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from confide.federated.local import LocalTraining, batches, whole_first
from confide.federated.parameters import Layout
from confide.federated.rates import factors
from confide.federated.taps import Taps
from confide.federated.task import Task
from confide.randomness import generator

_BYTES = 1 << 26  # of gradients
_LINE = 64  # bytes of a cache line: products of matrices may depend on how memory is aligned


@dataclass(frozen=True)
class Pass:
    """Examples that go through the model together."""

    batch: tuple[Tensor, ...]
    owners: list[int]
    """Of each example, which of the batches it is from."""


@runtime_checkable
class OnePassTask(Protocol):
    """A task that takes its model's layers from `taps`."""

    def users_in_one_pass(self, local: LocalTraining) -> int:
        """How many users to train together; 0 if the model, its settings or the size of a batch speak against it."""
        ...

    def passes(self, batches: Sequence[tuple[Tensor, ...]]) -> Iterator[Pass]:
        """Put batches, each of one user and as `Task.batch` made it, together into passes of bounded size."""
        ...

    def losses(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        """The loss of each example of a pass; their mean over a user's batch is what `Task.loss` answers."""
        ...


def users_at_once(task: Task, local: LocalTraining, layout: Layout) -> int:
    """Users in a part whose updates come out of one pass; 0 if this task or these settings have none."""
    if not isinstance(task, OnePassTask) or (local.steps or local.epochs) != 1 or local.optimiser is not None:
        return 0
    if local.epochs and (local.batch_size, local.batch_seconds) != (None, None):
        return 0
    together = min(task.users_in_one_pass(local), _BYTES // (4 * layout.size))
    return together if together > 1 else 0


class OnePassTrainer:
    """Trains the users of a part together. The answer is only valid until the next call: the buffer is reused."""

    def __init__(self, task: Task, layout: Layout, local: LocalTraining, seed: int) -> None:
        if not isinstance(task, OnePassTask):
            raise TypeError(f"{task.name} has no passes")
        self.task, self.together, self.layout, self.local, self.seed = task, task, layout, local, seed
        self._buffer = torch.empty(0)

    def updates(self, central: Tensor, users: np.ndarray, step: int) -> OnePassUpdates:
        batches = [self._batch(int(user), step) for user in users]
        flat = self._zeros(len(users), central)
        stretches = torch.split(flat, self.layout.sizes, dim=1)
        named = zip(self.layout.names, self.layout.shapes, stretches, strict=True)
        gradients = {name: piece.view(len(users), *shape) for name, shape, piece in named}
        taps, losses = Taps(self.layout.views(central), gradients), central.new_zeros(len(users))
        held = torch.zeros(len(users), dtype=torch.int64)
        passes = list(self.together.passes(batches))
        for each in passes:
            held.index_add_(0, torch.tensor(each.owners), torch.ones(len(each.owners), dtype=torch.int64))
        shares = held.to(central).reciprocal()
        for each in passes:
            taps.begin(each.owners)
            batch = tuple(part.to(central.device) for part in each.batch)
            found = self.together.losses(taps, batch) * shares[taps.owners]
            torch.autograd.backward(found.sum())
            losses.index_add_(0, taps.owners, found.detach())
        taps.finish()
        norms = torch.stack([self.layout.norms_above(own) for own in flat])
        rates = torch.tensor(factors(self.local.rates, self.layout.names, "local"), dtype=torch.float64)
        scales = self._scales(norms, self.local.rate(step))[:, None] * rates  # (users, layers)
        watched = whole_first(norms) if self.local.gradient_norms else None
        return OnePassUpdates(self.layout, flat, scales, norms * scales, losses.double().cpu(), watched)

    def _batch(self, user: int, step: int) -> tuple[Tensor, ...]:
        """The examples of the one local step, drawn as `PlainTrainer` does."""
        draw = generator(self.seed, "batches", step, user)
        (chosen,) = batches(self.task, self.local, user, draw)
        return self.task.batch(user, chosen, draw)

    def _zeros(self, users: int, like: Tensor) -> Tensor:
        """A gradient for each user, every one from the beginning of a cache line on."""  # (users, parameters)
        line = _LINE // like.itemsize
        wide = -(-self.layout.size // line) * line
        if self._buffer.shape[0] < users:
            self._buffer = like.new_empty(users, wide)
        return self._buffer[:users, : self.layout.size].zero_()

    def _scales(self, norms: Tensor, rate: float) -> Tensor:
        """What a gradient is multiplied by to be the update."""  # (users,) float64
        scales = torch.full((len(norms),), 1.0 if self.local.divide_by_learning_rate else rate, dtype=torch.float64)
        if self.local.gradient_clip is None:
            return scales
        lengths = torch.linalg.vector_norm(norms, dim=1).clamp(min=1e-30)
        return scales * torch.clamp(self.local.gradient_clip / lengths, max=1.0)


@dataclass
class OnePassUpdates:
    """Updates of some users: their gradients, and what each tensor of them is to be multiplied by."""

    layout: Layout
    gradients: Tensor  # (users, parameters)
    scales: Tensor  # (users, layers) float64
    norms: Tensor
    losses: Tensor
    watched: Tensor | None = None  # (users, 1 + layers) norms of the gradients, the whole one's first, if asked for

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        # 0 times a scale that is not finite would not be zero.
        rows = torch.where(factors != 0, factors * self.scales, 0.0)
        for own, row in zip(self.gradients, rows.tolist(), strict=True):
            self.layout.add_scaled(own, row, into)
