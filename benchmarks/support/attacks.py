"""Kinds of hostile messages: without a key at the port, and from a client or a relay that has one.

A way with a key is a function of what an honest client would answer; it gives the messages that are sent instead. One
without a key is a function of a plain connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np

from confide import __version__
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.node import Answerer
from confide.deploy.parcels import Parcel
from confide.deploy.remote import JOIN, SUM
from confide.deploy.wire import HEAD, METHOD, PART, SERVICE, Incoming, frames


@dataclass(frozen=True)
class Honest:
    """What a question is, and what an honest client would say to it."""

    ticket: int
    facts: dict[str, Any]
    array: np.ndarray[Any, Any]
    name: str
    """Of the array: an update or a sum."""

    def with_facts(self, **other: Any) -> list[bytes]:
        """The same answer, but for some facts; one that is `...` is left out."""
        facts = {key: value for key, value in (self.facts | other).items() if value is not ...}
        return deep(frames(self.ticket, "", Parcel(facts, {self.name: self.array})))

    def with_array(self, array: np.ndarray[Any, Any], name: str | None = None) -> list[bytes]:
        return list(frames(self.ticket, "", Parcel(self.facts, {name or self.name: array})))

    def head(self, about: list[list[Any]], ticket: Any = None, kind: Any = "", facts: Any = None) -> bytes:
        made: bytes = msgpack.packb([self.ticket if ticket is None else ticket, kind, facts or self.facts, about])
        return made


Way = Callable[[Honest], list[bytes]]
DEEP = "a thousand lists in each other"
"""Stands for them in facts, since msgpack writes none so deep, but reads them."""
TERMINAL = "9\x1b[2J\x07\r\nstep 7: all is well\u202e\u2028"
"""Text that would forge a line of a log, and clear a terminal."""
BEYOND = {
    "measures": [0.1], "raw_norms": [1.0], "loss": 1e308, "norm": -1.0, "norm_squared": -1.0, "not_finite": 0.5,
    "users": 1.0, "layer_bounded": [-1.0],
}  # fmt: skip
"""Figures that no relay has counted."""


def deep(messages: Iterable[bytes]) -> list[bytes]:
    return [message.replace(msgpack.packb(DEEP), b"\x91" * 1010 + b"\xc0") for message in messages]


def _nested(honest: Honest) -> list[bytes]:
    return [b"\x91" * 100_000 + b"\x00"]


HEADS: dict[str, Way] = {
    "nothing": lambda h: [b""],
    "noise": lambda h: [os.urandom(300)],
    "a number": lambda h: [msgpack.packb(7)],
    "three fields": lambda h: [msgpack.packb([h.ticket, "", {}])],
    "lists in lists": _nested,
    "a ticket of text": lambda h: [h.head([], ticket="1")],
    "a code that is a number": lambda h: [h.head([], kind=5)],
    "facts that are a list": lambda h: [h.head([], facts=[1])],
    "facts with numbers for names": lambda h: [h.head([], facts={1: 2})],
    "an array of objects": lambda h: [h.head([[h.name, "|O", 50]])],
    "an array of less than nothing": lambda h: [h.head([[h.name, "<f4", -50]])],
    "an array without end": lambda h: [h.head([[h.name, "<f4", 1 << 60]])],
    "a length of text": lambda h: [h.head([[h.name, "<f4", "50"]])],
    "nine arrays": lambda h: [h.head([[str(n), "<f4", 1] for n in range(9)])],
    "two arrays of one name": lambda h: [h.head([[h.name, "<f4", 1], [h.name, "<f4", 1]])],
    "a head of two megabytes": lambda h: [h.head([], facts={"x": "y" * HEAD})],
    "a message above all limits": lambda h: [bytes(4 * PART)],
    "a part that is too long": lambda h: [h.head([[h.name, "<f4", 50]]), bytes(201)],
    "a part that is too short": lambda h: [h.head([[h.name, "<f4", 50]]), bytes(199)],
    "a part for nothing": lambda h: [bytes(200)],
}
BOTH: dict[str, Way] = {
    "a ticket that was never given": lambda h: [*frames(1 << 40, "", Parcel(h.facts)), *refused(h)],
    "another's ticket": lambda h: [*frames(h.ticket - 1, "", Parcel(h.facts, {h.name: h.array})), *refused(h)],
    "a hello again": lambda h: [*frames(0, "hello", Parcel({"version": __version__})), *refused(h)],
    "another run": lambda h: h.with_facts(run="00"),
    "another attempt": lambda h: h.with_facts(nonce="00" * 16),
    "another step": lambda h: h.with_facts(step=10**6),
    "another version": lambda h: h.with_facts(version="9.9"),
    "another model": lambda h: h.with_facts(layout="none"),
    "a version of lists in lists": lambda h: h.with_facts(version=DEEP),
    "a version for a terminal": lambda h: h.with_facts(version=TERMINAL),
    "no facts": lambda h: list(frames(h.ticket, "", Parcel({}, {h.name: h.array}))),
    "another type": lambda h: h.with_array(h.array.astype("<f2")),
    "a short array": lambda h: h.with_array(h.array[:-1]),
    "no array": lambda h: list(frames(h.ticket, "", Parcel(h.facts))),
    "an array of another name": lambda h: h.with_array(h.array, "model"),
    "a text for a code": lambda h: list(frames(h.ticket, "<b>read me</b>", Parcel())),
    "a long text for a code": lambda h: list(frames(h.ticket, "x" * 100_000, Parcel())),
    "a refusal, then an answer": lambda h: [*refused(h), *h.with_facts()],
}


def counts(name: str, value: object) -> Way:
    return lambda honest: honest.with_facts(tally={"users": 1, name: value})


AS_CLIENT: dict[str, Way] = {
    **HEADS,
    **BOTH,
    "another's user": lambda h: h.with_facts(user=0),
    "a user of text": lambda h: h.with_facts(user="3"),
    "a user that is true": lambda h: h.with_facts(user=True),
    "no number in the update": lambda h: h.with_array(np.full_like(h.array, np.nan)),
    "no end of the update": lambda h: h.with_array(np.full_like(h.array, np.inf)),
    "no norms": lambda h: h.with_facts(norms=...),
    "norms that are whole numbers": lambda h: h.with_facts(norms=[1]),
    "a loss of text": lambda h: h.with_facts(loss="low"),
    "a loss beyond all": lambda h: h.with_facts(loss=1e300),
    "a vote": lambda h: h.with_facts(votes=[7.0]),
    "norms below nothing": lambda h: h.with_facts(norms=[-1.0]),
    "an answer as a relay": lambda h: as_relay(h, {"users": 1}),
    "an answer as a relay, with figures of its own": lambda h: as_relay(h, {"users": 1, "measures": [0.1]}),
}
AS_RELAY: dict[str, Way] = {
    **BOTH,
    "a sum over another's users": lambda h: h.with_facts(users=[0, 4]),
    "a sum over a user twice": lambda h: h.with_facts(users=[4, 4]),
    "a sum over a text": lambda h: h.with_facts(users="4"),
    "a sum that is too long": lambda h: h.with_array(np.full_like(h.array, 1 << 60)),
    "figures that are none": lambda h: h.with_facts(tally=None),
    "figures of more users": lambda h: h.with_facts(tally={"users": 9}),
    "figures without end": lambda h: h.with_facts(tally={"users": 1, "loss": float("inf")}),
    "figures of another name": lambda h: h.with_facts(tally={"users": 1, "x": 1}),
    "more bounded than there are": lambda h: h.with_facts(tally={"users": 1, "bounded": 8}),
    **{f"figures of {name} {value}": counts(name, value) for name, value in BEYOND.items()},
    **{f"{name} (relay)": way for name, way in HEADS.items()},
}


LIES: dict[str, dict[str, Any]] = {
    "for another's user": {"users": [0]},
    "for nobody": {"users": []},
    "for a number": {"users": 5},
    "for nothing": {"users": None},
    "for a text": {"users": "0"},
    "for lists": {"users": [[0], {}]},
    "for who is not there": {"users": [3, 10**12]},
    "for less than nothing": {"users": [-1]},
    "with another version": {"version": ["9"]},
    "with a version of lists in lists": {"version": DEEP},
    "with a version for a terminal": {"version": TERMINAL},
    "with another recipe": {"recipe": 0},
    "with a text for a refusal": {"refuses": "<b>read me</b>"},
    "with a list for a refusal": {"refuses": [1, {}]},
    "as a relay for another's users": {"users": [0, 1], "relay": True},
}
"""What a client with a key says about itself, each once, before it joins as it should."""


def as_relay(honest: Honest, tally: dict[str, Any]) -> list[bytes]:
    """Answer for one's own user, as if the question had been for a sum."""
    facts = {name: value for name, value in honest.facts.items() if name != "user"} | {"users": [3], "tally": tally}
    return list(frames(honest.ticket, "", Parcel(facts, {"sum": np.zeros(len(honest.array), "<i8")})))


def refused(honest: Honest) -> list[bytes]:
    """What ends a question, after a message that has not."""
    return list(frames(honest.ticket, "failed", Parcel()))


class Hostile:
    """A client with a key that answers each question in the next of its ways."""

    def __init__(self, access: Access, member: Answerer, ways: dict[str, Way], sent: Counter[str], relay: bool) -> None:
        self.access, self.member, self.ways, self.sent = access, member, itertools.cycle(ways.items()), sent
        self.joined, self.relay, self.lies, self.leaves = asyncio.Event(), relay, iter(LIES.items()), False

    async def ready(self) -> None:
        await asyncio.wait_for(self.joined.wait(), 60)

    async def live(self) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                async with self._channel() as channel:
                    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
                    for frame in frames(0, "hello", Parcel()):
                        await call.write(frame)
                    while (frame := await call.read()) is not grpc.aio.EOF:
                        asked = Incoming.begin(frame, 1 << 20)
                        while not asked.complete:
                            asked.add(await call.read())
                        for out in self._answer(asked):
                            await call.write(out)
                        if self.leaves:
                            await asyncio.sleep(0.1)
                            break
            self.joined.clear()
            await asyncio.sleep(0.05)

    def _channel(self) -> Any:
        key, certificate = keys.read_pair(self.access.key or Path())
        credentials = grpc.ssl_channel_credentials((self.access.ca or Path()).read_bytes(), key, certificate)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(str(self.access.server), credentials, options)

    def _answer(self, asked: Incoming) -> list[bytes]:
        if asked.kind == JOIN:
            said, (name, lie) = self.member.answer(JOIN, asked.parcel), next(self.lies, ("", {}))
            self.leaves = bool(lie)
            if lie:
                self.sent[f"joins: {name}"] += 1
                return deep(frames(asked.ticket, "", Parcel({**said.facts, **lie})))
            asyncio.get_running_loop().call_later(0.05, self.joined.set)
            return list(frames(asked.ticket, "", Parcel({**said.facts, "relay": self.relay})))
        name, way = next(self.ways)
        self.sent[f"{'relay' if self.relay else 'client'}: {name}"] += 1
        if asked.kind == SUM:
            call = {key: asked.facts[key] for key in ("run", "step", "nonce", "version", "recipe", "layout", "encoder")}
            return way(Honest(asked.ticket, call | {"users": [4], "tally": {"users": 1}}, np.zeros(50, "<i8"), "sum"))
        said = self.member.answer(asked.kind, asked.parcel)
        return way(Honest(asked.ticket, dict(said.facts), said.arrays["update"].copy(), "update"))


Open = Callable[[socket.socket, Path], None]


def _tls(own: Path | None, authority: Path, protocols: tuple[str, ...] = ("h2",), oldest: bool = False) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    if own is not None:
        context.load_cert_chain(own)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if oldest:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def _sends(*content: bytes, pause: float = 0.0) -> Open:
    def way(plain: socket.socket, folder: Path) -> None:
        for part in content:
            plain.sendall(part)
            time.sleep(pause)
        plain.recv(100)

    return way


def _shakes(
    own: str | None = None, *content: bytes, protocols: tuple[str, ...] = ("h2",), oldest: bool = False
) -> Open:
    def way(plain: socket.socket, folder: Path) -> None:
        key = None if own is None else folder / own
        with _tls(key, folder / keys.CA, protocols, oldest).wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            for part in content:
                secure.sendall(part)
            while secure.recv(1 << 16):
                pass

    return way


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes(3) + b"\x04" + bytes(5)


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


WITHOUT_KEY: dict[str, Open] = {
    "connects and goes": lambda plain, folder: None,
    "connects and waits": _sends(),
    "noise": _sends(os.urandom(5000)),
    "a megabyte of nothing": _sends(bytes(1 << 20)),
    "a web request": _sends(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a header without end": _sends(b"POST / HTTP/1.1\r\n", b"X: " + b"y" * 60_000),
    "plain HTTP/2": _sends(_PREFACE + _SETTINGS),
    "half a handshake": _sends(b"\x16\x03\x01\x02\x00\x01\x00"),
    "a handshake in drops": _sends(*[bytes([byte]) for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01"], pause=0.2),
    "a record that is too long": _sends(b"\x16\x03\x03\xff\xff" + os.urandom(60_000)),
    "an alert": _sends(b"\x15\x03\x03\x00\x02\x02\x28"),
    "a reset": lambda plain, folder: plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01" + bytes(7)),
    "TLS without a certificate": _shakes(),
    "TLS without a certificate, and a request": _shakes(None, _PREFACE + _SETTINGS + os.urandom(1000)),
    "an older TLS without a certificate": _shakes(None, oldest=True),
    "no protocol": _shakes(None, protocols=()),
    "another protocol": _shakes(None, protocols=("http/1.1",)),
    "a key of another authority": _shakes("../strange/client-0"),
    "the server's own certificate": _shakes("both.pem"),
    "a client that nobody knows": _shakes("unknown", _PREFACE + _SETTINGS),
    "noise under a known key": _shakes("client-3", os.urandom(5000)),
    "a frame that is too long": _shakes("client-3", _PREFACE + _SETTINGS + _frame(0, 0, 1, bytes(1 << 16))),
    "headers that are too long": _shakes("client-3", _PREFACE + _SETTINGS, *[_frame(9, 0, 1, bytes(9000))] * 20),
    "a flood of pings": _shakes("client-3", _PREFACE + _SETTINGS + _frame(6, 0, 0, bytes(8)) * 2000),
    "a flood of settings": _shakes("client-3", _PREFACE + _SETTINGS * 2000),
    "a flood of resets": _shakes("client-3", _PREFACE + _SETTINGS + _frame(3, 0, 1, bytes(4)) * 2000),
    "a window that overflows": _shakes("client-3", _PREFACE + _SETTINGS + _frame(8, 0, 0, b"\x7f\xff\xff\xff") * 4),
}


_THREADS = ThreadPoolExecutor(16)


async def knock(name: str, address: Address, folder: Path, sent: Counter[str]) -> None:
    """One message without a key, or with one that is never shown to be anybody's."""

    def at_once() -> None:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), timeout=6) as plain:
            WITHOUT_KEY[name](plain, folder)

    sent[f"port: {name}"] += 1
    await asyncio.sleep(random.uniform(0, 0.05))
    await asyncio.get_running_loop().run_in_executor(_THREADS, at_once)
