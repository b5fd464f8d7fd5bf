"""Greedy CTC decoding (PFL-ASR section 4, "Evaluation": greedy, no language model).

Take the best token of every frame, merge repeats, drop blanks. The frames of a run say when its token was heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class TimedTokens:
    """The tokens of one utterance and the frames of the output in which they were heard."""

    tokens: list[int]
    first: list[int]  # first frame of each token
    last: list[int]  # its last frame, included


@dataclass(frozen=True)
class Word:
    """A word and where it was heard, in frames of the output."""

    text: str
    first: int
    last: int


def greedy(logits: Tensor, lengths: Tensor, blank: int = 0) -> list[list[int]]:
    """Token ids of each utterance."""  # logits (batch, frames, tokens), lengths (batch,)
    path = logits.argmax(dim=-1).cpu().numpy()
    return [timed.tokens for timed in merge_repeats(path, lengths.cpu().numpy(), blank)]


def merge_repeats(path: np.ndarray, lengths: np.ndarray, blank: int = 0) -> list[TimedTokens]:
    """Each run of equal tokens as one token with its first and last frame, without blanks."""  # path (batch, frames)
    batch, frames = path.shape
    path = np.where(np.arange(frames) < lengths[:, None], path, blank)
    edge = np.full((batch, 1), blank, dtype=path.dtype)
    starts = (path != blank) & (path != np.concatenate([edge, path[:, :-1]], axis=1))
    ends = (path != blank) & (path != np.concatenate([path[:, 1:], edge], axis=1))
    first, last, tokens = np.nonzero(starts)[1], np.nonzero(ends)[1], path[starts]
    borders = np.cumsum(starts.sum(axis=1))[:-1]
    pieces = (np.split(of, borders) for of in (tokens, first, last))
    return [TimedTokens(t.tolist(), f.tolist(), n.tolist()) for t, f, n in zip(*pieces, strict=True)]


def split_at(boundary: int, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each stretch of tokens between boundaries begins and ends (excluded)."""
    edges = [-1, *(place for place, token in enumerate(tokens) if token == boundary), len(tokens)]
    return ((before + 1, after) for before, after in pairwise(edges) if after > before + 1)


def greedy_words(
    logits: np.ndarray, to_text: Callable[[Sequence[int]], str], boundary: int, blank: int = 0
) -> list[Word]:
    """The words of a single utterance, which lie between boundary tokens."""  # logits (frames, tokens)
    (timed,) = merge_repeats(logits.argmax(axis=-1)[None], np.array([len(logits)]), blank)
    spelt = ((to_text(timed.tokens[a:b]).strip(), a, b) for a, b in split_at(boundary, timed.tokens))
    return [Word(text, timed.first[a], timed.last[b - 1]) for text, a, b in spelt if text]
