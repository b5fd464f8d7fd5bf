"""A task that a user brings: `task: {kind: python, factory: module:function, options: {...}}`.

The function gets the options and the run's seed and answers with a `Task`; `BasicTask` has what most tasks leave as it
is. Whoever writes the recipe chooses code that runs here: a recipe with such a task is as trusted as a program. The
code itself is not part of the recipe's digest; a run that is resumed after it changed is another run.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from confide.errors import UserError
from confide.federated.local import LocalTraining
from confide.federated.task import Task
from confide.settings import FunctionName, Section, imported

_ASKED = ("name", "metric", "examples", "initial_parameters", "batch", "loss", "evaluate")


class PythonTaskSettings(Section):
    """A task of your own: Python code that is installed, or lies in the current folder."""

    kind: Literal["python"] = "python"
    factory: FunctionName = Field(description="module:function, called with the options and the seed")
    options: dict[str, Any] = Field(default_factory=dict, description="given to the function as they are")


class BasicTask:
    """What a task need not write: no lengths of examples, no short cut for many users at once."""

    def seconds(self, user: int) -> np.ndarray | None:
        return None

    def users_at_once(self, local: LocalTraining) -> int:
        return 0

    def fast_updates(self, parameters: Any, users: np.ndarray, local: LocalTraining, learning_rate: float) -> None:
        return None


def make_python_task(settings: PythonTaskSettings, seed: int) -> Task:
    """Import the factory and call it; a UserError says what is missing."""
    task = imported(settings.factory, "task.factory")(settings.options, seed)
    missing = [name for name in _ASKED if not hasattr(task, name)]
    if missing:
        raise UserError(
            f"task.factory={settings.factory}: the {type(task).__name__} that it made has no {', '.join(missing)}; "
            "confide.federated.task.Task says what a task is"
        )
    return cast("Task", task)
