"""The port that strangers reach: nobody shuts it by standing in it, and it never takes the files that a run needs."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

from confide.deploy.deployment import say_places
from confide.deploy.gate import Limits, line_of
from support.loopback import Loopback
from support.streams import Streams


@contextmanager
def silent(address: tuple[str, int], number: int, sources: int = 1) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, from so many addresses of this machine."""
    with ExitStack() as held:
        own = [(f"127.0.0.{1 + n % sources}", 0) for n in range(number)]
        yield [held.enter_context(closing(socket.create_connection(address, source_address=one))) for one in own]


def ended(stranger: socket.socket) -> bool:
    stranger.settimeout(0.01)
    try:
        return stranger.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("limits", [Limits(from_address=8), Limits(in_all=8), Limits(admitted=8)])
def test_silent_connections_keep_nobody_out(limits: Limits, tmp_path: Path) -> None:
    """Behind one NAT, or after a restart of the server, strangers could hold every place that is not admitted."""
    with Streams(tmp_path, 1, limits) as here, silent((here.address.host, here.address.port), 8) as strangers:
        here.until(lambda: len(here.hub.gate.pairs) == 8)
        time.sleep(limits.settling)
        here.start("client-0")
        here.until(lambda: ended(strangers[0]))
        assert not ended(strangers[-1]), "the oldest goes, and nobody else"
        assert here.hub.meter.turned_away["too many connections"] == 1


def test_those_who_come_at_once_do_not_cut_each_other(tmp_path: Path) -> None:
    """A handshake takes a moment, and after an outage thousands come together."""
    with Streams(tmp_path, 1, Limits(from_address=4, settling=30)) as here:
        place = (here.address.host, here.address.port)
        with silent(place, 4) as first, silent(place, 4) as second:
            here.until(lambda: all(map(ended, second)))
            assert not any(map(ended, first))


def test_an_address_is_a_whole_line_with_ipv6() -> None:
    assert line_of("2001:db8:1:2:3:4:5:6") == line_of("2001:db8:1:2::9%eth0") == "2001:db8:1:2::/64"
    assert line_of("2001:db8:1:3::1") != line_of("2001:db8:1:2::1")
    assert line_of("::ffff:192.0.2.7") == line_of("192.0.2.7") == "192.0.2.7"
    assert line_of("?") == "?"


def _few_files(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


RECIPE = """\
task: {kind: convex/quadratics, users: 1, dimension: 6, rank: 3}
sampling: {kind: fixed, cohort: 1}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}
central: {kind: sgd, learning_rate: 0.1}
run: {steps: 100000}
"""


def test_connections_never_take_the_files_that_ledger_and_checkpoints_need(tmp_path: Path) -> None:
    """At the usual limit some 340 connections from six addresses took every file, and the run ended."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with Loopback(tmp_path, 1) as here:
        here.first = lambda name: (partial(_few_files, 300, 500),) if name == "server" else ()
        here.client(0, [0])
        here.serve(tmp_path / "recipe.yaml", "--minimum", 1)
        here.wait(lambda: here.steps() >= 1)
        with silent(("127.0.0.1", here.port), 340, sources=6):
            before = here.steps()
            here.wait(lambda: here.steps() > before + 5)
            assert here.server is not None
            assert here.server.is_alive(), here.log("server").read_text()
        assert "Too many open files" not in here.log("server").read_text()


def test_a_server_says_when_it_cannot_hold_those_whom_it_waits_for() -> None:
    said: list[str] = []
    say_places(100, None, 100, said.append)
    say_places(2, {"a": [0], "b": [1, 2, 3], "c": [4]}, 4, said.append)
    assert said == []
    say_places(2, {"a": [0], "b": [1, 2, 3], "c": [4]}, 5, said.append)
    say_places(100, None, 101, said.append)
    assert "hold 2 clients at once, who speak for 4 users" in said[0]
    assert "ulimit -n" in said[1]
