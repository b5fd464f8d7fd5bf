"""The server's side of the wire: one long gRPC stream for each client, on which the server says when.

A thread of its own holds the streams, and the run's thread asks and waits for what comes (`Link`): nobody polls. Who a
client is follows from the certificate that it shows in the TLS handshake: its public key is looked up in the
federation's list, also while a run goes on, so a key that is revoked is cut within seconds. A second connection under
one name takes the place of the first: a client that was killed and started again is taken back at once.

Memory is bounded. Before a client is known nothing is taken from it but a hello (`gate` says how many may try). Arrays
are taken only for a question that is open, of at most the size that the model has, and only while there is room for
them: models wait in the streams, by gRPC's flow control, until the round has added up those before.

The room is for several answers, so one client alone never has it all. An answer has until the end of its question;
while others wait it has to be on course to be whole in half of the time that it had. Else it is given up: the others
get its room, and its client stays, and is read on without being kept.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import grpc

from confide.deploy import keys
from confide.deploy.address import Address
from confide.deploy.gate import Gate, Limits
from confide.deploy.link import Came, Event, Gone, NodeId, Reply
from confide.deploy.metrics import Meter
from confide.deploy.parcels import Parcel
from confide.deploy.refusals import meaning
from confide.deploy.wire import LARGEST, METHOD, SERVICE, Incoming, Malformed, frames, largest_head, ticket_of
from confide.privacy.trust.roster import UNSIGNED

_ROOM = 256 << 20
"""Bytes of arrays that are held before a round has taken them, or of two of the largest answers if that is more."""
_PART_SECONDS = 60.0
"""Within which every part of an array has to follow the one before: 17 kB/s."""
_GRACE, _SHARE = 10.0, 0.5
"""While others wait for room: the seconds that every answer has, and the share of its time that it may take."""
_HELLO_SECONDS, _WATCH_SECONDS = 10.0, 2.0
_HELLO_BYTES, _ANY_USERS = 4096, 1 << 20
ADMITTED = (("confide", "admitted"),)
"""The metadata with which a stream begins. gRPC gives empty ones for a stream that was refused."""
OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 30_000),  # a machine that vanished is noticed
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *OPTIONS,
    ("grpc.max_concurrent_streams", 1),
    ("grpc.max_connection_idle_ms", 10_000),  # one without a stream
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class Question:
    """What a client was asked, and until when its answer counts."""

    ticket: int
    node: NodeId
    kind: str
    parcel: Parcel
    ends: float


@dataclass(eq=False)
class Session:
    """One client's stream."""

    node: NodeId
    key: bytes | None
    questions: asyncio.Queue[Question] = field(default_factory=asyncio.Queue)
    open: dict[int, Question] = field(default_factory=dict)
    owed: int = 0
    """Questions that it was sent and has not answered, in time or late."""
    cut: asyncio.Future[tuple[grpc.StatusCode, str]] = field(default_factory=lambda: asyncio.Future())

    def end(self, code: grpc.StatusCode, why: str) -> None:
        if not self.cut.done():
            self.cut.set_result((code, why))


@dataclass(eq=False)
class Arriving:
    """An answer on its way, which has taken room."""

    session: Session
    incoming: Incoming
    began: float
    ends: float

    def late(self, now: float, wanted: bool) -> bool:
        """Whether it is to be given up, perhaps since others want its room."""
        spent, fair = now - self.began, _SHARE * (self.ends - self.began)
        behind = spent > _GRACE + fair * self.incoming.taken / self.incoming.size
        return now >= self.ends or (wanted and behind)


class Room:
    """So many bytes that may be held at once, given to who came first; one that wants more is alone."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((size, place))
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.give(size)
            elif (size, place) in self.waiting:
                self.waiting.remove((size, place))
                self._serve()
            raise

    def give(self, size: int) -> None:
        self.used -= size
        self._serve()

    def _serve(self) -> None:
        while self.waiting and (not self.used or self.used + self.waiting[0][0] <= self.limit):
            size, place = self.waiting.popleft()
            if not place.done():
                self.used += size
                place.set_result(None)


class Hub:
    """A `Link` over gRPC. Without keys everything is plain and anybody may join: for a closed test network only."""

    def __init__(
        self,
        listening: socket,
        folder: Path | None,
        limits: Limits | None = None,
        part: bool = False,
        meter: Meter | None = None,
    ) -> None:
        """`part`: the folder's keys are those of a relay, for a part of the users."""
        self.folder, self.meter, self.part = folder, meter or Meter(), part
        self.limits = (limits or Limits()).within_open_files()
        self._arrays, self._room = 0, Room(_ROOM)
        self._arriving: set[Arriving] = set()
        self.registry: dict[NodeId, Sequence[int]] | None = None
        self.roster, self.users = UNSIGNED, _ANY_USERS
        if folder is not None:
            self._credentials, self.registry = _credentials(folder, self.meter), {}
            read = partial(self._read_federation, folder, self.registry)
            self._federation = keys.Followed(read, folder / keys.FEDERATION)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._sessions: dict[NodeId, Session] = {}
        self._tickets, self._numbers = itertools.count(1), itertools.count(1)
        self._held = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="hub")
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(listening), self._loop).result()

    @property
    def arrays(self) -> int:
        """Bytes of arrays that an answer may have; set once the model is known."""
        return self._arrays

    @arrays.setter
    def arrays(self, size: int) -> None:
        self._arrays, self._room.limit = size, max(_ROOM, 2 * size)

    def ask(self, kind: str, parcels: Sequence[tuple[NodeId, Parcel]], seconds: float) -> list[int]:
        ends = time.monotonic() + seconds
        made = [Question(next(self._tickets), node, kind, parcel, ends) for node, parcel in parcels]
        self._loop.call_soon_threadsafe(self._send, made)
        return [question.ticket for question in made]

    def events(self, seconds: float) -> Iterator[Event]:
        self._let_go()
        with suppress(queue.Empty):
            found = self._inbox.get(timeout=max(seconds, 0.0))
            while True:
                if isinstance(found, Reply):
                    self._held += found.size
                yield found
                if self._held > _ROOM // 4:
                    del found
                    self._let_go()
                found = self._inbox.get_nowait()

    def _let_go(self) -> None:
        """The arrays that were handed out are in the sum by now."""
        if self._held:
            self._loop.call_soon_threadsafe(self._room.give, self._held)
            self._held = 0

    def drop(self, node: NodeId) -> None:
        def cut() -> None:
            if node in self._sessions:
                self._sessions[node].end(grpc.StatusCode.ALREADY_EXISTS, "another client speaks for its users")

        self._loop.call_soon_threadsafe(cut)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(15)
            with suppress(RuntimeError):  # it still runs
                self._loop.close()

    def _send(self, questions: Sequence[Question]) -> None:
        for question in questions:
            session = self._sessions.get(question.node)
            if session is None:
                self._inbox.put(Reply(question.ticket, question.node, None, "it is not connected"))
                continue
            now = self._loop.time()
            session.open = {ticket: each for ticket, each in session.open.items() if each.ends > now}
            session.open[question.ticket] = question
            session.questions.put_nowait(question)

    async def _begin(self, listening: socket) -> None:
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        # gRPC itself listens for this machine alone, behind the gate.
        port = (
            self._server.add_insecure_port("127.0.0.1:0")
            if self.folder is None
            else self._server.add_secure_port("127.0.0.1:0", self._credentials)
        )
        await self._server.start()
        self.gate = Gate(Address("127.0.0.1", port), self.limits, self.meter.turned_away)
        self._front = await self._loop.create_server(self.gate.take, sock=listening, backlog=64)  # taken at once
        listening.listen(1024)  # held by the system
        self._watching = asyncio.create_task(self._watch())

    async def _end(self) -> None:
        self._watching.cancel()
        self._front.close()
        await self._server.stop(0.2)
        self.gate.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # streams that were cut, on their way out
        if left:
            await asyncio.wait(left, timeout=5)
        self._loop.stop()

    async def _watch(self) -> None:
        """Cut those whose key was revoked or rotated, and give up answers that keep others waiting."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self.meter.beat = time.monotonic()
            for each in list(self._arriving):
                if each.late(self._loop.time(), bool(self._room.waiting)):
                    self._give_up(each)
                    if each.session.open.pop(each.incoming.ticket, None) is not None:
                        why = "its answer came too slowly"
                        self._inbox.put(Reply(each.incoming.ticket, each.session.node, None, why))
            known = {} if self.folder is None else self._federation.now()
            for session in list(self._sessions.values()):
                if session.key is not None and session.key not in known:
                    session.end(grpc.StatusCode.PERMISSION_DENIED, "its key was revoked")

    def _read_federation(self, folder: Path, registry: dict[NodeId, Sequence[int]]) -> dict[bytes, keys.Node]:
        """Learn who is in it; those who are let in, by their keys."""
        held = keys.read(folder, self.part)
        self.roster = held.roster()
        self.users = held.population
        registry.update({node.name: node.users for node in held.nodes})
        return held.by_key()

    async def _stream(self, _: object, context: Any) -> None:
        """The life of one client's stream."""
        session = await self._admit(context)
        before = self._sessions.get(session.node)
        if before is not None:
            before.end(grpc.StatusCode.ALREADY_EXISTS, "another client uses its key")
            self._leave(before)
        self._sessions[session.node] = session
        self.meter.connected = len(self._sessions)
        self._inbox.put(Came(session.node))
        tasks = [asyncio.create_task(self._read(session, context)), asyncio.create_task(self._write(session, context))]
        ends: list[asyncio.Future[Any]] = [*tasks, session.cut]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if self._sessions.get(session.node) is session:
                self._leave(session)
            await asyncio.gather(*tasks, return_exceptions=True)
        if session.cut.done():
            await context.abort(*session.cut.result())
        errors = [task.exception() for task in tasks if not task.cancelled()]
        if any(isinstance(error, (Malformed, TimeoutError)) for error in errors):
            self.meter.turned_away["malformed"] += isinstance(errors[0], Malformed)  # a slow one is in the cohort
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what it sends is no parcel, or comes too slowly")

    def _leave(self, session: Session) -> None:
        del self._sessions[session.node]
        self.meter.connected = len(self._sessions)
        self._inbox.put(Gone(session.node))
        for question in session.open.values():
            self._inbox.put(Reply(question.ticket, question.node, None, "its connection was lost"))
        session.open = {}

    async def _admit(self, context: Any) -> Session:
        """Who it is, once it has shown its key and said hello."""
        node, key = self._who(context)
        if node is None:
            self.meter.turned_away["unknown key"] += 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "its key is not in the federation")
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                frame = await context.read()
            if Incoming.begin(frame, 0, _HELLO_BYTES).kind != "hello":
                raise Malformed("no hello")
        except (Malformed, TimeoutError):
            self.meter.turned_away["no hello"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no hello")
        self.gate.admit(int(context.peer().rpartition(":")[2]))
        await context.send_initial_metadata(ADMITTED)
        return Session(node if node is not None else "", key)

    def _who(self, context: Any) -> tuple[NodeId | None, bytes | None]:
        if self.folder is None:
            return next(self._numbers), None
        try:
            key = keys.key_of(context.auth_context()["x509_pem_cert"][0])
        except (KeyError, ValueError):
            return None, None
        found = self._federation.now().get(key)
        return (None, None) if found is None else (found.name, key)

    async def _read(self, session: Session, context: Any) -> None:
        while True:
            frame = await context.read()
            if frame is grpc.aio.EOF:
                return
            asked = session.open.get(ticket_of(frame))
            most = largest_head("" if asked is None else asked.kind, self.users)
            incoming, session.owed = Incoming.begin(frame, self.arrays, most), session.owed - 1
            if session.owed < 0:
                raise Malformed("an answer that nobody asked for")
            arriving = await self._place(session, incoming)
            try:
                while not incoming.complete:
                    async with asyncio.timeout(_PART_SECONDS):
                        incoming.add(await context.read())
            except BaseException:
                self._give_up(arriving)
                raise
            ticket, size = incoming.ticket, incoming.size
            if session.open.pop(ticket, None) is None or not incoming.kept:
                self._give_up(arriving)
            elif incoming.kind:
                self._inbox.put(Reply(ticket, session.node, None, meaning(incoming.kind), incoming.kind, size))
            else:
                self._inbox.put(Reply(ticket, session.node, incoming.parcel, size=size))
            self._arriving.discard(arriving)
            del incoming, arriving

    async def _place(self, session: Session, incoming: Incoming) -> Arriving:
        """Wait for the room that an answer needs. One that is late is read, since the stream goes on behind it."""
        question = session.open.get(incoming.ticket)
        arriving = Arriving(session, incoming, self._loop.time(), question.ends if question else 0.0)
        if question is None:
            incoming.drop()
        elif incoming.size:
            try:
                async with asyncio.timeout_at(question.ends):
                    await self._room.take(incoming.size)
                arriving.began = self._loop.time()
                self._arriving.add(arriving)
            except TimeoutError:
                incoming.drop()
        return arriving

    def _give_up(self, arriving: Arriving) -> None:
        """Keep nothing of an answer, and give its room to others."""
        if arriving in self._arriving:
            self._arriving.discard(arriving)
            arriving.incoming.drop()
            self._room.give(arriving.incoming.size)

    async def _write(self, session: Session, context: Any) -> None:
        while True:
            question = await session.questions.get()
            if question.ends <= self._loop.time() or question.ticket not in session.open:
                continue
            session.owed += 1
            async with asyncio.timeout_at(question.ends):  # half a parcel cannot be taken back
                for frame in frames(question.ticket, question.kind, question.parcel):
                    await context.write(frame)
            del question  # it may hold a model


def _credentials(folder: Path, meter: Meter) -> Any:
    """The server's certificate, read again when `confide deploy keys rotate` has changed it."""
    key, certificate, authority = (folder / name for name in (keys.SERVER_KEY, keys.SERVER, keys.CA))

    def read() -> Any:
        pair = keys.read_pair(key, certificate)
        for path in (certificate, authority):
            meter.expires[path.name] = keys.check_certificate(path).not_valid_after_utc.timestamp()
        return grpc.ssl_server_certificate_configuration([pair], authority.read_bytes())

    followed = keys.Followed(read, key, certificate, authority)
    return grpc.dynamic_ssl_server_credentials(followed.last, followed.changed, True)
