"""uvicorn, set up for a service on one machine or in a laboratory's network: quiet, and with an end to everything.

uvicorn bounds requests (`limit_concurrency`), headers and the pause between two requests. It waits without end for
headers that never come, for the rest of a body and for a client that does not take its answer; `_Protocol` ends those
connections. Put a reverse proxy in front where strangers can open connections.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from confide.web import answers
from confide.web.address import listen

CONNECTIONS = 128  # from here on requests get 503; twice as many connections are not even kept
_HEADERS = 2**16  # bytes
_GOODBYE = 2.0  # seconds that a client gets to say goodbye, which TLS would wait longer for
_GRACE = 30  # seconds that requests under way get when the server stops


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 that closes a connection when nothing has moved for `answers.IDLE` seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received = 0  # bytes of a body
        self._before: tuple[object, int, int] = (None, 0, 0)
        self._timer = self.loop.call_later(answers.IDLE, self._close_if_stalled)
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._received += len(data)
        super().data_received(data)

    def _close_if_stalled(self) -> None:
        """Look whether a request has begun, or a part of a body or of an answer has passed, since the last look.

        Bytes of headers do not count: a client that sends one now and then would never be done.
        """
        unsent = self.transport.get_write_buffer_size()
        now = (self.cycle, self._received, unsent)
        computing = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if now == self._before and (unsent or not computing):
            self.transport.abort()
        else:
            self._before = now
            self._look_again()

    def _look_again(self) -> None:
        self._timer.cancel()
        wait = _GOODBYE if self.transport.is_closing() else answers.IDLE
        self._timer = self.loop.call_later(wait, self._close_if_stalled)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._look_again()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._look_again()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in JSON, as all other errors; not at all where an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": msg}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class WebServer(uvicorn.Server):
    """One service on one socket, which takes connections from the start; `run` answers them until `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket, self.tls = listen(host, port), tls
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        super().__init__(
            uvicorn.Config(
                app, interface="asgi3", http=_Protocol, ws="none", loop="asyncio", lifespan="off",
                log_config=None, log_level="error", access_log=False, proxy_headers=False, server_header=False,
                limit_concurrency=CONNECTIONS, timeout_keep_alive=int(answers.IDLE), timeout_graceful_shutdown=_GRACE,
                h11_max_incomplete_event_size=_HEADERS, ssl_context_factory=(lambda *_: tls) if tls else None,
            )
        )  # fmt: skip

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http{'s' * (self.tls is not None)}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until `stop`, Ctrl-C or SIGTERM, then let those under way finish."""
        super().run(sockets or [self.socket])

    def stop(self) -> None:
        """Take no more connections; any thread may call this, and `run` returns a little later."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        """Stop at the first Ctrl-C or SIGTERM, which uvicorn would raise again at the end; a second one kills."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        self.stop()
