"""Who may ask: on loopback whoever names this machine, elsewhere whoever has the token, and no page of another site."""

from __future__ import annotations

import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request

from confide.errors import UserError
from confide.web.address import is_loopback


def token_for(host: str, given: str | None, variable: str) -> str | None:
    """The token of a service: what the environment gives; beyond loopback one is made up if it gives none."""
    if given is not None and (
        len(given) < 16 or not given.isascii() or not given.replace("-", "").replace("_", "").isalnum()
    ):
        raise UserError(f"the token in {variable} needs 16 or more letters, digits, - or _; or leave it out")
    return given or (None if is_loopback(host) else secrets.token_urlsafe(24))


def check_host(request: Request, port: int, what: str) -> None:
    """Refuse a name that is not this machine's: a page elsewhere could give its own name this address."""
    names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
    if request.headers.get("Host", "").lower() not in names:
        raise HTTPException(421, f"this {what} answers only to the name of this machine")


def is_foreign(request: Request) -> bool:
    """Whether a browser says that a page of another site asks."""
    origin = f"{request.url.scheme}://{request.headers.get('Host', '').lower()}"
    return (
        request.headers.get("Origin", origin).lower() != origin
        or request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    )  # fmt: skip


def is_visit(request: Request) -> bool:
    """Whether a browser opens this address in a tab: who sent it there can neither read nor frame the answer.

    A link, a reload: whose page had it cannot be told where that page is sandboxed, and so has no origin.
    """
    asked = (request.method, request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest"))
    return asked == ("GET", "navigate", "document") and "Origin" not in request.headers
