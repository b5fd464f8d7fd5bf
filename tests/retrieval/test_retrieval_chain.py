"""The retrieval head as a chain of linear layers: the same updates as autograd, and only where it is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.federated.chain import Ranks
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.low_rank import LowRankTrainer
from confide.federated.parameters import Layout, flatten
from confide.retrieval.settings import RetrievalSettings
from confide.retrieval.task import Retrieval

DATA = {"kind": "embedded", "documents": 6, "queries_per_document": 6, "households": 3}


@pytest.fixture
def task(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Retrieval]:
    def make(**more: Any) -> Retrieval:
        given = {"encoder": {"source": str(tiny_model("masked")), "pooling": "mean"}, "data": DATA, **more}
        return Retrieval(RetrievalSettings.model_validate({"cache": tmp_path / "states", **given}), 0, quiet=True)

    return make


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"scale": "unit"},
        {"pre_classifier": 9, "scale": "layer"},
        {"pre_classifier": 9, "activation": "relu", "scale": "layer"},
        {"pre_classifier": 9, "activation": "tanh"},
    ],
)
def test_factors_of_the_head_equal_autograd_on_the_same_batches(
    task: Callable[..., Retrieval], head: dict[str, Any]
) -> None:
    made, local = task(head=head), LocalTraining(epochs=2, batch_size=2, learning_rate=0.05)
    layout, central = Layout.of(made.initial_parameters()), flatten(made.initial_parameters())
    chain = made.chain()
    assert chain is not None
    plain = PlainTrainer(made, layout, local, 3, central)
    fast = LowRankTrainer(made, Ranks(chain, layout, local, made.examples), layout, 3)
    for users, updates in fast.updates(central, np.arange(len(made.examples)), 1):
        for row, user in enumerate(users):
            factors = torch.zeros(len(users), len(layout.names), dtype=torch.float64)
            factors[row] = 1.0
            total = torch.zeros_like(central)
            updates.weighted_sum(factors, total)
            expected = plain.update(central, int(user), 1).delta
            assert float((total - expected).norm()) < 1e-4 * float(expected.norm())  # single precision


def test_dropout_experts_and_adapters_are_no_chain(task: Callable[..., Retrieval]) -> None:
    assert task().chain() is not None
    assert task(head={"dropout": 0.1}).chain() is None
    assert task(method="adapter_head").chain() is None
