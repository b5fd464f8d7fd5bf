"""The rules that bound one user's update (PFL-ASR Definition 3 and appendix H.5; NORM eqs 4 and 12).

A rule is a function of the norms of an update's tensors and answers with one factor per tensor, so the same few lines
serve an update that lies in memory and one that is only known through its factors.

| rule                | factor of tensor h                      | norm of what is sent          |
|---------------------|-----------------------------------------|-------------------------------|
| clip                | min(1, C / norm)                        | at most C                     |
| per_layer_clip      | min(1, C_h / norm_h)                    | at most C                     |
| normalise           | C / norm                                | C; a zero update stays zero   |
| per_layer_normalise | C_h / norm_h if norm > C, otherwise 1   | at most C                     |
| python              | f(norms), and all of it min(1, C / norm) | at most C, whatever f answers |
| none                | 1                                       | not bounded: no guarantee     |

To add one: a function, and its line in `RULES`. Whoever writes one proves that sum_h (factor_h norm_h)^2 <= C^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.errors import UserError
from confide.settings import running

Factors = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""From norms (users, layers), total norms (users, 1), C and C_h (layers,) to factors that broadcast to the norms."""


@dataclass(frozen=True)
class Rule:
    """One way to bound an update."""

    factors: Factors
    per_layer: bool = False
    """Whether every tensor has a bound of its own."""
    follows: tuple[str, ...] = ()
    """What its bound may follow from step to step (`bounding.adaptive.kind`)."""


def ratio(bound: float | Tensor, norms: Tensor) -> Tensor:
    """bound / norms, and 0 where there is nothing to scale."""
    return torch.where(norms > 0, bound / norms, torch.zeros_like(norms))


def factors_of_function(function: Callable[[Tensor, Tensor], Tensor]) -> Factors:
    """Make a rule of a user's own function: call it for one user at a time, so that it cannot see the others, and hold
    its answer to the bound."""

    def factors(norms: Tensor, total: Tensor, bound: float, layer_bounds: Tensor) -> Tensor:
        # Copies: a function that works in place must not change what it is held to.
        with running("bounding.function", f"{function.__module__}:{getattr(function, '__qualname__', function)}"):
            answers = [function(own.clone(), layer_bounds.clone()) for own in norms]
        for answer in answers:
            if answer.shape != layer_bounds.shape:
                raise UserError(
                    f"bounding.function answered a tensor of shape {tuple(answer.shape)}; expected one factor per "
                    f"tensor of the model, {tuple(layer_bounds.shape)}"
                )
        asked = torch.stack(answers) if answers else norms
        found = torch.nan_to_num(asked.to(norms), nan=0.0, posinf=0.0, neginf=0.0)
        length = torch.linalg.vector_norm(norms * found, dim=1, keepdim=True)
        return found * torch.clamp(bound / length, max=1.0)

    return factors


def _per_layer_normalise(norms: Tensor, total: Tensor, bound: float, layer_bounds: Tensor) -> Tensor:
    return torch.where(total > bound, ratio(layer_bounds, norms), torch.ones_like(norms))


PYTHON, NONE = "python", "none"
_UNCHANGED = Rule(lambda norms, total, bound, layer_bounds: torch.ones_like(norms))
RULES = {
    "clip": Rule(
        lambda norms, total, bound, layer_bounds: torch.clamp(bound / total, max=1.0), follows=("quantile", "car")
    ),
    "per_layer_clip": Rule(
        lambda norms, total, bound, layer_bounds: torch.clamp(layer_bounds / norms, max=1.0),
        per_layer=True,
        follows=("quantile",),
    ),
    "normalise": Rule(lambda norms, total, bound, layer_bounds: ratio(bound, total)),
    "per_layer_normalise": Rule(_per_layer_normalise, per_layer=True),
    PYTHON: _UNCHANGED,  # `factors_of_function` takes its place
    NONE: _UNCHANGED,
}
