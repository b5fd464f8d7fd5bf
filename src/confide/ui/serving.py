"""`confide serve`: the model of one run answers programs over HTTP.

| request                                                              | answer                                        |
|----------------------------------------------------------------------|-----------------------------------------------|
| POST /transcribe, body: a recording; Content-Type or ?file=x.wav     | text, segments, words with times, confidences |
| POST /retrieve, body: {"query": "...", "k": 5}                       | documents, best first, with scores            |
| GET /about                                                           | the notes of the model: epsilon, unit, tokens |
| GET /health                                                          | {"status": "ok"}, without a token             |

It listens on loopback and answers to the name of this machine only. Beyond loopback every request but /health needs
`Authorization: Bearer TOKEN`. Pages of other sites are refused. Bodies have a limit, connections a time limit, and
every error is JSON. What is sent is held in memory (a recording in a temporary file that is removed at once) and kept
nowhere.
"""

from __future__ import annotations

import hmac
import json
import ssl
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from confide.errors import UserError
from confide.runs import answering, folder
from confide.runs.notes import read_notes
from confide.web.access import check_host, is_foreign, token_for
from confide.web.answers import Json, application, explain_mistake, read_body, route
from confide.web.server import WebServer

TOKEN = "CONFIDE_SERVE_TOKEN"
MOST_SOUND, MOST_TEXT = 50 * 2**20, 64 * 2**10
_ENDINGS = {
    "audio/wav": ".wav", "audio/x-wav": ".wav", "audio/wave": ".wav", "audio/flac": ".flac", "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg", "audio/opus": ".opus", "audio/mp4": ".m4a", "audio/x-m4a": ".m4a", "audio/m4a": ".m4a",
    "audio/aac": ".m4a",
}  # fmt: skip


class ModelServer(WebServer):
    """One run's model, opened before it listens. Answers are made in threads: some take seconds."""

    def __init__(
        self, run: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
        tls: ssl.SSLContext | None = None, encoder: str | None = None, documents: Path | None = None,
    ) -> None:  # fmt: skip
        self.run_folder, self.token, self.encoder = run, token_for(host, token, TOKEN), encoder
        self.documents, self.kind = documents, answering.open_model(run, encoder, documents)
        one = ("/transcribe", self._transcribe) if self.kind == "speech" else ("/retrieve", self._retrieve)
        routes = [route("POST", *one), route("GET", "/about", self._about), route("GET", "/health", self._health)]
        explain = dict.fromkeys((UserError, ModuleNotFoundError), explain_mistake)
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        super().__init__(application(routes, self._check, explain, headers), host, port, tls)

    def _check(self, request: Request) -> None:
        if self.token is None:
            check_host(request, self.port, "service")
        elif request.url.path != "/health":
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise HTTPException(
                    401, "expected the header Authorization: Bearer TOKEN, with the token that `confide serve` was "
                    "started with or has printed", {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        if is_foreign(request):
            raise HTTPException(403, "requests from other pages are not answered")

    def _health(self, request: Request) -> Response:
        return Json({"status": "ok"})

    def _about(self, request: Request) -> Response:
        return Json({"task": self.kind, "notes": read_notes(self.run_folder / folder.MODEL)})

    async def _transcribe(self, request: Request) -> Response:
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        name = request.query_params.get("file") or f"sent{_ENDINGS.get(kind, '')}"
        sound = await read_body(request, MOST_SOUND)
        return Json(await run_in_threadpool(answering.heard, self.run_folder, sound, name, self.encoder))

    async def _retrieve(self, request: Request) -> Response:
        try:
            asked = json.loads(await read_body(request, MOST_TEXT))
            query, k = str(asked["query"]), int(asked.get("k", 5))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise HTTPException(400, 'expected JSON: {"query": "some words", "k": 5}') from None
        return Json(await run_in_threadpool(answering.found, self.run_folder, query, k, self.documents, self.encoder))
