"""How good a retrieval is: top-1, top-K, mean reciprocal rank and nDCG@10, also per document or class.

Serves CAR, section 6 (top-1 accuracy of retrieval) and adds the usual measures of ranking. Every query has exactly one
right document, so all of them are functions of its rank. A document that ties with the right one counts as before it:
a model that gives every document the same score is right about nothing.

The confidence interval is that of `confide.federated.intervals`, over queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.errors import UserError
from confide.federated.intervals import LEVEL, interval
from confide.federated.items import Items, number_names
from confide.retrieval.splits import by_label

NEVER = np.iinfo(np.int64).max  # the rank of a document that was not retrieved
DEPTH = 10


@dataclass(frozen=True)
class ClassScore:
    """One document, as the right answer."""

    name: str
    queries: int
    top_1: float
    top_k: float


@dataclass(frozen=True)
class RetrievalScores:
    """Shares between 0 and 1 over all queries."""

    queries: int
    k: int
    top_1: float
    top_k: float
    mrr: float
    ndcg_10: float
    macro_top_1: float  # the mean over classes, each counting the same
    low: float  # of the confidence interval of top_1
    high: float
    level: float
    per_class: tuple[ClassScore, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ranks_from_scores(scores: Tensor, labels: Tensor) -> NDArray[np.int64]:
    """Find the rank of the right document, 1 is best, by all documents' scores."""  # (queries,)
    if bool(torch.isnan(scores).any()):
        raise UserError("a score is not a number; expected finite scores: the model has diverged, lower its rate")
    right = scores.gather(1, labels.unsqueeze(1))
    ranks: NDArray[np.int64] = (scores >= right).sum(dim=1).numpy().astype(np.int64)
    return ranks


def ranks_from_lists(found: Tensor, labels: Tensor) -> NDArray[np.int64]:
    """Find the rank of the right document in lists, best first; NEVER if it is not in the list."""  # (queries, k)
    hits = found == labels.unsqueeze(1)
    first = hits.int().argmax(dim=1).numpy().astype(np.int64) + 1
    return np.where(hits.any(dim=1).numpy(), first, NEVER)


def reciprocal(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 / rank, and 0 for what was not retrieved."""
    return np.where(ranks == NEVER, 0.0, 1.0 / ranks)


def ndcg(ranks: NDArray[np.int64], depth: int = DEPTH) -> NDArray[np.float64]:
    """Discounted gain with one right document, whose ideal gain is 1: 1 / log2(1 + rank) down to `depth`."""
    within = ranks <= depth
    return np.where(within, 1.0 / np.log2(1.0 + np.where(within, ranks, 1)), 0.0)


def summarise(
    ranks: NDArray[np.int64], labels: NDArray[np.int64], names: Sequence[str], k: int, level: float = LEVEL
) -> RetrievalScores:
    """Compute all measures of these ranks. `names` are the documents', by number."""
    if not len(ranks):
        raise UserError("there is no query to score; expected at least one test query")
    first = ranks == 1
    low, high = interval(first_hits(ranks, labels, names), level)
    per_class = tuple(
        ClassScore(names[labels[own[0]]], len(own), float(first[own].mean()), float((ranks[own] <= k).mean()))
        for own in by_label(labels)
    )
    return RetrievalScores(
        queries=len(ranks), k=k, top_1=float(first.mean()), top_k=float((ranks <= k).mean()),
        mrr=float(reciprocal(ranks).mean()), ndcg_10=float(ndcg(ranks).mean()),
        macro_top_1=float(np.mean([own.top_1 for own in per_class])), low=low, high=high, level=level,
        per_class=per_class,
    )  # fmt: skip


def first_hits(ranks: NDArray[np.int64], labels: NDArray[np.int64], names: Sequence[str], test: str = "") -> Items:
    """Say which queries find their document first; `test` names the test set."""
    present, places = number_names([names[label] for label in labels])
    hits = (ranks == 1).astype(np.float64)
    return Items("accuracy", "higher", 1.0, "document", False, present, places, hits, np.ones(len(ranks)), test)
