"""Models to begin from: the tensors of a finished run or of a file (`task.start`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from confide.errors import UserError

if TYPE_CHECKING:
    from confide.recipe import Recipe

NOT_COVERED = "what the starting model was trained on"
"""Which no guarantee of this run covers."""


def begins_elsewhere(recipe: Recipe) -> bool:
    return getattr(recipe.task, "start", None) is not None


def load_start(path: Path, fresh: Mapping[str, Tensor], optional: Collection[str] = ()) -> dict[str, Tensor]:
    """Tensors to begin from, with the names and shapes of the recipe's own model; the optional may stay fresh."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        found = load_file(file)
    except (FileNotFoundError, SafetensorError, OSError) as error:
        raise UserError(
            f"task.start={path}: no model could be read from {file} ({error}); finish that run first"
        ) from None
    begun = {name: tensor for name, tensor in fresh.items() if name in optional and name not in found}
    for name, tensor in fresh.items():
        if name in begun:
            continue
        if name not in found or found[name].shape != tensor.shape:
            given = tuple(found[name].shape) if name in found else "nothing"
            raise UserError(
                f"task.start={path}: tensor {name} should be {tuple(tensor.shape)} but {given} was found; "
                "the starting model has to be of the kind and size that the recipe describes"
            )
        begun[name] = found[name].to(tensor.dtype)
    return {name: begun[name] for name in fresh}
