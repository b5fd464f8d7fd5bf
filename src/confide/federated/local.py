"""What a user does with the central model (PFL-ASR Algorithm 1, lines 6-11; NORM Algorithm 1, lines 5-9).

Plain gradient descent from the central model, fresh every round: steps or epochs, on the whole of the user's data
or on mini-batches, each gradient clipped to `gradient_clip`, with the FedProx term (mu/2)||theta - theta_t||^2.
The update is delta = theta_t - theta_local, or delta / eta as NORM defines it.

`PlainTrainer` is the reference for every task: autograd, one user after the other, in buffers that are made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from confide.federated.parameters import Layout, in_threads
from confide.federated.schedules import Constant, Schedule
from confide.randomness import generator

if TYPE_CHECKING:
    from confide.federated.task import Task


_LARGE = 1e30


class LocalTraining(BaseModel):
    """What a user does in one central step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="local steps; give this or epochs")
    epochs: Annotated[int, Field(ge=1)] | None = Field(None, description="passes over the user's data")
    batch_size: Annotated[int, Field(ge=1)] | None = Field(None, description="examples a step; none: all of them")
    batch_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="speech: seconds a step, padding included, in place of batch_size"
    )
    learning_rate: float = Field(gt=0, allow_inf_nan=False, description="eta, the local learning rate")
    schedule: Schedule = Field(default_factory=Constant, description="how eta changes over central steps")
    gradient_clip: Annotated[float, Field(gt=0)] | None = Field(None, description="C_loc, bound of each local gradient")
    proximal: float = Field(0.0, ge=0, allow_inf_nan=False, description="mu of FedProx")
    divide_by_learning_rate: bool = Field(False, description="send delta / eta, as NORM does, instead of delta")

    def rate(self, step: int) -> float:
        return self.learning_rate * self.schedule(step)


class Updates(Protocol):
    """Updates of some users, in whatever form they are held."""

    norms: Tensor  # (users, layers) float64
    losses: Tensor  # (users,) at the central model, before any local step

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        """Add the sum over users of factor times update to a flat vector."""  # factors (users, layers)
        ...


@dataclass
class PlainUpdate:
    """One user's update as it lies in memory."""

    delta: Tensor  # (parameters,)
    layout: Layout
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        @torch.no_grad()
        def add(job: tuple[float, Tensor, Tensor]) -> None:
            factor, total, piece = job
            if factor != 0 and not 1 / _LARGE < abs(factor) < _LARGE:  # float32 would not hold such a factor well
                total.add_((piece.double() * factor).to(total.dtype))
            elif factor != 0:
                total.add_(piece, alpha=factor)

        jobs = zip(factors[0].tolist(), self.layout.pieces(into), self.layout.pieces(self.delta), strict=True)
        for _ in in_threads(add, list(jobs), self.layout.size):
            pass


class PlainTrainer:
    """The reference: trains one user after the other with autograd, allocating nothing per user."""

    def __init__(self, task: Task, layout: Layout, local: LocalTraining, seed: int, like: Tensor) -> None:
        self.task, self.layout, self.local, self.seed = task, layout, local, seed
        self.theta = torch.empty_like(like).requires_grad_()
        self.delta = torch.empty_like(like)

    def update(self, central: Tensor, user: int, step: int) -> PlainUpdate:
        """Train one user from `central`. The answer is only valid until the next call: the buffers are reused."""
        local, rate = self.local, self.local.rate(step)
        with torch.no_grad():
            self.theta.copy_(central)
        first_loss: Tensor | None = None
        draw = generator(self.seed, "batches", step, user)
        for chosen in batches(self.task, local, user, draw):
            loss = self.task.loss(self.layout.views(self.theta), self.task.batch(user, chosen, draw))
            (gradient,) = torch.autograd.grad(loss, self.theta)
            first_loss = loss.detach() if first_loss is None else first_loss
            with torch.no_grad():
                if local.proximal:
                    gradient.add_(self.theta - central, alpha=local.proximal)
                if local.gradient_clip is not None:
                    gradient.mul_(min(1.0, local.gradient_clip / max(float(gradient.norm()), 1e-30)))
                self.theta.sub_(gradient.mul_(rate))
        with torch.no_grad():
            scale = 1.0 / rate if local.divide_by_learning_rate else 1.0
            norms = self.layout.difference(central, self.theta, self.delta, scale)
        losses = torch.zeros(1) if first_loss is None else first_loss.reshape(1)
        return PlainUpdate(self.delta, self.layout, norms.unsqueeze(0), losses.double())


def batches(task: Task, local: LocalTraining, user: int, draw: np.random.Generator) -> Iterator[np.ndarray | None]:
    """The examples of each local step; None stands for all of them."""
    held = int(task.examples[user])
    if local.batch_seconds is None and (local.batch_size is None or local.batch_size >= held):
        yield from repeat(None, local.steps or local.epochs or 0)
        return
    passes = count() if local.steps else range(local.epochs or 0)
    made = (batch for _ in passes for batch in _packed(task, local, user, draw.permutation(held)))
    yield from islice(made, local.steps)


def _packed(task: Task, local: LocalTraining, user: int, order: np.ndarray) -> Iterator[np.ndarray]:
    """One pass over the user's examples in this order, cut into batches."""
    size, limit, seconds = local.batch_size, local.batch_seconds, task.seconds(user)
    start = 0
    while start < len(order):
        if limit is None or seconds is None:
            end = start + (size or len(order))
        else:
            # Everybody is padded to the longest; one example is a batch even if it is longer than the limit.
            padded = np.maximum.accumulate(seconds[order[start:]]) * np.arange(1, len(order) - start + 1)
            end = start + max(1, int(np.searchsorted(padded, limit, side="right")))
        yield order[start:end]
        start = end
