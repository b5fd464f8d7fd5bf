"""What the model of a finished run is worth, for every task: `confide evaluate` and `confide.evaluate`.

Speech is scored on the test corpus of its recipe or on another one, retrieval on the test queries of its data. Any
other task evaluates itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from confide import recipe as recipes
from confide.build import make_task
from confide.errors import UserError
from confide.recipe import Recipe
from confide.retrieval.metrics import RetrievalScores, summarise
from confide.runs import folder
from confide.runs.corpus_choice import check_corpus, parse_setting, read_with_bar
from confide.runs.library import Library, names_recipe, open_library
from confide.runs.parameters import load_parameters_of
from confide.runs.recogniser import language_of, load_recogniser, speech_of
from confide.speech.corpora import CorpusSettings
from confide.speech.corpus import Corpus, Skipped, count_by_reason
from confide.speech.recogniser import Recogniser
from confide.speech.scores import Rate, Scores
from confide.speech.settings import SpeechSettings
from confide.speech.store import open_store


@dataclass(frozen=True)
class SpeechEvaluation:
    """What a recogniser makes of a corpus."""

    run: str
    corpus: str
    language: str
    decoder: str
    scores: Scores
    skipped: tuple[Skipped, ...]

    @property
    def skipped_by_reason(self) -> dict[str, int]:
        return count_by_reason(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Error rates in percent, as a run's metrics have them."""
        return {
            "task": "speech",
            "run": self.run,
            "corpus": self.corpus,
            "language": self.language,
            "decoder": self.decoder,
            "wer": _percent(self.scores.wer),
            "cer": _percent(self.scores.cer),
            "utterances": self.scores.utterances,
            "words": self.scores.wer.total,
            "empty_references": self.scores.empty_references,
            "speakers": [
                {"name": s.name, "wer": 100 * s.wer, "cer": 100 * s.cer, "utterances": s.utterances, "words": s.words}
                for s in self.scores.speakers
            ],
            "skipped": self.skipped_by_reason,
            "skipped_utterances": [{"id": item.id, "reason": item.reason} for item in self.skipped],
        }


@dataclass(frozen=True)
class RetrievalEvaluation:
    """What a retriever is worth on the test queries of its data."""

    run: str
    corpus: str
    method: str
    documents: int
    scores: RetrievalScores
    loss: float
    left_out: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "retrieval", "run": self.run, "corpus": self.corpus, "method": self.method,
            "documents": self.documents, **self.scores.to_json(), "test_loss": folder.finite(self.loss),
            "left_out": self.left_out,
        }  # fmt: skip


@dataclass(frozen=True)
class TaskEvaluation:
    """What any other task says of its model."""

    run: str
    task: str
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        safe = {name: folder.finite(value) for name, value in self.metrics.items()}
        return {"task": self.task, "run": self.run, "metrics": safe}


RunEvaluation = SpeechEvaluation | RetrievalEvaluation | TaskEvaluation


def evaluate(
    run: Path,
    corpus: str | None = None,
    settings: Sequence[str] = (),
    language_model: Path | None = None,
    quiet: bool = False,
) -> RunEvaluation:
    """Score the model of a finished run, or a recipe of plain search; `settings` are words of --set."""
    if _is_retrieval(run):
        if corpus is not None or language_model is not None:
            raise UserError(f"{run} is of task retrieval: --corpus and --language-model are for speech; drop them")
        return evaluate_retrieval(open_library(run, settings, quiet))
    recipe = folder.held_recipe(run)
    if recipe.task.kind == "speech":
        return _evaluate_speech_run(run, recipe, corpus, settings, language_model, quiet)
    if corpus is not None or settings or language_model is not None:
        raise UserError(
            f"{run} holds a run of {recipe.task.kind}: --corpus, --set and --language-model are for speech; drop them"
        )
    task = make_task(recipe.task, recipe.run.seed)
    with torch.no_grad():
        return TaskEvaluation(str(run), task.name, task.evaluate(load_parameters_of(run, task)))


def evaluate_speech(
    recogniser: Recogniser, corpus: Corpus, run: str = "", cache: Path | None = None, quiet: bool = False
) -> SpeechEvaluation:
    """Error rates on a corpus. `cache` is where features are kept."""
    recogniser.check_language(corpus.language, corpus.name)
    store = open_store(corpus, recogniser.tokens, recogniser.features, cache, recogniser.model.stride, quiet=quiet)
    scores = recogniser.transcribe_store(store, quiet)[0].score()
    skipped = (*corpus.skipped, *store.skipped)
    return SpeechEvaluation(run, corpus.name, corpus.language, recogniser.decoder, scores, skipped)


def evaluate_retrieval(library: Library) -> RetrievalEvaluation:
    """All measures on the test queries, as the run's own evaluation has them."""
    retriever, corpus, test = library.retriever, library.corpus, library.corpus.test
    hidden = retriever.vectors(library.parameters, test.texts)
    labels = torch.from_numpy(test.labels)
    ranks, loss = retriever.ranks(library.parameters, hidden, labels, library.document_vectors)
    names = [document.id for document in corpus.documents]
    scores = summarise(ranks, test.labels, names, min(retriever.settings.k, len(names)))
    return RetrievalEvaluation(library.name, corpus.name, library.method, len(names), scores, loss, corpus.left_out)


def _is_retrieval(run: Path) -> bool:
    """Whether this is a run of retrieval, or a recipe of it."""
    found = recipes.load(str(run)) if names_recipe(run) else folder.held_recipe(run)
    return found.task.kind == "retrieval"


def _evaluate_speech_run(
    run: Path, recipe: Recipe, kind: str | None, words: Sequence[str], language_model: Path | None, quiet: bool
) -> SpeechEvaluation:
    task = speech_of(run, recipe)
    settings = _test_corpus(task, kind, words)
    recogniser = load_recogniser(run, language_model)
    recogniser.check_language(language_of(settings), settings.kind)
    return evaluate_speech(recogniser, read_with_bar(settings), str(run), task.cache, quiet)


def _test_corpus(task: SpeechSettings, kind: str | None, words: Sequence[str]) -> CorpusSettings:
    """The recipe's test corpus or one of another kind, with what --set says, checked as `confide corpus` does."""
    document: dict[str, Any] = {} if kind is not None else task.test.model_dump(exclude={"kind"})
    document.update(parse_setting(word) for word in words)
    return check_corpus(kind or task.test.kind, document)


def _percent(rate: Rate) -> dict[str, float]:
    return {
        "percent": 100 * rate.value,
        "low": 100 * rate.low,
        "high": 100 * rate.high,
        "errors": rate.errors,
        "total": rate.total,
    }
