"""Utterances of several users in one pass over the recogniser (see `federated.one_pass`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from confide.federated.local import LocalTraining
from confide.federated.one_pass import Pass
from confide.federated.task import Task
from confide.speech import ctc
from confide.speech.model import cape_shifts, ctc_losses
from confide.speech.network import Network, Whole

_PASS_SECONDS = 16.0  # of padded audio: beyond that a pass leaves the cache, and nothing gets faster
_PART_SECONDS = 32.0  # as fast as it gets, and a small cohort still has parts for several workers
_LOOKED_AT = 256  # users, for the typical one


def users_at_once(task: Task, network: Network, local: LocalTraining) -> int:
    """How many users to train together; 0 where one user fills a pass, or where masks are drawn batch by batch."""
    if not network.one_pass:
        return 0
    held = [task.seconds(user) for user in range(min(_LOOKED_AT, len(task.examples)))]
    amounts = [_seconds_of_a_step(own, local) for own in held if own is not None and len(own)]
    typical = float(np.median(amounts)) if amounts else np.inf
    return int(_PART_SECONDS / typical) if typical <= _PASS_SECONDS / 2 else 0


def _seconds_of_a_step(seconds: np.ndarray, local: LocalTraining) -> float:
    if local.batch_seconds is not None:
        return min(float(seconds.sum()), local.batch_seconds)
    return float(seconds.mean()) * min(local.batch_size or len(seconds), len(seconds))


def passes(network: Network, batches: Sequence[tuple[Tensor, ...]]) -> Iterator[Pass]:
    """Sort the utterances of all batches by length, and cut them where a pass would be too long."""
    owners = [owner for owner, batch in enumerate(batches) for _ in batch[1]]
    rows = [row for batch in batches for row in range(len(batch[1]))]
    lengths = torch.cat([batch[1] for batch in batches])
    sizes = torch.cat([batch[3] for batch in batches])
    shifts = torch.cat([_shifts(network, batch) for batch in batches])
    frame = network.frame_seconds / network.front.stride
    for chosen in _cut(lengths.tolist(), frame):
        longest, most = max(1, int(lengths[chosen].max())), max(1, int(sizes[chosen].max()))
        features = torch.zeros(len(chosen), longest, batches[0][0].shape[2])
        targets = torch.zeros(len(chosen), most, dtype=batches[0][2].dtype)
        for place, number in enumerate(chosen):
            batch, row = batches[owners[number]], rows[number]
            frames, tokens = int(lengths[number]), int(sizes[number])
            features[place, :frames] = batch[0][row, :frames]
            targets[place, :tokens] = batch[2][row, :tokens]
        together = (features, lengths[chosen], targets, sizes[chosen], shifts[chosen])
        yield Pass(together, [owners[number] for number in chosen])


def losses(network: Network, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of each utterance of a pass."""  # (utterances,)
    features, lengths, targets, sizes, shifts = batch
    logits, out_lengths = network.forward(parameters, features, lengths, None, shifts)
    found = ctc.losses if logits.device.type == "cpu" else ctc_losses
    return found(logits, out_lengths, targets, sizes)


def _shifts(network: Network, batch: tuple[Tensor, ...]) -> Tensor:
    """What `forward` draws for a batch of one user when nothing is dropped."""
    if not isinstance(network, Whole):
        return torch.zeros(len(batch[1]))
    return cape_shifts(network.settings, len(batch[1]), torch.Generator().manual_seed(int(batch[4])))


def _cut(lengths: list[int], frame: float) -> Iterator[list[int]]:
    """Places of the utterances of each pass, short ones first, where a frame takes so many seconds."""
    chosen: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chosen and (len(chosen) + 1) * lengths[place] * frame > _PASS_SECONDS:
            yield chosen
            chosen = []
        chosen.append(place)
    yield chosen
