"""The trained parameters of a finished run, for any task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from confide.errors import UserError
from confide.federated.start import held_encoder, misfit
from confide.federated.task import Task
from confide.runs import folder


def read_tensors(run: Path) -> dict[str, Tensor]:
    """All tensors of the model that a finished run left."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = run / folder.MODEL
    try:
        return load_file(file)
    except FileNotFoundError:
        raise UserError(
            f"{run} holds no model yet: its run is not finished; go on with `confide resume {run}`"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a model ({error}); put a whole copy in its place") from None


def check_encoder(run: Path, installed: str | None) -> None:
    """Refuse another frozen encoder than the one that the run's tensors were trained on; the file names it."""
    held = held_encoder(run / folder.MODEL)
    if held is not None and installed is not None and not installed.startswith(held):
        raise UserError(
            f"{run} was trained on an encoder with the digest {held[:16]}, and the one that is named here has "
            f"{installed[:16]}; expected the same: install the encoder that it was trained on, or name its folder with "
            "--encoder"
        )


def load_parameters(run: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors that a finished run left, which have to be those of its recipe."""
    found = read_tensors(run)
    wrong = misfit(found, shapes)
    if wrong is not None:
        raise UserError(
            f"{run / folder.MODEL} does not fit {run / folder.RECIPE}: {wrong}; put the run's own model and recipe back"
        )
    return {name: found[name] for name in shapes}


def load_parameters_of(run: Path, task: Task) -> dict[str, Tensor]:
    """The tensors that a finished run left, which have to be those that its task begins with."""
    return load_parameters(run, {name: tuple(tensor.shape) for name, tensor in task.initial_parameters().items()})
