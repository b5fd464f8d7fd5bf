"""Requests in, answers out: starlette with the checks and the JSON errors that both services have in common.

Every error is JSON, {"error": "what was given, what was expected"}, and closes its connection, so that nothing of a
refused body is left over for the next request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IDLE = 60.0  # seconds that a connection may be silent
SLOWEST = 20_000  # bytes a second below which a body is given up
_DISCARDED = 2**26  # bytes, and
_DISCARDING = 2.0  # seconds, of a refused body that are taken


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Json(JSONResponse):
    """JSON in ASCII: starlette's own fails where a file's name is not UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


Check = Callable[[Request], Response | None]
Explain = Callable[[Request, Exception], Refused]


class Guard:
    """The outermost layer: checks every request, whatever its path, and adds headers to every answer.

    `check` raises `Refused`, or gives an answer of its own, or None for the routes to answer.
    """

    def __init__(self, app: ASGIApp, check: Check, headers: Mapping[str, str]) -> None:
        self._app, self._check, self._headers = app, check, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                held = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    held.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        try:
            answer: ASGIApp = self._check(request) or self._app
        except Refused as refused:
            answer = await refuse(request, refused)
        await answer(scope, receive, send_with_headers)


def application(
    routes: Sequence[Route], check: Check, explain: Mapping[Any, Explain], headers: Mapping[str, str] | None = None
) -> ASGIApp:
    """The service: its routes, what it checks first, and what it says about exceptions of its own kinds."""

    def handler(explain: Explain) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            return await refuse(request, error if isinstance(error, Refused) else explain(request, error))

        return answer

    known: dict[Any, Explain] = {HTTPException: _no_such_route, Refused: _defect, Exception: _defect, **explain}
    app = Starlette(routes=routes, exception_handlers={kind: handler(explain) for kind, explain in known.items()})
    app.router.redirect_slashes = False
    return Guard(app, check, headers or {})


def route(method: str, path: str, endpoint: Callable[[Request], Any]) -> Route:
    """A path and the one method that it answers to; starlette would add HEAD to GET."""
    made = Route(path, endpoint, methods=[method])
    made.methods = {method}
    return made


async def refuse(request: Request, refused: Refused) -> Response:
    """The answer to a refused request, after a little of the body that nobody read.

    A connection that is closed with bytes still waiting is reset, and the client would never see the answer.
    """
    taken = 0
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: the body was read already
        async with asyncio.timeout(_DISCARDING):
            async for part in request.stream():
                taken += len(part)
                if taken > _DISCARDED:
                    break
    return Json({"error": str(refused)}, refused.status, {**refused.headers, "Connection": "close"})


def content_length(request: Request, most: int) -> int:
    """The size of a request's body, which has to be announced: at most so many bytes."""
    text = request.headers.get("Content-Length", "0" if request.method == "GET" else None)
    if text is None or "Transfer-Encoding" in request.headers:
        raise Refused(411, "a body without its length; expected it in Content-Length, and no chunks")
    if int(text) > most:
        raise Refused(413, f"a body of {text} bytes; expected at most {most}")
    return int(text)


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request, unless it is too large or comes too slowly."""
    length = content_length(request, most)
    try:
        async with asyncio.timeout(IDLE + length / SLOWEST):
            return await request.body()
    except TimeoutError:
        said = f"a body of {length} bytes that took too long; expected it faster, or smaller parts"
        raise Refused(408, said) from None
    except ClientDisconnect:
        raise Refused(400, "the body ended early; expected as many bytes as Content-Length says") from None


def _no_such_route(request: Request, error: Exception) -> Refused:
    path = request.scope["path"][:100]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Refused(405, f"{request.method} {path}; expected {allowed}", Allow=allowed)
    known = dict.fromkeys(route.path for route in request.app.routes)
    return Refused(404, f"no {path} here; expected {', '.join(known)}")


def _defect(request: Request, error: Exception) -> Refused:
    """Starlette raises the exception again after this answer, and uvicorn writes it to standard error."""
    return Refused(500, "a defect of this program; the terminal or the log of the server says more")
