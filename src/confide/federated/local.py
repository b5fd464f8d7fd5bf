"""Train one user from the central model (PFL-ASR Algorithm 1, lines 6-11; NORM Algorithm 1, lines 5-9).

Gradient descent from the central model, fresh every round: steps or epochs, on the whole of the user's data
or on mini-batches, each gradient clipped to `gradient_clip`, with the FedProx term (mu/2)||theta - theta_t||^2.
The update is delta = theta_t - theta_local, or delta / eta as NORM defines it.

`optimiser` takes another rule for the local steps (momentum, Adam, AdaGrad, LARS, LAMB). What it remembers begins anew
with every user in every round and is forgotten with it: nothing of a user's moments is left for the next one or for the
server. The gradient is clipped first. Privacy does not depend on it, because the update is bounded afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, product, repeat
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.federated.optimisers import Rule, working_dtype
from confide.federated.parameters import Layout, add_scaled, in_threads
from confide.federated.rates import Rates, factors
from confide.federated.schedules import Constant, Schedule
from confide.randomness import generator
from confide.settings import Section

if TYPE_CHECKING:
    from confide.federated.task import Task


class LocalTraining(Section):
    """What a user does in one central step."""

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
    rates: Rates = Field(
        default_factory=dict, exclude_if=lambda value: not value,
        description="factors of the rate for tensors by their names, such as {'*.lora_?': 0.1}; the first that fits",
    )  # fmt: skip

    optimiser: Rule | None = Field(
        None, exclude_if=lambda value: value is None,
        description="how local steps go, such as {kind: adam}; none: plain gradient descent. Its state ends with the "
        "user's turn, and short cuts for plain steps are not taken",
    )  # fmt: skip
    gradient_norms: bool = Field(
        False, exclude_if=lambda value: not value,
        description="also record the norms of local gradients, as they are before gradient_clip (PFL-ASR Figures 13 "
        "and 14); short cuts for plain steps are not taken",
    )  # fmt: skip

    def rate(self, step: int) -> float:
        return self.learning_rate * self.schedule(step)

    @property
    def plain(self) -> bool:
        """Whether most short cuts will do: plain gradient descent at one rate for all tensors, and nobody watches."""
        return not self.rates and self.optimiser is None and not self.gradient_norms


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
    watched: Tensor | None = None  # (users, 1 + layers) norms of the gradients, the whole one's first, if asked for

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        self.layout.add_scaled(self.delta, factors[0].tolist(), into)


class PlainTrainer:
    """The reference for every task: trains one user after the other with autograd, in one buffer."""

    def __init__(self, task: Task, layout: Layout, local: LocalTraining, seed: int, like: Tensor) -> None:
        self.task, self.layout, self.local, self.seed = task, layout, local, seed
        self.theta = torch.empty_like(like)
        self.factors = factors(local.rates, layout.names, "local")
        # Leaves of their own, and not views of one: their gradients need not be put together into a flat one.
        self.leaves = {name: view.requires_grad_() for name, view in layout.views(self.theta).items()}
        self._begins = {} if local.optimiser is None else local.optimiser.slots()
        held = {name: torch.empty_like(like, dtype=working_dtype(like)) for name in self._begins}
        self._slots = [{name: layout.pieces(held[name])[at] for name in held} for at in range(len(layout.names))]

    def update(self, central: Tensor, user: int, step: int) -> PlainUpdate:
        """Train one user from `central`. The answer is only valid until the next call: the buffer is reused."""
        local, rate = self.local, self.local.rate(step)
        self.theta.copy_(central)
        for own, (name, value) in product(self._slots, self._begins.items()):  # whatever the last user left
            own[name].fill_(value)
        first_loss: Tensor | None = None
        seen: list[Tensor] = []
        draw = generator(self.seed, "batches", step, user)
        for taken, chosen in enumerate(batches(self.task, local, user, draw)):
            batch = tuple(part.to(self.theta.device) for part in self.task.batch(user, chosen, draw))
            loss = self.task.loss(self.leaves, batch)
            gradients = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True)
            first_loss = loss.detach() if first_loss is None else first_loss
            seen += self._descend(central, gradients, rate, taken)
        scale = 1.0 / rate if local.divide_by_learning_rate else 1.0
        # The trained model is needed no more: the update takes its place, and less memory is moved and held.
        norms = self.layout.difference(central, self.theta, self.theta, scale)
        losses = torch.zeros(1) if first_loss is None else first_loss.reshape(1)
        watched = torch.stack(seen).mean(dim=0, keepdim=True) if seen else None
        return PlainUpdate(self.theta, self.layout, norms.unsqueeze(0), losses.double().cpu(), watched)

    @torch.no_grad()
    def _descend(self, central: Tensor, gradients: Sequence[Tensor | None], rate: float, taken: int) -> list[Tensor]:
        """One step, after `taken`, and the norms of its gradient if they are asked for.

        A tensor that the loss does not depend on has no gradient: only FedProx moves it.
        """
        weights, local = self.layout.pieces(self.theta), self.local
        found = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
        if local.proximal:
            pairs = zip(weights, self.layout.pieces(central), strict=True)
            pulls = [local.proximal * (weight - start) for weight, start in pairs]
            found = [pull if g is None else pull.add_(g) for g, pull in zip(found, pulls, strict=True)]
        seen = [_norms(found)] if local.gradient_norms else []
        shrink = 1.0
        if local.gradient_clip is not None:
            norms = [torch.linalg.vector_norm(gradient) for gradient in found if gradient is not None]
            shrink = min(1.0, local.gradient_clip / max(float(torch.stack(norms).norm()), 1e-30))
        moves = zip(weights, found, self.factors, self._slots, strict=True)
        if local.optimiser is None:
            steps = [(weight, g, -rate * shrink * factor) for weight, g, factor, _ in moves if g is not None]
            list(in_threads(lambda job: add_scaled(*job), steps, self.theta))
            return seen
        move, kind = local.optimiser.move, working_dtype(self.theta)
        jobs = [(w, shrink * g.to(kind), own, rate * factor, taken) for w, g, factor, own in moves if g is not None]
        list(in_threads(lambda job: move(*job), jobs, self.theta))
        return seen


def _norms(gradients: Sequence[Tensor | None]) -> Tensor:
    """Of a whole gradient, and of each tensor of it; no gradient is a gradient of zero."""  # (1 + layers,)
    found = [0.0 if g is None else float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
    return whole_first(torch.tensor([found], dtype=torch.float64))[0]


def whole_first(norms: Tensor) -> Tensor:
    """Put the norm of all tensors together before those of the tensors."""  # (users, layers) -> (users, 1 + layers)
    return torch.cat([torch.linalg.vector_norm(norms, dim=1, keepdim=True), norms], dim=1)


def batches(task: Task, local: LocalTraining, user: int, draw: np.random.Generator) -> Iterator[np.ndarray | None]:
    """The examples of each local step; None stands for all of them."""
    held = int(task.examples[user])
    if local.batch_seconds is None and (local.batch_size is None or local.batch_size >= held):
        yield from repeat(None, local.steps or local.epochs or 0)
        return
    passes = count() if local.steps else range(local.epochs or 0)
    made = (batch for _ in passes for batch in cut_into_batches(task, local, user, draw.permutation(held)))
    yield from islice(made, local.steps)


def cut_into_batches(task: Task, local: LocalTraining, user: int, order: np.ndarray) -> Iterator[np.ndarray]:
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
