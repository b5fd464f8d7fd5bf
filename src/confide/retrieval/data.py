"""What is retrieved: queries, each with its one right document, read from files or made (CAR sections 3.2 and 6.1).

A document is a class of the classifier. In SMS Spam, AG News and arXiv the "documents" are the classes themselves
(spam, Sports, cs.LG), as in the paper; in a query-document table and in the embedded corpus they are real documents.

Nothing is left out silently: what cannot be used is counted under its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval.splits import Indices, train_and_test
from confide.settings import Section


class SplitSettings(Section):
    """What all kinds of data have in common."""

    test_share: float = Field(0.2, gt=0, lt=1, description="of the examples, where there is no test file of its own")
    drop_duplicates: bool = Field(False, description="keep only the first of texts that are equal but for case")
    limit: int | None = Field(
        None, ge=4, description="use so many examples (of each file, if the test has its own), stratified"
    )
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="to choose settings: train without this share of the training examples and evaluate on it; the "
        "test examples are not touched",
    )


@dataclass(frozen=True)
class Document:
    """Something that can be retrieved."""

    id: str
    text: str


@dataclass(frozen=True)
class Examples:
    """Queries and the numbers of their right documents."""

    texts: list[str]
    labels: NDArray[np.int64]  # (n,)
    groups: list[str] | None = None  # whose each query is, where the data say so

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Indices) -> Examples:
        groups = None if self.groups is None else [self.groups[i] for i in indices]
        return Examples([self.texts[i] for i in indices], self.labels[indices], groups)


@dataclass(frozen=True)
class RetrievalCorpus:
    """Documents, training queries and test queries."""

    name: str
    documents: list[Document]
    train: Examples
    test: Examples
    left_out: dict[str, int] = field(default_factory=dict)  # by reason

    @property
    def classes(self) -> int:
        return len(self.documents)


@dataclass(frozen=True)
class Row:
    """One query as it was read, with the id of its document."""

    text: str
    document: str
    group: str | None = None


def assemble(
    name: str,
    settings: SplitSettings,
    seed: int,
    rows: Iterable[Row],
    documents: Sequence[Document] | None = None,
    test_rows: Iterable[Row] | None = None,
    left_out: Counter[str] | None = None,
) -> RetrievalCorpus:
    """Number the documents, drop what is unusable, split if there is no test of its own.

    Without `documents` every id that occurs in training is one, in sorted order, with the id as its text.
    """
    counts: Counter[str] = left_out if left_out is not None else Counter()
    training = _usable(rows, counts, settings.drop_duplicates)
    testing = None if test_rows is None else _usable(test_rows, counts, settings.drop_duplicates)
    if documents is None:
        documents = [Document(own, own) for own in sorted({row.document for row in training})]
    numbers = {document.id: number for number, document in enumerate(documents)}
    if len(numbers) < 2:
        raise UserError(
            f"{name} has {len(numbers)} document{'s' if len(numbers) != 1 else ''} or class"
            f"{'es' if len(numbers) != 1 else ''} among {len(training)} usable queries; expected at least two: with "
            "one there is nothing to retrieve"
        )
    whole = _numbered(training, numbers, counts)
    if testing is None:
        whole = _limited(whole, settings.limit, generator(seed, "limit"))
        first, second = train_and_test(whole.labels, settings.test_share, generator(seed, "test"))
        train, test = whole.take(first), whole.take(second)
    else:
        train = _limited(whole, settings.limit, generator(seed, "limit"))
        test = _limited(_numbered(testing, numbers, counts), settings.limit, generator(seed, "limit", 1))
    if settings.held_out is not None:
        first, second = train_and_test(train.labels, settings.held_out, generator(seed, "validation"))
        train, test = train.take(first), train.take(second)
    if not len(train) or not len(test):
        raise UserError(
            f"{name} has {len(train)} training and {len(test)} test queries; expected some of both: give more queries "
            "to each document, or raise limit"
        )
    return RetrievalCorpus(name, list(documents), train, test, dict(counts))


def _usable(rows: Iterable[Row], counts: Counter[str], drop_duplicates: bool) -> list[Row]:
    kept: list[Row] = []
    seen: set[str] = set()
    for row in rows:
        if not row.text.strip():
            counts["empty text"] += 1
            continue
        if not row.document.strip():
            counts["no document"] += 1
            continue
        folded = " ".join(row.text.casefold().split())
        if drop_duplicates and folded in seen:
            counts["duplicate text"] += 1
            continue
        seen.add(folded)
        kept.append(row)
    return kept


def _numbered(rows: list[Row], numbers: dict[str, int], counts: Counter[str]) -> Examples:
    known = [row for row in rows if row.document in numbers]
    if len(known) < len(rows):
        counts["unknown document"] += len(rows) - len(known)
    groups = [row.group for row in known]
    named = [group for group in groups if group is not None]
    return Examples(
        [row.text for row in known],
        np.array([numbers[row.document] for row in known], dtype=np.int64),
        named if named and len(named) == len(groups) else None,
    )


def _limited(examples: Examples, limit: int | None, draw: np.random.Generator) -> Examples:
    if limit is None or limit >= len(examples):
        return examples
    _, chosen = train_and_test(examples.labels, limit / len(examples), draw)
    return examples.take(chosen)
