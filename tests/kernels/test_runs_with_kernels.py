"""Runs whose users are trained by compiled kernels: the same bytes everywhere, and nearly those of the plain path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from confide import kernels
from confide.bench import recipes
from confide.build import make_loop
from confide.engines.processes import WorkerFailed
from confide.recipe import Recipe
from confide.run import Loop

RECIPES = {
    "head": recipes.states(2, cohort=80, users=90, distinct=9, frames=20, width=48),
    "low_rank": recipes.mlp(2, cohort=70, users=90, distinct=9),
}


@pytest.fixture(autouse=True)
def here() -> None:
    if kernels.kernel("head") is None:
        pytest.skip("this machine cannot have kernels")


def after(loop: Loop, steps: int = 2) -> torch.Tensor:
    try:
        state = loop.start()
        for _ in range(steps):
            loop.step(state)
        return state.parameters
    finally:
        loop.engine.close()


@pytest.mark.parametrize(("name", "recipe"), RECIPES.items(), ids=RECIPES)
def test_the_number_of_workers_changes_no_byte(name: str, recipe: Recipe, warm_processes: None) -> None:
    loops = [make_loop(recipe, workers=workers) for workers in (1, 2, 3)]
    found = [after(loop) for loop in loops]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len({loop.environment for loop in loops}) == 1
    assert loops[0].kernels == kernels.described([name])


@pytest.mark.parametrize(("name", "recipe"), RECIPES.items(), ids=RECIPES)
def test_without_a_kernel_the_numbers_are_the_same_within_single_precision(
    name: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it = make_loop(recipe)
    found = after(with_it)
    nothing: Any = lambda _: None  # noqa: E731
    for module in ("confide.kernels", "confide.speech.head_updates", "confide.federated.low_rank"):
        monkeypatch.setattr(f"{module}.kernel", nothing)
    without = make_loop(recipe)
    assert without.kernels == f"{name} plain"
    assert without.environment != with_it.environment, "other bits must not pass for a repeat"
    torch.testing.assert_close(after(without), found, rtol=1e-4, atol=1e-6)


def test_a_task_that_uses_no_kernel_compiles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(name: str) -> None:
        pytest.fail(f"{name} was compiled")

    monkeypatch.setattr(kernels, "kernel", compile)
    assert make_loop(recipes.vector(1, users=4, parameters=100, tensors=2)).kernels == "none"


def test_a_worker_with_other_kernels_than_its_parent_ends_the_run(
    warm_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums would have other bits than the ledger's lines stand for."""
    monkeypatch.setattr("confide.build.kernels", lambda *_: "head 0000")
    loop = make_loop(recipes.states(1, cohort=8, users=9, distinct=3, frames=20, width=48), workers=2)
    try:
        with pytest.raises(WorkerFailed, match="compiled kernels"):
            loop.step(loop.start())
    finally:
        loop.engine.close()
