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
from confide.retrieval.metrics import RetrievalScores, summarise
from confide.runs import folder
from confide.runs.corpus_choice import check_corpus, parse_setting, read_with_bar
from confide.runs.library import Library, names_recipe, open_library
from confide.runs.parameters import load_parameters_of
from confide.runs.recogniser import language_of, load_recogniser
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
        scores = self.scores
        return {
            "task": "speech", "run": self.run, "corpus": self.corpus, "language": self.language,
            "decoder": self.decoder, "wer": _percent(scores.wer), "cer": _percent(scores.cer),
            "utterances": scores.utterances, "words": scores.wer.total, "empty_references": scores.empty_references,
            "speakers": [
                {"name": s.name, "wer": 100 * s.wer, "cer": 100 * s.cer, "utterances": s.utterances, "words": s.words}
                for s in scores.speakers
            ],
            "skipped": self.skipped_by_reason,
            "skipped_utterances": [{"id": item.id, "reason": item.reason} for item in self.skipped],
        }  # fmt: skip


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
    encoder: str | None = None,
) -> RunEvaluation:
    """Score the model of a finished run, or a recipe of plain search; `settings` are words of --set.

    `encoder` is where the frozen encoder of a speech run is, if not where its recipe says.
    """
    recipe = recipes.load(str(run)) if names_recipe(run) else folder.held_recipe(run)
    if recipe.task.kind == "retrieval":
        if corpus is not None or language_model is not None or encoder is not None:
            raise UserError(
                f"{run} is of task retrieval: --corpus, --language-model and --encoder are for speech; drop them"
            )
        return evaluate_retrieval(open_library(run, settings, quiet))
    recipe = folder.held_recipe(run)
    if isinstance(recipe.task, SpeechSettings):
        # The recipe's test corpus or one of another kind, with what --set says, checked as `confide corpus` does.
        document: dict[str, Any] = {} if corpus is not None else recipe.task.test.model_dump(exclude={"kind"})
        document.update(parse_setting(word) for word in settings)
        chosen = check_corpus(corpus or recipe.task.test.kind, document)
        recogniser = load_recogniser(run, language_model, encoder)
        recogniser.check_language(language_of(chosen), chosen.kind)
        return evaluate_speech(recogniser, read_with_bar(chosen), str(run), recipe.task.cache, quiet)
    if corpus is not None or settings or language_model is not None or encoder is not None:
        raise UserError(
            f"{run} holds a run of {recipe.task.kind}: --corpus, --set, --language-model and --encoder are for speech; "
            "drop them"
        )
    task = make_task(recipe.task, recipe.run.seed)
    with torch.no_grad():
        return TaskEvaluation(str(run), task.name, task.evaluate(load_parameters_of(run, task)))


def evaluate_speech(
    recogniser: Recogniser, corpus: Corpus, run: str = "", cache: Path | None = None, quiet: bool = False
) -> SpeechEvaluation:
    """Error rates on a corpus. `cache` is where features are kept."""
    recogniser.check_language(corpus.language, corpus.name)
    store = open_store(corpus, recogniser.tokens, recogniser.network.front, cache, quiet=quiet)
    scores = recogniser.transcribe_store(store, quiet)[0].score()
    skipped = (*corpus.skipped, *store.skipped)
    return SpeechEvaluation(run, corpus.name, corpus.language, recogniser.decoder, scores, skipped)


def evaluate_retrieval(library: Library) -> RetrievalEvaluation:
    """All measures on the test queries, as the run's own evaluation has them."""
    retriever, corpus = library.retriever, library.corpus
    if corpus is None:
        raise UserError(
            f"{library.name} was published without its test queries, so there is nothing to evaluate it on; expected "
            "the run's own folder"
        )
    test = corpus.test
    hidden = retriever.vectors(library.parameters, test.texts)
    labels = torch.from_numpy(test.labels)
    ranks, loss = retriever.ranks(library.parameters, hidden, labels, library.document_vectors)
    names = [document.id for document in corpus.documents]
    scores = summarise(ranks, test.labels, names, min(retriever.settings.k, len(names)))
    return RetrievalEvaluation(library.name, corpus.name, library.method, len(names), scores, loss, corpus.left_out)


def _percent(rate: Rate) -> dict[str, float]:
    percents = {"percent": 100 * rate.value, "low": 100 * rate.low, "high": 100 * rate.high}
    return {**percents, "errors": rate.errors, "total": rate.total}
