"""What a file of a model says of itself: what it computes, what it writes, what it promises.

The same notes stand in the header of `model.safetensors`, in a run's folder and in what is published, and in the ONNX
file of `confide export`: texts by name. What is no text is JSON. Nothing in them names a place of the owner's machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from confide.federated.start import ENCODER
from confide.privacy.guarantee import Statement
from confide.recipe import Recipe
from confide.retrieval.settings import RetrievalSettings
from confide.runs.shared_recipe import for_others
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.settings import SpeechSettings

_LOCAL = {"corpus", "test", "data", "clients", "cache", "start", "folder", "pool", "augment"}
"""Of a task's section, what is about data and training and not about the model."""


def notes_of(recipe: Recipe, promised: Statement, encoder: str | None) -> dict[str, str]:
    """The notes of a run's model; `encoder` is the digest of the frozen encoder that it was trained on."""
    said = promised.model_dump(include={"epsilon", "delta", "accountant", "adjacency", "releases"})
    about: dict[str, Any] = {**described(recipe), **said, "unit": promised.unit.name}
    about |= {"for_release": promised.noise.for_release, "recipe": for_others(recipe).digest}
    about |= {} if encoder is None else {ENCODER: encoder}
    return as_texts(about)


def as_texts(about: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, everything else as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


def described(recipe: Recipe) -> dict[str, Any]:
    """What the model of a recipe computes, and what its numbers stand for."""
    task = for_others(recipe).task
    about: dict[str, Any] = {"task": task.kind, "architecture": task.model_dump(mode="json", exclude=_LOCAL)}
    if isinstance(task, SpeechSettings):
        from confide.runs.recogniser import language_of, tokens_of

        language = language_of(task.corpus)
        about |= {"language": language, "sample_rate": SAMPLE_RATE, "tokens": tokens_of(task).names}
    if isinstance(task, RetrievalSettings):
        about |= {"scores": "of documents" if task.has_head else "none: vectors, for inner products"}
    return about


def read_notes(file: Path) -> dict[str, str]:
    """The notes of a model's file; a file from before they existed has none, or only its encoder's digest."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def serialise(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """A safetensors file with its notes in the order of their names: the library would shuffle them in every process,
    and a run that was stopped and taken up again would not leave the same bytes."""
    from safetensors.torch import save

    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt", **notes})
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + content[begin:]
