"""Products of matrices by whichever library is faster here.

Torch gives float32 products to MKL, which takes half of the processor's width on processors that are not Intel's.
oneDNN, which torch also brings, makes its kernels for the processor at hand: on an AMD EPYC of family 26, 250 against
115 GFLOP/s a core. It pays a fixed price for each call, so small products stay with MKL. The choice depends on shapes
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional

_WORTH_IT = 2_500_000  # multiplications


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b as `torch.nn.functional.linear` has it, with gradients."""
    if not _better_by_onednn(x, weight.shape[0]):
        return functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


def add_linear(to: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """`to` + factor x W', of matrices, with gradients."""
    if not _better_by_onednn(x, weight.shape[0]):
        return torch.addmm(to, x, weight.T, alpha=factor)
    return torch.add(to, linear(x, weight), alpha=factor)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()  # once, for both ways
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = outputs, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if of_x else None,
            outer_products(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(dim=0) if of_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b, with x (..., wide) and W (out, wide); it has no gradient."""
    if _better_by_onednn(x, weight.shape[0]):
        return _onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


def add_product(gradient: Tensor, x: Tensor, into: Tensor) -> None:
    """Add g' x to `into`, with g (rows, out) and x (rows, wide)."""
    if _better_by_onednn(x, gradient.shape[1]):
        into.add_(outer_products(gradient, x))
    else:
        into.addmm_(gradient.T, x)


def outer_products(gradient: Tensor, x: Tensor) -> Tensor:
    """g' x, with g (rows, out) and x (rows, wide); it has no gradient."""
    if not _better_by_onednn(x, gradient.shape[1]):
        return gradient.T @ x
    (rows, out), wide = gradient.shape, x.shape[1]
    # oneDNN copies what it multiplies from the left in turned form: g, or x if less is copied so, with the answer.
    if rows * out <= (rows + out) * wide:
        return _onednn(gradient.T, x.T, None)
    return _onednn(x.T, gradient.T, None).T


def _better_by_onednn(x: Tensor, out: int) -> bool:
    # Sizes come last: in an export, which switches oneDNN off, they are symbols that must not be asked.
    usable = bool(mkldnn.enabled) and x.dtype == torch.float32 and x.device.type == "cpu"
    large = usable and x.numel() * out >= _WORTH_IT
    return large and bool(mkldnn.is_available())  # type: ignore[no-untyped-call]


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # What torch.compile calls too; no public function leads to these kernels in float32.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return found
