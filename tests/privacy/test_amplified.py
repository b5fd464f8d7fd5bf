"""Claims about correlated noise that is amplified by sampling, and about cohorts with a largest size."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from confide.errors import UserError
from confide.privacy import factorisation as f
from confide.privacy.accountant import epsilon, noise_multiplier
from confide.privacy.events import Event
from confide.privacy.mechanisms import Privacy
from confide.privacy.plan import Plan, make_plan
from confide.privacy.sampling import Sampling, draw_cohort
from confide.randomness import generator

Array = NDArray[np.float64]

# z, rounds, bands, population, cohort, delta, and epsilon by jax-privacy 2.0 (with dp-accounting 0.6), computed by
#   accountant = dp_accounting.pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
#   accountant.compose(jax_privacy.experimental.accounting.amplified_bandmf_event(
#       z, rounds, num_bands=bands, sampling_prob=bands * cohort / population)).get_epsilon(delta)
JAX_PRIVACY = [
    (1.0, 2000, 16, 100_000, 1000, 1e-6, 14.474467),
    (0.6, 2000, 4, 100_000, 1000, 1e-6, 22.025738),
    (2.0, 500, 32, 10_000, 100, 1e-5, 3.226893),
    (0.8, 1001, 8, 1_000_000, 10_000, 1e-7, 12.634512),
    (4.0, 300, 10, 1000, 100, 1e-4, 5.550068),
]


def run_of(z: float, rounds: int, bands: int, population: int, cohort: int, most: int = 0) -> Event:
    return Event(
        "cyclic_poisson", cohort / population, cohort, population, z, 1.0, separation=bands, rounds=rounds, bands=bands,
        most=most,
    )  # fmt: skip


def plan_of(
    population: int, cohort: int, steps: int, most: int | None = None, kind: str = "cyclic_poisson", **privacy: object
) -> Plan:
    given = {"mechanism": "banded", "delta": 1e-5, **privacy}
    if "target_epsilon" not in given:
        given.setdefault("noise_multiplier", 2.0)
    sampling = Sampling.model_validate({"kind": kind, "cohort": cohort, "most": most})
    return make_plan(Privacy.model_validate(given), sampling, np.full(population, 1 / population), 2.0, steps, 0)


# Accounting.


@pytest.mark.parametrize(("z", "rounds", "bands", "population", "cohort", "delta", "expected"), JAX_PRIVACY)
def test_epsilon_is_that_of_jax_privacy(
    z: float, rounds: int, bands: int, population: int, cohort: int, delta: float, expected: float
) -> None:
    event = run_of(z, rounds, bands, population, cohort)
    assert epsilon([event], delta, "pld") == pytest.approx(expected, rel=0.003)
    assert epsilon([event], delta, "rdp") >= 0.999 * expected


@pytest.mark.parametrize(("z", "rounds", "bands", "population", "cohort", "delta", "_"), JAX_PRIVACY)
def test_epsilon_is_that_of_opacus_prv_accountant_within_a_hundredth(
    z: float, rounds: int, bands: int, population: int, cohort: int, delta: float, _: float
) -> None:
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(z, bands * cohort / population, math.ceil(rounds / bands))]
    found = epsilon([run_of(z, rounds, bands, population, cohort)], delta, "pld")
    assert found == pytest.approx(prv.get_epsilon(delta, eps_error=0.005, delta_error=delta / 100), rel=0.01)


def true_delta(coefficients: Array, groups: int, rounds: int, p: float, deviation: float, epsilon: float) -> float:
    """delta(epsilon) of what is released, by simulation: a user of group 0 beside nobody, in one coordinate.

    From the outside: the released noise has covariance R R^T, the user is in any subset of the steps of its group, and
    the privacy loss is the logarithm of the two densities' ratio. Returns the larger of both directions.
    """
    matrix = sum(c * np.eye(rounds, k=-lag) for lag, c in enumerate(coefficients))
    precision = np.linalg.inv(deviation**2 * np.linalg.inv(matrix) @ np.linalg.inv(matrix).T)
    turns = range(0, rounds, groups)
    shifts, chances = [], []
    for taken in itertools.product((0, 1), repeat=len(turns)):
        shift = np.zeros(rounds)
        shift[list(turns)] = taken
        shifts.append(shift)
        chances.append(math.prod(p if one else 1 - p for one in taken))
    moved, weight = np.array(shifts), np.array(chances)  # (subsets, rounds), (subsets,)
    draw, samples = generator(0, "privacy loss"), 200_000
    noise = deviation * np.linalg.solve(matrix, draw.standard_normal((rounds, samples))).T

    def loss(seen: Array) -> Array:
        exponents = seen @ precision @ moved.T - 0.5 * np.einsum("ij,jk,ik->i", moved, precision, moved)
        return np.asarray(np.log(np.exp(exponents) @ weight))

    with_user = loss(noise + moved[draw.choice(len(weight), samples, p=weight)])
    removed = np.maximum(1 - np.exp(epsilon - with_user), 0).mean()
    added = np.maximum(1 - np.exp(epsilon + loss(noise)), 0).mean()
    return float(max(removed, added))


@pytest.mark.parametrize(("bands", "groups", "rounds", "p"), [(2, 2, 4, 0.3), (3, 3, 6, 0.5), (2, 3, 5, 0.4)])
def test_the_simulated_privacy_loss_is_the_one_that_is_accounted_for(
    bands: int, groups: int, rounds: int, p: float
) -> None:
    """The theorem on small cases: as many sampled Gaussians as turns, in units of a column, neither more nor less."""
    coefficients, z = f.optimised_coefficients(bands, rounds), 1.2
    stated = Event("cyclic_poisson", p / groups, 10, 1000, z, 1.0, separation=groups, rounds=rounds, bands=bands)
    assert stated.turns == math.ceil(rounds / groups)
    deviation = z * float(np.linalg.norm(coefficients))
    for delta in (0.1, 0.02):
        simulated = true_delta(coefficients, groups, rounds, p, deviation, epsilon([stated], delta, "pld"))
        assert simulated == pytest.approx(delta, rel=0.05)


def test_fewer_groups_than_bands_would_cost_more_than_is_accounted_for() -> None:
    coefficients, z = f.root_coefficients(3), 1.2
    stated = Event("cyclic_poisson", 0.25, 10, 1000, z, 1.0, separation=2, rounds=6, bands=2)
    deviation = z * float(np.linalg.norm(coefficients))
    assert true_delta(coefficients, 2, 6, 0.5, deviation, epsilon([stated], 0.05, "pld")) > 1.1 * 0.05


def test_one_band_is_poisson_sampling_and_a_sure_turn_is_a_plain_gaussian() -> None:
    poisson = [Event("poisson", 0.02, 200, 10_000, 1.1, 1.0)] * 40
    assert epsilon([run_of(1.1, 40, 1, 10_000, 200)], 1e-6, "pld") == epsilon(poisson, 1e-6, "pld")
    sure = [Event("everyone", 1.0, 100, 100, 3.0, 1.0)] * 4
    assert epsilon([run_of(3.0, 40, 10, 100, 10)], 1e-5, "pld") == epsilon(sure, 1e-5, "pld")


def test_a_plan_reaches_its_target_and_its_noise_is_measured_in_one_column() -> None:
    plan = plan_of(1000, 50, 60, bands=6, target_epsilon=3, accountant="rdp")
    assert 0.99 * 3 < plan.epsilon(plan.charges(60)) <= 3
    assert plan.charges(60) == 1
    assert plan.event.separation == 6
    assert plan.rate == 0.05
    assert plan.event.turn_rate == pytest.approx(0.3)
    assert "public groups" in plan.event.adjacency


def test_events_that_nobody_can_account_for_are_refused() -> None:
    good = run_of(1.0, 40, 4, 1000, 50, most=120)
    assert Event.from_json(good.to_json()) == good
    assert "most" not in replace(good, most=0).to_json()
    for wrong in (
        {"separation": 3},  # columns overlap
        {"separation": 21},  # a rate above 1
        {"separation": 0},
        {"most": -1},
        {"most": 1.5},
        {"sampler": "cyclic", "separation": 20},  # one size, nothing to cut
    ):
        with pytest.raises(UserError, match="refused"):
            Event.from_json({**good.to_json(), **wrong})


def test_groups_smaller_than_the_cohort_are_refused() -> None:
    with pytest.raises(UserError, match="bands=8: so many groups of 100 users are smaller than the cohort of 20"):
        plan_of(100, 20, 40, bands=8)


# The sampler.


def test_every_user_of_the_group_is_drawn_by_a_coin_of_its_own_and_nobody_else() -> None:
    groups, population, cohort, cycles = 4, 120, 15, 2000
    drawn = np.zeros((groups, population))
    together = 0
    for cycle in range(cycles):
        for group in range(groups):
            users = draw_cohort("cyclic_poisson", cohort, population, 3, cycle * groups + group, groups=groups)
            assert users.tolist() == sorted(users.tolist())
            drawn[group, users] += 1
            together += int({*f.group_of(population, groups, 3, 0)[:2].tolist()} <= {*users.tolist()})
    for group in range(groups):
        own = f.group_of(population, groups, 3, group)
        assert drawn[group].sum() == drawn[group, own].sum(), "nobody of another group"
        shares = drawn[group, own] / cycles
        assert np.abs(shares - 0.5).max() < 5 * math.sqrt(0.25 / cycles)
    assert together / cycles == pytest.approx(0.25, abs=5 * math.sqrt(0.1875 / cycles)), "two coins, not one"


@pytest.mark.parametrize(("population", "cohort", "bands"), [(120, 15, 4), (1000, 50, 6), (300, 10, 1)])
def test_a_plan_makes_as_many_groups_as_bands_and_tosses_a_coin_below_one(
    population: int, cohort: int, bands: int
) -> None:
    plan = plan_of(population, cohort, 40, bands=bands)
    assert plan.event.separation == bands
    assert plan.event.turn_rate == pytest.approx(bands * cohort / population)
    sizes = []
    for step in range(300):
        users, own = plan.cohort(step), f.group_of(population, bands, 0, step)
        assert set(users.tolist()) <= set(own.tolist())
        sizes.append(len(users))
    p = bands * cohort / population
    assert len(set(sizes)) > 5, "a coin, not the whole group"
    assert np.mean(sizes) == pytest.approx(cohort, abs=5 * math.sqrt(cohort * (1 - p) / 300))


def test_attempts_and_system_cohorts_have_coins_of_their_own() -> None:
    seeded = [draw_cohort("cyclic_poisson", 50, 1000, 0, 7, attempt, 5).tolist() for attempt in (0, 1, 0)]
    assert seeded[0] == seeded[2] != seeded[1]
    system = {tuple(draw_cohort("cyclic_poisson", 50, 1000, None, 7, 0, 5).tolist()) for _ in range(10)}
    assert len(system) == 10
    own = set(f.group_of(1000, 5, 0, 7).tolist())
    assert all(set(users) <= own for users in system), "the groups stay"


def test_a_largest_cohort_is_refused_where_sampling_counts_for_nothing() -> None:
    """Local noise is charged for every step; a share of delta for cohorts that are cut down would be for nothing."""
    with pytest.raises(UserError, match=r"sampling\.most: with privacy\.trust=local"):
        plan_of(1000, 40, 10, 75, kind="poisson", mechanism="gaussian", trust="local")


def test_where_a_turn_takes_everybody_the_whole_group_is_drawn() -> None:
    """With as many groups as cohorts the coin of a turn has probability 1."""
    plan = plan_of(100, 25, 10, bands=4)
    assert plan.event.turn_rate == 1
    cohorts = [plan.cohort(step) for step in range(4)]
    assert sorted(np.concatenate(cohorts).tolist()) == list(range(100))


@pytest.mark.parametrize(("kind", "groups"), [("poisson", 1), ("cyclic_poisson", 2)])
def test_a_cohort_that_is_too_large_is_cut_down_to_a_uniformly_random_part(kind: str, groups: int) -> None:
    population, cohort, most, draws = 40, 10, 12, 6000
    hits, sizes = np.zeros(population), []
    for step in range(draws):
        users = draw_cohort(kind, cohort, population, 1, groups * step, groups=groups, most=most)  # type: ignore[arg-type]
        assert len(set(users.tolist())) == len(users)
        assert users.tolist() == sorted(users.tolist())
        hits[users] += 1
        sizes.append(len(users))
    members, p = population // groups, groups * cohort / population
    expected = sum(min(n, most) * stats.binom.pmf(n, members, p) for n in range(members + 1))
    assert max(sizes) == most
    assert np.mean(sizes) == pytest.approx(expected, abs=5 * float(np.std(sizes)) / math.sqrt(draws))
    assert np.mean(np.array(sizes) == most) == pytest.approx(
        float(stats.binom.sf(most - 1, members, p)), abs=5 * math.sqrt(0.25 / draws)
    )
    share = expected / members
    seen = hits[hits > 0] / draws
    assert len(seen) == members
    assert np.abs(seen - share).max() < 5 * math.sqrt(share * (1 - share) / draws), "first and last users alike"


# Cohorts with a largest size.


@pytest.mark.parametrize("kind", ["poisson", "cyclic_poisson"])
def test_truncation_costs_what_the_coupling_says_and_more_than_the_tighter_analysis(kind: str) -> None:
    """Against dp-accounting's own event (Ganesh 2025), which has a sharper bound for another adjacency."""
    z, rounds, population, cohort, delta = 2.0, 200, 10_000, 100, 1e-5
    groups = 8 if kind == "cyclic_poisson" else 1
    turns, p, members = rounds // groups, groups * cohort / population, population // groups
    for most, looser in ((165, 1.02), (180, 1.001)):
        one = Event("poisson", p, cohort, population, z, 1.0, most=most)
        events = [one] * rounds if groups == 1 else [run_of(z, rounds, groups, population, cohort, most)]
        found = epsilon(events, delta, "pld")
        plain = epsilon([replace(event, most=0) for event in events], delta, "pld")
        tight = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
        sharper = dp_accounting.TruncatedSubsampledGaussianDpEvent(members, p, most, z)
        tight.compose(dp_accounting.SelfComposedDpEvent(sharper, turns))
        assert plain < found <= looser * plain
        assert 0.999 * tight.get_epsilon(delta) <= found <= looser * tight.get_epsilon(delta)
        # The statement itself: plain Poisson at delta' = delta - (1 + e^epsilon) T Pr[more than most].
        tail = rounds * float(stats.binom.sf(most, members + 1, p))
        left = delta - (1 + math.exp(found)) * tail
        assert left > 0
        assert epsilon([replace(event, most=0) for event in events], left, "pld") <= found


def test_a_smaller_largest_cohort_never_costs_less_and_one_that_is_too_small_has_no_bound() -> None:
    spent = [
        epsilon([Event("poisson", 0.01, 100, 10_000, 2.0, 1.0, most=most)] * 200, 1e-5, "rdp")
        for most in (100, 120, 140, 145, 150, 160, 200, 10_000)
    ]
    assert spent == sorted(spent, reverse=True)
    assert math.isinf(spent[0])
    assert spent[-1] == epsilon([Event("poisson", 0.01, 100, 10_000, 2.0, 1.0)] * 200, 1e-5, "rdp")


def test_noise_is_calibrated_with_the_truncation_in_it() -> None:
    template = Event("poisson", 0.01, 100, 10_000, 0.0, 1.0, most=165)
    z = noise_multiplier(1.0, 1e-5, 200, "rdp", template)
    assert 0.99 < epsilon([replace(template, noise_multiplier=z)] * 200, 1e-5, "rdp") <= 1.0
    assert epsilon([replace(template, noise_multiplier=0.999 * z)] * 200, 1e-5, "rdp") > 1.0


def test_a_plan_with_a_largest_cohort_draws_and_accounts_for_it() -> None:
    for kind, privacy in (("poisson", {"mechanism": "gaussian"}), ("cyclic_poisson", {"bands": 4})):
        plan = plan_of(1000, 20, 30, 60, kind, **privacy)
        assert plan.event.most == 60
        plain = replace(plan.event, most=0)
        assert plan.epsilon(plan.charges(30)) > epsilon([plain] * plan.charges(30), 1e-5, "pld")
        assert max(len(plan.cohort(step)) for step in range(200)) <= 60


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"kind": "fixed", "cohort": 20, "most": 30}, "cohorts of kind fixed have one size"),
        ({"kind": "poisson", "cohort": 20, "most": 19}, "most=19 is below the expected cohort of 20; give about 56"),
        ({"kind": "poisson", "cohort": 20, "most": 25}, "most=25: 50 cohorts have to be cut down .* raise it"),
    ],
)
def test_a_largest_cohort_that_cannot_be_accounted_for_is_refused(sampling: dict[str, object], said: str) -> None:
    privacy = Privacy.model_validate({"mechanism": "gaussian", "delta": 1e-5, "noise_multiplier": 2.0})
    with pytest.raises(UserError, match=said):
        make_plan(privacy, Sampling.model_validate(sampling), np.full(1000, 1e-3), 2.0, 50, 0)
