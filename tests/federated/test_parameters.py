"""Claims about passes over a flat model: threads change nothing, and norms count every entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.federated import parameters
from confide.federated.local import PlainUpdate
from confide.federated.parameters import Layout, all_finite, exact_norm

torch.set_num_threads(1)
LAYOUT = Layout(("a", "b", "c"), ((700, 500), (3,), (280_001,)))


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_threads_change_no_bit_of_a_difference_or_a_sum(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(LAYOUT.size, generator=draw) for _ in range(2))
    other.requires_grad_()  # as a user's model does
    found = []
    for worth in (1, LAYOUT.size + 1):
        monkeypatch.setattr(parameters, "_WORTH_THREADS", worth)
        monkeypatch.setattr(parameters, "_CHUNK", 1 << 12)
        out, into = torch.empty(LAYOUT.size), torch.ones(LAYOUT.size)
        norms = LAYOUT.difference(one, other, out, scale)
        update = PlainUpdate(out, LAYOUT, norms.unsqueeze(0), torch.zeros(1))
        update.weighted_sum(torch.tensor([[0.5, 2.0, 0.25]], dtype=torch.float64), into)
        place = other.detach().clone()
        assert torch.equal(LAYOUT.difference(one, place, place, scale), norms)
        assert torch.equal(place, out)
        found.append((out, norms, into))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    out, norms, into = found[0]
    assert torch.equal(out, ((one - other) * scale).detach())
    assert norms.tolist() == pytest.approx([exact_norm(piece) for piece in LAYOUT.pieces(out)], rel=2e-5)
    assert all(a >= exact_norm(b) * (1 - 1e-12) for a, b in zip(norms.tolist(), LAYOUT.pieces(out), strict=True))
    assert torch.equal(LAYOUT.pieces(into)[1], 1 + 2 * LAYOUT.pieces(out)[1])


@settings(deadline=None)
@given(
    st.lists(st.floats(-1000, 1000), min_size=1, max_size=40),
    st.sampled_from([1e-40, 1e-22, 1e-12, 1.0, 1e10, 1e25]),
    st.sampled_from([1, 50, 700]),
)
def test_norms_are_never_too_small_whatever_the_size_of_entries(
    values: list[float], factor: float, copies: int
) -> None:
    flat = (torch.tensor(values, dtype=torch.float64).repeat(copies) * factor).float()
    norms = Layout(("w",), ((len(flat),),)).difference(flat, torch.zeros_like(flat), torch.empty_like(flat))
    exact = float(np.linalg.norm(flat.double().numpy()))
    assert exact * (1 - 1e-12) <= float(norms[0]) <= exact * (1 + 1.1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found_in_any_piece(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(parameters, "_CHUNK", 10)
    for place in (0, 9, 10, 24):
        flat = torch.full((25,), 3e38)  # whose sum is not finite, though all of them are
        assert all_finite(flat)
        flat[place] = value
        assert not all_finite(flat)
