"""A deployment goes on through outages, restarts, revoked keys and strangers at its port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

from confide.deploy import keys
from confide.privacy.ledger import FILE, Ledger
from confide.runs import checkpoint
from support.loopback import Loopback, free_port

RECIPE = """\
task: {kind: convex/quadratics, users: 3, dimension: 6, rank: 3}
sampling: {kind: fixed, cohort: 3}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: TRUST}
central: {kind: sgd, learning_rate: 0.1}
run: {steps: STEPS}
"""


def written(place: Path, trust: str = "central", steps: int = 30) -> str:
    path = place / "recipe.yaml"
    path.write_text(RECIPE.replace("TRUST", trust).replace("STEPS", str(steps)))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "trust"), [("killed", "central"), ("killed", "distributed"), ("frozen", "central")])
def test_an_outage_of_all_clients_neither_ends_a_run_nor_costs_a_step(how: str, trust: str, tmp_path: Path) -> None:
    """They are gone and come back, or their connections stay and nothing comes, for longer than a deadline."""
    with Loopback(tmp_path, 3) as here:
        for number in range(3):
            here.client(number, [number])
        deadline = 20 if how == "killed" else 6
        here.serve(written(tmp_path, trust, 150), "--wait-for", 3, "--minimum", 1, "--deadline", deadline)
        here.wait(lambda: here.steps() >= 2)
        for client in here.clients.values():
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        time.sleep(1.5 if how == "killed" else 8)
        assert here.server is not None
        assert here.server.is_alive(), here.log("server").read_text()
        for number, client in list(here.clients.items()):
            if how == "killed":
                client.join()
                here.client(number, [number])
            else:
                os.kill(client.pid or 0, signal.SIGCONT)
        here.finish()
        said = here.log("server").read_text()
    entries = Ledger.read(here.run / FILE).entries
    assert len({entry.step for entry in entries}) == 150
    assert how == "killed" or "asking again" in said
    # Whoever was asked may have answered; a step for which nobody was there has no line.
    assert len(entries) <= (150 if trust == "central" else 151), said


@pytest.mark.slow
def test_wrong_keys_and_a_second_server_cost_a_run_nothing_and_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with Loopback(tmp_path, 3) as here:
        recipe = written(tmp_path, steps=100_000)
        serving = (recipe, "--wait-for", 2, "--minimum", 0.3, "--deadline", 20)
        for number in range(2):
            here.client(number, [number])
        here.serve(*serving)
        here.wait(lambda: here.steps() >= 2)
        other = here.confide(
            "deploy", "server", recipe, "--out", here.run, "--keys", "keys", "--listen", f"127.0.0.1:{free_port()}",
            log="second",
        )  # fmt: skip
        place, tls = (
            ("deploy", "client", "--server", f"127.0.0.1:{here.port}", "--patience", 3),
            ("--ca", "keys/ca.pem"),
        )
        strangers = {
            "authority": here.confide(*place, *tls, "--key", "keys/ca.key", "--policy", here.policy(7), log="ca"),
            "plain": here.confide(
                *place, "--plain", "--policy", here.policy(8, servers=[{"address": f"127.0.0.1:{here.port}"}]),
                log="plain",
            ),
        }  # fmt: skip
        posing = here.confide(
            *place, *tls, "--key", "keys/client-2", "--user", 0, "--policy", here.policy(9), log="posing"
        )
        first = here.clients.pop(0)
        here.client(0, [0])  # with the key that the first one is using
        for process in (other, *strangers.values(), first):
            process.join(120)
            assert process.exitcode == 2
        assert "another process is working in" in here.log("second").read_text()
        assert "ca.key is not a certificate" in here.log("ca").read_text()
        assert "no server at" in here.log("plain").read_text()
        assert "another client uses its key" in here.log("client-0").read_text()
        here.wait(lambda: "its key is registered for [2]" in here.log("server").read_text())
        assert posing.is_alive()
        before = here.steps()
        here.wait(lambda: here.steps() > before + 3)
        server = here.server
        assert server is not None
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        server.join(60)
        assert server.exitcode == 130
        assert "stopped after step" in here.log("server").read_text()
        stopped = checkpoint.load(here.run)
        assert stopped.state.step == stopped.ledger_count == Ledger.read(here.run / FILE).count == here.steps()
        here.serve(*serving)
        here.wait(lambda: here.steps() > stopped.state.step)
        assert len({entry.step for entry in Ledger.read(here.run / FILE).entries}) >= stopped.state.step


@pytest.mark.slow
def test_a_revoked_key_is_cut_while_it_is_connected(tmp_path: Path) -> None:
    with Loopback(tmp_path, 3) as here:
        for number in range(3):
            here.client(number, [number])
        here.serve(written(tmp_path, steps=100_000), "--wait-for", 3, "--minimum", 0.5)
        here.wait(lambda: here.steps() >= 1)
        keys.revoke(tmp_path / "keys", "client-1")
        revoked = here.clients.pop(1)
        revoked.join(20)
        assert revoked.exitcode == 2, here.log("client-1").read_text()
        assert "does not let this client in" in here.log("client-1").read_text()
        before = here.steps()
        here.wait(lambda: here.steps() > before)  # the others go on


def test_local_trust_with_several_users_to_a_client_finishes_without_tls_and_cannot_be_resumed_elsewhere(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = written(tmp_path, "local", 60)
    with Loopback(tmp_path, 1) as here:
        plain = {"servers": [{"address": f"127.0.0.1:{here.port}"}]}

        def client() -> None:
            here.clients[0] = here.confide(
                "deploy", "client", "--plain", "--server", f"127.0.0.1:{here.port}", "--users", "0,1,2", "--policy",
                here.policy(0, **plain), log="client-0",
            )  # fmt: skip

        def serve() -> None:
            here.server = here.confide(
                "deploy", "server", recipe, "--out", here.run, "--plain", "--users", 3, "--listen",
                # None has to answer: what was asked for twice is spent, and missing at the end.
                f"127.0.0.1:{here.port}", "--minimum", 0, "--wait-for", 3, log="server",
            )  # fmt: skip

        client()
        serve()
        here.wait(lambda: here.steps() >= 1)
        assert here.server is not None
        here.server.kill()
        here.server.join()
        code, _, said = command("resume", here.run)
        assert code == 2
        assert "confide deploy server --resume" in said
        before = here.steps()
        serve()
        here.wait(lambda: here.steps() > before)
        first = here.clients[0]
        first.kill()
        first.join()
        client()  # taken back at once
        here.finish()
    assert len({entry.step for entry in Ledger.read(here.run / FILE).entries}) == 60


@pytest.mark.slow
def test_strangers_at_the_port_neither_stop_a_round_nor_stay(tmp_path: Path) -> None:
    """Silent and dripping connections, garbage, TLS without a certificate, more of them than are allowed."""
    with Loopback(tmp_path, 3) as here:
        for number in range(3):
            here.client(number, [number])
        here.serve(written(tmp_path, steps=100_000), "--wait-for", 3, "--minimum", 1, "--deadline", 20)
        here.wait(lambda: here.steps() >= 1)
        place = ("127.0.0.1", here.port)
        held = [socket.create_connection(place) for _ in range(200)]
        for number, each in enumerate(held):
            with contextlib.suppress(OSError):
                each.sendall((b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n", b"", os.urandom(500))[number % 4])
        context = ssl._create_unverified_context()
        context.set_alpn_protocols(["h2"])
        before = here.steps()
        here.wait(lambda: here.steps() > before + 3)
        assert here.server is not None
        assert here.server.is_alive()
        open_still = 0
        for each in held:
            each.settimeout(0.01)
            try:
                open_still += each.recv(1 << 16) != b""
            except TimeoutError:
                open_still += 1
            except OSError:
                pass
        assert open_still <= 64
        time.sleep(16)
        for each in held[:64]:
            each.settimeout(1)
            with pytest.raises((OSError, AssertionError)):
                assert each.recv(1 << 16), "ended"
        for each in held:
            each.close()
        content = b"?"
        with socket.create_connection(place) as plain, contextlib.suppress(OSError):
            content = context.wrap_socket(plain).recv(1)  # the handshake ends before the server has seen that there is
        assert content in (b"", b"?"), "no HTTP/2 without a certificate"
        here.server.kill()
        for client in here.clients.values():
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)
