"""The mixture is a distribution over all documents, touches few weights, and agrees with its reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval import experts
from confide.retrieval.experts import ExpertsSettings, cluster_documents


def _vectors(count: int, width: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(generator(seed, "vectors").standard_normal((count, width), dtype=np.float32))


@given(st.integers(1, 60), st.data())
@settings(max_examples=40, deadline=None)
def test_clusters_hold_every_document_once_and_are_balanced(documents: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, documents))
    chosen = ExpertsSettings(clusters=count, active=1)
    clusters = cluster_documents(chosen, _vectors(documents), generator(data.draw(st.integers(0, 9)), "clusters"))
    held = clusters.members[clusters.members >= 0]
    assert sorted(held.tolist()) == list(range(documents))
    assert clusters.members.shape == (count, -(-documents // count)) or clusters.members.shape[1] <= -(
        -documents // count
    )
    assert torch.equal(clusters.members[clusters.cluster, clusters.slot], torch.arange(documents))


def test_equal_documents_can_be_clustered() -> None:
    clusters = cluster_documents(ExpertsSettings(clusters=3, active=1), torch.ones(7, 4), generator(0, "clusters"))
    assert clusters.members.shape == (3, 3)


def test_clusters_find_groups_that_are_there() -> None:
    centres = 20 * torch.eye(4)
    documents = centres.repeat_interleave(5, dim=0) + _vectors(20, 4)
    clusters = cluster_documents(ExpertsSettings(clusters=4, active=1), documents, generator(0, "clusters"))
    assert {len(set(group.tolist())) for group in clusters.cluster.reshape(4, 5)} == {1}


def test_probabilities_of_all_documents_sum_to_one_and_the_loss_is_theirs() -> None:
    chosen = ExpertsSettings(clusters=4, active=4)
    clusters = cluster_documents(chosen, _vectors(14), generator(0, "clusters"))  # two clusters have an empty slot
    parameters = experts.initial_parameters(clusters, 6, generator(1, "experts"))
    hidden, labels = _vectors(5, seed=3), torch.tensor([0, 13, 7, 7, 2])
    every = experts.log_probabilities(clusters, parameters, hidden)
    torch.testing.assert_close(every.exp().sum(dim=1), torch.ones(5))
    expected = -every.gather(1, labels[:, None]).mean()
    torch.testing.assert_close(experts.loss(clusters, parameters, hidden, labels), expected)


def test_with_all_experts_active_retrieval_is_the_reference_and_with_one_a_part_of_it() -> None:
    chosen = ExpertsSettings(clusters=4, active=4)
    clusters = cluster_documents(chosen, _vectors(14), generator(0, "clusters"))
    parameters = experts.initial_parameters(clusters, 6, generator(1, "experts"))
    hidden = _vectors(9, seed=3)
    every = experts.log_probabilities(clusters, parameters, hidden)
    scores, found = experts.retrieve(clusters, parameters, hidden, 14)
    assert torch.equal(found, every.argsort(dim=1, descending=True))
    one = replace(clusters, settings=ExpertsSettings(clusters=4, active=1))
    scores, found = experts.retrieve(one, parameters, hidden, 2)
    torch.testing.assert_close(scores, every.gather(1, found))
    assert all(len(set(clusters.cluster[row].tolist())) == 1 for row in found)


def test_training_touches_only_the_gate_and_the_right_expert() -> None:
    chosen = ExpertsSettings(clusters=4, active=2)
    clusters = cluster_documents(chosen, _vectors(16), generator(0, "clusters"))
    parameters = experts.initial_parameters(clusters, 6, generator(1, "experts"))
    own = {name: value.requires_grad_() for name, value in parameters.items()}
    loss = experts.loss(clusters, own, _vectors(3), torch.tensor([5, 5, 5]))
    (gradient,) = torch.autograd.grad(loss, own["experts.weight"])
    touched = gradient.abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
    assert touched == [int(clusters.cluster[5])]


def test_experts_that_begin_as_documents_find_each_document_and_pick_its_cluster_first() -> None:
    chosen = ExpertsSettings(clusters=4, active=1, scale="unit", start="documents")
    centres = 20 * torch.eye(4)
    documents = centres.repeat_interleave(5, dim=0)[:18] + _vectors(18, 4)  # two slots are empty
    clusters = cluster_documents(chosen, documents, generator(0, "clusters"))
    parameters = experts.initial_parameters(clusters, 4, generator(1, "experts"), documents)
    scores, found = experts.retrieve(clusters, parameters, documents, 3)
    assert found[:, 0].tolist() == list(range(18))
    assert bool((scores.exp() <= 1).all())
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == experts.parameter_shapes(clusters, 4)


def test_a_gate_of_full_rank_begins_as_the_gate_of_one_level_and_a_lower_one_as_the_nearest_to_it() -> None:
    documents, hidden = _vectors(40), _vectors(9, seed=3)

    def gate(rank: int | None) -> torch.Tensor:
        chosen = ExpertsSettings(clusters=10, active=10, start="documents", gate_rank=rank)
        clusters = cluster_documents(chosen, documents, generator(0, "clusters"))
        parameters = experts.initial_parameters(clusters, 6, generator(1, "experts"), documents)
        assert {name: tuple(own.shape) for name, own in parameters.items()} == experts.parameter_shapes(clusters, 6)
        every = experts.log_probabilities(clusters, parameters, hidden)
        torch.testing.assert_close(every.exp().sum(dim=1), torch.ones(9))
        rows = parameters["gate.weight"]
        return rows if rank is None else rows @ parameters["gate.project"]

    whole = gate(None)
    torch.testing.assert_close(gate(6), whole)
    lost = torch.linalg.svdvals(whole)[3:].norm()  # no matrix of rank 3 is nearer
    torch.testing.assert_close((gate(3) - whole).norm(), lost)


def test_a_gate_of_two_levels_learns_both() -> None:
    chosen = ExpertsSettings(clusters=4, active=4, gate_rank=2)
    clusters = cluster_documents(chosen, _vectors(14), generator(0, "clusters"))
    parameters = experts.initial_parameters(clusters, 6, generator(1, "experts"))
    own = {name: value.requires_grad_() for name, value in parameters.items()}
    found = torch.autograd.grad(
        experts.loss(clusters, own, _vectors(5), torch.tensor([0, 13, 7, 7, 2])), [*own.values()]
    )
    assert all(float(gradient.norm()) > 0 for gradient in found)


def test_rows_of_a_gate_with_two_levels_cost_as_much_as_they_are_long() -> None:
    members = torch.arange(10_000).reshape(1_000, 10)
    places = torch.arange(10_000) // 10, torch.arange(10_000) % 10
    counted = experts.multiply_adds(experts.Clusters(ExpertsSettings(active=60, gate_rank=48), members, *places), 384)
    assert counted["experts"] == 384 * 48 + 48 * 1_000 + 384 * 600


def test_ten_thousand_documents_need_a_tenth_of_the_flat_heads_work() -> None:
    members = torch.arange(10_000).reshape(100, 100)
    places = torch.arange(10_000) // 100, torch.arange(10_000) % 100
    counted = experts.multiply_adds(experts.Clusters(ExpertsSettings(active=8), members, *places), 384)
    assert counted == {"experts": 384 * 900, "flat": 384 * 10_000, "share": pytest.approx(0.09)}


def test_more_clusters_than_documents_and_more_active_than_clusters_are_refused() -> None:
    with pytest.raises(UserError, match="clusters=9 for 4 documents"):
        cluster_documents(ExpertsSettings(clusters=9), torch.eye(4), generator(0, "clusters"))
    with pytest.raises(UserError, match="active=4 experts of 2"):
        cluster_documents(ExpertsSettings(clusters=2), torch.eye(4), generator(0, "clusters"))
    with pytest.raises(UserError, match="gate_rank=5 for 4 clusters"):
        cluster_documents(ExpertsSettings(clusters=4, gate_rank=5), torch.eye(8), generator(0, "clusters"))
