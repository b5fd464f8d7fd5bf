"""What a run was started with, as digests: a resume over other data is refused, and says which input has changed.

A task names its inputs in an optional `fingerprint`, a mapping from a name that a person understands ("the users'
data", "the encoder") to a digest. The first line of the ledger keeps them, so that they are chained to every release:
without this check the ledger's one guarantee would stand for runs over two sets of users.
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
from confide.federated.task import Task

KEY = "inputs"


def of_task(task: Task) -> dict[str, str]:
    """The inputs that a task names; none if it names none."""
    return dict(task.fingerprint)


def describe_environment() -> dict[str, str]:
    """Versions and machine, for people who want to run it again."""
    return {
        "confide": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dp-accounting": version("dp-accounting"),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "key": environment(),
    }


def check(folder: Path, held: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with a run whose inputs are not what they were. Runs from before inputs were kept go on."""
    before, after = held.get(KEY), now.get(KEY)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise UserError(
                f"{folder}: {name} changed since the run began (digest {str(before.get(name))[:16]} then, "
                f"{str(after.get(name))[:16]} now); nothing was done. Put back what the run was started with, or start "
                "another run"
            )
