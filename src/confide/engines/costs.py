"""What a user is expected to cost, and longest-first schedules over workers and ranks (Graham 1969).

A cohort takes as long as its slowest processor. Longest first, every part to whoever is free, takes at most 4/3 of the
best schedule's time; in any other order one long user that comes last can double it. Schedules decide who trains what
and when, never the order of addition, so they cannot change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from confide.federated.local import LocalTraining
from confide.federated.task import Task

Costs = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Estimates the cost of each part of a cohort, in a unit that differs from task to task."""


def expected_costs(task: Task, local: LocalTraining) -> Costs:
    """Estimate by the seconds of data where the task has them, else by examples, that local training looks at."""
    examples = task.examples

    def of_user(user: int) -> float:
        held, seconds = int(examples[user]), task.seconds(user)
        amount = float(held if seconds is None else seconds.sum())
        if local.steps is None or not held:
            return amount
        if local.batch_seconds is not None and seconds is not None:
            return min(amount, local.batch_seconds)
        return amount * min(local.batch_size or held, held) / held

    return lambda parts: np.array([sum(of_user(int(user)) for user in users) for users in parts])


class LongestFirst:
    """Hands out the parts of a cohort, the longest first, while there is room to keep what comes too early.

    Sums are added in the order of the parts. A part that is trained before its turn keeps its sum in a slot until all
    before it are added, and slots are few; so only `spare` parts may run ahead at any time. When as many do, the first
    part that nobody has begun is next, whatever its cost: it is the one that lets slots go.
    """

    def __init__(self, costs: np.ndarray, spare: int) -> None:
        self.stack = np.argsort(-costs, kind="stable")[::-1].tolist()  # the longest at the end; of equals the earlier
        self.begun = np.zeros(len(costs), dtype=bool)
        self.first, self.spare = 0, spare

    def take(self, held: Collection[int]) -> int | None:
        """The next part to train, if any, where `held` are the parts that have a slot now."""
        while self.first < len(self.begun) and self.begun[self.first]:
            self.first += 1
        if self.first == len(self.begun):
            return None
        part = self.first
        if sum(other > self.first for other in held) < self.spare:
            while self.begun[self.stack[-1]]:
                self.stack.pop()
            part = self.stack[-1]
        self.begun[part] = True
        return part


def deal(costs: np.ndarray, speeds: np.ndarray, capacity: int) -> np.ndarray:
    """Which rank trains each part: longest first, to the rank that would end it soonest, `capacity` parts a rank.

    `speeds` are costs per second of each rank.
    """
    if len(costs) > len(speeds) * capacity:
        raise ValueError(f"{len(costs)} parts do not fit {len(speeds)} ranks of {capacity}")
    load, count = np.zeros(len(speeds)), np.zeros(len(speeds), dtype=np.int64)
    owners = np.empty(len(costs), dtype=np.int64)
    for part in np.argsort(-costs, kind="stable"):
        owner = np.argmin(np.where(count < capacity, (load + costs[part]) / speeds, np.inf))
        owners[part] = owner
        load[owner] += costs[part]
        count[owner] += 1
    return owners
