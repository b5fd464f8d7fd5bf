"""One client with a key of the federation cannot keep the streams of the others waiting."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

import grpc
import msgpack

from confide.deploy import hub, keys, node
from confide.deploy.address import Access, Address
from confide.deploy.gate import Limits
from confide.deploy.parcels import Parcel
from confide.deploy.wire import METHOD, SERVICE, Incoming, frames
from confide.errors import UserError
from support.loopback import free_port
from support.streams import Echo, Streams


async def _admitted(here: Streams, name: str) -> tuple[Any, Any]:
    """A stream of this client's own, past its hello."""
    channel = node._channel(here.access(name))
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    for frame in frames(0, "hello", Parcel()):
        await call.write(frame)
    await call.initial_metadata()
    return channel, call


def test_who_answers_what_nobody_asked_is_cut(tmp_path: Path) -> None:
    """Else a flood of heads of 2 MiB, each of which is read, would take the one thread that serves all streams."""

    async def flood() -> tuple[int, str]:
        channel, call = await _admitted(here, "client-0")
        sent = 0
        try:
            while sent < 500:
                for frame in frames(7, "failed", Parcel()):
                    await call.write(frame)
                sent += 1
                await asyncio.sleep(0.01)
            return sent, "taken"
        except (grpc.RpcError, asyncio.InvalidStateError):
            return sent, str(await call.code())
        finally:
            await channel.close()

    with Streams(tmp_path, 1) as here:
        sent, end = here.run(flood()).result(30)
        assert end == "StatusCode.INVALID_ARGUMENT"
        assert sent < 100


def test_a_client_that_cannot_reach_its_server_says_why_and_says_it_once(tmp_path: Path) -> None:
    """Else a name that is not known, or a closed port, is an hour of silence."""
    keys.make(tmp_path / "keys", 1, ["127.0.0.1"])
    access = Access(Address("127.0.0.1", free_port()), tmp_path / "keys" / keys.CA, tmp_path / "keys" / "client-0")
    said: list[str] = []
    with pytest.raises(UserError, match="no server at"):
        asyncio.run(node.live(access, Echo(), 1.5, said.append))
    assert len(said) == 1
    assert "refused" in said[0]


def test_a_hub_that_closes_ends_its_streams_before_its_loop(tmp_path: Path) -> None:
    """Else each stream ends with a traceback on the server's standard error."""
    with Streams(tmp_path, 3) as here:
        for number in range(3):
            here.start(f"client-{number}")
        here.hub.close()
        assert not asyncio.all_tasks(here.hub._loop)
        assert here.hub._loop.is_closed()


@pytest.mark.parametrize(("kind", "code"), [("train", ""), ("masked", "its connection was lost")])
def test_an_answer_has_a_head_as_long_as_its_question_needs(
    kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of two megabytes may take seventy times as much once it is read."""
    size = 60_000 if not code else 200_000
    monkeypatch.setattr(Echo, "answer", lambda self, kind, parcel: Parcel({"x": bytes(size)}))
    with Streams(tmp_path, 1) as here:
        here.start("client-0")
        assert [reply.error for reply in here.replies(*here.hub.ask(kind, [("client-0", Parcel())], 10))] == [code]
        here.until(lambda: here.hub.meter.turned_away["malformed"] == bool(code))


def test_a_late_answer_to_a_question_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(Echo, "answer", lambda self, kind, parcel: late.wait(20) and parcel)
    with Streams(tmp_path, 1) as here:
        here.start("client-0")
        assert here.ask("client-0", seconds=2) == []
        late.set()
        assert [reply.parcel is not None for reply in here.ask("client-0")] == [True]
        assert not any("away" in said for said in here.said)


async def _drip(here: Streams, begun: asyncio.Event, pause: float) -> None:
    """Be client-0, and answer one part of an array after the other."""
    channel, call = await _admitted(here, "client-0")
    try:
        while True:
            asked = Incoming.begin(await call.read(), 1 << 26)
            while not asked.complete:
                asked.add(await call.read())
            for frame in frames(asked.ticket, "", asked.parcel):
                await call.write(frame)
                begun.set()
                await asyncio.sleep(pause)
    finally:
        await channel.close()


@pytest.mark.parametrize("seconds", [3.0, 60.0])
def test_an_answer_that_drips_is_given_up_when_others_wait_for_its_room(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one client of a cohort keeps all others' models in their streams: to the deadline, and in the next round."""
    monkeypatch.setattr(hub, "_WATCH_SECONDS", 0.2)
    monkeypatch.setattr(hub, "_GRACE", 20.0 if seconds < 20 else 1.0)  # ended by the question, or before
    parcel = Parcel({}, {"model": np.zeros(32 << 20, np.uint8).view(np.float32)})
    with Streams(tmp_path, 2) as here:
        here.hub._room.limit = 40 << 20  # one of the two fits
        begun = asyncio.Event()
        dripping = here.run(_drip(here, begun, 0.3 if seconds < 20 else 2.0))
        here.until(lambda: "client-0" in here.hub._sessions)
        here.start("client-1")
        (slow,) = here.hub.ask("echo", [("client-0", parcel)], seconds)
        here.until(lambda: begun.is_set() and here.hub._room.used > 0)
        (quick,) = here.hub.ask("echo", [("client-1", parcel)], 60)
        replies = {reply.ticket: reply.error for reply in here.replies(slow, quick)}
        assert replies == {slow: "its answer came too slowly", quick: ""}
        assert "client-0" in here.hub._sessions, "it is not sent away"
        dripping.cancel()


def test_an_honest_uplink_that_is_in_time_is_never_given_up() -> None:
    """A model of 972 MiB at 1.7 MiB/s takes the whole of ten minutes, which it may if nobody waits for its room."""
    head = msgpack.packb([1, "", {}, [["model", "<f4", 972 << 18]]])

    def late(rate: float, at: float, wanted: bool) -> bool:
        arriving = hub.Arriving(cast("Any", None), Incoming.begin(head, 1 << 30), 0.0, 600.0)
        arriving.incoming.taken = min(int(rate * (1 << 20) * at), 972 << 20)
        return arriving.late(at, wanted)

    moments = [1.0, 9.0, 60.0, 299.0, 599.0]
    assert not any(late(1.7, at, False) for at in moments)
    assert not any(late(3.4, at, True) for at in moments[:4])
    assert not any(late(0.0, at, True) for at in (1.0, 9.0))
    assert late(1.0, 60.0, True), "others wait, and it would not be whole in half of the time"
    assert late(3.4, 600.0, False), "its question is over"


def test_one_client_never_has_all_the_room(tmp_path: Path) -> None:
    with Streams(tmp_path, 1) as here:
        here.hub.arrays = 972 << 20
        assert here.hub._room.limit >= 2 * here.hub.arrays
        here.hub.arrays = 1 << 20
        assert here.hub._room.limit == hub._ROOM


def test_who_has_a_key_and_never_says_hello_is_cut_like_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_HELLO_SECONDS", 0.5)

    async def silence() -> str:
        async with node._channel(here.access("client-0")) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            return str(await call.code())

    with Streams(tmp_path, 2) as here:
        quiet = here.run(silence())
        here.start("client-1")
        assert [reply.error for reply in here.ask("client-1")] == [""]
        assert quiet.result(20) == "StatusCode.INVALID_ARGUMENT"
        assert here.hub.meter.turned_away["no hello"] == 1
        assert "client-0" not in here.hub._sessions


@pytest.mark.parametrize("frames_of_http", [
    b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + bytes([0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]),
])  # fmt: skip
def test_who_has_a_key_and_leaves_a_request_half_open_is_cut_in_time(frames_of_http: bytes, tmp_path: Path) -> None:
    """After the handshake: nothing, the preface alone, or a header that never ends."""
    with Streams(tmp_path, 1, Limits(seconds=2)) as here:
        context = ssl.create_default_context(cafile=str(here.keys / keys.CA))
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(here.keys / "client-0")
        with (
            socket.create_connection((here.address.host, here.address.port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as held,
        ):
            held.sendall(frames_of_http)
            while held.recv(1 << 16):
                pass
        here.until(lambda: not here.hub.gate.pairs)
        assert here.hub.meter.turned_away["not known in time"] == 1
        here.start("client-0")


def test_who_stops_waiting_for_room_holds_up_nobody() -> None:
    async def wait() -> None:
        room = hub.Room(10)
        await room.take(6)
        large, small = asyncio.create_task(room.take(9)), asyncio.create_task(room.take(3))
        await asyncio.sleep(0)
        large.cancel()
        async with asyncio.timeout(5):
            await small
        assert (room.used, len(room.waiting)) == (9, 0)

    asyncio.run(wait())


@asynccontextmanager
async def _server(stream: Callable[[object, Any], Awaitable[None]]) -> AsyncIterator[Access]:
    """A server that does with streams what it likes."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Access(Address("127.0.0.1", port), None, None)
    await server.stop(None)


def test_a_server_cannot_forge_lines_on_a_client_s_terminal() -> None:
    said: list[str] = []

    async def refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "x\x1b[2J\nconnected to server.example\r\u202e")

    async def meet() -> None:
        async with _server(refuse) as access:
            with pytest.raises(UserError, match="no server at") as refused:
                await node.live(access, Echo(), 0.2, said.append)
            said.append(str(refused.value))

    asyncio.run(meet())
    assert any("connected to server.example" in text for text in said), "shown, in one line"
    assert all(text.isprintable() for text in said), said
    assert not any(text.startswith("connected to") for text in said), "nobody was let in, so patience runs out"


def test_a_server_that_takes_streams_and_never_answers_is_waited_for_with_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_ADMITTED_SECONDS", 0.3)

    async def silence(_: object, context: Any) -> None:
        await asyncio.sleep(30)

    async def meet() -> None:
        async with _server(silence) as access:
            with pytest.raises(UserError, match="takes the connection and does not answer"):
                await node.live(access, Echo(), 0.5)

    asyncio.run(asyncio.wait_for(meet(), 20))
