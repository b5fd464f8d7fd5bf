"""A federation of real processes on loopback: TLS, keys, a killed client, a killed server, and who is not let in."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from confide.deploy import keys
from confide.errors import UserError
from confide.federated.parameters import Layout, flatten
from confide.privacy.budget import Budget
from confide.privacy.ledger import FILE, Ledger
from confide.recipe import load
from confide.run import Loop
from confide.runs import folder
from confide.runs.simulation import simulate
from support.loopback import Loopback, listens

RECIPE = """\
task: {kind: convex/quadratics, users: 3, dimension: 6, rank: 3}
sampling: {kind: poisson, cohort: 2}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: adam, learning_rate: 0.1}
run: {steps: 20}
"""


POLICY = """\
servers: [{address: 127.0.0.1:9}]
state: state
trust: central
noise_multiplier: 1
epsilon: 100
delta: 1.0e-5
population: {least: 1, most: 100}
rehearsal: true
"""


def written(place: Path, text: str = RECIPE) -> str:
    path = place / "recipe.yaml"
    path.write_text(text)
    return str(path)


def until(done: Callable[[], bool], log: Path, seconds: float = 400.0) -> None:
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.1)


def model_of(run: Path, layout: Layout) -> torch.Tensor:
    found = load_file(run / folder.MODEL)
    return flatten({name: found[name] for name in layout.names})


def run_three(
    place: Path, recipe: str, words: Sequence[object] = (), decided: Callable[[int], Any] = lambda n: {}
) -> Path:
    """The folder of a whole run with three clients of one user each; `decided` is in the policy of each."""
    with Loopback(place, 3) as here:
        for number in range(3):
            here.client(number, [number], *words, **decided(number))
        here.serve(recipe, "--wait-for", 3, "--minimum", 1)
        here.finish()
    return here.run


def check_same(run: Path, recipe: str) -> Loop:
    """The run has the ledger of one process, and its model to rounding.

    But for what made a step's bytes: a server trains nobody, so it has no kernel where one process has one.
    """
    alone, state = simulate(load(recipe))
    difference = model_of(run, alone.layout) - state.parameters
    assert float(difference.norm()) <= 1e-6 * float(state.parameters.norm())
    there, here = Ledger.read(run / FILE).entries, alone.ledger.entries
    assert [replace(entry, environment="") for entry in there] == [replace(entry, environment="") for entry in here]
    return alone


@pytest.mark.slow
def test_a_federation_with_a_killed_client_and_a_killed_server(tmp_path: Path) -> None:
    recipe, terms = written(tmp_path), ("--deadline", 10, "--minimum", 0.3)
    keys.make(tmp_path / "strange", 1, ["127.0.0.1"])
    with Loopback(tmp_path, 3) as here:
        clients = [here.client(number, [number]) for number in range(2)]
        here.serve(recipe, "--wait-for", 3, *terms)
        here.wait(lambda: listens(here.port))
        # A stranger with a key of its own making, and the right certificate authority.
        stranger = here.confide(
            "deploy", "client", "--server", f"127.0.0.1:{here.port}", "--ca", "keys/ca.pem", "--key",
            "strange/client-0", "--patience", 30, "--policy", here.policy(9), log="stranger",
        )  # fmt: skip
        stranger.join(300)
        assert stranger.exitcode == 2
        assert "does not let this client in" in here.log("stranger").read_text()
        clients.append(here.client(2, [2]))
        here.wait(lambda: here.steps() >= 2)
        clients[2].kill()  # dies without a word, and comes back
        assert here.server is not None
        here.server.kill()
        here.server.join()
        assert not (here.run / "summary.json").exists()
        clients[2] = here.client(2, [2])
        here.serve(recipe, *terms)
        here.finish()
        summary = json.loads((here.run / "summary.json").read_text())
        assert summary["steps"] == 20
        assert summary["releases"] >= 20  # a step that was killed after its line is charged again
        for process in clients:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
        for process in clients:
            process.join(300)
        assert [process.exitcode for process in clients] == [0, 0, 0]


def test_local_noise_over_the_network_gives_the_model_and_the_ledger_of_one_process(tmp_path: Path) -> None:
    recipe = written(tmp_path, RECIPE.replace("delta", "trust: local, delta").replace("steps: 20", "steps: 4"))
    run = run_three(tmp_path, recipe)
    alone = check_same(run, recipe)
    counts = [len(Budget.read(path).charges) for path in tmp_path.glob("state-*/budget.jsonl")]
    assert sum(counts) == sum(len(alone.plan.cohort(step)) for step in range(4))


@pytest.mark.slow
def test_a_client_refuses_over_the_network_what_is_below_its_policy(tmp_path: Path) -> None:
    """Its owner reads why, and the server a sentence of its own for a code."""
    recipe = written(tmp_path, RECIPE.replace("delta", "trust: local, source: system, delta").replace("20", "2"))
    with Loopback(tmp_path, 3) as here:
        for number in range(2):
            here.client(number, [number], trust="local", rehearsal=False)
        here.client(2, [2], trust="local", rehearsal=False, epsilon_round=1)
        here.serve(recipe, "--wait-for", 2, "--minimum", 0)
        here.finish()
        server, owners = here.log("server").read_text(), here.log("client-2").read_text()
    assert "was refused: an answer would cost more epsilon than its policy allows for a round" in server
    assert "above the policy's 1" not in server
    assert "refused: an answer costs epsilon" in owners
    assert "above the policy's 1" in owners
    assert not (tmp_path / "state-2").exists()
    counts = [len(Budget.read(path).charges) for path in tmp_path.glob("state-*/budget.jsonl")]
    assert all(count <= 2 for count in counts)


@pytest.mark.slow
def test_a_client_killed_in_a_round_of_distributed_trust_leaves_no_less_noise(tmp_path: Path) -> None:
    """Clients that hardly move make the model a sum of noises, whose deviation the ledger states."""
    text = RECIPE.replace("users: 3, dimension: 6", "users: 4, dimension: 2000").replace("cohort: 2", "cohort: 4")
    text = text.replace("delta", "trust: distributed, source: system, delta").replace("steps: 20", "steps: 4")
    text = text.replace("2, learning_rate: 0.1", "1, learning_rate: 1.0e-9").replace(
        "adam, learning_rate: 0.1", "sgd, learning_rate: 1"
    )
    recipe = written(tmp_path, text)
    with Loopback(tmp_path, 4) as here:
        for number in range(4):
            here.client(number, [number])
        here.serve(recipe, "--wait-for", 4, "--deadline", 10, "--tries", 9)
        here.wait(lambda: here.steps() >= 1)
        here.clients[3].kill()
        here.finish()
        said = here.log("server").read_text()
        assert "cohort 4, 3 in the sum, noise made for 3" in said, said
    spent, summary = folder.check_ledger(here.run), folder.summary_of(here.run)
    assert spent["steps"] == 4
    assert spent["releases"] >= 4  # a round that was abandoned has its line too
    assert spent["epsilon_server"] == spent["epsilon"]  # everybody is in every round
    still, start = simulate(load(recipe, ["run.steps=1", "central.learning_rate=1e-30"]))
    deviation = float((model_of(here.run, still.layout) - start.parameters).std()) / math.sqrt(4)  # of a step
    wanted = summary["noise_multiplier"] / 4  # z C w
    assert deviation == pytest.approx(math.sqrt(2) * wanted, rel=0.07), "twice the variance, with three as with four"


AUDITED = """\
task: {kind: convex/quadratics, users: 40, dimension: 400, rank: 3}
sampling: {kind: poisson, cohort: 12}
local: {steps: 1, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, target_epsilon: 2, delta: 1.0e-5, trust: TRUST}
central: {kind: sgd, learning_rate: 0.1}
run: {steps: 5}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trust", "broken"), [("central", "no-noise"), ("distributed", None), ("distributed", "cohort-variance")]
)
def test_the_audit_of_a_deployment_rings_for_what_is_broken_and_for_nothing_else(
    trust: str, broken: str | None, tmp_path: Path
) -> None:
    """Server and clients are processes; with secure aggregation the clients' own noise is audited."""
    words = ["audit", written(tmp_path, AUDITED.replace("TRUST", trust)), "--deployed", "2", "--canaries", "40"]
    smoke = ["--no-power"] if broken is None else ["--break", broken]
    done = subprocess.run(
        [sys.executable, "-m", "confide", *words, *smoke, "--json"], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == (0 if broken is None else 1), done.stderr
    found = json.loads(done.stdout)
    assert found["canaries"] == 40
    assert (found["lower_bound"] > found["claimed"]) == (broken == "no-noise")
    assert (found["cohort_chance"] < 0.001) == (broken == "cohort-variance")


def test_a_deployed_audit_refuses_what_it_cannot_be_asked_for(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = written(tmp_path, AUDITED.replace("TRUST", "central"))
    for setting, expected in (
        ("privacy.trust=local", "leave --deployed out"),
        ("privacy.placement=client", "use placement: sum"),
        ("users={weights: examples, public: true}", "use uniform"),
    ):
        code, _, said = command("audit", recipe, "--deployed", "2", "--set", setting)
        assert code == 2, said
        assert expected in said


SPEECH = """\
task:
  kind: speech
  corpus: {kind: folder, folder: PLACE/all}
  test: {kind: folder, folder: PLACE/all}
  model: {layers: 1, width: 16, mlp: 32, heads: 2}
  cache: PLACE/features
sampling: {kind: poisson, cohort: 2}
local: {steps: 2, batch_seconds: 2, learning_rate: 0.1, gradient_clip: 1}
bounding: {rule: clip, bound: 0.01}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: lamb, learning_rate: 0.01}
evaluation: {every: 20}
run: {steps: 20}
"""
PARTS = """\
task:
  kind: speech
  corpus: {kind: folder, folder: PLACE/all}
  test: {kind: folder, folder: PLACE/all}
  model: {encoder: {source: SPEECH, train: [head, lora, norms], first: 1, rank: 2}}
  cache: PLACE/states
sampling: {kind: poisson, cohort: 2}
local: {steps: 1, learning_rate: 1, rates: {"*.lora_?": 0.1}}
bounding: {rule: normalise, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: sgd, learning_rate: 1, schedule: {kind: linear, steps: 4}}
run: {steps: 4}
"""
RETRIEVAL = """\
task:
  kind: retrieval
  encoder: {source: ENCODER, pooling: mean}
  data: {kind: table, queries: PLACE/all.csv, documents: PLACE/documents.csv, test: PLACE/all.csv, client_column: who}
  clients: {kind: column}
  method: adapter_head
  cache: PLACE/states
sampling: {kind: fixed, cohort: 3}
local: {epochs: 1, batch_size: 2, learning_rate: 0.1, gradient_clip: 1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}
central: {kind: sgd, learning_rate: 1}
evaluation: {every: 20}
run: {steps: 5}
"""


def speech_of_three(place: Path) -> str:
    """Folders of speech for three clients, and all of it in one place."""
    draw = np.random.default_rng(0)
    for number, word in enumerate(("one two", "three", "four five six")):
        own = place / f"data-{number}" / f"speaker-{number}"
        own.mkdir(parents=True)
        for utterance in range(4):
            (own / f"{utterance}.txt").write_text(word)
            soundfile.write(own / f"{utterance}.wav", draw.uniform(-0.1, 0.1, 8_000 + 1_000 * utterance), 16_000)
        shutil.copytree(own, place / "all" / own.name)
    return SPEECH


def encoded_speech_of_three(place: Path) -> str:
    """The same, for parts on a frozen encoder that each client brings."""
    speech_of_three(place)
    return PARTS


def encoded(train: str) -> Callable[[Path], str]:
    """The same for other parts, in one step."""

    def make(place: Path) -> str:
        text = encoded_speech_of_three(place).replace("train: [head, lora, norms]", f"train: {train}")
        text = (
            text.replace(", rank: 2", "")
            .replace("cohort: 2", "cohort: 3")
            .replace("run: {steps: 4}", "run: {steps: 1}")
        )
        text = text.replace(", first: 1", "") if train == "[head]" else text
        return (
            text.replace(', rates: {"*.lora_?": 0.1}', "")
            .replace("kind: poisson", "kind: fixed")
            .replace("delta: 1.0e-5", "delta: 1.0e-5, accountant: rdp")
        )

    return make


def queries_of_three(place: Path) -> str:
    """A file of queries for each of three clients, all of them in one file, and the documents."""
    (place / "documents.csv").write_text("id,text\na,reset the device\nb,the red light\nc,open the door\n")
    everybody = "query,document,who\n"
    for number in range(3):
        rows = [
            (f"query {word} {number}", document) for word, document in (("red", "b"), ("door", "c"), ("device", "a"))
        ]
        (place / f"data-{number}.csv").write_text("query,document\n" + "".join(f"{q},{d}\n" for q, d in rows))
        everybody += "".join(f"{q},{d},{number}\n" for q, d in rows)
    (place / "all.csv").write_text(everybody)
    return RETRIEVAL


def speech_data(number: int) -> dict[str, Any]:
    return {"data": {"kind": "folder", "folder": f"data-{number}"}}


def queries_data(number: int) -> dict[str, Any]:
    return {"data": {"kind": "table", "queries": f"data-{number}.csv", "documents": "documents.csv"}}


@pytest.mark.parametrize(
    ("make", "data", "told"),
    [
        *(pytest.param(speech_of_three, speech_data, told, marks=pytest.mark.slow) for told in (False, True)),
        *(pytest.param(encoded_speech_of_three, speech_data, told, marks=pytest.mark.slow) for told in (False, True)),
        *(
            pytest.param(encoded(train), speech_data, True, marks=pytest.mark.slow, id=train)
            for train in ("[head]", "[head, adapter]", "[head, all]")
        ),
        (queries_of_three, queries_data, False),
        (queries_of_three, queries_data, True),
    ],
)
def test_clients_with_data_of_their_own_make_the_model_of_one_process(
    make: Callable[[Path], str],
    data: Callable[[int], dict[str, Any]],
    told: bool,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    tiny_speech_model: Callable[[str], Path],
) -> None:
    """With a copy of the recipe, and with what a server may tell of it."""
    reads, hears = str(tiny_model("masked")), str(tiny_speech_model("whisper"))
    text = make(tmp_path).replace("PLACE", str(tmp_path)).replace("ENCODER", reads).replace("SPEECH", hears)
    recipe, encoder = written(tmp_path, text), reads if "retrieval" in text else hears
    words = () if told else (recipe,)
    check_same(run_three(tmp_path, recipe, words, lambda number: data(number) | {"encoder": encoder}), recipe)


def test_a_port_in_use_and_bad_options_say_what_to_do(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], tiny: str
) -> None:
    keys.make(tmp_path / "keys", 12, ["127.0.0.1"])
    run = tmp_path / "run"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, _, said = command(
            "deploy", "server", tiny, "--out", run, "--keys", tmp_path / "keys", "--listen", address
        )
        assert code == 2
        assert "choose another --listen address" in said
    assert not run.exists()
    (tmp_path / "policy.yaml").write_text(POLICY)
    policy = ("--plain", "--server", "127.0.0.1:9", "--policy", tmp_path / "policy.yaml")
    for words, expected in (
        (("server", tiny, "--out", run), "give --keys FOLDER"),
        (("server", "--out", run, "--plain"), "--resume RUN"),
        (("server", tiny, "--out", run, "--plain"), "give --users"),
        (("server", tiny, "--out", run, "--keys", tmp_path), "federation.json does not exist"),
        (("server", tiny, "--out", run, "--keys", tmp_path / "keys", "--listen", "here"), "HOST:PORT"),
        (("client", "--plain", "--users", "0,0"), "expected different numbers"),
        (("client", "--ca", tmp_path / "keys" / "ca.pem"), "give --ca and --key"),
        (("client", tiny, "--plain"), "confide deploy client --init"),
        (("client", tiny, *policy, "--server", "127.0.0.1:8"), "does not name the server 127.0.0.1:8"),
        (("client", tiny, *policy, "--users", "12"), "the recipe's corpus has users 0 to 11"),
        (("keys", "make", tmp_path / "keys", "--clients", "1"), "keys are never overwritten"),
    ):
        code, _, said = command("deploy", *words)
        assert code == 2, words
        assert expected in said, words


def test_an_expired_certificate_and_a_server_that_cannot_be_trusted(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], tiny: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    keys.make(old, 12, ["127.0.0.1"], days=-1)
    keys.make(new, 12, ["127.0.0.1"])
    code, _, said = command(
        "deploy", "server", tiny, "--out", tmp_path / "run", "--keys", old, "--listen", "127.0.0.1:1234"
    )
    assert code == 2
    assert "expired on" in said
    import ssl
    import threading

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(new / keys.SERVER, new / keys.SERVER_KEY)
    from confide.deploy.address import Access, Address
    from confide.deploy.node import check_reachable

    other = tmp_path / "other"
    keys.make(other, 1, ["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for secure in (True, True, False):
                plain, _ = listening.accept()
                try:
                    if secure:
                        context.wrap_socket(plain, server_side=True).close()
                    else:
                        plain.sendall(b"220 something else\r\n")
                        plain.close()
                except OSError:
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        here = Address("127.0.0.1", listening.getsockname()[1])
        check_reachable(Access(here, new / keys.CA, None))
        with pytest.raises(UserError, match="is not trusted"):
            check_reachable(Access(here, other / keys.CA, None))
        with pytest.raises(UserError, match="does not speak TLS"):
            check_reachable(Access(here, new / keys.CA, None))
        thread.join(10)


def test_a_machine_whose_clock_is_hours_behind_takes_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(tmp_path / "keys", 1, ["127.0.0.1"])

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=20)

    monkeypatch.setattr(keys, "datetime", Behind)
    for name in (keys.CA, keys.SERVER, "client-0"):
        keys.check_certificate(tmp_path / "keys" / name)


def test_keys_are_for_their_owner_alone_and_name_one_client_for_each_user(tmp_path: Path) -> None:
    made = keys.make(tmp_path / "keys", 3, ["server.example", "10.0.0.1"], users=7)
    assert [node.users for node in made.nodes] == [(0, 3, 6), (1, 4), (2, 5)]
    assert keys.read(tmp_path / "keys") == made
    for secret in ("ca.key", "server.key", "client-0"):
        assert (tmp_path / "keys" / secret).stat().st_mode & 0o077 == 0
    path = tmp_path / "keys" / keys.FEDERATION
    document = json.loads(path.read_text())
    document["nodes"][1]["users"] = [0, 4]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="one node each"):
        keys.read(tmp_path / "keys")
