"""Scale the tensors of a model so that its function stays and the sizes of its updates change.

Where one linear map follows another, the first can be multiplied by r and the second divided by it. A tensor that was
multiplied by r has a gradient that is divided by r. So models that compute the same can have very different updates:
in one, the LayerNorms take up nearly all of a bound, in another they take their share. PFL-ASR's Figure 5 has updates
of LayerNorms ten times as long as those of the attention, and that is where per-layer clipping gains the most.

A `Scaling` is one such freedom: some parts of tensors are multiplied by r, others by a power of it. The derivative of
the loss along it is zero, so the products <w, gradient> of the two sides agree, and a gradient per coordinate is about
as large as 1 / ||w||. That needs no data. `balanced` chooses the scalings with the least norm of the whole model, in
which tensors that follow each other have the same norm (Neyshabur et al. 2015 and Stock et al. 2019 do this for
perceptrons); `imbalance` says how far from it a model is.

The papers do not have this. It is public if the model is, and it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 60


@dataclass(frozen=True)
class Part:
    """A tensor, or some of its first dimension."""

    name: str
    begin: int = 0
    end: int | None = None

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters[self.name][self.begin : self.end]


@dataclass(frozen=True)
class Scaling:
    """One freedom: for every r > 0, part p can be multiplied by r^power without changing what the model computes."""

    name: str
    powers: tuple[tuple[Part, int], ...]


def scaled(
    parameters: Mapping[str, Tensor], scalings: Sequence[Scaling], factors: Mapping[str, float]
) -> dict[str, Tensor]:
    """The model with each scaling at its factor r; scalings without a factor stay.

    Examples:
        >>> import torch
        >>> from confide.federated.symmetry import Part, Scaling, scaled
        >>> model = {"first": torch.ones(2, 2), "second": torch.ones(1, 2)}
        >>> freedom = Scaling("between", ((Part("first"), -1), (Part("second"), 1)))
        >>> moved = scaled(model, [freedom], {"between": 4.0})
        >>> x = torch.tensor([1.0, 2.0])
        >>> torch.equal(moved["second"] @ moved["first"] @ x, model["second"] @ model["first"] @ x)
        True
    """
    total: dict[Part, float] = {}
    for scaling in scalings:
        for part, power in scaling.powers:
            total[part] = total.get(part, 0.0) + power * math.log(factors.get(scaling.name, 1.0))
    moved = {name: tensor.clone() for name, tensor in parameters.items()}
    for part, exponent in total.items():
        part.of(moved).mul_(math.exp(exponent))
    return moved


def balancing_factors(parameters: Mapping[str, Tensor], scalings: Sequence[Scaling]) -> dict[str, float]:
    """The factors with the least sum of squares over the model: a convex problem, solved by Newton's method.

    A scaling with one side of zeros has no least sum, and stays as it is.
    """
    parts = list(dict.fromkeys(part for scaling in scalings for part, _ in scaling.powers))
    norms = {part: float(part.of(parameters).double().norm()) for part in parts}
    free = [
        scaling
        for scaling in scalings
        if {power > 0 for part, power in scaling.powers if norms[part] > 0} == {True, False}
    ]
    if not free:
        return {}
    powers = np.zeros((len(parts), len(free)))
    for column, scaling in enumerate(free):
        for part, power in scaling.powers:
            powers[parts.index(part), column] += power
    squares = np.array([norms[part] ** 2 for part in parts])
    logs = np.zeros(len(free))

    def value(at: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(squares * np.exp(2 * powers @ at))

    for _ in range(_ROUNDS):
        terms = value(logs)
        slope, curve = 2 * powers.T @ terms, 4 * powers.T @ (terms[:, None] * powers)
        move = np.linalg.lstsq(curve, -slope, rcond=None)[0]
        size = 1.0
        while size > 1e-9 and value(logs + size * move).sum() > terms.sum() + 1e-4 * size * float(slope @ move):
            size /= 2
        logs = logs + size * move
        if np.abs(move).max() < 1e-10:
            break
    return {scaling.name: math.exp(log) for scaling, log in zip(free, logs, strict=True)}


def balanced(parameters: Mapping[str, Tensor], scalings: Sequence[Scaling]) -> dict[str, Tensor]:
    """The model of the least norm that computes the same: no tensor's updates are long for want of a scale.

    Examples:
        >>> import torch
        >>> from confide.federated.symmetry import Part, Scaling, balanced
        >>> model = {"first": torch.full((2, 2), 100.0), "second": torch.full((1, 2), 0.01)}
        >>> freedom = Scaling("between", ((Part("first"), -1), (Part("second"), 1)))
        >>> [round(float(tensor.norm()), 4) for tensor in balanced(model, [freedom]).values()]
        [1.6818, 1.6818]
    """
    return scaled(parameters, scalings, balancing_factors(parameters, scalings))


def imbalance(parameters: Mapping[str, Tensor], scalings: Sequence[Scaling]) -> float:
    """How many times too long updates are in one tensor against those that follow it; 1 where all are balanced.

    It is the root mean square, over the scalings and in logarithms, of the squares of the factors that balance the
    model: a LayerNorm that is divided by r and a matrix that is multiplied by it have updates r^2 further apart.
    """
    factors = balancing_factors(parameters, scalings)
    if not factors:
        return 1.0
    logs = torch.tensor([2 * math.log(factor) for factor in factors.values()], dtype=torch.float64)
    return math.exp(float(logs.square().mean().sqrt()))
