"""A model with all that turns samples into words (PFL-ASR section 4).

The evaluations during training, `confide evaluate` and `confide transcribe` all call `Recogniser.logits`, so they
cannot disagree. Decoding is greedy, as in the paper, or a beam search with an n-gram language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.progress import Reporter
from confide.speech import model
from confide.speech.beam import BeamSearch
from confide.speech.decode import Word, greedy, greedy_words
from confide.speech.network import Network
from confide.speech.scores import Transcribed
from confide.speech.store import FeatureStore
from confide.speech.tokens import BOUNDARY, Tokens
from confide.speech.transcribe import Hearing, Transcript, transcribe

Scores = Callable[[np.ndarray], np.ndarray]
"""From samples (n,) of one utterance to logits (frames, tokens)."""
_BATCH_SECONDS = 60.0  # of audio that is decoded at once, with its padding


@dataclass(frozen=True)
class Recogniser:
    """A model and its token set, network and decoder."""

    tokens: Tokens
    network: Network
    parameters: Mapping[str, Tensor]
    search: BeamSearch | None = None  # none: greedy decoding

    @property
    def decoder(self) -> str:
        return "greedy" if self.search is None else "beam search with a language model"

    def check_language(self, language: str, corpus: str) -> None:
        if language != self.tokens.language:
            raise UserError(
                f"the corpus {corpus} is in {language!r} and the model writes {self.tokens.language!r}; give a corpus "
                "in the model's language"
            )

    # Not inference_mode: what the model caches there could not be trained with afterwards.
    @torch.no_grad()
    def logits(self, features: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Logits (batch, output frames, tokens) of utterances (frames, width), and how many frames of each count."""
        return self.network.forward(self.parameters, *pad_features(features), None)

    def transcribe_store(self, store: FeatureStore, quiet: bool = True) -> tuple[Transcribed, float]:
        """Every utterance of a store with what is recognised in it, and the mean loss."""
        references, hypotheses, speakers, losses = [], [], [], []
        with Reporter("speakers", len(store.speakers), quiet=quiet) as reporter:
            for user, name in enumerate(store.speakers):
                texts = store.texts(user)
                for places in _batches_of_similar_length(store.frames(user)):
                    logits, lengths = self.logits(store.features(user, places))
                    hypotheses += self._texts(logits, lengths)
                    references += [texts[place] for place in places]
                    speakers += [name] * len(places)
                    loss = model.ctc_loss(logits, lengths, *pad_targets(store.targets(user, places)))
                    losses.append(float(loss) * len(places))
                reporter.advance(name)
        return Transcribed(references, hypotheses, speakers), sum(losses) / len(references)

    def texts(self, features: Sequence[np.ndarray]) -> list[str]:
        """What is recognised in utterances (frames, mels), in their order."""
        found = [""] * len(features)
        for places in _batches_of_similar_length(np.array([len(each) for each in features])):
            for place, text in zip(places, self._texts(*self.logits([features[p] for p in places])), strict=True):
                found[place] = text
        return found

    def transcribe(self, samples: np.ndarray, scores: Scores | None = None) -> Transcript:
        """What a recording of any length says; samples (n,) are mono, at 16 kHz.

        `scores` takes the place of the network, as an exported graph does.
        """
        return transcribe(samples, self.hearing(scores))

    def hearing(self, scores: Scores | None = None) -> Hearing:
        """What `transcribe` and `Stream` need of it."""
        own = partial(self._words, scores=scores or self._scores)
        return Hearing(own, self.network.frame_seconds, late=self.network.silence)

    def _texts(self, logits: Tensor, lengths: Tensor) -> list[str]:
        if self.search is None:
            return [self.tokens.decode(ids) for ids in greedy(logits, lengths)]
        rows = zip(logits.numpy(), lengths.tolist(), strict=True)
        return [self.search.text(row[:length]) for row, length in rows]

    def _scores(self, samples: np.ndarray) -> np.ndarray:
        """Logits of a recording that is short enough for the model."""  # (frames, tokens)
        (features,) = self.network.front.make([samples])
        if len(features) < self.network.front.stride:  # shorter than one frame of the output
            return np.empty((0, self.tokens.size), dtype=np.float32)
        return self.logits([features])[0][0].numpy()

    def _words(self, samples: np.ndarray, scores: Scores) -> list[Word]:
        logits = scores(samples)
        if not len(logits):
            return []
        if self.search is not None:
            return self.search.words(logits)
        return greedy_words(logits, self.tokens.decode, BOUNDARY)


def pad_features(features: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """(batch, frames, mels) with zeros behind each utterance, and the utterances' lengths."""
    lengths = torch.tensor([len(each) for each in features])
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(each) for each in features], True), lengths


def pad_targets(targets: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """(batch, tokens) with boundaries behind each label, and the labels' lengths."""
    labels = [torch.from_numpy(label) for label in targets]
    return torch.nn.utils.rnn.pad_sequence(labels, True, BOUNDARY), torch.tensor([len(label) for label in labels])


def _batches_of_similar_length(frames: np.ndarray) -> Iterator[list[int]]:
    """Split a user's utterances, sorted by length, into batches that last at most a minute with their padding."""
    batch: list[int] = []
    for place in np.argsort(frames, kind="stable").tolist():
        if batch and (len(batch) + 1) * int(frames[place]) > _BATCH_SECONDS / model.FRAME_SECONDS:
            yield batch
            batch = []
        batch.append(place)
    yield batch
