"""A mixture of expert heads over clustered documents, with a trained gate (CAR section 4.2).

Documents are clustered by their embeddings into clusters of equal size; an expert is a linear head over one cluster's
documents, the gate a linear layer over clusters. The score of a document is

    log p(d | h) = log softmax(gate(h))[cluster of d] + log softmax(expert(h))[d],

a proper distribution over all documents. Training touches only the gate and the expert of the right document;
retrieval touches the gate and the `active` experts that the gate likes best, and never the others.

With `gate_rank` the gate has two levels: a projection to few dimensions that all clusters share, and a short row for
each. Rows are then cheap, so at the same share of weights there can be more and smaller clusters, of which the gate
opens only those that are near.

Differs from the paper: the paper sketches the idea and leaves it open; the factored likelihood, the balanced k-means,
the number of active experts and the gate's two levels are ours. The clusters come from the documents, which all
clients share, so they say nothing about a client's queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from confide.errors import UserError
from confide.retrieval.head import Start, as_rows, random_parameters, scaled
from confide.settings import Section

_ITERATIONS = 25
# Gathered expert weights of one piece of a batch, in numbers: about 64 MB.
_GATHERED = 2**24


class ExpertsSettings(Section):
    """A gate and expert heads."""

    kind: Literal["experts"] = "experts"
    clusters: Annotated[int, Field(ge=1)] | None = Field(None, description="experts; none: about sqrt(documents)")
    active: int = Field(4, ge=1, description="experts that a query visits")
    gate_rank: Annotated[int, Field(ge=1)] | None = Field(
        None, exclude_if=lambda value: value is None,
        description="the gate first brings a query to so many dimensions, so that more clusters cost little; none: its "
        "rows are as wide as the query",
    )  # fmt: skip
    scale: Literal["none", "unit", "layer"] = Field("none", description="as for the linear head")
    start: Start = Field("random", description="as for the linear head; the gate's rows are then the clusters' means")


@dataclass(frozen=True)
class Clusters:
    """Which documents each expert has."""

    settings: ExpertsSettings
    members: Tensor  # (clusters, size) int64 document numbers, -1 where a cluster has fewer
    cluster: Tensor  # (documents,) int64
    slot: Tensor  # (documents,) int64, the place within the cluster

    @property
    def documents(self) -> int:
        return self.cluster.shape[0]

    @property
    def reachable(self) -> int:
        """How many documents one query can get: those of the active experts."""
        return min(self.documents, self.settings.active * self.members.shape[1])


def cluster_documents(settings: ExpertsSettings, embeddings: Tensor, draw: np.random.Generator) -> Clusters:
    """Balanced k-means: no cluster has more than ceil(documents / clusters)."""
    documents = embeddings.shape[0]
    count = settings.clusters or max(1, round(math.sqrt(documents)))
    if count > documents:
        raise UserError(f"clusters={count} for {documents} documents; expected at most one cluster per document")
    if settings.active > count:
        raise UserError(f"active={settings.active} experts of {count}; expected at most as many as there are clusters")
    if settings.gate_rank is not None and settings.gate_rank > min(count, embeddings.shape[1]):
        raise UserError(
            f"gate_rank={settings.gate_rank} for {count} clusters and vectors of {embeddings.shape[1]} numbers; "
            "expected at most the smaller of the two"
        )
    points = embeddings.detach().double().numpy()
    capacity = -(-documents // count)
    centres = points[_choose_centres(points, count, draw)]
    owner = np.full(documents, -1)
    for _ in range(_ITERATIONS):
        before, owner = owner, _assign(points, centres, capacity)
        if (before == owner).all():
            break
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, points)
        sizes = np.bincount(owner, minlength=count)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
    members = np.full((count, int(np.bincount(owner, minlength=count).max())), -1)
    slot = np.zeros(documents, dtype=np.int64)
    for number in range(count):
        own = np.flatnonzero(owner == number)
        members[number, : len(own)] = own
        slot[own] = np.arange(len(own))
    return Clusters(settings, *map(torch.from_numpy, (members, owner, slot)))


def _choose_centres(points: NDArray[np.float64], count: int, draw: np.random.Generator) -> list[int]:
    """Choose first centres that are far from each other (k-means++)."""
    chosen = [int(draw.integers(len(points)))]
    nearest = np.square(points - points[chosen[0]]).sum(axis=1)
    for _ in range(count - 1):
        total = nearest.sum()
        weights = nearest / total if total > 0 else None
        chosen.append(int(draw.choice(len(points), p=weights)))
        nearest = np.minimum(nearest, np.square(points - points[chosen[-1]]).sum(axis=1))
    return chosen


def _assign(points: NDArray[np.float64], centres: NDArray[np.float64], capacity: int) -> NDArray[np.int64]:
    """Give each point to a near centre that has room: points ask their nearest open one, which takes some of them."""
    distance = np.square(centres).sum(axis=1)[None, :] - 2 * points @ centres.T  # up to a constant per point
    owner = np.full(len(points), -1)
    room = np.full(len(centres), capacity)
    left = np.arange(len(points))
    while len(left):
        own = np.where(room[None, :] > 0, distance[left], np.inf)
        wish = own.argmin(axis=1)
        # A full centre turns away those that would lose least by going elsewhere.
        second = np.partition(own, 1, axis=1)[:, 1] if own.shape[1] > 1 else np.full(len(left), np.inf)
        regret = second - own[np.arange(len(left)), wish]
        for centre in np.unique(wish):
            asking = np.flatnonzero(wish == centre)
            taken = asking[np.argsort(-regret[asking], kind="stable")][: room[centre]]
            owner[left[taken]] = centre
            room[centre] -= len(taken)
        left = left[owner[left] < 0]
    return owner.astype(np.int64)


def parameter_shapes(clusters: Clusters, width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes; the experts lie one after the other, each padded to the largest."""
    count, size = clusters.members.shape
    rank = clusters.settings.gate_rank
    first: dict[str, tuple[int, ...]] = {} if rank is None else {"gate.project": (rank, width)}
    return first | {
        "gate.weight": (count, rank or width),
        "gate.bias": (count,),
        "experts.weight": (count, size, width),
        "experts.bias": (count, size),
    }


def initial_parameters(
    clusters: Clusters, width: int, draw: np.random.Generator, vectors: Tensor | None = None
) -> dict[str, Tensor]:
    """As for the linear head: at random, or from the documents' vectors (documents, width)."""
    fresh = random_parameters(parameter_shapes(clusters, width), draw)
    if vectors is not None:
        rows, real = as_rows(vectors), clusters.members >= 0
        fresh["experts.weight"] = rows[clusters.members.clamp(min=0)] * real.unsqueeze(2)
        gate = as_rows(fresh["experts.weight"].sum(dim=1))
        if "gate.project" in fresh:  # the directions in which the clusters' means differ most: the nearest such gate
            fresh["gate.project"] = (
                torch.linalg.svd(gate, full_matrices=False).Vh[: clusters.settings.gate_rank].clone()
            )
            gate = gate @ fresh["gate.project"].T
        fresh["gate.weight"] = gate
    return fresh


def loss(clusters: Clusters, parameters: Mapping[str, Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(right document): the gate's cross-entropy plus that of the right expert."""
    x = scaled(clusters.settings.scale, hidden)  # (batch, width)
    right = clusters.cluster[labels]
    gate = _gate_logits(parameters, x)
    own = _expert_log_probabilities(clusters, parameters, x, right.unsqueeze(1)).squeeze(1)  # (batch, size)
    chosen = own.gather(1, clusters.slot[labels].unsqueeze(1)).squeeze(1)
    return functional.cross_entropy(gate, right) - chosen.mean()


def retrieve(clusters: Clusters, parameters: Mapping[str, Tensor], hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the K best documents of the active experts: log-probabilities, best first, and numbers (-1: none)."""
    active = clusters.settings.active
    if not 1 <= k <= clusters.reachable:
        raise UserError(
            f"k={k} documents were asked for; expected 1 to {clusters.reachable}, which is what active={active} "
            "experts hold: raise active"
        )
    step = max(1, _GATHERED // (active * clusters.members.shape[1] * hidden.shape[1]))
    scores, found = [], []
    for piece in torch.split(scaled(clusters.settings.scale, hidden), step):
        best = torch.topk(_gate_logits(parameters, piece).log_softmax(dim=1), active, dim=1)
        own = _expert_log_probabilities(clusters, parameters, piece, best.indices)  # (piece, active, size)
        joint = (best.values.unsqueeze(2) + own).flatten(1)
        top = torch.topk(joint, k, dim=1)
        scores.append(top.values)
        # An empty slot has probability zero; it comes up only when the active experts have fewer than k documents.
        found.append(clusters.members[best.indices].flatten(1).gather(1, top.indices))
    return torch.cat(scores), torch.cat(found)


def log_probabilities(clusters: Clusters, parameters: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Compute all documents' log-probabilities with every expert: the reference for `retrieve`."""
    x = scaled(clusters.settings.scale, hidden)
    gate = _gate_logits(parameters, x).log_softmax(dim=1)
    every = torch.arange(clusters.members.shape[0]).expand(x.shape[0], -1)
    joint = gate.unsqueeze(2) + _expert_log_probabilities(clusters, parameters, x, every)
    return joint[:, clusters.cluster, clusters.slot]  # (batch, documents)


def multiply_adds(clusters: Clusters, width: int) -> dict[str, int | float]:
    """Count one query's multiply-adds with the mixture and with a flat head, and the share of weights it touches."""
    count, size = clusters.members.shape
    rank = clusters.settings.gate_rank
    gate = width * count if rank is None else rank * (width + count)
    mixture = gate + width * clusters.settings.active * size
    flat = width * clusters.documents
    return {"experts": mixture, "flat": flat, "share": mixture / flat}


def _gate_logits(parameters: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    if "gate.project" in parameters:
        hidden = functional.linear(hidden, parameters["gate.project"])  # (batch, rank)
    return functional.linear(hidden, parameters["gate.weight"], parameters["gate.bias"])  # (batch, clusters)


def _expert_log_probabilities(
    clusters: Clusters, parameters: Mapping[str, Tensor], hidden: Tensor, chosen: Tensor
) -> Tensor:
    """Within each chosen cluster."""  # hidden (batch, width), chosen (batch, n) -> (batch, n, size)
    weight = parameters["experts.weight"][chosen]  # (batch, n, size, width)
    logits = torch.einsum("bnsw,bw->bns", weight, hidden) + parameters["experts.bias"][chosen]
    return logits.masked_fill(clusters.members[chosen] < 0, -torch.inf).log_softmax(dim=2)
