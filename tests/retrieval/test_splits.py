"""Splits are partitions, and as even or uneven as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval.splits import (
    ClientSplit,
    ColumnSplit,
    DirichletSplit,
    EvenSplit,
    ShardSplit,
    by_client,
    fold_numbers,
    train_and_test,
)

LABELS = st.lists(st.integers(0, 6), min_size=8, max_size=120).map(lambda own: np.array(own, dtype=np.int64))


@given(LABELS, st.floats(0.05, 0.6), st.integers(0, 5))
def test_the_test_is_stratified_and_every_label_stays_in_training(labels: np.ndarray, share: float, seed: int) -> None:
    train, test = train_and_test(labels, share, generator(seed, "test"))
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in np.unique(labels):
        total, tested = (labels == label).sum(), (labels[test] == label).sum()
        assert tested <= total * share + 1
        assert tested < total
    again = train_and_test(labels, share, generator(seed, "test"))
    assert (again[1] == test).all()


@given(LABELS, st.integers(2, 6), st.integers(0, 5))
def test_folds_are_equal_and_stratified(labels: np.ndarray, folds: int, seed: int) -> None:
    numbers = fold_numbers(labels, folds, generator(seed, "test"))
    for own in [np.ones(len(labels), dtype=bool), *(labels == label for label in np.unique(labels))]:
        counts = np.bincount(numbers[own], minlength=folds)
        assert len(counts) == folds
        assert counts.max() - counts.min() <= 1


def test_many_small_labels_still_give_the_test_its_share() -> None:
    labels = np.repeat(np.arange(500), 4)
    _, test = train_and_test(labels, 0.2, generator(0, "test"))
    assert len(test) == pytest.approx(400, abs=1)


@given(LABELS, st.integers(1, 4), st.floats(1e-3, 100), st.integers(0, 5))
def test_every_split_is_a_partition(labels: np.ndarray, clients: int, alpha: float, seed: int) -> None:
    groups = [f"client {label % 2}" for label in labels]
    kinds: list[ClientSplit] = [
        EvenSplit(clients=clients), ShardSplit(clients=clients, shards_per_client=2),
        DirichletSplit(clients=clients, alpha=alpha, min_examples=2), ColumnSplit(),
    ]  # fmt: skip
    for kind in kinds:
        parts = by_client(kind, labels, groups, generator(seed, "clients"))
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
        if isinstance(kind, EvenSplit):
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        if isinstance(kind, DirichletSplit):
            assert min(map(len, parts)) >= 2


def test_shards_limit_the_labels_of_a_client() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = by_client(ShardSplit(clients=10, shards_per_client=1), labels, None, generator(0, "clients"))
    assert all(len(np.unique(labels[part])) == 1 for part in parts)


def _unevenness(alpha: float) -> float:
    labels = np.repeat(np.arange(10), 200)
    parts = by_client(DirichletSplit(clients=5, alpha=alpha), labels, None, generator(3, "clients"))
    shares = np.array([np.bincount(labels[part], minlength=10) for part in parts]) / 200
    return float(shares.max(axis=0).mean())


def test_a_smaller_alpha_makes_clients_differ_more() -> None:
    assert _unevenness(0.05) > 0.8 > _unevenness(1.0) > 0.3 > _unevenness(100.0)


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    """Var = (1/m)(1 - 1/m) / (m alpha + 1)."""
    labels = np.repeat(np.arange(400), 1000)
    parts = by_client(DirichletSplit(clients=4, alpha=0.5), labels, None, generator(5, "clients"))
    shares = np.array([np.bincount(labels[part], minlength=400) for part in parts]) / 1000
    assert shares.var() == pytest.approx(0.25 * 0.75 / 3, rel=0.1)


def test_splits_that_cannot_be_are_refused() -> None:
    labels = np.zeros(5, dtype=np.int64)
    with pytest.raises(UserError, match="clients=6 for 5 training examples"):
        by_client(EvenSplit(clients=6), labels, None, generator(0, "clients"))
    with pytest.raises(UserError, match="6 shards, but there are 5 examples"):
        by_client(ShardSplit(clients=3, shards_per_client=2), labels, None, generator(0, "clients"))
    with pytest.raises(UserError, match="needs data that say whose each example is"):
        by_client(ColumnSplit(), labels, None, generator(0, "clients"))
