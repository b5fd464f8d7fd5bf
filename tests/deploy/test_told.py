"""What a server may say is a list: no file, no code, no address and no data of a client is on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from confide import recipe
from confide.deploy import refusals
from confide.deploy.deployment import Client, check_deployable
from confide.deploy.parcels import Identity, Parcel
from confide.deploy.policy import told_recipe
from confide.deploy.refusals import MEANINGS, RefusedByClient
from confide.deploy.remote import JOIN
from confide.deploy.told import MAY_SAY, shape, shape_digest
from confide.settings import Code, Local
from confide.speech.settings import SpeechSettings
from support.rehearsal import lenient

TABLE = {"kind": "table", "queries": "mine.csv"}


def fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every field that a recipe can have, with all that its type is made of."""
    for name, info in kind.model_fields.items():
        parts = [*info.metadata, info.annotation, *_parts(info.annotation)]
        yield f"{prefix}{name}", parts
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields(part, f"{prefix}{name}.")


def _parts(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _parts(part)


def test_no_field_that_names_a_file_or_code_can_be_told() -> None:
    found = list(fields(recipe.Recipe))
    marked = {name for name, parts in found if any(isinstance(part, Local | Code) for part in parts)}
    assert {"task.corpus.file", "task.start", "task.encoder.source", "bounding.function", "task.factory"} <= marked
    assert not marked & MAY_SAY
    assert {name for name, _ in found} >= MAY_SAY, "every name on the list is a field"
    for name in ("task.data", "task.corpus", "task.options", "privacy.options", "task.clients", "task.dataset"):
        assert not any(told == name or told.startswith(f"{name}.") for told in MAY_SAY)


@pytest.mark.parametrize("name", ["convex/digits", "convex/quadratics"])
def test_an_ordinary_recipe_is_taken_by_server_and_client(name: str) -> None:
    wanted = recipe.load(name)
    check_deployable(wanted)
    made = told_recipe(wanted.model_dump_json(), lenient(Path("state")))
    assert shape_digest(made) == shape_digest(wanted)
    assert made == wanted.model_copy(update={"description": ""})


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("speech/embedded/federated", ["task.corpus={kind: tsv, file: /etc/passwd}", "task.cache=/home/me"]),
        ("speech/embedded/federated", ["task.corpus={kind: folder, folder: /home/me}", "task.start=/home/me/model"]),
        ("speech/embedded/federated", ["task.test={kind: librispeech, subset: ../x}"]),
        ("speech/embedded/federated", ["task.corpus={kind: python, factory: 'os:system'}"]),
        ("retrieval/sms-head", ["task.data={kind: sms_spam, file: /etc/passwd}"]),
        ("retrieval/embedded", ["task.encoder.source=https://evil.example:1", "task.start=/home/me"]),
        ("retrieval/embedded", ["task.data={kind: table, queries: /etc/passwd, query_column: diagnosis}"]),
        ("convex/digits", ["task.folder=/home/me", "task.dataset=cifar10"]),
    ],
)
def test_files_code_and_addresses_that_a_server_names_are_never_used(name: str, sets: list[str]) -> None:
    data = {"speech": {"kind": "folder", "folder": "mine"}, "retrieval": TABLE}.get(name.partition("/")[0])
    policy = lenient(Path("state"), data=data, encoder="minilm")
    if name == "convex/digits":
        policy = lenient(Path("state"))
    made = told_recipe(recipe.load(name, sets).model_dump_json(), policy).model_dump_json()
    for word in ("/etc", "/home", "evil", "os:system", "..", "diagnosis", "cifar"):
        assert word not in made


def test_code_that_a_server_names_is_refused() -> None:
    for sets in (
        ["task={kind: python, factory: 'os:system', options: {command: id}}"],
        ["bounding={rule: python, function: 'os:system', bound: 1}"],
        ["privacy={mechanism: python, factory: 'os:system', noise_multiplier: 1, delta: 1e-5}"],
    ):
        document = recipe.load("convex/digits").model_dump(mode="json")
        for override in sets:
            recipe._apply(document, override)
        with pytest.raises(RefusedByClient) as refused:
            told_recipe(json.dumps(document), lenient(Path("state")))
        assert refused.value.code == refusals.RECIPE


def test_a_servers_recipe_that_is_none_is_refused_in_our_words() -> None:
    for text in (
        "[",
        "5",
        "{}",
        '{"task": {"kind": "convex/digit"}}',
        '{"task": 5}',
        None,
        7,
        "[" * 100_000,
        "x" * 2**21,
    ):
        with pytest.raises(RefusedByClient, match="the server") as refused:
            told_recipe(text, lenient(Path("state")))
        assert refused.value.code == refusals.RECIPE


def test_texts_are_only_read_by_the_encoder_of_the_policy() -> None:
    far = recipe.load("retrieval/embedded", ["task.encoder={source: 'https://evil.example:1', max_tokens: 32}"])
    own = told_recipe(far.model_dump_json(), lenient(Path("state"), data=TABLE, encoder="/models/own")).task
    assert own.encoder.source == "/models/own"  # type: ignore[union-attr]
    assert own.encoder.max_tokens == 32  # type: ignore[union-attr]
    with pytest.raises(RefusedByClient, match="which `encoder` may read"):
        told_recipe(far.model_dump_json(), lenient(Path("state"), data=TABLE))


HEARD = {"kind": "folder", "folder": "mine"}
SMALL = ["task.start=null", "sampling.cohort=2"]


@pytest.mark.parametrize(
    "sets",
    [
        ["task.model.encoder.source=/etc"],
        ["task.model.encoder={source: evil/x, train: [head, lora], first: 2, rank: 4, before: 0.1}",
         "local.rates={'*.lora_?': 0.1}", "central.rates={'head.*': 0.5}"],
    ],
)  # fmt: skip
def test_speech_is_only_heard_by_the_encoder_of_the_policy(sets: list[str]) -> None:
    wanted = recipe.load("speech/words/private", [*SMALL, *sets])
    made = told_recipe(wanted.model_dump_json(), lenient(Path("state"), data=HEARD, encoder="whisper-tiny.en"))
    assert isinstance(made.task, SpeechSettings)
    assert isinstance(wanted.task, SpeechSettings)
    own, theirs = made.task.model.encoder, wanted.task.model.encoder
    assert own is not None
    assert theirs is not None
    assert own == theirs.model_copy(update={"source": "whisper-tiny.en"})
    assert (made.local, made.central) == (wanted.local, wanted.central)
    assert shape_digest(made) == shape_digest(wanted)
    with pytest.raises(RefusedByClient, match="which `encoder` may hear"):
        told_recipe(wanted.model_dump_json(), lenient(Path("state"), data=HEARD))


def test_an_encoder_of_the_policy_is_left_alone_where_a_run_has_none() -> None:
    wanted = recipe.load("speech/embedded/federated", ["task.start=null"])
    made = told_recipe(wanted.model_dump_json(), lenient(Path("state"), data=HEARD, encoder="whisper-tiny.en")).task
    assert isinstance(made, SpeechSettings)
    assert made.model.encoder is None


def test_the_place_of_an_encoder_is_relative_to_the_policy(tmp_path: Path) -> None:
    for given, wanted in (("./own", str(tmp_path / "own")), ("minilm", "minilm"), ("owner/name", "owner/name")):
        assert lenient(Path("state"), encoder=given).resolved(tmp_path).encoder == wanted


def test_server_and_client_must_have_the_same_encoder() -> None:
    here, there = Identity("1", "r", "l", "a" * 32), Identity("1", "r", "l", "b" * 32)
    found = here.differs(there.facts())
    assert found is not None
    assert found[0] == refusals.ENCODER
    assert here.differs(here.facts()) is None
    assert Identity("1", "r", "l").differs({"version": "1", "recipe": "r", "layout": "l"}) is None


def test_the_server_hears_a_code_and_no_word_of_a_file(tmp_path: Path) -> None:
    """The first line of any file used to travel back in the text of the error."""
    secret = tmp_path / "secret.tsv"
    secret.write_text("the hospital's password is swordfish\n")
    document = recipe.load(
        "speech/embedded/federated", [f"task.corpus={{kind: tsv, file: {secret}}}", "task.start=null"]
    )
    for own in ({"kind": "folder", "folder": str(secret)}, {"kind": "table", "queries": str(secret)}, None):
        said = list[str]()
        client = Client(lenient(tmp_path / "state", data=own), [0], say=said.append)
        answer = client.answer(JOIN, Parcel({"told": document.model_dump_json(), "population": 12}))
        assert set(answer.facts) == {"users", "refuses"}
        assert answer.facts["refuses"] in MEANINGS
        assert "swordfish" not in repr(answer)
        assert said, "its owner hears why"


def test_an_error_that_travels_carries_a_code() -> None:
    from confide.deploy.node import reply_to
    from confide.deploy.wire import Incoming, frames
    from confide.errors import UserError

    class Failing:
        arrays = 0

        def __init__(self, error: Exception) -> None:
            self.error = error

        def answer(self, kind: str, parcel: Parcel) -> Parcel:
            raise self.error

    said = list[str]()
    asked = Incoming.begin(next(frames(1, "join", Parcel({}))), 0)
    for error, code in (
        (UserError("/home/me/notes.tsv: swordfish"), refusals.FAILED),
        (ValueError("swordfish"), refusals.FAILED),
        (RefusedByClient(refusals.NOISE, "swordfish"), refusals.NOISE),
    ):
        assert reply_to(asked, Failing(error), said.append) == (code, Parcel())
    assert all("swordfish" in text for text in said)
    assert refusals.meaning("rm -rf; swordfish") == "for a reason that is not known here"


def test_what_is_dropped_and_what_is_kept() -> None:
    kept = shape({"task": {"kind": "speech", "start": "x", "augment": None}, "local": 5, "description": "x", "new": 1})
    assert kept == {"task": {"kind": "speech", "augment": None}, "local": None}


@pytest.mark.parametrize("place", ["task.kind", "bounding.rule", "local.rates", "final.kind", "privacy.tensors"])
def test_no_line_of_what_an_owner_reads_is_forged_by_a_server(place: str, tmp_path: Path) -> None:
    """What is wrong with a recipe is shown with the values that are wrong, and those are the server's."""
    document = recipe.load("convex/digits").model_dump(mode="json")
    section, name = place.split(".")
    forged = "x\x1b[2J\nconnected to somebody else\r\u202e"
    document[section][name] = {"rates": {forged: 1}, "tensors": [forged]}.get(name, forged)
    said = list[str]()
    client = Client(lenient(tmp_path / "state"), [0], say=said.append)
    answer = client.answer(JOIN, Parcel({"told": json.dumps(document), "population": 12}))
    assert answer.facts["refuses"] == refusals.RECIPE
    assert said == ["the server's recipe cannot be read: there are control characters in it"]
