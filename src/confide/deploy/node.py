"""The client's side of the wire: it connects, says hello, and answers what the server asks on the one stream.

The server says when; a client that is asked nothing sends nothing but gRPC's keepalive. Everything that a server sends
is answered by the code that is installed here: whoever holds the server can ask for a bounded update and for nothing
else. When the server is gone the client waits, longer each time, and connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from confide import __version__
from confide.deploy import keys
from confide.deploy.address import Access
from confide.deploy.hub import ADMITTED, OPTIONS
from confide.deploy.parcels import Parcel
from confide.deploy.refusals import code_of, to_owner
from confide.deploy.wire import METHOD, SERVICE, Incoming, Malformed, frames
from confide.errors import UserError, one_line

_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds until the next try to connect; each is made longer by chance, so that thousands do not come at once."""
_ADMITTED_SECONDS, _HELD_SECONDS = 30.0, 5.0
"""How long a server may take to admit a client, and how long a connection has to last to be tried again at once."""
_FINAL = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNAUTHENTICATED)
_SHUT = "it ends the connection when it has seen this client's certificate"

Say = Callable[[str], None]


class Answerer(Protocol):
    """What a client does with a question."""

    @property
    def arrays(self) -> int:
        """How many bytes of arrays a question may have."""
        ...

    def answer(self, kind: str, parcel: Parcel) -> Parcel: ...


def serve(access: Access, answerer: Answerer, patience: float = 3600.0, say: Say = to_owner) -> None:
    """Answer until somebody stops it, or until the server has been away for `patience` seconds."""
    asyncio.run(live(access, answerer, patience, say, signals=True))


async def live(
    access: Access, answerer: Answerer, patience: float = 3600.0, say: Say = lambda text: None, signals: bool = False
) -> None:
    """The same within a loop that is there already."""
    stop, away, tries, shut, said = asyncio.Event(), time.monotonic(), 0, 0, ""
    with _ended_by_signal(stop, signals):
        while not stop.is_set():
            made, began = Connection(access, answerer, stop, say), time.monotonic()
            try:
                await made.hold()
                why = "the server ended the connection"
            except (OSError, grpc.RpcError, Malformed, asyncio.InvalidStateError) as error:
                replaced = made.key != _stamps(access)
                why = "its key has been replaced" if replaced else await _explained(error, access)
            shut = shut + 1 if why == _SHUT else 0
            if shut > 2:
                raise UserError(
                    f"the server at {access.server} does not let this client in ({why}); its key needs a certificate "
                    "of the server's own authority (`confide deploy keys add`)"
                )
            if stop.is_set():
                break
            if made.admitted:
                away = time.monotonic()
                tries = 0 if away - began > _HELD_SECONDS else tries
            if made.admitted or why != said:  # once, not at every try
                say(f"the server is away ({why}); connecting again")
            said = why
            if time.monotonic() - away > patience:
                raise UserError(
                    f"no server at {access.server} for {patience:g} s ({why}); start it with `confide deploy server`, "
                    "or check the address and firewalls"
                )
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)] * random.uniform(1, 1.5)
            tries += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
    say("stopped")


async def _explained(error: Exception, access: Access) -> str:
    """Why there is no connection. What will not change by waiting is raised."""
    why = str(error)
    if isinstance(error, grpc.RpcError):
        why = f"{error.code().name.lower()}: {one_line(str(error.details()))}"
    if isinstance(error, grpc.RpcError) and error.code() in _FINAL:
        raise UserError(
            f"the server at {access.server} does not let this client in ({why}); its public key must be in the "
            "server's federation.json, and one client at a time may use a key or speak for a user"
        )
    try:
        await asyncio.to_thread(check_reachable, access)
    except OSError as plain:
        return str(plain)
    return why


class Connection:
    """One stream, until either side ends it."""

    def __init__(self, access: Access, answerer: Answerer, stop: asyncio.Event, say: Say) -> None:
        self.access, self.answerer, self.stop, self.say = access, answerer, stop, say
        self.admitted, self.busy, self.key = False, False, _stamps(access)

    async def hold(self) -> None:
        async with _channel(self.access) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            stopped = asyncio.create_task(self.stop.wait())
            answering = asyncio.create_task(self._answer_all(call))
            try:
                await asyncio.wait([stopped, answering], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and not self.busy:
                    answering.cancel()
                await answering
            except asyncio.CancelledError:
                if not self.stop.is_set():
                    raise
            finally:
                stopped.cancel()
                call.cancel()

    async def _answer_all(self, call: Any) -> None:
        try:
            async with asyncio.timeout(_ADMITTED_SECONDS):
                for frame in frames(0, "hello", Parcel({"version": __version__})):
                    await call.write(frame)
                began = await call.initial_metadata()  # when the server has looked at the key
        except TimeoutError:
            raise TimeoutError("it takes the connection and does not answer") from None
        self.admitted = ADMITTED[0] in tuple(began)
        if self.admitted:
            self.say(f"connected to {self.access.server}")
        while not self.stop.is_set():
            self.busy = False
            frame = await call.read()
            if frame is grpc.aio.EOF:
                raise grpc.aio.AioRpcError(
                    await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
                )
            incoming = Incoming.begin(frame, self.answerer.arrays)
            while not incoming.complete:
                incoming.add(await call.read())
            self.busy = True
            ticket = incoming.ticket
            kind, parcel = await asyncio.to_thread(reply_to, incoming, self.answerer, self.say)
            del incoming  # it may hold a model, as the answer does
            for frame in frames(ticket, kind, parcel):
                await call.write(frame)
            del parcel
        await call.done_writing()
        await asyncio.wait([asyncio.create_task(call.code())], timeout=2)  # so that the last answer arrives


def reply_to(asked: Incoming, answerer: Answerer, say: Say) -> tuple[str, Parcel]:
    """A client's reply. What went wrong here is said to its owner in full, and to the server as a code."""
    try:
        return "", answerer.answer(asked.kind, asked.parcel)
    except Exception as error:  # a batch that does not fit in memory, a damaged file: the round goes on without it
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        say(f"did not answer {asked.kind!r:.40}: {what}")
        return code_of(error), Parcel()


def _stamps(access: Access) -> list[tuple[int, int]]:
    return [] if access.key is None else keys.stamps(access.key, keys.certificate_of(access.key))


def _channel(access: Access) -> Any:
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if access.ca is None:
        return grpc.aio.insecure_channel(str(access.server), options)
    key, certificate = (None, None) if access.key is None else keys.read_pair(access.key)
    credentials = grpc.ssl_channel_credentials(access.ca.read_bytes(), key, certificate)
    return grpc.aio.secure_channel(str(access.server), credentials, options)


def check_reachable(access: Access) -> None:
    """Look plainly at the server's port and certificate, whose refusals are easier to explain than gRPC's."""
    with socket.create_connection((access.server.host, access.server.port), timeout=5) as plain:
        if access.ca is None:
            return
        keys.check_certificate(access.ca)
        context = ssl.create_default_context(cafile=str(access.ca))
        context.set_alpn_protocols(["h2"])
        if access.key is not None:
            keys.read_pair(access.key)
            context.load_cert_chain(keys.certificate_of(access.key), access.key)
        try:
            with context.wrap_socket(plain, server_hostname=access.server.host) as secure:
                if access.key is not None and not secure.recv(
                    1
                ):  # only now a server says whether it takes this client's certificate
                    raise ConnectionResetError(_SHUT)
        except ssl.SSLEOFError as error:
            raise ConnectionResetError(str(error.reason)) from None
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"the certificate of {access.server} is not trusted: {error.verify_message}. It must be signed by "
                f"{access.ca}, be in date, and name the host as this client does"
            ) from None
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise ConnectionResetError(_SHUT) from None
            raise UserError(
                f"{access.server} does not speak TLS ({error.reason}); a server without it needs --plain on both sides"
            ) from None
        except TimeoutError:
            pass


@contextlib.contextmanager
def _ended_by_signal(stop: asyncio.Event, signals: bool) -> Iterator[None]:
    """The first Ctrl-C ends after the answer under way, the second one at once."""

    def handle() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    if not signals or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
