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
from confide.federated.items import Items
from confide.federated.start import load_start
from confide.federated.task import BasicTask
from confide.files import digest
from confide.randomness import generator
from confide.speech import model
from confide.speech.augment import augment
from confide.speech.corpora import read_corpus
from confide.speech.corpus import Corpus, Skipped, counted
from confide.speech.recogniser import Recogniser, model_settings, padded_features, padded_targets
from confide.speech.scores import share
from confide.speech.settings import SpeechSettings
from confide.speech.store import FeatureStore, open_store
from confide.speech.tokens import Tokens


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
        self.model = model_settings(settings, self.tokens)
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
        padded, lengths = padded_features(features)
        if self.settings.augment is not None:
            padded = augment(padded, lengths, self.settings.augment, draw)
        seed = torch.tensor(int(draw.integers(2**63 - 1)))
        return padded, lengths, *padded_targets(targets), seed

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, lengths, targets, sizes, seed = batch
        randomness = torch.Generator().manual_seed(int(seed))
        logits, out_lengths = model.forward(self.model, parameters, features, lengths, randomness)
        return model.ctc_loss(logits, out_lengths, targets, sizes)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Error rates in percent by greedy decoding of the test corpus, and the mean loss."""
        return self.scored(parameters)[0]

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items]:
        """The evaluation, and the errors in each utterance."""
        found, loss = Recogniser(self.tokens, self.settings.features, self.model, parameters).transcribe_store(
            self.test
        )
        which = self.settings.test.model_dump_json(exclude={"cache", "folder"})
        words = found.items(test=digest([which, *found.speakers, *found.references]))
        characters = found.items(characters=True)
        return {"wer": 100 * share(words), "cer": 100 * share(characters), "test_loss": loss}, words


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
