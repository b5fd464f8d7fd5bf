"""CTC of many utterances at once (Graves et al. 2006): each utterance's loss, and its gradient at the logits.

Torch goes forward and back through one utterance after the other, in logarithms. Here a frame of all utterances is a
handful of operations on arrays, and sums are of probabilities, in double precision. With y the frame's probabilities
of the states (a blank before, between and after the labels), c what comes in from the frame before:

    c_t(s) = a_t-1(s) + a_t-1(s-1) + skip(s) a_t-1(s-2)        a_t = y_t c_t

The way back is the way forward over the reversed utterance, so both are columns of the same arrays. Where an utterance
ends before others do, it stays in its last state with y = 1; that is where its way back begins. Then, at every frame,

    Z = sum_s c_t(s) y_t(s) b_t(s) = p(target)        d loss / d logits = softmax - sum of the shares c y b / Z

Every frame's y is divided by its largest entry. Every few frames a is divided by its largest entry too, and what is
below `_LEAST` by then is set to it; what double precision has lost since the last time is less. So from there on a can
only be too large. What this adds to Z is at most `_LEAST` times b for each state, and b is at most 3^8 in its units, as
it is divided as often. That is nothing wherever Z, in the units of its frame, is above `_SAFE`. Utterances where it is
not are left to torch, which is the reference for all (`plain`): the target does not fit into the frames, or the model
all but rules it out, or numbers are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from confide.federated.buffers import Buffers

_LEAST, _SAFE = 1e-300, 1e-200
_RESCALED_EVERY = 8  # frames: a state has at most three ways in, and 3^8 is no danger
_CELLS = 1 << 19  # frames x states x utterances, both ways: 4 MiB, about what a core's cache holds
_BUFFERS = Buffers()


def losses_and_gradients(
    logits: Tensor, lengths: Sequence[int] | np.ndarray, targets: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Losses (utterances,), and their gradients, both float32; logits are (frames of all utterances, tokens)."""
    log_probs = torch.log_softmax(logits.detach().float(), dim=-1)
    gradients, losses = log_probs.exp(), log_probs.new_zeros(len(lengths))
    frames, sizes = (np.array(each, dtype=np.int64) for each in (lengths, [own.shape[0] for own in targets]))
    starts, labels = frames.cumsum() - frames, _labels(targets, sizes)
    for chosen in _cut(frames, sizes):
        some = starts[chosen], frames[chosen], labels[: sizes[chosen].max() + 1, chosen], sizes[chosen]
        found, safe = _take_shares(log_probs, gradients, *some)
        losses[torch.from_numpy(chosen)] = torch.from_numpy(found).float()
        for number in chosen[~safe].tolist():
            own = slice(int(starts[number]), int(starts[number] + frames[number]))
            loss, gradient = plain(logits[own], targets[number])
            losses[number], gradients[own] = loss.float(), gradient.float()
    return losses, gradients


def plain(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same of one utterance by torch, in double precision. A target too long for its frames has zeros."""
    with torch.enable_grad():
        leaf = logits.detach().double().requires_grad_()
        sizes = torch.tensor([len(leaf)]), torch.tensor([len(target)])
        log_probs = functional.log_softmax(leaf, dim=-1)[:, None]
        loss = functional.ctc_loss(log_probs, target[None], *sizes, reduction="sum", zero_infinity=True)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def losses(logits: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    """Of padded utterances (utterances, frames, tokens), each one's loss; it can be differentiated."""
    found: Tensor = _Losses.apply(logits, lengths, targets, sizes)  # type: ignore[no-untyped-call]
    return found


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
        frames = lengths.tolist()
        own = [target[:size] for target, size in zip(targets, sizes.tolist(), strict=True)]
        flat = torch.cat([each[:length] for each, length in zip(logits.detach(), frames, strict=True)])
        found, gradients = losses_and_gradients(flat, frames, own)
        padded = pad_sequence(list(torch.split(gradients, frames)), batch_first=True)
        missing = logits.shape[1] - padded.shape[1]
        ctx.save_for_backward(functional.pad(padded, (0, 0, 0, missing)).to(logits.dtype))
        return found

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0][:, None, None], None, None, None


def _cut(lengths: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Utterances that go together, short ones first. Those without a frame have no loss."""
    order = np.lexsort((sizes, lengths))
    order = order[lengths[order] > 0]
    begin = most = 0
    for end, number in enumerate(order):
        most = max(most, int(sizes[number]))
        if end > begin and (end - begin + 1) * lengths[number] * 2 * (2 * most + 1) > _CELLS:
            yield np.sort(order[begin:end])
            begin, most = end, int(sizes[number])
    if len(order):
        yield np.sort(order[begin:])


def _labels(targets: Sequence[Tensor], sizes: np.ndarray) -> np.ndarray:
    """The blank and then the labels of each target, blanks where a shorter one has none."""  # (1 + labels, utterances)
    labels = np.zeros((sizes.max(initial=0) + 1, len(sizes)), dtype=np.int64)
    places = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    labels[places + 1, np.repeat(np.arange(len(sizes)), sizes)] = torch.cat(list(targets)).numpy()
    return labels


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _take_shares(
    log_probs: Tensor, gradients: Tensor, starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray,
    sizes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Take some utterances' shares off the gradients; returns their losses, and which of them can be relied on."""
    times, states, count = np.arange(lengths.max())[:, None], np.arange(2 * len(labels) - 1)[:, None], len(sizes)
    cells, entries = (len(times), len(states), count), (len(times), *labels.shape)
    rows = starts + np.minimum(times, lengths - 1)  # (times, utterances)
    places = np.add((rows * log_probs.shape[1])[:, None], labels, out=_array("places", entries, torch.int64))
    found = log_probs.numpy().reshape(-1).take(places, out=_array("found", entries, torch.float32), mode="clip")
    most = found.max(axis=1)
    entry = np.subtract(found, most[:, None], out=_array("entry", entries))
    np.exp(entry, out=entry)
    # The way back comes as further columns, with times and states turned around.
    both = _array("both", (*cells[:2], 2 * count))
    y = both[:, :, :count]
    y[:, ::2], y[:, 1::2] = entry[:, :1], entry[:, 1:]
    last, over = states == 2 * sizes, times >= lengths
    if sizes.min() < sizes.max():
        y[:, states > 2 * sizes] = 0.0
    if over.any():
        y[:], most = np.where(over[:, None], last, y), np.where(over, 0.0, most)
    both[:, :, count:] = y[::-1, ::-1]
    skip = np.zeros((len(states) + 2, count))
    skip[3:-2:2] = labels[2:] != labels[1:-1]
    skips = np.concatenate([skip[:-2], skip[:1:-1]], axis=1)
    came, unit = _forward(both, skips, np.concatenate([states == 0 * sizes, last[::-1]], axis=1))
    shares = np.multiply(y, came[:, :, :count], out=_array("shares", cells))
    shares *= came[::-1, ::-1, count:]
    np.sum(shares[:, ::2], axis=1, out=entry[:, 0])  # all blanks are one entry
    entry[:, 1:] = shares[:, 1::2]
    whole = entry.sum(axis=1)  # Z, (times, utterances)
    np.multiply(entry, np.where(over, 0.0, -1.0 / whole)[:, None], out=found)
    gradients.view(-1).scatter_add_(0, torch.from_numpy(places.reshape(-1)), torch.from_numpy(found.reshape(-1)))
    losses = -(most.sum(axis=0, dtype=np.float64) + unit[:count] + np.log(whole[-1]))
    return losses, (whole > _SAFE).all(axis=0)


def _forward(y: np.ndarray, skip: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c of every time (times, states, columns), and the logarithm of what the last one was divided by (columns,)."""
    came, unit = _array("came", y.shape), np.zeros(y.shape[2])
    a = np.concatenate([np.zeros((2, len(unit))), start])  # two states come first that nothing reaches
    now, jumped = a[2:], np.empty_like(skip)
    for time, (c, own) in enumerate(zip(came, y, strict=True), start=1):
        np.add(now, a[1:-1], out=c)
        np.multiply(a[:-2], skip, out=jumped)
        np.add(c, jumped, out=c)
        np.multiply(c, own, out=now)
        if time % _RESCALED_EVERY == 0 and time < len(y):
            np.maximum(now, _LEAST, out=now)
            size = now.max(axis=0)
            np.divide(now, size, out=now)
            unit += np.log(size)
    return came, unit


def _array(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> np.ndarray:
    found: np.ndarray = _BUFFERS.take(name, shape, dtype).numpy()
    return found
