"""The linear head and the inner-product baseline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval import head, search
from confide.retrieval.head import HeadSettings
from confide.retrieval.search import DocumentIndex, SearchSettings


def _hidden(rows: int = 6, width: int = 8) -> torch.Tensor:
    return torch.from_numpy(generator(0, "hidden").standard_normal((rows, width), dtype=np.float32))


def test_head_is_the_same_function_as_torchs_layers() -> None:
    settings = HeadSettings(pre_classifier=5)
    parameters = head.initial_parameters(settings, 8, 11, generator(0, "head"))
    reference = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 11))
    reference.load_state_dict(dict(zip(reference.state_dict(), parameters.values(), strict=True)))
    torch.testing.assert_close(head.forward(settings, parameters, _hidden()), reference(_hidden()))


def test_dropout_acts_only_with_randomness_and_keeps_the_mean() -> None:
    settings = HeadSettings(dropout=0.5)
    parameters = head.initial_parameters(settings, 8, 3, generator(0, "head"))
    still = head.forward(settings, parameters, _hidden(1))
    assert torch.equal(still, head.forward(settings, parameters, _hidden(1)))
    draws = torch.Generator().manual_seed(0)
    many = head.forward(settings, parameters, _hidden(1).expand(20_000, -1), draws)
    assert many.std(dim=0).min() > 0.05
    torch.testing.assert_close(many.mean(dim=0), still[0], atol=0.03, rtol=0)


@pytest.mark.parametrize("scale", ["unit", "layer"])
def test_scaled_states_have_one_size(scale: str) -> None:
    settings = HeadSettings.model_validate({"scale": scale})
    parameters = head.initial_parameters(settings, 8, 3, generator(0, "head"))
    once, twice = (head.forward(settings, parameters, factor * _hidden()) for factor in (1.0, 700.0))
    torch.testing.assert_close(once, twice, atol=1e-3, rtol=1e-3)


def test_the_head_learns_what_a_gradient_can_teach() -> None:
    settings, labels = HeadSettings(), torch.arange(6)
    parameters = head.initial_parameters(settings, 8, 6, generator(0, "head"))
    for _ in range(200):
        own = {name: value.requires_grad_() for name, value in parameters.items()}
        gradients = torch.autograd.grad(head.loss(head.forward(settings, own, _hidden()), labels), list(own.values()))
        parameters = {n: (v - 0.5 * g).detach() for (n, v), g in zip(own.items(), gradients, strict=True)}
    scores, best = head.top_k(head.forward(settings, parameters, _hidden()), 3)
    assert best[:, 0].tolist() == list(range(6))
    assert bool((scores.diff(dim=1) <= 0).all())


def test_k_beyond_the_documents_is_refused() -> None:
    with pytest.raises(UserError, match="k=7 documents were asked for; expected 1 to 6"):
        head.top_k(torch.zeros(1, 6), 7)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_index_finds_the_largest_inner_products(normalise: bool) -> None:
    settings = SearchSettings(normalise=normalise)
    documents = torch.from_numpy(generator(1, "documents").standard_normal((50, 8), dtype=np.float32))
    scores, found = DocumentIndex(settings, documents).search(_hidden(), 5)
    expected = torch.topk(search.inner_products(settings, _hidden(), documents), 5, dim=1)
    assert torch.equal(found, expected.indices)
    torch.testing.assert_close(scores, expected.values, atol=1e-5, rtol=1e-5)


def test_the_index_refuses_queries_of_another_width_and_too_large_k() -> None:
    index = DocumentIndex(SearchSettings(), torch.eye(4))
    with pytest.raises(UserError, match="queries are 8 wide; expected 4"):
        index.search(_hidden(), 1)
    with pytest.raises(UserError, match="expected 1 to 4"):
        index.search(torch.eye(4), 5)


def test_a_head_that_begins_as_documents_is_search_by_cosine() -> None:
    vectors = torch.from_numpy(generator(0, "documents").standard_normal((7, 8), dtype=np.float32))
    queries = torch.from_numpy(generator(1, "queries").standard_normal((5, 8), dtype=np.float32))
    settings = HeadSettings(scale="unit", start="documents")
    parameters = head.initial_parameters(settings, 8, 7, generator(2, "head"), vectors)
    cosine = torch.nn.functional.cosine_similarity(queries[:, None], vectors[None], dim=2)
    assert torch.equal(head.forward(settings, parameters, queries).argsort(dim=1), cosine.argsort(dim=1))
    with pytest.raises(ValidationError, match="pre_classifier"):
        HeadSettings(pre_classifier=4, start="documents")
    with pytest.raises(ValidationError, match="give its width"):
        HeadSettings(activation="relu")
