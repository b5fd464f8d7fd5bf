"""Noise that clients add: local noise is its own guarantee, shares never add up to less than the ledger says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.build import make_task, make_trainer
from confide.deploy.client import OwnData, TrainingClient
from confide.deploy.parcels import Parcel
from confide.deploy.remote import JOIN, TRAIN, Terms
from confide.engines.engine import Abandoned, InProcess
from confide.privacy.budget import Budget
from confide.privacy.gaussian import grid
from confide.privacy.mechanisms import Occasion
from confide.privacy.trust.secure import CONFIRM, KEYS, MASKED, SHARES, UNMASK
from confide.recipe import load
from confide.runs import checkpoint
from confide.runs.simulation import simulate
from support.rehearsal import engine, lenient, loop_over, run_over

WIDE = ["task={kind: convex/quadratics, users: 8, dimension: 600, rank: 2}", "sampling={kind: fixed, cohort: 8}",
        "privacy.accountant=rdp", "privacy.noise_multiplier=2"]  # fmt: skip


@pytest.mark.parametrize("trust", ["local", "distributed"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_clients_own_ledger_says_whether_the_starting_model_is_covered(
    trust: str, elsewhere: bool, tiny: str, tmp_path: Path
) -> None:
    wanted = load(tiny, [f"privacy.trust={trust}"])
    own = make_task(wanted.task, wanted.run.seed)
    if elsewhere:
        own.starting_parameters = own.initial_parameters  # type: ignore[method-assign]
    named: Any = OwnData(own, 5)
    client = TrainingClient(wanted, named, [5], lenient(tmp_path / "state"))
    client.answer(JOIN, Parcel({"population": 12, **client.identity.facts()}))
    assert client.noise is not None
    client.noise.charge(5, 0)
    said = Budget.read(tmp_path / "state" / "budget.jsonl").charges[0].what
    assert ("made elsewhere" in said) is elsewhere


def test_local_noise_comes_from_the_clients_and_gives_the_model_of_one_process(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["privacy.trust=local"])
    alone, expected = simulate(recipe)
    # Twelve clients of one user each: the ledgers are theirs.
    loop, state = run_over(recipe, engine(12, state=tmp_path))
    assert float((state.parameters - expected.parameters).norm()) <= 1e-6 * float(expected.parameters.norm())
    assert loop.ledger.entries == alone.ledger.entries
    counts = [len(Budget.read(path).charges) for path in tmp_path.glob("*/budget.jsonl")]
    cohorts = [alone.plan.cohort(step) for step in range(recipe.run.steps)]
    assert sum(counts) == sum(map(len, cohorts))


def test_a_client_with_local_noise_answers_no_more_than_its_guarantee_was_made_for(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["privacy.trust=local", "sampling={kind: fixed, cohort: 12}"])
    loop = loop_over(recipe, engine(12, state=tmp_path))
    state = loop.start()
    for _ in range(recipe.run.steps):
        loop.engine.train(state.parameters, np.arange(12), 0, loop.total)
    with pytest.raises(Abandoned, match="0 of 12 users answered"):
        loop.engine.train(state.parameters, np.arange(12), 0, loop.total)


def test_an_abandoned_round_with_noisy_messages_is_paid_for(tiny: str, tmp_path: Path) -> None:
    """The server has seen the messages, whatever it then does with them."""
    recipe = load(tiny, ["privacy.trust=local", "sampling={kind: fixed, cohort: 12}"])
    failures = iter(["away"] * 8)

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        return next(failures, "") if kind == TRAIN else ""

    loop = loop_over(recipe, engine(12, fate, state=tmp_path))
    state = loop.start()
    loop.step(state)
    assert [(entry.step, entry.attempt) for entry in loop.ledger.entries] == [(0, 0), (0, 1)]


def test_a_masked_round_gives_the_sum_and_at_least_the_noise_of_the_ledger(tiny: str) -> None:
    recipe = load(tiny, [*WIDE, "privacy.trust=distributed"])
    loop = loop_over(recipe, engine(8))
    state = loop.start()
    plain = torch.empty_like(loop.total)
    InProcess(make_trainer(recipe)).train(state.parameters, np.arange(8), 0, plain)
    wanted = loop.plan.event.update_multiplier * 1.0 / 8  # z C w on the sum
    for dropped in (0, 2):
        gone = set(range(100, 100 + dropped))

        def fate(kind: str, node: int, parcel: Parcel, gone: set[int] = gone) -> str:
            return "gone" if kind == MASKED and node in gone else ""

        loop.engine.link.fate = fate  # type: ignore[attr-defined]
        loop.engine.train(state.parameters, np.arange(8), 0, loop.total)
        # The sum of the others: quadratics of single users, each clipped to 1 / 8.
        sums = torch.empty_like(plain)
        InProcess(make_trainer(recipe)).train(state.parameters, np.arange(dropped, 8), 0, sums)
        spread = float((loop.total - sums).std())
        assert spread == pytest.approx(math.sqrt(2) * wanted, rel=0.12), "whoever is missing"


@pytest.mark.parametrize("stage", [KEYS, SHARES, MASKED, CONFIRM, UNMASK])
def test_a_sum_with_too_few_answers_is_never_opened(tiny: str, stage: str) -> None:
    recipe = load(tiny, [*WIDE, "privacy.trust=distributed"])

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        return "gone" if kind == stage and node < 103 else ""

    loop = loop_over(recipe, engine(8, fate, Terms(deadline=60, tries=2)))
    loop.total.zero_()
    with pytest.raises(Abandoned, match=r"5 of 8 users are left|shares of 8 users do not open"):
        loop.step(loop.start())
    assert not loop.total.any()
    assert loop.ledger.count == 2  # nothing was seen, but it might have been: the line comes first


def test_what_the_server_gets_of_one_client_says_nothing(tiny: str) -> None:
    recipe = load(tiny, [*WIDE, "privacy.trust=distributed"])
    loop = loop_over(recipe, engine(8))
    seen: list[np.ndarray] = []
    member = loop.engine.link.members[100]  # type: ignore[attr-defined]
    inner = member.answer

    def watched(kind: str, parcel: Parcel) -> Parcel:
        answer: Parcel = inner(kind, parcel)
        if kind == MASKED:
            seen.append(answer.arrays["masked"])
            assert set(answer.facts) == {"run", "step", "nonce", "user", "version", "recipe", "layout", "encoder",
                                         "damaged"}  # fmt: skip
        return answer

    member.answer = watched
    state = loop.start()
    for _ in range(2):
        loop.engine.train(state.parameters, np.arange(8), 0, loop.total)
    top = np.stack([vector >> np.uint64(60) for vector in seen]).astype(np.int64)
    counts = np.stack([np.bincount(row, minlength=16) for row in top])
    chi = ((counts - 600 / 16) ** 2 / (600 / 16)).sum(axis=1)
    assert all(1.5 < value < 45 for value in chi)  # 15 degrees of freedom: uniform, and not too evenly so
    assert (seen[0] == seen[1]).mean() < 0.01


def test_a_sum_beyond_what_honest_clients_can_make_is_thrown_away(tiny: str) -> None:
    recipe = load(tiny, [*WIDE, "privacy.trust=distributed"])
    loop = loop_over(recipe, engine(8, None, Terms(deadline=60, tries=1)))
    member = loop.engine.link.members[103]  # type: ignore[attr-defined]
    inner = member.answer

    def hostile(kind: str, parcel: Parcel) -> Parcel:
        answer: Parcel = inner(kind, parcel)
        if kind == MASKED:
            answer.arrays["masked"][:] += np.uint64(1 << 58)
        return answer

    member.answer = hostile
    with pytest.raises(Abandoned, match="thrown away"):
        loop.step(loop.start())


def test_a_server_cannot_lift_the_bound_of_a_client(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["privacy.trust=local", "sampling={kind: fixed, cohort: 12}"])
    loop = loop_over(recipe, engine(12, state=tmp_path))
    state = loop.start()
    with pytest.raises(Abandoned, match="of 12"):
        loop.engine.train(state.parameters, np.arange(12), 0, loop.total, torch.tensor([1e6], dtype=torch.float64))


def test_an_abandoned_step_keeps_its_cohort_until_it_is_answered(tiny: str, tmp_path: Path) -> None:
    """Also over a restart: to draw until enough users answer would not be the sampler accounted for."""
    recipe = load(tiny, ["privacy.source=system"])
    answers = False

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        return "" if answers or kind != TRAIN else "gone"

    loop = loop_over(recipe, engine(12, fate, Terms(deadline=1, tries=1, minimum=1.0), state=tmp_path))
    state = loop.start()
    with pytest.raises(Abandoned):
        loop.step(state)
    assert state.pending is not None
    cohort = state.pending.clone()
    checkpoint.save(tmp_path, state, "", 0, "")
    again = checkpoint.load(tmp_path).state
    assert again.pending is not None
    assert again.pending.tolist() == cohort.tolist()
    answers = True
    assert loop.step(again).tally.users == len(cohort)
    assert again.pending is None


def test_the_released_noise_does_not_tell_the_size_of_the_cohort(tiny: str) -> None:
    """Amplification counts on nobody knowing who took part; the variance used to be arrived / threshold."""
    sets = ["task={kind: convex/quadratics, users: 20, dimension: 3000, rank: 2}", "sampling.cohort=8"]
    wanted = load(tiny, [*sets, "privacy.trust=distributed", "privacy.noise_multiplier=40", "run.steps=30"])
    loop = loop_over(wanted, engine(20, terms=Terms(deadline=600, tries=1)))
    state, spreads = loop.start(), dict[int, tuple[float, float]]()
    for cohort in (np.arange(0), np.arange(1), np.arange(2), np.arange(3), np.arange(8), np.arange(9), np.arange(20)):
        loop.engine.train(state.parameters, cohort, 0, loop.total)
        values = loop.total.double()
        steps = [2.0**power for power in range(-40, 10) if bool((values.remainder(2.0**power) == 0).all())]
        spreads[len(cohort)] = (float(values.std()), max(steps))
    accounted = 40 * 1.0 / 20  # z C w on the sum
    for size, (spread, lattice) in spreads.items():
        assert spread == pytest.approx(math.sqrt(2) * accounted, rel=5 / math.sqrt(2 * 3000)), size
        assert lattice == grid(accounted), "rounding must not tell it either"


def test_cohorts_of_nobody_and_of_one_user_are_released_and_not_tried_for_ever(tiny: str) -> None:
    """A Poisson cohort may be that small; to refuse it would stop the run for good, and to draw again would show it."""
    sets = ["task={kind: convex/quadratics, users: 3, dimension: 20, rank: 2}", "sampling.cohort=1"]
    wanted = load(tiny, [*sets, "privacy.trust=distributed", "run.steps=20"])
    loop = loop_over(wanted, engine(3, terms=Terms(deadline=60, tries=1)))
    state, sizes = loop.start(), list[int]()
    while state.step < 20:
        sizes.append(loop.step(state).tally.users)
    assert {0, 1} <= set(sizes)
    assert loop.ledger.count == 20, "one line a step"


def test_one_process_adds_the_noise_of_a_deployment(tiny: str) -> None:
    plan = loop_over(load(tiny, ["privacy.trust=distributed"]), engine(12)).plan
    total = torch.zeros(100_000, dtype=torch.float64)
    plan.mechanism.release(total, Occasion(plan.event, plan.cohort(0), 0, 0))
    stated = plan.event.update_multiplier * (plan.event.sensitivity or 0.0)
    assert float(total.std()) == pytest.approx(math.sqrt(2) * stated, rel=0.01)
    assert plan.mechanism.variance(plan.event) == pytest.approx(2 * stated**2)
