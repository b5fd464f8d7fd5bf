"""Using a trained retriever: scoring it on the test queries, and finding documents for new ones (CAR section 3.2).

A finished run's folder is enough, with the encoder and the data that its recipe names: the documents are read from the
data again, and numbered in the same way. Plain inner-product search needs no run: a recipe with `method: search` is a
retriever as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confide.encoders.remote import open_encoder
from confide.errors import UserError, require
from confide.randomness import generator
from confide.recipe import Recipe
from confide.retrieval.data import Document, RetrievalCorpus
from confide.retrieval.metrics import RetrievalScores, summarise
from confide.retrieval.retriever import Retriever
from confide.retrieval.search import DocumentIndex
from confide.retrieval.settings import RetrievalSettings
from confide.runs import folder
from confide.runs.recogniser import held_parameters


@dataclass(frozen=True)
class Found:
    """A document that was retrieved."""

    rank: int  # 1 is best
    score: float
    document: Document

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "id": self.document.id, "score": self.score, "text": self.document.text}


@dataclass
class Library:
    """A retriever with its trained tensors and its documents."""

    name: str  # of the run or the recipe
    seed: int
    retriever: Retriever
    corpus: RetrievalCorpus
    parameters: Mapping[str, Tensor]

    @property
    def method(self) -> str:
        settings = self.retriever.settings
        return f"{settings.method}, experts" if self.retriever.clusters is not None else settings.method

    @property
    def scale(self) -> str:
        """What a score is."""
        return "probability" if self.retriever.settings.has_head else "inner product"

    @cached_property
    def _documents(self) -> Tensor | None:
        return self.retriever.document_vectors(self.parameters)

    @cached_property
    def _index(self) -> DocumentIndex | None:
        found = self._documents
        return None if found is None else DocumentIndex(self.retriever.settings.search, found)

    def find(self, query: str, k: int) -> list[Found]:
        """The K best documents of a query; fewer where the documents, or the active experts, have fewer."""
        if not query.strip():
            raise UserError("the query is empty; expected some words")
        if k < 1:
            raise UserError(f"k={k} documents were asked for; expected at least 1")
        k = min(k, self.retriever.deepest)
        self._say_if_long(query)
        hidden = self.retriever.vectors(self.parameters, [query], keep=False)
        scores, numbers = self.retriever.find(self.parameters, hidden, k, self._index)
        # Heads give logarithms of probabilities; nobody reads those.
        shown = [math.exp(s) if self.retriever.settings.has_head else s for s in scores[0].tolist()]
        pairs = [(score, number) for score, number in zip(shown, numbers[0].tolist(), strict=True) if number >= 0]
        return [Found(i, score, self.corpus.documents[number]) for i, (score, number) in enumerate(pairs, start=1)]

    def evaluate(self) -> Evaluation:
        """All measures on the test queries, as the run's own evaluation has them."""
        test = self.corpus.test
        hidden = self.retriever.vectors(self.parameters, test.texts)
        labels = torch.from_numpy(test.labels)
        ranks, loss = self.retriever.ranks(self.parameters, hidden, labels, self._documents)
        k = min(self.retriever.settings.k, len(self.corpus.documents))
        names = [document.id for document in self.corpus.documents]
        scores = summarise(ranks, test.labels, names, k, generator(self.seed, "bootstrap"))
        return Evaluation(self.corpus.name, self.method, len(names), scores, loss, self.corpus.left_out)

    def _say_if_long(self, query: str) -> None:
        batch, encoder = self.retriever.encoder.tokens([query]), self.retriever.encoder
        if batch.windowed:
            also = f"; what goes beyond {encoder.settings.max_windows} windows is cut" if batch.cut else ""
            print(f"the query is longer than {encoder.max_tokens} tokens: read in windows{also}", file=sys.stderr)


@dataclass(frozen=True)
class Evaluation:
    """What a retriever is worth on the test queries of its data."""

    corpus: str
    method: str
    documents: int
    scores: RetrievalScores
    loss: float
    left_out: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus, "method": self.method, "documents": self.documents, **self.scores.to_json(),
            "test_loss": folder.finite(self.loss), "left_out": self.left_out,
        }  # fmt: skip


def retrieval_of(place: str | Path, recipe: Recipe) -> RetrievalSettings:
    """The recipe's task, which has to be retrieval."""
    if not isinstance(recipe.task, RetrievalSettings):
        raise UserError(
            f"{place} is of task {recipe.task.kind}, which retrieves nothing; give one whose task is retrieval"
        )
    return recipe.task


def open_run(run: Path, quiet: bool = False) -> Library:
    """The retriever that a finished run left."""
    recipe = folder.held_recipe(run)
    retrieval_of(run, recipe)
    if not (run / folder.MODEL).is_file():  # before the minutes of reading and encoding
        held_parameters(run, {})
    retriever, corpus = _parts(recipe, quiet)
    return Library(str(run), recipe.run.seed, retriever, corpus, held_parameters(run, retriever.parameter_shapes()))


def open_search(recipe: Recipe, name: str, quiet: bool = False) -> Library:
    """Plain inner-product search, as a recipe describes it: there is nothing to train."""
    settings = retrieval_of(name, recipe)
    if settings.method != "search":
        raise UserError(
            f"{name} is a recipe and its task.method={settings.method} has to be trained first; expected the folder of "
            "a finished run (`confide train`), or --set task.method=search for the baseline without training"
        )
    retriever, corpus = _parts(recipe, quiet)
    return Library(name, recipe.run.seed, retriever, corpus, {})


def _parts(recipe: Recipe, quiet: bool) -> tuple[Retriever, RetrievalCorpus]:
    settings, seed = retrieval_of("the recipe", recipe), recipe.run.seed
    require("retrieval", "retrieval")
    corpus = settings.data.read(seed)
    return Retriever(settings, open_encoder(settings.encoder), corpus.documents, seed, quiet), corpus
