"""Claims about splitting the bound over tensors: the total stays, the split is the best one, and votes are paid for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.errors import Stopped
from confide.federated.bounding import Adaptive, Bounding, allocate, bounder
from confide.federated.bounds import next_bounds
from confide.federated.parameters import Layout
from confide.privacy import ledger
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import Privacy
from confide.privacy.plan import make_plan
from confide.privacy.sampling import Sampling
from confide.recipe import Recipe, load, parse
from confide.runs import checkpoint, folder
from confide.runs.records import evaluate
from confide.runs.simulation import simulate
from support.keyless import ledger_without_key
from support.problems import Layered, Shape

CALM = settings(deadline=None)  # a property holds on a busy machine as well
positive = st.floats(-6, 6).map(lambda exponent: 10.0**exponent)
tensors = st.lists(st.tuples(positive, st.integers(1, 10**7)), min_size=1, max_size=12)


def split(total: float, given_tensors: list[tuple[float, int]]) -> tuple[Tensor, Tensor, Tensor]:
    quantiles = torch.tensor([q for q, _ in given_tensors], dtype=torch.float64)
    sizes = torch.tensor([d for _, d in given_tensors], dtype=torch.float64)
    return allocate(total, quantiles, sizes.pow(0.25)), quantiles, sizes


@CALM
@given(total=positive, given_tensors=tensors)
def test_the_squares_of_a_split_sum_to_the_square_of_the_bound(
    total: float, given_tensors: list[tuple[float, int]]
) -> None:
    found, quantiles, _ = split(total, given_tensors)
    assert float(found.norm()) == pytest.approx(total, rel=1e-7)
    assert float(found.norm()) <= total * (1 + 1e-9)
    assert bool((found > 0).all())
    if float(quantiles.norm()) > total:
        assert bool((found <= quantiles * (1 + 1e-12)).all()), "nobody gets what is not used"


@CALM
@given(total=positive, given_tensors=tensors, seed=st.integers(0, 2**32))
def test_no_other_split_has_less_noise_to_signal(
    total: float, given_tensors: list[tuple[float, int]], seed: int
) -> None:
    """sum_h d_h / min(C_h, q_h)^2, against random splits and against small changes of this one."""
    found, quantiles, sizes = split(total, given_tensors)
    draw = np.random.default_rng(seed)

    def cost(bounds: Tensor) -> float:
        return float((sizes / torch.minimum(bounds, quantiles).square()).sum())

    for spread in (0.01, 0.3, 3.0):
        other = found * torch.from_numpy(np.exp(spread * draw.standard_normal(len(found))))
        assert cost(found) <= cost(other * (total / other.norm())) * (1 + 1e-9)


@CALM
@given(sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_root_is_the_learned_split_of_updates_that_are_all_beyond_their_bounds(sizes: list[int], seed: int) -> None:
    layout = Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))
    root = bounder(Bounding(rule="per_layer_clip", bound=2.0, split="root"), layout)
    far = torch.full((len(sizes),), 1e6, dtype=torch.float64)
    roots = torch.tensor(sizes, dtype=torch.float64).pow(0.25)
    torch.testing.assert_close(allocate(2.0, far, roots), root.layer_bounds, rtol=1e-9, atol=0)
    other = torch.from_numpy(np.exp(np.random.default_rng(seed).standard_normal(len(sizes))))
    other = other * (2.0 / other.norm())
    dimensions = torch.tensor(sizes, dtype=torch.float64)
    ours, theirs = ((dimensions / bounds.square()).sum() for bounds in (root.layer_bounds, other))
    assert float(ours) <= float(theirs) * (1 + 1e-9)


LAYOUT = Layout(("small", "large"), ((10,), (1000,)))
LEARNED = Bounding(rule="per_layer_clip", bound=1.0, split="learned", adaptive=Adaptive(quantile=0.5))


def test_a_learned_split_begins_with_dim_and_what_is_sent_stays_within_the_bound() -> None:
    rule = bounder(LEARNED, LAYOUT)
    dim = bounder(Bounding(rule="per_layer_clip", bound=1.0, split="dim"), LAYOUT)
    torch.testing.assert_close(rule.at(rule.bounds).layer_bounds, dim.layer_bounds)
    draw, quantiles = np.random.default_rng(0), rule.bounds
    for _ in range(200):
        quantiles = next_bounds(quantiles, torch.from_numpy(draw.normal(0.5, 3, 2)), Adaptive(), rule.bounds)
        now = rule.at(quantiles)
        assert now.sensitivity == 1.0
        norms = torch.from_numpy(np.exp(draw.normal(0, 5, (50, 2))))
        assert float((now.factors(norms) * norms).norm(dim=1).max()) <= 1.0


def test_votes_are_about_the_quantiles_and_not_about_the_bounds() -> None:
    """Otherwise a tensor whose bound is far below its updates could never learn how large these are."""
    rule = bounder(LEARNED, LAYOUT).at(torch.tensor([5.0, 5.0], dtype=torch.float64))
    assert float(rule.layer_bounds.max()) < 1.0
    votes = rule.votes(torch.tensor([[4.0, 6.0], [0.1, 0.1]], dtype=torch.float64))
    assert votes.tolist() == [[0.5, -0.5], [0.5, 0.5]]


def test_the_votes_cost_what_those_of_adaptive_bounds_cost() -> None:
    privacy = Privacy(mechanism="gaussian", noise_multiplier=1.0, delta=1e-5)
    own = Bounding(rule="per_layer_clip", bound=1.0, split="dim", adaptive=Adaptive(quantile=0.5))
    events = []
    for bounding in (LEARNED, own):
        rule = bounder(bounding, LAYOUT)
        plan = make_plan(
            privacy, Sampling(cohort=20), np.full(100, 0.01), rule.sensitivity, 10, 0, follows="quantile",
            counters=len(rule.bounds),
        )  # fmt: skip
        events.append(plan.event)
        assert plan.event.counters == 2
        assert plan.event.update_multiplier > 1.0, "the update has more noise, which is what the votes cost"
    assert events[0] == events[1]


def test_a_learned_split_without_its_estimate_is_refused(command: Callable[..., tuple[int, str, str]]) -> None:
    for change in (
        "{rule: per_layer_clip, bound: 1, split: learned}",
        "{rule: clip, bound: 1, split: learned, adaptive: {}}",
    ):
        code, _, err = command("recipe", "show", "convex/digits", "--set", f"bounding={change}")
        assert code == 2
        assert "bounding.split=learned: needs rule: per_layer_clip and adaptive" in err


def digits(*changes: str) -> Recipe:
    bounding = "bounding={rule: per_layer_clip, bound: 20, split: learned, adaptive: {quantile: 0.7}}"
    return load(
        "convex/digits",
        [bounding, "task.users=40", "sampling.cohort=10", "run.steps=8", "run.checkpoint_every=2", *changes],
    )


def test_a_run_with_a_learned_split_stops_and_goes_on_to_the_same_bytes(
    tmp_path: Path, signal_after: Callable[..., AbstractContextManager[None]], no_figures: None
) -> None:
    folder.train(digits(), tmp_path / "whole", quiet=True)
    with pytest.raises(Stopped), signal_after(3):
        folder.train(digits(), tmp_path / "parts", quiet=True)
    folder.resume(tmp_path / "parts", quiet=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (whole / folder.MODEL).read_bytes() == (parts / folder.MODEL).read_bytes()
    assert ledger_without_key(whole) == ledger_without_key(parts)
    ends = [checkpoint.load(tmp_path / each).state.bounds for each in ("whole", "parts")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], bounder(digits().bounding, Layout(("w", "b"), ((640,), (10,)))).bounds)
    records = [json.loads(line) for line in (tmp_path / "whole" / folder.METRICS).read_text().splitlines()]
    assert {record["bound"] for record in records} == {20.0}, "C stays, whatever its split"
    events = [entry.event for entry in Ledger.read(tmp_path / "whole" / ledger.FILE).entries]
    assert {event.counters for event in events} == {2}
    assert len({event.sensitivity for event in events}) == 1


UNEQUAL = Shape({"small": 20, "large": 2000}, users=60, between=0.1, scales={"small": 1.0, "large": 0.01})
"""A small tensor with ten times the gradient of a large one, which under dim has ten times its bound."""


def result(bounding: dict[str, Any], seed: int) -> tuple[float, Event]:
    """Suboptimality of a run, and what each of its steps cost."""
    document = {
        "task": {"kind": "convex/quadratics", "users": 60, "dimension": 1, "rank": 1},
        "sampling": {"kind": "poisson", "cohort": 30},
        "local": {"steps": 1, "learning_rate": 0.5},
        "bounding": {"rule": "per_layer_clip", "bound": 1.0, **bounding},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": 0.5, "delta": 1e-5},
        "central": {"kind": "sgd", "learning_rate": 0.3},
        "run": {"steps": 60, "seed": seed},
    }
    loop, state = simulate(parse(document), task=Layered(UNEQUAL))
    return evaluate(loop, state)["suboptimality"], loop.plan.event


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_learned_split_beats_dim_on_very_unequal_layers_at_equal_epsilon(seed: int) -> None:
    dim, fixed = result({"split": "dim"}, seed)
    learned, counted = result({"split": "learned", "adaptive": {"quantile": 0.8}}, seed)
    # z decides epsilon, with or without counters; the update of the learned split has the more noise for it.
    assert counted.noise_multiplier == fixed.noise_multiplier
    assert counted.update_multiplier > fixed.update_multiplier
    assert (counted.rate, counted.sampler) == (fixed.rate, fixed.sampler)
    assert learned < 0.8 * dim


@pytest.mark.parametrize("huge", [1e6, 1e8, 1e9])
def test_a_quantile_that_ran_away_does_not_lift_the_total(huge: float) -> None:
    found = allocate(1.0, torch.tensor([0.65, huge], dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert float(found.norm()) <= 1 + 1e-12


def test_a_split_is_found_where_rounding_alone_puts_the_quantiles_above_the_bound() -> None:
    """A learned split begins with quantiles whose norm is C up to rounding, on either side of it."""
    draw = np.random.default_rng(0)
    for _ in range(2000):
        sizes = torch.from_numpy(draw.integers(1, 300, int(draw.integers(2, 8)))).double()
        bound = float(draw.uniform(0.01, 10))
        quantiles = bound * torch.sqrt(sizes / sizes.sum())
        assert float(allocate(bound, quantiles, sizes.pow(0.25)).norm()) <= bound * (1 + 1e-12)
