"""What retrieves: encoder, adapter, and head, experts or search, as one thing (CAR eq. 1, with eq. 2's loss).

    RET(x, K) = TOP_K(CLS(TRF(ADP(TKN(x)))))

The trained tensors are an argument of every call: `adapter` and the head's own. Training, evaluation and use all go
through the few functions here, so they cannot disagree. Without a head, the scores are inner products with the
documents' vectors, which go through the same adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from confide.encoders.encoder import Encoder
from confide.encoders.states import batches_by_length, hidden_states
from confide.randomness import generator
from confide.retrieval import experts, head
from confide.retrieval.data import Document
from confide.retrieval.experts import Clusters
from confide.retrieval.metrics import DEPTH, ranks_from_lists, ranks_from_scores
from confide.retrieval.search import DocumentIndex, inner_products, training_logits
from confide.retrieval.settings import RetrievalSettings

ADAPTER = "adapter"
# Scores of so many query-document pairs at a time: 64 MB.
_PAIRS = 2**24


@dataclass
class Retriever:
    """Retrieves documents with an encoder and a head, experts or search."""

    settings: RetrievalSettings
    encoder: Encoder
    documents: list[Document]
    seed: int
    quiet: bool = False

    @cached_property
    def clusters(self) -> Clusters | None:
        """Which documents each expert has; none without experts."""
        if self.settings.experts is None or not self.settings.has_head:
            return None
        points = head.scaled(self.settings.experts.scale, self.fixed_documents)
        return experts.cluster_documents(self.settings.experts, points, generator(self.seed, "clusters"))

    @cached_property
    def fixed_documents(self) -> Tensor:
        """The documents' vectors without an adapter."""  # (documents, width)
        return self.fixed([document.text for document in self.documents])

    def fixed(self, texts: Sequence[str]) -> Tensor:
        """Compute vectors without an adapter, or read them from the cache."""  # (texts, width)
        return hidden_states(self.encoder, texts, self.settings.cache, self.quiet).rows()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """What travels: adapter and head, as the method has them."""
        side = self.encoder.embedding_width
        shapes: dict[str, tuple[int, ...]] = {ADAPTER: (side, side)} if self.settings.trains_adapter else {}
        if self.clusters is not None:
            return shapes | experts.parameter_shapes(self.clusters, self.encoder.width)
        if self.settings.has_head:
            shapes |= head.parameter_shapes(self.settings.head, self.encoder.width, len(self.documents))
        return shapes

    def initial_parameters(self) -> dict[str, Tensor]:
        draw = generator(self.seed, "model")
        fresh = {ADAPTER: self.encoder.adapter()} if self.settings.trains_adapter else {}
        width, chosen = self.encoder.width, self.settings.experts or self.settings.head
        vectors = self.fixed_documents if self.settings.has_head and chosen.start == "documents" else None
        if self.clusters is not None:
            fresh |= experts.initial_parameters(self.clusters, width, draw, vectors)
        elif self.settings.has_head:
            fresh |= head.initial_parameters(self.settings.head, width, len(self.documents), draw, vectors)
        return fresh

    @torch.no_grad()
    def vectors(self, parameters: Mapping[str, Tensor], texts: Sequence[str], keep: bool = True) -> Tensor:
        """Vectors (texts, width) through the adapter, if there is one; else, with `keep`, from the cache."""
        if ADAPTER not in parameters and keep:
            return self.fixed(texts)
        found = torch.empty(len(texts), self.encoder.width)
        for chosen in batches_by_length(self.encoder.lengths(texts)):
            batch = self.encoder.tokens([texts[i] for i in chosen])
            found[torch.from_numpy(chosen)] = self.encoder.hidden(batch, parameters.get(ADAPTER))
        return found

    def document_vectors(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """For search, the documents' vectors; none where a head retrieves."""  # (documents, width)
        if self.settings.has_head:
            return None
        if ADAPTER not in parameters:
            return self.fixed_documents
        return self.vectors(parameters, [document.text for document in self.documents])

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        hidden: Tensor,  # (batch, width)
        labels: Tensor,  # (batch,)
        documents: Tensor | None = None,  # (documents, width), for search
        randomness: torch.Generator | None = None,
    ) -> Tensor:
        """Mean cross-entropy of the right documents, a scalar that can be differentiated."""
        if documents is not None:
            return head.loss(training_logits(self.settings.search, hidden, documents), labels)
        if self.clusters is not None:
            return experts.loss(self.clusters, parameters, hidden, labels)
        return head.loss(head.forward(self.settings.head, parameters, hidden, randomness), labels)

    @torch.no_grad()
    def ranks(
        self, parameters: Mapping[str, Tensor], hidden: Tensor, labels: Tensor, documents: Tensor | None
    ) -> tuple[np.ndarray, float]:
        """Find the rank of each query's right document, and the mean loss. Experts rank what the active ones hold."""
        step = max(1, _PAIRS // len(self.documents))
        ranks, losses = [], 0.0
        for part, right in zip(torch.split(hidden, step), torch.split(labels, step), strict=True):
            losses += float(self.loss(parameters, part, right, documents)) * len(right)
            if documents is not None:
                ranks.append(ranks_from_scores(inner_products(self.settings.search, part, documents), right))
            elif self.clusters is not None:
                depth = min(self.deepest, max(DEPTH, self.settings.k))
                ranks.append(ranks_from_lists(experts.retrieve(self.clusters, parameters, part, depth)[1], right))
            else:
                ranks.append(ranks_from_scores(head.forward(self.settings.head, parameters, part), right))
        return np.concatenate(ranks), losses / len(labels)

    @property
    def deepest(self) -> int:
        """How many documents one query can get."""
        return len(self.documents) if self.clusters is None else self.clusters.reachable

    @torch.no_grad()
    def find(
        self, parameters: Mapping[str, Tensor], hidden: Tensor, k: int, index: DocumentIndex | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the K best documents of each query: scores, best first, and document numbers (-1: none)."""
        if index is not None:
            return index.search(hidden, k)
        if self.clusters is not None:
            return experts.retrieve(self.clusters, parameters, hidden, k)
        return head.top_k(head.forward(self.settings.head, parameters, hidden).log_softmax(dim=1), k)
