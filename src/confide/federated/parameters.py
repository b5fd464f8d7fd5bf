"""A model as one flat vector and the named tensors that lie in it.

Every part of the loop works on the flat vector (sums, noise, norms, checkpoints); a task sees named views into it.
A "layer" of the papers' per-layer rules is one named tensor, as in the released PFL-ASR code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's tensors, in the order in which they lie in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(parameters: Mapping[str, Tensor]) -> Layout:
        return Layout(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named tensors that share memory with `flat`."""
        return {n: p.view(s) for n, p, s in zip(self.names, self.pieces(flat), self.shapes, strict=True)}

    def pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors as flat views, in order."""
        return torch.split(flat, self.sizes)

    def norms(self, flat: Tensor) -> Tensor:
        """The Euclidean norm of each tensor, in double precision."""  # (layers,)
        return torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in self.pieces(flat)])


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parameters.values()])
