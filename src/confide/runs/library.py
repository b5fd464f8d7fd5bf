"""A trained retriever with its documents: it finds documents for new queries (CAR section 3.2).

A finished run's folder is enough, with the encoder and the data that its recipe names: the documents are read from the
data again, and numbered in the same way. What was published has no data: it has its documents in a file beside it, if
its owner wanted that, or is given one (`confide.retrieval.listing`). Plain inner-product search needs no run: a recipe
with `method: search` is a retriever as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from confide import recipe as recipes
from confide.encoders.remote import open_encoder
from confide.errors import UserError, require
from confide.recipe import Recipe
from confide.retrieval.data import Document, RetrievalCorpus
from confide.retrieval.listing import FILE, read_listing
from confide.retrieval.retriever import Retriever
from confide.retrieval.search import DocumentIndex
from confide.retrieval.settings import RetrievalSettings
from confide.runs import folder
from confide.runs.parameters import check_encoder, load_parameters, read_tensors
from confide.runs.shared_recipe import PLACEHOLDER
from confide.runs.stated import PUBLISHED


@dataclass(frozen=True)
class RetrievedDocument:
    """A document that was retrieved for a query."""

    rank: int  # 1 is best
    score: float
    document: Document

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "id": self.document.id, "score": self.score, "text": self.document.text}


@dataclass
class Library:
    """A retriever with its trained tensors and its documents."""

    name: str  # of the run or the recipe
    retriever: Retriever
    corpus: RetrievalCorpus | None  # none where only the documents are there
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
    def document_vectors(self) -> Tensor | None:
        """For search, the documents' vectors; none where a head retrieves."""  # (documents, width)
        return self.retriever.document_vectors(self.parameters)

    @cached_property
    def _index(self) -> DocumentIndex | None:
        found = self.document_vectors
        return None if found is None else DocumentIndex(self.retriever.settings.search, found)

    def find(self, query: str, k: int) -> list[RetrievedDocument]:
        """The K best documents of a query; fewer where the documents, or the active experts, have fewer."""
        if not query.strip():
            raise UserError("the query is empty; expected some words")
        if k < 1:
            raise UserError(f"k={k} documents were asked for; expected at least 1")
        k = min(k, self.retriever.deepest)
        self._warn_if_long(query)
        hidden = self.retriever.vectors(self.parameters, [query], keep=False)
        scores, numbers = self.retriever.find(self.parameters, hidden, k, self._index)
        # Heads give logarithms of probabilities; nobody reads those.
        shown = [math.exp(s) if self.retriever.settings.has_head else s for s in scores[0].tolist()]
        pairs = [(score, number) for score, number in zip(shown, numbers[0].tolist(), strict=True) if number >= 0]
        return [
            RetrievedDocument(i, score, self.retriever.documents[number])
            for i, (score, number) in enumerate(pairs, start=1)
        ]

    def _warn_if_long(self, query: str) -> None:
        batch, encoder = self.retriever.encoder.tokens([query]), self.retriever.encoder
        if batch.windowed:
            also = f"; what goes beyond {encoder.settings.max_windows} windows is cut" if batch.cut else ""
            print(f"the query is longer than {encoder.max_tokens} tokens: read in windows{also}", file=sys.stderr)


def retrieval_of(place: str | Path, recipe: Recipe) -> RetrievalSettings:
    """The recipe's task, which has to be retrieval."""
    if not isinstance(recipe.task, RetrievalSettings):
        raise UserError(
            f"{place} is of task {recipe.task.kind}, which retrieves nothing; give one whose task is retrieval"
        )
    return recipe.task


def open_run(run: Path, quiet: bool = False, documents: Path | None = None, encoder: str | None = None) -> Library:
    """The retriever that a finished run left, or that somebody published.

    `documents` is a file that lists them, where the data are not here; `encoder` is where the frozen encoder is.
    """
    recipe = folder.held_recipe(run)
    settings = with_encoder(run, retrieval_of(run, recipe), encoder)
    tensors = read_tensors(run)  # refuses a run without a model before the minutes of reading and encoding
    require("retrieval", "retrieval")
    found, corpus = documents_of(run, settings, recipe.run.seed, documents)
    rows = tensors["head.bias"].numel() if "head.bias" in tensors else len(found)
    if rows != len(found):
        raise UserError(
            f"{documents or run} has {len(found):,} documents, and the model of {run} scores {rows:,}; expected those "
            "that it was trained on, in its order"
        )
    retriever = Retriever(settings, open_encoder(settings.encoder), found, recipe.run.seed, quiet)
    check_encoder(run, retriever.encoder.identity)
    return Library(str(run), retriever, corpus, load_parameters(run, retriever.parameter_shapes()))


def with_encoder(run: Path, task: RetrievalSettings, source: str | None) -> RetrievalSettings:
    """The task with its frozen encoder where somebody says that it is."""
    named = task.encoder if source is None else task.encoder.model_copy(update={"source": source})
    if named.source == PLACEHOLDER:
        raise UserError(
            f"{run} was published without the place of its frozen encoder, which was a folder of its owner; expected "
            "--encoder with a preset, a transformers folder or owner/name"
        )
    return task.model_copy(update={"encoder": named})


def documents_of(
    run: Path, task: RetrievalSettings, seed: int, given: Path | None = None
) -> tuple[list[Document], RetrievalCorpus | None]:
    """The documents of a run in the order of its model: from a file that lists them, else from the data."""
    beside = run / FILE if (run / FILE).is_file() else None
    if (file := given or beside) is not None:
        return read_listing(file, task), None
    try:
        corpus = task.data.read(seed)
    except UserError as error:
        if not (run / PUBLISHED).exists():
            raise
        raise UserError(
            f"{run} was published without its documents ({error}): the model scores them by number, and nothing here "
            f"says what they are. Expected --documents {FILE}, a file from the model's owner, or a folder that was "
            "published with `--documents names`"
        ) from None
    return corpus.documents, corpus


def open_search(recipe: Recipe, name: str, quiet: bool = False) -> Library:
    """Plain inner-product search, as a recipe describes it: there is nothing to train."""
    settings = retrieval_of(name, recipe)
    if settings.method != "search":
        raise UserError(
            f"{name} is a recipe and its task.method={settings.method} has to be trained first; expected the folder of "
            "a finished run (`confide train`), or --set task.method=search for the baseline without training"
        )
    require("retrieval", "retrieval")
    corpus = settings.data.read(recipe.run.seed)
    encoder = open_encoder(settings.encoder)
    return Library(name, Retriever(settings, encoder, corpus.documents, recipe.run.seed, quiet), corpus, {})


def names_recipe(place: Path) -> bool:
    """Whether a place is a recipe, by its shipped name or its file, and not a run."""
    named = str(place) in recipes.shipped() or (place.suffix in (".yaml", ".yml") and place.is_file())
    return named and not place.is_dir()


def open_library(
    place: Path, overrides: Sequence[str], quiet: bool, documents: Path | None = None, encoder: str | None = None
) -> Library:
    """A finished run by its folder, or a recipe of plain search by its name or file."""
    if names_recipe(place):
        if documents is not None or encoder is not None:
            raise UserError(
                f"--documents and --encoder go with a run's folder, and {place} is a recipe; expected "
                "--set task.data=... or --set task.encoder.source=..."
            )
        return open_search(recipes.load(str(place), overrides), str(place), quiet)
    if overrides:
        raise UserError(f"--set changes a recipe, and {place} is a run; drop it, or name the recipe")
    return open_run(place, quiet, documents, encoder)
