"""What is retrieved: queries, each with its one right document, read from files or made (CAR sections 3.2 and 6.1).

A document is a class of the classifier. In SMS Spam, AG News and arXiv the "documents" are the classes themselves
(spam, Sports, cs.LG), as in the paper; in a query-document table and in the embedded corpus they are real documents.

Nothing is left out silently: what cannot be used is counted under its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from confide.errors import UserError
from confide.files import digest
from confide.randomness import generator
from confide.retrieval.splits import Indices, fold_numbers, train_and_test
from confide.settings import Section


class SplitSettings(Section):
    """What all kinds of data have in common."""

    test_share: float = Field(0.2, gt=0, lt=1, description="of the examples, where there is no test file of its own")
    drop_duplicates: bool = Field(False, description="keep only the first of texts that are equal but for case")
    limit: int | None = Field(
        None, ge=4, description="use so many examples (of each file, if the test has its own), stratified"
    )
    # Left out of a dump at its default, so that recipes from before it was there keep their digest.
    test_by: Literal["rows", "clients"] = Field(
        "rows", exclude_if=lambda value: value == "rows",
        description="what the test share is of: of the rows, or of the clients, whose rows are then all for the test",
    )  # fmt: skip
    fold: Annotated[int, Field(ge=0)] | None = Field(
        None, exclude_if=lambda value: value is None,
        description="which of the 1 / test_share equal parts is the test, from 0: with one seed, all folds together "
        "test every example once; none: a share at random",
    )  # fmt: skip
    deal: Annotated[int, Field(ge=0)] | None = Field(
        None, exclude_if=lambda value: value is None,
        description="deals test rows, folds and held-out rows by this number, so that runs with unlike seeds are "
        "tested on the same rows; none: by run.seed",
    )  # fmt: skip
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="to choose settings: train without this share of the training examples (with test_by: clients, of "
        "the clients) and evaluate on it; the test examples are not touched",
    )


@dataclass(frozen=True)
class Document:
    """Something that can be retrieved."""

    id: str
    text: str


def digest_documents(documents: Sequence[Document]) -> str:
    return digest([part for document in documents for part in (document.id, document.text)])


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

    def split(self, share: float, draw: np.random.Generator, fold: int | None = None) -> tuple[Examples, Examples]:
        """Split off a stratified share of the examples, or one of the folds of that size: the rest, and the share."""
        if fold is None:
            rest, chosen = train_and_test(self.labels, share, draw)
        else:
            numbers = fold_numbers(self.labels, round(1 / share), draw)
            rest, chosen = np.flatnonzero(numbers != fold), np.flatnonzero(numbers == fold)
        return self.take(rest), self.take(chosen)


@dataclass(frozen=True)
class RetrievalCorpus:
    """Documents, training queries and test queries."""

    name: str
    documents: list[Document]
    train: Examples
    test: Examples
    left_out: dict[str, int] = field(default_factory=dict)  # by reason


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
    seed = seed if settings.deal is None else settings.deal
    if settings.fold is not None and (test_rows is not None or settings.test_by == "clients"):
        raise UserError(f"{name}: fold={settings.fold} of data whose test is given, or is whole clients; leave it out")
    if settings.fold is not None and settings.fold >= round(1 / settings.test_share):
        raise UserError(
            f"fold={settings.fold} with test_share={settings.test_share}; expected 0 to "
            f"{round(1 / settings.test_share) - 1}: there are 1 / test_share folds"
        )
    training = _drop_unusable(rows, counts, settings.drop_duplicates)
    testing = None if test_rows is None else _drop_unusable(test_rows, counts, settings.drop_duplicates)
    if documents is None:
        documents = [Document(own, own) for own in sorted({row.document for row in training})]
    numbers = {document.id: number for number, document in enumerate(documents)}
    if len(numbers) < 2:
        raise UserError(
            f"{name} has {len(numbers)} document{'s' if len(numbers) != 1 else ''} or class"
            f"{'es' if len(numbers) != 1 else ''} among {len(training)} usable queries; expected at least two: with "
            "one there is nothing to retrieve"
        )
    train = _limit(_number(training, numbers, counts), settings.limit, generator(seed, "limit"))
    if testing is None and settings.test_by == "clients":
        train, test = _split_by_client(name, train, settings.test_share, "test")
    elif testing is None:
        train, test = train.split(settings.test_share, generator(seed, "test"), settings.fold)
    else:
        test = _limit(_number(testing, numbers, counts), settings.limit, generator(seed, "limit", 1))
    if settings.held_out is not None and settings.test_by == "clients":
        train, test = _split_by_client(name, train, settings.held_out, "validation")
    elif settings.held_out is not None:
        train, test = train.split(settings.held_out, generator(seed, "validation"))
    if not len(train) or not len(test):
        raise UserError(
            f"{name} has {len(train)} training and {len(test)} test queries; expected some of both: give more queries "
            "to each document, or raise limit"
        )
    return RetrievalCorpus(name, list(documents), train, test, dict(counts))


def _drop_unusable(rows: Iterable[Row], counts: Counter[str], drop_duplicates: bool) -> list[Row]:
    kept: list[Row] = []
    seen: set[str] = set()
    for row in rows:
        folded = " ".join(row.text.casefold().split())
        if not folded:
            counts["empty text"] += 1
        elif not row.document.strip():
            counts["no document"] += 1
        elif drop_duplicates and folded in seen:
            counts["duplicate text"] += 1
        else:
            seen.add(folded)
            kept.append(row)
    return kept


def _number(rows: list[Row], numbers: dict[str, int], counts: Counter[str]) -> Examples:
    """Replace the documents' ids by their numbers; rows of unknown documents are counted and left out."""
    known = [row for row in rows if row.document in numbers]
    if len(known) < len(rows):
        counts["unknown document"] += len(rows) - len(known)
    groups = [row.group for row in known if row.group is not None]
    return Examples(
        [row.text for row in known],
        np.array([numbers[row.document] for row in known], dtype=np.int64),
        groups if groups and len(groups) == len(known) else None,
    )


def _split_by_client(name: str, examples: Examples, share: float, purpose: str) -> tuple[Examples, Examples]:
    """All rows of a share of the clients are set aside; hashes of their names decide which, on every machine."""
    if examples.groups is None:
        raise UserError(f"{name}: test_by: clients needs data that say whose each row is; name the client_column")
    clients = sorted(set(examples.groups), key=lambda client: digest([purpose, client]))
    tested = set(clients[: max(1, round(share * len(clients)))])
    held = np.array([group in tested for group in examples.groups])
    return examples.take(np.flatnonzero(~held)), examples.take(np.flatnonzero(held))


def _limit(examples: Examples, limit: int | None, draw: np.random.Generator) -> Examples:
    if limit is None or limit >= len(examples):
        return examples
    return examples.split(limit / len(examples), draw)[1]
