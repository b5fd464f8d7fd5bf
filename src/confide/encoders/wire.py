"""What goes over the network between a client and a shared remote encoder (CAR section 4.1).

Tensors travel as safetensors, never as a pickle: numbers only, whatever the other side sends. Texts are packed, without
padding: the tokens of all windows one after the other (tokens, width), and `lengths` (windows,) says where one ends.

    GET  /about?pooling&max_tokens&max_windows    -> JSON, `About`
    GET  /tokeniser                               -> the tokeniser, JSON of the tokenizers library
    GET  /embeddings                              -> embeddings (vocabulary, embedding width)
    POST /hidden?pooling    ids, lengths          -> hidden (windows, width)
    POST /hidden?pooling&max_tokens&max_windows    JSON {"texts": [...]} -> hidden (texts, width)
    POST /forward?pooling   embeddings, lengths   -> hidden (windows, width)
    POST /backward?pooling  embeddings, lengths, gradient (windows, width) -> gradient (tokens, embedding width)

Every request carries `Authorization: Bearer TOKEN`. With `model=...` in the query, a server that has another model
answers 409. Errors are JSON: {"error": "what was given, what was expected"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

TOKEN_VARIABLE = "CONFIDE_ENCODER_TOKEN"
CA_VARIABLE = "CONFIDE_ENCODER_CA"
TENSORS = "application/vnd.safetensors"

Pooling = Literal["last", "mean"]


class Limits(BaseModel):
    """What one request may hold, and how much one access token may ask for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    texts: int = Field(256, ge=1, description="texts of a request; every window of a long text counts")
    tokens: int = Field(8192, ge=8, description="tokens of a request")
    rate: float = Field(0, ge=0, allow_inf_nan=False, description="tokens a second for each access token; 0: no limit")

    def body(self, embedding_width: int, width: int) -> int:
        """Bytes of the largest request: the embeddings of all tokens and the gradients of all texts in 32 bits."""
        return 4 * (self.tokens * embedding_width + self.texts * width) + 8 * self.texts + 2**16


class About(BaseModel):
    """The served encoder, for the pooling and the windows that were asked for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    protocol: Literal[1] = 1  # another number where requests or answers change
    model: str = Field(min_length=16, description="identity of weights and tokeniser, whatever the pooling")
    identity: str = Field(
        min_length=16, description="identity of the vectors: that of the same encoder on one's own disk"
    )
    kind: str
    causal: bool
    blocks: int = Field(ge=0)
    width: int = Field(ge=1)
    embedding_width: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    context: int | None
    pooling: Pooling
    max_tokens: int = Field(ge=1)
    max_windows: int = Field(ge=1)
    before: list[int]
    after: list[int]
    tokeniser: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of what /tokeniser gives")
    embeddings: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of what /embeddings gives")
    limits: Limits


class WireError(ValueError):
    """A body that is not what it should be."""


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors."""
    from safetensors.torch import save

    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def load(body: bytes, expected: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
    """Tensors from safetensors: exactly these names, with these types and numbers of dimensions."""
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    try:
        tensors: dict[str, Tensor] = read(body)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        said = " ".join(str(error).split())[:200]
        raise WireError(
            f"{len(body)} bytes that are not safetensors ({said}); expected {', '.join(expected)}"
        ) from None
    if tensors.keys() != expected.keys():
        raise WireError(f"tensors {', '.join(sorted(tensors)) or 'none'}; expected {', '.join(expected)}")
    for name, (kind, dimensions) in expected.items():
        tensor = tensors[name]
        if tensor.dtype != kind or tensor.dim() != dimensions:
            raise WireError(
                f"{name} is {str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)}; expected {str(kind)[6:]} with "
                f"{dimensions} dimension{'s' * (dimensions > 1)}"
            )
    return tensors
