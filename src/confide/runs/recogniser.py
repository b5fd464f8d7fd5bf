"""Using a trained recogniser: scoring it on a corpus (PFL-ASR section 4, "Evaluation") and transcribing recordings.

All that is needed is the folder of a finished run: its recipe says which tokens, features and model, its file of
tensors holds the weights. Neither the corpus that the model was trained on nor its test corpus has to be here, unless
it is the one to be scored on: the language, and with it the token set, follows from the corpus's settings alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError, require
from confide.federated.start import misfit
from confide.progress import Reporter
from confide.randomness import generator
from confide.recipe import Recipe
from confide.runs import folder
from confide.speech import model
from confide.speech.beam import BeamSearch, BeamSettings
from confide.speech.corpora import CorpusSettings
from confide.speech.corpus import Corpus, Language, Skipped, counted
from confide.speech.decode import Word, greedy, greedy_words
from confide.speech.features import FeatureSettings, log_mel
from confide.speech.model import ModelSettings
from confide.speech.scores import Rate, Scores, error_counts, score
from confide.speech.settings import SpeechSettings
from confide.speech.store import FeatureStore, open_store
from confide.speech.tokens import BOUNDARY, Tokens
from confide.speech.transcribe import Transcript, transcribe

# As in training's own evaluation, so that the two agree to the last digit.
_BATCH_SECONDS = 60.0


@dataclass(frozen=True)
class Recogniser:
    """A model with all that turns samples into words."""

    tokens: Tokens
    features: FeatureSettings
    model: ModelSettings
    parameters: Mapping[str, Tensor]
    search: BeamSearch | None = None  # none: greedy decoding

    @property
    def decoder(self) -> str:
        return "greedy" if self.search is None else "beam search with a language model"

    def check_language(self, language: Language, corpus: str) -> None:
        if language != self.tokens.language:
            raise UserError(
                f"the corpus {corpus} is in {language!r} and the model writes {self.tokens.language!r}; give a corpus "
                "in the model's language"
            )

    @torch.inference_mode()
    def logits(self, features: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Logits (batch, output frames, tokens) of utterances (frames, mels), and how many frames of each count."""
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(each) for each in features], batch_first=True)
        lengths = torch.tensor([len(each) for each in features])
        return model.forward(self.model, self.parameters, padded, lengths, None)

    def texts(self, features: list[np.ndarray]) -> list[str]:
        """What each utterance (frames, mels) says."""
        logits, lengths = self.logits(features)
        if self.search is None:
            return [self.tokens.decode(ids) for ids in greedy(logits, lengths)]
        rows = zip(logits.numpy(), lengths.tolist(), strict=True)
        return [self.search.text(row[:length]) for row, length in rows]

    def transcribe(self, samples: np.ndarray) -> Transcript:
        """What a recording of any length says; samples (n,) are mono, at 16 kHz."""
        seconds = self.features.step * self.model.stride
        return transcribe(
            samples, lambda piece: log_mel(piece, self.features), self._one, self._words, frame_seconds=seconds
        )

    def _one(self, features: np.ndarray) -> np.ndarray:
        logits, lengths = self.logits([features])
        return logits[0, : int(lengths[0])].numpy()

    def _words(self, logits: np.ndarray) -> list[Word]:
        if len(logits) == 0:  # shorter than one frame of the output
            return []
        if self.search is not None:
            return self.search.words(logits)
        return greedy_words(logits, self.tokens.decode, BOUNDARY)


@dataclass(frozen=True)
class Speaker:
    """How well one speaker is understood."""

    name: str
    wer: float  # a share
    cer: float
    utterances: int
    words: int


@dataclass(frozen=True)
class Evaluation:
    """What a recogniser makes of a corpus. Speakers are in falling order of their word error rate."""

    corpus: str
    language: str
    decoder: str
    scores: Scores
    speakers: tuple[Speaker, ...]
    skipped: tuple[Skipped, ...]

    @property
    def skipped_by_reason(self) -> dict[str, int]:
        return counted(self.skipped)

    def to_json(self) -> dict[str, Any]:
        """Error rates in percent, as a run's metrics have them."""
        return {
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
                for s in self.speakers
            ],
            "skipped": self.skipped_by_reason,
            "skipped_utterances": [{"id": item.id, "reason": item.reason} for item in self.skipped],
        }


def language_of(settings: CorpusSettings) -> Language:
    """The language of a corpus that need not be here. The kinds without such a setting are English."""
    language: Language = getattr(settings, "language", "en")
    return language


def speech_of(run: Path, recipe: Recipe) -> SpeechSettings:
    """The recipe's task, which has to be speech."""
    if not isinstance(recipe.task, SpeechSettings):
        raise UserError(f"{run} holds a run of {recipe.task.kind}, which hears nothing; give one whose task is speech")
    return recipe.task


def load_recogniser(run: Path, language_model: Path | None = None) -> Recogniser:
    """The recogniser that a finished run left."""
    task = speech_of(run, folder.held_recipe(run))
    require("speech", "speech recognition")
    tokens = Tokens(language_of(task.corpus))
    settings = task.model.model_copy(update={"tokens": tokens.size, "mels": task.features.mels})
    parameters = held_parameters(run, model.parameter_shapes(settings))
    search = BeamSearch(BeamSettings(language_model=language_model), tokens.names) if language_model else None
    return Recogniser(tokens, task.features, settings, parameters, search)


def held_parameters(run: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors that a finished run left, which have to be those of its recipe."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = run / folder.MODEL
    try:
        found = load_file(file)
    except FileNotFoundError:
        raise UserError(
            f"{run} holds no model yet: its run is not finished; go on with `confide resume {run}`"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a model ({error}); put a whole copy in its place") from None
    wrong = misfit(found, shapes)
    if wrong is not None:
        raise UserError(f"{file} does not fit {run / folder.RECIPE}: {wrong}; put the run's own model and recipe back")
    return {name: found[name] for name in shapes}


def evaluate(
    recogniser: Recogniser, corpus: Corpus, seed: int = 0, cache: Path | None = None, quiet: bool = False
) -> Evaluation:
    """Error rates on a corpus. `seed` draws the resamples of the intervals; `cache` is where features are kept."""
    recogniser.check_language(corpus.language, corpus.name)
    store = open_store(corpus, recogniser.tokens, recogniser.features, cache, recogniser.model.stride, quiet=quiet)
    references, hypotheses, speakers = _heard(recogniser, store, quiet)
    scores = score(references, hypotheses, speakers, generator(seed, "bootstrap"))
    table = _by_speaker(references, hypotheses, speakers, scores)
    skipped = (*corpus.skipped, *store.skipped)
    return Evaluation(corpus.name, corpus.language, recogniser.decoder, scores, table, skipped)


def _heard(recogniser: Recogniser, store: FeatureStore, quiet: bool) -> tuple[list[str], list[str], list[str]]:
    """What was said, what was heard, and by whom, one entry per utterance."""
    references: list[str] = []
    hypotheses: list[str] = []
    speakers: list[str] = []
    with Reporter("speakers", len(store.speakers), quiet=quiet) as reporter:
        for user, name in enumerate(store.speakers):
            texts = store.texts(user)
            for places in _batches(store.frames(user)):
                hypotheses += recogniser.texts(store.features(user, places))
                references += [texts[place] for place in places]
                speakers += [name] * len(places)
            reporter.advance(name)
    return references, hypotheses, speakers


def _batches(frames: np.ndarray) -> Iterator[list[int]]:
    """Every utterance of a user, neighbours in length together, at most a minute with its padding."""
    batch: list[int] = []
    for place in np.argsort(frames, kind="stable").tolist():
        if batch and (len(batch) + 1) * int(frames[place]) > _BATCH_SECONDS / model.FRAME_SECONDS:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _by_speaker(
    references: list[str], hypotheses: list[str], speakers: list[str], scores: Scores
) -> tuple[Speaker, ...]:
    names, owner = np.unique(np.asarray(speakers, dtype=np.str_), return_inverse=True)
    in_characters = error_counts(references, hypotheses, characters=True)  # (utterances, 2)
    wrong, size = (np.bincount(owner, weights=column) for column in in_characters.T)  # each (speakers,)
    words = np.bincount(owner, weights=[len(reference.split()) for reference in references])
    utterances = np.bincount(owner)
    found = [
        Speaker(str(name), scores.of_speaker[str(name)], wrong[i] / size[i], int(utterances[i]), int(words[i]))
        for i, name in enumerate(names)
        if str(name) in scores.of_speaker
    ]
    return tuple(sorted(found, key=lambda speaker: (-speaker.wer, speaker.name)))


def _percent(rate: Rate) -> dict[str, float]:
    return {
        "percent": 100 * rate.value,
        "low": 100 * rate.low,
        "high": 100 * rate.high,
        "errors": rate.errors,
        "total": rate.total,
    }
