"""The recogniser on utterances of random features: users of any sizes, for measurements and tests of local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from confide.federated.local import LocalTraining
from confide.federated.one_pass import Pass
from confide.federated.task import BasicTask
from confide.randomness import generator
from confide.speech import model, together
from confide.speech.augment import SpecAugment, augment
from confide.speech.features import FeatureSettings
from confide.speech.model import FRAME_SECONDS, ModelSettings
from confide.speech.network import Whole
from confide.speech.recogniser import pad_features, pad_targets
from confide.speech.store import LogMel


class Utterances(BasicTask):
    """User k holds utterances of `frames[k]` frames, with a label for every `frames_a_label` of them."""

    name, metric = "utterances", "none"

    def __init__(
        self, settings: ModelSettings, frames: Sequence[Sequence[int]], augmented: SpecAugment | None = None,
        frames_a_label: int = 12, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.augmented, draw = settings, augmented, np.random.default_rng(seed)
        self.network = Whole(settings, LogMel(FeatureSettings()))
        self.examples = np.array([len(own) for own in frames])
        self.frames = [np.array(own) for own in frames]
        self.features = [[draw.normal(size=(n, settings.mels)).astype(np.float32) for n in own] for own in frames]
        self.labels = [[draw.integers(1, settings.tokens, n // frames_a_label + 1) for n in own] for own in frames]

    def initial_parameters(self) -> dict[str, Tensor]:
        return model.initial_parameters(self.model, generator(0, "model"))

    def seconds(self, user: int) -> np.ndarray:
        return np.asarray(self.frames[user] * FRAME_SECONDS)

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        chosen = range(int(self.examples[user])) if examples is None else examples.tolist()
        features, lengths = pad_features([self.features[user][each] for each in chosen])
        if self.augmented is not None:
            features = augment(features, lengths, self.augmented, draw)
        seed = torch.tensor(int(draw.integers(2**63 - 1)))
        return features, lengths, *pad_targets([self.labels[user][each] for each in chosen]), seed

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, lengths, targets, sizes, seed = batch
        randomness = torch.Generator().manual_seed(int(seed))
        logits, out_lengths = model.forward(self.model, parameters, features, lengths, randomness)
        return model.ctc_loss(logits, out_lengths, targets, sizes)

    def users_in_one_pass(self, local: LocalTraining) -> int:
        return together.users_at_once(self, self.network, local)

    def passes(self, batches: Sequence[tuple[Tensor, ...]]) -> Iterator[Pass]:
        return together.passes(self.network, batches)

    def losses(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return together.losses(self.network, parameters, batch)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}
