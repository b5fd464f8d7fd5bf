"""Claims about who takes part: Poisson cohorts are independent coin flips, fixed ones are uniform subsets.

The accountant believes both. Seeds are fixed, so nothing can fail by chance, and every check is also put to a sampler
that is wrong.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from confide.privacy import factorisation, sampling
from confide.privacy.gaussian import keystream
from confide.privacy.sampling import Kind, Sampling, draw_cohort, sampler_of

# A property holds on a busy machine as well.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Taken = NDArray[np.float64]  # (steps, users) 1 where the user took part

USERS, COHORT, STEPS = 100, 20, 5_000
RATE = COHORT / USERS


def taken(sampler: Kind, cohort: int = COHORT, seed: int = 0) -> Taken:
    table = np.zeros((STEPS, USERS))
    for step in range(STEPS):
        table[step, draw_cohort(sampler, cohort, USERS, seed, step)] = 1
    return table


@pytest.fixture(scope="module")
def poisson() -> Taken:
    return taken("poisson")


@pytest.fixture(scope="module")
def fixed() -> Taken:
    return taken("fixed")


def sizes_are_binomial(table: Taken) -> bool:
    """Chi-square of the sizes of the cohorts against Binomial(users, rate), the tails put together."""
    sizes = table.sum(axis=1)
    low, high = (int(stats.binom.ppf(p, USERS, RATE)) for p in (0.005, 0.995))
    seen = np.array([np.sum(np.clip(sizes, low, high) == size) for size in range(low, high + 1)])
    expected = stats.binom.pmf(np.arange(low, high + 1), USERS, RATE)
    expected[0], expected[-1] = stats.binom.cdf(low, USERS, RATE), stats.binom.sf(high - 1, USERS, RATE)
    return float(stats.chisquare(seen, expected * STEPS).pvalue) > 1e-3


def rate_is(table: Taken, rate: float) -> bool:
    """The share of all flips that came up. Of half a million it sees a rate that is off by 1.2 %."""
    return abs(float(table.mean()) - rate) < 4 * math.sqrt(rate * (1 - rate) / table.size)


def users_are_alike(table: Taken, rate: float = RATE) -> bool:
    """How often each user took part: nobody stands out, and all together spread no more than chance does."""
    excess = (table.sum(axis=0) - STEPS * rate) / math.sqrt(STEPS * rate * (1 - rate))
    return bool(np.abs(excess).max() < 4.5) and float(stats.chi2.sf(float(np.square(excess).sum()), USERS)) > 1e-3


def likeness(one: Taken, other: Taken) -> Taken:
    """Correlations of all columns with all columns, in standard deviations."""
    scaled = [(t - t.mean(axis=0)) / t.std(axis=0) for t in (one, other)]
    return np.asarray(scaled[0].T @ scaled[1] / math.sqrt(len(one)))


def pairs_are_independent(table: Taken) -> bool:
    """All 4,950 pairs of users: none stands out, and together they spread and centre as chance does."""
    found = likeness(table, table)[np.triu_indices(USERS, k=1)]
    spread = abs(float(np.square(found).mean()) - 1) < 4 * math.sqrt(2 / len(found))
    centred = abs(float(found.mean())) < 4 / math.sqrt(len(found))
    return bool(np.abs(found).max() < 5) and spread and centred


def steps_are_independent(table: Taken) -> bool:
    found = likeness(table[:-1], table[1:])
    return bool(np.abs(found).max() < 5.5) and abs(float(np.square(found).mean()) - 1) < 4 * math.sqrt(2 / found.size)


# Poisson


def test_poisson_cohorts_have_the_size_of_independent_flips(poisson: Taken) -> None:
    sizes = poisson.sum(axis=1)
    variance = USERS * RATE * (1 - RATE)
    assert float(sizes.mean()) == pytest.approx(COHORT, abs=4 * math.sqrt(variance / STEPS))
    assert float(sizes.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / STEPS))
    assert sizes_are_binomial(poisson)


def test_fixed_size_is_not_taken_for_poisson(fixed: Taken) -> None:
    assert not sizes_are_binomial(fixed)
    assert float(fixed.sum(axis=1).var()) == 0.0
    assert not pairs_are_independent(fixed), "in a cohort of fixed size, users crowd one another out"


def test_sizes_of_another_rate_are_told_apart() -> None:
    assert not sizes_are_binomial(taken("poisson", COHORT + 1))


def test_poisson_takes_every_user_at_the_rate(poisson: Taken) -> None:
    assert rate_is(poisson, RATE)
    assert users_are_alike(poisson)
    assert not rate_is(poisson, 1.02 * RATE)
    assert not rate_is(poisson, 0.98 * RATE)


def test_a_user_who_is_favoured_would_be_seen(poisson: Taken) -> None:
    favoured = poisson.copy()
    favoured[: STEPS // 20, 7] = 1
    assert not users_are_alike(favoured)


def test_poisson_users_are_independent_of_one_another(poisson: Taken) -> None:
    assert pairs_are_independent(poisson)


def test_two_users_who_come_together_would_be_seen(poisson: Taken) -> None:
    paired = poisson.copy()
    paired[: STEPS // 10, 40] = paired[: STEPS // 10, 41]
    assert not pairs_are_independent(paired)


def test_poisson_steps_are_independent_of_one_another(poisson: Taken) -> None:
    assert steps_are_independent(poisson)
    lingering = poisson.copy()
    lingering[1::10] = lingering[0::10]
    assert not steps_are_independent(lingering)


def test_poisson_cohorts_have_no_largest_size() -> None:
    """Even everybody can be drawn: one cohort in 64 here."""
    sizes = [len(draw_cohort("poisson", 3, 6, 0, step)) for step in range(2000)]
    assert 2000 / 64 - 28 < sizes.count(6) < 2000 / 64 + 28


def test_poisson_cohorts_may_be_empty() -> None:
    sizes = [len(draw_cohort("poisson", 1, 50, 0, step)) for step in range(2000)]
    assert sizes.count(0) / 2000 == pytest.approx(0.98**50, abs=0.05)


@pytest.mark.parametrize("cohort", [1, 99])
def test_extreme_rates_are_kept(cohort: int) -> None:
    table = taken("poisson", cohort, seed=3)
    assert rate_is(table, cohort / USERS)
    assert not rate_is(table, 0.9 * cohort / USERS)


# Fixed size


def test_fixed_cohorts_have_exactly_their_size(fixed: Taken) -> None:
    assert np.all(fixed.sum(axis=1) == COHORT), "a user who came twice would be missing here"


@CALM
@given(population=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 2**62), step=st.integers(0, 10**6))
def test_cohorts_are_distinct_users_in_rising_order(population: int, share: float, seed: int, step: int) -> None:
    cohort = max(1, round(share * population))
    for sampler in (sampler_of(Sampling(kind="fixed", cohort=cohort), population), "poisson"):
        users = draw_cohort(sampler, cohort, population, seed, step)
        assert np.all(np.diff(users) > 0)
        assert len(users) == 0 or (users[0] >= 0 and users[-1] < population)
        assert sampler == "poisson" or len(users) == cohort


def test_fixed_cohorts_take_every_user_alike(fixed: Taken) -> None:
    assert users_are_alike(fixed)
    favoured = fixed.copy()
    favoured[: STEPS // 20, 7] = 1
    assert not users_are_alike(favoured)


def test_fixed_cohorts_take_every_pair_alike(fixed: Taken) -> None:
    """Both of a pair are in S (S - 1) of K (K - 1) cohorts."""
    together = (fixed.T @ fixed)[np.triu_indices(USERS, k=1)]
    chance = COHORT * (COHORT - 1) / (USERS * (USERS - 1))
    deviations = (together - STEPS * chance) / math.sqrt(STEPS * chance * (1 - chance))
    assert np.abs(deviations).max() < 5
    assert float(np.square(deviations).mean()) == pytest.approx(1, abs=0.1)
    assert abs(STEPS * RATE**2 - STEPS * chance) / math.sqrt(STEPS * chance / len(together)) > 5, "not RATE squared"


def test_fixed_steps_are_independent_of_one_another(fixed: Taken) -> None:
    assert steps_are_independent(fixed)


# Addresses


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_the_same_seed_and_step_repeat_and_others_differ(sampler: Kind) -> None:
    def cohort(seed: int, step: int) -> tuple[int, ...]:
        return tuple(draw_cohort(sampler, COHORT, USERS, seed, step).tolist())

    addresses = [(seed, step) for seed in (0, 1, 2**62) for step in (0, 1, 2, 1000)]
    drawn = {address: cohort(*address) for address in addresses}
    assert len(set(drawn.values())) == len(addresses)
    assert {address: cohort(*address) for address in reversed(addresses)} == drawn


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_another_seed_is_as_good(sampler: Kind) -> None:
    table = taken(sampler, seed=12)
    assert rate_is(table, RATE)
    assert users_are_alike(table)
    assert steps_are_independent(table)
    assert pairs_are_independent(table) == (sampler == "poisson")


def test_two_seeds_draw_independent_cohorts(poisson: Taken) -> None:
    found = likeness(poisson, taken("poisson", seed=1))
    assert np.abs(found).max() < 5.5


# For a release

SECRET: list[tuple[Kind, dict[str, int]]] = [
    ("poisson", {}), ("fixed", {}), ("poisson", {"most": COHORT - 5}), ("cyclic_poisson", {"groups": 2, "most": 15}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), SECRET)
def test_a_cohort_for_release_follows_from_a_keystream_of_the_system_alone(
    kind: Kind, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the system's keys held still the cohort stands still, and it is what AES gives; Philox draws none."""
    keys: list[bytes] = []

    def urandom(size: int) -> bytes:
        keys.append(hashlib.blake2b(b"%d" % len(keys), digest_size=size).digest())
        return keys[-1]

    def draw(step: int) -> list[int]:
        keys.clear()
        users: list[int] = draw_cohort(kind, COHORT, USERS, None, step, **more).tolist()
        return users

    monkeypatch.setattr("confide.privacy.sampling.os.urandom", urandom)
    monkeypatch.setattr(sampling, "generator", Mock(side_effect=AssertionError("a release draws by AES alone")))
    found, groups = draw(4), more.get("groups", 1)
    assert draw(4) == found
    assert kind == "cyclic_poisson" or draw(5) == found, "nothing but the keys, not even the step"
    assert [len(key) for key in keys] == [16] * (2 if "most" in more else 1)
    members = np.arange(USERS) if groups == 1 else factorisation.group_of(USERS, groups, 0, 4)
    if kind != "fixed":
        coins = np.frombuffer(keystream(keys[0], 0).update(bytes(4 * len(members))), dtype="<u4")
        members = members[coins / 2**32 < groups * RATE]
    if kind == "fixed" or len(members) > more.get("most", USERS):
        tickets = np.frombuffer(keystream(keys[-1], 0).update(bytes(8 * len(members))), dtype="<u8")
        members = members[np.argsort(tickets)[: more.get("most", COHORT)]]
    assert found == sorted(members.tolist())


@pytest.mark.parametrize(("kind", "more"), SECRET)
def test_cohorts_for_release_take_all_users_alike(
    kind: Kind, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of the system are counted up, so that nothing fails by chance."""
    count = iter(range(2**20))
    monkeypatch.setattr(
        "confide.privacy.sampling.os.urandom",
        lambda size: hashlib.blake2b(b"%d" % next(count), digest_size=size).digest(),
    )
    table = np.zeros((STEPS, USERS))
    for step in range(STEPS):
        table[step, draw_cohort(kind, COHORT, USERS, None, step, **more)] = 1
    assert users_are_alike(table, float(table.mean()))  # a cut draw has a lower rate
    assert table.sum(axis=1).max() <= more.get("most", USERS)
    if kind == "fixed":
        assert set(table.sum(axis=1)) == {COHORT}


# Full participation


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_cohort_of_everyone_is_everyone(kind: str) -> None:
    sampler = sampler_of(Sampling.model_validate({"kind": kind, "cohort": USERS}), USERS)
    assert sampler == "everyone"
    assert np.array_equal(draw_cohort(sampler, USERS, USERS, 0, 5), np.arange(USERS))


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_one_user_less_than_everyone_is_sampling(kind: str) -> None:
    assert sampler_of(Sampling.model_validate({"kind": kind, "cohort": USERS - 1}), USERS) == kind


def test_a_cohort_of_ten_million_users_is_drawn_in_a_few_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bernoulli for every user, not a count and then a choice; `benchmarks/scale.py` measures the time."""
    blocks: list[int] = []

    class Counted:
        def __init__(self, *given: Any) -> None:
            self.stream = keystream(*given)

        def update_into(self, zeros: bytes, bits: Any) -> None:
            blocks.append(len(zeros) // 4)
            self.stream.update_into(zeros, bits)

    monkeypatch.setattr(sampling, "keystream", Counted)
    users = draw_cohort("poisson", 10_000, 10_000_000, 0, 0)
    assert abs(len(users) - 10_000) < 6 * math.sqrt(10_000)
    assert len(blocks) <= 50
    assert 10_000_000 <= sum(blocks) <= 11_000_000
