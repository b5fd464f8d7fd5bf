"""A frozen encoder that runs elsewhere (CAR section 4.1), with the interface of the one that runs here.

The client holds the tokeniser, the token embeddings, the adapter and the head; the frozen blocks are on a server
(`confide encoder serve`). Tokeniser and embeddings are fetched from it once, checked against their digests and kept in
the cache; clients that train only a head never need the embeddings. Gradients flow through the server: the backward
pass sends the gradient of the hidden states and gets that of the soft embeddings.

What travels in a training step, for each token: its soft embedding twice (forward and backward: the server keeps
nothing) and its gradient once, 4 bytes a number; for each text its hidden state and the gradient of that. Without an
adapter: 8 bytes a token.

All requests can be repeated, so they are, with growing pauses, when the server is busy, lost or started again. Texts
whose embeddings are not finite (a training that diverged) are not sent: their hidden states are NaN, as they are with
an encoder on this machine.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from confide.encoders.encoder import Batch, Encoder, EncoderSettings, join_windows
from confide.encoders.weights import encoders_folder, file_digest, is_url
from confide.encoders.wire import (
    CA_VARIABLE,
    TENSORS,
    TOKEN_VARIABLE,
    About,
    WireError,
    dump,
    is_loopback,
    load,
    pack,
    unpack,
)
from confide.errors import UserError, require
from confide.files import make_folder

PATIENCE = 60.0  # seconds that a lost server is waited for
_OPENING = 5.0  # the same at the start, when a mistyped address is likelier
_ANSWER = 600.0  # seconds that a server may compute
_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


def open_encoder(settings: EncoderSettings, identity: str | None = None) -> Encoder:
    """The one place where an encoder is made, here or on a server; `identity` is what it must have, if known."""
    require("retrieval", "an encoder")
    encoder = RemoteEncoder(settings) if is_url(settings.source) else Encoder(settings)
    if identity is not None and encoder.identity != identity:
        raise UserError(
            f"the encoder {settings.source} has the identity {encoder.identity[:16]}, this run was started with "
            f"{identity[:16]}: other weights, tokeniser, pooling or windows; expected the same ones: serve or name the "
            "encoder that the run was started with, or start a new run"
        )
    return encoder


class RemoteEncoder(Encoder):
    """An `Encoder` whose blocks are on a server. Made from the server's address in `settings.source`."""

    def __init__(self, settings: EncoderSettings, patience: float = PATIENCE) -> None:
        # Not Encoder.__init__, which loads a model.
        self.settings = settings
        self.client = Client(settings.source, patience)
        wanted = {"pooling": settings.pooling, "max_tokens": settings.max_tokens, "max_windows": settings.max_windows}
        self.about = self._about(wanted)
        self.model: Any = None
        self.causal, self.context = self.about.causal, self.about.context
        self.width, self.embedding_width = self.about.width, self.about.embedding_width
        self.blocks_count, self.max_tokens = self.about.blocks, self.about.max_tokens
        self._before, self._after = self.about.before, self.about.after
        self._room = self.max_tokens - len(self._before) - len(self._after)
        if self.max_tokens > self.about.limits.tokens:
            raise UserError(
                f"max_tokens={self.max_tokens} to a window, and the encoder server {settings.source} takes "
                f"{self.about.limits.tokens} in a request; lower max_tokens, or serve with a larger --max-tokens"
            )
        self._query: dict[str, Any] = {"model": self.about.model, "pooling": settings.pooling}
        self.tokeniser: Any = self._tokeniser()
        self._embedding: Any = None  # fetched when an adapter is there to use it

    def _about(self, wanted: dict[str, Any]) -> About:
        answer = self.client.request("GET", "/about", wanted, patience=_OPENING)
        try:
            about = About.model_validate_json(answer)
        except ValidationError:
            raise UserError(
                f"{self.settings.source} answers, but not as an encoder server of this version; expected one that "
                "`confide encoder serve` of the same version runs: check address and version"
            ) from None
        if about.pooling != self.settings.pooling:
            raise UserError(f"{self.settings.source} pools by {about.pooling}; expected {self.settings.pooling}")
        return about

    def _tokeniser(self) -> Any:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        path = self.client.fetched("/tokeniser", self.about.tokeniser, "tokenizer.json")
        wrap: Any = PreTrainedTokenizerFast
        return wrap(tokenizer_object=Tokenizer.from_file(str(path)))

    @cached_property
    def identity(self) -> str:
        """That of the same encoder on this machine: hidden states that were kept serve both."""
        return self.about.identity

    def embeddings(self, batch: Batch, adapter: Tensor | None = None) -> Tensor:
        """Soft embeddings, made on this machine."""  # (windows, tokens, embedding)
        if self._embedding is None:
            from safetensors.torch import load_file

            path = self.client.fetched("/embeddings", self.about.embeddings, "embeddings.safetensors")
            table = load_file(path)["embeddings"]
            self._embedding = lambda ids: functional.embedding(ids, table)
        return super().embeddings(batch, adapter)

    def blocks(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Frozen blocks, final norm and pooling on the server; differentiable once."""  # (windows, width)
        return _Blocks.apply(embeddings, mask, self)  # type: ignore[no-untyped-call,no-any-return]

    def hidden(self, batch: Batch, adapter: Tensor | None = None) -> Tensor:
        """The vector of each text; without an adapter only token ids are sent."""  # (texts, width)
        if adapter is not None:
            return super().hidden(batch, adapter)
        ids = pack(batch.ids, batch.mask)
        lengths = batch.lengths
        found = [
            self._ask("/hidden", {"ids": ids[tokens], "lengths": lengths[rows]}, "hidden", len(lengths[rows]))
            for rows, tokens in self._parts(lengths)
        ]
        return join_windows(torch.cat(found), batch)

    def forward_windows(self, packed: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states of soft embeddings, as many requests as the server's limits ask for."""  # (windows, width)
        found = [
            self._ask(
                "/forward", {"embeddings": packed[tokens], "lengths": lengths[rows]}, "hidden", len(lengths[rows])
            )
            for rows, tokens in self._parts(lengths)
        ]
        return torch.cat(found) if found else packed.new_empty(0, self.width)

    def backward_windows(self, packed: Tensor, lengths: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the soft embeddings from that of the hidden states."""  # (tokens, embedding)
        found = []
        for rows, tokens in self._parts(lengths):
            sent = {"embeddings": packed[tokens], "lengths": lengths[rows], "gradient": gradient[rows]}
            found.append(self._ask("/backward", sent, "gradient", len(packed[tokens])))
        return torch.cat(found) if found else torch.empty_like(packed)

    def _parts(self, lengths: Tensor) -> Iterator[tuple[slice, slice]]:
        """Windows and their tokens in parts that the server takes."""
        limits = self.about.limits
        first = start = end = 0
        for index, length in enumerate(lengths.tolist()):
            if index > first and (index - first >= limits.texts or end - start + length > limits.tokens):
                yield slice(first, index), slice(start, end)
                first, start = index, end
            end += length
        if len(lengths) > first:
            yield slice(first, len(lengths)), slice(start, end)

    def _ask(self, path: str, tensors: dict[str, Tensor], name: str, rows: int) -> Tensor:
        answer = self.client.request("POST", path, self._query, dump(tensors))
        width = self.width if name == "hidden" else self.embedding_width
        try:
            found = load(answer, {name: (torch.float32, 2)})[name]
            if found.shape != (rows, width):
                raise WireError(f"{name} of shape {tuple(found.shape)}; expected {(rows, width)}")
        except WireError as error:
            raise UserError(f"the encoder server {self.settings.source} answered {path} with {error}") from None
        return found


class _Blocks(torch.autograd.Function):
    """The server's forward and backward as one differentiable function; what is not finite is not sent."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, mask: Tensor, encoder: RemoteEncoder) -> Tensor:
        packed, lengths = pack(embeddings.detach(), mask).float(), mask.sum(dim=1)
        ctx.save_for_backward(packed, lengths)
        ctx.encoder, ctx.longest, ctx.kind = encoder, mask.shape[1], embeddings.dtype
        sent = _finite_windows(packed, lengths)
        hidden = packed.new_full((len(lengths), encoder.width), torch.nan)
        hidden[sent] = encoder.forward_windows(packed[sent.repeat_interleave(lengths)], lengths[sent])
        return hidden.to(embeddings.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packed, lengths = ctx.saved_tensors
        gradient = gradient.float()
        sent = _finite_windows(packed, lengths) & torch.isfinite(gradient).all(dim=1)
        tokens = sent.repeat_interleave(lengths)
        found = torch.full_like(packed, torch.nan)
        found[tokens] = ctx.encoder.backward_windows(packed[tokens], lengths[sent], gradient[sent])
        return unpack(found, lengths, ctx.longest)[0].to(ctx.kind), None, None


def _finite_windows(packed: Tensor, lengths: Tensor) -> Tensor:
    """Windows all of whose embeddings are finite."""  # (tokens, embedding) -> (windows,) bool
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    finite = torch.ones(len(lengths), dtype=torch.bool)
    finite[owner[~torch.isfinite(packed).all(dim=1)]] = False
    return finite


class Client:
    """HTTP to one encoder server: a connection for each thread, and patience."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.url, self.patience = url.rstrip("/"), patience
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit("http:"), None
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise UserError(
                f"the encoder server {url!r} is not an address; expected https://host:port, and the access token in "
                f"the environment variable {TOKEN_VARIABLE}"
            )
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise UserError(
                f"the encoder server {url} is asked for over plain HTTP, which anyone on the network can read; "
                "expected https://, or http://127.0.0.1:port on this machine or through a tunnel"
            )
        self._host, self._port, self._prefix = parts.hostname, port, parts.path
        self._tls = _tls() if parts.scheme == "https" else None
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not self._token or not self._token.isascii() or not self._token.isprintable():
            raise UserError(
                f"no access token for the encoder server {url}; expected it in the environment variable "
                f"{TOKEN_VARIABLE}: ask whoever runs the server"
            )
        self._local = threading.local()

    def request(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: bytes | None = None,
        patience: float | None = None,
    ) -> bytes:  # fmt: skip
        """The body of the answer; asks again while the server is busy or away."""
        return self._patiently(lambda: self._once(method, path, query, body, _whole), patience)

    def fetched(self, path: str, digest: str, name: str) -> Path:
        """A file of the server in the cache, fetched unless it is there; checked every time."""
        folder = encoders_folder() / "remote"
        target = folder / f"{digest[:24]}-{name}"
        if not (target.is_file() and file_digest(target) == digest):
            make_folder(folder)
            with tempfile.TemporaryDirectory(prefix=".fetching.", dir=folder) as scratch:
                part = Path(scratch) / name
                self._patiently(lambda: self._once("GET", path, None, None, lambda answer: _to_file(answer, part)))
                if file_digest(part) != digest:
                    raise UserError(
                        f"{path} of the encoder server {self.url} is not what it says in /about (SHA-256 {digest}); "
                        "expected the same model throughout: was the server changed just now? Start again"
                    )
                os.replace(part, target)
        return target

    def _patiently(self, ask: Callable[[], bytes], patience: float | None = None) -> bytes:
        patience = self.patience if patience is None else patience
        pause, end = _PAUSE, 0.0
        while True:
            wait = pause
            try:
                return ask()
            except _Busy as busy:
                trouble, wait = str(busy), max(wait, busy.wait)
                if busy.status == 429 and end:  # it is there and has said when to come back
                    end += wait
            except ssl.SSLCertVerificationError as error:
                raise UserError(
                    f"the certificate of the encoder server {self.url} is not to be trusted ({error.verify_message}); "
                    f"expected one for this host from a known authority: name the file of its authority in the "
                    f"environment variable {CA_VARIABLE}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
                    raise UserError(
                        f"the encoder server {self.url} does not speak TLS; expected https: check the port, or use "
                        "http:// if it is on this machine"
                    ) from error
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

    def _once(
        self, method: str, path: str, query: dict[str, Any] | None, body: bytes | None,
        take: Callable[[http.client.HTTPResponse], bytes],
    ) -> bytes:  # fmt: skip
        connection = self._connection()
        headers = {"Authorization": f"Bearer {self._token}"} | ({} if body is None else {"Content-Type": TENSORS})
        address = self._prefix + path + ("?" + urlencode(query) if query else "")
        try:
            try:
                connection.request(method, address, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # It closed before it had read everything; perhaps it has said why.
            with connection.getresponse() as answer:
                if answer.status == 200:
                    return take(answer)
                said = answer.read(2**16)
        except BaseException:  # also when interrupted: an answer that was not read would be taken for the next one
            connection.close()
            raise
        raise self._refusal(answer, said)

    def _refusal(self, answer: http.client.HTTPResponse, said: bytes) -> Exception:
        try:
            message = str(json.loads(said)["error"])
        except (ValueError, KeyError, TypeError):
            message = f"{answer.status} {answer.reason}"
        if answer.status in (429, 502, 503, 504):
            wait = answer.headers.get("Retry-After", "")
            return _Busy(answer.status, message, float(wait) if wait.isdecimal() else 0.0)
        if answer.status == 401:
            return UserError(
                f"the encoder server {self.url} does not know the access token in {TOKEN_VARIABLE} ({message}); "
                "expected one of those that it was started with: ask whoever runs the server"
            )
        if answer.status == 409:
            return UserError(
                f"the encoder server {self.url} has another model than the one this run was started with ({message}); "
                "expected the same one: serve that model again, then go on with `confide resume`, or start a new run"
            )
        return UserError(f"the encoder server {self.url} refused ({answer.status}): {message}")

    def _connection(self) -> http.client.HTTPConnection:
        held: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if held is None:
            if self._tls is None:
                held = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER)
            else:
                held = http.client.HTTPSConnection(self._host, self._port, timeout=_ANSWER, context=self._tls)
            self._local.connection = held
        return held


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


def _whole(answer: http.client.HTTPResponse) -> bytes:
    return answer.read()


def _to_file(answer: http.client.HTTPResponse, path: Path) -> bytes:
    """Piece by piece: the embeddings of a large model need not fit into memory twice."""
    with path.open("wb") as file:
        while piece := answer.read(2**20):
            file.write(piece)
    return b""
