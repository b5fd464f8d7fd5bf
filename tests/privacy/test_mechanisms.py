"""Claims about the other mechanisms of a plan: system noise, local noise, correlated noise, and bounds that adapt."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide import build, recipe
from confide.build import make_loop
from confide.errors import UserError
from confide.federated.bounding import Adaptive, Bounding, bounder
from confide.federated.bounds import next_bounds
from confide.federated.parameters import Layout
from confide.privacy import factorisation, ledger
from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.gaussian import Address
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.mechanisms.banded import Banded
from confide.privacy.plan import Plan, Release, make_plan
from confide.privacy.sampling import Sampling
from confide.run import Loop
from confide.runs import checkpoint, folder
from confide.runs.simulation import simulate

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("no_figures_here")

LONG = 100_000
CLOSE = 0.009  # four deviations of the standard deviation of LONG draws
NOBODY = np.array([], dtype=np.int64)
FREE = ("privacy.target_epsilon=null", "privacy.noise_multiplier=1.5", "evaluation.last=1")
BANDED = ("privacy.mechanism=banded", "sampling.kind=cyclic", "sampling.cohort=40")
SYSTEM = (*FREE, "privacy.source=system", "run.steps=4")
ADAPTIVE = "bounding={rule: clip, bound: 10, adaptive: {quantile: 0.5}}"


@pytest.fixture
def no_figures_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.report.page.write_report", lambda *_: None)


def digits(*overrides: str) -> recipe.Recipe:
    return recipe.load("convex/digits", ["run.steps=8", "evaluation.last=1", *overrides])


def loop_of(*overrides: str) -> Loop:
    return make_loop(digits(*overrides))


def plan_of(weights: np.ndarray, cohort: int, kind: str = "poisson", steps: int = 10, **privacy: Any) -> Plan:
    given = {"mechanism": "gaussian", "delta": 1e-5, **privacy}
    if "target_epsilon" not in given:
        given.setdefault("noise_multiplier", 1.5)
    sampling = Sampling.model_validate({"kind": kind, "cohort": cohort})
    return make_plan(Privacy.model_validate(given), sampling, weights, 2.0, steps, 0)


def uniform(population: int) -> np.ndarray:
    return np.full(population, 1 / population)


def noise_of(plan: Plan, cohort: np.ndarray, step: int = 0, memory: dict[str, Tensor] | None = None) -> Tensor:
    total = torch.zeros(LONG, dtype=torch.float64)
    plan.mechanism.release(
        total, Occasion(plan.event, cohort, step, 0, plan.mechanism.start_memory(total) if memory is None else memory)
    )
    return total


# System noise


def test_system_noise_has_the_scale_that_is_accounted_for_and_never_repeats() -> None:
    plan = plan_of(uniform(100), 20, source="system")
    first, second = noise_of(plan, NOBODY), noise_of(plan, NOBODY)
    assert float(first.std()) == pytest.approx(1.5 * 2.0 / 20, rel=CLOSE)
    assert abs(float(first @ second)) / LONG < 6 * (1.5 * 2.0 / 20) ** 2 / math.sqrt(LONG)


def test_system_cohorts_cannot_be_foretold_from_the_recipe() -> None:
    plan = plan_of(uniform(1000), 200, source="system")
    assert len({tuple(plan.cohort(0).tolist()) for _ in range(20)}) == 20
    sizes = [len(plan.cohort(0)) for _ in range(200)]
    assert np.mean(sizes) == pytest.approx(200, abs=5 * math.sqrt(160 / 200))


def test_a_step_of_system_noise_that_is_made_again_is_charged_again(tmp_path: Path) -> None:
    book = Ledger.create(tmp_path / ledger.FILE, {"for_release": True})
    event = plan_of(uniform(100), 20).event
    assert [book.record(0, event, "here", repeatable=False) for _ in range(3)] == [0, 1, 2]
    assert len(Ledger.read(tmp_path / ledger.FILE).charged()) == 3


def test_a_killed_run_of_system_noise_repeats_one_step_at_most_and_pays_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    original, seen = Release.add_noise, []

    def release(self: Release, total: Tensor, *rest: Any) -> Any:
        answer = original(self, total, *rest)
        seen.append(total.clone())
        if len(seen) == 3:
            raise Killed
        return answer

    monkeypatch.setattr(Release, "add_noise", release)
    with pytest.raises(Killed):
        folder.train(digits(*SYSTEM), tmp_path / "run", quiet=True)
    assert checkpoint.load(tmp_path / "run").state.step == 2, "every step is kept, whatever checkpoint_every says"
    summary = folder.resume(tmp_path / "run", quiet=True)
    assert summary["releases"] == 5
    assert summary["for_release"] is True
    assert not torch.equal(seen[2], seen[3]), "the third step again, with other noise"
    plan = loop_of(*SYSTEM).plan
    assert summary["epsilon"] == plan.epsilon(5) > plan.epsilon(4)


def test_seeded_noise_is_marked_as_not_for_release(tmp_path: Path) -> None:
    summary = folder.train(digits("run.steps=2"), tmp_path / "run", quiet=True)
    assert (summary["noise_source"], summary["for_release"]) == ("seeded", False)
    header = json.loads((tmp_path / "run" / ledger.FILE).read_text().splitlines()[0])["run"]
    assert (header["noise_source"], header["for_release"]) == ("seeded", False)


# Local trust


def test_every_local_message_carries_its_own_noise_in_the_aggregate() -> None:
    weights = np.arange(1.0, 11.0) / 55
    plan = plan_of(weights, 5, trust="local", noise_multiplier=0.7)
    cohort = np.array([0, 4, 9])
    expected = 0.7 * 2.0 / 0.5 * math.sqrt(np.square(weights[cohort]).sum())
    assert float(noise_of(plan, cohort).std()) == pytest.approx(expected, rel=CLOSE)
    assert not bool(noise_of(plan, NOBODY).any()), "no message, no noise: nobody has to be protected"


def test_local_noise_is_the_plain_gaussian_for_any_two_data_sets_of_a_user() -> None:
    """A message moves by twice its bound, and the server knows who sent it: no amplification."""
    plan = plan_of(uniform(1000), 10, trust="local", noise_multiplier=8.0)
    plain = plan_of(uniform(10), 10, noise_multiplier=4.0)
    assert plan.epsilon(7) == pytest.approx(plain.epsilon(7), rel=1e-9)
    assert "server" in plan.event.adjacency


def test_a_local_run_is_accounted_for_by_its_ledger(tmp_path: Path) -> None:
    wanted = digits("privacy={mechanism: gaussian, trust: local, noise_multiplier: 4, delta: 1.0e-5}")
    summary = folder.train(wanted, tmp_path / "run", quiet=True)
    gaussian = Event("everyone", 1.0, 1, 1, 2.0, 1.0)
    assert summary["epsilon"] == pytest.approx(epsilon([gaussian] * 8, 1e-5, "pld"), rel=1e-9)


# Noise that is correlated over steps


def test_a_whole_run_of_correlated_noise_is_one_gaussian() -> None:
    plan = plan_of(uniform(100), 10, "cyclic", steps=40, mechanism="banded", bands=8, noise_multiplier=2.0)
    once = epsilon([Event("everyone", 1.0, 1, 1, 2.0, 1.0)], 1e-5, "pld")
    assert plan.charges(40) == 1
    assert plan.epsilon(plan.charges(40)) == pytest.approx(once, rel=1e-9)
    assert "public schedule" in plan.event.adjacency


def test_released_noise_is_what_the_factorisation_says() -> None:
    """C times the released noise is independent from step to step, with z times the sensitivity of the whole run."""
    plan = plan_of(uniform(100), 10, "cyclic", steps=12, mechanism="banded", bands=4, noise_multiplier=2.0)
    total = torch.zeros(LONG, dtype=torch.float64)
    memory = plan.mechanism.start_memory(total)
    released = []
    for step in range(12):
        released.append(noise_of(plan, NOBODY, step, memory))
    assert isinstance(plan.mechanism, Banded)
    c = np.array(plan.mechanism.coefficients)
    expected = 2.0 * factorisation.sensitivity(c, 12, 10) * 2.0 / 10
    fresh = torch.stack([sum(c[j] * released[t - j] for j in range(min(4, t + 1))) for t in range(12)])
    assert fresh.std(dim=1).tolist() == pytest.approx([expected] * 12, rel=CLOSE)
    likeness = torch.corrcoef(fresh).fill_diagonal_(0).abs()
    assert float(likeness.max()) < 6 / math.sqrt(LONG)
    prefix = torch.stack(released).sum(dim=0)
    assert float(prefix.std()) < 0.8 * expected * math.sqrt(12), "far less than independent noise adds up to"


def test_turns_of_a_user_are_as_far_apart_as_the_accounting_says() -> None:
    plan = plan_of(uniform(103), 10, "cyclic", steps=60, mechanism="banded", bands=8)
    turns: dict[int, list[int]] = {}
    for step in range(60):
        for user in plan.cohort(step).tolist():
            turns.setdefault(user, []).append(step)
    assert sorted(turns) == list(range(103)), "everybody takes part"
    assert {b - a for seen in turns.values() for a, b in pairwise(seen)} == {plan.event.separation}
    assert plan.rate == 1 / plan.event.separation


def test_a_banded_run_resumes_with_the_noise_it_would_have_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = digits(*BANDED, "privacy.bands=3", "run.checkpoint_every=2")
    straight = folder.train(wanted, tmp_path / "straight", quiet=True)
    original = Loop.step

    class Killed(BaseException):
        pass

    def step(self: Loop, state: Any) -> Any:
        if state.step == 5:
            raise Killed
        return original(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", step)
        with pytest.raises(Killed):
            folder.train(wanted, tmp_path / "run", quiet=True)
    summary = folder.resume(tmp_path / "run", quiet=True)
    assert summary["epsilon"] == straight["epsilon"] <= 5
    assert (tmp_path / "run" / folder.MODEL).read_bytes() == (tmp_path / "straight" / folder.MODEL).read_bytes()
    monkeypatch.setattr(build, "environment", lambda _: "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", step)
        with pytest.raises(Killed):
            folder.train(wanted, tmp_path / "moved", quiet=True)
    monkeypatch.setattr(build, "environment", lambda _: "elsewhere still")
    again = folder.resume(tmp_path / "moved", quiet=True)
    assert again["epsilon"] > straight["epsilon"], "a step that was made twice stands for two runs"
    assert Counter(e.attempt for e in Ledger.read(tmp_path / "moved" / ledger.FILE).entries) == {0: 8, 1: 1}


def test_a_ledger_with_steps_beyond_the_noise_has_no_guarantee(tmp_path: Path) -> None:
    event = plan_of(uniform(100), 10, "cyclic", steps=5, mechanism="banded", bands=3).event
    book = Ledger.create(tmp_path / ledger.FILE, {})
    for step in range(6):
        book.record(step, event, "here")
    with pytest.raises(UserError, match="not made for"):
        book.charged()


def test_a_banded_run_reaches_its_target() -> None:
    loop, state = simulate(digits(*BANDED, "run.steps=20", "privacy.target_epsilon=4"))
    assert 0.99 * 4 < loop.plan.epsilon(loop.charges) <= 4
    assert state.step == 20


# Bounds that follow a quantile


@given(z=st.floats(0.1, 5), counters=st.integers(1, 300), factor=st.floats(1.01, 100))
def test_update_and_counts_together_are_the_gaussian_that_is_accounted_for(
    z: float, counters: int, factor: float
) -> None:
    """Scaled by their noise, one user moves update and counts together by 1 / z, and no further."""
    count_noise = factor * z * math.sqrt(counters) / 2
    event = Event("poisson", 0.1, 10, 100, z, 1.0, counters=counters, count_noise=count_noise)
    moved_by = math.sqrt(event.update_multiplier**-2 + counters * (0.5 / count_noise) ** 2)
    assert moved_by == pytest.approx(1 / z, rel=1e-9)
    assert event.update_multiplier > z


def test_counters_that_leave_nothing_for_the_update_are_refused() -> None:
    with pytest.raises(UserError, match=r"bounding\.adaptive\.count_noise .* above 0\.75"):
        make_plan(
            Privacy(mechanism="gaussian", noise_multiplier=1.5, delta=1e-5), Sampling(cohort=10), uniform(100), 1.0, 5,
            0, follows="quantile", counters=1, count_noise=0.7,
        )  # fmt: skip


@settings(deadline=None)
@given(
    norms=st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=20),
    per_layer=st.booleans(),
)
def test_no_user_moves_a_count_by_more_than_a_half(norms: list[list[float]], per_layer: bool) -> None:
    layout = Layout(("a", "b", "c"), ((2,), (3,), (4,)))
    rule = bounder(Bounding(rule="per_layer_clip" if per_layer else "clip", bound=7.0), layout)
    votes = rule.votes(torch.tensor(norms, dtype=torch.float64))
    assert votes.shape == (len(norms), 3 if per_layer else 1)
    assert bool((votes.abs() == 0.5).all())


def test_the_bound_finds_the_quantile_of_the_users_norms() -> None:
    """Norms are drawn once; the bound comes from far off and settles at their quantile, in spite of the noise."""
    norms = torch.from_numpy(np.random.default_rng(0).lognormal(1.0, 0.5, (2000, 1)))
    for quantile in (0.2, 0.5, 0.9):
        privacy = Privacy(mechanism="gaussian", noise_multiplier=1.0, delta=1e-5)
        adaptive = Adaptive(quantile=quantile)
        plan = make_plan(privacy, Sampling(cohort=500), uniform(2000), 100.0, 200, 3, follows="quantile", counters=1)
        rule = bounder(Bounding(rule="clip", bound=100.0, adaptive=adaptive), Layout(("w",), ((1,),)))
        bounds = rule.bounds
        for step in range(200):
            votes = rule.at(bounds).votes(norms[plan.cohort(step)]).sum(dim=0)
            shares = plan.noisy_shares(votes, plan.mechanism.event_at(0, float(bounds[0])), step, 0)
            bounds = next_bounds(bounds, shares, adaptive, rule.bounds)
        within = float((norms <= bounds).double().mean())
        assert within == pytest.approx(quantile, abs=0.06)


def test_the_noise_of_the_counts_has_the_scale_that_is_accounted_for() -> None:
    plan = make_plan(
        Privacy(mechanism="gaussian", noise_multiplier=0.01, delta=1e-5), Sampling(cohort=50), uniform(100), 1.0, 5, 0,
        follows="quantile", counters=LONG, count_noise=3.0,
    )  # fmt: skip
    shares = plan.noisy_shares(torch.zeros(LONG, dtype=torch.float64), plan.event, 0, 0)
    assert float(shares.std()) == pytest.approx(3.0 / 50, rel=CLOSE)
    assert float(shares.mean()) == pytest.approx(0.5, abs=5 * 0.06 / math.sqrt(LONG))
    update = torch.zeros(LONG, dtype=torch.float64)
    plan.source.fill(update, Address(0))
    assert abs(float(torch.corrcoef(torch.stack([shares, update]))[0, 1])) < 5 / math.sqrt(LONG), "not the update's"


@pytest.mark.parametrize("rule", ["clip", "per_layer_clip"])
def test_the_noise_follows_the_bound_of_each_step(rule: str, tmp_path: Path) -> None:
    bounding = f"bounding={{rule: {rule}, bound: 50, adaptive: {{quantile: 0.5, learning_rate: 0.5}}}}"
    wanted = digits(bounding, *FREE, "run.checkpoint_every=3")
    folder.train(wanted, tmp_path / "run", quiet=True)
    records = [json.loads(line) for line in (tmp_path / "run" / folder.METRICS).read_text().splitlines()]
    bounds = [r["bound"] for r in records]
    assert bounds[0] == pytest.approx(50)
    assert len(set(bounds)) == 8
    book = Ledger.read(tmp_path / "run" / ledger.FILE)
    cohort = wanted.sampling.cohort
    assert [e.event.sensitivity for e in book.entries] == pytest.approx([b / cohort for b in bounds])
    event = book.entries[0].event
    assert event.counters == (1 if rule == "clip" else 2)
    spread = [r["noise"] / math.sqrt(650) for r in records]
    expected = [event.update_multiplier * b / cohort for b in bounds]
    assert spread == pytest.approx(expected, rel=0.15)
    plain = loop_of(*FREE)
    assert folder.check_ledger(tmp_path / "run")["epsilon"] == pytest.approx(plain.plan.epsilon(8), rel=1e-9)


@pytest.mark.usefixtures("warm_processes")
def test_an_adaptive_run_is_the_same_with_workers_and_after_a_kill(tmp_path: Path) -> None:
    wanted = digits(ADAPTIVE, *FREE, "run.checkpoint_every=3", "run.steps=5")
    folder.train(wanted, tmp_path / "one", quiet=True)
    folder.train(wanted, tmp_path / "two", workers=2, quiet=True)
    loop = make_loop(wanted)
    state = loop.start()
    for _ in range(2):
        loop.step(state)
    checkpoint.save(tmp_path, state, wanted.digest, 2, "x")
    taken_up = checkpoint.load(tmp_path).state
    while taken_up.step < 5:
        loop.step(taken_up)
    models = {(tmp_path / name / folder.MODEL).read_bytes() for name in ("one", "two")}
    assert len(models) == 1
    assert torch.equal(taken_up.parameters, checkpoint.load(tmp_path / "one").state.parameters)


# What is refused


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["privacy.mechanism=banded"], r"sampling\.kind=poisson: privacy\.mechanism=banded needs"),
        (["sampling.kind=cyclic"], r"sampling\.kind=cyclic: independent noise gains nothing"),
        (["privacy.bands=3"], r"privacy\.bands: only used with"),
        ([*BANDED, "privacy.trust=local"], r"privacy\.trust=local: cannot be combined"),
        ([*BANDED, "privacy.target_epsilon=null", "privacy.noise_scale=1"], r"privacy\.noise_scale: not defined"),
        ([*BANDED, ADAPTIVE], r"bounding\.adaptive: banded noise is made for one bound"),
        ([*BANDED, "privacy.trust=distributed"], r"shares of the noise are for mechanism gaussian"),
        (["privacy.trust=distributed", ADAPTIVE], r"bounding\.adaptive: its counts are noised by the server"),
        (["privacy.trust=local", ADAPTIVE], r"bounding\.adaptive: its counts are noised by the server"),
        (["bounding.adaptive={}"], r"bounding\.adaptive: only clip and per_layer_clip"),
        (["bounding={rule: clip, bound: 1, adaptive: {quantile: 2}}"], r"quantile=2: expected a number at least 0"),
        (["privacy.trust=local", "privacy.mechanism=none", "privacy.target_epsilon=null"], r"privacy\.trust: has no"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_combinations_without_accounting_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        recipe.load("convex/digits", overrides)


def test_more_bands_than_the_separation_are_refused() -> None:
    with pytest.raises(UserError, match="bands=8 is more than the separation of 5"):
        plan_of(uniform(100), 20, "cyclic", mechanism="banded", bands=8)
