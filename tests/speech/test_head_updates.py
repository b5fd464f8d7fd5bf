"""Updates of heads that are computed together are held to the bound, whatever one user's numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import confide.speech.head_updates
from confide.federated.bounding import Bounding, bounder
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout
from confide.speech.head_updates import HeadUpdates, Scales, head_updates
from confide.speech.model import ctc_loss
from confide.speech.pretrained import head

PARAMETERS = {"head.weight": torch.full((5, 8), 0.1), "head.bias": torch.zeros(5)}
LAYOUT = Layout.of(PARAMETERS)


def updates(spoilt: float | None, rate: float, clip: float | None) -> HeadUpdates:
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(frames, 8, generator=draw) for frames in (30, 12, 25)]
    if spoilt is not None:
        states[1][3] = spoilt
    local = LocalTraining(steps=1, learning_rate=rate, gradient_clip=clip)
    scales = [Scales().of(0, [own]) for own in states]
    return head_updates(PARAMETERS, states, scales, [torch.tensor([1, 2])] * 3, [1, 1, 1], local, rate)


@pytest.mark.parametrize("mean", [0.0, 1.0, 3.0, 1000.0])
def test_states_far_from_their_mean_and_near_it_give_what_autograd_gives(mean: float) -> None:
    """Means are left in the states, and must not count."""
    draw = torch.Generator().manual_seed(1)
    states = [torch.randn(frames, 8, generator=draw) + mean for frames in (30, 12, 25)]
    states[2] -= mean
    target, scales = torch.tensor([1, 2]), Scales()
    begun = {name: value + 0.3 * torch.randn(value.shape, generator=draw) for name, value in PARAMETERS.items()}
    local = LocalTraining(steps=1, learning_rate=1.0)
    held = [scales.of(0, states[:2]), scales.of(1, states[2:])]
    found = head_updates(begun, states, held, [target] * 3, [2, 1], local, 1.0)
    for user, own in enumerate((states[:2], states[2:])):
        leaves = {name: value.double().requires_grad_() for name, value in begun.items()}
        losses = [
            ctc_loss(head(leaves, each.double()[None]), torch.tensor([len(each)]), target[None], torch.tensor([2]))
            for each in own
        ]
        wanted = torch.autograd.grad(torch.stack(losses).mean(), list(leaves.values()))
        for mine, theirs in zip(torch.split(found.gradients[user], LAYOUT.sizes), wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs.flatten(), rtol=2e-4, atol=2e-4)


def test_what_scales_a_users_states_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states, scales = [torch.randn(7, 8), torch.randn(5, 8)], Scales()
    first = scales.of(3, states)
    assert first.shape == (12, 2)
    assert scales.of(3, states) is first
    assert scales.of(4, states) is not first
    monkeypatch.setattr(confide.speech.head_updates, "_REMEMBERED", 2)
    assert scales.of(5, states) is not scales.of(5, states)  # there is no room for a third


def bounded_sum(found: HeadUpdates, users: list[int]) -> torch.Tensor:
    """The sum of these users' bounded updates, as a part of a cohort makes it."""
    finite = torch.isfinite(found.norms).all(dim=1)
    rule = bounder(Bounding(rule="clip", bound=1.0), LAYOUT)
    factors = torch.where(finite[:, None], rule.factors(torch.where(finite[:, None], found.norms, 0.0)), 0.0)
    chosen = torch.from_numpy(np.isin(np.arange(3), users))
    total = torch.zeros(LAYOUT.size)
    found.weighted_sum(torch.where(chosen[:, None], factors, 0.0), total)
    return total


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_user_of_any_numbers_changes_nobody_elses_update(bad: float, clip: float | None) -> None:
    wanted = bounded_sum(updates(None, 0.7, clip), [0, 2])
    torch.testing.assert_close(bounded_sum(updates(bad, 0.7, clip), [0, 2]), wanted)
    assert float((bounded_sum(updates(bad, 0.7, clip), [0, 1, 2]) - wanted).norm()) <= 1.0


@pytest.mark.parametrize("rate", [1e-30, 0.7, 1e38, 1e60])
def test_what_is_summed_is_within_the_bound_at_any_rate(rate: float) -> None:
    """An update that single precision cannot hold is bounded before it is ever written down."""
    for user in range(3):
        length = float(bounded_sum(updates(None, rate, None), [user]).norm())
        assert length <= 1.0
        assert length > 0.99 or rate < 1


@pytest.mark.parametrize("tiny", [1e-44, 1e-39, 1e-30])
def test_a_user_who_has_next_to_nothing_to_learn_spoils_nobodys_sum(tiny: float) -> None:
    """Normalising such an update takes a factor that single precision cannot hold."""
    gradients = torch.zeros(2, LAYOUT.size)
    gradients[0, :2], gradients[1, 3] = torch.tensor([tiny, -tiny]), 0.5
    norms = LAYOUT.norms(gradients[0]), LAYOUT.norms(gradients[1])
    found = HeadUpdates(gradients, torch.ones(2, dtype=torch.float64), LAYOUT, torch.stack(norms), torch.zeros(2))
    total = torch.zeros(LAYOUT.size)
    found.weighted_sum(bounder(Bounding(rule="normalise", bound=1.0), LAYOUT).factors(found.norms), total)
    root = 0.5**0.5
    torch.testing.assert_close(total[:4], torch.tensor([root, -root, 0.0, 1.0]), atol=1e-5, rtol=0.0)
    assert not total[4:].any()
