"""Claims about the plan: one object says who takes part, what it costs and how much noise there is, without a gap.

The largest of them is checked on the numbers that are really summed: no user moves the aggregate by more than the
sensitivity that the noise is measured in.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from confide import recipe
from confide.build import make_loop
from confide.convex.quadratics import Quadratics
from confide.errors import UserError
from confide.privacy import noise
from confide.privacy.events import Sampler
from confide.privacy.gaussian import Address
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.noise import Placement
from confide.privacy.plan import CURVE_POINTS, Plan, make_plan
from confide.privacy.sampling import Sampling
from confide.run import Loop

torch.set_num_threads(1)

# A property holds on a busy machine as well.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

Weights = NDArray[np.float64]
PLACES: tuple[Placement, ...] = get_args(Placement)
LONG = 100_000
# The standard deviation of LONG draws is known to 0.22 %; this is four of those, and less than half of 2 %.
CLOSE = 0.009

weight_lists = st.lists(st.floats(0.01, 1), min_size=2, max_size=50).map(lambda raw: normed(np.array(raw)))


def normed(raw: Weights) -> Weights:
    return np.asarray(raw / raw.sum())


def uniform(population: int) -> Weights:
    return np.full(population, 1 / population)


def skewed(population: int) -> Weights:
    return normed(np.random.default_rng(3).uniform(0.1, 1, population))


def plan_of(
    weights: Weights,
    cohort: int,
    *,
    kind: str = "poisson",
    bound: float = 2.0,
    steps: int = 10,
    seed: int = 0,
    **privacy: Any,
) -> Plan:
    given = {"mechanism": "gaussian", "delta": 1e-5, "accountant": "rdp", **privacy}
    if not {"noise_multiplier", "noise_scale", "target_epsilon"} & set(given):
        given["noise_multiplier"] = 1.5
    sampling = Sampling.model_validate({"kind": kind, "cohort": cohort})
    return make_plan(Privacy.model_validate(given), sampling, weights, bound, steps, seed)


def drawn(plan: Plan, cohort: np.ndarray, step: int = 0, attempt: int = 0, size: int = LONG) -> Tensor:
    total = torch.zeros(size, dtype=torch.float64)
    length = plan.mechanism.release(
        total, Occasion(plan.event, cohort, step, attempt, plan.mechanism.start_memory(total))
    )
    assert length is not None
    return total


# One noise, three places (PFL-ASR H.1)


@CALM
@given(share=st.floats(0.01, 1), population=st.integers(2, 500), s=st.floats(1e-6, 10))
def test_the_three_scales_are_one_multiplier_for_uniform_weights(share: float, population: int, s: float) -> None:
    cohort = max(1, round(share * population))
    weights, q = uniform(population), cohort / population
    given: dict[Placement, float] = {
        "average": s,
        "sum": s * cohort,
        "client": s * math.sqrt(q / float(np.square(weights).sum())),
    }
    found = {place: plan_of(weights, cohort, noise_scale=scale, placement=place) for place, scale in given.items()}
    for place, plan in found.items():
        assert plan.event.noise_multiplier == pytest.approx(s * cohort, rel=1e-9), place


@CALM
@given(weights=weight_lists, share=st.floats(0.01, 1), s=st.floats(1e-6, 10))
def test_the_three_scales_are_one_multiplier_for_general_weights(weights: Weights, share: float, s: float) -> None:
    cohort = max(1, round(share * len(weights)))
    q = cohort / len(weights)
    given: dict[Placement, float] = {
        "average": s,
        "sum": s * cohort,
        "client": s * math.sqrt(q / float(np.square(weights).sum())),
    }
    for place, scale in given.items():
        plan = plan_of(weights, cohort, noise_scale=scale, placement=place, bound=3.0)
        spread = plan.event.noise_multiplier * (plan.event.sensitivity or 0.0)
        assert spread == pytest.approx(s * 3.0, rel=1e-9), f"noise of the average, given at {place}"


@pytest.mark.parametrize(("s", "cohort", "z"), [(1e-4, 1024, 0.1024), (3e-5, 10_240, 0.3072), (3e-6, 204_800, 0.6144)])
def test_the_papers_scale_gives_the_papers_multiplier(s: float, cohort: int, z: float) -> None:
    """PFL-ASR Tables 1 and 17 give both."""
    plan = plan_of(uniform(2 * cohort), cohort, noise_scale=s, placement="average", delta=1e-9)
    assert plan.event.noise_multiplier == pytest.approx(z, rel=1e-9)


@CALM
@given(weights=weight_lists, rate=st.floats(0.01, 1), z=st.floats(1e-3, 100))
def test_multiplier_and_scale_of_the_average_are_inverse(weights: Weights, rate: float, z: float) -> None:
    there = z * float(weights.max()) / rate  # s = z max(w) / q
    assert noise.multiplier_of_average(there, rate, weights) == pytest.approx(z, rel=1e-12)


# Sensitivity


@CALM
@given(weights=weight_lists, share=st.floats(0.01, 1), bound=st.floats(1e-3, 1e3))
def test_sensitivity_follows_the_largest_weight(weights: Weights, share: float, bound: float) -> None:
    cohort = max(1, round(share * len(weights)))
    found = plan_of(weights, cohort, bound=bound).event.sensitivity
    assert found == pytest.approx(bound * weights.max() * len(weights) / cohort, rel=1e-12)


def test_uniform_weights_have_the_sensitivity_of_an_average() -> None:
    assert plan_of(uniform(200), 50, bound=7.0).event.sensitivity == pytest.approx(7.0 / 50)


def loop_of(*overrides: str, name: str = "convex/quadratics") -> Loop:
    return make_loop(recipe.load(name, overrides))


QUADRATICS = ("task.users=30", "task.dimension=12", "task.rank=4", "sampling.kind=poisson", "sampling.cohort=10")
SKEWED = f"users.weights={yaml.safe_dump(skewed(30).tolist(), default_flow_style=True)}"


def moved_by(loop: Loop, central: Tensor, cohort: np.ndarray, user: int) -> float:
    """How far the aggregate moves when one user leaves the cohort."""
    sums = []
    for users in (cohort, cohort[cohort != user]):
        loop.engine.train(central, users, 0, loop.total)
        sums.append(loop.total.double() / loop.plan.rate)
    return float((sums[0] - sums[1]).norm())


@pytest.mark.parametrize("rule", ["clip", "per_layer_clip", "normalise", "per_layer_normalise"])
@pytest.mark.parametrize("bound", [0.5, 40])
def test_no_user_moves_the_aggregate_by_more_than_the_sensitivity(rule: str, bound: float) -> None:
    loop = loop_of(*QUADRATICS, SKEWED, f"bounding.rule={rule}", f"bounding.bound={bound}")
    central, cohort = loop.start().parameters, loop.plan.cohort(0)
    limit = loop.plan.event.sensitivity
    assert limit is not None
    moves = [moved_by(loop, central, cohort, int(user)) for user in cohort]
    assert max(moves) <= limit
    if bound == 0.5 or rule == "normalise":
        expected = limit * loop.plan.weights[cohort] / loop.plan.weights.max()
        assert moves == pytest.approx(expected.tolist(), rel=1e-5), "everybody is at the bound, by weight"


@pytest.mark.parametrize("rule", ["clip", "per_layer_clip", "normalise", "per_layer_normalise"])
@pytest.mark.parametrize("l2", ["1e-4", "1e-1"])
def test_a_user_at_its_own_optimum_stays_within_the_sensitivity(rule: str, l2: str) -> None:
    """There the terms of the update cancel; what little is left must not be scaled up past the bound.

    A guarantee has to hold for every model, so for a model that one user alone has trained as well.
    """
    given = [f"task.l2={l2}", "local.learning_rate=0.5", "local.divide_by_learning_rate=false", "run.steps=5"]
    given += ["privacy.target_epsilon=null", "privacy.mechanism=none", "evaluation.last=1"]
    free = loop_of(*given, "bounding.rule=none", "bounding.bound=null", name="convex/digits")
    held = loop_of(*given, f"bounding.rule={rule}", "bounding.bound=1e-5", name="convex/digits")
    limit, alone = held.plan.event.sensitivity, np.array([0])
    assert limit is not None
    central, shares = free.start().parameters, []
    for _ in range(60):
        shares.append(moved_by(held, central, alone, 0) / limit)
        free.engine.train(central, alone, 0, free.total)
        central = central - free.total / float(free.plan.weights[0])
    assert max(shares) <= 1.0, "in units of the sensitivity"


# The divisor


@pytest.mark.parametrize("weights", ["uniform", "skewed"])
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_the_sum_is_divided_by_the_expected_share_and_never_by_the_realised_one(weights: str, kind: str) -> None:
    given = [*QUADRATICS, f"sampling.kind={kind}", "bounding.rule=none", "bounding.bound=null"]
    given += ["privacy.mechanism=none", "privacy.target_epsilon=null", "privacy.delta=null", "local.steps=1"]
    loop = loop_of(*given, *([SKEWED] if weights == "skewed" else []))
    task = loop.task
    assert isinstance(task, Quadratics)
    w = skewed(30) if weights == "skewed" else uniform(30)
    state, sizes = loop.start(), []
    for step in range(12):
        central, cohort = state.parameters.clone(), loop.plan.cohort(step)
        loop.step(state)
        expected = torch.zeros_like(central)
        for user in cohort.tolist():
            # One local step, divided by its rate, is the gradient A A'(w - w*).
            root, centre = task.roots[user], task.centres[user]
            expected += float(w[user]) * root @ (root.T @ (central - centre))
        expected *= 30 / 10
        torch.testing.assert_close(loop.total, expected, rtol=1e-9, atol=1e-12)
        sizes.append(len(cohort))
    assert (len(set(sizes)) > 3) == (kind == "poisson"), "cohorts of other sizes than the expected one took part"


def test_an_empty_cohort_leaves_only_the_noise() -> None:
    given = [*QUADRATICS, "sampling.cohort=1", "privacy.target_epsilon=null", "privacy.noise_multiplier=2"]
    loop = loop_of(*given)
    state = loop.start()
    while len(loop.plan.cohort(state.step)):
        loop.step(state)
    step = state.step
    made = loop.step(state)
    assert (made.tally.users, made.signal.norm) == (0, 0.0)
    assert torch.equal(loop.total, drawn(loop.plan, np.array([], dtype=np.int64), step, size=12))


def test_a_step_releases_the_sum_with_the_noise_of_its_plan() -> None:
    given = [*QUADRATICS, SKEWED]
    noisy = loop_of(*given, "privacy.target_epsilon=null", "privacy.noise_multiplier=2", "privacy.placement=client")
    quiet = loop_of(*given, "privacy.target_epsilon=null", "privacy.mechanism=none", "privacy.delta=null")
    noisy.step(noisy.start())
    quiet.step(quiet.start())
    added = drawn(noisy.plan, noisy.plan.cohort(0), size=12)
    torch.testing.assert_close(noisy.total - quiet.total, added, rtol=1e-9, atol=1e-12)
    assert float(added.norm()) > 0


# How much noise


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weights", [uniform(100), skewed(100)], ids=["uniform", "skewed"])
@pytest.mark.parametrize("z", [0.5, 3.0])
def test_the_aggregate_carries_noise_of_multiplier_times_sensitivity(
    place: Placement, weights: Weights, z: float
) -> None:
    plan = plan_of(weights, 20, noise_multiplier=z, placement=place)
    expected = z * 2.0 * weights.max() * 100 / 20
    for step in range(3):
        added = drawn(plan, plan.cohort(step), step)
        assert float(added.std()) == pytest.approx(expected, rel=CLOSE)
        assert abs(float(added.mean())) < 5 * expected / math.sqrt(LONG)


@pytest.mark.parametrize("weights", [uniform(100), skewed(100)], ids=["uniform", "skewed"])
@pytest.mark.parametrize("users", [[7], [3, 99], [0, 1, 2, 50], list(range(0, 100, 2))], ids=len)
def test_noise_on_each_client_adds_up_to_as_much_however_small_the_cohort(weights: Weights, users: list[int]) -> None:
    plan = plan_of(weights, 20, noise_multiplier=1.0, placement="client")
    added = drawn(plan, np.array(users))
    assert float(added.std()) == pytest.approx(2.0 * weights.max() * 5, rel=CLOSE)


def test_every_client_has_its_own_share_of_the_noise() -> None:
    """In proportion to its weight, as w_k times the same noise on every client gives it."""
    plan = plan_of(skewed(100), 20, noise_multiplier=1.0, placement="client")
    users = np.array([5, 40, 41])
    spread = plan.event.noise_multiplier * (plan.event.sensitivity or 0.0)
    rest = drawn(plan, users)
    shares = plan.weights[users] / np.sqrt(np.square(plan.weights[users]).sum())
    for user, share in zip(users.tolist(), shares.tolist(), strict=True):
        own = torch.empty_like(rest)
        plan.source.fill(own, Address(0, user + 1))
        along = float(rest @ own / (own @ own)) / spread
        assert along == pytest.approx(share, abs=5 / math.sqrt(LONG))


@pytest.mark.parametrize("place", PLACES)
def test_an_empty_cohort_still_gets_all_of_the_noise(place: Placement) -> None:
    plan = plan_of(skewed(100), 20, placement=place)
    added = drawn(plan, np.array([], dtype=np.int64))
    assert float(added.std()) == pytest.approx(1.5 * (plan.event.sensitivity or 0.0), rel=CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", PLACES)
def test_noise_has_the_type_and_shape_of_the_sum(dtype: torch.dtype, place: Placement) -> None:
    total, again = torch.full((17,), 1000.0, dtype=dtype), torch.zeros(17, dtype=dtype)
    plan = plan_of(uniform(10), 5, placement=place)
    for vector in (total, again):
        plan.mechanism.release(vector, Occasion(plan.event, np.arange(4), 0, 0, {}))
    torch.testing.assert_close(total, again + 1000.0, rtol=1e-6, atol=0, msg="it is added to what is there")


def test_without_a_mechanism_there_is_no_noise_and_no_guarantee() -> None:
    plan = make_plan(Privacy(), Sampling(cohort=5), uniform(10), 1.0, 10, 0)
    total = torch.zeros(3)
    assert plan.mechanism.release(total, Occasion(plan.event, np.arange(5), 0, 0, {})) is None
    assert not bool(total.any())
    assert plan.epsilon(1) == math.inf
    with_delta = make_plan(Privacy(delta=1e-5), Sampling(cohort=5), uniform(10), 1.0, 10, 0)
    assert with_delta.epsilon(1) == math.inf


# Noise is never used twice


def test_noise_never_repeats_between_steps_attempts_seeds_and_users() -> None:
    size = 4000
    found: dict[str, Tensor] = {}
    for seed in (0, 1, 2):
        shared, own = (plan_of(uniform(50), 10, seed=seed, placement=place) for place in ("sum", "client"))
        for step in (0, 1, 2, 11):
            for attempt in (0, 1, 2):
                found[f"seed {seed} step {step} attempt {attempt}"] = drawn(shared, np.arange(3), step, attempt, size)
                for user in (0, 1, 11):
                    where = f"seed {seed} step {step} attempt {attempt} user {user}"
                    found[where] = drawn(own, np.array([user]), step, attempt, size)
    stack = torch.stack(list(found.values()))
    stack /= stack.norm(dim=1, keepdim=True)
    likeness = (stack @ stack.T).fill_diagonal_(0).abs()
    assert float(likeness.max()) < 6 / math.sqrt(size)
    assert all(not bool((a == b).any()) for a, b in combinations(list(found.values())[:40], 2))


def test_the_same_address_repeats_its_noise() -> None:
    for place in PLACES:
        first, second = (plan_of(skewed(50), 10, seed=5, placement=place) for _ in range(2))
        assert torch.equal(drawn(first, np.arange(9), 3, 1, 50), drawn(second, np.arange(9), 3, 1, 50))


# Sampler and event agree


@pytest.mark.parametrize(
    ("kind", "cohort", "sampler"),
    [("poisson", 20, "poisson"), ("fixed", 20, "fixed"), ("poisson", 100, "everyone"), ("fixed", 100, "everyone")],
)
def test_the_event_carries_the_sampler_that_runs(kind: str, cohort: int, sampler: Sampler) -> None:
    plan = plan_of(uniform(100), cohort, kind=kind)
    event = plan.event
    assert (plan.sampler, event.sampler) == (sampler, sampler)
    assert (event.cohort, event.population, event.rate, plan.rate) == (cohort, 100, cohort / 100, cohort / 100)
    cohorts = [plan.cohort(step) for step in range(50)]
    sizes = {len(users) for users in cohorts}
    if sampler == "poisson":
        assert len(sizes) > 5
        assert np.mean([len(users) for users in cohorts]) == pytest.approx(20, abs=3)
    else:
        assert sizes == {cohort}
    if sampler == "everyone":
        assert all(np.array_equal(users, np.arange(100)) for users in cohorts)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_full_participation_is_the_plain_gaussian_however_it_was_asked_for(accountant: str) -> None:
    spent = {
        plan_of(uniform(100), 100, kind=kind, accountant=accountant, noise_multiplier=6.0).epsilon(10)
        for kind in ("poisson", "fixed")
    }
    assert len(spent) == 1
    # No amplification: sampling half of the users with the same multiplier costs less.
    assert spent.pop() > plan_of(uniform(100), 50, accountant=accountant, noise_multiplier=6.0).epsilon(10)


def test_a_plan_calibrated_to_a_target_stays_within_it() -> None:
    plan = plan_of(uniform(100), 100, target_epsilon=3.0, steps=50)
    assert 0.999 * 3.0 < plan.epsilon(50) <= 3.0
    assert plan.epsilon(51) > 3.0


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 2003])
def test_epsilon_is_computed_at_few_steps_and_at_the_last(steps: int) -> None:
    plan = plan_of(uniform(10), 10, noise_multiplier=10.0, steps=steps)
    computed = [step for step in range(1, steps + 1) if plan.accounted(step)]
    assert computed[-1] == steps
    assert len(computed) <= CURVE_POINTS + 1


# What is refused


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    for kind in ("poisson", "fixed"):
        with pytest.raises(UserError, match=r"sampling\.cohort=101 is larger than the population of 100 users"):
            plan_of(uniform(100), 101, kind=kind)


def test_noise_without_a_bound_or_a_delta_is_refused() -> None:
    with pytest.raises(UserError, match=r"noise protects nobody unless every update is bounded"):
        plan_of(uniform(100), 10, bound=math.inf)
    with pytest.raises(UserError, match=r"privacy\.delta: required with noise"):
        plan_of(uniform(100), 10, delta=None)


def test_noise_of_no_size_is_refused() -> None:
    with pytest.raises(UserError, match="exactly one of target_epsilon, noise_multiplier and noise_scale"):
        make_plan(Privacy(mechanism="gaussian", delta=1e-5), Sampling(cohort=5), uniform(10), 1.0, 10, 0)


def test_a_fixed_cohort_refuses_pld() -> None:
    with pytest.raises(UserError, match="no proof for cohorts of fixed size"):
        plan_of(uniform(100), 10, kind="fixed", accountant="pld")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["bounding.rule=none", "bounding.bound=null"], r"bounding\.rule=none: noise protects nobody"),
        (["privacy.delta=null"], r"privacy\.delta: required with noise"),
        (["bounding.bound=null"], r"bounding\.bound: required with rule normalise"),
        (["privacy.noise_multiplier=1"], r"exactly one of .* \(given: target_epsilon and noise_multiplier\)"),
        (["privacy.target_epsilon=null"], r"exactly one of .* \(given: none of them\)"),
        (["privacy.mechanism=none"], r"privacy\.target_epsilon: has no meaning"),
        (["sampling.kind=fixed"], r"privacy\.accountant=pld: has no proof"),
        (["sampling.cohort=288"], r"sampling\.cohort=288 is larger than the population of 287"),
        (["privacy.delta=1"], r"privacy\.delta=1: expected a number above 0 and below 1"),
        (["bounding.bound=0"], r"bounding\.bound=0: expected a number above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_recipe_without_a_guarantee_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        recipe.load("convex/digits", overrides)


def test_a_recipe_is_told_all_of_its_problems_at_once() -> None:
    with pytest.raises(UserError, match="2 problems") as caught:
        recipe.load("convex/digits", ["bounding.rule=none", "privacy.delta=null"])
    assert "bounding.rule=none" in str(caught.value)
    assert "privacy.delta" in str(caught.value)


@pytest.mark.parametrize("weights", ["[.inf, 1, 1]", "[.nan, 1, 1]", "[0, 1, 1]", "[-1, 2, 2]"])
def test_weights_that_are_no_weights_are_refused(weights: str) -> None:
    given = ["task.users=3", "sampling.cohort=3", f"users.weights={weights}"]
    with pytest.raises(UserError, match=r"users\.weights"):
        recipe.load("convex/quadratics", given)
