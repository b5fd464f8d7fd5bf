"""A relay adds up what its clients send: the model of a tree is the model of no tree, byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.deploy import keys
from confide.deploy.client import TrainingClient
from confide.deploy.deployment import remote_engine
from confide.deploy.link import NodeId
from confide.deploy.parcels import Parcel
from confide.deploy.relay import Relay
from confide.deploy.remote import SUM, TRAIN, Remote, Terms
from confide.deploy.rounds import HELD
from confide.engines.engine import Abandoned
from confide.errors import UserError
from confide.federated.task import Task
from confide.privacy.budget import FILE, Budget
from confide.privacy.plan import Plan
from confide.recipe import Recipe, load
from support.rehearsal import Local, engine, lenient, loop_over, run_over

ADAPTIVE = ["bounding.adaptive={quantile: 0.4}"]
UNEVEN = ["users={weights: examples, public: true}", "sampling={kind: fixed, cohort: 5}", "privacy.accountant=rdp"]


def tree(relays: int, place: Path, direct: int = 0, **options: Any) -> Callable[[Recipe, Task, Plan], Remote]:
    """A server over relays with four clients each, and over a few clients of its own."""

    def make(recipe: Recipe, task: Task, plan: Plan) -> Remote:
        everybody = list(range(direct, len(plan.weights)))
        members: dict[Any, Any] = {}
        shares: dict[Any, list[int]] = {}
        for number in range(relays):
            own = everybody[number::relays]
            below: dict[NodeId, list[int]] = {f"c{user}": [user] for user in own}
            link = Local({name: client(recipe, task, users, place / str(name)) for name, users in below.items()})
            members[f"relay-{number}"] = Relay(
                recipe, task, link, below, Terms(deadline=30), len(own), lambda text: None
            )
            shares[f"relay-{number}"] = own
        for user in range(direct):
            members[f"c{user}"] = client(recipe, task, [user], place / f"c{user}")
            shares[f"c{user}"] = [user]
        return remote_engine(recipe, task, plan, Local(members), shares, Terms(deadline=60, **options))

    return make


def client(recipe: Recipe, task: Task, users: list[int], place: Path) -> TrainingClient:
    return TrainingClient(recipe, task, users, lenient(place), lambda text: None)


@pytest.mark.parametrize("changed", [[], ADAPTIVE, UNEVEN, ["bounding.rule=per_layer_normalise"]])
def test_a_tree_of_two_levels_gives_the_model_of_none_byte_for_byte(
    changed: list[str], tiny: str, tmp_path: Path
) -> None:
    recipe = load(tiny, ["run.steps=12", *changed])
    flat, expected = run_over(recipe, engine(12))
    for relays, direct in ((3, 0), (2, 4)):
        loop, state = run_over(recipe, tree(relays, tmp_path / str(relays), direct))
        assert torch.equal(state.parameters, expected.parameters)
        assert loop.ledger.entries == flat.ledger.entries


def test_a_client_of_a_relay_that_is_away_is_missing_and_nothing_else(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, tree(3, tmp_path))
    members = loop.engine.link.members  # type: ignore[attr-defined]
    members["relay-1"].link.fate = lambda kind, node, parcel: "gone" if kind == TRAIN and node == "c4" else ""
    assert loop.engine.train(loop.start().parameters, np.arange(12), 0, loop.total).users == 11


def test_a_relay_waits_for_a_client_that_comes_back_where_the_server_needs_it(tiny: str, tmp_path: Path) -> None:
    """Else the server is at once a user short, at every try, and the run stops within a second."""
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, tree(3, tmp_path, minimum=1.0, tries=1))
    relay: Relay = loop.engine.link.members["relay-1"]  # type: ignore[attr-defined]
    link: Any = relay.link
    away = link.members.pop("c4")
    link.here.discard("c4")
    assert relay.below is not None
    relay.below.door.forget("c4")
    back = threading.Timer(0.3, link.members.update, [{"c4": away}])
    back.start()
    assert loop.engine.train(loop.start().parameters, np.arange(12), 0, loop.total).users == 12
    assert not back.is_alive()


def test_a_relay_whose_clients_come_late_is_asked_again(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    said, late, below = list[str](), dict[Any, Any](), dict[NodeId, list[int]]()

    def make(recipe: Recipe, task: Task, plan: Plan) -> Remote:
        for user in range(12):
            late[f"c{user}"], below[f"c{user}"] = client(recipe, task, [user], tmp_path / f"c{user}"), [user]
        relay = Relay(recipe, task, Local({}), below, Terms(join=0.1), 12, said.append)
        threading.Timer(0.5, relay.link.members.update, [late]).start()  # type: ignore[attr-defined]
        return remote_engine(
            recipe, task, plan, Local({"relay": relay}), {"relay": list(range(12))}, Terms(greeting=0.2, join=20)
        )

    loop = loop_over(recipe, make)
    assert loop.step(loop.start()).tally.users == 12
    assert [text for text in said if "waiting" in text][1:], "it has waited more than once"


def test_a_relays_clients_are_told_of_every_start_of_the_server(tiny: str, tmp_path: Path) -> None:
    """A client pays for every start, asked or not; one that is told of an earlier start would pay for that as well."""
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp", "run.steps=3"])
    loop = loop_over(recipe, tree(1, tmp_path))
    link = loop.engine.link  # type: ignore[attr-defined]
    again = loop_over(recipe, lambda recipe, task, plan: remote_engine(
        recipe, task, plan, Local(link.members), {"relay-0": list(range(12))}, Terms(deadline=30)))  # fmt: skip
    assert again.step(again.start()).tally.users == 12
    for user in range(12):
        charges = Budget.read(tmp_path / f"c{user}" / FILE).charges
        assert [charge.count for charge in charges] == [3, 3]
    relay: Relay = link.members["relay-0"]
    assert relay.below is not None
    assert relay.below.run == again.engine.run  # type: ignore[attr-defined]


def test_a_relay_bounds_again_what_its_clients_send(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, tree(3, tmp_path))
    relay = loop.engine.link.members["relay-0"]  # type: ignore[attr-defined]
    member, said = relay.link.members["c3"], list[str]()
    relay.say = said.append
    inner = member.answer

    def long(kind: str, parcel: Parcel) -> Parcel:
        answer = inner(kind, parcel)
        if kind == TRAIN:
            answer.arrays["update"][:] = 1e6
        return answer  # type: ignore[no-any-return]

    member.answer = long
    tally = loop.engine.train(loop.start().parameters, np.arange(12), 0, loop.total)
    assert tally.users == 12
    assert float(loop.total.norm()) <= 1 + 1e-6, "C, with weights that add up to 1"
    relay.below.say = said.append
    loop.engine.train(loop.start().parameters, np.arange(12), 1, loop.total)
    assert any(HELD in text for text in said)


WRONG: dict[str, Callable[[Parcel], Parcel]] = {
    "too long": lambda p: Parcel(p.facts, {"sum": p.arrays["sum"] * 0 + (1 << 60)}),
    "another type": lambda p: Parcel(p.facts, {"sum": p.arrays["sum"].astype(np.float64)}),
    "no sum": lambda p: Parcel(p.facts, {}),
    "users of others": lambda p: Parcel({**p.facts, "users": [0, 1, 2]}, p.arrays),
    "users twice": lambda p: Parcel({**p.facts, "users": [0, 0]}, p.arrays),
    "another round": lambda p: Parcel({**p.facts, "nonce": "x"}, p.arrays),
    "endless figures": lambda p: Parcel({**p.facts, "tally": {**p.facts["tally"], "loss": float("inf")}}, p.arrays),
    "too many users": lambda p: Parcel({**p.facts, "tally": {**p.facts["tally"], "users": 999}}, p.arrays),
    "unknown figures": lambda p: Parcel({**p.facts, "tally": {**p.facts["tally"], "more": 1}}, p.arrays),
    "nested users": lambda p: Parcel({**p.facts, "users": [[0]]}, p.arrays),
    "an update for a sum": lambda p: Parcel({**p.facts, "user": p.facts["users"][0]}, {"update": p.arrays["sum"]}),
    **{
        f"{name}: {value}": lambda p, name=name, value=value: Parcel(  # type: ignore[misc]
            {**p.facts, "tally": {**p.facts["tally"], name: value}}, p.arrays
        )
        for name, value in [
            ("measures", [0.1]), ("raw_norms", [1.0]), ("gradient", 1.0), ("users", 4.0), ("not_finite", 0.5),
            ("not_finite", True), ("not_finite", -1), ("bounded", 5), ("bounded", 1.0), ("loss", 1e308), ("loss", 0),
            ("loss", -1e308), ("norm", -1.0), ("norm", 1e308), ("norm_squared", -1.0), ("bounded_norm", -1.0),
            ("layer_norms", [-1.0]), ("layer_norms_squared", [-1.0]), ("layer_bounded", [-1.0]),
            ("layer_bounded", [float("nan")]), ("layer_bounded", 1.0), ("norm", [1.0]), ("votes", [0.5]),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_no_relay_could_have_added_up_changes_nothing(kind: str, tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, tree(3, tmp_path, minimum=0.9, tries=1))
    relay = loop.engine.link.members["relay-0"]  # type: ignore[attr-defined]
    inner = relay.answer
    relay.answer = lambda asked, parcel: WRONG[kind](inner(asked, parcel)) if asked == SUM else inner(asked, parcel)
    with pytest.raises(Abandoned, match="8 of 12 users answered"):
        loop.step(loop.start())


@pytest.mark.parametrize("says", ["at the start", "never"])
def test_a_client_with_a_key_cannot_end_the_server_with_figures_of_its_own(
    says: str, tiny: str, tmp_path: Path
) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, engine(12, terms=Terms(deadline=60, tries=1), state=tmp_path))
    held: Any = loop.engine
    inner = held.link.members[103].answer

    def as_relay(kind: str, parcel: Parcel) -> Parcel:
        if kind not in (TRAIN, SUM):
            return inner(kind, parcel)  # type: ignore[no-any-return]
        facts = {name: parcel.facts[name] for name in ("run", "step", "nonce")} | held.door.identity.facts()
        tally = {"users": 1, "measures": [0.1]}
        return Parcel({**facts, "users": [3], "tally": tally}, {"sum": np.zeros(loop.total.numel(), "<i8")})

    held.link.members[103].answer = as_relay
    if says == "at the start":
        held.door.relays.add(103)
    assert loop.step(loop.start()).tally.users == 11


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_a_relay_is_for_central_trust_alone(trust: str, tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, [f"privacy.trust={trust}"])
    with pytest.raises(UserError, match="only central trust allows"):
        loop_over(recipe, tree(3, tmp_path))


def test_a_relays_keys_are_for_a_part_of_the_users(tmp_path: Path) -> None:
    made = keys.make(tmp_path / "keys", 2, ["127.0.0.1"], users=4, first=5)
    assert [node.users for node in made.nodes] == [(5, 7), (6, 8)]
    assert keys.read(tmp_path / "keys", part=True) == made
    with pytest.raises(UserError, match="users must be 0, 1, 2"):
        keys.read(tmp_path / "keys")
