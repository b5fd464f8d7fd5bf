"""Claims about recipes in a deployment: which are refused, and what a client never takes from a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from confide import recipe
from confide.errors import UserError

pytest.importorskip("flwr", reason="deployment needs the extra deploy")

from confide.deploy.client import RefusedByClient
from confide.deploy.deployment import _told, check_deployable


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["privacy={mechanism: partial, tensors: [weight], noise_multiplier: 1}"], "without a guarantee"),
        (["privacy.placement=client"], "trust: distributed or trust: local"),
        (
            ["bounding={rule: clip, bound: 1, adaptive: {kind: car}}", "privacy={mechanism: none}"],
            "kind=car: needs every client's raw norm",
        ),
        (["privacy.trust=distributed", "users={weights: examples, public: true}"], "uniform weights"),
    ],
)
def test_what_cannot_be_kept_when_users_are_elsewhere_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_deployable(recipe.load("convex/digits", sets))


def test_an_ordinary_recipe_is_taken_by_server_and_client() -> None:
    for name in ("convex/digits", "retrieval/embedded"):
        wanted = recipe.load(name)
        check_deployable(wanted)
        assert _told(wanted.model_dump_json(), data=None) == wanted


@pytest.mark.parametrize("data", [None, Path("queries.csv")])
def test_a_client_never_runs_code_that_a_server_names(data: Path | None) -> None:
    hostile = recipe.load("convex/digits", ["task={kind: python, factory: 'os:system', options: {command: id}}"])
    with pytest.raises(RefusedByClient, match=r"code of its choice here \(task.factory=os:system\)"):
        _told(hostile.model_dump_json(), data)
    rule = recipe.load("convex/digits", ["bounding={rule: python, function: 'os:system', bound: 1}"])
    with pytest.raises(RefusedByClient, match=r"code of its choice here \(bounding.function=os:system\)"):
        _told(rule.model_dump_json(), data)
    corpus = "task.corpus={kind: python, factory: 'os:system'}"
    other = recipe.load("speech/embedded/federated", [corpus, "task.start=null"])
    with pytest.raises(RefusedByClient, match=r"code of its choice here \(task.corpus.factory=os:system\)"):
        _told(other.model_dump_json(), data)


@pytest.mark.parametrize(
    ("name", "sets", "named"),
    [
        ("speech/embedded/federated", ["task.corpus={kind: tsv, file: notes.tsv}"], "task.corpus.file, task.start"),
        ("speech/embedded/federated", ["task.corpus={kind: folder, folder: /home/me}"], "task.corpus.folder"),
        ("speech/embedded/federated", ["task.start=null", "task.cache=/home/me"], "task.cache"),
        (
            "speech/embedded/federated",
            ["task.start=null", "task.test={kind: librispeech, subset: ../x}"],
            "test.subset",
        ),
        ("retrieval/sms-head", ["task.data={kind: sms_spam, file: /etc/passwd}"], "task.data.file"),
        ("retrieval/sms-head", ["task.data={kind: ag_news, train: /etc/passwd}"], "task.data.train"),
        ("retrieval/embedded", ["task.encoder.source=/home/me/model"], "task.encoder.source"),
        ("convex/digits", ["task.folder=/home/me"], "task.folder"),
    ],
)
def test_a_client_never_reads_or_writes_files_that_a_server_names(name: str, sets: list[str], named: str) -> None:
    with pytest.raises(RefusedByClient, match=rf"names files of this machine \(.*{named}"):
        _told(recipe.load(name, sets).model_dump_json(), data=None)


def test_a_client_with_data_of_its_own_forgives_only_the_names_that_its_data_replace() -> None:
    speech = recipe.load("speech/embedded/federated", ["task.corpus={kind: tsv, file: notes.tsv}"])
    assert _told(speech.model_dump_json(), data=Path("mine")) == speech
    table = ["task.data={kind: table, queries: all.csv}", "task.clients={kind: even, clients: 20}"]
    queries = recipe.load("retrieval/embedded", table)
    assert _told(queries.model_dump_json(), data=Path("mine.csv")) == queries
    documents = recipe.load("retrieval/embedded", [*table, "task.data.documents=/etc/passwd"])
    with pytest.raises(RefusedByClient, match=r"machine \(task.data.documents\)"):
        _told(documents.model_dump_json(), data=Path("mine.csv"))


@pytest.mark.parametrize("data", [None, Path("queries.csv")])
def test_a_client_never_sends_its_texts_to_an_encoder_that_a_server_names(data: Path | None) -> None:
    table = ["task.data={kind: table, queries: all.csv}"] if data else []
    far = recipe.load("retrieval/embedded", [*table, "task.encoder.source=https://evil.example:1"])
    with pytest.raises(RefusedByClient, match=r"send this client's texts to https://evil\.example:1"):
        _told(far.model_dump_json(), data)


def test_a_servers_recipe_that_is_none_is_refused_in_our_words() -> None:
    for text in ("[", "5", "{}", '{"task": {"kind": "convex/digit"}}'):
        with pytest.raises(RefusedByClient, match="the server's recipe"):
            _told(text, data=None)
