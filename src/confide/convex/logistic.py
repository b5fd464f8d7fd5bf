"""l2-regularised multinomial logistic regression split over users (NORM section 6 and appendix G).

Users hold equally many examples from few classes. The loss of a user is the mean cross-entropy over its examples
plus (l2/2)||theta||^2 over weights and biases, which is PyTorch's weight decay.

Full-batch gradient descent never leaves the affine space W_t = c_t W_0 + A_t' X, where X are the user's m examples
and A_t is m by classes. Its logits are c_t X W_0' + (X X') A_t, so a user's E steps cost products of size m, not of
the number of features, and the sum of all bounded updates is one matrix product. This is exact, and `PlainTrainer`
is its reference in the tests.
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
from torch.nn import functional

from confide.convex import datasets
from confide.federated.items import Items
from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout
from confide.federated.task import BasicTask, Task, TaskSection
from confide.files import digest
from confide.randomness import generator
from confide.settings import LocalPath, Unit


class LogisticSettings(TaskSection):
    """Logistic regression on a labelled data set, sharded over users by label."""

    kind: Literal["convex/logistic"] = "convex/logistic"
    dataset: Literal["digits", "fashion-mnist", "cifar10"] = Field("digits", description="digits needs nothing")
    folder: LocalPath | None = Field(None, description="where the data set lies; none: its usual places")
    users: int = Field(gt=0, description="n, how many users share the training data")
    shards_per_user: int = Field(5, gt=0, description="a user's data come from at most so many classes")
    l2: float = Field(1e-4, ge=0, allow_inf_nan=False, description="weight decay")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return self.users * self.shards_per_user

    @property
    def unit(self) -> Unit:
        return Unit(name="simulated client with rows of a public data set", person=False, origin="made-up")

    def make(self, seed: int) -> Task:
        return LogisticRegression(self, seed)


class LogisticRegression(BasicTask):
    """The task: users' examples, model, loss, evaluation and the dual short cut."""

    name = "convex/logistic"
    metric = "accuracy"

    def __init__(self, settings: LogisticSettings, seed: int) -> None:
        self.l2 = settings.l2
        self.data = datasets.load(settings.dataset, settings.folder)
        self.held = datasets.shard(
            self.data.train_labels, settings.users, settings.shards_per_user, generator(seed, "shards")
        )  # (users, m)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        own = self.data
        arrays = (own.train_features, own.train_labels, own.test_features, own.test_labels, self.held)
        return {"the users' data": digest(arrays)}

    @property
    def examples(self) -> np.ndarray:
        return np.full(self.held.shape[0], self.held.shape[1], dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        wide = self.data.train_features.shape[1]
        return {"weight": torch.zeros(self.data.classes, wide), "bias": torch.zeros(self.data.classes)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        rows = self.held[user] if examples is None else self.held[user][torch.from_numpy(examples)]
        return self.data.train_features[rows], self.data.train_labels[rows]

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, labels = batch
        logits = functional.linear(features, parameters["weight"], parameters["bias"])
        size = sum((p.square().sum() for p in parameters.values()), start=torch.zeros(()))
        return functional.cross_entropy(logits, labels) + 0.5 * self.l2 * size

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return self._test(parameters)[0]

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items]:
        """The evaluation, and which examples are right."""
        labels, (metrics, right) = self.data.test_labels, self._test(parameters)
        items = Items(
            "accuracy", "higher", 1.0, "class", False, tuple(map(str, range(self.data.classes))), labels.numpy(),
            right.numpy(), np.ones(len(labels)), digest([self.data.test_features, labels]),
        )  # fmt: skip
        return metrics, items

    def _test(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Tensor]:
        labels = self.data.test_labels
        logits = functional.linear(self.data.test_features, parameters["weight"], parameters["bias"])
        right = (logits.argmax(dim=1) == labels).double()
        return {"accuracy": float(right.mean()), "test_loss": float(functional.cross_entropy(logits, labels))}, right

    def own_accuracy(self, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
        rows = self.held[torch.from_numpy(users)]  # (users, m)
        logits = functional.linear(self.data.train_features[rows], parameters["weight"], parameters["bias"])
        found: Tensor = (logits.argmax(dim=2) == self.data.train_labels[rows]).double().mean(dim=1)
        return found

    def users_at_once(self, local: LocalTraining) -> int:
        mini = local.batch_size is not None and local.batch_size < self.held.shape[1]
        return 0 if mini else 128

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        if not self.users_at_once(local):
            return None
        rows = self.held[torch.from_numpy(users)]  # (users, m)
        features = self.data.train_features[rows]  # (users, m, wide)
        return dual_updates(
            parameters["weight"], parameters["bias"], features, self.data.train_labels[rows], self._grams[users],
            self.l2, local, learning_rate,
        )  # fmt: skip

    @cached_property
    def _grams(self) -> Tensor:
        """Inner products of each user's own examples."""  # (population, m, m) float64
        return torch.stack([x @ x.T for x in (self.data.train_features[rows].double() for rows in self.held)])


@dataclass
class DualUpdates:
    """Updates of many users in factored form: central_share[k] W_0 + A_k' X_k for user k."""

    weight: Tensor  # (classes, wide) the central model
    bias: Tensor  # (classes,)
    features: Tensor  # (users, m, wide)
    coefficients: Tensor  # (users, classes, m)
    central_share: Tensor  # (users,)
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        total = Layout.of({"weight": self.weight, "bias": self.bias}).views(into)
        features, coefficients, share = self.features, self.coefficients, self.central_share.double()
        used = (factors != 0).any(dim=1)
        if not bool(used.all()):  # 0 times a value that is not finite would not be zero
            features, coefficients, share, factors = features[used], coefficients[used], share[used], factors[used]
        of_weight, of_bias = factors[:, 0], factors[:, 1]
        scaled = (coefficients.double() * of_weight[:, None, None]).to(coefficients.dtype)
        total["weight"].addmm_(scaled.transpose(0, 1).flatten(1), features.flatten(0, 1))
        total["weight"].add_(self.weight, alpha=float((share * of_weight).sum()))
        total["bias"].add_((coefficients.sum(dim=2).double() * of_bias[:, None]).sum(dim=0).to(into.dtype))
        total["bias"].add_(self.bias, alpha=float((share * of_bias).sum()))


def dual_updates(
    weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, gram: Tensor, l2: float,
    local: LocalTraining, rate: float,
) -> DualUpdates:  # fmt: skip
    """E full-batch steps of every user in the space spanned by its own examples.

    A gradient is p W_0 + B' X with p = (l2 + mu) c - mu and B = residuals / m + (l2 + mu) A, for weight and bias alike.
    Classes come before examples here, since a softmax over ten neighbours in memory is ten times as slow.
    """
    users, m, _ = features.shape
    targets = functional.one_hot(labels, weight.shape[0]).to(features.dtype).transpose(1, 2).contiguous()
    central_logits = torch.matmul(features, weight.T).transpose(1, 2).contiguous()  # (users, classes, m), without bias
    start = central_logits + bias[:, None]
    kernel = (gram + 1.0).to(features.dtype)  # the bias is the weight of a feature that is always 1
    decay, mu = l2 + local.proximal, local.proximal
    share = torch.ones(users, 1, 1, dtype=features.dtype)  # c
    dual = torch.zeros_like(start)  # A'
    losses = torch.zeros(users, dtype=torch.float64)
    size = weight.double().square().sum() + bias.double().square().sum()
    for index in range(local.steps or local.epochs or 0):
        logits = torch.baddbmm(share * start, dual, kernel)
        if index == 0:
            spread = functional.cross_entropy(logits, labels, reduction="none")
            losses = spread.double().mean(dim=1) + 0.5 * l2 * size
        step = torch.softmax(logits, dim=1).sub_(targets).div_(m)
        pull = decay * share - mu  # p
        if local.gradient_clip is not None:
            step.add_(dual, alpha=decay)
            length = _norms(weight, bias, central_logits, gram, step, pull.flatten()).norm(dim=1)
            factor = torch.clamp(local.gradient_clip / length, max=1.0).to(features.dtype)[:, None, None]
            dual.sub_(step.mul_(factor).mul_(rate))
            share = share - rate * factor * pull
        else:
            dual.mul_(1.0 - rate * decay).sub_(step.mul_(rate))
            share = share - rate * pull
    # The update is W_0 - W_E = (1 - c) W_0 - A' X.
    scale = 1.0 / rate if local.divide_by_learning_rate else 1.0
    coefficients = dual.mul_(-scale)
    central_share = (1.0 - share.flatten()) * scale
    norms = _norms(weight, bias, central_logits, gram, coefficients, central_share)
    return DualUpdates(weight, bias, features, coefficients, central_share, norms, losses)


def _norms(weight: Tensor, bias: Tensor, central_logits: Tensor, gram: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Norms of c W_0 + A' X and c b_0 + A' 1 for each user, never smaller than those of what `weighted_sum` adds.

    Where the terms cancel (a user near its own optimum), what is left can be mostly rounding, and scaling that up to
    the bound would break the bound. So the rounding counts: that of the logits, which are inner products of `wide`
    numbers, and that of a sum of m + 1 products, each by the usual bound of n eps times the norms of the terms.
    """
    eps, wide, m = torch.finfo(a.dtype).eps, weight.shape[1], a.shape[2]
    a, c = a.double(), c.double()
    model, offset = weight.double().norm(), bias.double().norm()
    lengths = a.norm(dim=1)  # (users, m)
    reach = (lengths * torch.diagonal(gram, dim1=1, dim2=2).clamp(min=0.0).sqrt()).sum(dim=1)
    inner = (central_logits.double() * a).sum(dim=(1, 2))
    squared = (c * model).square() + 2 * c * inner + (torch.bmm(a, gram) * a).sum(dim=(1, 2))
    squared = squared.clamp(min=0.0) + 2 * wide * eps * c.abs() * model * reach
    of_weight = squared.sqrt() + (m + 4) * eps * (c.abs() * model + reach)
    of_bias = (c[:, None] * bias.double() + a.sum(dim=2)).norm(dim=1)
    of_bias = of_bias + (m + 4) * eps * (c.abs() * offset + lengths.sum(dim=1))
    return torch.stack([of_weight, of_bias], dim=1)
