"""The page's server: Python's own, because it serves one person on one machine, and a framework would be more to trust.

Who may ask:
* It listens on loopback. There the Host header has to name this machine, which keeps a web page elsewhere from reaching
  it under a name that it controls (DNS rebinding).
* Beyond loopback every request needs the token, as a cookie that is set once by the address that is printed at start.
* What changes something or costs something is a POST with a header that other sites cannot send without asking, from
  the page's own origin.

What it serves: three files of the package, answers as JSON, and pages rendered from a run's records. Runs are looked up
in a listing; no path from a request is ever opened. Pages of runs are sandboxed: a script in them, if one ever got in,
could not ask this server for anything. Bodies have a limit and connections a time limit.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from confide import __version__
from confide.errors import UserError
from confide.report.shell import POLICY, asset
from confide.ui import planning
from confide.ui.shelf import Shelf

MOST_SOUND, MOST_TEXT = 50 * 2**20, 64 * 2**10
COOKIE = "confide"
_OWN = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/app.css": ("app.css", "text/css"),
}
_SHARED = {"/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}


class Refused(Exception):
    """A request that is not answered."""

    def __init__(self, status: HTTPStatus, said: str) -> None:
        super().__init__(said)
        self.status = status


class Server(ThreadingHTTPServer):
    """Holds what requests share."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], shelf: Shelf, token: str | None) -> None:
        self.address_family = _family(address[0])
        super().__init__(address, Handler)
        self.shelf, self.token = shelf, token
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        shown = f"[{host}]" if ":" in host else host
        plain = f"http://{shown}:{self.server_port}/"
        return plain if self.token is None else f"{plain}?{urlencode({'token': self.token})}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = f"confide/{__version__}", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""

    def _answer(self, make: Callable[[], None]) -> None:
        try:
            self._check()
            make()
        except Refused as refused:
            self._json({"error": str(refused)}, refused.status)
        except UserError as error:
            self._json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except ModuleNotFoundError as error:
            from confide.errors import explained

            self._json({"error": explained(error) or str(error)}, HTTPStatus.BAD_REQUEST)
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            said = "a defect of this program; the terminal that `confide ui` runs in says more"
            self._json({"error": said}, HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def _check(self) -> None:
        self.close_connection = True  # one request per connection: nothing can be left over from a refused body
        if self.server.token is None:
            if self.headers.get("Host", "").lower() not in self.server.hosts:
                raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this page answers only to the name of this machine")
        elif not self._has_token():
            raise Refused(HTTPStatus.UNAUTHORIZED, "open the address with its token, as `confide ui` printed it")
        origin, host = self.headers.get("Origin"), self.headers.get("Host", "")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are not answered")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are not answered")

    def _has_token(self) -> bool:
        given = dict(parse_qsl(urlsplit(self.path).query)).get("token")
        if given is None:
            try:
                held = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
            except CookieError:
                held = None
            given = held.value if held is not None else ""
        return hmac.compare_digest(given.encode(), str(self.server.token).encode())

    def _get(self) -> None:
        split = urlsplit(self.path)
        given = {name: values[-1] for name, values in parse_qs(split.query).items()}
        if "token" in given and self.server.token is not None:
            self._take_token()
        elif split.path in _FILES:
            name, kind = _FILES[split.path]
            self._send((files("confide.ui") / "assets" / name).read_bytes(), kind)
        elif split.path in _SHARED:
            name, kind = _SHARED[split.path]
            self._send(asset(name).encode(), kind)
        elif split.path == "/report":
            self._page(self.server.shelf.report(given.get("run", "")))
        elif split.path == "/compare":
            self._page(self.server.shelf.comparison(parse_qs(split.query).get("run", [])))
        elif split.path in _QUESTIONS:
            self._json(_QUESTIONS[split.path](self.server.shelf, given))
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self) -> None:
        if self.headers.get("X-Confide") != "1":
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are not answered")
        split = urlsplit(self.path)
        given = {name: values[-1] for name, values in parse_qs(split.query).items()}
        if split.path == "/api/transcribe":
            sound = self._body(MOST_SOUND)
            self._json(self.server.shelf.transcribe(given.get("run", ""), sound, given.get("file", "")))
        elif split.path == "/api/retrieve":
            try:
                asked = json.loads(self._body(MOST_TEXT))
                run, query, k = str(asked["run"]), str(asked["query"]), int(asked["k"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise Refused(HTTPStatus.BAD_REQUEST, "expected run, query and k as JSON") from None
            self._json(self.server.shelf.retrieve(run, query, k))
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _body(self, most: int) -> bytes:
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected a body with its length")
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected a body with its length") from None
        if not 0 < size <= most:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{size / 2**20:.1f} MB was sent; expected at most {most / 2**20:g} MB",
            )
        body = self.rfile.read(size)
        if len(body) < size:
            raise Refused(HTTPStatus.BAD_REQUEST, "the body ended early")
        return body

    def _take_token(self) -> None:
        """Once in the address, then in a cookie that no script and no other site can use."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self._end(0)

    def _page(self, text: str) -> None:
        """A run's page: its own script, and nothing that it could reach."""
        self._send(text.encode(), "text/html", f"sandbox allow-scripts allow-popups; {POLICY}; frame-ancestors 'none'")

    def _json(self, document: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(document, allow_nan=False).encode(), "application/json", status=status)

    def _send(self, body: bytes, kind: str, policy: str = _OWN, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy)
        self._end(len(body))
        self.wfile.write(body)

    def _end(self, size: int) -> None:
        self.send_header("Content-Length", str(size))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Permissions-Policy", "microphone=(self)")
        self.send_header("Connection", "close")
        self.end_headers()


_QUESTIONS: dict[str, Callable[[Shelf, dict[str, str]], Any]] = {
    "/api/presets": lambda _, given: planning.presets(),
    "/api/plan": lambda _, given: planning.epsilon(given),
    "/api/plan/rdp": lambda _, given: planning.by_rdp(given),
    "/api/plan/enough": lambda _, given: planning.enough(given),
    "/api/plan/curve": lambda _, given: planning.curve(given),
    "/api/runs": lambda shelf, _: {"folder": shelf.root.name, "runs": shelf.listing()},
}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(shelf: Shelf, host: str, port: int, token: str | None) -> Server:
    """A server that listens; beyond loopback it has a token, made up if none is given."""
    if token is not None and (
        len(token) < 16 or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum()
    ):
        raise UserError("the token in CONFIDE_UI_TOKEN needs 16 or more letters, digits, - or _; or leave it out")
    if not is_loopback(host):
        token = token or secrets.token_urlsafe(24)
    try:
        return Server((host, port), shelf, token)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port, or 0 for any"
        ) from None
    except OverflowError:
        raise UserError(f"--port {port}: expected 0 to 65535") from None


def _family(host: str) -> Any:
    import socket

    return socket.AF_INET6 if ":" in host else socket.AF_INET
