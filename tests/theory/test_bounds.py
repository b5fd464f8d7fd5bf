"""Claims about the papers' bounds: the special cases that they recover, how they depend on what, and their errata."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from confide.theory import car, norm, pfl_asr
from confide.theory.car import Clients
from confide.theory.norm import Convex
from confide.theory.pfl_asr import Layer, Setting

CALM = hypothesis_settings(deadline=None)  # a property holds on a busy machine as well
positive = st.floats(0.01, 100)
counts = st.integers(1, 2000)
FREE = math.inf

layers = st.lists(
    st.builds(
        Layer,
        st.integers(1, 10_000),
        positive,
        positive,
        positive,
        st.floats(0, 10),
        st.floats(0, 10),
        st.floats(0, 10),
    ),
    min_size=1,
    max_size=5,
)
settings = st.builds(
    Setting, positive, positive, positive, counts, st.integers(1, 50), positive, positive, positive, positive, positive
)


def fifth_term(terms: pfl_asr.Terms) -> float:
    """The fifth term, whole: what is proportional to the sum of M_h^2."""
    return terms.drift + terms.clipping + terms.scaling


# PFL-ASR appendix E.7: bounds that Theorem 2 recovers. The right-hand sides are typed from eqs 54, 57, 60 and 63.


@CALM
@given(setting=settings, given_layers=layers)
def test_corollary_1_is_equation_54(setting: Setting, given_layers: list[Layer]) -> None:
    t, share, h = setting.steps, setting.local_steps / setting.steps, len(given_layers)
    found = pfl_asr.corollary1(setting, given_layers)
    assert found.optimisation == pytest.approx(2 * setting.gap / math.sqrt(t))
    assert found.global_noise == pytest.approx(16 * h * share * setting.global_variance)
    assert found.local_noise == pytest.approx(32 * h * share * setting.local_variance)
    fifth = [
        x.gradient**2 * (16 * setting.smoothness**2 * share + 1 / x.bound**2 + 4 * x.scaling**2) for x in given_layers
    ]
    assert fifth_term(found) == pytest.approx(2 * share * sum(fifth))
    sixth = [x.trust**2 * x.gradient**2 / x.bound**2 * (x.intra + x.inter) for x in given_layers]
    assert found.clipping_spread == pytest.approx(4 / setting.xi**2 * share * sum(sixth))
    whole = sum(x.bound**2 for x in given_layers)
    noise = sum(x.trust**2 * x.dimension for x in given_layers)
    assert found.privacy_noise == pytest.approx(whole * setting.noise**2 / setting.xi**2 * noise)


def recovered(steps: int, local_steps: int, power: float) -> tuple[pfl_asr.Terms, list[Layer]]:
    setting = Setting(
        gap=3, central_rate=steps**-0.5, local_rate=steps**-power / local_steps, steps=steps, local_steps=local_steps,
        smoothness=5, global_variance=0.7, local_variance=0.2,
    )  # fmt: skip
    open_layers = [Layer(10, 2.0, FREE, scaling=0.3, intra=1, inter=1), Layer(20, 3.0, FREE, scaling=0.1)]
    return pfl_asr.theorem2(setting, open_layers), open_layers


@pytest.mark.parametrize("steps", [4, 100, 2000])
@pytest.mark.parametrize("local_steps", [1, 10])
def test_federated_averaging_is_recovered(steps: int, local_steps: int) -> None:
    """Eq. 57: no noise, no clipping, eta_loc = 1 / (T_loc sqrt(T))."""
    found, open_layers = recovered(steps, local_steps, 0.5)
    fifth = sum(x.gradient**2 * (16 * 25 / steps + 4 * x.scaling**2) for x in open_layers)
    wanted = 6 / math.sqrt(steps) + 32 * 0.7 / steps + 64 * 0.2 / steps + 2 / steps * fifth
    assert found.total == pytest.approx(wanted)
    assert found.privacy_noise == found.clipping == found.clipping_spread == 0


@pytest.mark.parametrize("steps", [4, 100, 2000])
@pytest.mark.parametrize("local_steps", [1, 10])
def test_adaptive_federated_optimisation_is_recovered(steps: int, local_steps: int) -> None:
    """Eq. 60: the same with eta_loc = 1 / (T_loc T^(3/4)); the variances fall as T^(-3/2)."""
    found, open_layers = recovered(steps, local_steps, 0.75)
    rate = steps**-1.5
    fifth = sum(x.gradient**2 * (16 * 25 * rate + 4 * x.scaling**2) for x in open_layers)
    wanted = 6 / math.sqrt(steps) + 32 * 0.7 * rate + 64 * 0.2 * rate + 2 * rate * fifth
    assert found.total == pytest.approx(wanted)


@pytest.mark.parametrize("users", [10, 1000])
def test_clipping_in_private_sgd_is_recovered(users: int) -> None:
    """Eq. 63: R_h = 1, C_h = C / sqrt(H), noise for (epsilon, delta)."""
    steps, bound, epsilon, delta, xi = 400, 0.5, 2.0, 1e-6, 0.1
    noise = pfl_asr.noise_for(epsilon, delta, steps, 1 / users)
    setting = Setting(
        gap=3, central_rate=steps**-0.5, local_rate=steps**-0.5 / 10, steps=steps, local_steps=10, smoothness=5,
        global_variance=0.7, local_variance=0.2, noise=noise, xi=xi,
    )  # fmt: skip
    sizes, gradients, spreads = [10, 20, 30], [2.0, 3.0, 4.0], [0.1, 0.2, 0.3]
    own = bound / math.sqrt(3)
    made = [Layer(d, m, own, 1.0, 0.2, s, s) for d, m, s in zip(sizes, gradients, spreads, strict=True)]
    found = pfl_asr.theorem2(setting, made)
    privacy = 60 * bound**2 * steps * math.log(1 / delta) / (users**2 * xi**2 * epsilon**2)
    assert found.privacy_noise == pytest.approx(privacy)
    fifth = 2 / steps * sum(m**2 * (16 * 25 / steps + 3 / bound**2 + 4 * 0.04) for m in gradients)
    assert fifth_term(found) == pytest.approx(fifth)
    sixth = 4 / (xi**2 * steps) * sum(3 * m**2 / bound**2 * 2 * s for m, s in zip(gradients, spreads, strict=True))
    assert found.clipping_spread == pytest.approx(sixth)
    assert found.total == pytest.approx(
        6 / math.sqrt(steps) + 48 * 0.7 / steps + 96 * 0.2 / steps + privacy + fifth + sixth
    )


@CALM
@given(setting=settings, given_layers=layers)
def test_theorem_3_with_everybody_is_theorem_2_with_its_own_constants(
    setting: Setting, given_layers: list[Layer]
) -> None:
    """E.8 has five differences in place of four, so 5/4 of most terms; nothing is sampled."""
    everybody, all_in = pfl_asr.theorem3(setting, given_layers, 1.0), pfl_asr.theorem2(setting, given_layers)
    assert everybody.sampling == 0
    for name in ("global_noise", "local_noise", "drift", "clipping", "clipping_spread"):
        assert getattr(everybody, name) == pytest.approx(1.25 * getattr(all_in, name))
    assert everybody.optimisation == all_in.optimisation
    assert everybody.privacy_noise == all_in.privacy_noise
    corrected = pfl_asr.theorem3(setting, given_layers, 1.0, corrected=True)
    assert corrected.scaling == pytest.approx(1.25 * all_in.scaling)


# How the bound depends on what


@CALM
@given(setting=settings, given_layers=layers, more=st.floats(1.01, 10), rate=st.floats(0.01, 0.99))
def test_the_bound_grows_with_noise_and_variance_and_falls_with_steps_and_cohort(
    setting: Setting, given_layers: list[Layer], more: float, rate: float
) -> None:
    before = pfl_asr.theorem3(setting, given_layers, rate)
    for cause, term in (
        ("noise", "privacy_noise"),
        ("global_variance", "global_noise"),
        ("local_variance", "local_noise"),
        ("gap", "optimisation"),
        ("smoothness", "drift"),
    ):
        worse = pfl_asr.theorem3(replace(setting, **{cause: getattr(setting, cause) * more}), given_layers, rate)
        assert getattr(worse, term) > getattr(before, term)
        assert worse.total >= before.total
    longer = pfl_asr.theorem3(replace(setting, steps=2 * setting.steps), given_layers, rate)
    assert longer.optimisation == pytest.approx(before.optimisation / 2)
    assert longer.total <= before.total
    larger = pfl_asr.theorem3(setting, given_layers, min(1.0, rate * more))
    assert (larger.sampling, larger.clipping) < (before.sampling, before.clipping)
    assert larger.total <= before.total
    wider = pfl_asr.theorem3(replace(setting, local_steps=setting.local_steps + 1), given_layers, rate)
    assert (wider.drift, wider.global_noise) > (before.drift, before.global_noise)


@CALM
@given(setting=settings, given_layers=layers, more=st.floats(1.01, 10))
def test_a_larger_bound_trades_clipping_for_noise(setting: Setting, given_layers: list[Layer], more: float) -> None:
    before = pfl_asr.theorem2(setting, given_layers)
    after = pfl_asr.theorem2(setting, [replace(x, bound=x.bound * more) for x in given_layers])
    assert after.clipping < before.clipping
    assert after.clipping_spread <= before.clipping_spread
    assert after.privacy_noise == pytest.approx(more**2 * before.privacy_noise)


@CALM
@given(setting=settings, given_layers=layers, scale=st.floats(0.1, 10))
def test_only_the_corrected_clipping_term_scales_with_the_loss(
    setting: Setting, given_layers: list[Layer], scale: float
) -> None:
    """A loss in other units has gradients and bounds in these units too; so every term has their square."""
    other = [replace(x, gradient=x.gradient * scale, bound=x.bound * scale) for x in given_layers]
    for corrected, power in ((True, 2), (False, 0)):
        before = pfl_asr.theorem2(setting, given_layers, corrected)
        after = pfl_asr.theorem2(setting, other, corrected)
        assert after.clipping == pytest.approx(scale**power * before.clipping)
        assert after.drift == pytest.approx(scale**2 * before.drift)


def test_the_theorem_is_silent_where_kappa_is_not_positive() -> None:
    layer = [Layer(10, 1.0, 1.0)]
    near = Setting(gap=1, central_rate=0.1, local_rate=0.1, steps=100, local_steps=10, smoothness=1)
    assert pfl_asr.theorem2(near, layer).kappa == pytest.approx(1)
    assert pfl_asr.theorem2(near, layer).bound == pytest.approx(pfl_asr.theorem2(near, layer).total)
    assert pfl_asr.theorem2(replace(near, local_rate=0.06), layer).bound == FREE
    # The rates of Corollary 1 are of this kind in every long run.
    assert pfl_asr.corollary1(replace(near, steps=2000), layer).bound == FREE
    assert pfl_asr.corollary1(replace(near, steps=20, local_steps=10), layer).bound < FREE


def test_a_rate_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate=1\.5"):
        pfl_asr.theorem3(Setting(1, 1, 1, 1, 1, 1), [Layer(1, 1, 1)], 1.5)


# NORM

problems = st.builds(Convex, st.floats(0.001, 0.4), positive, positive, st.integers(1, 20), positive)
users = st.lists(st.tuples(positive, st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8)


def test_rho_is_equation_3() -> None:
    assert norm.rho(200, 1e-6, 100, 5.0) == pytest.approx(math.sqrt(200 * math.log(1e6)) / 500)


@CALM
@given(d=counts, n=counts, epsilon=positive, rounds=counts, constant=positive, bound=positive)
def test_rho_of_the_noise_of_theorem_1_is_rho(
    d: int, n: int, epsilon: float, rounds: int, constant: float, bound: float
) -> None:
    sigma = math.sqrt(constant * rounds * bound**2 * math.log(1e5)) / (n * epsilon)  # eq. 5
    assert norm.rho_of_noise(sigma / bound, d, rounds) == pytest.approx(norm.rho(d, 1e-5, n, epsilon, constant))


@CALM
@given(problem=problems, given_users=users)
def test_initialisation_is_least_at_the_default_balance_and_common_to_all(
    problem: Convex, given_users: list[tuple[float, float, float]]
) -> None:
    norms, gaps = [u[0] for u in given_users], [u[1] for u in given_users]
    assert problem.initialisation == pytest.approx(2 * problem.bound * problem.distance * problem.rho)
    for factor in (0.5, 2):
        assert replace(problem, gamma=problem.balance * factor).initialisation > problem.initialisation
    both = norm.theorem2(problem, norms, gaps), norm.theorem4(problem, norms, gaps)
    assert both[0].initialisation == both[1].initialisation
    assert 2 * norm.theorem3(problem, gaps).initialisation == pytest.approx(problem.initialisation)
    assert norm.theorem2(problem, norms, gaps).heterogeneity <= 1.5 * norm.theorem3(problem, gaps).heterogeneity * 1.001


@CALM
@given(problem=problems, given_users=users)
def test_normalising_moves_at_least_as_far_as_clipping(
    problem: Convex, given_users: list[tuple[float, float, float]]
) -> None:
    """Section 5.1: the left side of eq. 16 is the larger, for users above the optimum."""
    problem = replace(problem, alpha=max(1.0, 2 * problem.rho * problem.local_steps))
    norms, excess = [u[0] for u in given_users], [u[2] for u in given_users]
    assert norm.normalised_progress(problem, norms, excess) >= norm.clipped_progress(problem, norms, excess) * (
        1 - 1e-9
    )


def test_the_numbers_of_equations_6_and_14() -> None:
    problem = Convex(rho=0.1, smoothness=2, bound=8, local_steps=4, distance=3, gamma=5, alpha=1.5)
    norms, gaps = [10.0, 40.0], [1.0, 2.0]  # 40 is beyond C^ E = 32
    found = norm.theorem2(problem, norms, gaps)
    assert found.initialisation == pytest.approx(8 * (2 * 9 / 5 + 5 / 2) * 0.1)
    assert found.heterogeneity == pytest.approx(12 / 3 * 0.5 * 0.1)
    own = 64 / (2 * 1.5 * 2) + 3.2 * 1.0 * 0.1 * 4 / 2.25
    assert norm.theorem4(problem, norms, gaps).heterogeneity == pytest.approx(own * 4 / 2 * 0.1)
    share = 0.1 * 4 / 1.5
    beyond = 3 * 8 * 40 / (8 * 2 * 4)
    assert norm.clipped_progress(problem, norms, [6, 7]) == pytest.approx(((2 - share - share**2) * 6 + beyond) / 2)
    assert norm.normalised_progress(problem, norms, [6, 7]) == pytest.approx(((2 - share**2) * 3.2 * 6 + beyond) / 2)
    assert problem.learning_rate == pytest.approx(0.1 / 6)
    assert problem.rounds == pytest.approx(2 * 1.5 * 5 / (8 * 4 * 0.01))
    assert problem.unmet(gaps) == []
    assert norm.simplified_progress(problem, [1.0, 2.0], [100.0, 0.5]) == pytest.approx((4 + 0.5) / 2)


def test_conditions_that_do_not_hold_are_named() -> None:
    bad = Convex(rho=0.4, smoothness=2, bound=1, local_steps=4, distance=3, alpha=0.5).unmet([1.0])
    assert [line.split("=")[0] for line in bad] == ["alpha", "C/E", "E"]


@CALM
@given(
    rho=st.floats(0.01, 0.25), lipschitz=positive, distance=positive, gap=st.floats(0, 10), ratio=st.floats(0.01, 1),
    data=st.data(),
)  # fmt: skip
def test_equation_11_is_equation_8_with_the_bound_of_proposition_1(
    rho: float, lipschitz: float, distance: float, gap: float, ratio: float, data: st.DataObject
) -> None:
    """It is a little larger, by what does not depend on E, so the best E is the same."""
    smoothness = 2.0
    most = math.floor(1 / (2 * rho))
    differences = []
    for steps in {1, most, data.draw(st.integers(1, most))}:
        bound = norm.unclipped_bound(lipschitz, steps, rho, ratio * smoothness, smoothness)
        assert bound <= lipschitz
        exact = norm.lipschitz(Convex(rho, smoothness, bound, steps, distance), [gap])
        loose = norm.local_steps_bound(steps, lipschitz, distance, rho, ratio * smoothness, smoothness, gap)
        assert loose >= exact * (1 - 1e-9)
        differences.append(loose - exact)
    assert differences == pytest.approx([differences[0]] * len(differences), rel=1e-6, abs=1e-9)
    best = norm.best_local_steps(lipschitz, distance, rho, ratio * smoothness, smoothness, gap)
    tried = {
        e: norm.local_steps_bound(e, lipschitz, distance, rho, ratio * smoothness, smoothness, gap)
        for e in (1, best, most)
    }
    assert tried[best] == min(tried.values())


def test_proposition_1_refuses_more_local_steps_than_it_covers() -> None:
    with pytest.raises(ValueError, match="local_steps=6"):
        norm.unclipped_bound(1.0, 6, 0.1, 1.0, 1.0)


# CAR

clients = st.builds(Clients, positive, counts, st.floats(1e-4, 0.1), positive, positive, positive, positive)


def test_the_numbers_of_equations_14_and_59() -> None:
    base = Clients(gap=2, steps=9, learning_rate=0.1, smoothness=3, gradient=4, within=0.5, between=0.25, growth=1)
    found = car.theorem_5_5(base, bound=0.2, noise=0.7)
    omega = min(0.05 * 0.5, 0.1 * 0.5)
    assert found.optimisation == pytest.approx(2 / (omega * 10))
    assert found.privacy == pytest.approx(3 * 0.04 * 1.49 / (2 * omega))
    assert found.variance == pytest.approx(3 * 3 * 0.75 * 0.01 / (2 * omega))
    assert found.largest_rate == pytest.approx(min(math.sqrt(0.4 / (18 * 4 * 2)), 2 / 36))
    assert not found.holds
    moving = car.theorem_c5(base, start=0.2, noise=0.7, rate=0.05, quantile=0.9, share_clipped=0.1, count=3)
    kept = 0.9**3
    brackets = 0.04 / ((1 - 0.95**2) * 1.0) + 2 * 0.9 * 4 * 0.2 / 0.5 + 0.81 * 16 * 0.1
    assert moving.optimisation == pytest.approx(2 / (kept * 0.5 * 1.0))
    assert moving.privacy == pytest.approx(3 / (kept) * (1 + 0.49 * 0.9025) * brackets)
    spread = 1 + 2 * 0.49 * 0.0025 * 0.81
    assert moving.variance == pytest.approx(9 / kept * 0.75 * 0.1 * spread)
    assert moving.largest_rate == pytest.approx(2 * kept / (36 * spread))
    twice = car.theorem_c5(base, 0.2, 0.7, 0.05, 0.9, 0.1, 3, corrected=True)
    assert twice.privacy == pytest.approx(3 / kept * (1 + 2 * 0.49 * 0.9025) * brackets)


@CALM
@given(base=clients, bound=positive, noise=positive, more=st.floats(1.01, 10))
def test_car_bounds_grow_with_noise_and_dimension_and_fall_to_a_floor(
    base: Clients, bound: float, noise: float, more: float
) -> None:
    fixed = car.theorem_5_5(base, bound, noise)
    assert car.theorem_5_5(base, bound, noise * more).total > fixed.total
    assert car.theorem_5_5(replace(base, dimension=2), bound, noise).privacy > fixed.privacy
    longer = car.theorem_5_5(replace(base, steps=base.steps * 10), bound, noise)
    assert longer.optimisation < fixed.optimisation
    assert longer.privacy == fixed.privacy
    moving = car.theorem_c5(base, bound, noise, 0.05, 0.9, 0.1, 3)
    assert car.theorem_c5(base, bound, noise * more, 0.05, 0.9, 0.1, 3).total > moving.total
    assert car.theorem_c5(base, bound, noise, 0.05, 0.9, 0.2, 3).total > moving.total


def test_without_clipping_theorem_5_5_is_that_of_plain_federated_averaging() -> None:
    """Its discussion: C above alpha B is never reached, and omega is alpha's alone."""
    base = Clients(gap=2, steps=99, learning_rate=0.01, smoothness=1, gradient=4)
    for bound in (0.04, 1.0, 100.0):
        assert car.theorem_5_5(base, bound, 0.0).optimisation == pytest.approx(2 / (0.005 * 100))


def test_the_adaptive_gap_vanishes_with_the_rate_and_the_fixed_one_does_not() -> None:
    """After eq. 63: rate proportional to 1/sqrt(T) closes the gap of C.5; Theorem 5.5 needs a smaller C too."""

    def both(steps: int) -> tuple[float, float]:
        base = Clients(gap=1, steps=steps, learning_rate=steps**-0.5, smoothness=1, gradient=1, within=1, between=1)
        return car.theorem_c5(base, 1, 1, 0.05, 0.9, 0.1, 3).total, car.theorem_5_5(base, 0.1, 1).total

    short, long = both(10**4), both(10**8)
    assert long[0] < short[0] / 30
    assert long[1] > short[1]


FREE_ROUNDS = Convex(rho=0.02, smoothness=2.0, bound=12.0, local_steps=10, distance=3.0, alpha=1.5)


def test_norms_theorems_5_and_6_are_theorems_2_and_4_at_their_number_of_rounds() -> None:
    norms, gaps = [5.0, 60.0, 119.0, 130.0], [0.5, 1.0, 2.0, 4.0]
    share = FREE_ROUNDS.rho * FREE_ROUNDS.local_steps / FREE_ROUNDS.alpha
    free, fixed = norm.theorem5(FREE_ROUNDS, FREE_ROUNDS.rounds, norms, gaps), norm.theorem2(FREE_ROUNDS, norms, gaps)
    assert free.heterogeneity == pytest.approx(fixed.heterogeneity * (1 + share) / 1.5)  # 1 + share is at most 3/2
    free, fixed = norm.theorem6(FREE_ROUNDS, FREE_ROUNDS.rounds, norms, gaps), norm.theorem4(FREE_ROUNDS, norms, gaps)
    assert free.heterogeneity == pytest.approx(fixed.heterogeneity)
    assert free.initialisation == fixed.initialisation


def test_the_effect_of_heterogeneity_vanishes_with_more_rounds_and_too_few_are_refused() -> None:
    norms, gaps = [5.0, 60.0], [0.5, 1.0]
    for theorem in (norm.theorem5, norm.theorem6):
        found = [theorem(FREE_ROUNDS, FREE_ROUNDS.rounds * more, norms, gaps).heterogeneity for more in (1, 10, 1000)]
        assert found[2] < found[1] < found[0]
        assert found[2] < 0.01 * found[0]
        with pytest.raises(ValueError, match="expected more than"):
            theorem(FREE_ROUNDS, 1e-3, norms, gaps)


@CALM
@given(st.floats(4, 20), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_eq_17_has_the_papers_form_and_is_above_the_term_of_clipping(factor: float, gaps: list[float]) -> None:
    norms = [1.0] * len(gaps)
    found = norm.heterogeneity_at(FREE_ROUNDS, factor, norms, gaps)
    rho, alpha, steps = FREE_ROUNDS.rho, FREE_ROUNDS.alpha, FREE_ROUNDS.local_steps
    bound = factor * math.sqrt(FREE_ROUNDS.smoothness * max(gaps))
    first = factor**2 * steps / (2 * alpha) * max(gaps)
    second = [bound * steps * gap * rho * steps**2 / alpha**2 if bound * steps >= 1 else 0.0 for gap in gaps]
    assert found == pytest.approx((first * (bound * steps >= 1) + sum(second) / len(gaps)) * rho)
    if bound * steps >= 1:
        assert found > 3 * steps / (2 * alpha) * sum(gaps) / len(gaps) * rho
