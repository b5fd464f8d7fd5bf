"""The updates of many users at once, where each takes one step of a CTC head on kept states.

The gradient of a linear layer's weight is the sum over frames of an outer product, the gradient at its output with its
input. So one pass over the frames of all users gives the gradients at the outputs, by CTC and autograd, and one product
of matrices for each user and layer gives that user's update: nobody's weights are ever copied. This is exact;
`PlainTrainer` is the reference.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout
from confide.federated.products import outer_products
from confide.speech.pretrained import BIAS, head_input, hidden_units, logits_of, scaled

_TOGETHER = 32  # users of a part: their states are in the cache, and workers have parts to share
_LARGE = 1e30  # a factor from which on single precision does not do


class _Kept(threading.local):
    """Memory for the scaled states of a part: with new memory for every part, pages would be most of the time."""

    held = torch.empty(0)

    def rows(self, count: int, like: Tensor) -> Tensor:
        """So many rows like those of a tensor, with anything in them, until the next call."""
        wide = like.shape[-1]
        if self.held.dtype != like.dtype or self.held.numel() < count * wide:
            self.held = like.new_empty(count * wide)
        return self.held[: count * wide].view(count, wide)


_KEPT = _Kept()


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
    layout = Layout.of(parameters)
    counts = torch.tensor(utterances)
    shares = torch.repeat_interleave(1.0 / counts, counts)  # of an utterance in the mean of its user
    lengths = [len(each) for each in states]
    x = _KEPT.rows(sum(lengths), states[0])  # (frames, width)
    for put, own in zip(torch.split(x, lengths), states, strict=True):
        put.copy_(scaled(own))
    layers, losses = _output_gradients(parameters, x, lengths, targets, shares)
    frames = [int(own.sum()) for own in torch.split(torch.tensor(lengths), list(utterances))]
    gradients = torch.empty(len(counts), layout.size, dtype=x.dtype)
    views = [layout.views(row) for row in gradients]
    for name, gradient, given in layers:
        for view, own, put in zip(views, torch.split(gradient, frames), torch.split(given, frames), strict=True):
            view[f"{name}.weight"].copy_(outer_products(own, put))
            torch.mul(own.sum(dim=0), BIAS, out=view[f"{name}.bias"])
    norms = torch.stack(
        [torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in torch.split(gradients, layout.sizes, dim=1)],
        1,
    )
    scale = torch.full((len(counts),), 1.0 if local.divide_by_learning_rate else learning_rate, dtype=torch.float64)
    if local.gradient_clip is not None:
        scale *= (local.gradient_clip / torch.linalg.vector_norm(norms, dim=1).clamp(min=1e-30)).clamp(max=1.0)
    users = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return HeadUpdates(
        gradients, scale, layout, norms * scale[:, None], torch.zeros(len(counts)).index_add(0, users, losses).double()
    )


def _output_gradients(
    parameters: Mapping[str, Tensor], x: Tensor, lengths: list[int], targets: Sequence[Tensor], shares: Tensor
) -> tuple[list[tuple[str, Tensor, Tensor]], Tensor]:
    """Of each layer: its name, the gradients at its outputs and its inputs (frames, ...); and each utterance's loss."""
    outputs: list[tuple[str, Tensor, Tensor]] = []
    with torch.enable_grad():
        if "hidden.weight" in parameters:
            units = hidden_units(parameters, x).detach().requires_grad_()
            outputs.append(("hidden", units, x))
            x = head_input(units)
        logits = logits_of(parameters, x)
        # The padded logits are a leaf: the gradient through `pad_sequence` would copy them once for each utterance.
        padded = pad_sequence(list(torch.split(logits.detach(), lengths))).requires_grad_()  # (frames, utterances, -)
        sizes = torch.tensor([len(target) for target in targets])
        losses = shares * functional.ctc_loss(
            functional.log_softmax(padded, dim=-1), torch.cat(list(targets)), torch.tensor(lengths), sizes,
            reduction="none", zero_infinity=True,
        )  # fmt: skip
        (found,) = torch.autograd.grad(losses.sum(), [padded])
        at_logits = torch.cat([found[:length, number] for number, length in enumerate(lengths)])
        gradients = list(torch.autograd.grad(logits, [units for _, units, _ in outputs], at_logits)) if outputs else []
    outputs.append(("head", logits, x.detach()))
    gradients.append(at_logits)
    layers = [(name, gradient, given) for gradient, (name, _, given) in zip(gradients, outputs, strict=True)]
    return layers, losses.detach()
