"""The page's server.

Who may ask:
* It listens on loopback. There the Host header has to name this machine, which keeps a web page elsewhere from reaching
  it under a name that it controls (DNS rebinding).
* Beyond loopback every request needs the token, as a cookie that is set once by the address that is printed at start.
* What changes something or costs something is a POST with a header that other sites cannot send without asking, from
  the page's own origin.
* Nothing else is answered to other sites either, but for two pages when a browser opens them in a tab, as a link from
  anywhere does: the page itself and a run's. They change nothing, and nobody but the one before the screen can read or
  frame them. A run's page is sandboxed, so that its own link back and its reload come from no site at all. A
  comparison is no such page: it may have to score a model.

What it serves: three files of the package, answers as JSON, and pages rendered from a run's records. Runs are looked up
in a listing; no path from a request is ever opened. Pages of runs are sandboxed: a script in them, if one ever got in,
could not ask this server for anything. Bodies have a limit and connections a time limit.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from confide.errors import UserError
from confide.report.shell import POLICY
from confide.ui import planning
from confide.ui.shelf import Shelf
from confide.web.access import check_host, is_foreign, is_visit, token_for
from confide.web.answers import Json, application, explain_mistake, read_body, route
from confide.web.server import WebServer

MOST_SOUND, MOST_TEXT = 50 * 2**20, 64 * 2**10
COOKIE = "confide"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self)",
}
# A run's page has its own script, and nothing that it could reach.
_PAGE = {"Content-Security-Policy": f"sandbox allow-scripts allow-popups; {POLICY}; frame-ancestors 'none'"}
_FILES = [
    ("/", "confide.ui", "index.html"),
    ("/app.js", "confide.ui", "app.js"),
    ("/app.css", "confide.ui", "app.css"),
    ("/page.js", "confide.report", "page.js"),
    ("/page.css", "confide.report", "page.css"),
]
_VISITED = ("/", "/report")
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_PLANS: dict[str, Callable[[Mapping[str, str]], Any]] = {
    "/api/presets": lambda _: planning.presets(),
    "/api/plan": planning.epsilon,
    "/api/plan/solve": planning.solve,
    "/api/plan/rdp": planning.by_rdp,
    "/api/plan/enough": planning.enough,
    "/api/plan/curve": planning.curve,
}


class Server(WebServer):
    """The page of one folder of runs. Answers are made in threads: some take seconds."""

    def __init__(self, shelf: Shelf, host: str, port: int, token: str | None) -> None:
        self.shelf, self.token = shelf, token
        routes = [
            *(route("GET", path, partial(_send_file, package=place, name=name)) for path, place, name in _FILES),
            *(route("GET", path, partial(_send_plan, plan=plan)) for path, plan in _PLANS.items()),
            route("GET", "/api/runs", self._runs),
            route("GET", "/report", self._report),
            route("GET", "/compare", self._compare),
            route("POST", "/api/transcribe", self._transcribe),
            route("POST", "/api/retrieve", self._retrieve),
        ]
        explain = dict.fromkeys((UserError, ModuleNotFoundError), explain_mistake)
        super().__init__(application(routes, self._check, explain, _HEADERS), host, port)

    @property
    def url(self) -> str:
        plain = f"{super().url}/"
        return plain if self.token is None else f"{plain}?{urlencode({'token': self.token})}"

    def _check(self, request: Request) -> Response | None:
        """Answer the page's own requests only; a token in the address is moved to a cookie."""
        given = request.query_params.get("token")
        if self.token is None:
            check_host(request, self.port, "page")
        elif not hmac.compare_digest((given or request.cookies.get(COOKIE, "")).encode(), self.token.encode()):
            raise HTTPException(401, "open the address with its token, as `confide ui` printed it")
        foreign = is_foreign(request) and not (request.url.path in _VISITED and is_visit(request))
        if foreign or (request.method == "POST" and request.headers.get("X-Confide") != "1"):
            raise HTTPException(403, "requests from other pages are not answered")
        if self.token is not None and given is not None and request.method == "GET":
            # No script can read the cookie. Lax: from elsewhere it comes with links alone, such as a run's link back.
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            return RedirectResponse("/", 303, {"Set-Cookie": cookie})
        return None

    def _runs(self, request: Request) -> Response:
        return Json({"folder": self.shelf.root.name, "runs": self.shelf.listing()})

    def _report(self, request: Request) -> Response:
        text = self.shelf.report(request.query_params.get("run", ""))
        return Response(text, media_type="text/html", headers=_PAGE)

    def _compare(self, request: Request) -> Response:
        text = self.shelf.comparison(request.query_params.getlist("run"))
        return Response(text, media_type="text/html", headers=_PAGE)

    async def _transcribe(self, request: Request) -> Response:
        run, file = (request.query_params.get(name, "") for name in ("run", "file"))
        sound = await read_body(request, MOST_SOUND)
        return Json(await run_in_threadpool(self.shelf.transcribe, run, sound, file))

    async def _retrieve(self, request: Request) -> Response:
        try:
            asked = json.loads(await read_body(request, MOST_TEXT))
            run, query, k = str(asked["run"]), str(asked["query"]), int(asked["k"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise HTTPException(400, "expected run, query and k as JSON") from None
        return Json(await run_in_threadpool(self.shelf.retrieve, run, query, k))


def make_server(shelf: Shelf, host: str, port: int, token: str | None) -> Server:
    """A server that listens; beyond loopback it has a token, made up if none is given."""
    return Server(shelf, host, port, token_for(host, token, "CONFIDE_UI_TOKEN"))


def _send_file(request: Request, package: str, name: str) -> Response:
    content = (files(package) / "assets" / name).read_bytes()
    return Response(content, media_type=_KINDS[name.rpartition(".")[2]])


def _send_plan(request: Request, plan: Callable[[Mapping[str, str]], Any]) -> Response:
    return Json(plan(request.query_params))
