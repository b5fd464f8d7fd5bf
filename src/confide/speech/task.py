"""The speech task: users are speakers, the model is the recogniser, the loss is CTC (PFL-ASR section 4, appendix F).

A user's batch is read from the feature store, augmented and padded; nothing here does signal processing. Dropout, layer
drop and shifted positions draw from a seed that comes with the batch, so a step is the same wherever it is made.

Central training is the same loop with other users: `pool: n` deals all utterances into n users at random. With one
local step at rate 1 their mean update is the gradient of one batch of all of them, and the central optimiser is the
optimiser. `start` takes the model of a finished run, or a file of tensors, to begin from: the seed model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError, require
from confide.federated.items import Items, grouped
from confide.federated.start import load_start
from confide.federated.task import BasicTask
from confide.files import digest
from confide.randomness import generator
from confide.speech import model
from confide.speech.augment import augment
from confide.speech.corpora import read_corpus
from confide.speech.corpus import Corpus, Skipped, counted
from confide.speech.decode import greedy
from confide.speech.scores import Scores, error_counts, score
from confide.speech.settings import SpeechSettings
from confide.speech.store import FeatureStore, open_store
from confide.speech.tokens import BOUNDARY, Tokens

_EVALUATION_SECONDS = 60.0


@dataclass(frozen=True)
class Pooled:
    """One user of a pool: whose utterances it holds."""

    owners: np.ndarray  # (n,) user of the store
    places: np.ndarray  # (n,) utterance of that user


class Speech(BasicTask):
    """The task that the loop trains."""

    name = "speech"
    metric = "wer"

    def __init__(self, settings: SpeechSettings, seed: int, quiet: bool = False) -> None:
        require("speech", "speech recognition")
        self.settings, self.seed = settings, seed
        corpus, test = read_corpus(settings.corpus), read_corpus(settings.test)
        if corpus.language != test.language:
            raise UserError(
                f"task.corpus is in {corpus.language!r} and task.test in {test.language!r}; one model has one token set"
            )
        self.tokens = Tokens(corpus.language)
        self.model = settings.model.model_copy(update={"tokens": self.tokens.size, "mels": settings.features.mels})
        self.store = self._open(corpus, quiet)
        self.test = self._open(test, quiet)
        self.skipped: list[Skipped] = [*corpus.skipped, *self.store.skipped]
        self.left_out = counted(self.skipped)
        """How many utterances were skipped, by reason; the summary says so."""
        self.pool = _pooled(self.store, settings.pool, seed) if settings.pool is not None else None
        self._seconds: dict[int, np.ndarray] = {}
        self._listings = (corpus, test)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Of who said what for how long: reading every recording again would take as long as training."""
        names = ("the users' data", "the test data")
        return {name: digest(_listed(corpus)) for name, corpus in zip(names, self._listings, strict=True)}

    def _open(self, corpus: Corpus, quiet: bool) -> FeatureStore:
        stride = self.settings.model.stride
        return open_store(corpus, self.tokens, self.settings.features, self.settings.cache, stride, quiet=quiet)

    @property
    def examples(self) -> np.ndarray:
        if self.pool is not None:
            return np.array([len(user.owners) for user in self.pool], dtype=np.int64)
        return self.store.examples

    def initial_parameters(self) -> dict[str, Tensor]:
        return model.initial_parameters(self.model, generator(self.seed, "model"))

    def starting_parameters(self) -> dict[str, Tensor]:
        fresh = self.initial_parameters()
        return fresh if self.settings.start is None else load_start(self.settings.start, fresh)

    def seconds(self, user: int) -> np.ndarray:
        if user not in self._seconds:
            held = self.pool[user] if self.pool is not None else None
            if held is None:
                self._seconds[user] = self.store.seconds(user)
            else:
                lengths = {owner: self.store.seconds(owner) for owner in set(held.owners.tolist())}
                pairs = zip(held.owners.tolist(), held.places.tolist(), strict=True)
                self._seconds[user] = np.array([lengths[owner][place] for owner, place in pairs])
        return self._seconds[user]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        chosen = np.arange(int(self.examples[user])) if examples is None else examples
        if self.pool is None:
            features, targets = self.store.features(user, chosen), self.store.targets(user, chosen)
        else:
            held = self.pool[user]
            features, targets = [], []
            for owner, place in zip(held.owners[chosen].tolist(), held.places[chosen].tolist(), strict=True):
                features += self.store.features(owner, [place])
                targets += self.store.targets(owner, [place])
        padded, lengths = _padded(features)
        if self.settings.augment is not None:
            padded = augment(padded, lengths, self.settings.augment, draw)
        labels = [torch.from_numpy(label) for label in targets]
        sizes = torch.tensor([len(label) for label in labels])
        seed = torch.tensor(int(draw.integers(2**63 - 1)))
        return padded, lengths, torch.nn.utils.rnn.pad_sequence(labels, True, BOUNDARY), sizes, seed

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, lengths, targets, sizes, seed = batch
        randomness = torch.Generator().manual_seed(int(seed))
        logits, out_lengths = model.forward(self.model, parameters, features, lengths, randomness)
        return model.ctc_loss(logits, out_lengths, targets, sizes)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return _metrics(*self.heard(parameters, self.test))

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items]:
        """The evaluation, and the errors in each utterance."""
        references, hypotheses, speakers, loss = self._decoded(parameters, self.test)
        found = score(references, hypotheses, speakers, generator(self.seed, "bootstrap"))
        errors = error_counts(references, hypotheses, characters=False).astype(np.float64)  # (utterances, 2)
        names, places = grouped(speakers)
        which = self.settings.test.model_dump_json(exclude={"cache", "folder"})
        items = Items(
            "wer", "lower", 100.0, "speaker", True, names, places, errors[:, 0], errors[:, 1],
            digest([which, *speakers, *references]),
        )  # fmt: skip
        return _metrics(found, loss), items

    def heard(self, parameters: Mapping[str, Tensor], store: FeatureStore) -> tuple[Scores, float]:
        """Greedy decoding of a whole store: error rates in shares, and the mean loss."""
        references, hypotheses, speakers, loss = self._decoded(parameters, store)
        return score(references, hypotheses, speakers, generator(self.seed, "bootstrap")), loss

    @torch.no_grad()
    def _decoded(
        self, parameters: Mapping[str, Tensor], store: FeatureStore
    ) -> tuple[list[str], list[str], list[str], float]:
        """References, hypotheses and speakers, one entry per utterance, and the mean loss."""
        references, hypotheses, speakers, losses = [], [], [], []
        for user, places in _batches(store):
            padded, lengths = _padded(store.features(user, places))
            logits, out_lengths = model.forward(self.model, parameters, padded, lengths, None)
            hypotheses += [self.tokens.decode(ids) for ids in greedy(logits, out_lengths)]
            texts = store.texts(user)
            references += [texts[place] for place in places]
            speakers += [store.speakers[user]] * len(places)
            labels = [torch.from_numpy(label) for label in store.targets(user, places)]
            sizes = torch.tensor([len(label) for label in labels])
            targets = torch.nn.utils.rnn.pad_sequence(labels, True, BOUNDARY)
            losses.append(float(model.ctc_loss(logits, out_lengths, targets, sizes)) * len(places))
        return references, hypotheses, speakers, sum(losses) / len(references)


def _metrics(found: Scores, loss: float) -> dict[str, float]:
    return {"wer": 100 * found.wer.value, "cer": 100 * found.cer.value, "test_loss": loss}


def _listed(corpus: Corpus) -> Iterator[str]:
    for utterance in corpus.utterances():
        yield from (utterance.id, utterance.speaker, f"{utterance.seconds:.4f}", utterance.text)


def _pooled(store: FeatureStore, users: int, seed: int) -> list[Pooled]:
    owners = np.repeat(np.arange(len(store.examples)), store.examples)
    places = np.concatenate([np.arange(held) for held in store.examples])
    if users > len(owners):
        raise UserError(f"task.pool={users}: there are only {len(owners)} utterances to deal out")
    order = generator(seed, "pool").permutation(len(owners))
    return [Pooled(owners[part], places[part]) for part in np.array_split(order, users)]


def _padded(features: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """(batch, frames, mels) with zeros behind each utterance, and the utterances' lengths."""
    lengths = [len(each) for each in features]
    padded = np.zeros((len(features), max(lengths), features[0].shape[1]), dtype=np.float32)
    for row, each in zip(padded, features, strict=True):
        row[: len(each)] = each
    return torch.from_numpy(padded), torch.tensor(lengths)


def _batches(store: FeatureStore) -> Iterator[tuple[int, list[int]]]:
    """Every utterance of every user, neighbours in length together."""
    for user in range(len(store.speakers)):
        frames = store.frames(user)
        batch: list[int] = []
        for place in np.argsort(frames, kind="stable").tolist():
            if batch and (len(batch) + 1) * int(frames[place]) > _EVALUATION_SECONDS / model.FRAME_SECONDS:
                yield user, batch
                batch = []
            batch.append(place)
        yield user, batch
