"""A model as one flat vector and the named tensors that lie in it.

Every part of the loop works on the flat vector (sums, noise, norms, checkpoints); a task sees named views into it.
A "layer" of the papers' per-layer rules is one named tensor, as in the released PFL-ASR code.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from multiprocessing import current_process
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.files import usable_cores

Stretch = tuple[int, int, int]
"""A piece of one tensor in the flat vector: which tensor, the first coordinate, and the one after the last."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's tensors, in the order in which they lie in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(parameters: Mapping[str, Tensor]) -> Layout:
        return Layout(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named tensors that share memory with `flat`."""
        return {n: p.view(s) for n, p, s in zip(self.names, self.pieces(flat), self.shapes, strict=True)}

    def pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors as flat views, in order."""
        return torch.split(flat, self.sizes)

    def difference(self, one: Tensor, other: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """Write (one - other) scale into `out`, which may be one of the two, and return the norm of each tensor of it.

        One pass over memory: squares are taken while a piece is still in the cache.
        """  # (layers,)

        @torch.no_grad()  # each thread has its own setting
        def subtract(group: list[Stretch]) -> list[float]:
            begin, end = group[0][1], group[-1][2]
            part = torch.sub(one[begin:end], other[begin:end], out=out[begin:end])
            if scale != 1.0:
                part.mul_(scale)
            return [_square(part[start - begin : stop - begin]) for _, start, stop in group]

        squares = torch.zeros(len(self.sizes), dtype=torch.float64)
        groups = self._groups
        for group, found in zip(groups, in_threads(subtract, groups, one), strict=True):
            for (layer, _, _), each in zip(group, found, strict=True):
                squares[layer] += each
        return squares.sqrt()

    def add_scaled(self, flat: Tensor, factors: Sequence[float], into: Tensor) -> None:
        """Add factor times each tensor of `flat` to `into`. Tensors with a factor of 0 are not looked at.

        Products are rounded before they are added, as if they had been written down: it makes no difference to the
        last bit whether updates are added to a sum one by one, or each is a sum of its own that is added later.
        """

        @torch.no_grad()
        def add(group: list[Stretch]) -> None:
            for factor, run in groupby(group, lambda stretch: factors[stretch[0]]):
                begin, *_, end = chain.from_iterable((start, stop) for _, start, stop in run)
                _add_rounded(into[begin:end], flat[begin:end], factor)

        list(in_threads(add, self._groups, flat))

    @cached_property
    def _groups(self) -> list[list[Stretch]]:
        """Cut the flat vector into pieces of `_CHUNK`, each given as the stretches of the tensors in it.

        Where they begin decides the last bits of sums, so it depends on nothing but the layout.
        """
        ends = list(accumulate(self.sizes))
        cuts = sorted({0, *ends, *range(0, self.size, _CHUNK)})
        stretches = ((bisect_right(ends, start), start, stop) for start, stop in pairwise(cuts))
        return [list(group) for _, group in groupby(stretches, lambda stretch: stretch[1] // _CHUNK)]

    def norms_above(self, flat: Tensor) -> Tensor:
        """The norm of each tensor as `difference` takes it: quickly, and never too small."""  # (layers,)
        return torch.tensor([_square(piece) for piece in self.pieces(flat)], dtype=torch.float64).sqrt()

    def norms(self, flat: Tensor) -> Tensor:
        """The Euclidean norm of each tensor, in double precision."""  # (layers,)
        return torch.tensor([exact_norm(p) for p in self.pieces(flat)], dtype=torch.float64)


# Coordinates at a time: what is made of them stays in the cache, and threads seldom wait for the interpreter's lock.
_CHUNK = 1 << 20
_ROW = 256
_ROW_ROUNDING = 1 + 2e-5
LARGE = 1e30
"""A factor beyond it, or below its reciprocal, is one that float32 would not hold well."""


def add_scaled(total: Tensor, piece: Tensor, factor: float) -> None:
    if factor != 0 and not 1 / LARGE < abs(factor) < LARGE:  # float32 would not hold such a factor well
        total.add_((piece.double() * factor).to(total.dtype))
    elif factor != 0:
        total.add_(piece, alpha=factor)


def _square(piece: Tensor) -> float:
    """The sum of squares, never too small by more than the rounding of double precision.

    Float32 rows of 256 are three times faster than double precision. A row's sum is off by at most 256 times 2^-24,
    less than what the factor adds; rows are summed in double precision. Where squares would leave float32's range, and
    for the rest of a tensor that is no whole row, double precision does the work.
    """
    if piece.device.type != "cpu":
        return float(torch.linalg.vector_norm(piece, dtype=torch.float64).square())
    values = piece.numpy()
    whole = len(values) // _ROW * _ROW
    if values.dtype == np.float32 and whole > 0:
        rows = values[:whole].reshape(-1, _ROW)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = float(np.vecdot(rows, rows).sum(dtype=np.float64))
        if 1e-20 < found < 1e30:
            return found * _ROW_ROUNDING + _exact_square(values[whole:])
    return _exact_square(values)


def _exact_square(values: np.ndarray) -> float:
    return float(np.einsum("i,i->", values, values, dtype=np.float64)) if len(values) else 0.0


def _add_rounded(total: Tensor, piece: Tensor, factor: float) -> None:
    """The same, where the product is rounded first: a division by one keeps it apart from the addition."""
    if 1 / LARGE < abs(factor) < LARGE:
        total.addcdiv_(piece, piece.new_ones(1), value=factor)
    else:
        add_scaled(total, piece, factor)


_WORTH_THREADS = 8_000_000
_pools: dict[int, ThreadPoolExecutor] = {}


def in_threads(work: Callable[[Any], Any], items: Sequence[Any], vector: Tensor) -> Iterable[Any]:
    """Share passes over large vectors among the processors that this process may use; the result does not change."""
    size, cores = vector.numel() if vector.device.type == "cpu" else 0, usable_cores()
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


def all_finite(flat: Tensor) -> bool:
    """Whether every number is finite. Looks at pieces, as a copy of the whole is made; numpy takes a tenth of torch."""
    pieces = torch.split(flat.detach(), _CHUNK)
    if flat.device.type == "cpu" and flat.dtype != torch.bfloat16:
        return all(bool(np.isfinite(piece.numpy()).all()) for piece in pieces)
    return all(bool(torch.isfinite(piece).all()) for piece in pieces)


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parameters.values()])
