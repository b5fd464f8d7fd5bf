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

Differs from the paper: the final norm stays with the blocks, since pooled states are all that a head needs; the paper
gives it to the client. Section 4.1 spreads blocks over several hosts; here one host holds all of them.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from confide.encoders.encoder import Encoder
from confide.encoders.service import Access, Method, Service
from confide.encoders.wire import TENSORS, Limits
from confide.errors import UserError
from confide.web.address import is_loopback
from confide.web.answers import application, content_length, read_body, route
from confide.web.server import WebServer

_BODIES = 8  # the bodies of requests under way may take so many times the largest one
_PIECE = 2**20  # bytes of the embeddings that are sent at once
_JSON = "application/json"


class EncoderServer(WebServer):
    """HTTP with or without TLS around a `Service`."""

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
        self.service = service = Service(encoder, limits)
        self._bytes = 0  # of the bodies of requests under way
        routes = [
            route("GET", "/about", self._about),
            route("GET", "/tokeniser", self._tokeniser),
            route("GET", "/embeddings", self._embeddings),
            route("POST", "/hidden", self._hidden),
            route("POST", "/forward", partial(self._compute, method=service.forward)),
            route("POST", "/backward", partial(self._compute, method=service.backward)),
        ]
        no_memory = HTTPException(503, "not enough memory for this request; send fewer texts", {"Retry-After": "5"})
        explain = dict.fromkeys((MemoryError, torch.OutOfMemoryError), lambda error: no_memory)
        super().__init__(application(routes, self._check, explain), host, port, tls)

    def _check(self, request: Request) -> None:
        """Let those with a token in, and only for the model that this server has."""
        request.state.charge = partial(self.access.charge, self.access.holder(request.headers.get("Authorization")))
        model = request.query_params.get("model", self.service.model)
        if model != self.service.model:
            raise HTTPException(409, f"this server has the model {self.service.model}, not {model}")
        if request.method == "GET" and (length := content_length(request, self.service.body)):
            raise HTTPException(400, f"a body of {length} bytes with GET; expected none")

    def _about(self, request: Request) -> Response:
        request.state.charge(1)
        return Response(self.service.about(request.query_params).model_dump_json(), media_type=_JSON)

    def _tokeniser(self, request: Request) -> Response:
        request.state.charge(1)
        return Response(self.service.tokeniser, media_type=_JSON)

    def _embeddings(self, request: Request) -> Response:
        request.state.charge(self.service.vocabulary)  # a row costs what a token costs that is sent
        whole = memoryview(self.service.embeddings)  # sent in pieces: a connection keeps a copy of what it has to send
        pieces = (whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE))
        return StreamingResponse(pieces, media_type=TENSORS, headers={"Content-Length": str(len(whole))})

    async def _hidden(self, request: Request) -> Response:
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return await self._compute(request, self.service.hidden_of_texts if kind == _JSON else self.service.hidden)

    async def _compute(self, request: Request, method: Method) -> Response:
        """Read the body here, where a slow client holds up nobody, and compute in a thread."""
        length = content_length(request, self.service.body)
        if self._bytes + length > _BODIES * self.service.body:
            raise HTTPException(
                503, "the server has too many requests under way; ask again later", {"Retry-After": "1"}
            )
        self._bytes += length
        try:
            body = await read_body(request, length)
            answer = await run_in_threadpool(method, request.query_params, body, request.state.charge)
        finally:
            self._bytes -= length
        return Response(answer, media_type=TENSORS)


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
    except OSError as error:
        said = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise UserError(
            f"cannot use the certificate {cert} with the key {key} ({said or error}); expected two PEM files that "
            "belong together"
        ) from error
    return context
