"""Norms of the aggregate before noise hides it: for the records of a run, never released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from confide.federated.parameters import Layout


@dataclass(frozen=True)
class Signal:
    """The norm of an aggregate and, where they were asked for, those of its tensors and of the model's."""

    norm: float
    layers: Tensor | None = None  # (layers,)
    weights: Tensor | None = None  # (layers,)


@dataclass(frozen=True)
class Probe:
    """Measures what the records of a run show of a step."""

    layout: Layout
    wants_layers: Callable[[int], bool]
    """Whether the norms of each tensor are wanted for a step, counted from 1 (PFL-ASR Figures 5, 10, 13, 14)."""

    def measure(self, step: int, parameters: Tensor, gradient: Tensor) -> Signal:
        return Signal(float(gradient.norm()), self.layers(step, gradient), self.layers(step, parameters))

    def layers(self, step: int, vector: Tensor) -> Tensor | None:
        """The norm of each tensor, where that is wanted."""  # (layers,)
        return self.layout.norms(vector) if self.wants_layers(step + 1) else None
