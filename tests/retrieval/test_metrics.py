"""Measures of ranking, against hand-made values and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import ndcg_score, top_k_accuracy_score

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval.metrics import NEVER, ndcg, ranks_from_lists, ranks_from_scores, reciprocal, summarise


def test_measures_of_known_ranks() -> None:
    ranks = np.array([1, 2, 4, NEVER])
    labels = np.array([0, 0, 1, 1])
    scores = summarise(ranks, labels, ["a", "b"], 3)
    assert (scores.top_1, scores.top_k) == (0.25, 0.5)
    assert scores.mrr == pytest.approx((1 + 1 / 2 + 1 / 4) / 4)
    assert scores.ndcg_10 == pytest.approx((1 + 1 / np.log2(3) + 1 / np.log2(5)) / 4)
    assert [(own.name, own.queries, own.top_1, own.top_k) for own in scores.per_class] == [
        ("a", 2, 0.5, 1.0), ("b", 2, 0.0, 0.0),
    ]  # fmt: skip
    assert scores.macro_top_1 == 0.25


@given(hnp.arrays(np.float64, (7, 12), elements=st.floats(-5, 5), unique=True), st.integers(1, 11))
def test_ranks_agree_with_scikit_learn(scores: np.ndarray, k: int) -> None:
    labels = np.arange(7)
    ranks = ranks_from_scores(torch.from_numpy(scores), torch.from_numpy(labels))
    assert (ranks <= k).mean() == pytest.approx(top_k_accuracy_score(labels, scores, k=k, labels=np.arange(12)))
    assert ndcg(ranks).mean() == pytest.approx(ndcg_score(np.eye(12)[labels], scores, k=10))


@given(hnp.arrays(np.float64, (5, 8), elements=st.floats(-5, 5), unique=True))
def test_lists_and_scores_give_the_same_ranks(scores: np.ndarray) -> None:
    given_scores, labels = torch.from_numpy(scores), torch.arange(5)
    from_lists = ranks_from_lists(given_scores.argsort(dim=1, descending=True), labels)
    assert (ranks_from_scores(given_scores, labels) == from_lists).all()
    short = ranks_from_lists(given_scores.argsort(dim=1, descending=True)[:, :3], labels)
    assert ((short == NEVER) == (from_lists > 3)).all()
    assert (reciprocal(short)[short == NEVER] == 0).all()


def test_a_model_that_scores_everything_alike_is_right_about_nothing() -> None:
    assert ranks_from_scores(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])).tolist() == [3, 3, 3, 3]


def test_scores_that_are_no_numbers_and_no_queries_are_refused() -> None:
    with pytest.raises(UserError, match="not a number"):
        ranks_from_scores(torch.full((1, 2), torch.nan), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="no query"):
        summarise(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), [], 3)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        ranks = np.where(generator(trial, "sample").random(300) < 0.8, 1, 2)
        scores = summarise(ranks, np.zeros(300, dtype=np.int64), ["a"], 3)
        covered += scores.low <= 0.8 <= scores.high
    assert 0.89 <= covered / 200 <= 0.985
