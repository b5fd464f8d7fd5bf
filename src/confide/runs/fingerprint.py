"""What a run was started with, as digests: a resume over other data is refused, and says which input has changed.

A task names its inputs in an optional `fingerprint`, a mapping from a name that a person understands ("the users'
data", "the encoder") to a digest. The first line of the ledger keeps them, so that they are chained to every release:
without this check the ledger's one guarantee would stand for runs over two sets of users.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.federated.task import Task
from confide.files import digest

KEY = "inputs"


def of_task(task: Task) -> dict[str, str]:
    """The inputs that a task names; none if it names none."""
    return dict(task.fingerprint)


def of_code(named: Mapping[str, str | None]) -> dict[str, str]:
    """Of the files with the functions that a recipe names: other code under the same noise would give it away."""
    found = {}
    for field, name in named.items():
        if name is not None:
            path = getattr(sys.modules.get(name.split(":")[0]), "__file__", None)
            found[f"the code of {field}"] = digest([Path(path).read_bytes()]) if path else "unknown"
    return found


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
