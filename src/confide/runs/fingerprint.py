"""What a run was started with, as digests: a resume over other data is refused, and says which input has changed.

A task names its inputs in an optional `fingerprint`, a mapping from a name that a person understands ("the users'
data", "the encoder") to a digest. The first line of the ledger keeps them, so that they are chained to every release:
without this check the ledger's one guarantee would stand for runs over two sets of users.

What is written is keyed by a secret of the run, which stays in its folder. Otherwise whoever knows the data of all
users but one could test a guess of that one, and no noise would help.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from confide import __version__
from confide.engines.environment import environment
from confide.errors import UserError
from confide.files import SECRET, new_secret, read_secret, write_atomically
from confide.privacy import ledger
from confide.privacy.ledger import Ledger

KEY = "inputs"


def secret_of(folder: Path) -> bytes:
    """Read the key of a run's digests, or write one for a run that begins.

    It is empty for a run from before digests were keyed.
    """
    path = folder / ledger.FILE
    begun = path.exists() and b"\n" in path.read_bytes()
    if begun and not Ledger.read(path).header.get("inputs_keyed"):
        return b""
    key = read_secret(folder)
    if key is not None:
        return key
    if begun:
        raise UserError(
            f"{folder / SECRET} is missing; without it nobody can tell whether the data are those that the run began "
            "with, and nothing was done. Put it back from where the run was made, or start another run"
        )
    key = new_secret()
    write_atomically(folder / SECRET, key, mode=0o600)
    return key


def describe_environment(kernels: str) -> dict[str, str]:
    """Versions and machine, for people who want to run it again."""
    return {
        "confide": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dp-accounting": version("dp-accounting"),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "kernels": kernels,
        "key": environment(kernels),
    }


def check(folder: Path, held: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with a run whose inputs are not what they were.

    A run goes on without a check of what the version that began it did not digest.
    """
    before, after = held.get(KEY), now.get(KEY)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    for name in sorted(before):
        if before.get(name) != after.get(name):
            raise UserError(
                f"{folder}: {name} changed since the run began (digest {str(before.get(name))[:16]} then, "
                f"{str(after.get(name))[:16]} now); nothing was done. Put back what the run was started with, or start "
                "another run"
            )
