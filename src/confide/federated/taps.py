"""Layers whose gradients can be had for each user apart, from one pass over the examples of many (see `one_pass`).

A model that calls these functions in place of torch's works with any mapping of parameters: with an ordinary one they
are torch's own. With `Taps` they are the same on the way forward; on the way back, a layer adds up the gradient of
each example into its user's own buffer, and never makes the sum over all users that autograd would:

    linear      y = x W' + b     of user k: sum over its rows of g' x, one product, and of g
    layer norm  y = n(x) s + b   of user k: sum over its rows of g n(x), and of g

The rows of an example lie side by side, and all examples have equally many (padded ones have a gradient of zero). So a
row is told by its place, and `x` may be (examples, rows, wide) or (examples x rows, wide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from confide.federated import products
from confide.federated.products import add_product, product


@dataclass(frozen=True)
class Derived:
    """A weight that is computed from tensors of the model, for example a kernel with a scale folded into it."""

    function: Callable[..., Tensor]
    names: tuple[str, ...]

    def of(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return self.function(*(parameters[name].to(dtype) for name in self.names))


Weight = str | Derived


def linear(parameters: Mapping[str, Tensor], x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
    """x W' + b, with the tensors by their names."""
    if isinstance(parameters, Taps):
        return parameters.linear(x, weight, bias)
    value = _value(parameters, weight, x.dtype)
    return products.linear(x, value, None if bias is None else _value(parameters, bias, x.dtype))


def add_linear(parameters: Mapping[str, Tensor], to: Tensor, x: Tensor, weight: str, factor: float = 1.0) -> Tensor:
    """`to` + factor x W', of matrices."""
    if isinstance(parameters, Taps):
        return torch.add(to, parameters.linear(x, weight, None), alpha=factor)
    return products.add_linear(to, x, parameters[weight].to(x.dtype), factor)


def layer_norm(parameters: Mapping[str, Tensor], x: Tensor, scale: str, bias: str, eps: float) -> Tensor:
    """Normalise each row, then x s + b."""
    if isinstance(parameters, Taps):
        return parameters.layer_norm(x, scale, bias, eps)
    values = parameters[scale].to(x.dtype), parameters[bias].to(x.dtype)
    return functional.layer_norm(x, x.shape[-1:], *values, eps)


def _value(parameters: Mapping[str, Tensor], weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.of(parameters, dtype) if isinstance(weight, Derived) else parameters[weight].to(dtype)


class Taps(Mapping[str, Tensor]):
    """The central model for passes over the examples of several users, and the gradient of each user as it grows.

    Tensors may be read as from any mapping, but what is differentiated has to go through the layers of this module:
    `finish` refuses a gradient that went another way, since nobody could tell whose it is.
    """

    def __init__(self, central: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """`gradients` are zeros, (users, *shape) for each tensor of the model."""
        self.leaves = {name: value.detach().requires_grad_() for name, value in central.items()}
        self.gradients = gradients
        self.users = len(next(iter(gradients.values())))
        self.derived: dict[Derived, tuple[Tensor, Tensor]] = {}  # its value, and its gradients (users, *shape)
        self.owners = torch.empty(0, dtype=torch.int64)
        self.runs: list[tuple[int, int, int]] = []

    def __getitem__(self, name: str) -> Tensor:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def begin(self, owners: list[int]) -> None:
        """Start a pass, where these users own its examples."""
        self.owners = torch.tensor(owners, dtype=torch.int64, device=next(iter(self.leaves.values())).device)
        self.runs, start = [], 0
        for user, run in groupby(owners):
            end = start + len(list(run))
            self.runs.append((user, start, end))
            start = end

    def finish(self) -> None:
        """After all passes: take the gradients of derived weights back to the tensors that they were made from."""
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                raise TypeError(f"{name} was used without a tap, so its gradient is not known user by user")
        for derived, (_, found) in self.derived.items():
            sources = [self.leaves[name] for name in derived.names]
            value = derived.function(*sources)
            for user, own in enumerate(found):
                pulled = torch.autograd.grad(value, sources, own, retain_graph=True)
                for name, gradient in zip(derived.names, pulled, strict=True):
                    self.gradients[name][user].add_(gradient)

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
        value, gradients = self._tapped(weight)
        added, its_gradients = (None, None) if bias is None else self._tapped(bias)
        return _apply(_Linear, x, value, added, self, (gradients, its_gradients))

    def layer_norm(self, x: Tensor, scale: str, bias: str, eps: float) -> Tensor:
        into = self.gradients[scale], self.gradients[bias]
        return _apply(_LayerNorm, x, self.leaves[scale], self.leaves[bias], eps, self, into)

    def _tapped(self, weight: Weight) -> tuple[Tensor, Tensor]:
        if isinstance(weight, str):
            return self.leaves[weight], self.gradients[weight]
        if weight not in self.derived:
            with torch.no_grad():
                value = weight.of(self.leaves, next(iter(self.leaves.values())).dtype)
            self.derived[weight] = value.requires_grad_(), value.new_zeros(self.users, *value.shape)
        return self.derived[weight]

    def add_products(self, gradient: Tensor, x: Tensor, into: Tensor) -> None:
        """Add g' x over the rows of each user to its own (out, wide) of `into`."""
        gradient, x = self._by_example(gradient), self._by_example(x)
        for user, start, end in self.runs:
            add_product(gradient[start:end].flatten(0, 1), x[start:end].flatten(0, 1), into[user])

    def add_rows(self, values: Tensor, into: Tensor) -> None:
        """Add up the rows of each user in its own row of `into`."""
        into.index_add_(0, self.owners, self._by_example(values).sum(dim=1))

    def _by_example(self, values: Tensor) -> Tensor:
        return values.reshape(len(self.owners), -1, values.shape[-1])  # (examples, rows, wide)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


# The weights are arguments so that the layer has a way back even where its input has none; they get no gradient.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, taps: Taps, into: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        x = x.contiguous()  # once, for both ways
        ctx.save_for_backward(x, weight)
        ctx.taps, ctx.into = taps, into
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = outputs, ctx.saved_tensors
        of_weight, of_bias = ctx.into
        ctx.taps.add_products(gradient, x, of_weight)
        if of_bias is not None:
            ctx.taps.add_rows(gradient, of_bias)
        return product(gradient, weight.T) if ctx.needs_input_grad[0] else None, None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, bias: Tensor, eps: float, taps: Taps, into: tuple[Tensor, Tensor]
    ) -> Tensor:
        found, mean, deviation = torch.native_layer_norm(x, x.shape[-1:], scale, bias, eps)
        ctx.save_for_backward(x, scale, mean, deviation)
        ctx.taps, ctx.into = taps, into
        return found

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, scale, mean, deviation) = outputs, ctx.saved_tensors
        ctx.taps.add_rows((x - mean).mul_(deviation).mul_(gradient), ctx.into[0])
        ctx.taps.add_rows(gradient, ctx.into[1])
        back = None
        if ctx.needs_input_grad[0]:
            arguments = gradient.contiguous(), x, x.shape[-1:], mean, deviation, scale, None, [True, False, False]
            back = torch.ops.aten.native_layer_norm_backward(*arguments)[0]
        return back, None, None, None, None, None
