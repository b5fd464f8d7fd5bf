"""A whole run in memory, for grids and for people who try things out in Python."""

from __future__ import annotations

from collections.abc import Callable

from confide.build import make_loop
from confide.federated.state import State
from confide.federated.task import Task
from confide.recipe import Recipe
from confide.run import Loop
from confide.runs.records import Record, Recorded, evaluate


def simulate(
    recipe: Recipe, task: Task | None = None, watch: Callable[[Loop, State, Record], None] | None = None
) -> tuple[Loop, State]:
    """Make a whole run in memory: nothing is written, and nothing is released to anybody.

    `task` takes the place of the recipe's own, for example one that is kept between runs. `watch` gets the loop, the
    state and the record of every step. The loop and the state after the last step come back; the final model is
    `loop.final.model(state)`.

    >>> from confide.recipe import load
    >>> loop, state = simulate(load("convex/digits", ["run.steps=5"]))
    >>> state.step
    5
    """
    loop = make_loop(recipe, task=task)
    recorded, state = Recorded(loop), loop.start()
    while state.step < recipe.run.steps:
        record = recorded.step(state)
        if recipe.is_evaluated(state.step):
            record["evaluation"] = evaluate(loop, state)
        if watch is not None:
            watch(loop, state, record)
    return loop, state
