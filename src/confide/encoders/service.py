"""What the encoder server answers, apart from HTTP: who may ask, how much, and what they get."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from torch import Tensor

from confide.encoders.batching import Batcher, Pass
from confide.encoders.encoder import Encoder, EncoderSettings, join_windows
from confide.encoders.wire import About, Limits, WireError, dump, load
from confide.errors import UserError

SHORTEST_TOKEN = 16  # characters
_VIEWS = 64  # combinations of pooling and windows that are kept
Query = Mapping[str, str]
Charge = Callable[[int], None]
Method = Callable[[Query, bytes, Charge], bytes]


class Access:
    """Decides who may ask and how much: compares access tokens in constant time, and gives each an allowance."""

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
        self._rate, self._burst = rate, 2 * rate  # two seconds' worth may be asked for at once
        self._lock = threading.Lock()
        self._left = [(self._burst, time.monotonic()) for _ in tokens]

    def holder(self, header: str | None) -> int:
        """Find the number of the access token in an Authorization header."""
        word, _, token = (header or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        # All of them are compared, so that the time tells nothing.
        found = [index for index, known in enumerate(self._digests) if hmac.compare_digest(digest, known)]
        if word.lower() != "bearer" or not found:
            given = "another token than those that this server knows" if header else "no access token"
            raise HTTPException(401, f"{given}; expected Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        return found[-1]

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
        raise HTTPException(
            429, f"more than {self._rate:g} tokens a second; ask again in {wait} s", {"Retry-After": str(wait)}
        )


class Service:
    """Computes the answers. Each method takes a query, a body, and a function that charges for tokens."""

    def __init__(self, encoder: Encoder, limits: Limits) -> None:
        if not encoder.tokeniser.is_fast:
            raise UserError(
                f"the tokeniser of {encoder.settings.source} is not one of the tokenizers library; expected one with a "
                "tokenizer.json, which clients can be given: save it again with a current transformers"
            )
        self.encoder, self.limits, self.batcher = encoder, limits, Batcher(encoder)
        self._table = _read_table(encoder.model.get_input_embeddings())  # (vocabulary, embedding width)
        self.vocabulary = len(self._table)
        self.body = limits.body(encoder.embedding_width, encoder.width)
        # What clients fetch.
        self.tokeniser: bytes = encoder.tokeniser.backend_tokenizer.to_str().encode()
        self.embeddings = dump({"embeddings": self._table.float()})
        self._tokeniser_digest = hashlib.sha256(self.tokeniser).hexdigest()
        self._embeddings_digest = hashlib.sha256(self.embeddings).hexdigest()
        self._lock = threading.Lock()  # of the tokeniser, which is not for several threads, and of identities
        self._view = lru_cache(_VIEWS)(encoder.with_settings)
        # The default settings, whatever this server's are: a name for weights and tokeniser alone.
        self.model: str = self._view(EncoderSettings(source=encoder.settings.source)).identity

    def about(self, query: Query) -> About:
        settings = self._settings(query)
        with self._lock:
            encoder = self._view(settings)
            return About(
                model=self.model,
                identity=encoder.identity,
                kind=encoder.model.config.model_type,
                causal=encoder.causal,
                blocks=encoder.blocks_count,
                width=encoder.width,
                embedding_width=encoder.embedding_width,
                vocabulary=self.vocabulary,
                context=encoder.context,
                pooling=settings.pooling,
                max_tokens=encoder.max_tokens,
                max_windows=settings.max_windows,
                before=encoder.before,
                after=encoder.after,
                tokeniser=self._tokeniser_digest,
                embeddings=self._embeddings_digest,
                limits=self.limits,
            )

    def hidden_of_texts(self, query: Query, body: bytes, charge: Charge) -> bytes:
        """Compute hidden states of texts, which are cut into tokens and windows here."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise HTTPException(400, 'a body that is not JSON; expected {"texts": ["...", ...]}') from None
        texts = document.get("texts") if isinstance(document, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise HTTPException(400, 'a body without a list of texts; expected {"texts": ["...", ...]}')
        self._check_size(len(texts), 0)
        settings = self._settings(query)
        with self._lock:
            try:
                batch = self._view(settings).tokens(texts)
            except UserError as error:
                raise HTTPException(400, str(error)) from None
        tokens = int(batch.mask.sum())
        self._check_size(len(batch.owner), tokens)
        charge(tokens)
        packed = self._table[batch.ids[batch.mask.bool()]]
        return dump(
            {"hidden": join_windows(self.batcher.compute(Pass(settings.pooling, packed, batch.lengths)), batch)}
        )

    def hidden(self, query: Query, body: bytes, charge: Charge) -> bytes:
        """Compute hidden states of windows that the client has cut into tokens."""
        given = _read(body, {"ids": (torch.int64, 1), "lengths": (torch.int64, 1)})
        ids, lengths = given["ids"], given["lengths"]
        self._check_lengths(lengths, len(ids))
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            raise HTTPException(400, f"token {int(ids.max())}; expected 0 to {self.vocabulary - 1}, the vocabulary")
        job = Pass(self._settings(query).pooling, self._table[ids], lengths)
        charge(len(ids))
        return dump({"hidden": self.batcher.compute(job)})

    def forward(self, query: Query, body: bytes, charge: Charge) -> bytes:
        """Compute hidden states of soft embeddings."""
        job = self._job(query, _read(body, {"embeddings": (torch.float32, 2), "lengths": (torch.int64, 1)}))
        charge(len(job.embeddings))
        return dump({"hidden": self.batcher.compute(job)})

    def backward(self, query: Query, body: bytes, charge: Charge) -> bytes:
        """Compute the gradient of soft embeddings from that of the hidden states; costs double: it goes both ways."""
        wanted = {"embeddings": (torch.float32, 2), "lengths": (torch.int64, 1), "gradient": (torch.float32, 2)}
        given = _read(body, wanted)
        job = self._job(query, given)
        found, shape = tuple(given["gradient"].shape), (len(job.lengths), self.encoder.width)
        if found != shape:
            raise HTTPException(400, f"gradient of shape {found}; expected {shape}: (texts, width)")
        charge(2 * len(job.embeddings))
        return dump({"gradient": self.batcher.compute(job)})

    def _settings(self, query: Query) -> EncoderSettings:
        """Read the pooling and the windows that a request asks for."""
        asked = {name: query[name] for name in ("pooling", "max_tokens", "max_windows") if name in query}
        try:
            settings = EncoderSettings.model_validate(self.encoder.settings.model_dump() | asked)
        except ValidationError as error:
            wrong = [f"{each['loc'][0]}={each['input']!r}; expected: {each['msg']}" for each in error.errors()]
            raise HTTPException(400, ", ".join(wrong)) from None
        if self._view(settings).room < 1:
            raise HTTPException(400, f"max_tokens={settings.max_tokens}; expected room beside the special tokens")
        return settings

    def _job(self, query: Query, given: Mapping[str, Tensor]) -> Pass:
        """Check that soft embeddings have the right width and agree with their lengths, and make a job of them."""
        embeddings, width = given["embeddings"], self.encoder.embedding_width
        if embeddings.shape[1] != width:
            raise HTTPException(400, f"embeddings of shape {tuple(embeddings.shape)}; expected (tokens, {width})")
        self._check_lengths(given["lengths"], len(embeddings))
        return Pass(self._settings(query).pooling, embeddings, given["lengths"], given.get("gradient"))

    def _check_lengths(self, lengths: Tensor, tokens: int) -> None:
        longest = self.encoder.context or self.limits.tokens
        if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > longest:
            raise HTTPException(400, f"lengths of texts; expected at least one text, each of 1 to {longest} tokens")
        if int(lengths.sum()) != tokens:
            raise HTTPException(400, f"lengths that sum to {int(lengths.sum())}; expected {tokens}, the tokens sent")
        self._check_size(len(lengths), tokens)

    def _check_size(self, texts: int, tokens: int) -> None:
        for given, most, what in ((texts, self.limits.texts, "texts"), (tokens, self.limits.tokens, "tokens")):
            if given > most:
                raise HTTPException(413, f"{given} {what} in one request; expected at most {most}: send them in parts")


def _read(body: bytes, expected: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
    try:
        tensors = load(body, expected)
    except WireError as error:
        raise HTTPException(400, str(error)) from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise HTTPException(400, f"{name} holds values that are not finite; expected numbers")
    return tensors


def _read_table(embedding: torch.nn.Embedding) -> Tensor:
    """Find the vector of each token; some models' own kinds of embedding do more than look up a row."""
    if type(embedding) is torch.nn.Embedding:
        return embedding.weight.detach()
    with torch.no_grad():
        return embedding(torch.arange(embedding.num_embeddings))  # type: ignore[no-any-return]
