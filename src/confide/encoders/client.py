"""HTTP to a shared encoder's server, with patience: requests that can be repeated are, and files are fetched once."""

from __future__ import annotations

import json
import os
import random
import ssl
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from confide.encoders.weights import encoders_folder, file_digest
from confide.encoders.wire import CA_VARIABLE, TENSORS, TOKEN_VARIABLE
from confide.errors import UserError
from confide.files import make_folder
from confide.web.address import is_loopback

_ANSWER = 600.0  # seconds that a server may compute
_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


class EncoderClient:
    """Asks one encoder server, for any number of threads."""

    def __init__(self, url: str, patience: float) -> None:
        self.url, self.patience = url.rstrip("/"), patience
        try:
            address = httpx.URL(self.url)
        except httpx.InvalidURL:
            address = httpx.URL()
        if not address.host or address.userinfo or address.query or address.fragment:
            raise UserError(
                f"the encoder server {url!r} is not an address; expected https://host:port, and the access token in "
                f"the environment variable {TOKEN_VARIABLE}"
            )
        if address.scheme == "http" and not is_loopback(address.host):
            raise UserError(
                f"the encoder server {url} is asked for over plain HTTP, which anyone on the network can read; "
                "expected https://, or http://127.0.0.1:port on this machine or through a tunnel"
            )
        tls = _tls() if address.scheme == "https" else False  # plain HTTP has no certificate to check
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise UserError(
                f"no access token for the encoder server {url}; expected it in the environment variable "
                f"{TOKEN_VARIABLE}: ask whoever runs the server"
            )
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=address, headers=headers, verify=tls, timeout=_ANSWER, trust_env=False)

    def request(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: bytes | None = None,
        patience: float | None = None, into: Path | None = None,
    ) -> bytes:  # fmt: skip
        """Read the body of the answer, or write it to a file; ask again, with growing pauses, while nobody answers."""
        patience = self.patience if patience is None else patience
        pause, end = _PAUSE, 0.0
        while True:
            wait = pause
            try:
                return self._ask_once(method, path, query, body, into)
            except _Busy as busy:
                trouble, wait = str(busy), max(wait, busy.wait)
                if busy.status == 429 and end:  # it is there and has said when to come back
                    end += wait
            except httpx.RequestError as error:
                self._explain_tls(error)
                trouble = " ".join(str(error).split()) or type(error).__name__
            now = time.monotonic()
            end = end or now + max(patience, wait if patience else 0)
            if now + wait > end:
                raise UserError(
                    f"the encoder server {self.url} does not answer ({trouble}), not even after {patience:g} s of "
                    "trying again; expected one that runs: start it again with `confide encoder serve`, then go on "
                    "with `confide resume`: what was saved is kept"
                )
            # A little apart, so that clients that lost the same server do not all come back at once.
            time.sleep(wait * random.uniform(1.0, 1.25))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def fetch(self, path: str, digest: str, name: str) -> Path:
        """Find a file of the server in the cache, or fetch it; check its digest every time."""
        folder = encoders_folder() / "remote"
        target = folder / f"{digest[:24]}-{name}"
        if not (target.is_file() and file_digest(target) == digest):
            make_folder(folder)
            with tempfile.TemporaryDirectory(prefix=".fetching.", dir=folder) as scratch:
                part = Path(scratch) / name
                self.request("GET", path, into=part)
                if file_digest(part) != digest:
                    raise UserError(
                        f"{path} of the encoder server {self.url} is not what it says in /about (SHA-256 {digest}); "
                        "expected the same model throughout: was the server changed just now? Start again"
                    )
                os.replace(part, target)
        return target

    def _ask_once(
        self, method: str, path: str, query: dict[str, Any] | None, body: bytes | None, into: Path | None
    ) -> bytes:
        headers = None if body is None else {"Content-Type": TENSORS}
        with self._http.stream(method, path, params=query, content=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise self._explain_refusal(answer)
            if into is None:
                return answer.read()
            with into.open("wb") as file:  # piece by piece: the embeddings need not fit into memory twice
                file.writelines(answer.iter_bytes(2**20))
            return b""

    def _explain_refusal(self, answer: httpx.Response) -> Exception:
        status = answer.status_code
        try:
            message = str(json.loads(next(answer.iter_bytes(2**16), b""))["error"])
        except (ValueError, KeyError, TypeError):
            message = f"{status} {answer.reason_phrase}"
        if status in (429, 502, 503, 504):
            wait = answer.headers.get("Retry-After", "")
            return _Busy(status, message, float(wait) if wait.isdecimal() else 0.0)
        if status == 401:
            return UserError(
                f"the encoder server {self.url} does not know the access token in {TOKEN_VARIABLE} ({message}); "
                "expected one of those that it was started with: ask whoever runs the server"
            )
        if status == 409:
            return UserError(
                f"the encoder server {self.url} has another model than the one this run was started with ({message}); "
                "expected the same one: serve that model again, then go on with `confide resume`, or start a new run"
            )
        return UserError(f"the encoder server {self.url} refused ({status}): {message}")

    def _explain_tls(self, error: BaseException | None) -> None:
        """Raise what asking again would not mend: somewhere among the causes is the error of the ssl module."""
        while error is not None and not isinstance(error, ssl.SSLError):
            error = error.__cause__ or error.__context__
        if isinstance(error, ssl.SSLCertVerificationError):
            raise UserError(
                f"the certificate of the encoder server {self.url} is not to be trusted ({error.verify_message}); "
                f"expected one for this host from a known authority: name the file of its authority in the "
                f"environment variable {CA_VARIABLE}"
            ) from error
        if error is not None and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            raise UserError(
                f"the encoder server {self.url} does not speak TLS; expected https: check the port, or use http:// if "
                "it is on this machine"
            ) from error


class _Busy(Exception):
    """The server asks to be asked again."""

    def __init__(self, status: int, message: str, wait: float) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait


def _tls() -> ssl.SSLContext:
    file = os.environ.get(CA_VARIABLE)
    try:
        context = ssl.create_default_context(cafile=file or None)
    except OSError as error:
        raise UserError(
            f"cannot read the certificates in {file!r}, which {CA_VARIABLE} names ({error.strerror or error}); "
            "expected a PEM file with the certificate of the encoder server's authority"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
