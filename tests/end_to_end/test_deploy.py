"""A federation of real processes on loopback: TLS, keys, a killed client, a killed server, and who is not let in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="deployment needs Flower: pip install 'confide[deploy]'")

from confide.engines.flower import keys
from confide.errors import UserError

RECIPE = """\
task: {kind: convex/quadratics, users: 3, dimension: 6, rank: 3}
sampling: {kind: poisson, cohort: 2}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: adam, learning_rate: 0.1}
run: {steps: 20}
"""
Confide = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def confide(tmp_path: Path) -> Iterator[Confide]:
    """`confide ...` as a process whose output goes to a file; none outlives the test."""
    begun: list[subprocess.Popen[str]] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CONFIDE_DRAW": "0"}

    def start(*words: object, log: str) -> subprocess.Popen[str]:
        with (tmp_path / log).open("a") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "confide", *map(str, words)], cwd=tmp_path, env=environment, text=True,
                stdout=file, stderr=file,
            )  # fmt: skip
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()


@contextmanager
def within(seconds: float, what: str, log: Path) -> Iterator[Callable[[], None]]:
    ends = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > ends:
            pytest.fail(f"{what} took more than {seconds} s:\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.05)

    yield check


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_federation_with_a_killed_client_and_a_killed_server(tmp_path: Path, confide: Confide) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    keys.make(tmp_path / "keys", 3, ["127.0.0.1"])
    port, run = free_port(), tmp_path / "run"
    serve = ("deploy", "server", "recipe.yaml", "--out", "run", "--keys", "keys", "--listen", f"127.0.0.1:{port}",
             "--deadline", 10, "--minimum", 0.3)  # fmt: skip

    def client(number: int) -> subprocess.Popen[str]:
        words = ("--server", f"127.0.0.1:{port}", "--ca", "keys/ca.pem", "--key", f"keys/client-{number}")
        return confide("deploy", "client", *words, "--user", number, log=f"client-{number}.log")

    clients = [client(number) for number in range(2)]
    server = confide(*serve, "--wait-for", 3, log="server.log")
    with within(400, "the start", tmp_path / "server.log") as check:
        while not listens(port) and server.poll() is None:
            check()
    # A stranger with a key of its own making, and the right certificate authority.
    keys.make(tmp_path / "strange", 1, ["127.0.0.1"])
    stranger = confide(
        "deploy", "client", "--server", f"127.0.0.1:{port}", "--ca", "keys/ca.pem", "--key", "strange/client-0",
        "--patience", 3, log="stranger.log",
    )  # fmt: skip
    assert stranger.wait(300) == 2
    assert "does not let this client in" in (tmp_path / "stranger.log").read_text()
    clients.append(client(2))
    with within(400, "two steps", tmp_path / "server.log") as check:
        while steps_of(run) < 2 and server.poll() is None:
            check()
    clients[2].kill()  # dies without a word, and comes back
    server.kill()
    server.wait()
    assert not (run / "summary.json").exists()
    clients[2] = client(2)
    server = confide(*serve, log="server.log")
    with within(400, "the rest", tmp_path / "server.log") as check:
        while server.poll() is None:
            check()
    log = (tmp_path / "server.log").read_text()
    assert server.returncode == 0, log
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["releases"] >= 20  # a step that was killed after its line is charged again
    for process in clients:
        process.send_signal(signal.SIGINT)
    assert [process.wait(300) for process in clients] == [0, 0, 0]


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
    for words, expected in (
        (("server", tiny, "--out", run), "give --keys FOLDER"),
        (("server", "--out", run, "--plain"), "--resume RUN"),
        (("server", tiny, "--out", run, "--plain"), "give --users"),
        (("server", tiny, "--out", run, "--keys", tmp_path), "federation.json does not exist"),
        (("server", tiny, "--out", run, "--keys", tmp_path / "keys", "--listen", "here"), "HOST:PORT"),
        (("client", "--plain", "--users", "0,0"), "expected different numbers"),
        (("client", "--ca", tmp_path / "keys" / "ca.pem"), "give --ca and --key"),
        (("client", tiny, "--plain", "--data", tmp_path), "has no data of one's own"),
        (("client", tiny, "--plain", "--users", "12"), "the recipe's corpus has users 0 to 11"),
        (("keys", tmp_path / "keys", "--clients", "1"), "keys are never overwritten"),
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
    from confide.engines.flower.node import Access, check_reachable
    from confide.engines.flower.superlink import Address

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
