"""A retriever as one graph, from the tokens of a text to scores of documents or to its vector (`confide export`).

One text at a time: its rows are the windows that a long text is read in, most texts have one. The tokeniser stays
outside; which special tokens stand around a window is in the notes of the file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.encoders.encoder import Batch, Encoder
from confide.retrieval import experts, head
from confide.retrieval.experts import Clusters
from confide.retrieval.retriever import ADAPTER
from confide.retrieval.settings import RetrievalSettings


class RetrieverGraph(nn.Module):
    """Encoder, adapter and head with their parameters: ids and mask (windows, tokens) become what `output` names."""

    def __init__(
        self, settings: RetrievalSettings, encoder: Encoder, parameters: Mapping[str, Tensor], clusters: Clusters | None
    ) -> None:
        super().__init__()
        self.settings, self.encoder, self.clusters, self.names = settings, encoder, clusters, list(parameters)
        self.model = encoder.model
        self.output = "log_probabilities" if settings.has_head else "vector"
        for number, name in enumerate(self.names):
            self.register_buffer(f"trained_{number}", parameters[name].detach())

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        parameters = {name: self.get_buffer(f"trained_{number}") for number, name in enumerate(self.names)}
        batch = Batch(ids, mask, torch.zeros_like(ids[:, 0]), 1)
        vectors = self.encoder.run(self.encoder.embeddings(batch, parameters.get(ADAPTER)), mask)
        lengths = batch.lengths.to(vectors.dtype)
        hidden = (vectors * (lengths / lengths.sum())[:, None]).sum(dim=0, keepdim=True)  # as `join_windows`
        return answer(self.settings, parameters, hidden, self.clusters)


def answer(
    settings: RetrievalSettings, parameters: Mapping[str, Tensor], hidden: Tensor, clusters: Clusters | None
) -> Tensor:
    """Of the vector (1, width) of a text: log-probabilities of all documents, or the vector to search with."""
    if clusters is not None:
        return experts.log_probabilities(clusters, parameters, hidden)[0]
    if settings.has_head:
        return head.forward(settings.head, parameters, hidden).log_softmax(dim=1)[0]
    return (functional.normalize(hidden, dim=-1) if settings.search.normalise else hidden)[0]
