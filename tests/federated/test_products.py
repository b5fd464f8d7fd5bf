"""Products by another library are the same products, and so are their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from confide.federated import products


def _close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.detach().abs().max() + 1))


@given(
    rows=st.integers(1, 90),
    batch=st.integers(1, 3),
    wide=st.sampled_from([1, 7, 255, 256, 300]),
    out=st.sampled_from([1, 30, 97, 288]),
    bias=st.booleans(),
    trained=st.booleans(),
    least=st.sampled_from([0, 2_500_000]),
)
@settings(max_examples=60, deadline=None)
def test_linear_is_that_of_torch(
    rows: int, batch: int, wide: int, out: int, bias: bool, trained: bool, least: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    shapes = [(batch, rows, wide), (out, wide), (out,)][: 3 if bias else 2]
    one, other = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2))
    other = [each.clone() for each in one]
    for x, *weights in (one, other):
        x.requires_grad_(trained)
        for weight in weights:
            weight.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_WORTH_IT", least)
        found, expected = products.linear(*one), functional.linear(*other)
        _close(found, expected)
        for tensor in (found, expected):
            torch.autograd.backward(tensor.square().sum())
        for mine, theirs in zip(one, other, strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None and theirs.grad is not None:
                _close(mine.grad, theirs.grad)
        with torch.no_grad():
            _close(products.linear(*one), expected)


def test_windows_that_overlap_in_memory_are_taken_as_they_are() -> None:
    """As the recogniser's convolution has them: neither library may be told their strides as they are."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=4000).astype(np.float32))
    windows = values.as_strided((1, 300, 567), (0, 10, 1))
    weight = torch.randn(192, 567, requires_grad=True)
    found, expected = products.linear(windows, weight), functional.linear(windows, weight)
    _close(found, expected)
    (mine,), (theirs,) = (torch.autograd.grad(each.square().sum(), weight) for each in (found, expected))
    _close(mine, theirs)


@pytest.mark.parametrize("rows", [10, 1000])
def test_a_sum_with_a_product_is_that_of_torch(rows: int) -> None:
    to, x, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96, 96)
    _close(products.add_linear(to, x, weight, 0.7), torch.addmm(to, x, weight.T, alpha=0.7))


@pytest.mark.parametrize(("rows", "wide", "out"), [(10, 96, 96), (400, 96, 96), (400, 300, 96), (400, 96, 384)])
def test_products_are_added_to_what_is_there(rows: int, wide: int, out: int) -> None:
    gradient, x, into = torch.randn(rows, out), torch.randn(rows, wide), torch.randn(out, wide)
    expected = into + gradient.T @ x
    _close(products.outer_products(gradient, x), gradient.T @ x)
    products.add_product(gradient, x, into)
    _close(into, expected)


@pytest.mark.parametrize(("rows", "wide", "out"), [(400, 144, 576), (400, 576, 144), (1000, 64, 64)])
def test_the_library_is_handed_the_side_of_which_less_is_copied(
    rows: int, wide: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, ...]] = []
    plain = products._onednn

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        taken.append(tuple(x.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "_onednn", watched)
    gradient, x = torch.randn(rows, out), torch.randn(rows, wide)
    _close(products.outer_products(gradient, x), gradient.T @ x)
    assert taken == [(min(wide, out), rows)]


def test_other_types_stay_with_torch() -> None:
    x, weight = torch.randn(2000, 96, dtype=torch.float64), torch.randn(96, 96, dtype=torch.float64)
    assert torch.equal(products.linear(x, weight), functional.linear(x, weight))
