"""A model as one flat vector and the named tensors that lie in it.

Every part of the loop works on the flat vector (sums, noise, norms, checkpoints); a task sees named views into it.
A "layer" of the papers' per-layer rules is one named tensor, as in the released PFL-ASR code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
        return [math.prod(shape) for shape in self.shapes]

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
        return torch.tensor([exact_norm(p) for p in self.pieces(flat)], dtype=torch.float64)


# Long float32 sums drift: over 20 million elements one pass is off by 1e-3, blocks of this size by 1e-8.
_NORM_BLOCK = 2**14


def norm(tensor: Tensor) -> float:
    """Euclidean norm in float32 or better, whatever the tensor's own type."""
    kind = torch.promote_types(tensor.dtype, torch.float32)
    blocks = torch.split(tensor.reshape(-1), _NORM_BLOCK)
    return math.hypot(*torch.stack([torch.linalg.vector_norm(block, dtype=kind) for block in blocks]).tolist())


def exact_norm(tensor: Tensor) -> float:
    """Euclidean norm with squares and sums in double precision: a bound has to count the smallest entry too."""
    flat, squares = tensor.reshape(-1), 0.0
    wide = torch.empty(min(_NORM_BLOCK, flat.numel()), dtype=torch.float64)
    for block in torch.split(flat, _NORM_BLOCK):
        piece = wide[: block.numel()].copy_(block)
        squares += float(torch.dot(piece, piece))
    return math.sqrt(squares)


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parameters.values()])
