"""Greedy CTC decoding (PFL-ASR section 4, "Evaluation": greedy, no language model).

The best token of every frame, repeats merged, blanks removed. A run of one token also says when it was heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
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
    return [timed.tokens for timed in greedy_timed(logits, lengths, blank)]


def greedy_timed(logits: Tensor, lengths: Tensor, blank: int = 0) -> list[TimedTokens]:
    """Token ids of each utterance with their frames."""
    return merge_repeats(logits.argmax(dim=-1).cpu().numpy(), lengths.cpu().numpy(), blank)


def merge_repeats(path: np.ndarray, lengths: np.ndarray, blank: int = 0) -> list[TimedTokens]:
    """Runs of equal tokens that are not blank."""  # path (batch, frames) token ids
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
    """First token and the one behind the last of each stretch between boundaries that is not empty."""
    begin = 0
    for index, token in enumerate([*tokens, boundary]):
        if token == boundary:
            if index > begin:
                yield begin, index
            begin = index + 1


def words(timed: TimedTokens, to_text: Callable[[Sequence[int]], str], boundary: int) -> list[Word]:
    """The words between boundary tokens."""
    spelt = ((to_text(timed.tokens[a:b]).strip(), a, b) for a, b in split_at(boundary, timed.tokens))
    return [Word(text, timed.first[a], timed.last[b - 1]) for text, a, b in spelt if text]


def greedy_words(
    logits: np.ndarray, to_text: Callable[[Sequence[int]], str], boundary: int, blank: int = 0
) -> list[Word]:
    """The words of a single utterance."""  # logits (frames, tokens)
    batch = torch.from_numpy(np.ascontiguousarray(logits)).unsqueeze(0)
    (timed,) = greedy_timed(batch, torch.tensor([len(logits)]), blank)
    return words(timed, to_text, boundary)
