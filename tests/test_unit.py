"""Claims about the unit of privacy: every task names it, and where it is no person nothing is promised to people."""

from __future__ import annotations

from typing import Any

import pytest

from confide import recipe
from confide.build import ledger_header, make_loop
from confide.errors import UserError
from confide.recipe import Recipe

NOISE = "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}"
AN4 = "task.corpus={kind: an4}"
COLUMN = ("task.data={kind: table, queries: asked.csv, client_column: owner}", "task.clients={kind: column}")
OWNER = "owner of queries, by the data's client column"
SPEECH, SMS = "speech/embedded/federated", "retrieval/sms-head"


def loaded(name: str, *sets: str) -> Recipe:
    return recipe.load(name, sets)


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_every_shipped_recipe_names_its_unit(name: str) -> None:
    unit = recipe.load(name).unit
    assert unit.name
    assert unit.origin != "unsaid"
    # Only speakers of a recorded corpus are people here.
    assert unit.person == any(corpus in name for corpus in ("paper", "an4", "digits/", "words/")) * (
        unit.origin == "found"
    )


@pytest.mark.parametrize(
    ("name", "sets", "unit", "person", "origin"),
    [
        ("convex/digits", [], "simulated client with rows of a public data set", False, "made-up"),
        ("convex/quadratics", [], "made-up client", False, "made-up"),
        (SPEECH, [], "synthetic voice", False, "made-up"),
        (SPEECH, [AN4], "speaker", True, "found"),
        (SPEECH, ["task.corpus={kind: an4, users: iid}"], "random share of the utterances", False, "dealt"),
        (SPEECH, [AN4, "task.pool=20"], "share of pooled utterances", False, "dealt"),
        (SMS, [], "random share of the queries", False, "dealt"),
        ("retrieval/embedded", [], "made-up household", False, "made-up"),
        (SMS, [*COLUMN], OWNER, False, "found"),
        (SMS, [*COLUMN, "users.person=true"], OWNER, True, "declared"),
        ("convex/digits", ["task={kind: bench/mlp}"], "made-up client", False, "made-up"),
        ("convex/digits", ["task={kind: bench/speech}"], "made-up client", False, "made-up"),
        ("convex/digits", ["task={kind: bench/vector}"], "made-up client", False, "made-up"),
    ],
)
def test_the_unit_of_each_kind_of_users(name: str, sets: list[str], unit: str, person: bool, origin: str) -> None:
    found = loaded(name, *sets, "privacy={mechanism: none}").unit
    assert (found.name, found.person, found.origin) == (unit, person, origin)


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        (SPEECH, [AN4, "task.pool=20"]),
        (SPEECH, ["task.corpus={kind: an4, users: iid}"]),
        (SMS, ["task.clients={kind: even, clients: 20}", "sampling.cohort=10"]),
        (SMS, ["task.clients={kind: dirichlet, clients: 20}", "sampling.cohort=10"]),
        (SMS, ["task.clients={kind: shards, clients: 20}", "sampling.cohort=10"]),
    ],
)
def test_a_guarantee_over_dealt_shares_is_refused_unless_the_recipe_names_the_unit(name: str, sets: list[str]) -> None:
    sets = [*sets, NOISE, "sampling.kind=poisson", "bounding={rule: clip, bound: 1}"]
    with pytest.raises(UserError, match=r"users\.unit: required with a guarantee here"):
        loaded(name, *sets)
    assert loaded(name, *sets[:-3], "privacy={mechanism: none}").unit.origin == "dealt"
    named = loaded(name, *sets, "users.unit=share of messages").unit
    assert (named.name, named.person) == ("share of messages", False)
    with pytest.raises(UserError, match=r"users\.person=true"):
        loaded(name, *sets, "users={unit: speaker, person: true}")


def test_a_recipe_can_name_the_users_of_a_task_of_its_own() -> None:
    task = "task={kind: python, factory: 'json:loads'}"
    plain = loaded("convex/digits", task).unit
    assert not plain.person
    named = loaded("convex/digits", task, "users={unit: patient, person: true}").unit
    assert (named.name, named.person, named.origin) == ("patient", True, "declared")


@pytest.mark.parametrize("name", ["x", "a" * 81, "<b>speaker</b>", "two\nlines", ""])
def test_a_name_that_no_sentence_can_hold_is_refused(name: str) -> None:
    document: dict[str, Any] = loaded("convex/digits").model_dump(mode="json")
    with pytest.raises(UserError, match=r"users\.unit"):
        recipe.parse(document | {"users": {"unit": name}})


def test_the_ledgers_first_line_has_the_unit_and_the_sampler() -> None:
    wanted = loaded("convex/digits", "run.steps=5")
    loop = make_loop(wanted)
    assert loop.ledger.header["unit"] == wanted.unit.model_dump()
    assert loop.ledger.header["sampler"] == "poisson"
    # The server of a deployment cannot see whose data a client holds.
    speech = loaded(SPEECH, AN4)
    assert ledger_header(speech, loop.plan, loop.task, b"", deployed=True)["unit"]["name"].startswith("device")
    assert ledger_header(speech, loop.plan, loop.task, b"")["unit"]["name"] == "speaker"
    for person in (False, True):
        said = ["users={unit: phone, person: true}"] if person else []
        deployed = ledger_header(loaded(SPEECH, AN4, *said), loop.plan, loop.task, b"", deployed=True)["unit"]
        assert deployed["person"] is person, "only if the recipe says so"


def test_recipes_without_a_unit_keep_their_dump() -> None:
    dumped = loaded("convex/digits").model_dump(mode="json")["users"]
    assert "unit" not in dumped
    assert "person" not in dumped
