"""Claims about the audit: honest runs stay below what they claim, and broken mechanisms are caught.

`benchmarks/audit.py` does the same over twenty seeds each.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide import recipe
from confide.errors import UserError
from confide.federated.bounding import Bounding, bounder
from confide.federated.parameters import Layout
from confide.privacy import one_run
from confide.runs.audit import Canaries, audit

torch.set_num_threads(1)
Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


def _benchmark() -> Any:
    """The benchmark's own ways to break a mechanism; it is a script beside the package."""
    spec = importlib.util.spec_from_file_location("audit_benchmark", ROOT / "benchmarks" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_found = _benchmark()
BROKEN, QUICK, broken = _found.BROKEN, _found.QUICK, _found.broken


def wanted(*overrides: str, seed: int = 0) -> recipe.Recipe:
    return recipe.load("convex/digits", [*QUICK, f"run.seed={seed}", *overrides])


# The statistics


def test_perfect_guesses_prove_what_the_binomial_says() -> None:
    """All of n right has probability p^n: p = error^(1/n), epsilon = log(p / (1 - p))."""
    p = 0.05 ** (1 / 1000)
    assert one_run.lower_bound(1000, 1000, 1000, 0.0, 0.05) == pytest.approx(math.log(p / (1 - p)), abs=1e-3)


def test_blind_guesses_prove_nothing() -> None:
    assert one_run.lower_bound(1000, 1000, 510, 1e-5, 0.05) == 0.0


@settings(deadline=None, max_examples=60)
@given(guesses=st.integers(2, 400), share=st.floats(0.5, 1), delta=st.sampled_from([0.0, 1e-6, 1e-4]))
def test_the_bound_grows_with_right_guesses_and_shrinks_with_delta(guesses: int, share: float, delta: float) -> None:
    right = round(guesses * share)
    bound = one_run.lower_bound(400, guesses, right, delta, 0.05)
    assert bound <= one_run.lower_bound(400, guesses, min(guesses, right + 1), delta, 0.05) + 1e-3
    assert one_run.lower_bound(400, guesses, right, 10 * delta, 0.05) <= bound + 1e-3


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_bounded_below_its_epsilon_as_often_as_promised(epsilon: float) -> None:
    """The tightest mechanism there is: each coin is told with probability e^eps / (1 + e^eps)."""
    draw = np.random.default_rng(0)
    right = draw.binomial(500, 1 / (1 + math.exp(-epsilon)), size=400)
    bounds = {int(count): one_run.lower_bound(500, 500, int(count), 0.0, 0.05) for count in set(right.tolist())}
    above = sum(bounds[int(count)] > epsilon for count in right)
    assert stats.binomtest(above, 400, 0.05, alternative="greater").pvalue > 1e-3
    assert np.mean([bounds[int(count)] for count in right]) > 0.6 * epsilon, "and not far below"


# The canaries


def test_canaries_exceed_the_bound_and_their_filters_have_norm_one() -> None:
    layout = Layout(("a", "b"), ((50, 40), (7,)))
    planted = Canaries.plant(layout, 30, 6, 2.0, 0)
    rule = bounder(Bounding(rule="per_layer_clip", bound=2.0, split="dim"), layout)
    assert planted.norms().norm(dim=1).tolist() == pytest.approx([20.0] * 30)
    assert planted.filters(rule).norm(dim=1).tolist() == pytest.approx([1.0] * 30)
    assert bool((planted.signs.sum(dim=1) == 0).all())
    assert all(len(set(row.tolist())) == len(row) for row in planted.places), "no coordinate twice"


# Whole audits


@pytest.mark.parametrize("seed", [0, 1])
def test_an_honest_run_stays_below_its_claim(seed: int) -> None:
    found = audit(wanted(seed=seed))
    assert found.passed
    assert 0 < found.lower_bound < found.claimed < found.best_possible
    assert found.claimed == pytest.approx(2.5, rel=0.02)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_mechanism_is_caught(kind: str) -> None:
    with broken(kind):
        found = audit(wanted(seed=3))
    assert not found.passed
    assert found.lower_bound > 1.2 * found.claimed


@pytest.mark.parametrize(
    "overrides",
    [
        ["privacy.mechanism=banded", "sampling.kind=cyclic"],
        ["privacy.accountant=rdp", "sampling.kind=fixed"],
        ["bounding={rule: per_layer_clip, bound: 5, split: dim, adaptive: {quantile: 0.5}}"],
        ["privacy.placement=client", "users={weights: examples, public: true}"],
    ],
    ids=["banded", "fixed", "adaptive", "client"],
)
def test_every_mechanism_can_be_audited(overrides: list[str]) -> None:
    assert audit(wanted(*overrides)).passed
    with broken("no noise"):
        assert not audit(wanted(*overrides)).passed


def test_the_command_reports_and_fails_loudly(command: Command, tmp_path: Path) -> None:
    small = [part for setting in QUICK for part in ("--set", setting)]
    code, out, _ = command("audit", "convex/digits", *small, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["passed"] is True
    assert found["lower_bound"] <= found["claimed"]
    with broken("no noise"):
        code, out, err = command("audit", "convex/digits", *small)
    assert code == 1
    assert "THE AUDIT FAILED" in err


def test_a_recipe_without_a_claim_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to audit"):
        audit(recipe.load("convex/digits", ["privacy.mechanism=none", "privacy.target_epsilon=null"]))
