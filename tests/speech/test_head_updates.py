"""Updates of heads that are computed together are held to the bound, whatever one user's numbers are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import confide.speech.head_updates
from confide.federated.bounding import Bounding, bounder
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout
from confide.kernels import kernel
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


class Case:
    """Some users of a head of any size, in single precision, as the kernel takes them."""

    def __init__(self, width: int, tokens: int, lengths: list[list[int]], labels: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.parameters = {
            "head.weight": 0.3 * torch.randn(tokens, width, generator=draw),
            "head.bias": torch.randn(tokens, generator=draw),
        }
        self.counts, scales = [len(own) for own in lengths], Scales()
        drawn = [torch.randn(frames, width, generator=draw) for own in lengths for frames in own]
        self.states = [own - 0.5 * own.mean(dim=1, keepdim=True) for own in drawn]  # nobody is little but a mean
        self.targets = [torch.randint(1, tokens, (labels,), generator=draw) for _ in self.states]
        places = np.cumsum([0, *self.counts])
        owned = [self.states[begin:end] for begin, end in pairwise(places.tolist())]
        self.scales = [scales.of(user, own) if own else torch.zeros(0, 2) for user, own in enumerate(owned)]

    def updates(self) -> HeadUpdates:
        local = LocalTraining(steps=1, learning_rate=1.0)
        return head_updates(self.parameters, self.states, self.scales, self.targets, self.counts, local, 1.0)


@pytest.fixture
def by_arrays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many users each call of the plain path had."""
    if kernel("head") is None:
        pytest.skip("this machine cannot have the kernel")
    seen, plain = list[int](), confide.speech.head_updates._by_arrays

    def counted(*given: Any) -> Any:
        seen.append(len(given[-1]))
        return plain(*given)

    monkeypatch.setattr(confide.speech.head_updates, "_by_arrays", counted)
    return seen


def plainly(case: Case) -> HeadUpdates:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confide.speech.head_updates, "kernel", lambda name: None)
        return case.updates()


def assert_alike(found: HeadUpdates, wanted: HeadUpdates) -> None:
    most = wanted.gradients.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(found.gradients / most, wanted.gradients / most, rtol=0.0, atol=2e-5)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [16, 48, 80, 384])
@pytest.mark.parametrize("tokens", [2, 8, 29, 32, 33, 70])
@pytest.mark.parametrize("labels", [0, 1, 3, 4, 20])
def test_the_kernel_gives_what_arrays_give(width: int, tokens: int, labels: int, by_arrays: list[int]) -> None:
    lengths = [[50, 41, 47], [64], [], [45, 46]]
    case = Case(width, tokens, lengths, labels, seed=width + tokens + labels)
    found = case.updates()
    assert by_arrays == []
    assert_alike(found, plainly(case))


def test_the_kernel_knows_long_utterances_short_ones_and_repeats(by_arrays: list[int]) -> None:
    case = Case(32, 12, [[1], [2, 3], [700], [1500, 5], [9, 8]], labels=1)
    case.targets[3] = torch.randint(1, 12, (150,), generator=torch.Generator().manual_seed(3))
    case.targets[4] = torch.tensor([3, 4, 4, 4, 5, 5])
    found = case.updates()
    assert by_arrays == []
    assert_alike(found, plainly(case))
    norm = torch.stack([Layout.of(case.parameters).norms(own) for own in found.gradients])
    torch.testing.assert_close(found.norms, norm, rtol=1e-12, atol=0.0)


def unlikely(case: Case) -> None:
    case.parameters["head.bias"][int(case.targets[1][0])] = -500.0


def far_from_zero(case: Case) -> None:
    case.states[1] += 1000.0
    case.scales[1] = Scales().of(1, [case.states[1]])


def too_long(case: Case) -> None:
    case.targets[1] = torch.ones(40, dtype=torch.int64)


@pytest.mark.parametrize("change", [unlikely, far_from_zero, too_long])
def test_users_whom_the_kernel_is_not_sure_of_go_the_plain_way(
    change: Callable[[Case], None], by_arrays: list[int]
) -> None:
    case = Case(48, 29, [[30], [31], [32]], labels=3)
    case.targets[0] = case.targets[2] = torch.tensor([1, 2, 3])
    case.targets[1] = torch.tensor([7, 8, 9])
    change(case)
    found = case.updates()
    assert by_arrays == [1]
    assert_alike(found, plainly(case))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("frame", [0, 13, 30])
def test_in_the_kernel_too_nobody_elses_update_is_changed(bad: float, frame: int, by_arrays: list[int]) -> None:
    clean = Case(48, 29, [[30], [31], [32]], labels=3)
    wanted = clean.updates()
    spoilt = Case(48, 29, [[30], [31], [32]], labels=3)
    spoilt.states[1][frame, 40] = bad
    spoilt.scales[1] = Scales().of(1, [spoilt.states[1]])
    found, plain = spoilt.updates(), plainly(spoilt)
    for user in (0, 2):
        assert torch.equal(found.gradients[user], wanted.gradients[user])
        assert torch.equal(found.norms[user], wanted.norms[user])
    assert torch.isfinite(found.norms[1]).all() == torch.isfinite(plain.norms[1]).all()
    assert torch.isfinite(found.losses[1]) == torch.isfinite(plain.losses[1])


@pytest.mark.parametrize("where", ["head.weight", "head.bias"])
def test_a_model_that_is_not_finite_has_no_finite_update(where: str, by_arrays: list[int]) -> None:
    case = Case(48, 29, [[30], [31]], labels=3)
    case.parameters[where].view(-1)[5] = float("nan")
    assert not torch.isfinite(case.updates().norms).all(dim=1).any()


@pytest.mark.parametrize("change", ["double precision", "an odd width", "a hidden layer", "a label beyond the tokens"])
def test_what_the_kernel_does_not_know_goes_the_plain_way(change: str, by_arrays: list[int]) -> None:
    case = Case(40 if change == "an odd width" else 48, 29, [[30], [31, 32]], labels=3)
    if change == "double precision":
        case.parameters = {name: value.double() for name, value in case.parameters.items()}
        case.states, case.scales = ([own.double() for own in some] for some in (case.states, case.scales))
    if change == "a hidden layer":
        hidden = {"hidden.weight": torch.randn(16, 48), "hidden.bias": torch.zeros(16)}
        case.parameters = hidden | {"head.weight": torch.randn(29, 16), "head.bias": torch.zeros(29)}
    if change == "a label beyond the tokens":
        case.targets[0][1] = 29
        with pytest.raises((RuntimeError, IndexError)):
            case.updates()
        return
    case.updates()
    assert by_arrays == [2]
