"""What both services rely on: nobody holds the server up, whether by silence, slowness, size or number."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from confide.errors import UserError
from confide.web import answers
from confide.web import server as web
from confide.web.address import is_loopback, listen
from confide.web.answers import Json, application, read_body, route
from confide.web.server import WebServer

LARGE = 2**26  # bytes, more than the buffers of a connection hold


async def _echo(request: Request) -> Response:
    return Response(await read_body(request, 1000))


def _large(request: Request) -> Response:
    return Response(bytes(LARGE))


def _slow(request: Request) -> Response:
    time.sleep(0.6)
    return Response("done")


def _fail(request: Request) -> Response:
    raise KeyError("a secret of the program")


@contextmanager
def _serving() -> Iterator[WebServer]:
    def check(request: Request) -> None:
        if "X-Refuse" in request.headers:
            raise HTTPException(403, "as asked")

    routes = [route("POST", "/echo", _echo)]
    routes += [route("GET", path, end) for path, end in (("/large", _large), ("/slow", _slow), ("/fail", _fail))]
    server = WebServer(application(routes, check, {}, {"X-Every": "answer"}), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server that loses its patience after 0.2 s."""
    monkeypatch.setattr(answers, "IDLE", 0.2)
    with _serving() as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with _serving() as made:
        yield made


def _ask(
    server: WebServer, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    connection.request(method, path, body or None, dict(headers or {}))
    answer = connection.getresponse()
    assert answer.headers["X-Every"] == "answer"
    content = answer.read()
    connection.close()
    return answer.status, content


def _is_closed(line: socket.socket) -> bool:
    """Whether the server ends the connection, and not only after the minute that it waits for the silent by default."""
    line.settimeout(30)
    try:
        while line.recv(2**20):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def _sent_until_closed(line: socket.socket, part: bytes, pause: float) -> int:
    """How many parts could be sent before the server closed the connection, of 100."""
    for count in range(100):
        try:
            line.sendall(part)
        except OSError:
            return count
        time.sleep(pause)
    return 100


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /slow HT", b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12"],
    ids=["nothing", "half a header", "half a body"],
)
def test_a_client_that_falls_silent_is_cut_off(hasty: WebServer, said: bytes) -> None:
    with socket.create_connection(hasty.address) as line:
        line.sendall(said)
        assert _is_closed(line)
    assert _ask(hasty, "GET", "/slow") == (200, b"done")  # a long computation is not silence of the client


def test_headers_that_trickle_do_not_keep_a_connection(hasty: WebServer) -> None:
    with socket.create_connection(hasty.address) as line:
        assert _sent_until_closed(line, b"G", 0.05) < 100


def test_a_client_that_does_not_take_its_answer_is_cut_off(hasty: WebServer) -> None:
    with socket.create_connection(hasty.address) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        deadline = time.monotonic() + 10
        while not hasty.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        while hasty.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not hasty.server_state.connections


def test_a_body_that_comes_too_slowly_is_refused(hasty: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SLOWEST", 1e9)
    monkeypatch.setattr(answers, "_DISCARDING", 0.05)
    with socket.create_connection(hasty.address) as line:
        line.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(6):  # never silent, never done
            line.sendall(b"x")
            time.sleep(0.05)
        assert line.recv(2**16).startswith(b"HTTP/1.1 408 ")


def test_too_many_connections_get_503_and_far_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTIONS", 3)
    with _serving() as server, ExitStack() as held:
        for _ in range(4):
            held.enter_context(socket.create_connection(server.address))
        busy = http.client.HTTPConnection(*server.address, timeout=20)
        busy.request("GET", "/slow")
        assert busy.getresponse().status == 503
        busy.close()
        lines = [held.enter_context(socket.create_connection(server.address)) for _ in range(4)]
        assert _is_closed(lines[-1])
        assert len(server.server_state.connections) <= 6


def test_bodies_that_are_large_chunked_or_cut_short_are_refused(server: WebServer) -> None:
    assert _ask(server, "POST", "/echo", b"x" * 1000) == (200, b"x" * 1000)
    for body, headers, status in ((b"x" * 10**7, {}, 413), (b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}, 411)):
        found, said = _ask(server, "POST", "/echo", body, headers)
        assert (found, "expected" in json.loads(said)["error"]) == (status, True)
    with socket.create_connection(server.address) as line:
        line.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12")
    assert _ask(server, "POST", "/echo", b"next") == (200, b"next")


def test_headers_have_a_limit(server: WebServer) -> None:
    with socket.create_connection(server.address) as line:
        line.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\nX: ")
        assert 15 <= _sent_until_closed(line, b"x" * 2**12, 0.01) < 100


def test_every_error_is_json_and_tells_nothing_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    with _serving() as server:
        for method, path, headers, status in (
            ("GET", "/nothing", {}, 404), ("GET", "/nothing", {"Host": "[::"}, 404), ("GET", "/echo", {}, 405),
            ("HEAD", "/slow", {}, 405), ("GET", "/nothing", {"X-Refuse": "1"}, 403), ("GET", "/fail", {}, 500),
        ):  # fmt: skip
            found, said = _ask(server, method, path, headers=headers)
            assert found == status
            assert b"secret" not in said
            assert method == "HEAD" or len(json.loads(said)["error"]) > 5
    assert "a secret of the program" in caplog.text


def test_what_is_no_http_is_refused_in_json(server: WebServer) -> None:
    with socket.create_connection(server.address) as line:
        line.sendall(b"NONSENSE\r\n\r\n")
        head, _, body = line.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]


def test_stopping_lets_a_request_finish_and_drops_the_idle(server: WebServer) -> None:
    with _serving() as other:
        idle = http.client.HTTPConnection(*other.address, timeout=20)
        idle.request("POST", "/echo", b"x")
        idle.getresponse().read()
        late = http.client.HTTPConnection(*other.address, timeout=20)
        late.request("GET", "/slow")
        time.sleep(0.2)
        other.stop()
        assert late.getresponse().read() == b"done"
        assert idle.sock is not None
        assert _is_closed(idle.sock)
    idle.close()
    late.close()


def test_an_address_that_cannot_be_listened_on_is_a_mistake(server: WebServer) -> None:
    for host, port in (server.address, ("127.0.0.1", 99_999), ("192.0.2.1", 0), ("no.such.host.invalid", 0)):
        with pytest.raises(UserError, match=r"cannot listen on .*choose another --port"):
            listen(host, port)


def test_small_answers_are_not_held_back() -> None:
    with _serving() as server:
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        connection.request("POST", "/echo", b"x")
        connection.getresponse().read()
        (held,) = server.server_state.connections
        assert held.transport is not None
        assert held.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()


def test_names_that_are_not_utf8_can_be_sent() -> None:
    assert json.loads(bytes(Json({"name": "run-\udcff"}).body)) == {"name": "run-\udcff"}


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    strangers = ("0.0.0.0", "10.0.0.1", "::", "example.org", "127.0.0.1.evil.example", "localhost.example")
    assert not any(map(is_loopback, strangers))


def test_help_loads_no_framework() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from confide.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print([n for n in ('starlette', 'uvicorn', 'httpx') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_refused_request_is_answered_though_its_body_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_DISCARDING", 0.05)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"x", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    answer = asyncio.run(answers.refuse(request, HTTPException(403, "no")))
    assert (answer.status_code, answer.headers["Connection"]) == (403, "close")
