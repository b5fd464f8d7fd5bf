"""Optimisers of the central model, along the aggregated pseudo-gradient (PFL-ASR Algorithm 1, last line), and of users.

The pseudo-gradient averages Delta = theta - theta_k over the cohort: it points uphill, and every rule
subtracts. With rate eta = learning_rate * schedule(t), gradient g, weights w and weight decay lambda, for
each tensor:

* `sgd`: g' = g + lambda w; m = mu m + g'; w -= eta m (the momentum of NORM, mu = 0.8). As torch.optim.SGD.
* `adam`: with bias-corrected moments, w -= eta (m / (sqrt(v) + epsilon) + lambda w). As torch.optim.AdamW:
  weight decay is decoupled from the moments; without it this is torch.optim.Adam.
* `adagrad`: g' = g + lambda w; s += g'^2; w -= eta g' / (sqrt(s) + epsilon). As torch.optim.Adagrad.
* `lars`: g' = g + lambda w; r = coefficient ||w|| / ||g'||; m = mu m + eta r g'; w -= m (You et al. 2017).
* `lamb`: u = m / (sqrt(v) + xi); r = ||w|| / ||u + lambda w||; w -= eta r (u + lambda w) (PFL-ASR appendix
  E.4, eqs 8-9 with the identity for phi; You et al. 2020).

In `lars` and `lamb`, r is 1 (without the coefficient) where either norm is zero: else a tensor that starts
at zero would never move.

Differs from the paper:

* `lars` has the form of optax, which the released PFL-ASR code calls: ||g + lambda w|| below the fraction,
  where You et al. 2017 write ||g|| + lambda ||w||. Without weight decay, the released default, the two are
  the same.
* `lamb` follows eqs 8-9, which have no bias correction; the released code calls optax, which has it, and
  `bias_correction: true` gives that form. Without lambda the trust ratio cancels the difference but for xi,
  which weighs about thirty times more at the first step without the correction: sqrt(1 - 0.999) = 0.03.
* `adagrad` adds epsilon to the root, as torch does; the released code adds it to the inverse of the root.
* Betas of exactly 1, which eq. 9 allows, are refused: such a moment never leaves zero.

A rule (`SgdRule`, `AdamRule`, ...) is how a weight moves along a gradient. A central optimiser adds the rate and its
schedule; `local.optimiser` is a bare rule, since users have a rate already (`confide.federated.local`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from confide.errors import UserError
from confide.federated.parameters import norm
from confide.federated.rates import Rates, factors
from confide.federated.schedules import Constant, Schedule
from confide.settings import Section

__all__ = ["Adagrad", "Adam", "Lamb", "Lars", "Optimiser", "Rule", "Sgd", "init", "update", "working_dtype"]

Slots = Mapping[str, Tensor]

_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Rule(Section, ABC):
    """What every optimiser shares. To add one: a rule, its central form, and their names in `Rule` and `Optimiser`."""

    model_config = ConfigDict(allow_inf_nan=False)

    # Declared here so that it comes first in the schema that users read.
    kind: str

    @abstractmethod
    def slots(self) -> dict[str, float]:
        """What the optimiser remembers for each parameter, by name, and the value that it starts from."""

    @abstractmethod
    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        """Change a weight and its slots in place, along its gradient `g`, at the 0-based `step`."""


class _Central(_Rule):
    """What a rule needs to move the central model."""

    learning_rate: float = Field(gt=0, description="The base learning rate, which the schedule multiplies.")
    schedule: Schedule = Field(default=Constant(), description="How the learning rate changes over steps.")
    rates: Rates = Field(
        default_factory=dict, exclude_if=lambda value: not value,
        description="Factors of the rate for tensors by their names, such as {'*.lora_?': 0.1}; the first that fits.",
    )  # fmt: skip


class _WithMoments(_Rule):
    """What Adam and LAMB share: moving averages of the gradient and of its square."""

    betas: tuple[_Beta, _Beta] = Field(default=(0.9, 0.999), description="Decay of the first and of the second moment.")
    epsilon: float

    def slots(self) -> dict[str, float]:
        return {"first_moment": 0.0, "second_moment": 0.0}

    def direction(self, g: Tensor, slots: Slots, step: int | None) -> Tensor:
        """Eq. 9, then u of eq. 8 in a new tensor; bias-corrected for the 0-based `step` unless that is None."""
        m, v = slots["first_moment"], slots["second_moment"]
        m.lerp_(g, 1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
        root = v.sqrt()
        if step is None:
            return torch.div(m, root.add_(self.epsilon), out=root)
        first, second = (1 - beta ** (step + 1) for beta in self.betas)
        # (m / first) / (sqrt(v / second) + epsilon), multiplied out to save two passes over memory.
        root.add_(self.epsilon * math.sqrt(second))
        return torch.div(m, root, out=root).mul_(math.sqrt(second) / first)


class SgdRule(_Rule):
    """Gradient descent, optionally with heavy-ball momentum."""

    kind: Literal["sgd"] = Field(default="sgd", description="Stochastic gradient descent.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Share of the last step kept; 0 for none.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient.")

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        direction = _with_decay(g, weight, self.weight_decay)
        if self.momentum:
            direction = slots["momentum"].mul_(self.momentum).add_(direction)
        weight.add_(direction, alpha=-rate)


class AdamRule(_WithMoments):
    """Adam with bias correction and decoupled weight decay (AdamW)."""

    kind: Literal["adam"] = Field(default="adam", description="Adam; AdamW where weight decay is set.")
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, times the learning rate.")

    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        direction = self.direction(g, slots, step)
        if self.weight_decay:
            weight.mul_(1 - rate * self.weight_decay)
        weight.add_(direction, alpha=-rate)


class AdagradRule(_Rule):
    """AdaGrad: each coordinate's rate falls with the squares it has seen."""

    kind: Literal["adagrad"] = Field(default="adagrad", description="AdaGrad.")
    epsilon: float = Field(default=1e-10, gt=0, description="Added to the root of the sum of squares.")
    initial_accumulator: float = Field(default=0.0, ge=0, description="What the sum of squares starts at.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added to the gradient.")

    def slots(self) -> dict[str, float]:
        return {"sum_of_squares": self.initial_accumulator}

    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        squares = slots["sum_of_squares"]
        direction = _with_decay(g, weight, self.weight_decay)
        squares.addcmul_(direction, direction)
        weight.addcdiv_(direction, squares.sqrt().add_(self.epsilon), value=-rate)


class LarsRule(_Rule):
    """LARS: momentum whose step per tensor is proportional to the tensor's norm."""

    kind: Literal["lars"] = Field(default="lars", description="Layer-wise adaptive rate scaling.")
    coefficient: float = Field(default=0.001, gt=0, description="Trust coefficient, multiplies the norm ratio.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Share of the last step kept; 0 for none.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty, added before the norm is taken.")

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        direction = _with_decay(g, weight, self.weight_decay)
        local_rate = rate * _trust_ratio(weight, direction, self.coefficient)
        if not self.momentum:
            weight.add_(direction, alpha=-local_rate)
        else:
            # The rate is inside the momentum: what is carried over keeps the rate that it was made with.
            weight.sub_(slots["momentum"].mul_(self.momentum).add_(direction, alpha=local_rate))


class LambRule(_WithMoments):
    """LAMB: Adam's direction, with a step per tensor proportional to the tensor's norm."""

    kind: Literal["lamb"] = Field(default="lamb", description="Layer-wise adaptive moments.")
    epsilon: float = Field(default=1e-6, gt=0, description="xi, added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="lambda, added before the norm is taken.")
    bias_correction: bool = Field(
        default=False, description="Correct the moments as Adam does; eqs 8-9 of PFL-ASR do not."
    )

    def move(self, weight: Tensor, g: Tensor, slots: Slots, rate: float, step: int) -> None:
        direction = self.direction(g, slots, step if self.bias_correction else None)
        if self.weight_decay:
            direction.add_(weight, alpha=self.weight_decay)
        weight.add_(direction, alpha=-rate * _trust_ratio(weight, direction))


class Sgd(SgdRule, _Central):
    """Gradient descent of the central model, optionally with heavy-ball momentum."""


class Adam(AdamRule, _Central):
    """Adam with bias correction and decoupled weight decay (AdamW), of the central model."""


class Adagrad(AdagradRule, _Central):
    """AdaGrad of the central model: each coordinate's rate falls with the squares it has seen."""


class Lars(LarsRule, _Central):
    """LARS of the central model: momentum whose step per tensor is proportional to the tensor's norm."""


class Lamb(LambRule, _Central):
    """LAMB of the central model: Adam's direction, with a step per tensor proportional to the tensor's norm."""


Rule = Annotated[SgdRule | AdamRule | AdagradRule | LarsRule | LambRule, Field(discriminator="kind")]
Optimiser = Annotated[Sgd | Adam | Adagrad | Lars | Lamb, Field(discriminator="kind")]


def init(settings: Optimiser, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state before the first step: for every parameter `name`, tensors called `<slot>/<name>`.

    State is kept in float32 at least: in bfloat16 a second moment with beta 0.999 would stop changing.
    """
    return {
        f"{slot}/{name}": torch.full(parameter.shape, start, dtype=working_dtype(parameter), device=parameter.device)
        for slot, start in settings.slots().items()
        for name, parameter in parameters.items()
    }


def update(
    settings: Optimiser,
    parameters: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    step: int,
) -> None:
    """Take the 0-based central `step`: changes `parameters` and `state` in place, never `gradient`."""
    slots = settings.slots()
    if wrong := _misfits(gradient, {name: parameter.shape for name, parameter in parameters.items()}):
        raise ValueError(f"the gradient does not have the parameters' names and shapes: see {wrong}")
    expected = {f"{slot}/{name}": parameter.shape for slot in slots for name, parameter in parameters.items()}
    if wrong := _misfits(state, expected):
        raise UserError(
            f"the optimiser state does not fit {settings.kind} and this model: see {wrong}; "
            "resume with the recipe that wrote the checkpoint"
        )
    rate = settings.learning_rate * settings.schedule(step)
    with torch.no_grad():
        own = factors(settings.rates, list(parameters), "central")
        for (name, weight), factor in zip(parameters.items(), own, strict=True):
            g = gradient[name].to(working_dtype(weight))
            settings.move(weight, g, {slot: state[f"{slot}/{name}"] for slot in slots}, rate * factor, step)


def _with_decay(g: Tensor, weight: Tensor, weight_decay: float) -> Tensor:
    return torch.add(g, weight, alpha=weight_decay) if weight_decay else g


def _trust_ratio(weight: Tensor, direction: Tensor, coefficient: float = 1.0) -> float:
    weight_norm, direction_norm = norm(weight), norm(direction)
    if weight_norm == 0 or direction_norm == 0:
        return 1.0
    return coefficient * weight_norm / direction_norm


def working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _misfits(given: Mapping[str, Tensor], expected: dict[str, torch.Size]) -> str:
    """The first few names that are missing, unknown or of a wrong shape, which torch might broadcast."""
    shapes = {name: tensor.shape for name, tensor in given.items()}
    names = sorted(name for name in expected | shapes if expected.get(name) != shapes.get(name))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
