"""A recogniser on a frozen pretrained encoder: a small head with CTC, and what is trained below it (`speech.parts`).

A recogniser trained whole has more numbers than a few thousand people can hide in noise. Here the encoder was trained
elsewhere, on other people's speech, and stays as it is; users train a few thousand numbers on its states. That joins
PFL-ASR's task to CAR's frozen encoder (section 3.1), which neither paper does.

    x = LN(h) / sqrt(width)        h (frames, width) the encoder's states, LN without weights of its own
    logits = W x + 0.3 b           W and b begin at zero

Every x has length 1, so the gradients of all users are of one size whatever the encoder, and none of this looks at the
data. The bias counts 0.3: at its full weight, the blank of CTC would take up most of a bounded update. With `hidden`,
a layer of so many units comes between, z = relu(V x + 0.3 c), and W z / sqrt(hidden) takes the place of W x.

Utterances are encoded at their own length with some silence around them: words at the very edge are heard badly. All
functions are pure: they depend on (settings, parameters, input) alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional

from confide.encoders.weights import is_local, is_url
from confide.federated.taps import Derived, linear
from confide.settings import Local, Section
from confide.speech.corpus import SAMPLE_RATE, Undecodable

if TYPE_CHECKING:
    from confide.encoders.frames import FrameEncoder

Part = Literal["head", "lora", "adapter", "norms", "all"]
BIAS, NORM_EPS = 0.3, 1e-5
_TOGETHER = 20.0  # seconds of audio in a pass of the encoder


class PretrainedSettings(Section):
    """A frozen speech encoder, and what is trained on it."""

    source: Annotated[str, Local(is_local)] = Field(
        "whisper-tiny.en", min_length=1, description="a preset, a transformers folder, or owner/name on the hub"
    )
    train: tuple[Part, ...] = Field(
        ("head",),
        min_length=1,
        description="head: a CTC layer on the encoder's states; beside it lora, adapter, norms, or all of the blocks",
    )
    # Both are left out of a dump at their default, so that recipes from before they were there keep their digest.
    first: int = Field(
        0, ge=0, exclude_if=lambda value: value == 0,
        description="for lora, adapter, norms and all: the first block that they change",
    )  # fmt: skip
    rank: int = Field(
        8, ge=1, exclude_if=lambda value: value == 8, description="for lora: r of a low-rank update"
    )  # fmt: skip
    hidden: Annotated[int, Field(ge=1)] | None = Field(None, description="units of a layer between states and head")
    before: float = Field(0.25, ge=0, le=5, description="seconds of silence put before an utterance")
    after: float = Field(0.5, ge=0, le=5, description="seconds of silence put after it")
    edges: bool = Field(
        True, exclude_if=lambda value: value,
        description="whether a target begins and ends with a word boundary, as PFL-ASR's do; where users say single "
        "words under noise, these two labels take up much of a bounded update",
    )  # fmt: skip

    @property
    def depth(self) -> int | None:
        """Frozen blocks that come first; none if all are frozen."""
        return None if set(self.train) == {"head"} else self.first

    @model_validator(mode="after")
    def _fits_together(self) -> PretrainedSettings:
        if "head" not in self.train:
            raise ValueError("train: expected head among the parts; nothing could be read from the states without it")
        if len(set(self.train)) < len(self.train):
            raise ValueError(f"train: {', '.join(self.train)} names a part twice; expected each once")
        if "all" in self.train and {"lora", "norms"} & set(self.train):
            raise ValueError("train: all has the matrices and norms already; drop lora and norms")
        if self.depth is None and (self.first or self.rank != 8):
            raise ValueError("first, rank: only used where more than the head is trained; drop them")
        return self

    @field_validator("source")
    @classmethod
    def _no_server(cls, source: str) -> str:
        if is_url(source):
            raise ValueError(f"{source}: encoders of speech are not served; name a preset, a folder or owner/name")
        return source


@dataclass(frozen=True)
class KeptStates:
    """How samples become what a store keeps for such a model: states of the frozen layers."""

    settings: PretrainedSettings
    encoder: FrameEncoder
    stride: int = 1
    together: float = _TOGETHER

    @property
    def key(self) -> str:
        """Everything that decides the states of some samples."""
        silence = f"{self.settings.before:g} {self.settings.after:g}"
        return (
            f"states {self.encoder.identity} {'all' if self.settings.depth is None else self.settings.depth} {silence}"
        )

    @property
    def edges(self) -> bool:
        return self.settings.edges

    @property
    def width(self) -> int:
        return self.encoder.width

    def check(self, samples: np.ndarray) -> None:
        """Refuse an utterance that the encoder cannot hear in one piece."""
        seconds = len(samples) / SAMPLE_RATE + self.settings.before + self.settings.after
        if seconds > self.encoder.longest:
            raise Undecodable(
                f"too long: {seconds:.1f} s with silence, and the encoder hears {self.encoder.longest:g} s at once"
            )

    def make(self, utterances: Sequence[np.ndarray]) -> list[np.ndarray]:
        """States (frames, width) of each utterance."""
        found = self.encoder.states([self._padded(samples) for samples in utterances], self.settings.depth)
        return [states.numpy() for states in found]

    def _padded(self, samples: np.ndarray) -> np.ndarray:
        before, after = (round(seconds * SAMPLE_RATE) for seconds in (self.settings.before, self.settings.after))
        return np.pad(samples, (before, max(after, self.encoder.shortest - before - len(samples))))


def parameter_shapes(settings: PretrainedSettings, width: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is trained, in the order of the computation; a linear layer is (out, in)."""
    shapes: dict[str, tuple[int, ...]] = {}
    if settings.hidden is not None:
        shapes |= {"hidden.weight": (settings.hidden, width), "hidden.bias": (settings.hidden,)}
        width = settings.hidden
    return shapes | {"head.weight": (tokens, width), "head.bias": (tokens,)}


def initial_parameters(
    settings: PretrainedSettings, width: int, tokens: int, draw: np.random.Generator
) -> dict[str, Tensor]:
    """Zeros, but for the weights of a hidden layer: N(0, 1), so that its units begin with a variance of 1."""
    return {
        name: torch.from_numpy(draw.standard_normal(shape, dtype=np.float32))
        if name == "hidden.weight"
        else torch.zeros(shape)
        for name, shape in parameter_shapes(settings, width, tokens).items()
    }


def scaled(states: Tensor) -> Tensor:
    """Each state with mean 0 and length 1."""  # (..., width)
    wide = states.shape[-1]
    return functional.layer_norm(states, (wide,), states.new_full((wide,), 1 / math.sqrt(wide)), eps=NORM_EPS)


def _lower(bias: Tensor) -> Tensor:
    return BIAS * bias


_HIDDEN_BIAS, _HEAD_BIAS = Derived(_lower, ("hidden.bias",)), Derived(_lower, ("head.bias",))


def hidden_units(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Of scaled states, what the hidden layer's activation gets."""  # (..., hidden)
    return linear(parameters, x, "hidden.weight", _HIDDEN_BIAS)


def head_input(units: Tensor) -> Tensor:
    """What the head gets of a hidden layer."""  # (..., hidden)
    return torch.relu(units) / math.sqrt(units.shape[-1])


def logits_of(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits of the head's input."""  # (..., tokens)
    return linear(parameters, x, "head.weight", _HEAD_BIAS)


def head(parameters: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """Logits of states."""  # (..., width) -> (..., tokens)
    x = scaled(states)
    if "hidden.weight" in parameters:
        x = head_input(hidden_units(parameters, x))
    return logits_of(parameters, x)
