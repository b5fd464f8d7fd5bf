"""Hostile messages: none is accepted, none costs a round, and none ends a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

import deploy_hostile
from confide.deploy.parcels import Parcel
from confide.deploy.remote import Terms
from confide.engines.engine import Abandoned
from confide.privacy.trust.secure import CONFIRM, KEYS, MASKED, SHARES, UNMASK
from confide.recipe import load
from support import attacks
from support.rehearsal import engine, loop_over

ROUNDS = 10


def test_hostile_messages_are_not_in_the_model_and_cost_no_round(tmp_path: Path) -> None:
    alone, *_ = deploy_hostile.measure(ROUNDS, threading.Thread, tmp_path, kinds=False)
    digest, lost, _, sent, turned = deploy_hostile.measure(ROUNDS, threading.Thread, tmp_path)
    assert digest == alone
    assert lost == 0
    assert sent.total() >= 90
    assert len(sent) >= 50
    assert turned["malformed"] > 0


def test_the_measurement_would_notice_an_answer_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, *_ = deploy_hostile.measure(2, threading.Thread, tmp_path, kinds=False)
    monkeypatch.setattr(deploy_hostile, "AS_CLIENT", {"an honest answer": lambda honest: honest.with_facts()})
    monkeypatch.setattr(deploy_hostile, "KNOCKS", 0)
    digest, lost, *_ = deploy_hostile.measure(2, threading.Thread, tmp_path)
    assert digest != alone
    assert lost == 2, "four have answered"


def test_there_are_forty_kinds_and_more() -> None:
    ways = {*attacks.AS_CLIENT, *attacks.AS_RELAY, *attacks.LIES}
    assert len(ways) >= 40
    assert len(attacks.WITHOUT_KEY) >= 20


def nested(depth: int) -> Any:
    made: Any = None
    for _ in range(depth):
        made = [made]
    return made


SELVES: list[dict[str, Any]] = [
    *attacks.LIES.values(), {"version": nested(5000)}, {"users": nested(5000)}, {"users": [1 << 62] * 50_000},
    {"refuses": nested(5000)}, {"recipe": {"a": nested(5000)}}, {"layout": b"\x1b[2J"}, {"encoder": "\x9b2J\n"},
    {"version": 10**80}, {"users": [4], "relay": nested(5000), "version": attacks.TERMINAL},
]  # fmt: skip


@pytest.mark.parametrize("lie", SELVES, ids=lambda lie: f"{list(lie)}")
def test_nothing_that_a_client_says_of_itself_ends_the_server_or_reaches_its_terminal(lie: dict[str, Any]) -> None:
    wanted = load("convex/quadratics", [
        "task={kind: convex/quadratics, users: 5, dimension: 6, rank: 3}", "sampling={kind: fixed, cohort: 5}",
        "privacy={mechanism: none}", "run.steps=1"])  # fmt: skip
    held: Any = loop_over(wanted, engine(5)).engine
    honest, said = held.link.members[104], list[str]()
    held.say = said.append

    class Hostile:
        def answer(self, asked: str, parcel: Parcel) -> Parcel:
            return Parcel({**honest.answer(asked, parcel).facts, **lie})

    held.link.members[104] = Hostile()
    held.greet(104)
    held.look()
    held.look()
    assert set(held.door.users.values()) == {100, 101, 102, 103}
    assert 104 in held.door.refused
    assert len(said) == 1
    assert said[0].isprintable()
    assert len(said[0]) < 400


NASTY: list[Any] = [
    ..., nested(5000), [nested(5000)], None, True, 0, -1, 1 << 63, 0.5, float("nan"), "", "x" * 1000, b"", b"\0" * 32,
    [], [[]], [[None]], {}, {"a": 1}, [0], [0, 0], [-1], ["0"], [b""], [[0, b""]], [[0, b"", b"", b""]], [1 << 80],
    [[[[]]]],
]  # fmt: skip
SAID = {
    KEYS: ["public", "picks"], SHARES: ["holders", "hashes", "boxes", "commitment"], MASKED: ["damaged"],
    CONFIRM: ["signature"], UNMASK: ["of", "shares"],
}  # fmt: skip


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", [KEYS, SHARES, MASKED, CONFIRM, UNMASK])
def test_nothing_that_a_client_says_in_secure_aggregation_ends_the_server(kind: str, signed: bool) -> None:
    wanted = load(
        "convex/quadratics",
        ["task={kind: convex/quadratics, users: 5, dimension: 6, rank: 3}", "sampling={kind: fixed, cohort: 5}",
         "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: distributed}",
         "bounding={rule: clip, bound: 1}", "run.steps=1000"],
    )  # fmt: skip
    loop = loop_over(wanted, engine(5, signed=signed, terms=Terms(deadline=5, tries=1)))
    held: Any = loop.engine
    held.say = lambda text: None
    honest = held.link.members[104]
    state, seen, lost = loop.start(), 0, 0

    class Hostile:
        lie: dict[str, Any]

        def answer(self, asked: str, parcel: Parcel) -> Parcel:
            nonlocal seen
            said = honest.answer(asked, parcel)
            if asked != kind:
                return said  # type: ignore[no-any-return]
            seen += 1
            facts = {name: value for name, value in {**said.facts, **self.lie}.items() if value is not ...}
            return Parcel(facts, said.arrays)

    held.link.members[104] = hostile = Hostile()
    for hostile.lie in [{name: value} for name in SAID[kind] for value in NASTY]:
        held.excluded.clear()
        state.pending = None
        try:
            loop.step(state)
        except Abandoned:
            lost += 1
    assert seen == len(NASTY) * len(SAID[kind])
    assert lost == (kind == SHARES), "four of five are enough; a commitment that is false is found at the end"
