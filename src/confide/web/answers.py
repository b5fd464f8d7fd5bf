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

from confide.errors import UserError, explained

IDLE = 60.0  # seconds that a connection may be silent
SLOWEST = 20_000  # bytes a second below which a body is given up
_DISCARDED = 2**26  # bytes, and
_DISCARDING = 2.0  # seconds, of a refused body that are taken


class Json(JSONResponse):
    """JSON in ASCII: starlette's own fails where a file's name is not UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


Check = Callable[[Request], Response | None]
Explain = Callable[[Any], HTTPException]  # of an exception of the kind that it is given for


def application(
    routes: Sequence[Route], check: Check, explain: Mapping[Any, Explain], headers: Mapping[str, str] | None = None
) -> ASGIApp:
    """Join the routes of a service with its checks and with what it says about its own kinds of exceptions.

    `check` sees every request first, whatever its path: it raises HTTPException, or gives an answer of its own, or None
    for the routes to answer. `headers` go with every answer.
    """

    def handle(explain: Explain) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            return await refuse(request, explain(error))

        return answer

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                held = MutableHeaders(scope=message)
                for name, value in (headers or {}).items():
                    held.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        try:
            answer: ASGIApp = check(request) or app
        except HTTPException as refused:
            answer = await refuse(request, refused)
        await answer(scope, receive, send_with_headers)

    # Starlette raises what it has answered by `_defect` again, and uvicorn writes it to standard error.
    known: dict[Any, Explain] = {HTTPException: lambda error: error, Exception: _defect, **explain}
    handlers: dict[Any, Any] = {404: _refuse_path, 405: _refuse_method}
    handlers |= {kind: handle(explain) for kind, explain in known.items()}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return guarded


def explain_mistake(error: UserError | ModuleNotFoundError) -> HTTPException:
    """A mistake of whoever asks, or an extra of the package that is not installed."""
    advice = explained(error) if isinstance(error, ModuleNotFoundError) else None
    return HTTPException(400, advice or str(error))


def route(method: str, path: str, endpoint: Callable[[Request], Any]) -> Route:
    """Route a path for one method only; starlette would add HEAD to GET."""
    made = Route(path, endpoint, methods=[method])
    made.methods = {method}
    return made


async def refuse(request: Request, refused: HTTPException) -> Response:
    """Answer a refused request, after reading a little of the body that nobody has read.

    A connection that is closed with bytes still waiting is reset, and the client would never see the answer.
    """
    taken = 0
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: the body was read already
        async with asyncio.timeout(_DISCARDING):
            async for part in request.stream():
                taken += len(part)
                if taken > _DISCARDED:
                    break
    return Json({"error": refused.detail}, refused.status_code, {**(refused.headers or {}), "Connection": "close"})


def content_length(request: Request, most: int) -> int:
    """Read from the headers how large a body is; refuse one that does not say so, or is too large."""
    text = request.headers.get("Content-Length", "0" if request.method == "GET" else None)
    if text is None or "Transfer-Encoding" in request.headers:
        raise HTTPException(411, "a body without its length; expected it in Content-Length, and no chunks")
    if int(text) > most:
        raise HTTPException(413, f"a body of {text} bytes; expected at most {most}")
    return int(text)


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request; refuse it if it is too large or comes too slowly."""
    length = content_length(request, most)
    try:
        async with asyncio.timeout(IDLE + length / SLOWEST):
            return await request.body()
    except TimeoutError:
        said = f"a body of {length} bytes that took too long; expected it faster, or smaller parts"
        raise HTTPException(408, said) from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early; expected as many bytes as Content-Length says") from None


async def _refuse_path(request: Request, _: Exception) -> Response:
    known = ", ".join(dict.fromkeys(route.path for route in request.app.routes))
    return await refuse(request, HTTPException(404, f"no {request.scope['path'][:100]} here; expected {known}"))


async def _refuse_method(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    said = f"{request.method} {request.scope['path'][:100]}; expected {allowed}"
    return await refuse(request, HTTPException(405, said, {"Allow": allowed}))


def _defect(_: Exception) -> HTTPException:
    return HTTPException(500, "a defect of this program; the terminal or the log of the server says more")
