"""A model as one flat vector and the named tensors that lie in it.

Every part of the loop works on the flat vector (sums, noise, norms, checkpoints); a task sees named views into it.
A "layer" of the papers' per-layer rules is one named tensor, as in the released PFL-ASR code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import numpy as np
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

    def difference(self, one: Tensor, other: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """Write (one - other) scale into `out`, and return the Euclidean norm of each tensor of it."""  # (layers,)
        begins, chunks = 0, []
        for layer, size in enumerate(self.sizes):
            chunks += [(layer, begins + s, min(begins + s + _CHUNK, begins + size)) for s in range(0, size, _CHUNK)]
            begins += size

        @torch.no_grad()  # which every thread has to say for itself
        def subtract(chunk: tuple[int, int, int]) -> float:
            _, start, stop = chunk
            part = torch.sub(one[start:stop], other[start:stop], out=out[start:stop])
            if scale != 1.0:
                part.mul_(scale)
            return _square(part.numpy())  # while it is still in the cache

        squares = torch.zeros(len(self.sizes), dtype=torch.float64)
        for (layer, _, _), square in zip(chunks, in_threads(subtract, chunks, self.size), strict=True):
            squares[layer] += square
        return squares.sqrt()

    def norms(self, flat: Tensor) -> Tensor:
        """The Euclidean norm of each tensor, in double precision."""  # (layers,)
        return torch.tensor([exact_norm(p) for p in self.pieces(flat)], dtype=torch.float64)


_CHUNK = 1 << 18
_ROW = 256
_ROW_ROUNDING = 1 + 2e-5


def _square(values: np.ndarray) -> float:
    """The sum of squares, never too small by more than the rounding of double precision.

    Float32 rows of 256 are three times faster than double precision. A row's sum is off by at most 256 times 2^-24,
    less than what the factor adds; rows are summed in double precision. Where squares would leave float32's range, and
    for the rest of a tensor that is no whole row, double precision does the work.
    """
    whole = len(values) // _ROW * _ROW
    if values.dtype == np.float32 and whole > 0:
        rows = values[:whole].reshape(-1, _ROW)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = float(np.vecdot(rows, rows).sum(dtype=np.float64))
        if 1e-20 < found < 1e30:
            return found * _ROW_ROUNDING + _square(values[whole:])
    return float(np.einsum("i,i->", values, values, dtype=np.float64))


_WORTH_THREADS = 8_000_000
_pools: dict[int, ThreadPoolExecutor] = {}


def in_threads(work: Callable[[Any], Any], items: Sequence[Any], size: int) -> Iterable[Any]:
    """Passes over large vectors are shared by the processors that this process may use; the result does not change."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if size < _WORTH_THREADS or cores < 2 or current_process().daemon:  # a worker process has one core to itself
        return map(work, items)
    if os.getpid() not in _pools:
        _pools[os.getpid()] = ThreadPoolExecutor(cores)
    return _pools[os.getpid()].map(work, items)


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
