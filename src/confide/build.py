"""From the recipe's task section to the task."""

from __future__ import annotations

from confide.federated.task import Task, TaskSection


def make_task(settings: TaskSection, seed: int) -> Task:
    return settings.make(seed)
