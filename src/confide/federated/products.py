"""Products of matrices by whichever library is faster here.

Torch gives float32 products to MKL, which takes half of the processor's width on processors that are not Intel's.
oneDNN, which torch also brings, makes its kernels for the processor at hand: on an AMD EPYC of family 26, 250 against
115 GFLOP/s a core. It pays a fixed price for each call, so small products stay with MKL. The choice depends on shapes
alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends import mkldnn

_WORTH_IT = 2_500_000  # multiplications
_WIDE = 256


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b, with x (..., wide) and W (out, wide); it has no gradient."""
    if _better_by_onednn(x, weight.shape[0]):
        return _onednn(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def add_product(gradient: Tensor, x: Tensor, into: Tensor) -> None:
    """Add g' x to `into`, with g (rows, out) and x (rows, wide)."""
    # oneDNN wants g' copied, which only pays where each number of it is used often; MKL adds on its own.
    if x.shape[1] >= _WIDE and _better_by_onednn(x, gradient.shape[1]):
        into.add_(_onednn(gradient.T, x.T, None))
    else:
        into.addmm_(gradient.T, x)


def _better_by_onednn(x: Tensor, out: int) -> bool:
    large = x.numel() * out >= _WORTH_IT and x.dtype == torch.float32 and x.device.type == "cpu"
    return large and bool(mkldnn.is_available()) and bool(mkldnn.enabled)  # type: ignore[no-untyped-call]


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # What torch.compile calls too; no public function leads to these kernels in float32.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return found
