"""The mean over the realised cohort (PFL-ASR eq. 75): its sensitivity, its amplification, its noise, its refusals.

The claim that matters is the sensitivity, 2 C w_max / (m + w_max). It is searched for counterexamples, shown to be
reached, and held against the exact distributions of small populations.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide import recipe
from confide.build import make_loop
from confide.errors import UserError
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.mechanisms.realised import Realised
from confide.privacy.plan import Plan, make_plan
from confide.privacy.sampling import Sampling
from confide.runs.audit import audit
from confide.runs.simulation import simulate

torch.set_num_threads(1)
MANY = 200_000


def plan_of(weights: np.ndarray, cohort: int, least: int, bound: float = 1.0, steps: int = 1, **more: Any) -> Plan:
    noise = more or {"noise_multiplier": 1.0}
    privacy = Privacy.model_validate(
        {"mechanism": "realised", "least": least, "delta": 1e-9, "large_delta": True, **noise}
    )
    return make_plan(privacy, Sampling(kind="poisson", cohort=cohort), weights / weights.sum(), bound, steps, 0)


def mean_of(plan: Plan, updates: np.ndarray, cohort: list[int]) -> np.ndarray:
    """What a step divides, for the updates of all users."""  # (users, coordinates) -> (coordinates,)
    chosen = np.array(cohort, dtype=np.int64)
    found: np.ndarray = plan.weights[chosen] @ updates[chosen] / plan.mechanism.divisor(chosen)
    return found


def sensitivity(plan: Plan) -> float:
    assert plan.event.sensitivity is not None
    return plan.event.sensitivity


# Sensitivity


@settings(max_examples=150, deadline=None)
@given(data=st.data(), users=st.integers(2, 9), bound=st.floats(0.01, 10))
def test_no_user_moves_the_mean_by_more_than_the_sensitivity(data: st.DataObject, users: int, bound: float) -> None:
    """Whatever the weights, the cohort and the updates are; the search has the vectors of the worst case too."""
    weights = np.array(data.draw(st.lists(st.floats(0.01, 1), min_size=users, max_size=users)))
    plan = plan_of(weights, users, data.draw(st.integers(1, users)), bound)
    angles = np.array(data.draw(st.lists(st.sampled_from([0, np.pi, 1.0, 2.5]), min_size=users, max_size=users)))
    lengths = np.array(data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.0]), min_size=users, max_size=users)))
    updates = bound * lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    cohort = data.draw(st.lists(st.integers(1, users - 1), unique=True))
    moved = mean_of(plan, updates, [0, *cohort]) - mean_of(plan, updates, cohort)
    assert np.linalg.norm(moved) <= sensitivity(plan) * (1 + 1e-9)


@pytest.mark.parametrize("least", [1, 2, 5, 8])
def test_the_sensitivity_is_reached_and_is_no_larger_than_needed(least: int) -> None:
    """As many users as `least` who all send the same, and one who sends the opposite."""
    plan = plan_of(np.ones(10), 8, least, bound=3.0)
    updates = np.full((10, 1), 3.0)
    updates[9] = -3.0
    moved = mean_of(plan, updates, [*range(least), 9]) - mean_of(plan, updates, list(range(least)))
    assert abs(moved[0]) == pytest.approx(sensitivity(plan)) == pytest.approx(2 * 3.0 / (least + 1))


def test_an_exhaustive_search_of_unequal_weights_comes_close_to_the_sensitivity_and_never_above() -> None:
    weights = np.array([3.0, 1.0, 1.0, 2.0, 1.0, 2.0])
    plan = plan_of(weights, 6, 3)
    largest = 0.0
    for signs in product((-1.0, 1.0), repeat=5):
        updates = np.array([-1.0, *signs])[:, None]
        for chosen in product((False, True), repeat=5):
            others = [k + 1 for k, there in enumerate(chosen) if there]
            moved = mean_of(plan, updates, [0, *others]) - mean_of(plan, updates, others)
            largest = max(largest, abs(float(moved[0])))
    assert 0.99 * sensitivity(plan) < largest <= sensitivity(plan) * (1 + 1e-12)


# Amplification


def hockey_stick(one: np.ndarray, other: np.ndarray, spacing: float, epsilon: float) -> float:
    """The least delta for which both ways are within epsilon, of two densities on a grid."""
    return max(float(np.maximum(p - math.exp(epsilon) * r, 0).sum()) * spacing for p, r in ((one, other), (other, one)))


def exact_delta(plan: Plan, updates: np.ndarray, epsilon: float, multiplier: float) -> float:
    """Delta of one step for the last user, from the true mixtures over all cohorts, for updates on a line."""
    q, deviation = plan.rate, multiplier * sensitivity(plan)
    others = range(len(updates) - 1)
    grid = np.linspace(-2 - 9 * deviation, 2 + 9 * deviation, 8001)
    without, with_it = np.zeros_like(grid), np.zeros_like(grid)
    for chosen in product((False, True), repeat=len(others)):
        cohort = [k for k in others if chosen[k]]
        share = math.prod(q if there else 1 - q for there in chosen)
        low, high = (float(mean_of(plan, updates, each)[0]) for each in (cohort, [*cohort, len(others)]))
        base = stats.norm.pdf(grid, low, deviation)
        without += share * base
        with_it += share * ((1 - q) * base + q * stats.norm.pdf(grid, high, deviation))
    return hockey_stick(without, with_it, float(grid[1] - grid[0]), epsilon)


def stated_delta(plan: Plan, epsilon: float) -> float:
    """Delta of the sampled Gaussian of the plan's rate and z, which is what the accountant takes."""
    q, z = plan.rate, plan.event.noise_multiplier
    grid = np.linspace(-9 * z, 1 + 9 * z, 8001)
    base = stats.norm.pdf(grid, 0, z)
    joined = (1 - q) * base + q * stats.norm.pdf(grid, 1, z)
    return hockey_stick(base, joined, float(grid[1] - grid[0]), epsilon)


WORST = np.array([[1.0]] * 4 + [[-1.0]])


@pytest.mark.parametrize("updates", [WORST, -WORST, np.ones((5, 1)), np.array([[1.0], [-1.0], [1.0], [-1.0], [1.0]])])
@pytest.mark.parametrize(("cohort", "least"), [(1, 1), (3, 2), (4, 4), (5, 4)])
def test_the_true_distributions_of_a_small_population_are_within_what_is_stated(
    updates: np.ndarray, cohort: int, least: int
) -> None:
    plan = plan_of(np.ones(5), cohort, least)
    for epsilon in (0.1, 0.5, 1.0):
        stated = stated_delta(plan, epsilon)
        assert exact_delta(plan, updates, epsilon, plan.event.noise_multiplier) <= stated * 1.001 + 1e-9


def test_noise_for_the_sensitivity_of_a_fixed_divisor_would_break_the_guarantee() -> None:
    """C / least in place of 2 C / (least + 1): the same comparison finds that it is too little."""
    plan = plan_of(np.ones(5), 5, 4)
    too_little = (1 / 4) / sensitivity(plan)
    assert exact_delta(plan, WORST, 0.5, too_little) > 1.5 * stated_delta(plan, 0.5)


# Noise and epsilon


def released(plan: Plan, cohort: np.ndarray) -> np.ndarray:
    total = torch.zeros(MANY, dtype=torch.float64)
    plan.mechanism.release(total, Occasion(plan.event, cohort, 0, 0))
    return total.numpy()


def test_the_noise_is_normal_with_the_stated_deviation_for_every_cohort_and_another_would_be_seen() -> None:
    plan = plan_of(np.ones(50), 10, 4, bound=0.3, noise_multiplier=1.5)
    deviation = 1.5 * 2 * 0.3 / 5
    for cohort in (np.arange(0), np.arange(3), np.arange(20)):
        found = released(plan, cohort) / deviation
        assert stats.kstest(found, "norm", method="asymp").pvalue > 1e-3
        assert stats.kstest(found * 1.02, "norm", method="asymp").pvalue < 1e-3
    # Noise for the expected cohort of a fixed divisor, 1.5 x 0.3 / 10, is another.
    assert stats.kstest(released(plan, np.arange(3)) / (1.5 * 0.3 / 10), "norm", method="asymp").pvalue < 1e-3


def test_the_epsilon_is_that_of_the_sampled_gaussian_with_twice_the_noise() -> None:
    """A scale on the average, s, is worth z = s (least + 1) / 2 here, and s times the cohort with a fixed divisor."""
    z, cohort, population, steps, golden = 1.024, 10_240, 347_530, 2006, 12.6  # a published row of PFL-ASR, by Opacus
    scale = 2 * z / (cohort + 1)
    noise = {"noise_scale": scale, "placement": "average", "accountant": "rdp"}
    plan = plan_of(np.ones(population), cohort, cohort, bound=0.01, steps=steps, **noise)
    assert plan.event.noise_multiplier == pytest.approx(z)
    assert plan.epsilon(steps) == pytest.approx(golden, rel=0.02)
    assert released(plan, np.arange(5)).std() == pytest.approx(scale * 0.01, rel=0.01)


def test_a_target_epsilon_is_kept() -> None:
    plan = plan_of(np.ones(1000), 50, 25, steps=20, target_epsilon=2.0, delta=1e-5, accountant="rdp")
    assert 1.99 < plan.epsilon(20) <= 2.0
    assert isinstance(plan.mechanism, Realised)


# In a run


NO_NOISE = "privacy={mechanism: none}"
SHORT = ("run={steps: 3}", "evaluation={every: 10}")
NOISE = "privacy={mechanism: realised, least: 40, noise_multiplier: 5, delta: 1.0e-3, accountant: rdp}"


def digits(*sets: str) -> recipe.Recipe:
    return recipe.load("convex/digits", [*SHORT, NOISE, *sets])


def test_a_run_divides_by_the_cohort_that_was_drawn_or_by_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cohorts and updates as with a fixed divisor, so that the aggregates differ by the divisors alone."""
    monkeypatch.setattr(Realised, "release", lambda *_: None)  # the division comes before the noise
    loop, fixed = make_loop(digits("privacy.least=54")), make_loop(recipe.load("convex/digits", [*SHORT, NO_NOISE]))
    sizes = []
    for step in range(3):
        for each in (loop, fixed):
            state = each.start()
            state.step = step
            each.step(state)
        sizes.append(len(loop.plan.cohort(step)))
        share = max(54, sizes[-1]) / len(loop.plan.weights)
        torch.testing.assert_close(loop.total * share, fixed.total * fixed.plan.rate)
    assert min(sizes) < 54 < max(sizes)  # both cases were there


def test_a_run_learns_and_states_its_epsilon() -> None:
    loop, state = simulate(digits("run={steps: 20}", "privacy.noise_multiplier=1"))
    assert 0 < loop.epsilon_so_far < 50
    accuracy = loop.task.evaluate(loop.layout.views(loop.final.model(state)))["accuracy"]
    assert accuracy > 0.5


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (["privacy.least=null"], "privacy.least: required with mechanism realised"),
        (["privacy.least=1000"], "privacy.least=1000 is above sampling.cohort"),
        (["sampling.kind=fixed"], "cohorts of one size have one divisor"),
        (["sampling.kind=cyclic"], "independent noise gains nothing from a schedule"),
        (["privacy.placement=client"], "would tell how large that was"),
        (["privacy.trust=local"], "privacy.trust=local: cannot be combined with privacy.mechanism: realised"),
        (["privacy.trust=distributed"], "shares of the noise are for mechanism gaussian, not realised"),
        (["bounding.rule=none"], "noise protects nobody unless every update is bounded"),
        (["privacy.noise_multiplier=null", "privacy.noise_scale=0.1"], "noise_scale on a sum has no meaning"),
        (["privacy.mechanism=gaussian"], "privacy.least: only used with privacy.mechanism: realised"),
    ],
)
def test_what_has_no_proof_is_refused(sets: list[str], problem: str) -> None:
    with pytest.raises(UserError) as error:
        digits(*sets)
    assert problem in str(error.value)


def test_a_deployment_and_an_audit_are_refused() -> None:
    wanted = digits()
    assert "privacy.mechanism=realised" in Realised.deployed_refusals(wanted.asked())[0]
    with pytest.raises(UserError, match="canaries of one cohort share its divisor"):
        audit(wanted)


def test_a_recipe_that_does_not_use_it_keeps_its_digest() -> None:
    assert "least" not in Privacy(mechanism="gaussian").model_dump()
