"""Train many users at once, with each user's weights held as the central ones plus factors (see `chain`).

After t steps a weight matrix of a user is W_0 - G' A, where the rows of A are the inputs that the layer has seen and
the rows of G the gradients at its output, times the local rate. Nothing else is ever needed of it:

    forward    a W' = a W_0' - (a A') G            backward    g W = g W_0 - (g G') A
    FedProx    theta - theta_t = -G' A, so a step scales the rows that are there by 1 - eta mu
    norm       ||G' A||^2 = sum of (G G') * (A A') entry by entry
    sum        sum_k factor_k G_k' A_k is one product of matrices over all examples of all users

A bias is the weight of an input that is always 1. Plain steps of small models are in our own C++ where the machine can
have it (`kernels/low_rank.cpp`): a user is finished while its rows are in the cache. This is exact: `PlainTrainer` is
the reference, and draws the same batches. Users of a part go together if their numbers of examples differ by less than
a factor of two; shorter ones are padded with examples that count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ctypes import c_float, c_long
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.federated.chain import Affine, ChainTask, Ranks, activate
from confide.federated.local import LocalTraining, batches
from confide.federated.parameters import LARGE, Layout
from confide.federated.products import add_product, product
from confide.federated.task import Task
from confide.kernels import address, kernel
from confide.randomness import Addresses

KERNELS = ("low_rank",)
_CHUNK = 112  # numbers that a float32 inner product adds up before double precision takes over
_SMALL = 1 << 16  # weights above the first layer that a core's cache holds; larger ones are for products of matrices


class LowRankTrainer:
    """Trains the users of a part that are worth it."""

    def __init__(self, task: Task, ranks: Ranks, layout: Layout, seed: int) -> None:
        if not isinstance(task, ChainTask):
            raise TypeError(f"{task.name} is no chain of linear layers")
        self.task, self.ranks, self.layout, self.seed = task, ranks, layout, seed

    def updates(self, central: Tensor, users: np.ndarray, step: int) -> Iterator[tuple[np.ndarray, LowRankUpdates]]:
        """Train users with about equally many examples together, those with few first."""
        addresses = Addresses(self.seed, "batches", step)
        seen = [self._rows(int(user), addresses) for user in users]
        counts = np.array([sum(map(len, rows)) for rows in seen])
        left = np.argsort(counts, kind="stable")
        while len(left):
            alike = counts[left] <= 2 * counts[left[0]]
            group, left = left[alike], left[~alike]
            yield users[group], self._train(central, [seen[place] for place in group], step)

    def _rows(self, user: int, addresses: Addresses) -> list[np.ndarray]:
        """The examples of each local step, drawn as `PlainTrainer` does."""
        draw, own, seen = addresses.at(user), self.task.rows(user), []
        for chosen in batches(self.task, self.ranks.local, user, draw):
            seen.append(own if chosen is None else own[chosen])
            if self.ranks.chain.draws is not None:
                self.ranks.chain.draws(draw)
        return seen

    @torch.no_grad()
    def _train(self, central: Tensor, seen: list[list[np.ndarray]], step: int) -> LowRankUpdates:
        """Take all local steps of some users, who see these examples, one batch after the other."""
        steps, most = max(map(len, seen)), max(len(rows) for own in seen for rows in own)
        places = np.empty((len(seen), steps, most), dtype=np.int64)
        shares = np.zeros(places.shape)  # 1 / examples of the batch; 0 where an example only fills the place
        for user, own in enumerate(seen):
            places[user] = own[0][0]
            for number, rows in enumerate(own):
                places[user, number, : len(rows)] = rows
                shares[user, number, : len(rows)] = 1.0 / len(rows)
        users, total, local = len(seen), steps * most, self.ranks.local
        inputs, labels = self.task.inputs(places.reshape(-1))
        inputs, labels = inputs.to(central).view(users, total, -1), labels.to(central.device).view(users, total, 1)
        weights = torch.from_numpy(shares.reshape(users, total, 1)).to(central)
        compiled = self._by_kernel(central, inputs, labels, shares, steps, step)
        if compiled is not None:
            return compiled
        layers = [_Layer(layer, self.layout.views(central), users, total) for layer in self.ranks.chain.layers]
        layers[0].inputs, layers[0].gram = inputs, inner_products(inputs, inputs)
        first = layers[0].central_output(inputs)
        losses, rate = torch.zeros(users, dtype=torch.float64), local.rate(step)
        for begin in range(0, total, most):
            end = begin + most
            outputs = [layers[0].forward(begin, end, first[:, begin:end])]
            for layer in layers[1:]:
                layer.see(outputs[-1], begin)
                outputs.append(layer.forward(begin, end, layer.central_output(outputs[-1])))
            share, right = weights[:, begin:end], labels[:, begin:end]
            log_shares = torch.log_softmax(outputs[-1], dim=-1)
            if begin == 0:
                losses = -(log_shares.gather(2, right) * share).double().sum(dim=(1, 2))
            gradient = log_shares.exp_()
            gradient.scatter_add_(2, right, gradient.new_full((1, 1, 1), -1.0).expand(right.shape)).mul_(share)
            _step(layers, _backward(layers, outputs, gradient, begin), begin, share.sum(dim=1), local, rate)
        scale = 1.0 / rate if local.divide_by_learning_rate else 1.0
        factors = [(layer.gradients.mul_(scale), layer.inputs) for layer in layers]
        norms = _norms(self.layout, layers).cpu()
        return LowRankUpdates(self.layout, self.ranks.chain.layers, factors, norms, losses.cpu())

    def _by_kernel(
        self, central: Tensor, inputs: Tensor, labels: Tensor, shares: np.ndarray, steps: int, step: int
    ) -> LowRankUpdates | None:
        """The same by compiled code, for plain steps of a small model; none where it does not apply, or is not here."""
        made, local, chain = kernel("low_rank"), self.ranks.local, self.ranks.chain.layers
        named = self.layout.views(central)
        weights = [named[layer.weight] for layer in chain]
        biases = [None if layer.bias is None else named[layer.bias] for layer in chain]
        widths = np.array([weights[0].shape[1], *(weight.shape[0] for weight in weights)], dtype=np.int64)
        small = sum(weight.numel() for weight in weights[1:]) <= _SMALL
        known = all(layer.activation in ("none", "relu") for layer in chain)
        plain = not local.proximal and local.gradient_clip is None
        floats = (central.dtype, labels.dtype, central.device.type) == (torch.float32, torch.int64, "cpu")
        if made is None or not (small and known and plain and floats):
            return None
        classes = labels.reshape(-1).numpy()
        if classes.min() < 0 or classes.max() >= widths[-1]:
            return None  # torch says what is wrong
        (users, total, _), rate = inputs.shape, local.rate(step)
        first = product(inputs, weights[0], biases[0]).contiguous()
        seen = [inputs.contiguous(), *(inputs.new_empty(users, total, int(wide)) for wide in widths[1:-1])]
        gradients = [inputs.new_empty(users, total, int(out)) for out in widths[1:]]
        norms, losses = np.empty((users, len(chain), 2)), np.empty(users)
        where = [
            np.array([0 if each is None else each.data_ptr() for each in some], dtype=np.uint64)
            for some in (weights, biases, seen, gradients)
        ]
        relu = np.array([layer.activation == "relu" for layer in chain])
        shares = shares.reshape(-1).astype(np.float32)
        made.functions.low_rank_part(
            c_long(users), c_long(steps), c_long(total // steps), c_long(len(chain)), address(widths), address(relu),
            address(where[0]), address(where[1]), address(first), address(classes), address(shares), c_float(rate),
            c_float(1.0 / rate if local.divide_by_learning_rate else 1.0), address(where[2]), address(where[3]),
            address(norms), address(losses),
        )  # fmt: skip
        column = {layer.weight: norms[:, place, 0] for place, layer in enumerate(chain)}
        column |= {layer.bias: norms[:, place, 1] for place, layer in enumerate(chain) if layer.bias is not None}
        found = torch.from_numpy(np.stack([column[name] for name in self.layout.names], axis=1))
        factors = list(zip(gradients, seen, strict=True))
        return LowRankUpdates(self.layout, chain, factors, found, torch.from_numpy(losses))


class _Layer:
    """One layer of all users: the central tensors, and the factors as far as the steps have come."""

    def __init__(self, layer: Affine, central: Mapping[str, Tensor], users: int, rows: int) -> None:
        self.layer, self.weight = layer, central[layer.weight]
        self.bias = None if layer.bias is None else central[layer.bias]
        out, wide = self.weight.shape
        self.inputs = self.weight.new_empty(users, rows, wide)  # A
        self.gradients = self.weight.new_zeros(users, rows, out)  # G
        self.gram = self.weight.new_zeros(users, rows, rows, dtype=torch.float64)  # A A'

    def see(self, inputs: Tensor, begin: int) -> None:
        """Take in the inputs of the rows from `begin` on."""
        end = begin + inputs.shape[1]
        self.inputs[:, begin:end] = inputs
        products = inner_products(inputs, self.inputs[:, :end])
        self.gram[:, begin:end, :end] = products
        self.gram[:, :begin, begin:end] = products[:, :, :begin].transpose(1, 2)

    def forward(self, begin: int, end: int, central: Tensor) -> Tensor:
        """Outputs of these rows, where `central` are those of the central model before the activation."""
        if begin:
            kernel = self.gram[:, begin:end, :begin].to(central.dtype)
            kernel = kernel if self.bias is None else kernel + 1.0
            central = torch.baddbmm(central, kernel, self.gradients[:, :begin], alpha=-1.0)
        return activate(self.layer.activation, central)

    def central_output(self, inputs: Tensor) -> Tensor:
        return product(inputs, self.weight, self.bias)

    def backward(self, gradient: Tensor, begin: int) -> Tensor:
        """From the gradient at this layer's output to the one at its input."""
        back = gradient @ self.weight
        if not begin:
            return back
        products = torch.bmm(gradient, self.gradients[:, :begin].transpose(1, 2))
        return torch.baddbmm(back, products, self.inputs[:, :begin], alpha=-1.0)

    def squares(self, coefficients: Tensor) -> Tensor:
        """The squared norm of coefficients' A over weight and bias of each user; rounding is not bounded here."""
        rows = coefficients.shape[1]
        products = torch.bmm(coefficients, coefficients.transpose(1, 2))
        found = (products * self.gram[:, :rows, :rows].to(products.dtype)).sum(dim=(1, 2))
        return found if self.bias is None else found + coefficients.sum(dim=1).square().sum(dim=1)


def _backward(layers: list[_Layer], outputs: list[Tensor], gradient: Tensor, begin: int) -> list[Tensor]:
    """The gradient at the output of every layer, before its activation."""
    gradients = [gradient]
    for index in range(len(layers) - 1, 0, -1):
        gradient, below = layers[index].backward(gradient, begin), outputs[index - 1]
        if layers[index - 1].layer.activation == "relu":
            gradient.mul_(below > 0)
        elif layers[index - 1].layer.activation == "tanh":
            gradient.mul_(1.0 - below.square())
        gradients.append(gradient)
    return gradients[::-1]


def _step(
    layers: list[_Layer], gradients: list[Tensor], begin: int, active: Tensor, local: LocalTraining, rate: float
) -> None:
    """theta -= eta c (gradient + mu (theta - theta_0)), for those users who have a batch left."""
    shrink = torch.ones_like(active)[:, :, None]  # (users, 1, 1)
    if local.gradient_clip is not None:
        squares = active.new_zeros(len(active))
        for layer, gradient in zip(layers, gradients, strict=True):
            past = layer.gradients[:, :begin] * -local.proximal
            squares += layer.squares(torch.cat([past, gradient], dim=1))
        lengths = squares.clamp(min=0.0).sqrt().clamp(min=1e-30)
        shrink = torch.clamp(local.gradient_clip / lengths, max=1.0)[:, None, None]
    for layer, gradient in zip(layers, gradients, strict=True):
        if local.proximal and begin:
            layer.gradients[:, :begin] *= 1.0 - rate * local.proximal * shrink * (active > 0)[:, :, None]
        layer.gradients[:, begin : begin + gradient.shape[1]] = gradient.mul_(rate * shrink)


@dataclass
class LowRankUpdates:
    """Updates of many users: of layer l and user k, delta_W = G_lk' A_lk and delta_b = G_lk' 1."""

    layout: Layout
    chain: tuple[Affine, ...]
    factors: list[tuple[Tensor, Tensor]]  # of each layer: G (users, rows, out) and A (users, rows, wide)
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        total, column = self.layout.views(into), {name: i for i, name in enumerate(self.layout.names)}
        factors = factors.to(into.device)
        used = (factors != 0).any(dim=1)
        everybody, factors = bool(used.all()), factors[used]
        for layer, (gradients, inputs) in zip(self.chain, self.factors, strict=True):
            if not everybody:  # 0 times a value that is not finite would not be zero
                gradients, inputs = gradients[used], inputs[used]
            if layer.bias is not None:
                summed = gradients.sum(dim=1).double() * factors[:, column[layer.bias], None]
                total[layer.bias].add_(summed.sum(dim=0).to(into.dtype))
            factor = factors[:, column[layer.weight], None, None]
            wide = bool((factor.abs() > LARGE).any() | ((factor.abs() < 1 / LARGE) & (factor != 0)).any())
            kind = torch.float64 if wide else gradients.dtype  # where float32 would not hold the factor well
            scaled = (gradients.to(kind) * factor.to(kind)).to(gradients.dtype)
            add_product(scaled.flatten(0, 1), inputs.flatten(0, 1), total[layer.weight])


def inner_products(one: Tensor, other: Tensor) -> Tensor:
    """Of each user, all inner products of the rows of one with the rows of the other, in double precision.

    Float32 multiplies and adds up `_CHUNK` numbers at a time, which is several times faster than double precision
    throughout; so an entry is off by at most `_CHUNK` 2^-24 times the lengths of its two rows.
    """  # (users, p, wide), (users, q, wide) -> (users, p, q)
    if one.dtype == torch.float64 or one.shape[2] <= _CHUNK:
        return torch.bmm(one, other.transpose(1, 2)).double()
    pairs = zip(torch.split(one, _CHUNK, dim=2), torch.split(other, _CHUNK, dim=2), strict=True)
    return torch.stack([torch.bmm(a, b.transpose(1, 2)) for a, b in pairs]).sum(dim=0, dtype=torch.float64)


def _norms(layout: Layout, layers: list[_Layer]) -> Tensor:
    """Norms of all users' tensors, never smaller than those of what `weighted_sum` adds."""  # (users, tensors)
    columns: dict[str, Tensor] = {}
    for each in layers:
        eps = torch.finfo(each.gradients.dtype).eps
        # In units of the largest entry: squares of tiny float32 numbers would be zero, and the norm too small.
        size = each.gradients.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(each.gradients.dtype).tiny)
        unit, scale = each.gradients / size, size[:, 0, 0].double()
        products, gram, rows = inner_products(unit, unit), each.gram, each.gram.shape[1]
        length = torch.diagonal(products, dim1=1, dim2=2).sqrt()  # (users, rows) of G's rows
        reach = torch.diagonal(gram, dim1=1, dim2=2).sqrt()  # of A's rows
        # What rounding can have taken away from the products: twice the usual bound, as eps is 2^-23.
        off = _CHUNK * eps
        doubt = off * (products.abs() * _outer(reach) + gram.abs() * _outer(length) + off * _outer(reach * length))
        squared = (products * gram + doubt).sum(dim=(1, 2)).clamp(min=0.0)
        columns[each.layer.weight] = scale * (squared.sqrt() + (rows + 4) * eps * (length * reach).sum(dim=1))
        if each.layer.bias is not None:
            of_bias = each.gradients.double().sum(dim=1).norm(dim=1)
            columns[each.layer.bias] = of_bias + scale * (rows + 4) * eps * length.sum(dim=1)
    return torch.stack([columns[name] for name in layout.names], dim=1)


def _outer(values: Tensor) -> Tensor:
    return values[:, :, None] * values[:, None, :]
