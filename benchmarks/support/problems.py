"""Quadratics with layers, whose every cause of error can be set and taken away: problems where the truth is known.

User k holds examples j with f_kj(w) = 1/2 sum_i s_ki (w_i - c_kji)^2. The s_k differ between users where local steps
should drift (each user goes to its own centre, at its own speed), the c_k where cohorts should differ, the c_kj around
c_k where batches should. The minimum of the mean is in closed form. Without mini-batches, many users train at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask


@dataclass(frozen=True)
class Shape:
    """What a problem looks like."""

    layers: Mapping[str, int]
    users: int = 40
    examples: int = 1
    distance: float = 1.0
    """How far from the minimum the run begins, in each coordinate about."""
    between: float = 0.0
    """Deviation of the users' centres."""
    within: float = 0.0
    """Deviation of a user's examples."""
    uneven: float = 0.0
    """Deviation of the logarithm of the users' curvatures; the more curved, the further out is the user's centre."""
    scales: Mapping[str, float] | None = None
    """Factor on distances and deviations of each layer; none: 1."""


class Layered(BasicTask):
    """The task."""

    name, metric = "layered quadratics", "suboptimality"

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        n, m, d = shape.users, shape.examples, sum(shape.layers.values())
        self.layout = Layout(tuple(shape.layers), tuple((size,) for size in shape.layers.values()))
        scales = np.repeat([(shape.scales or {}).get(name, 1.0) for name in shape.layers], list(shape.layers.values()))
        speed = draw.standard_normal((n, 1))
        self.curvature = torch.from_numpy(np.exp(shape.uneven * speed) * np.ones((n, d)))
        side = np.sign(draw.standard_normal(d))  # so that the fast users all pull to one side
        own = shape.between * (draw.standard_normal((n, d)) + 2 * np.tanh(speed) * side * (shape.uneven > 0))
        spread = draw.standard_normal((n, m, d))
        spread = shape.within * (spread - spread.mean(axis=1, keepdims=True))
        self.centres = torch.from_numpy((own[:, None] + spread) * scales)  # (users, examples, d)
        self.means = self.centres.mean(dim=1)
        self.optimum = (self.curvature * self.means).sum(dim=0) / self.curvature.sum(dim=0)
        self.begin = self.optimum + torch.from_numpy(shape.distance * draw.choice([-1.0, 1.0], d) * scales)
        self.least = self._mean_loss(self.optimum)

    @property
    def examples(self) -> np.ndarray:
        return np.full(len(self.centres), self.centres.shape[1], dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.layout.views(self.begin.clone())

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        chosen = self.centres[user] if examples is None else self.centres[user][torch.from_numpy(examples)]
        return self.curvature[user], chosen

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        curvature, centres = batch
        return 0.5 * (curvature * (flatten(parameters) - centres).square()).sum(dim=1).mean()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"suboptimality": self._mean_loss(flatten(parameters)) - self.least}

    def _mean_loss(self, w: Tensor) -> float:
        return 0.5 * float((self.curvature * (w - self.means).square()).sum(dim=1).mean())

    def users_at_once(self, local: LocalTraining) -> int:
        whole = local.batch_size is None or local.batch_size >= self.centres.shape[1]
        return len(self.centres) if whole and local.gradient_clip is None and not local.proximal else 0

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        if not self.users_at_once(local):
            return None
        gaps = flatten(parameters) - self.means[users]  # (users, d)
        left = (1 - learning_rate * self.curvature[users]) ** (local.steps or local.epochs or 0)
        deltas = gaps * (1 - left) / (learning_rate if local.divide_by_learning_rate else 1.0)
        norms = torch.stack([piece.norm(dim=1) for piece in torch.split(deltas, self.layout.sizes, dim=1)], dim=1)
        return Together(deltas, self.layout, norms, 0.5 * (self.curvature[users] * gaps.square()).sum(dim=1))


@dataclass
class Together:
    """Updates of some users, side by side."""

    deltas: Tensor  # (users, d)
    layout: Layout
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        spread = torch.repeat_interleave(factors, torch.tensor(self.layout.sizes), dim=1)
        into.add_((spread * self.deltas).sum(dim=0))
