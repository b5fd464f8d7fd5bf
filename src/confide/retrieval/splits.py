"""Who gets which examples: training and test (80/20, stratified), and clients (CAR section 6.1 splits evenly).

Even is the paper's way. By label shard, Dirichlet and by a column are the usual ways to make clients differ: shards as
in FedAvg's experiments, Dirichlet with one draw of client shares per class, and a column when the data say whose they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from confide.errors import UserError
from confide.settings import Section

Indices = NDArray[np.int64]


class EvenSplit(Section):
    """Examples dealt out at random, equally many to each client (one more or less)."""

    kind: Literal["even"] = "even"
    clients: int = Field(2, ge=1, description="m, how many clients share the training data")


class ShardSplit(Section):
    """Examples sorted by label and cut into shards; each client gets a few of them at random."""

    kind: Literal["shards"] = "shards"
    clients: int = Field(2, ge=1, description="m, how many clients share the training data")
    shards_per_client: int = Field(2, ge=1, description="few: a client sees few labels")


class DirichletSplit(Section):
    """For each label, the clients' shares are one draw from Dirichlet(alpha)."""

    kind: Literal["dirichlet"] = "dirichlet"
    clients: int = Field(2, ge=1, description="m, how many clients share the training data")
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False, description="small: clients differ much; large: even")
    min_examples: int = Field(1, ge=0, description="a client below this gets examples from the largest one")


class ColumnSplit(Section):
    """A client for each value of the data's client column."""

    kind: Literal["column"] = "column"


ClientSplit = Annotated[EvenSplit | ShardSplit | DirichletSplit | ColumnSplit, Field(discriminator="kind")]


def train_and_test(labels: Indices, test_share: float, draw: np.random.Generator) -> tuple[Indices, Indices]:
    """Stratified: each label's share of the test is the whole's, to within one example; ascending indices.

    Rounding is done over all labels together, so that the whole test has its share even when there are many small
    labels. A label with a single example stays in training: a document that was never trained cannot be retrieved.
    """
    test: list[Indices] = []
    owed = 0.0
    groups = by_label(labels)
    for number in draw.permutation(len(groups)):
        own = groups[number]
        owed += len(own) * test_share
        count = min(max(round(owed), 0), len(own) - 1, int(np.ceil(len(own) * test_share)))
        owed -= count
        test.append(draw.permutation(own)[:count])
    chosen = np.sort(np.concatenate(test)) if test else np.empty(0, dtype=np.int64)
    rest = np.setdiff1d(np.arange(len(labels)), chosen)
    return rest.astype(np.int64), chosen.astype(np.int64)


def fold_numbers(labels: Indices, folds: int, draw: np.random.Generator) -> Indices:
    """Each example's fold: the examples of a label are dealt out in random order, so folds are equal and stratified."""
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    numbers = np.empty(len(labels), dtype=np.int64)
    numbers[order] = np.arange(len(labels)) % folds
    return numbers


def by_label(labels: Indices) -> list[Indices]:
    """Group the examples by label: ascending, in the order of the labels."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(labels) else []


def by_client(
    settings: ClientSplit, labels: Indices, groups: Sequence[str] | None, draw: np.random.Generator
) -> list[Indices]:
    """Deal the examples to the clients; together they get all of them, and no two share one."""
    if isinstance(settings, ColumnSplit):
        return _by_column(groups)
    if settings.clients > len(labels):
        raise UserError(
            f"clients={settings.clients} for {len(labels)} training examples; expected at least one example for each: "
            "lower clients"
        )
    if isinstance(settings, EvenSplit):
        return [np.sort(part) for part in np.array_split(draw.permutation(len(labels)), settings.clients)]
    if isinstance(settings, ShardSplit):
        return _by_shard(settings, labels, draw)
    return _by_dirichlet(settings, labels, draw)


def _by_column(groups: Sequence[str] | None) -> list[Indices]:
    if groups is None:
        raise UserError(
            "the split by column needs data that say whose each example is; expected a client column: name it in the "
            "data's settings, or split evenly, by shards or by dirichlet"
        )
    names = np.array(groups)
    return [np.flatnonzero(names == name) for name in np.unique(names)]


def _by_shard(settings: ShardSplit, labels: Indices, draw: np.random.Generator) -> list[Indices]:
    count = settings.clients * settings.shards_per_client
    if count > len(labels):
        raise UserError(
            f"{settings.clients} clients with {settings.shards_per_client} shards each need {count} shards, but there "
            f"are {len(labels)} examples; expected at least one example per shard: lower one of them"
        )
    # Shuffled before the stable sort: within a label, the order of the file says nothing.
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shards = np.array_split(order, count)
    dealt = draw.permutation(count).reshape(settings.clients, -1)
    return [np.sort(np.concatenate([shards[shard] for shard in own])) for own in dealt]


def _by_dirichlet(settings: DirichletSplit, labels: Indices, draw: np.random.Generator) -> list[Indices]:
    clients = settings.clients
    if settings.min_examples * clients > len(labels):
        raise UserError(
            f"min_examples={settings.min_examples} for {clients} clients needs {settings.min_examples * clients} "
            f"examples, but there are {len(labels)}; lower min_examples or clients"
        )
    held: list[list[int]] = [[] for _ in range(clients)]
    for own in map(draw.permutation, by_label(labels)):
        shares = draw.dirichlet(np.full(clients, settings.alpha))
        # With a tiny alpha the draw can underflow to nothing at all; then one client has the whole label.
        shares = shares if np.isfinite(shares).all() and shares.sum() > 0 else np.eye(clients)[draw.integers(clients)]
        ends = np.round(np.cumsum(shares) / shares.sum() * len(own)).astype(np.int64)
        for client, part in enumerate(np.split(own, ends[:-1])):
            held[client] += part.tolist()
    for client in range(clients):
        while len(held[client]) < settings.min_examples:
            largest = max(range(clients), key=lambda c: len(held[c]))
            held[client].append(held[largest].pop())
    return [np.sort(np.array(own, dtype=np.int64)) for own in held]
