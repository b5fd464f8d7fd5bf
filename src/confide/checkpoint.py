"""The state of a run as one safetensors file: tensors, and in its header the step and a digest of the tensors.

Checkpoint = state; resume = load and go on. No pickle: the header is JSON, the rest is raw numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from confide.errors import UserError
from confide.files import write_atomically

FILE = "checkpoint.safetensors"


@dataclass
class State:
    """Everything that the next central step depends on, and the time that was spent to get here."""

    step: int
    parameters: Tensor  # (parameters,) the central model
    optimiser: dict[str, Tensor]
    final: dict[str, Tensor] = field(default_factory=dict)
    """What the final model is made of: a sum of the last iterates, or the chosen one."""
    seconds: float = 0.0
    recent: list[dict[str, float]] = field(default_factory=list)
    """The evaluations of the last steps, whose mean the summary reports."""


def save(folder: Path, state: State, recipe_digest: str, ledger_count: int, ledger_head: str) -> None:
    from safetensors.torch import save as serialise

    tensors = {"parameters": state.parameters}
    tensors |= {f"optimiser/{name}": t for name, t in state.optimiser.items()}
    tensors |= {f"final/{name}": t for name, t in state.final.items()}
    about = {
        "step": state.step,
        "seconds": state.seconds,
        "recent": state.recent,
        "recipe": recipe_digest,
        "ledger_count": ledger_count,
        "ledger_head": ledger_head,
        "digest": _digest(tensors),
    }
    write_atomically(folder / FILE, serialise(tensors, metadata={"confide": json.dumps(about)}))


@dataclass(frozen=True)
class Saved:
    state: State
    recipe_digest: str
    ledger_count: int
    ledger_head: str


def load(folder: Path) -> Saved:
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["confide"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["digest"] != _digest(tensors):
            raise ValueError("its digest does not match its content")
        state = State(about["step"], tensors["parameters"], _under(tensors, "optimiser/"), _under(tensors, "final/"))
        state.seconds, state.recent = about["seconds"], about["recent"]
        return Saved(state, about["recipe"], about["ledger_count"], about["ledger_head"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; there is nothing to go on from in this folder") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it was left as it is. Put back a copy of it, or start the run again "
            "in another folder"
        ) from None


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
