"""What the encoder server answers, apart from HTTP: who may ask, how much, and what they get."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from confide.encoders.batching import Batcher, Job, Refused, view
from confide.encoders.encoder import Encoder, join_windows
from confide.encoders.wire import About, Limits, Pooling, WireError, dump, load, stream
from confide.errors import UserError

SHORTEST_TOKEN = 16  # characters
_VIEWS = 64  # combinations of pooling and windows that are kept


class Access:
    """Who may ask, and how much: tokens compared in constant time, and an allowance of text tokens for each."""

    def __init__(self, tokens: Sequence[str], rate: float) -> None:
        short = [token for token in tokens if len(token) < SHORTEST_TOKEN or not token.isascii()]
        if not tokens or short:
            given = f"an access token of {len(short[0])} characters" if short else "no access token"
            raise UserError(
                f"{given}; expected at least one, each of {SHORTEST_TOKEN} or more ASCII characters: make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))' and give it by --token-file or "
                "CONFIDE_ENCODER_TOKEN"
            )
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self._rate = rate
        self._lock = threading.Lock()
        self._left = [(self._burst, time.monotonic()) for _ in tokens]

    @property
    def _burst(self) -> float:
        return 2 * self._rate  # two seconds' worth may be asked for at once

    def holder(self, header: str | None) -> int:
        """The number of the token in an Authorization header."""
        word, _, token = (header or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        found = -1
        for index, known in enumerate(self._digests):  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, known):
                found = index
        if word.lower() != "bearer" or found < 0:
            given = "another token than those that this server knows" if header else "no access token"
            raise Refused(401, f"{given}; expected Authorization: Bearer TOKEN", WWW_Authenticate="Bearer")
        return found

    def charge(self, holder: int, tokens: int) -> None:
        """Take from the allowance. It may go below zero once, and must be above zero for the next request."""
        if not self._rate:
            return
        with self._lock:
            left, then = self._left[holder]
            now = time.monotonic()
            left = min(self._burst, left + (now - then) * self._rate)
            if left > 0:
                self._left[holder] = (left - max(1, tokens), now)
                return
            self._left[holder] = (left, now)
        wait = max(1, math.ceil(-left / self._rate))
        raise Refused(429, f"more than {self._rate:g} tokens a second; ask again in {wait} s", Retry_After=str(wait))


class Service:
    """What the server answers, apart from HTTP."""

    def __init__(self, encoder: Encoder, limits: Limits, batcher: Batcher) -> None:
        if not getattr(encoder.tokeniser, "is_fast", False):
            raise UserError(
                f"the tokeniser of {encoder.settings.source} is not one of the tokenizers library; expected one with a "
                "tokenizer.json, which clients can be given: save it again with a current transformers"
            )
        self.encoder, self.limits, self.batcher = encoder, limits, batcher
        self._table = _table(encoder.model.get_input_embeddings())  # (vocabulary, embedding width)
        self.body = limits.body(encoder.embedding_width, encoder.width)
        self.tokeniser: bytes = encoder.tokeniser.backend_tokenizer.to_str().encode()
        self._lock = threading.Lock()  # of the tokeniser, which is not for several threads, and of the views
        self._views: dict[tuple[str, int, int], Encoder] = {}
        # The default settings, whatever this server's are: a name for weights and tokeniser alone.
        self.model: str = self._view({"pooling": "last", "max_tokens": "256", "max_windows": "4"}).identity

    @cached_property
    def _embeddings_digest(self) -> str:
        digest = hashlib.sha256()
        for piece in stream("embeddings", self._table)[1]:
            digest.update(piece)
        return digest.hexdigest()

    def about(self, query: dict[str, str]) -> About:
        with self._lock:
            encoder = self._view(query)
            return About(
                model=self.model,
                identity=encoder.identity,
                kind=encoder.model.config.model_type,
                causal=encoder.causal,
                blocks=encoder.blocks_count,
                width=encoder.width,
                embedding_width=encoder.embedding_width,
                vocabulary=len(self._table),
                context=encoder.context,
                pooling=encoder.settings.pooling,
                max_tokens=encoder.max_tokens,
                max_windows=encoder.settings.max_windows,
                before=encoder._before,
                after=encoder._after,
                tokeniser=hashlib.sha256(self.tokeniser).hexdigest(),
                embeddings=self._embeddings_digest,
                limits=self.limits,
            )

    def embeddings(self) -> tuple[int, Any]:
        return stream("embeddings", self._table)

    @property
    def vocabulary(self) -> int:
        return len(self._table)

    def hidden_of_texts(self, query: dict[str, str], texts: Any, charge: Callable[[int], None]) -> bytes:
        """Hidden states of texts, which are cut into tokens and windows here."""
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Refused(400, 'a body without a list of texts; expected {"texts": ["...", ...]}')
        self._check_size(len(texts), 0)
        with self._lock:
            encoder = self._view(query)
            try:
                batch = encoder.tokens(texts)
            except UserError as error:
                raise Refused(400, str(error)) from None
        self._check_size(len(batch.owner), int(batch.mask.sum()))
        charge(int(batch.mask.sum()))
        packed = self._table[batch.ids[batch.mask.bool()]]
        vectors = self.batcher.compute(Job(encoder.settings.pooling, packed, batch.lengths))
        return dump({"hidden": join_windows(vectors, batch)})

    def hidden(self, query: dict[str, str], body: bytes, charge: Callable[[int], None]) -> bytes:
        """Hidden states of windows that the client has cut into tokens."""
        given = self._read(body, {"ids": (torch.int64, 1), "lengths": (torch.int64, 1)})
        ids, lengths = given["ids"], given["lengths"]
        self._check_lengths(lengths, len(ids))
        if int(ids.min()) < 0 or int(ids.max()) >= len(self._table):
            raise Refused(400, f"token {int(ids.max())}; expected 0 to {len(self._table) - 1}, the vocabulary")
        charge(len(ids))
        return dump({"hidden": self.batcher.compute(Job(_pooling(query), self._table[ids], lengths))})

    def forward(self, query: dict[str, str], body: bytes, charge: Callable[[int], None]) -> bytes:
        """Hidden states of soft embeddings."""
        given = self._read(body, {"embeddings": (torch.float32, 2), "lengths": (torch.int64, 1)})
        self._check_embeddings(given)
        charge(len(given["embeddings"]))
        return dump({"hidden": self.batcher.compute(Job(_pooling(query), given["embeddings"], given["lengths"]))})

    def backward(self, query: dict[str, str], body: bytes, charge: Callable[[int], None]) -> bytes:
        """The gradient of soft embeddings from that of the hidden states; counts twice, for it computes both ways."""
        wanted = {"embeddings": (torch.float32, 2), "lengths": (torch.int64, 1), "gradient": (torch.float32, 2)}
        given = self._read(body, wanted)
        self._check_embeddings(given)
        gradient, shape = given["gradient"], (len(given["lengths"]), self.encoder.width)
        if tuple(gradient.shape) != shape:
            raise Refused(400, f"gradient of shape {tuple(gradient.shape)}; expected {shape}: (texts, width)")
        charge(2 * len(given["embeddings"]))
        job = Job(_pooling(query), given["embeddings"], given["lengths"], gradient)
        return dump({"gradient": self.batcher.compute(job)})

    def _view(self, query: dict[str, str]) -> Encoder:
        """The encoder with the pooling and the windows that a request asks for."""
        settings = self.encoder.settings
        windows = {}
        for name, lowest in (("max_tokens", 8), ("max_windows", 1)):
            text = query.get(name, str(getattr(settings, name)))
            if not text.isdecimal() or len(text) > 6 or int(text) < lowest:
                raise Refused(400, f"{name}={text!r}; expected a number from {lowest} to 999999")
            windows[name] = int(text)
        pooling = _pooling(query, settings.pooling)
        key = (pooling, windows["max_tokens"], windows["max_windows"])
        if key not in self._views:
            other = view(self.encoder, pooling=pooling, **windows)
            if other._room < 1:
                raise Refused(400, f"max_tokens={windows['max_tokens']}; expected room beside the special tokens")
            if len(self._views) >= _VIEWS:
                self._views.pop(next(iter(self._views)))
            self._views[key] = other
        return self._views[key]

    def _read(self, body: bytes, expected: dict[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
        try:
            tensors = load(body, expected)
        except WireError as error:
            raise Refused(400, str(error)) from None
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise Refused(400, f"{name} holds values that are not finite; expected numbers")
        return tensors

    def _check_embeddings(self, given: dict[str, Tensor]) -> None:
        embeddings, width = given["embeddings"], self.encoder.embedding_width
        if embeddings.shape[1] != width:
            raise Refused(400, f"embeddings of shape {tuple(embeddings.shape)}; expected (tokens, {width})")
        self._check_lengths(given["lengths"], len(embeddings))

    def _check_lengths(self, lengths: Tensor, tokens: int) -> None:
        longest = self.encoder.context or self.limits.tokens
        if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > longest:
            raise Refused(400, f"lengths of texts; expected at least one text, each of 1 to {longest} tokens")
        if int(lengths.sum()) != tokens:
            raise Refused(400, f"lengths that sum to {int(lengths.sum())}; expected {tokens}, the tokens sent")
        self._check_size(len(lengths), tokens)

    def _check_size(self, texts: int, tokens: int) -> None:
        if texts > self.limits.texts:
            raise Refused(
                413, f"{texts} texts in one request; expected at most {self.limits.texts}: send them in parts"
            )
        if tokens > self.limits.tokens:
            raise Refused(
                413, f"{tokens} tokens in one request; expected at most {self.limits.tokens}: send them in parts"
            )


def _table(embedding: torch.nn.Embedding) -> Tensor:
    """What each token becomes; some models' own kinds of embedding do more than look up a row."""
    if type(embedding) is torch.nn.Embedding:
        return embedding.weight.detach()
    with torch.no_grad():
        made: Tensor = embedding(torch.arange(embedding.num_embeddings))
    return made


def _pooling(query: dict[str, str], default: Pooling = "last") -> Pooling:
    pooling = query.get("pooling", default)
    if pooling == "last":
        return "last"
    if pooling == "mean":
        return "mean"
    raise Refused(400, f"pooling={pooling!r}; expected last or mean")
