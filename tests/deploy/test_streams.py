"""One client with a key of the federation cannot keep the streams of the others waiting."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

import grpc

from confide.deploy import hub, keys, node
from confide.deploy.address import Access, Address
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


def test_a_late_answer_to_a_question_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(Echo, "answer", lambda self, kind, parcel: late.wait(20) and parcel)
    with Streams(tmp_path, 1) as here:
        here.start("client-0")
        assert here.ask("client-0", seconds=2) == []
        late.set()
        assert [reply.parcel is not None for reply in here.ask("client-0")] == [True]
        assert not any("away" in said for said in here.said)


def test_an_answer_that_drips_is_cut_when_others_wait_for_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one client of a cohort, a part every 10 s, keeps all others' models in their streams to the deadline."""
    monkeypatch.setattr(hub, "_PART_SECONDS", 1.0)
    parcel = Parcel({}, {"model": np.zeros(32 << 20, np.uint8).view(np.float32)})

    async def drip() -> None:
        channel, call = await _admitted(here, "client-0")
        try:
            asked = Incoming.begin(await call.read(), 1 << 26)
            while not asked.complete:
                asked.add(await call.read())
            for frame in frames(asked.ticket, "", asked.parcel):
                await call.write(frame)
                begun.set()
                await asyncio.sleep(0.9)
            await asyncio.sleep(60)
        finally:
            await channel.close()

    monkeypatch.setattr(Echo, "arrays", 1 << 26)
    with Streams(tmp_path, 2) as here:
        here.hub._room.limit = 40 << 20  # one of the two fits
        begun = asyncio.Event()
        dripping = here.run(drip())
        here.until(lambda: "client-0" in here.hub._sessions)
        here.start("client-1")
        monkeypatch.setattr(hub, "_SHARED_RATE", 1 << 40)
        here.hub.ask("echo", [("client-0", parcel)], 60)
        here.until(lambda: begun.is_set() and here.hub._room.used > 0)
        replies = here.ask("client-1", seconds=10, parcel=parcel)
        assert [reply.parcel is not None for reply in replies] == [True]
        dripping.cancel()


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


def test_a_server_cannot_forge_lines_on_a_client_s_terminal(tmp_path: Path) -> None:
    said: list[str] = []

    async def lie() -> None:
        async def refuse(_: object, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "x\x1b[2J\nconnected to server.example\r\u202e")

        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(refuse)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(UserError) as refused:
            await node.live(Access(Address("127.0.0.1", port), None, None), Echo(), 0.2, said.append)
        said.append(str(refused.value))
        await server.stop(None)

    asyncio.run(lie())
    assert any("connected to server.example" in text for text in said), "shown, in one line"
    assert all(text.isprintable() for text in said), said
