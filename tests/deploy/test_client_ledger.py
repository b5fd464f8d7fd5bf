"""A client's own ledger: a full disk, two processes on one state, a torn line; with clients' noise of either kind."""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.build import make_task
from confide.deploy.client import TrainingClient
from confide.deploy.parcels import Parcel
from confide.deploy.refusals import RefusedByClient, code_of
from confide.deploy.remote import JOIN, Terms
from confide.privacy.accountant import epsilon
from confide.privacy.budget import Budget
from confide.privacy.events import Event
from confide.privacy.trust.own_noise import OwnNoise, Spent
from confide.privacy.trust.secure import MASKED
from confide.recipe import load
from support.rehearsal import engine, lenient, loop_over


def own_noise(tiny: str, state: Path, trust: str, *sets: str) -> OwnNoise:
    wanted = load(tiny, [f"privacy.trust={trust}", *sets])
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(state), say=lambda text: None)
    client.answer(JOIN, Parcel({"population": 12, **client.identity.facts()}))
    assert client.noise is not None
    return client.noise


@pytest.mark.parametrize(("trust", "moves"), [("local", 2.0), ("distributed", math.sqrt(2))])
def test_a_client_that_adds_noise_pays_what_its_answers_cost_against_a_server_that_knows_of_them(
    trust: str, moves: float, tiny: str, tmp_path: Path
) -> None:
    noise = own_noise(tiny, tmp_path, trust, "privacy.noise_multiplier=4")
    for step in range(3):
        noise.charge(0, step)
    charged = [each.event for each in Budget.read(tmp_path / "budget.jsonl").charges]
    plain = Event("everyone", 1.0, 12, 12, 4.0 / moves, 1.0)  # nothing is amplified by sampling
    assert epsilon(charged, 1e-5, "pld") == pytest.approx(epsilon([plain] * 3, 1e-5, "pld"), rel=1e-9)


def in_process(what: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        there.send(what(*given))

    process = context.Process(target=run)
    process.start()
    found = here.recv() if here.poll(30) else None
    process.join(10)
    return found


def charge_without_room(noise: OwnNoise, path: Path) -> tuple[str, bytes]:
    """Let the file grow by 100 bytes and no more: the line is torn, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, resource.RLIM_INFINITY))
    try:
        noise.charge(0, 1)
    except OSError as error:
        return type(error).__name__, path.read_bytes()
    return "", path.read_bytes()


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_a_full_disk_leaves_the_ledger_as_it_was_and_the_next_answer_goes_on(
    trust: str, tiny: str, tmp_path: Path
) -> None:
    noise, path = own_noise(tiny, tmp_path, trust), tmp_path / "budget.jsonl"
    noise.charge(0, 0)
    whole = path.read_bytes()
    failed, left = in_process(charge_without_room, noise, path)
    assert failed == "OSError"
    assert left == whole, "in the process that failed"
    assert path.read_bytes() == whole, "and after it was closed"
    noise.charge(0, 1)
    assert len(Budget.read(path).charges) == 2


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_two_processes_on_one_state_never_answer_more_often_than_the_run_has_steps(
    trust: str, tiny: str, tmp_path: Path
) -> None:
    one, two = (own_noise(tiny, tmp_path, trust, "run.steps=3") for _ in range(2))
    one.charge(0, 0)
    two.charge(0, 0)  # knows one line now
    one.charge(0, 1)
    with pytest.raises(Spent, match="all that its guarantee was made for"):
        two.charge(0, 2)
    assert len(Budget.read(tmp_path / "budget.jsonl").charges) == 3


def many(noise: OwnNoise) -> int:
    for step in range(100):
        try:
            noise.charge(0, step)
        except Spent:
            return step
    return 100


def test_processes_that_charge_at_once_add_up_to_the_limit(tiny: str, tmp_path: Path) -> None:
    noise = own_noise(tiny, tmp_path, "distributed", "run.steps=20")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=many, args=(noise,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert len(Budget.read(tmp_path / "budget.jsonl").charges) == 20


def test_a_torn_line_is_repaired_before_the_next_share_of_noise(tiny: str, tmp_path: Path) -> None:
    noise = own_noise(tiny, tmp_path, "distributed")
    noise.charge(0, 0)
    with (tmp_path / "budget.jsonl").open("ab") as file:
        file.write(b'{"count":1,"torn')
    fresh = own_noise(tiny, tmp_path, "distributed")
    fresh.charge(0, 1)
    noise.charge(0, 2)
    assert [charge.key.split("/")[0] for charge in Budget.read(tmp_path / "budget.jsonl").charges] == ["0", "1", "2"]


def test_a_round_of_distributed_trust_goes_on_without_a_client_whose_disk_is_full(tiny: str, tmp_path: Path) -> None:
    wanted = load(tiny, ["privacy.trust=distributed", "sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(wanted, engine(12, terms=Terms(deadline=60), state=tmp_path))
    member = loop.engine.link.members[104]  # type: ignore[attr-defined]
    inner = member.answer

    def full(kind: str, parcel: Parcel) -> Parcel:
        if kind != MASKED:
            return inner(kind, parcel)  # type: ignore[no-any-return]
        found = in_process(_masked_without_room, inner, parcel, tmp_path / "104" / "budget.jsonl")
        assert found == "OSError"
        raise RefusedByClient(code_of(OSError()), "the disk is full")

    state = loop.start()
    first = loop.engine.train(state.parameters, np.arange(12), 0, loop.total).users
    member.answer = full
    second = loop.engine.train(state.parameters, np.arange(12), 1, loop.total).users
    member.answer = inner
    third = loop.engine.train(state.parameters, np.arange(12), 2, loop.total).users
    assert (first, second, third) == (12, 11, 12)
    assert len(Budget.read(tmp_path / "104" / "budget.jsonl").charges) == 2
    assert len(Budget.read(tmp_path / "103" / "budget.jsonl").charges) == 3


def _masked_without_room(inner: Callable[[str, Parcel], Parcel], parcel: Parcel, path: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, resource.RLIM_INFINITY))
    try:
        inner(MASKED, parcel)
    except OSError as error:
        return type(error).__name__
    return "an answer was sent"
