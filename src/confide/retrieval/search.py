"""Maximum inner-product search, the baseline that the classifier replaces (CAR sections 1 and 6.2).

Queries and documents go through the same encoder (and the same adapter, if one is trained), and the documents with the
largest inner products are retrieved. `DocumentIndex` is an exact faiss index; `inner_products` is the same thing as a
differentiable function, which is what the adapter is trained on for "adapter + MIPS" (Figure 2): the inner products
divided by a temperature are the logits of a cross-entropy.

Differs from the paper: it does not say whether vectors are normalised or how the adapter's loss for MIPS is scaled;
both are settings here, and the plain inner product is the default.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from confide.errors import UserError
from confide.settings import Section


class SearchSettings(Section):
    """Retrieval by inner product with document embeddings; it has no parameters of its own."""

    kind: Literal["mips"] = "mips"
    normalise: bool = Field(False, description="vectors of length 1: cosine similarity instead of the inner product")
    temperature: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="inner products are divided by it in training; none: sqrt(width)"
    )


def inner_products(settings: SearchSettings, queries: Tensor, documents: Tensor) -> Tensor:
    """Scores of all documents for each query, differentiable."""  # (queries, documents)
    if settings.normalise:
        queries, documents = functional.normalize(queries, dim=-1), functional.normalize(documents, dim=-1)
    return queries @ documents.T


def training_logits(settings: SearchSettings, queries: Tensor, documents: Tensor) -> Tensor:
    """Inner products at the scale of the loss."""  # (queries, documents)
    temperature = settings.temperature
    if temperature is None:
        temperature = 1.0 if settings.normalise else math.sqrt(queries.shape[-1])
    return inner_products(settings, queries, documents) / temperature


class DocumentIndex:
    """An exact inner-product index over document embeddings."""

    def __init__(self, settings: SearchSettings, documents: Tensor) -> None:
        import faiss

        if documents.dim() != 2 or not documents.shape[0]:
            raise UserError(
                f"the documents' embeddings have shape {tuple(documents.shape)}; expected (documents, width)"
            )
        if not bool(torch.isfinite(documents).all()):
            raise UserError("a document's embedding is not finite; expected numbers: check the adapter and the encoder")
        self.settings = settings
        self._index: Any = faiss.IndexFlatIP(documents.shape[1])
        self._index.add(self._prepared(documents))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Inner products, largest first, and document numbers."""  # (queries, k) each
        if not 1 <= k <= len(self):
            raise UserError(f"k={k} documents were asked for; expected 1 to {len(self)}, the number of documents")
        if queries.shape[-1] != self._index.d:
            raise UserError(f"queries are {queries.shape[-1]} wide; expected {self._index.d}, as the documents are")
        scores, found = self._index.search(self._prepared(queries), k)
        return torch.from_numpy(scores), torch.from_numpy(found)

    def _prepared(self, vectors: Tensor) -> np.ndarray:
        plain = vectors.detach().float()
        if self.settings.normalise:
            plain = functional.normalize(plain, dim=-1)
        return np.ascontiguousarray(plain.numpy())
