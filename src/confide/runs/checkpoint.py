"""The state of a run as one safetensors file: tensors, and in its header the step and a digest of the file.

Checkpoint = state; resume = load and go on. No pickle: the header is JSON, the rest is raw numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from confide.errors import UserError
from confide.federated.state import State
from confide.files import write_atomically

FILE = "checkpoint.safetensors"
_BLANK = "0" * 64


def save(folder: Path, state: State, recipe_digest: str, ledger_count: int, ledger_head: str) -> None:
    from safetensors.torch import save as serialise

    single = {"parameters": state.parameters, "bounds": state.bounds, "pending": state.pending}
    tensors = {name: tensor for name, tensor in single.items() if tensor is not None}
    groups = {"optimiser": state.optimiser, "final": state.final, "noise": state.noise, "clients": state.clients}
    tensors |= {f"{group}/{name}": tensor for group, own in groups.items() for name, tensor in own.items()}
    about = {
        "step": state.step, "seconds": state.seconds, "recent": state.recent, "recipe": recipe_digest,
        "ledger_count": ledger_count, "ledger_head": ledger_head,
    }  # fmt: skip
    content = serialise(tensors, metadata={"confide": json.dumps(about), "digest": _BLANK})
    write_atomically(folder / FILE, content.replace(_BLANK.encode(), _digest(content).encode(), 1))


@dataclass(frozen=True)
class Saved:
    state: State
    recipe_digest: str
    ledger_count: int
    ledger_head: str


def load(folder: Path) -> Saved:
    from safetensors import SafetensorError
    from safetensors.torch import load as deserialise

    path = folder / FILE
    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        if header["digest"] != _digest(content.replace(header["digest"].encode(), _BLANK.encode(), 1)):
            raise ValueError("its digest does not match its content")
        about, tensors = json.loads(header["confide"]), deserialise(content)
        state = State(about["step"], tensors["parameters"], _under(tensors, "optimiser/"), _under(tensors, "final/"))
        state.noise, state.bounds = _under(tensors, "noise/"), tensors.get("bounds")
        state.clients, state.pending = _under(tensors, "clients/"), tensors.get("pending")
        state.seconds, state.recent = about["seconds"], about["recent"]
        return Saved(state, about["recipe"], about["ledger_count"], about["ledger_head"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; there is nothing to go on from in this folder") from None
    except (
        SafetensorError, ValueError, KeyError, TypeError, AttributeError, OSError, MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is damaged, or of another version ({error}); it was left as it is. Put back a copy of it, go on "
            "with the version that wrote it, or start the run again in another folder"
        ) from None


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _digest(content: bytes) -> str:
    """Of the whole file, with a blank where the digest itself stands."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()
