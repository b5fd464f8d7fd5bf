"""CTC of many utterances at once agrees with torch's own, one utterance at a time, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from confide.speech import ctc

Drawn = tuple[Tensor, list[int], list[Tensor]]


def drawn(seed: int, spread: float, tokens: int = 29, longest: int = 60, most: int = 14, labels: int = 29) -> Drawn:
    """Logits of several utterances, their lengths and targets, of every length and of none."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 20))
    lengths = draw.integers(1, longest + 1, count).tolist()
    targets = [torch.from_numpy(draw.integers(1, min(tokens, labels), draw.integers(most + 1))) for _ in range(count)]
    logits = draw.standard_normal((sum(lengths), tokens)).astype(np.float32)
    return torch.from_numpy(logits * np.float32(spread)), lengths, targets


def reference(logits: Tensor, lengths: list[int], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
    found = [ctc.plain(own, target) for own, target in zip(torch.split(logits, lengths), targets, strict=True)]
    return torch.stack([loss for loss, _ in found]), torch.cat([gradient for _, gradient in found])


@pytest.fixture
def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the targets of those utterances that the fast way does not trust itself with."""
    found: list[int] = []
    real: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = ctc.plain

    def counted(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found.append(len(target))
        return real(logits, target)

    monkeypatch.setattr(ctc, "plain", counted)
    return found


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 30.0, 100.0])
@pytest.mark.parametrize("labels", [2, 4, 29])  # few labels: many repeats, and many targets that do not fit
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_torch(seed: int, labels: int, spread: float) -> None:
    given = drawn(seed, spread, labels=labels)
    (losses, gradients), wanted = ctc.losses_and_gradients(*given), reference(*given)
    torch.testing.assert_close(losses.double(), wanted[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradients.double(), wanted[1], rtol=0.0, atol=2e-6 * max(1.0, spread))


def test_long_utterances_go_in_pieces_and_stay_exact(left_to_torch: list[int]) -> None:
    given = drawn(0, 1.0, longest=1200, most=120)
    assert len(list(ctc._cut(np.array(given[1]), np.array([len(each) for each in given[2]])))) > 1
    losses, gradients = ctc.losses_and_gradients(*given)
    fit = sum(len(t) + int((t[1:] == t[:-1]).sum()) <= n for n, t in zip(given[1], given[2], strict=True))
    assert len(left_to_torch) == len(given[1]) - fit < len(given[1]) / 2, "only impossible ones"
    wanted = reference(*given)
    torch.testing.assert_close(losses.double(), wanted[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradients.double(), wanted[1], rtol=0.0, atol=2e-6)


def test_a_sure_model_is_not_left_to_torch(left_to_torch: list[int]) -> None:
    """Probabilities of 1 in 10^17 a frame: what paths have by then is far outside of any range of numbers."""
    target = torch.arange(1, 11)
    path = torch.cat(
        [torch.zeros(2, dtype=torch.int64), torch.stack([target, 0 * target], dim=1).repeat(1, 3).view(-1)]
    )
    logits = 40.0 * functional.one_hot(path, 29).float()
    losses, gradients = ctc.losses_and_gradients(logits, [len(path)], [target])
    assert not left_to_torch
    wanted = reference(logits, [len(path)], [target])
    torch.testing.assert_close(losses.double(), wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients.double(), wanted[1], rtol=0.0, atol=1e-6)


def test_what_the_model_all_but_rules_out_is_left_to_torch(left_to_torch: list[int]) -> None:
    """The way forward would forget the one path that ends, as by then it has 1 in 10^347 of the others."""
    logits = torch.zeros(40, 3)
    logits[:, 0] = 40.0
    losses, gradients = ctc.losses_and_gradients(logits, [40], [torch.tensor([1, 2] * 10)])
    assert left_to_torch == [20]
    wanted = reference(logits, [40], [torch.tensor([1, 2] * 10)])
    assert float(losses[0]) == pytest.approx(float(wanted[0][0]), rel=1e-6)
    assert float(losses[0]) > 750
    torch.testing.assert_close(gradients.double(), wanted[1], rtol=0.0, atol=1e-6)


def test_targets_that_do_not_fit_are_worth_zero_and_empty_ones_are_blanks() -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    given = (
        logits,
        [3, 2, 4, 0],
        [torch.tensor([1, 1]), torch.tensor([1, 1]), torch.tensor([]).long(), torch.tensor([2])],
    )
    losses, gradients = ctc.losses_and_gradients(*given)
    assert losses[[1, 3]].tolist() == [0.0, 0.0]
    assert not gradients[3:5].any()
    log_probs = torch.log_softmax(logits, dim=-1)
    assert float(losses[0]) == pytest.approx(-float(log_probs[0, 1] + log_probs[1, 0] + log_probs[2, 1]), rel=1e-5)
    assert float(losses[2]) == pytest.approx(-float(log_probs[5:, 0].sum()), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_with_their_utterance(bad: float) -> None:
    logits, lengths, targets = drawn(3, 1.0)
    assert len(lengths) > 2
    wanted = ctc.losses_and_gradients(logits, lengths, targets)
    spoilt = logits.clone()
    spoilt[lengths[0] + 1] = bad
    losses, gradients = ctc.losses_and_gradients(spoilt, lengths, targets)
    others = torch.cat([torch.arange(lengths[0]), torch.arange(lengths[0] + lengths[1], len(logits))])
    torch.testing.assert_close(gradients[others], wanted[1][others])
    torch.testing.assert_close(losses[2:], wanted[0][2:])


def test_losses_of_padded_utterances_can_be_differentiated() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 20, 7, generator=draw).requires_grad_()
    targets, lengths, sizes = (
        torch.randint(1, 7, (3, 4), generator=draw),
        torch.tensor([20, 9, 15]),
        torch.tensor([4, 1, 3]),
    )
    weights = torch.tensor([0.5, 2.0, 1.0])
    found = ctc.losses(logits, lengths, targets, sizes)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    log_probs = torch.log_softmax(logits, dim=-1).transpose(0, 1)
    wanted = functional.ctc_loss(log_probs, targets, lengths, sizes, reduction="none")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad((wanted * weights).sum(), logits)[0], rtol=1e-4, atol=1e-5)
