"""`confide encoder serve`: one frozen encoder for many clients (CAR section 4.1; the remote cluster of section 6.4).

Clients that train only a head take hidden states of texts. Clients that train an adapter too hold token embeddings,
adapter and head themselves and send soft embeddings forward and gradients back through the frozen blocks; nothing of
theirs stays here. Backward is stateless: it computes the forward pass again instead of keeping it. A training step
therefore costs three passes (forward, forward again, backward to the embeddings; weights need no gradient) where a
local one costs two, and in exchange there is no memory held for clients that went away, no handle to guess, and every
request can be sent again after a restart.

Requests that arrive within milliseconds are joined into common passes. Rows of a pass do not see each other; what a
client gets differs by rounding only (tested to 1e-4), but not bit by bit: a run is repeatable to that precision.

What the server learns: texts or token ids where it makes hidden states, and soft embeddings otherwise, from which an
adapter near the identity lets it read the texts as well. Clients have to trust it with their queries.

The HTTP part is the standard library's: a few clients with long requests need neither speed nor a framework, and what
it lacks is here: TLS handshakes outside the accepting thread, time limits, limits on connections and bytes. It is made
for a laboratory's network; put a reverse proxy in front of it where strangers can open connections.

Differs from the paper: the final norm stays with the blocks, since pooled states are all that a head needs; the paper
gives it to the client. Section 4.1 spreads blocks over several hosts; here one host holds all of them.
"""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch

from confide.encoders.batching import Batcher, Refused
from confide.encoders.encoder import Encoder
from confide.encoders.service import Access, Service
from confide.encoders.wire import TENSORS, Limits, is_loopback
from confide.errors import UserError

_CONNECTIONS = 128
_BODIES = 8  # the bodies of requests under way may take so many times the largest one
_IDLE = 60.0  # seconds that a connection may be silent
_SLOWEST = 20_000  # bytes a second below which a body is given up
_GRACE = 30.0  # seconds that requests under way get when the server stops
_JSON = "application/json"


class EncoderServer(ThreadingHTTPServer):
    """HTTP/1.1 with or without TLS around a `Service`; `serve_forever` until `stop`, which another thread calls."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        encoder: Encoder,
        tokens: Sequence[str],
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        insecure: bool = False,
    ) -> None:
        check_address(host, tls is not None, insecure)
        limits = limits or Limits()
        self.access = Access(tokens, limits.rate)
        self.tls = tls
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host} port {port} ({getattr(error, 'strerror', None) or error}); expected an "
                "address of this machine and a port that is free: give another --host or --port (0 picks one)"
            ) from error
        try:
            self.service = Service(encoder, limits, Batcher(encoder))
        except BaseException:
            self.server_close()
            raise
        self.stopping = False
        self._state = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._count = self._busy = self._bytes = 0

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http{'s' * (self.tls is not None)}://{name}:{port}"

    def stop(self, grace: float = _GRACE) -> None:
        """Take no more connections, let the requests under way finish, then close."""
        self.stopping = True
        self.shutdown()
        with self._state:
            self._state.wait_for(lambda: not self._busy, grace)
            left = list(self._connections)
        for connection in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self.service.batcher.close()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server asks the name service for this machine's name here
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._state:
            full = self._count >= _CONNECTIONS
            self._count += not full
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """One connection, in a thread of its own: the handshake is here, where it holds up nobody else."""
        try:
            request.settimeout(_IDLE)
            connection = request if self.tls is None else self.tls.wrap_socket(request, server_side=True)
            with self._state:
                self._connections.add(connection)
            try:
                Handler(connection, client_address, self)
            finally:
                with self._state:
                    self._connections.discard(connection)
                self.shutdown_request(connection)
        except OSError:  # no TLS, silence, or a connection that was lost: nobody is left to be told
            pass
        finally:
            with self._state:
                self._count -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        traceback.print_exc(file=sys.stderr)

    @contextmanager
    def busy(self, size: int) -> Iterator[None]:
        """A request under way with a body of this size."""
        with self._state:
            if self.stopping or self._bytes + size > _BODIES * self.service.body:
                said = "is stopping" if self.stopping else "has too many requests under way"
                raise Refused(503, f"the server {said}; ask again later", Retry_After="1")
            self._busy += 1
            self._bytes += size
        try:
            yield
        finally:
            with self._state:
                self._busy -= 1
                self._bytes -= size
                self._state.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One connection: the requests that come over it, one after the other."""

    server: EncoderServer
    protocol_version = "HTTP/1.1"
    server_version = "confide"
    sys_version = ""
    timeout = _IDLE
    disable_nagle_algorithm = True
    unread = 0  # bytes of the body that were not taken from the connection

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_POST(self) -> None:
        self._handle(self._post)

    def _handle(self, method: Callable[[str, dict[str, str], int, int], None]) -> None:
        self.unread = 0
        try:
            try:
                length = self._length()
                self.unread = length
                holder = self.server.access.holder(self.headers.get("Authorization"))
                address = urlsplit(self.path)
                query = dict(parse_qsl(address.query, max_num_fields=16))
                if query.get("model", self.server.service.model) != self.server.service.model:
                    raise Refused(409, f"this server has the model {self.server.service.model}, not {query['model']}")
                if length > self.server.service.body:
                    raise Refused(413, f"a body of {length} bytes; expected at most {self.server.service.body}")
                with self.server.busy(length):
                    method(address.path, query, holder, length)
            except Refused:
                raise
            except OSError:
                raise
            except (MemoryError, torch.OutOfMemoryError):
                raise Refused(503, "not enough memory for this request; send fewer texts", Retry_After="5") from None
            except ValueError as error:  # a query with too many fields
                raise Refused(400, str(error)) from None
            except Exception:
                traceback.print_exc(file=sys.stderr)
                raise Refused(500, "the server failed; its own log says why") from None
        except Refused as refusal:
            self._send(refusal.status, json.dumps({"error": str(refusal)}).encode(), _JSON, refusal.headers)
            self._discard()

    def _get(self, path: str, query: dict[str, str], holder: int, length: int) -> None:
        if length:
            raise Refused(400, f"a body of {length} bytes with GET; expected none")
        service = self.server.service
        if path == "/embeddings":  # a row costs what a token costs that is sent
            self.server.access.charge(holder, service.vocabulary)
            size, pieces = service.embeddings()
            self._send(200, pieces, TENSORS, size=size)
        elif path in ("/about", "/tokeniser"):
            self.server.access.charge(holder, 1)
            content = service.tokeniser if path == "/tokeniser" else service.about(query).model_dump_json().encode()
            self._send(200, content, _JSON)
        else:
            self._no_such(path, "GET")

    def _post(self, path: str, query: dict[str, str], holder: int, length: int) -> None:
        service = self.server.service
        methods = {"/hidden": service.hidden, "/forward": service.forward, "/backward": service.backward}
        if path not in methods:
            self._no_such(path, "POST")
        body = self._body(length)

        def charge(tokens: int) -> None:
            self.server.access.charge(holder, tokens)

        if path == "/hidden" and self.headers.get_content_type() == _JSON:
            try:
                document = json.loads(body)
            except (ValueError, RecursionError):
                raise Refused(400, 'a body that is not JSON; expected {"texts": ["...", ...]}') from None
            texts = document.get("texts") if isinstance(document, dict) else None
            self._send(200, service.hidden_of_texts(query, texts, charge), TENSORS)
        else:
            self._send(200, methods[path](query, body, charge), TENSORS)

    def _no_such(self, path: str, method: str) -> None:
        known = {"GET": ("/about", "/tokeniser", "/embeddings"), "POST": ("/hidden", "/forward", "/backward")}
        for allowed, paths in known.items():
            if path in paths:
                raise Refused(405, f"{method} {path}; expected {allowed}", Allow=allowed)
        raise Refused(404, f"no {path[:100]} here; expected {', '.join(p for paths in known.values() for p in paths)}")

    def _length(self) -> int:
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise Refused(411, "a body in chunks; expected its length in Content-Length")
        text = self.headers.get("Content-Length", "0" if self.command == "GET" else "")
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            self.close_connection = True
            raise Refused(411, f"Content-Length {text[:20]!r}; expected the length of the body")
        return int(text)

    def _body(self, length: int) -> bytes:
        end = time.monotonic() + _IDLE + length / _SLOWEST
        parts = []
        while self.unread:
            part = self.rfile.read1(min(self.unread, 2**18))
            if not part:
                raise ConnectionAbortedError("the client closed the connection in the middle of a body")
            if time.monotonic() > end:
                raise Refused(408, f"a body of {length} bytes that took too long; expected it faster, or smaller parts")
            parts.append(part)
            self.unread -= len(part)
        return b"".join(parts)

    def _send(
        self, status: int, body: bytes | Iterable[bytes | memoryview], kind: str, headers: dict[str, str] | None = None,
        size: int = 0,
    ) -> None:  # fmt: skip
        if self.unread or self.server.stopping:
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if isinstance(body, bytes) else size))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        for piece in [body] if isinstance(body, bytes) else body:
            self.wfile.write(piece)

    def _discard(self) -> None:
        """Take a little of what was not read: closing at once would cut off the answer on its way."""
        end = time.monotonic() + 2
        left = min(self.unread, 2**26)
        self.connection.settimeout(1)
        while left > 0 and time.monotonic() < end:
            part = self.rfile.read1(min(left, 2**18))
            left -= len(part) if part else left
        self.connection.settimeout(_IDLE)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library itself refuses: a line that is no HTTP, a method that nobody knows."""
        self.close_connection = True
        with suppress(OSError):
            self._send(int(code), json.dumps({"error": message or "not understood"}).encode(), _JSON)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a log of who asked when is more than anyone needs to know."""


def check_address(host: str, tls: bool, insecure: bool) -> None:
    """Refuse plain HTTP on anything but this machine, unless that was said to be wanted."""
    if not tls and not insecure and not is_loopback(host):
        raise UserError(
            f"plain HTTP on {host} would let anyone on the network read texts and the access token; expected a "
            "certificate: give --cert and --key, or --host 127.0.0.1, or say --insecure if a proxy does the TLS"
        )


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or later with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> str:
        raise UserError(f"the key {key} has a password; expected one without, readable only by the server's user")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except OSError as error:  # ssl.SSLError is one
        said = getattr(error, "reason", None) or error.strerror or error
        raise UserError(
            f"cannot use the certificate {cert} with the key {key} ({said}); expected two PEM files that belong "
            "together"
        ) from error
    return context
