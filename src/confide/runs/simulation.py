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

    Args:
        recipe: what to run.
        task: takes the place of the recipe's own task, for example one that is kept between runs.
        watch: is called after every step with the loop, the state and the record of the step.

    Returns:
        The loop, and the state after the last step. The final model, as one vector, is `loop.final.model(state)`;
        `loop.layout.views` has its tensors by name.

    Examples:
        >>> from confide.recipe import load
        >>> from confide.runs.simulation import simulate
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
