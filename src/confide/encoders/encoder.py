"""The frozen encoder with its adapter (CAR section 3.1): h = POOL(NORM(TRF(ADP(TKN(x))))).

TKN are the model's own token embeddings, ADP a square matrix that starts at the identity and is the only thing that
trains, TRF the frozen blocks and NORM the model's own final norm. POOL is the last token, which is the end-of-text
token wherever the tokeniser has one (section 6.1), or the mean over all tokens. Position embeddings, where a model has
them, are added after the adapter: they belong to the blocks.

The adapter is an argument of the call, so gradients with respect to it flow through the frozen blocks to whoever holds
it. Batches are padded on the right, padding is masked in the attention and left out of the pooling, and positions
count from the first token of each text: a text's vector does not depend on what else is in its batch, up to rounding.

Differs from the paper: a text longer than `max_tokens` is read in windows of that size, each framed by the tokeniser's
own special tokens, and its vector is the mean of the windows' vectors weighted by their tokens (with mean pooling: the
mean over all tokens). The paper does not say what it does with long texts.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from confide.encoders import weights
from confide.errors import UserError
from confide.settings import Local, Section

# What a further pass of the model costs beside its tokens, in tokens; so much padding has to be saved by it.
_PASS_TOKENS = 96
# Configuration entries that do not change a vector.
_INCIDENTAL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


class EncoderSettings(Section):
    """Which frozen language model makes the vectors, and how."""

    source: Annotated[str, Local(weights.is_local)] = Field(
        "minilm",
        min_length=1,
        description="a preset, a transformers folder, a GGUF file, owner/name on the hub, or https://host:port",
    )
    pooling: Literal["last", "mean"] = Field(
        "last", description="the last token (end of text), or the mean over tokens"
    )
    max_tokens: int = Field(256, ge=8, description="tokens of a window; the model's own limit if that is lower")
    max_windows: int = Field(4, ge=1, description="windows that a longer text is read in; the rest is cut")


@dataclass(frozen=True)
class Batch:
    """Texts as tokens, padded on the right; a long text has several rows."""

    ids: Tensor  # (windows, tokens) int64
    mask: Tensor  # (windows, tokens) int64, 1 where a token is
    owner: Tensor  # (windows,) int64, the text that a window belongs to, ascending
    texts: int
    windowed: int = 0  # texts that needed more than one window
    cut: int = 0  # texts that did not fit into max_windows

    @property
    def lengths(self) -> Tensor:
        """Tokens of each window."""  # (windows,)
        return self.mask.sum(dim=1)


class Encoder:
    """Turns texts into vectors with a frozen model and its tokeniser."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.model, self.tokeniser = weights.load(settings.source)
        config = self.model.config
        self.causal = weights.is_causal(config)
        self._embedding = self.model.get_input_embeddings()
        self.embedding_width: int = self._embedding.weight.shape[1]  # the adapter's
        self.width: int = config.hidden_size  # of a vector
        self.blocks_count: int = config.num_hidden_layers
        self.context: int | None = _context(config, self.tokeniser)
        self.before, self.after = _frame(self.tokeniser)
        if self.room < 1:
            raise UserError(
                f"max_tokens={self.max_tokens} leaves no room beside {len(self.before) + len(self.after)} special "
                "tokens; raise max_tokens"
            )
        vocabulary = self._embedding.weight.shape[0]
        if len(self.tokeniser) > vocabulary and max(self.tokeniser.get_vocab().values()) >= vocabulary:
            raise UserError(
                f"the tokeniser of {settings.source} knows {len(self.tokeniser)} tokens, its model {vocabulary}; "
                "expected a tokeniser and a model that belong together"
            )

    def with_settings(self, settings: EncoderSettings) -> Encoder:
        """Make a view of the same model, which shares its weights, with another pooling or other windows."""
        other = copy.copy(self)
        other.settings = settings
        if settings != self.settings:
            other.__dict__.pop("identity", None)  # kept by cached_property for the settings before
        return other

    @property
    def max_tokens(self) -> int:
        """Tokens of a window, special ones included."""
        return min(self.settings.max_tokens, self.context or self.settings.max_tokens)

    @property
    def room(self) -> int:
        """Tokens of a window beside the special ones."""
        return self.max_tokens - len(self.before) - len(self.after)

    @cached_property
    def identity(self) -> str:
        """A digest of everything that decides a vector: weights, configuration, tokeniser, pooling and windows."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if "pooler" not in name:
                digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        config = {key: value for key, value in self.model.config.to_dict().items() if key not in _INCIDENTAL}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        if getattr(self.tokeniser, "is_fast", False):
            digest.update(self.tokeniser.backend_tokenizer.to_str().encode())
        else:
            digest.update(json.dumps(self.tokeniser.get_vocab(), sort_keys=True).encode())
        digest.update(f"{self.before}{self.after}{self.settings.pooling}".encode())
        digest.update(f"{self.max_tokens}/{self.settings.max_windows}".encode())
        return digest.hexdigest()

    def adapter(self) -> Tensor:
        """The adapter before any training."""  # (embedding_width, embedding_width)
        return torch.eye(self.embedding_width)

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Count the tokens that each text will have in its windows, special ones included."""  # (texts,)
        return np.array([sum(map(len, self._windows(ids)[0])) for ids in self._plain(texts)], dtype=np.int64)

    def tokens(self, texts: Sequence[str]) -> Batch:
        """Turn texts into one batch. An empty text is refused: there is nothing to make a vector of."""
        rows: list[list[int]] = []
        owner: list[int] = []
        windowed = cut = 0
        for index, plain in enumerate(self._plain(texts)):
            windows, whole = self._windows(plain)
            windowed, cut = windowed + (len(windows) > 1), cut + (not whole)
            rows += windows
            owner += [index] * len(windows)
        ids = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], batch_first=True)
        return Batch(ids, mask, torch.tensor(owner), len(texts), windowed, cut)

    def embeddings(self, batch: Batch, adapter: Tensor | None = None) -> Tensor:
        """Look up token embeddings and send them through an adapter, if given."""  # (windows, tokens, embedding)
        embedded: Tensor = self._embedding(batch.ids)
        if adapter is None:
            return embedded
        if adapter.shape != (self.embedding_width, self.embedding_width):
            raise UserError(
                f"the adapter has shape {tuple(adapter.shape)}; expected {self.embedding_width} x "
                f"{self.embedding_width}, the width of {self.settings.source}'s token embeddings: use the encoder that "
                "it was trained with"
            )
        return torch.matmul(embedded, adapter.T)

    def blocks(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Send each window through the frozen blocks, the final norm and the pooling."""  # (windows, width)
        lengths = mask.sum(dim=1)
        groups = length_groups(lengths.numpy())
        if len(groups) == 1:
            return self.run(embeddings, mask)
        found = []
        for rows in map(torch.from_numpy, groups):
            longest = int(lengths[rows].max())
            found.append(self.run(embeddings[rows, :longest], mask[rows, :longest]))
        return torch.cat(found)[torch.from_numpy(np.argsort(np.concatenate(groups)))]

    def run(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Call the model once."""  # (windows, width)
        states: Tensor = self.model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
        if self.settings.pooling == "last":
            return states[torch.arange(states.shape[0]), mask.sum(dim=1) - 1]
        kept = mask.to(states.dtype)
        return torch.einsum("wtd,wt->wd", states, kept) / kept.sum(dim=1, keepdim=True)

    def hidden(self, batch: Batch, adapter: Tensor | None = None) -> Tensor:
        """Compute the vector of each text, differentiable with respect to the adapter."""  # (texts, width)
        return join_windows(self.blocks(self.embeddings(batch, adapter), batch.mask), batch)

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            raise UserError("there is no text to encode; expected at least one")
        for index, text in enumerate(texts):
            if not text.strip():
                raise UserError(f"text {index + 1} of {len(texts)} is empty; expected some words: leave it out")
        found: list[list[int]] = self.tokeniser(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _windows(self, plain: list[int]) -> tuple[list[list[int]], bool]:
        """Cut a text into windows with special tokens; say whether all of it fits into them."""
        limit = self.room * self.settings.max_windows
        pieces = [plain[start : start + self.room] for start in range(0, min(len(plain), limit), self.room)]
        return [[*self.before, *piece, *self.after] for piece in pieces or [[]]], len(plain) <= limit


def length_groups(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut a batch into passes of similar lengths, where that saves more padding than a pass costs.

    Halves again and again: the rows, longest first, are cut where most padded tokens are saved.
    """
    waiting, groups = [np.argsort(-lengths, kind="stable")], []
    while waiting:
        rows = waiting.pop()
        own = lengths[rows]  # descending
        heads = np.arange(1, len(rows))
        saved = (own[0] - own[1:]) * (len(rows) - heads)  # tokens that the shorter part need not be padded to
        if len(heads) and saved.max() > _PASS_TOKENS:
            cut = int(saved.argmax()) + 1
            waiting += [rows[cut:], rows[:cut]]
        else:
            groups.append(rows)
    return groups


def join_windows(vectors: Tensor, batch: Batch) -> Tensor:
    """Join the windows of each text: the mean weighted by tokens."""  # (windows, width) -> (texts, width)
    if batch.ids.shape[0] == batch.texts:
        return vectors
    lengths = batch.lengths.to(vectors.dtype)
    whole = torch.zeros(batch.texts, dtype=vectors.dtype).index_add(0, batch.owner, lengths)
    share = (lengths / whole[batch.owner]).unsqueeze(1)
    return torch.zeros(batch.texts, vectors.shape[1], dtype=vectors.dtype).index_add(0, batch.owner, vectors * share)


def _frame(tokeniser: Any) -> tuple[list[int], list[int]]:
    """Find the special tokens before and after a text; add the end-of-text token where it is not there already."""
    plain = tokeniser("a", add_special_tokens=False)["input_ids"]
    framed = tokeniser("a", add_special_tokens=True)["input_ids"]
    extra = len(framed) - len(plain)
    starts = [i for i in range(extra + 1) if framed[i : i + len(plain)] == plain]
    before, after = (framed[: starts[0]], framed[starts[0] + len(plain) :]) if starts else ([], [])
    end = tokeniser.eos_token_id
    if end is not None and (not after or after[-1] != end):
        after = [*after, end]
    return before, after


def _context(config: Any, tokeniser: Any) -> int | None:
    """The longest text in tokens, special ones included; None if the model has no limit."""
    limits = [getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)]
    # RoBERTa's table has unused rows at its beginning; its tokeniser knows the limit. "No limit" is a huge number.
    limits.append(tokeniser.model_max_length)
    known = [limit for limit in limits if limit is not None and 0 < limit < 10**9]
    return min(known) if known else None
