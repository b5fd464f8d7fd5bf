"""The speech task: users are speakers, the model is the recogniser, the loss is CTC (PFL-ASR section 4, appendix F).

A batch is read from the feature store, augmented and padded; nothing here does signal processing. Dropout, layer drop
and shifted positions draw from a seed that comes with the batch, so every machine computes the same step.

Central training is the same loop with other users: `pool: n` deals all utterances into n users at random. With one
local step at rate 1 their mean update is the gradient of one batch of all of them, and the central optimiser is the
optimiser. `start` names the seed model: a finished run, or a file of tensors, from which training begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice
from multiprocessing import parent_process
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError, require
from confide.federated.items import Items
from confide.federated.local import LocalTraining, Updates
from confide.federated.one_pass import Pass
from confide.federated.start import load_start
from confide.federated.symmetry import Scaling
from confide.federated.task import BasicTask
from confide.files import digest
from confide.randomness import generator
from confide.settings import read_yaml
from confide.speech import model, together
from confide.speech.augment import augment
from confide.speech.corpora import read_corpus
from confide.speech.corpus import Corpus, Skipped, Utterance, count_by_reason
from confide.speech.head_updates import KERNELS, Scales, head_updates, users_together
from confide.speech.network import Pretrained, network_of
from confide.speech.recogniser import Recogniser, pad_features, pad_targets
from confide.speech.scores import error_counts
from confide.speech.settings import SpeechSettings
from confide.speech.store import FeatureStore, open_store


class Speech(BasicTask):
    """The task that the loop trains."""

    name = "speech"
    metric = "wer"
    kernels = KERNELS

    def __init__(self, settings: SpeechSettings, seed: int, quiet: bool = False) -> None:
        require("speech", "speech recognition")
        self.settings, self.seed, self._quiet = settings, seed, quiet
        corpus, test = read_corpus(settings.corpus), read_corpus(settings.test)
        if corpus.language != test.language:
            raise UserError(
                f"task.corpus is in {corpus.language!r} and task.test in {test.language!r}; one model has one token set"
            )
        self.tokens = settings.tokens(corpus.language)
        self.network = network_of(settings, self.tokens)
        # A client of a deployment is set up as one user who is tested on its own data; nobody reads that test.
        if (settings.pool or len(corpus.speakers)) > 1 or settings.test != settings.corpus:
            _warn_of_overlap(corpus, test)
        self.on_gpu = getattr(self.network, "parts", None) is None  # parts of an encoder run inside of it
        self._seconds: dict[int, np.ndarray] = {}
        self._scales = Scales()
        self._listings = (corpus, test)
        self.at_most = settings.pool or len(corpus.speakers)

    @cached_property
    def _stores(self) -> tuple[FeatureStore, FeatureStore]:
        """Features of training and test, made when they are first asked for: after everything that may be refused."""
        corpus, test = self._listings
        return self._open(corpus), self._open(test)

    @property
    def store(self) -> FeatureStore:
        return self._stores[0]

    @property
    def test(self) -> FeatureStore:
        return self._stores[1]

    @property
    def skipped(self) -> list[Skipped]:
        return [*self._listings[0].skipped, *self.store.skipped]

    @cached_property
    def left_out(self) -> Mapping[str, int]:  # type: ignore[override]
        return count_by_reason(self.skipped)

    @cached_property
    def held(self) -> list[np.ndarray]:
        return _deal_utterances(self.store.examples, self.settings.pool, self.seed)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digest who said what for how long, and the recordings, which were digested when features were made."""
        names = ("the users' data", "the test data")
        listed = {name: digest(_describe(corpus)) for name, corpus in zip(names, self._listings, strict=True)}
        listed |= {"the users' audio": digest(self.store.audio), "the test audio": digest(self.test.audio)}
        encoder = self.network.encoder
        return listed if encoder is None else {**listed, "the encoder": encoder[:32]}

    def _open(self, corpus: Corpus) -> FeatureStore:
        return open_store(corpus, self.tokens, self.network.front, self.settings.cache, quiet=self._quiet)

    @cached_property
    def examples(self) -> np.ndarray:
        return np.array([len(own) for own in self.held], dtype=np.int64)

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.network.initial_parameters(generator(self.seed, "model"))

    def starting_parameters(self) -> dict[str, Tensor]:
        fresh = self.initial_parameters()
        # A head trained on kept states can come first, and the parts below it begin with the encoder as it is.
        below = [name for name in fresh if not name.startswith("head.")] if self.settings.model.encoder else []
        start, encoder = self.settings.start, self.network.encoder
        _ = self._seed_was_looked_at
        return fresh if start is None else load_start(start, fresh, optional=below, encoder=encoder)

    @cached_property
    def _seed_was_looked_at(self) -> bool:
        """Say so, once, where people of the test trained the starting model; whether its data could be listed."""
        start = self.settings.start
        if start is None or not (start / "recipe.yaml").is_file():
            return False
        try:
            theirs = SpeechSettings.model_validate(read_yaml((start / "recipe.yaml").read_text())["task"])
            if theirs.corpus.kind in ("population", "synthetic"):  # nobody's voice
                return True
            _warn_of_overlap(read_corpus(theirs.corpus), self._listings[1], f"trained task.start={start}")
        except (UserError, ValueError, KeyError, TypeError, OSError):  # its data lie elsewhere by now
            return False
        return True

    @property
    def scalings(self) -> list[Scaling]:
        return self.network.scalings

    @property
    def begins_elsewhere(self) -> bool:
        return self.settings.start is not None

    def seconds(self, user: int) -> np.ndarray:
        if user not in self._seconds:
            held = self.held[user].tolist()
            lengths = {owner: self.store.seconds(owner) for owner in {owner for owner, _ in held}}
            self._seconds[user] = np.array([lengths[owner][place] for owner, place in held])
        return self._seconds[user]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        features, targets = self._utterances(self.held[user] if examples is None else self.held[user][examples])
        padded, lengths = pad_features(features)
        if self.settings.augment is not None:
            padded = augment(padded, lengths, self.settings.augment, draw)
        seed = torch.tensor(int(draw.integers(2**63 - 1)))
        return padded, lengths, *pad_targets(targets), seed

    def _utterances(self, chosen: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Features and targets of utterances, given by owner and place."""
        features, targets = [], []
        for owner, rows in groupby(chosen.tolist(), key=itemgetter(0)):  # a speaker's file is opened once
            places = [place for _, place in rows]
            features += self.store.features(owner, places)
            targets += self.store.targets(owner, places)
        return features, targets

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, lengths, targets, sizes, seed = batch
        randomness = torch.Generator().manual_seed(int(seed))
        logits, out_lengths = self.network.forward(parameters, features, lengths, randomness)
        return model.ctc_loss(logits, out_lengths, targets, sizes)

    def users_in_one_pass(self, local: LocalTraining) -> int:
        return together.users_at_once(self, self.network, local)

    def passes(self, batches: Sequence[tuple[Tensor, ...]]) -> Iterator[Pass]:
        return together.passes(self.network, batches)

    def losses(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return together.losses(self.network, parameters, batch)

    def users_at_once(self, local: LocalTraining) -> int:
        """Many, where each takes one step of a head on all of its utterances."""
        head = isinstance(self.network, Pretrained) and self.network.parts is None
        return users_together(local, self._most) if head else 0

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        if not self.users_at_once(local):
            return None
        held = [self.held[user] for user in users]
        states, targets = self._utterances(np.concatenate(held))
        inputs, labels = ([torch.from_numpy(each) for each in some] for some in (states, targets))
        counts, rest = [len(own) for own in held], iter(inputs)
        scales = [self._scales.of(user, list(islice(rest, n))) for user, n in zip(users.tolist(), counts, strict=True)]
        return head_updates(parameters, inputs, scales, labels, counts, local, learning_rate)

    @cached_property
    def _most(self) -> int:
        return int(self.examples.max())

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Error rates in percent by greedy decoding of the test corpus, and the mean loss."""
        return self.scored(parameters)[0]

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items]:
        """The evaluation, and the errors in each utterance."""
        recogniser = Recogniser(self.tokens, self.network, parameters)
        found, loss = recogniser.transcribe_store(self.test)
        which = self.settings.test.model_dump_json(exclude={"cache", "folder"})
        words = found.items(test=digest([which, *found.speakers, *found.references]))
        wer, cer = (100 * replace(items, scale=1.0).value for items in (words, found.items(characters=True)))
        return {"wer": wer, "cer": cer, "test_loss": loss}, words

    def own_accuracy(self, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
        """Of each user, 1 less the word error rate on its own utterances by greedy decoding, and at least 0."""
        recogniser = Recogniser(self.tokens, self.network, parameters)
        found = torch.empty(len(users), dtype=torch.float64)
        for place, user in enumerate(users.tolist()):
            references: list[str] = []
            hypotheses: list[str] = []
            for owner, rows in groupby(self.held[user].tolist(), key=itemgetter(0)):
                texts, places = self.store.texts(owner), [row for _, row in rows]
                references += [texts[p] for p in places]
                hypotheses += recogniser.texts(self.store.features(owner, places))
            errors, words = error_counts(references, hypotheses, characters=False).sum(axis=0).tolist()
            found[place] = 1 - min(errors / max(words, 1), 1)
        return found


def _describe(corpus: Corpus) -> Iterator[str]:
    for utterance in corpus.utterances():
        yield from (utterance.id, utterance.speaker, f"{utterance.seconds:.4f}", utterance.text)


def _deal_utterances(examples: np.ndarray, pool: int | None, seed: int) -> list[np.ndarray]:
    """Whose utterances each user holds: those of one speaker, or a random part of all if `pool` users share them."""
    owners = np.repeat(np.arange(len(examples)), examples)
    everything = np.stack([owners, np.concatenate([np.arange(count) for count in examples])], axis=1)
    if pool is None:
        return np.split(everything, np.cumsum(examples)[:-1])  # of each user (utterances, 2): owner and place
    if pool > len(everything):
        raise UserError(f"task.pool={pool}: there are only {len(everything)} utterances to deal out")
    return np.array_split(everything[generator(seed, "pool").permutation(len(everything))], pool)


def _places(utterance: Utterance) -> list[object]:
    """Where its sound lies: its files, or what stands for it."""
    held = utterance.made is not None and utterance.made.held
    return [path.resolve() for path in utterance.audio] + ([utterance.made.address] if held and utterance.made else [])


def _warn_of_overlap(corpus: Corpus, test: Corpus, how: str = "are trained on too") -> None:
    """Say so where people of the test are trained on: by their recordings, since names may be alike by chance."""
    heard = {place for utterance in corpus.utterances() for place in _places(utterance)}
    both = [name for name, own in test.speakers.items() if any(place in heard for u in own for place in _places(u))]
    if both and parent_process() is None:
        print(
            f"warning: {len(both):,} of the {len(test.speakers):,} test speakers {how} "
            f"({', '.join(both[:3])}{', ...' if len(both) > 3 else ''}): the error rate says nothing of other people; "
            "part them, for example by share: 90 in task.corpus and share: 10 in task.test",
            file=sys.stderr, flush=True,
        )  # fmt: skip
