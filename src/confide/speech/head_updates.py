"""The updates of many users at once, where each takes one step of a CTC head on kept states.

The gradient of a linear layer's weight is the sum over frames of an outer product, the gradient at its output with its
input. So one pass over the frames of all users gives the gradients at the outputs, by CTC and autograd, and one product
of matrices for each user and layer gives that user's update: nobody's weights are ever copied. This is exact;
`PlainTrainer` is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.federated.buffers import Buffers
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout
from confide.federated.products import outer_products, product
from confide.speech import ctc
from confide.speech.pretrained import BIAS, NORM_EPS, head_input, logits_of

_TOGETHER = 32  # users of a part: their states are in the cache, and workers have parts to share
_LARGE = 1e30  # a factor from which on single precision does not do
_BUFFERS = Buffers()


@dataclass
class HeadUpdates:
    """The updates of some users: their gradients, one row each, and what each row is to be multiplied by."""

    gradients: Tensor  # (users, parameters)
    scales: Tensor  # (users,) float64
    layout: Layout
    norms: Tensor
    losses: Tensor

    def weighted_sum(self, factors: Tensor, into: Tensor) -> None:
        used = (factors != 0).any(dim=1)  # 0 times a value that is not finite would not be zero
        sizes, gradients = self.layout.sizes, self.gradients if bool(used.all()) else self.gradients[used]
        # One product in double precision: an update that single precision cannot hold is never written down.
        rows_factors = (factors[used] * self.scales[used, None]).unbind(dim=1)
        for rows, total, factor in zip(
            torch.split(gradients, sizes, dim=1), torch.split(into, sizes), rows_factors, strict=True
        ):
            # An update that is next to zero takes a factor, to be normalised, that single precision cannot hold either.
            kind = torch.float64 if bool((factor.abs() > _LARGE).any()) else rows.dtype
            total.add_(torch.mv(rows.T.to(kind), factor.to(kind)).to(total.dtype))


def users_together(local: LocalTraining, most: int) -> int:
    """How many users to give at a time, where nobody has more than `most` utterances; 0 if these are not one step."""
    whole = local.batch_seconds is None and (local.batch_size or most) >= most
    return _TOGETHER if whole and 1 in (local.steps, local.epochs) else 0


def head_updates(
    parameters: Mapping[str, Tensor],
    states: Sequence[Tensor],  # of each utterance (frames, width)
    targets: Sequence[Tensor],  # of each utterance (tokens,)
    utterances: Sequence[int],  # how many each user has; they follow each other
    local: LocalTraining,
    learning_rate: float,
) -> HeadUpdates:
    """One step of each user on all of its utterances."""
    layout, counts = Layout.of(parameters), np.array(utterances)
    users = np.repeat(np.arange(len(counts)), counts)  # of each utterance
    lengths = np.array([own.shape[0] for own in states])
    frames = np.bincount(users, lengths, len(counts)).astype(np.int64).tolist()
    x, scale = _centred(states, int(lengths.sum()))
    layers, losses = _output_gradients(parameters, x, scale, lengths, targets, 1.0 / counts[users])
    gradients = x.new_empty(len(counts), layout.size)
    held = dict(zip(layout.names, torch.split(gradients, layout.sizes, dim=1), strict=True))
    for name, gradient, given, scaled in layers:
        weights = held[f"{name}.weight"].view(len(counts), gradient.shape[1], given.shape[1])
        pairs = zip(torch.split(scaled, frames), torch.split(given, frames), strict=True)
        for into, pair in zip(weights.unbind(), pairs, strict=True):
            into.copy_(outer_products(*pair))
        for into, own in zip(held[f"{name}.bias"].unbind(), torch.split(gradient, frames), strict=True):
            torch.sum(own, dim=0, out=into)
        held[f"{name}.bias"].mul_(BIAS)
    norms = torch.stack(
        [torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in torch.split(gradients, layout.sizes, dim=1)],
        1,
    )
    rates = torch.full((len(counts),), 1.0 if local.divide_by_learning_rate else learning_rate, dtype=torch.float64)
    if local.gradient_clip is not None:
        rates *= (local.gradient_clip / torch.linalg.vector_norm(norms, dim=1).clamp(min=1e-30)).clamp(max=1.0)
    own_losses = torch.from_numpy(np.bincount(users, losses, len(counts)))
    return HeadUpdates(gradients, rates, layout, norms * rates[:, None], own_losses)


def _centred(states: Sequence[Tensor], frames: int) -> tuple[Tensor, Tensor]:
    """All states less their mean (frames, width), and what makes them `scaled` (frames, 1).

    To multiply logits and their gradients by it takes less than to multiply the states, which are wider.
    """
    wide, like = states[0].shape[1], states[0]
    x = torch.cat(list(states), out=_BUFFERS.take("states", (frames, wide), like.dtype))
    x.sub_(x.mean(dim=1, keepdim=True))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = torch.from_numpy(np.vecdot(x.numpy(), x.numpy()))[:, None]
    return x, squares.add_(wide * NORM_EPS).rsqrt_()


def _output_gradients(
    parameters: Mapping[str, Tensor], x: Tensor, scale: Tensor, lengths: np.ndarray, targets: Sequence[Tensor],
    shares: np.ndarray,
) -> tuple[list[tuple[str, Tensor, Tensor, Tensor]], np.ndarray]:  # fmt: skip
    """Of each layer: its name, the gradients at its outputs, its inputs, and the gradients to multiply inputs with.

    And each utterance's loss; `shares` are those of utterances in the mean of their user.
    """
    first = "hidden" if "hidden.weight" in parameters else "head"
    outputs = product(x, parameters[f"{first}.weight"]).mul_(scale).add_(parameters[f"{first}.bias"], alpha=BIAS)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        given = head_input(leaf) if first == "hidden" else leaf
        logits = logits_of(parameters, given) if first == "hidden" else leaf
    losses, found = ctc.losses_and_gradients(logits, lengths, targets)
    at_logits = found.to(x.dtype).mul_(torch.from_numpy(np.repeat(shares, lengths)).to(x.dtype)[:, None])
    weighted = losses.numpy() * shares
    if first == "head":
        return [("head", at_logits, x, at_logits * scale)], weighted
    (at_units,) = torch.autograd.grad(logits, leaf, at_logits)
    head = ("head", at_logits, given.detach(), at_logits)
    return [("hidden", at_units, x, at_units * scale), head], weighted
