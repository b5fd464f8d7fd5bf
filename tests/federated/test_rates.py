"""Rates of their own for tensors by name, for users and for the central optimiser."""

from __future__ import annotations

import pytest
import torch

from confide.errors import UserError
from confide.federated.local import LocalTraining
from confide.federated.optimisers import Adam, init, update
from confide.federated.rates import factors


def test_the_first_pattern_that_fits_counts() -> None:
    names = ["blocks.00.q.lora_a", "blocks.00.q.lora_b", "head.weight"]
    assert factors({"*.lora_b": 0.5, "*.lora_?": 0.1}, names, "local") == [0.1, 0.5, 1.0]
    with pytest.raises(UserError, match=r"local\.rates: no tensor is called 'lora'"):
        factors({"lora": 0.5}, names, "local")


def test_adam_moves_each_tensor_at_its_own_rate() -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(3)}
    settings = Adam(learning_rate=0.1, rates={"b": 0.01})
    update(settings, weights, {"a": torch.full((3,), 5.0), "b": torch.full((3,), 5.0)}, init(settings, weights), 0)
    torch.testing.assert_close(weights["b"], 0.01 * weights["a"])
    assert bool((weights["a"] != 0).all())


def test_no_rates_are_no_field_of_a_recipe() -> None:
    assert "rates" not in LocalTraining(steps=1, learning_rate=1.0).model_dump()
    assert "rates" not in Adam(learning_rate=0.1).model_dump()
