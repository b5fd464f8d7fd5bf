"""The synthetic quadratics of NORM section 5.3.

f_i(w) = 1/2 (w - w_i*)' Q_i (w - w_i*) with Q_i = A_i A_i', A_i of size d by rank with entries N(0, 1/rank^2), and
w_i* ~ N(0, I). The start is w* + distance * z, z ~ U(0, 1)^d, where w* minimises the mean of the f_i: distance 1 is the
paper's I1, distance 1/5 its I2. A user's steps stay in w_0 + range(A_i), so they are taken on rank numbers (exact; the
reference is `PlainTrainer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.federated.local import LocalTraining, Updates
from confide.federated.task import BasicTask, Task, TaskSection
from confide.files import digest
from confide.randomness import generator
from confide.settings import MADE_UP, Unit


class QuadraticSettings(TaskSection):
    """Random convex quadratics, one a user."""

    kind: Literal["convex/quadratics"] = "convex/quadratics"
    users: int = Field(100, gt=0, description="n")
    dimension: int = Field(200, gt=0, description="d")
    rank: int = Field(20, gt=0, description="rank of each user's matrix")
    distance: float = Field(1.0, ge=0, allow_inf_nan=False, description="start w* + distance z: 1 is I1, 0.2 is I2")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return self.users * self.dimension * (self.rank + 1)

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return Quadratics(self, seed)


class Quadratics(BasicTask):
    """The task. Everything is in double precision: the quantity of interest is a small difference."""

    name = "convex/quadratics"
    metric = "suboptimality"
    better: Literal["lower"] = "lower"

    def __init__(self, settings: QuadraticSettings, seed: int) -> None:
        n, d, rank = settings.users, settings.dimension, settings.rank
        draw = generator(seed, "quadratics")
        self.centres = torch.from_numpy(draw.standard_normal((n, d)))
        self.roots = torch.from_numpy(draw.standard_normal((n, d, rank)) / rank)  # A_i
        self.offset = settings.distance * torch.from_numpy(draw.random(d))
        self.gram = self.roots.transpose(1, 2) @ self.roots  # (n, rank, rank)
        curvature = torch.einsum("nir,njr->ij", self.roots, self.roots) / n
        pulls = torch.einsum("nir,njr,nj->i", self.roots, self.roots, self.centres) / n
        self.optimum = torch.linalg.lstsq(curvature, pulls[:, None], driver="gelsd").solution[:, 0]
        self.least = self._mean_loss(self.optimum)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return {"the users' data": digest((self.centres, self.roots))}

    @property
    def examples(self) -> np.ndarray:
        return np.ones(len(self.centres), dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": self.optimum + self.offset}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return self.roots[user], self.centres[user]

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        root, centre = batch
        return 0.5 * (root.T @ (parameters["w"] - centre)).square().sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"suboptimality": self._mean_loss(parameters["w"]) - self.least}

    def _mean_loss(self, w: Tensor) -> float:
        residuals = torch.einsum("ndr,nd->nr", self.roots, w - self.centres)
        return 0.5 * float(residuals.square().sum(dim=1).mean())

    def users_at_once(self, local: LocalTraining) -> int:
        return 0 if local.gradient_clip is not None or local.proximal else 128

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        if not self.users_at_once(local):
            return None
        roots, gram = self.roots[users], self.gram[users]
        residual = torch.einsum("ndr,nd->nr", roots, parameters["w"] - self.centres[users])
        losses = 0.5 * residual.square().sum(dim=1)
        total = torch.zeros_like(residual)
        for _ in range(local.steps or local.epochs or 0):
            total += residual
            residual = residual - learning_rate * torch.bmm(gram, residual[:, :, None])[:, :, 0]
        # w_0 - w_E = eta A sum_t r_t with r_t = A'(w_t - w*).
        total *= 1.0 if local.divide_by_learning_rate else learning_rate
        squared = (torch.bmm(gram, total[:, :, None])[:, :, 0] * total).sum(dim=1)
        return RangeUpdates(roots, total, squared.clamp_(min=0).sqrt()[:, None], losses)


@dataclass
class RangeUpdates:
    """Updates A_i s_i, held as s_i."""

    roots: Tensor  # (users, d, rank)
    coordinates: Tensor  # (users, rank)
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        used = factors[:, 0] != 0  # 0 times a value that is not finite would not be zero
        into.add_(torch.einsum("ndr,nr->d", self.roots[used], self.coordinates[used] * factors[used]))
