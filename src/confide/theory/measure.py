"""Measure at a checkpoint what the bounds need: updates, gradients, their variances, and smoothness by probing.

A sample of users trains from the checkpoint, as in the next central step, and each one's update is kept twice: as it
is, and as it would be if the user had taken the same steps on the same batches without moving ("still"). The
difference of the two is drift, free of the noise of batches. Curvature is a difference of gradients between two near
points (A1: ||grad(x) - grad(y)|| <= L ||x - y||): along random directions, in which noise moves the model, along the
users' differences, and along the image of both, which points to where the curvature is largest.

None of this is private. It reads users' data and nothing of it is covered by a run's epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.federated.local import LocalTraining, PlainTrainer, batches, cut_into_batches
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.randomness import generator

MEMORY = 4_000_000_000
"""Bytes of updates that a probe may keep."""


@dataclass(frozen=True)
class Measured:
    """What a probe found. Updates are in the units in which they are sent."""

    layout: Layout
    users: np.ndarray  # (users,)
    weights: Tensor  # (users,) with sum 1
    share: float
    """Of the population that was probed."""
    moving: Tensor  # (users, draws, parameters) updates, before bounding
    still: Tensor  # (users, draws, parameters) the same steps, all of them taken at the checkpoint
    gradients: Tensor  # (users, parameters) of a user's whole data
    loss: float
    reach: float
    """a: what a still update is in units of the gradient; eta_loc T_loc, less what local clipping takes."""
    local_steps: float
    largest: Tensor  # (layers,) M_h, the longest gradient of a batch
    batch_variance: Tensor  # (layers,) of a batch's gradient around its user's: sigma_loc^2
    noise_curvature: Tensor  # (layers,) in the direction of isotropic noise
    user_curvature: Tensor  # (layers,) in the direction of differences between users
    smoothness: float
    """L, from below: the largest curvature that was met."""

    def user_variance(self) -> Tensor:
        """The variance of the users' gradients around their mean: sigma_glob^2."""  # (layers,)
        mean = self.weights.to(self.gradients.dtype) @ self.gradients
        return self.weights @ per_layer(self.layout, self.gradients - mean)


def per_layer(layout: Layout, vectors: Tensor) -> Tensor:
    """The squared norm of each tensor of each vector, in double precision."""  # (..., parameters) -> (..., layers)
    pieces = torch.split(vectors, layout.sizes, dim=-1)
    return torch.stack([piece.double().square().sum(dim=-1) for piece in pieces], dim=-1)


def measure(
    task: Task,
    local: LocalTraining,
    layout: Layout,
    weights: np.ndarray,
    central: Tensor,
    step: int,
    users: int,
    draws: int,
    seed: int,
) -> Measured:
    """Probe `users` of the task's users, each with `draws` draws of its batches."""
    if local.optimiser is not None:
        raise UserError(
            f"local.optimiser={local.optimiser.kind}: the terms of the diagnosis are for plain local steps; diagnose a "
            "run without it"
        )
    held = np.flatnonzero(task.examples > 0)
    chosen = np.sort(generator(seed, "diagnose users").permutation(held)[:users])
    needed = (2 * draws + 1) * len(chosen) * layout.size * central.element_size()
    if len(chosen) < 2:
        raise UserError(f"a diagnosis compares users; only {len(chosen)} of {len(task.examples)} have data")
    if needed > MEMORY:
        fits = int(MEMORY * len(chosen) / needed)
        raise UserError(
            f"--users {len(chosen)} with --draws {draws} would keep {needed / 1e9:.1f} GB of updates of this model; at "
            f"most {MEMORY / 1e9:g} GB are used, which is enough for --users {max(fits, 1)}"
        )
    probes = [_Prober(task, layout, local, seed * 1_000_003 + draw, central) for draw in range(draws)]
    found = [probe.probe(central, int(user), step) for user in chosen for probe in probes]
    gradients, losses = zip(*(probes[0].whole_gradient(central, int(user)) for user in chosen), strict=True)
    moving, still, squares = (
        torch.stack(each).view(len(chosen), draws, -1)
        for each in zip(*((one.moving, one.still, one.squares) for one in found), strict=True)
    )
    whole = torch.stack(gradients)
    own = weights[chosen] / weights[chosen].sum()
    # E ||g||^2 - ||E g||^2 over the batches of each user, mean over users
    batch_variance = (squares.mean(dim=1) - per_layer(layout, whole)).clamp(min=0).mean(dim=0)  # (layers,)

    def mean_gradient(point: Tensor) -> Tensor:
        total = torch.zeros_like(point)
        for user, weight in zip(chosen.tolist(), own.tolist(), strict=True):
            total.add_(probes[0].whole_gradient(point, user)[0], alpha=weight)
        return total

    return Measured(
        layout, chosen, torch.from_numpy(own), len(chosen) / len(held), moving, still, whole, float(own @ losses),
        float(np.mean([one.reach for one in found])), float(np.mean([one.steps for one in found])),
        torch.stack([one.largest for one in found]).amax(dim=0), batch_variance,
        *_probe_curvature(mean_gradient, central, layout, whole, seed),
    )  # fmt: skip


@dataclass(frozen=True)
class _One:
    """What one round of local training by one user gave."""

    moving: Tensor
    still: Tensor
    reach: float
    steps: int
    largest: Tensor  # (layers,)
    squares: Tensor  # (layers,) mean squared norm of its batches' gradients, before local clipping


class _Prober(PlainTrainer):
    """The loop's own local training, and gradients at a point that does not move."""

    def gradient(self, point: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        with torch.no_grad():
            self.theta.copy_(point)
        loss = self.task.loss(self.leaves, batch)
        found = torch.autograd.grad(loss, list(self.leaves.values()), materialize_grads=True)
        return flatten(dict(zip(self.leaves, found, strict=True))), float(loss.detach())

    def probe(self, central: Tensor, user: int, step: int) -> _One:
        """Train a user from `central`, and take its steps once more on the same batches without moving."""
        local, rate = self.local, self.local.rate(step)
        moving = self.update(central, user, step).delta.clone()
        draw = generator(self.seed, "batches", step, user)
        still, reach, steps = torch.zeros_like(central), 0.0, 0
        largest = squares = torch.zeros(len(self.layout.names), dtype=torch.float64)
        for chosen in batches(self.task, local, user, draw):
            gradient, _ = self.gradient(central, self.task.batch(user, chosen, draw))
            norms = per_layer(self.layout, gradient)
            largest, squares = torch.maximum(largest, norms.sqrt()), squares + norms
            clip, length = local.gradient_clip, float(norms.sum().sqrt())
            factor = 1.0 if clip is None else min(1.0, clip / max(length, 1e-30))
            weight = factor * (1.0 if local.divide_by_learning_rate else rate)
            still.add_(gradient, alpha=weight)
            reach, steps = reach + weight, steps + 1
        if not bool(torch.isfinite(moving).all()) or not bool(torch.isfinite(still).all()):
            raise UserError(
                f"the update of user {user} is not finite at this checkpoint; nothing can be measured from it"
            )
        return _One(moving, still, reach, steps, largest, squares / max(steps, 1))

    def whole_gradient(self, point: Tensor, user: int) -> tuple[Tensor, float]:
        """The gradient and the loss of all of a user's data, in batches of the size that it trains with."""
        draw, held = generator(self.seed, "diagnose gradients", 0, user), int(self.task.examples[user])
        if self.local.batch_size is None and self.local.batch_seconds is None:
            return self.gradient(point, self.task.batch(user, None, draw))
        total, loss = torch.zeros_like(point), 0.0
        for places in cut_into_batches(self.task, self.local, user, np.arange(held)):
            gradient, own = self.gradient(point, self.task.batch(user, places, draw))
            total.add_(gradient, alpha=len(places) / held)
            loss += own * len(places) / held
        return total, loss


def _probe_curvature(
    gradient: Callable[[Tensor], Tensor], central: Tensor, layout: Layout, gradients: Tensor, seed: int
) -> tuple[Tensor, Tensor, float]:
    """Probe <v, H v> / <v, v> of each tensor, along noise and users' differences, and the largest ||H v|| / ||v||."""
    draw = generator(seed, "diagnose directions")
    here = gradient(central)
    size = float(central.double().norm()) or 1.0
    small = size * (1e-3 if central.dtype == torch.float64 else 1e-2)
    largest = 0.0

    def image(direction: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal largest
        length = float(direction.double().norm())
        if length == 0:
            return direction, torch.zeros_like(direction)
        unit = direction / length
        bent = (gradient(central + small * unit) - here) / small
        largest = max(largest, float(bent.double().norm()))
        return unit, bent

    def along(direction: Tensor) -> Tensor:
        unit, bent = image(direction)
        image(bent)  # for the largest
        pairs = zip(layout.pieces(unit), layout.pieces(bent), strict=True)
        products = torch.stack([(u.double() * b.double()).sum() for u, b in pairs])
        return (products / per_layer(layout, unit).clamp(min=1e-300)).clamp(min=0)

    noise = along(torch.from_numpy(draw.standard_normal(layout.size)).to(central.dtype))
    signs = torch.from_numpy(draw.standard_normal(len(gradients))).to(central.dtype)
    between = along(signs @ (gradients - gradients.mean(dim=0)))
    return noise, torch.where(between > 0, between, noise), largest
