"""A task that a user brings: `task: {kind: python, factory: module:function, options: {...}}`.

The function gets the options and the run's seed and returns a `Task`; `BasicTask` has what most tasks leave as it is.
Whoever writes the recipe chooses code that runs here: trust a recipe with such a task as you trust a program. The code
itself is not part of the recipe's digest; a run that is resumed after it changed is another run.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field

from confide.errors import UserError
from confide.federated.task import BasicTask, Task, TaskSection
from confide.settings import FunctionName, imported, running

__all__ = ["BasicTask", "PythonTaskSettings"]

_ASKED = ("name", "metric", "examples", "initial_parameters", "batch", "loss", "evaluate")


class PythonTaskSettings(TaskSection):
    """A task of your own: Python code that is installed, or lies in the current folder."""

    kind: Literal["python"] = "python"
    factory: FunctionName = Field(description="module:function, called with the options and the seed")
    options: dict[str, Any] = Field(default_factory=dict, description="given to the function as they are")

    def make(self, seed: int) -> Task:
        """Import the factory and call it; a UserError says what is missing."""
        factory = imported(self.factory, "task.factory")
        with running("task.factory", self.factory):
            task: Any = factory(self.options, seed)
        missing = [name for name in _ASKED if not hasattr(task, name)]
        if missing:
            raise UserError(
                f"task.factory={self.factory}: the {type(task).__name__} that it made has no {', '.join(missing)}; "
                "confide.federated.task.Task says what a task is"
            )
        return cast("Task", task if isinstance(task, BasicTask) else _Completed(task))


class _Completed(BasicTask):
    """A user's task that does not inherit `BasicTask`: its own members, and the defaults for those that it lacks."""

    def __init__(self, task: Any) -> None:
        self.__dict__["completed"] = task

    def __getattribute__(self, name: str) -> Any:
        task = object.__getattribute__(self, "__dict__").get("completed")  # none while it is unpickled
        own = task is not None and not name.startswith("__") and hasattr(task, name)
        return getattr(task, name) if own else object.__getattribute__(self, name)
