"""Greedy CTC decoding (PFL-ASR section 4, "Evaluation": greedy, no language model).

Take the best token of every frame, merge repeats, drop blanks. The frames of a run say when its token was heard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Run(NamedTuple):
    """A token and the frames of the output in which it was heard."""

    token: int
    first: int
    last: int  # included


class Word(NamedTuple):
    """A word, the frames of the output in which it was heard, and how sure the model is of its letters."""

    text: str
    first: int
    last: int
    confidence: float  # 0 to 1


def greedy(logits: Tensor, lengths: Tensor, blank: int = 0) -> list[list[int]]:
    """Token ids of each utterance."""  # logits (batch, frames, tokens), lengths (batch,)
    path = logits.argmax(dim=-1).cpu().numpy()
    return [[run.token for run in runs] for runs in merge_repeats(path, lengths.cpu().numpy(), blank)]


def merge_repeats(path: np.ndarray, lengths: np.ndarray, blank: int = 0) -> list[list[Run]]:
    """The runs of equal tokens in each utterance, without blanks."""  # path (batch, frames) token ids
    batch, frames = path.shape
    path = np.where(np.arange(frames) < lengths[:, None], path, blank)
    edge = np.full((batch, 1), blank, dtype=path.dtype)
    starts = (path != blank) & (path != np.concatenate([edge, path[:, :-1]], axis=1))
    ends = (path != blank) & (path != np.concatenate([path[:, 1:], edge], axis=1))
    runs = np.stack([path[starts], np.nonzero(starts)[1], np.nonzero(ends)[1]], axis=1)  # (runs, 3)
    return [[Run(*run) for run in own.tolist()] for own in np.split(runs, np.cumsum(starts.sum(axis=1))[:-1])]


def split_words(runs: Sequence[Run], boundary: int) -> list[list[Run]]:
    """The runs of each word: what lies between boundary tokens."""
    return [list(own) for edge, own in groupby(runs, key=lambda run: run.token == boundary) if not edge]


def greedy_words(
    logits: np.ndarray, to_text: Callable[[Sequence[int]], str], boundary: int, blank: int = 0
) -> list[Word]:
    """The words of a single utterance."""  # logits (frames, tokens)
    (runs,) = merge_repeats(logits.argmax(axis=-1)[None], np.array([len(logits)]), blank)
    spelt = ((to_text([run.token for run in own]).strip(), own) for own in split_words(runs, boundary))
    return [Word(text, own[0].first, own[-1].last, confidence(logits, own)) for text, own in spelt if text]


def confidence(logits: np.ndarray, runs: Sequence[Run]) -> float:
    """The geometric mean of the probabilities of a word's tokens, each where it is largest.

    It orders the words of one model by how far they can be trusted; it is no probability that a word is right.
    """
    best = []
    for run in runs:
        rows = logits[run.first : run.last + 1]  # (frames, tokens)
        best.append((rows[:, run.token] - np.logaddexp.reduce(rows, axis=1)).max())
    return float(np.exp(np.mean(best, dtype=np.float64)))
