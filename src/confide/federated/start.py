"""Models to begin from: the tensors of a finished run or of a file (`task.start`), and the encoder they belong to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from confide.errors import UserError

ENCODER = "encoder"
"""In the notes of a model's file: the digest of the frozen encoder that its tensors were trained on."""


def load_start(
    path: Path, fresh: Mapping[str, Tensor], optional: Collection[str] = (), encoder: str | None = None
) -> dict[str, Tensor]:
    """Read the tensors to begin from: exactly those of the recipe's model, of which the optional may be missing.

    What was trained on another frozen encoder than the one with the digest `encoder` is refused.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"task.start={path}: no model could be read from {file} ({error}); finish that run first"
        ) from None
    held = held_encoder(file)
    if held is not None and encoder is not None and not encoder.startswith(held):
        raise UserError(
            f"task.start={path}: it was trained on an encoder with the digest {held[:16]}, and the recipe's encoder "
            f"has {encoder[:16]}; expected the same: a head means nothing on another encoder's states"
        )
    lacks = {name for name in optional if name not in found}
    wanted = {name: tuple(tensor.shape) for name, tensor in fresh.items() if name not in lacks}
    if wrong := misfit(found, wanted):
        raise UserError(
            f"task.start={path}: {wrong}; the starting model has to be of the kind and size that the recipe describes"
        )
    return {name: tensor if name in lacks else found[name].to(tensor.dtype) for name, tensor in fresh.items()}


def held_encoder(file: Path) -> str | None:
    """The digest of the encoder that a file's tensors were trained on, if the file names one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get(ENCODER)
    except (OSError, SafetensorError):
        return None  # explained when the tensors are read


def misfit(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first tensor that is missing, of another shape, or not asked for; none if everything fits."""
    for name in {**wanted, **found}:
        given = tuple(found[name].shape) if name in found else "nothing"
        if wanted.get(name, "nothing") != given:
            return f"tensor {name} should be {wanted.get(name, 'nothing')} but {given} was found"
    return None
