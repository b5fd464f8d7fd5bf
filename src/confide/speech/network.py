"""What lies between samples and logits: the whole transformer of PFL-ASR, or parts on a frozen pretrained encoder.

A store keeps what `front` makes of samples; `forward` makes logits of it. Training, evaluation and transcription all go
through here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from confide.federated.symmetry import Scaling
from confide.speech import model, pretrained
from confide.speech.model import ModelSettings
from confide.speech.parts import Parts
from confide.speech.pretrained import KeptStates, PretrainedSettings
from confide.speech.settings import SpeechSettings
from confide.speech.store import FrontEnd, LogMel
from confide.speech.symmetry import model_scalings, whisper_scalings
from confide.speech.tokens import Tokens

_SCALE = ".final_layer_norm.weight"  # one in each of Whisper's blocks


class Network(Protocol):
    """A model's computation, without its parameters."""

    @property
    def front(self) -> FrontEnd:
        """How samples become what a store keeps."""
        ...

    @property
    def frame_seconds(self) -> float:
        """The time of an output frame."""
        ...

    @property
    def silence(self) -> float:
        """Seconds that the front end puts before the samples, by which all times are late."""
        ...

    @property
    def encoder(self) -> str | None:
        """The identity of the frozen encoder that parameters belong to, if there is one."""
        ...

    @property
    def one_pass(self) -> bool:
        """Whether utterances of several users can go through it together, each user's gradient apart."""
        ...

    @property
    def scalings(self) -> list[Scaling]:
        """How parameters can be scaled without changing what it computes."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def initial_parameters(self, draw: np.random.Generator) -> dict[str, Tensor]: ...

    def forward(
        self, parameters: Mapping[str, Tensor], features: Tensor, lengths: Tensor | None,
        randomness: torch.Generator | None, shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Logits (batch, output frames, tokens) of padded features, and how many frames of each utterance count.

        `lengths` are those of the features without padding; none: there is no padding.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """The transformer of PFL-ASR on log-mel features, all of which is trained."""

    settings: ModelSettings
    front: LogMel
    silence: float = 0.0
    encoder: None = None

    @property
    def frame_seconds(self) -> float:
        return self.front.settings.step * self.settings.stride

    @property
    def one_pass(self) -> bool:
        """Not where masks are drawn batch by batch."""
        chosen = self.settings
        random = chosen.dropout or chosen.layer_drop or chosen.checkpoint_activations
        return not random and chosen.dtype == "float32"

    @property
    def scalings(self) -> list[Scaling]:
        return model_scalings(self.settings)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return model.parameter_shapes(self.settings)

    def initial_parameters(self, draw: np.random.Generator) -> dict[str, Tensor]:
        return model.initial_parameters(self.settings, draw)

    def forward(
        self, parameters: Mapping[str, Tensor], features: Tensor, lengths: Tensor | None,
        randomness: torch.Generator | None, shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return model.forward(self.settings, parameters, features, lengths, randomness, shifts)


@dataclass(frozen=True)
class Pretrained:
    """Parts trained on a frozen encoder, whose states are kept."""

    settings: PretrainedSettings
    front: KeptStates
    tokens: int
    parts: Parts | None  # below the head

    @property
    def frame_seconds(self) -> float:
        return self.front.encoder.frame_seconds

    @property
    def silence(self) -> float:
        return self.settings.before

    @property
    def encoder(self) -> str:
        return self.front.encoder.identity

    @property
    def one_pass(self) -> bool:
        return self.parts is None or self.parts.one_pass

    @property
    def scalings(self) -> list[Scaling]:
        """Those of Whisper's blocks, where all of them are trained."""
        if "all" not in self.settings.train or self.front.encoder.kind != "whisper":
            return []
        return whisper_scalings([name.removesuffix(_SCALE) for name in self.shapes() if name.endswith(_SCALE)])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        head = pretrained.parameter_shapes(self.settings, self.front.width, self.tokens)
        return head if self.parts is None else {**self.parts.shapes, **head}

    def initial_parameters(self, draw: np.random.Generator) -> dict[str, Tensor]:
        head = pretrained.initial_parameters(self.settings, self.front.width, self.tokens, draw)
        return head if self.parts is None else {**self.parts.initial_parameters(draw), **head}

    def forward(
        self, parameters: Mapping[str, Tensor], features: Tensor, lengths: Tensor | None,
        randomness: torch.Generator | None, shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        states = features if self.parts is None else self.parts.run(parameters, features, lengths)
        whole = (
            torch.full(features.shape[:1], features.shape[1], device=features.device) if lengths is None else lengths
        )
        return pretrained.head(parameters, states), whole


def network_of(task: SpeechSettings, tokens: Tokens) -> Whole | Pretrained:
    """The recipe's model, with the features' number of inputs and the tokens' number of outputs."""
    settings = task.model.encoder
    if settings is None:
        sized = task.model.model_copy(update={"tokens": tokens.size, "mels": task.features.mels})
        return Whole(sized, LogMel(task.features, sized.stride))
    from confide.encoders.frames import FrameEncoder
    from confide.errors import require

    require("retrieval", "speech on a pretrained encoder")
    encoder = FrameEncoder(settings.source)
    parts = None if settings.depth is None else Parts(settings, encoder)
    return Pretrained(settings, KeptStates(settings, encoder), tokens.size, parts)
