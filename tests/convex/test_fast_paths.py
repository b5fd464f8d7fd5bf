"""The short cuts of the convex tasks are exact: they agree with autograd, one user after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from confide.convex.logistic import LogisticRegression, LogisticSettings
from confide.convex.quadratics import Quadratics, QuadraticSettings
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task

VARIANTS: list[dict[str, Any]] = [
    {},
    {"divide_by_learning_rate": True},
    {"proximal": 0.3},
    {"gradient_clip": 0.05},
    {"gradient_clip": 0.05, "proximal": 2.0, "divide_by_learning_rate": True},
    {"steps": None, "epochs": 3},
]


def _local(changes: dict[str, Any]) -> LocalTraining:
    return LocalTraining.model_validate({"steps": 7, "learning_rate": 0.2, **changes})


def _digits(l2: float) -> LogisticRegression:
    task = LogisticRegression(LogisticSettings(users=100, l2=l2), seed=3)
    object.__setattr__(
        task.data, "train_features", task.data.train_features.double()
    )  # so that the comparison is about the algebra, not about rounding
    return task


def _central(task: Task, scale: float) -> torch.Tensor:
    start = flatten(task.initial_parameters()).double()
    return start + scale * torch.from_numpy(np.random.default_rng(0).standard_normal(start.numel()))


def _compare(task: Task, local: LocalTraining, central: torch.Tensor, rtol: float) -> None:
    layout = Layout.of(task.initial_parameters())
    plain = PlainTrainer(task, layout, local, seed=0, like=central)
    users = np.array([0, 3, 17, 42])
    fast = task.fast_updates(layout.views(central), users, local, local.rate(0))
    assert fast is not None
    for row, user in enumerate(users):
        reference = plain.update(central, int(user), 0)
        torch.testing.assert_close(fast.norms[row], reference.norms[0], rtol=rtol, atol=1e-12)
        torch.testing.assert_close(fast.losses[row], reference.losses[0], rtol=rtol, atol=1e-12)
        # Different factors for the tensors tell whether each factor lands on its own tensor.
        factors = torch.zeros(len(users), len(layout.names), dtype=torch.float64)
        factors[row] = torch.arange(1.0, len(layout.names) + 1, dtype=torch.float64)
        got, expected = torch.zeros_like(central), torch.zeros_like(central)
        fast.weighted_sum(factors, got)
        reference.weighted_sum(factors[row : row + 1], expected)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("l2", [0.0, 0.05])
def test_dual_logistic_updates_equal_autograd(changes: dict[str, Any], l2: float) -> None:
    task = _digits(l2)
    _compare(task, _local(changes), _central(task, 0.5), rtol=1e-8)


def test_dual_logistic_updates_equal_autograd_from_a_zero_model() -> None:
    task = _digits(1e-4)
    _compare(task, _local({}), _central(task, 0.0), rtol=1e-8)


@pytest.mark.parametrize("changes", [{}, {"divide_by_learning_rate": True}, {"steps": None, "epochs": 4}])
def test_quadratic_updates_equal_autograd(changes: dict[str, Any]) -> None:
    task = Quadratics(QuadraticSettings(users=50, dimension=30, rank=4), seed=1)
    _compare(task, _local(changes), _central(task, 1.0), rtol=1e-9)


@pytest.mark.parametrize("changes", [{"proximal": 0.1}, {"gradient_clip": 1.0}])
def test_quadratics_leave_other_settings_to_the_reference(changes: dict[str, Any]) -> None:
    task = Quadratics(QuadraticSettings(users=5, dimension=30, rank=4), seed=1)
    assert task.fast_updates(task.initial_parameters(), np.array([0]), _local(changes), 0.1) is None


def test_mini_batches_are_left_to_the_reference() -> None:
    task = _digits(0.0)
    local = _local({"batch_size": 2})
    assert task.fast_updates(task.initial_parameters(), np.array([0]), local, 0.1) is None


def test_a_user_whose_update_is_not_finite_adds_nothing_in_factored_form() -> None:
    task = _digits(1e-4)
    task.data.train_features[task.held[3]] = float("nan")
    layout = Layout.of(task.initial_parameters())
    central = _central(task, 0.5)
    fast = task.fast_updates(layout.views(central), np.array([2, 3]), _local({}), 0.2)
    assert fast is not None
    assert torch.isfinite(fast.norms).all(dim=1).tolist() == [True, False]
    total = torch.zeros_like(central)
    fast.weighted_sum(torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64), total)
    assert torch.isfinite(total).all()
    assert float(total.norm()) > 0


def test_the_optimum_of_the_quadratics_has_no_gradient_and_no_suboptimality() -> None:
    task = Quadratics(QuadraticSettings(users=50, dimension=30, rank=4, distance=0.0), seed=1)
    w = task.initial_parameters()["w"].requires_grad_()
    losses = [task.loss({"w": w}, task.batch(user, None, np.random.default_rng(0))) for user in range(50)]
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), w)
    assert float(gradient.norm()) < 1e-12
    assert abs(task.evaluate({"w": w.detach()})["suboptimality"]) < 1e-12
    assert task.evaluate({"w": w.detach() + 0.1})["suboptimality"] > 0


def test_the_quadratics_have_the_papers_distributions() -> None:
    task = Quadratics(QuadraticSettings(), seed=0)
    assert task.roots.shape == (100, 200, 20)
    assert float(task.roots.std()) == pytest.approx(1 / 20, rel=0.01)
    assert float(task.centres.std()) == pytest.approx(1, rel=0.02)
    assert 0 < float(task.offset.min()) < float(task.offset.max()) < 1


def test_weight_decay_in_the_loss_is_that_of_torch() -> None:
    task = _digits(0.1)
    parameters = {n: p.double() + 0.3 for n, p in task.initial_parameters().items()}
    batch = task.batch(0, None, np.random.default_rng(0))
    leaves = [p.clone().requires_grad_() for p in parameters.values()]
    task.l2 = 0.0
    bare = torch.autograd.grad(task.loss(dict(zip(parameters, leaves, strict=True)), batch), leaves)
    task.l2 = 0.1
    whole = torch.autograd.grad(task.loss(dict(zip(parameters, leaves, strict=True)), batch), leaves)
    for decayed, plain, leaf in zip(whole, bare, leaves, strict=True):
        torch.testing.assert_close(decayed, plain + 0.1 * leaf.detach())


def test_own_accuracy_is_that_of_each_users_examples() -> None:
    task = _digits(0.0)
    model = Layout.of(task.initial_parameters()).views(_central(task, 0.1))
    users = np.array([5, 0, 99])
    found = task.own_accuracy(model, users).tolist()
    for user, share in zip(users, found, strict=True):
        features, labels = task.batch(int(user), None, np.random.default_rng())
        guesses = (features @ model["weight"].T + model["bias"]).argmax(dim=1)
        assert share == float((guesses == labels).double().mean())
    assert len(set(found)) > 1
