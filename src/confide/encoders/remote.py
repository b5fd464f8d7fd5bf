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

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from confide.encoders.client import EncoderClient
from confide.encoders.encoder import Batch, Encoder, EncoderSettings, join_windows
from confide.encoders.weights import is_url
from confide.encoders.wire import About, WireError, dump, load
from confide.errors import UserError, require

PATIENCE = 60.0  # seconds that a lost server is waited for
_OPENING = 5.0  # seconds that it is waited for at the start, when a mistyped address is likelier


def open_encoder(settings: EncoderSettings, identity: str | None = None) -> Encoder:
    """Open an encoder here or on a server, and check its identity if the caller knows it."""
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
        self.client = EncoderClient(settings.source, patience)
        wanted = {"pooling": settings.pooling, "max_tokens": settings.max_tokens, "max_windows": settings.max_windows}
        self.about = self._about(wanted)
        self.model: Any = None
        self.causal, self.context = self.about.causal, self.about.context
        self.width, self.embedding_width = self.about.width, self.about.embedding_width
        self.blocks_count = self.about.blocks
        self.before, self.after = self.about.before, self.about.after
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

        path = self.client.fetch("/tokeniser", self.about.tokeniser, "tokenizer.json")
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

            path = self.client.fetch("/embeddings", self.about.embeddings, "embeddings.safetensors")
            table = load_file(path)["embeddings"]
            self._embedding = lambda ids: functional.embedding(ids, table)
        return super().embeddings(batch, adapter)

    def blocks(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Send soft embeddings through the blocks on the server; differentiable once."""  # (windows, width)
        return _Blocks.apply(embeddings, mask, self)  # type: ignore[no-untyped-call,no-any-return]

    def hidden(self, batch: Batch, adapter: Tensor | None = None) -> Tensor:
        """Compute the vector of each text; without an adapter only token ids are sent."""  # (texts, width)
        if adapter is not None:
            return super().hidden(batch, adapter)
        packed = {"ids": batch.ids[batch.mask.bool()]}
        return join_windows(self.ask("/hidden", batch.lengths, packed), batch)

    def ask(self, path: str, lengths: Tensor, packed: dict[str, Tensor], gradient: Tensor | None = None) -> Tensor:
        """Ask the server about packed windows, in as many requests as its limits ask for.

        Gives hidden states (windows, width), or from their gradient that of the soft embeddings (tokens, embedding).
        """
        name, width = ("hidden", self.width) if gradient is None else ("gradient", self.embedding_width)
        found = [torch.empty(0, width)]
        for rows, tokens in self._parts(lengths):
            sent = {key: tensor[tokens] for key, tensor in packed.items()} | {"lengths": lengths[rows]}
            if gradient is not None:
                sent["gradient"] = gradient[rows]
            answer = self.client.request("POST", path, self._query, dump(sent))
            count = len(lengths[rows]) if gradient is None else int(lengths[rows].sum())
            try:
                part = load(answer, {name: (torch.float32, 2)})[name]
                if part.shape != (count, width):
                    raise WireError(f"{name} of shape {tuple(part.shape)}; expected {(count, width)}")
            except WireError as error:
                raise UserError(f"the encoder server {self.settings.source} answered {path} with {error}") from None
            found.append(part)
        return torch.cat(found)

    def _parts(self, lengths: Tensor) -> Iterator[tuple[slice, slice]]:
        """Cut windows and their tokens into parts that the server takes."""
        limits = self.about.limits
        first = start = end = 0
        for index, length in enumerate(lengths.tolist()):
            if index > first and (index - first >= limits.texts or end - start + length > limits.tokens):
                yield slice(first, index), slice(start, end)
                first, start = index, end
            end += length
        if len(lengths) > first:
            yield slice(first, len(lengths)), slice(start, end)


class _Blocks(torch.autograd.Function):
    """Makes one differentiable function of the server's forward and backward; sends nothing that is not finite."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, mask: Tensor, encoder: RemoteEncoder) -> Tensor:
        ctx.save_for_backward(embeddings, mask)
        ctx.encoder = encoder
        sent = _finite_windows(embeddings, mask)
        hidden = torch.full((len(mask), encoder.width), torch.nan)
        packed = {"embeddings": embeddings[mask.bool() & sent.unsqueeze(1)].float()}
        hidden[sent] = encoder.ask("/forward", mask[sent].sum(dim=1), packed)
        return hidden.to(embeddings.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        embeddings, mask = ctx.saved_tensors
        sent = _finite_windows(embeddings, mask) & torch.isfinite(gradient).all(dim=1)
        tokens = mask.bool() & sent.unsqueeze(1)
        found = torch.zeros_like(embeddings)
        found[mask.bool()] = torch.nan
        packed = {"embeddings": embeddings[tokens].float()}
        answer = ctx.encoder.ask("/backward", mask[sent].sum(dim=1), packed, gradient[sent].float())
        found[tokens] = answer.to(embeddings.dtype)
        return found, None, None


def _finite_windows(embeddings: Tensor, mask: Tensor) -> Tensor:
    """Find the windows all of whose embeddings are finite; padding does not count."""  # (windows,) bool
    return (torch.isfinite(embeddings).all(dim=2) | ~mask.bool()).all(dim=1)
