"""Greedy decoding merges repeats, drops blanks and says when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from confide.speech.decode import Run, Word, greedy, greedy_words, merge_repeats

paths = st.integers(0, 12).flatmap(
    lambda frames: st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=frames, max_size=frames), st.integers(0, frames)), min_size=1
    )
)


def logits_of(path: list[int], tokens: int = 4) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(path), tokens).float()


def letters(ids: Sequence[int]) -> str:
    return "".join("_|ab"[i] for i in ids)


@given(paths, st.integers(0, 3))
def test_vectorised_decoding_equals_the_definition(batch: list[tuple[list[int], int]], blank: int) -> None:
    got = merge_repeats(np.array([path for path, _ in batch]), np.array([length for _, length in batch]), blank)
    for heard, (path, length) in zip(got, batch, strict=True):
        runs = [(token, [i for i, _ in run]) for token, run in groupby(enumerate(path[:length]), key=lambda x: x[1])]
        runs = [(token, frames) for token, frames in runs if token != blank]
        assert heard == [Run(token, frames[0], frames[-1]) for token, frames in runs]


def test_a_blank_separates_a_doubled_letter() -> None:
    batch = torch.stack([logits_of([2, 2, 0, 2, 3, 3]), logits_of([2, 2, 2, 2, 3, 0])])
    assert greedy(batch, torch.tensor([6, 6])) == [[2, 2, 3], [2, 3]]


def test_padding_says_nothing() -> None:
    batch = torch.stack([logits_of([2, 3, 1]), logits_of([3, 3, 3])])
    assert greedy(batch, torch.tensor([2, 0])) == [[2, 3], []]


def spans(words: list[Word]) -> list[tuple[str, int, int]]:
    return [(word.text, word.first, word.last) for word in words]


def test_a_words_confidence_is_the_geometric_mean_of_its_tokens_best_probabilities() -> None:
    share = np.array([[0.1, 0.1, 0.7, 0.1], [0.0, 0.05, 0.9, 0.05], [0.2, 0.0, 0.0, 0.8], [0.1, 0.9, 0, 0]])
    logits = np.log(share + 1e-9).astype(np.float32) + 3  # any constant may be added to a frame
    (word,) = greedy_words(logits, letters, boundary=1)
    assert word.text == "ab"
    assert word.confidence == pytest.approx((0.9 * 0.8) ** 0.5, rel=1e-5)


def test_tokens_know_their_frames() -> None:
    (heard,) = merge_repeats(np.array([[0, 2, 2, 0, 2, 3]]), np.array([6]))
    assert heard == [Run(2, 1, 2), Run(2, 4, 4), Run(3, 5, 5)]


def test_words_lie_between_boundaries_and_runs_of_boundaries_make_no_word() -> None:
    heard = logits_of([1, 2, 2, 3, 1, 1, 0, 1, 3, 3, 3]).numpy()
    assert spans(greedy_words(heard, letters, boundary=1)) == [("ab", 1, 3), ("b", 8, 10)]
    assert greedy_words(logits_of([1, 0, 1]).numpy(), letters, boundary=1) == []


def test_words_of_one_utterance_from_numpy() -> None:
    assert spans(greedy_words(logits_of([1, 2, 0, 1, 3]).numpy(), letters, boundary=1)) == [("a", 1, 1), ("b", 4, 4)]
    assert greedy_words(np.zeros((0, 4), dtype=np.float32), letters, boundary=1) == []
