"""The classifier that retrieves (CAR section 3.2, eq. 1): logits = CLS(h), the documents are the top K of them.

One linear layer from hidden states to documents; optionally a linear pre-classifier before it, with dropout between
the two (section 6.1). Everything is a function of (settings, parameters, hidden states, randomness): no module holds a
state.

Differs from the paper: `scale` can bring every hidden state to a common size first. Some models' states have a few
very large entries, for which plain gradient descent needs a tiny rate. It uses nothing but the state itself, so it
costs no privacy. Dropout without a pre-classifier is on the hidden states. A pre-classifier may have an activation,
with which it can do more than one linear layer can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from confide.errors import UserError
from confide.federated.chain import Activation, activate
from confide.settings import Section

Start = Literal["random", "documents"]
_SHARPNESS = 10.0
"""Length of a row that begins as a document: a logit is ten times the cosine when states have length 1."""


class HeadSettings(Section):
    """The classifier head."""

    kind: Literal["linear"] = "linear"
    pre_classifier: Annotated[int, Field(ge=1)] | None = Field(None, description="width of a linear layer before it")
    activation: Activation = Field("none", description="what follows the pre-classifier")
    dropout: float = Field(0.0, ge=0, lt=1, description="before the last layer, in training")
    scale: Literal["none", "unit", "layer"] = Field(
        "none", description="hidden states as they are, of length 1, or each with mean 0 and deviation 1"
    )
    start: Start = Field("random", description="rows at random, or the documents' own vectors: retrieval by search")

    @property
    def form(self) -> tuple[object, ...]:
        """What decides the meaning of the head's tensors."""
        return self.pre_classifier, self.activation, self.scale

    @model_validator(mode="after")
    def _check_pre_classifier(self) -> HeadSettings:
        if self.start == "documents" and self.pre_classifier is not None:
            raise ValueError(
                "start: documents cannot go through a pre_classifier, whose width is another; leave one out"
            )
        if self.activation != "none" and self.pre_classifier is None:
            raise ValueError(f"activation: {self.activation} follows a pre_classifier; give its width")
        return self


def parameter_shapes(settings: HeadSettings, width: int, documents: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in the order of the computation; a linear layer is (out, in)."""
    shapes: dict[str, tuple[int, ...]] = {}
    inner = width
    if settings.pre_classifier is not None:
        inner = settings.pre_classifier
        shapes |= {"pre.weight": (inner, width), "pre.bias": (inner,)}
    return shapes | {"head.weight": (documents, inner), "head.bias": (documents,)}


def initial_parameters(
    settings: HeadSettings, width: int, documents: int, draw: np.random.Generator, vectors: Tensor | None = None
) -> dict[str, Tensor]:
    """U(+-1/sqrt(fan_in)) for weights, or the documents' vectors (documents, width); zeros for biases."""
    if vectors is not None:
        return {"head.weight": as_rows(vectors), "head.bias": torch.zeros(documents)}
    return random_parameters(parameter_shapes(settings, width, documents), draw)


def random_parameters(shapes: Mapping[str, tuple[int, ...]], draw: np.random.Generator) -> dict[str, Tensor]:
    """U(+-1/sqrt(fan_in)) for weights, zeros for biases."""
    return {
        name: torch.zeros(shape)
        if name.endswith("bias")
        else (torch.from_numpy(draw.random(shape, dtype=np.float32)) * 2 - 1) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def as_rows(vectors: Tensor) -> Tensor:
    """Make rows of a classifier that begins as search: of one length, so that the nearest vector scores best."""
    return _SHARPNESS * functional.normalize(vectors, dim=-1)


def forward(
    settings: HeadSettings,
    parameters: Mapping[str, Tensor],
    hidden: Tensor,  # (batch, width)
    randomness: torch.Generator | None = None,
) -> Tensor:
    """Compute logits over documents, with dropout if `randomness` is given, which only training does."""
    x = scaled(settings.scale, hidden)
    if "pre.weight" in parameters:
        x = activate(settings.activation, functional.linear(x, parameters["pre.weight"], parameters["pre.bias"]))
    if settings.dropout and randomness is not None:
        keep = 1.0 - settings.dropout
        x = x * torch.empty_like(x).bernoulli_(keep, generator=randomness) / keep
    return functional.linear(x, parameters["head.weight"], parameters["head.bias"])  # (batch, documents)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, the classification loss of eq. 2."""
    return functional.cross_entropy(logits, labels)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the K best documents of each query: scores, best first, and document numbers."""  # (batch, k) each
    if not 1 <= k <= logits.shape[-1]:
        raise UserError(f"k={k} documents were asked for; expected 1 to {logits.shape[-1]}, the number of documents")
    best = torch.topk(logits, k, dim=-1)
    return best.values, best.indices


def scaled(kind: Literal["none", "unit", "layer"], hidden: Tensor) -> Tensor:
    """Bring hidden states to a common size, each by itself."""
    if kind == "unit":
        return functional.normalize(hidden, dim=-1)
    if kind == "layer":
        return functional.layer_norm(hidden, hidden.shape[-1:])
    return hidden
