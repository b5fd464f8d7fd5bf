"""The updates of many users at once, where each takes one step of a CTC head on kept states.

The gradient of a linear layer's weight is the sum over frames of an outer product, the gradient at its output with its
input. So one pass over the frames of all users gives the gradients at the outputs, by CTC and autograd, and one product
of matrices for each user and layer gives that user's update: nobody's weights are ever copied. This is exact;
`PlainTrainer` is the reference.

A linear head goes through our own C++ where the machine can have it (`kernels/head.cpp`), one user after the other
while the states are in the cache. It says whom it cannot be relied on for; they go the way of arrays with all others
that it does not know: heads with a hidden layer, states whose mean has to come off first, and other numbers than it
was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float, c_long
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.federated.buffers import Buffers
from confide.federated.local import LocalTraining
from confide.federated.parameters import LARGE, Layout
from confide.federated.products import outer_products, product
from confide.kernels import address, kernel
from confide.speech import ctc
from confide.speech.pretrained import BIAS, NORM_EPS, head_input, logits_of

KERNELS = ("head",)
_TOGETHER = 80  # users of a part at most: what a part costs beside them is spread, and workers have parts to share
_REMEMBERED = 20_000  # users: whoever comes first stays
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
            kind = torch.float64 if bool((factor.abs() > LARGE).any()) else rows.dtype
            total.add_(torch.mv(rows.T.to(kind), factor.to(kind)).to(total.dtype))


def users_together(local: LocalTraining, most: int) -> int:
    """How many users to give at a time, where nobody has more than `most` utterances; 0 if these are not one step."""
    whole = local.batch_seconds is None and (local.batch_size or most) >= most
    return _TOGETHER if whole and 1 in (local.steps, local.epochs) else 0


class Scales:
    """What makes states `scaled`, remembered for each user: states do not change, and every round needs it.

    To multiply logits and their gradients by it takes less than to multiply the states, which are wider. So does
    taking the mean off the weights before states meet them, and off the weights' gradients, and not off the states.
    Only of states that are little else than their mean it has to come off first, or they would drown in rounding.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def of(self, user: int, states: Sequence[Tensor]) -> Tensor:
        """Of each frame of all of this user's utterances, what to take off first (mostly 0), and its scale."""
        found = self._held.get(user)
        if found is None:
            found = torch.cat([_off_and_scale(own) for own in states])
            if len(self._held) < _REMEMBERED:
                self._held[user] = found
        return found


@np.errstate(over="ignore", invalid="ignore")
def _off_and_scale(states: Tensor) -> Tensor:
    off = states.mean(dim=1, keepdim=True)
    centred = (states - off).numpy()
    squares = torch.from_numpy(np.vecdot(centred, centred))[:, None]
    off.masked_fill_(len(states[0]) * off.square() <= squares, 0.0)
    return torch.cat([off, squares.add_(len(states[0]) * NORM_EPS).rsqrt_()], dim=1)  # (frames, 2)


def head_updates(
    parameters: Mapping[str, Tensor],
    states: Sequence[Tensor],  # of each utterance (frames, width)
    scales: Sequence[Tensor],  # of each user, what `Scales` remembers
    targets: Sequence[Tensor],  # of each utterance (tokens,)
    utterances: Sequence[int],  # how many each user has; they follow each other
    local: LocalTraining,
    learning_rate: float,
) -> HeadUpdates:
    """One step of each user on all of its utterances."""
    layout, found = Layout.of(parameters), _by_kernel(parameters, states, scales, targets, utterances)
    if found is None:
        found = _by_arrays(parameters, states, scales, targets, utterances)
    elif not found.safe.all():
        left = np.flatnonzero(~found.safe).tolist()
        owned = np.flatnonzero(np.isin(np.repeat(np.arange(len(utterances)), utterances), left)).tolist()
        others = _by_arrays(
            parameters, [states[place] for place in owned], [scales[user] for user in left],
            [targets[place] for place in owned], [utterances[user] for user in left],
        )  # fmt: skip
        for mine, theirs in (
            (found.gradients, others.gradients), (found.norms, others.norms), (found.losses, others.losses)
        ):  # fmt: skip
            mine[left] = theirs
    gradients, norms = found.gradients, found.norms
    rates = torch.full((len(norms),), 1.0 if local.divide_by_learning_rate else learning_rate, dtype=torch.float64)
    if local.gradient_clip is not None:
        rates *= (local.gradient_clip / torch.linalg.vector_norm(norms, dim=1).clamp(min=1e-30)).clamp(max=1.0)
    return HeadUpdates(gradients, rates, layout, norms * rates[:, None], found.losses)


@dataclass
class _Gradients:
    """Of each user the gradient of its mean loss, the norms of the gradient's tensors, and the loss."""

    gradients: Tensor  # (users, parameters)
    norms: Tensor  # (users, tensors) float64
    losses: Tensor  # (users,) float64
    safe: np.ndarray  # (users,) whether all of this can be relied on


def _by_kernel(
    parameters: Mapping[str, Tensor], states: Sequence[Tensor], scales: Sequence[Tensor], targets: Sequence[Tensor],
    utterances: Sequence[int],
) -> _Gradients | None:  # fmt: skip
    """By compiled code; none where it does not apply to these parameters, states or this machine."""
    made = kernel("head")
    if made is None or tuple(parameters) != ("head.weight", "head.bias"):
        return None
    weight, bias = parameters["head.weight"], parameters["head.bias"].contiguous()
    tokens, width = weight.shape
    floats = all(own.dtype is torch.float32 for own in (weight, bias, *states, *scales))
    fits = width % 16 == 0 and floats and all(own.dtype is torch.int64 for own in targets)
    if not fits or not all(own.is_contiguous() for own in (*states, *scales, *targets)):
        return None
    users, weight = len(utterances), weight - weight.mean(dim=1, keepdim=True)
    found = _Gradients(
        weight.new_empty(users, tokens * (width + 1)), torch.empty(users, 2, dtype=torch.float64),
        torch.empty(users, dtype=torch.float64), np.empty(users, dtype=bool),
    )  # fmt: skip
    counts, lengths, sizes = (
        np.array(each, dtype=np.int64)
        for each in (utterances, [own.shape[0] for own in states], [own.shape[0] for own in targets])
    )
    where = [np.array([own.data_ptr() for own in some], dtype=np.uint64) for some in (states, targets, scales)]
    made.functions.head_part(
        c_long(users), address(counts), address(where[0]), address(lengths), address(where[1]), address(sizes),
        address(where[2]), address(weight), address(bias), c_float(BIAS), c_long(width), c_long(tokens),
        address(found.gradients), address(found.norms), address(found.losses), address(found.safe),
    )  # fmt: skip
    return found


def _by_arrays(
    parameters: Mapping[str, Tensor], states: Sequence[Tensor], scales: Sequence[Tensor], targets: Sequence[Tensor],
    utterances: Sequence[int],
) -> _Gradients:  # fmt: skip
    """By operations on the frames of all users."""
    layout, counts = Layout.of(parameters), np.array(utterances)
    users = np.repeat(np.arange(len(counts)), counts)  # of each utterance
    lengths = np.array([own.shape[0] for own in states])
    frames = np.bincount(users, lengths, len(counts)).astype(np.int64).tolist()
    x = torch.cat(list(states), out=_BUFFERS.take("states", (int(lengths.sum()), states[0].shape[1]), states[0].dtype))
    off, scale = torch.split(torch.cat(list(scales)), 1, dim=1)
    if off.any():
        x.sub_(off)
    layers, losses = _output_gradients(parameters, x, scale, lengths, targets, 1.0 / counts[users])
    gradients = x.new_empty(len(counts), layout.size)
    held = dict(zip(layout.names, torch.split(gradients, layout.sizes, dim=1), strict=True))
    for name, gradient, given, scaled in layers:
        weights = held[f"{name}.weight"].view(len(counts), gradient.shape[1], given.shape[1])
        pairs = zip(torch.split(scaled, frames), torch.split(given, frames), strict=True)
        for into, pair in zip(weights.unbind(), pairs, strict=True):
            into.copy_(outer_products(*pair))
        if given is x:
            weights.sub_(weights.mean(dim=2, keepdim=True))
        for into, own in zip(held[f"{name}.bias"].unbind(), torch.split(gradient, frames), strict=True):
            torch.sum(own, dim=0, out=into)
        held[f"{name}.bias"].mul_(BIAS)
    norms = torch.stack(
        [torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in torch.split(gradients, layout.sizes, dim=1)],
        1,
    )
    own_losses = torch.from_numpy(np.bincount(users, losses, len(counts)))
    return _Gradients(gradients, norms, own_losses, np.ones(len(counts), dtype=bool))


def _output_gradients(
    parameters: Mapping[str, Tensor], x: Tensor, scale: Tensor, lengths: np.ndarray, targets: Sequence[Tensor],
    shares: np.ndarray,
) -> tuple[list[tuple[str, Tensor, Tensor, Tensor]], np.ndarray]:  # fmt: skip
    """Of each layer: its name, the gradients at its outputs, its inputs, and the gradients to multiply inputs with.

    And each utterance's loss; `shares` are those of utterances in the mean of their user. Inputs that are states still
    have their mean, which counts for nothing.
    """
    first = "hidden" if "hidden.weight" in parameters else "head"
    weight, bias = parameters[f"{first}.weight"], parameters[f"{first}.bias"]
    outputs = torch.addcmul(BIAS * bias, product(x, weight - weight.mean(dim=1, keepdim=True)), scale)
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
