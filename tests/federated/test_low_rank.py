"""Training users as factors is exact: it agrees with autograd, one user after the other, for every setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from confide.federated.bounding import Bounding, bounder
from confide.federated.chain import Activation, Affine, Chain, Ranks, ranks_of
from confide.federated.cohort import PartTrainer, part_size
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.low_rank import LowRankTrainer, LowRankUpdates, inner_products
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask
from confide.kernels import kernel
from confide.randomness import Addresses, generator


class Layers(BasicTask):
    """Users with different numbers of examples, and a perceptron of any depth."""

    name, metric = "layers", "none"

    def __init__(
        self, held: list[int], sizes: list[int], activation: Activation = "relu", bias: bool = True, draws: bool = False
    ) -> None:
        draw = np.random.default_rng(5)
        self.examples, self.sizes, self.activation, self.bias = np.array(held), sizes, activation, bias
        self.ends = np.cumsum([0, *held])
        self.features = torch.from_numpy(draw.normal(size=(sum(held), sizes[0])))
        self.labels = torch.from_numpy(draw.integers(sizes[-1], size=sum(held)))
        self.draws = draws

    def initial_parameters(self) -> dict[str, Tensor]:
        draw, found = np.random.default_rng(6), {}
        for number, (wide, out) in enumerate(zip(self.sizes[:-1], self.sizes[1:], strict=True)):
            found[f"w{number}"] = torch.from_numpy(draw.normal(size=(out, wide)) / np.sqrt(wide))
            if self.bias:
                found[f"b{number}"] = torch.from_numpy(draw.normal(size=out))
        return found

    def chain(self) -> Chain | None:
        last = len(self.sizes) - 2
        layers = tuple(
            Affine(f"w{i}", f"b{i}" if self.bias else None, "none" if i == last else self.activation)
            for i in range(last + 1)
        )
        return Chain(layers, (lambda draw: draw.integers(100)) if self.draws else None)

    def rows(self, user: int) -> np.ndarray:
        return np.arange(self.ends[user], self.ends[user + 1])

    def inputs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.features[torch.from_numpy(rows)], self.labels[torch.from_numpy(rows)]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        if self.draws:
            draw.integers(100)
        own = self.rows(user)
        return self.inputs(own if examples is None else own[examples])

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        x, labels = batch[0].to(parameters["w0"].dtype), batch[1]
        act = {"relu": torch.relu, "tanh": torch.tanh, "none": lambda t: t}[self.activation]
        for number in range(len(self.sizes) - 1):
            x = functional.linear(x, parameters[f"w{number}"], parameters.get(f"b{number}"))
            x = act(x) if number < len(self.sizes) - 2 else x  # type: ignore[no-untyped-call]
        return functional.cross_entropy(x, labels)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def _local(**changes: Any) -> LocalTraining:
    return LocalTraining.model_validate(
        {"learning_rate": 0.3, **({"steps": 3} if "epochs" not in changes else {}), **changes}
    )


def _compare(task: Layers, local: LocalTraining, rtol: float = 1e-9, dtype: torch.dtype = torch.float64) -> None:
    layout = Layout.of(task.initial_parameters())
    central = flatten(task.initial_parameters()).to(dtype)
    chain = task.chain()
    assert chain is not None
    plain = PlainTrainer(task, layout, local, seed=2, like=central)
    fast = LowRankTrainer(task, Ranks(chain, layout, local, task.examples), layout, seed=2)
    users, step, seen = np.arange(len(task.examples)), 4, []
    for some, updates in fast.updates(central, users, step):
        seen += some.tolist()
        for row, user in enumerate(some):
            reference = plain.update(central, int(user), step)
            torch.testing.assert_close(updates.norms[row], reference.norms[0], rtol=rtol, atol=1e-12)
            torch.testing.assert_close(updates.losses[row], reference.losses[0], rtol=rtol, atol=1e-12)
            # Different factors for the tensors tell whether each factor lands on its own tensor.
            factors = torch.zeros(len(some), len(layout.names), dtype=torch.float64)
            factors[row] = torch.arange(1.0, len(layout.names) + 1, dtype=torch.float64)
            got, expected = torch.zeros_like(central), torch.zeros_like(central)
            updates.weighted_sum(factors, got)
            reference.weighted_sum(factors[row : row + 1], expected)
            torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12 + rtol * float(expected.abs().max()))
    assert sorted(seen) == users.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 2},
        {"epochs": 2, "batch_size": 3},
        {"epochs": 2},
        {"proximal": 0.7, "batch_size": 2},
        {"proximal": 0.7, "epochs": 2, "batch_size": 3},
        {"gradient_clip": 0.1, "batch_size": 2},
        {"gradient_clip": 0.1, "proximal": 0.9, "epochs": 1, "batch_size": 2, "divide_by_learning_rate": True},
    ],
)
@pytest.mark.parametrize("sizes", [[30, 4], [30, 12, 4], [30, 12, 9, 4]])
def test_factors_equal_autograd(sizes: list[int], changes: dict[str, Any]) -> None:
    _compare(Layers([5, 3, 8, 1, 20], sizes), _local(**changes))


@pytest.mark.parametrize("activation", ["relu", "tanh", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_activations_and_missing_biases(activation: Activation, bias: bool) -> None:
    _compare(Layers([5, 4], [20, 10, 6, 3], activation, bias), _local(batch_size=2))


def test_a_task_that_draws_for_itself_gets_the_same_batches() -> None:
    _compare(Layers([5, 7], [20, 3], draws=True), _local(epochs=3, batch_size=2))


def test_in_single_precision_the_two_ways_agree_up_to_its_rounding() -> None:
    task = Layers([20, 20, 20], [784, 128, 10])
    task.features, start = task.features.float(), task.initial_parameters
    task.initial_parameters = lambda: {n: p.float() for n, p in start().items()}  # type: ignore[method-assign]
    _compare(task, _local(epochs=1, batch_size=10), rtol=3e-4, dtype=torch.float32)


def single(task: Layers) -> Layers:
    """The same in single precision, which the compiled kernel takes."""
    task.features, start = task.features.float(), task.initial_parameters
    task.initial_parameters = lambda: {n: p.float() for n, p in start().items()}  # type: ignore[method-assign]
    return task


def updates_of(task: Layers, local: LocalTraining) -> list[tuple[np.ndarray, LowRankUpdates]]:
    central, chain = flatten(task.initial_parameters()), task.chain()
    layout = Layout.of(task.initial_parameters())
    assert chain is not None
    fast = LowRankTrainer(task, Ranks(chain, layout, local, task.examples), layout, seed=2)
    return list(fast.updates(central, np.arange(len(task.examples)), 4))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each group of users, whether the kernel trained it."""
    if kernel("low_rank") is None:
        pytest.skip("this machine cannot have the kernel")
    seen, ask = list[bool](), LowRankTrainer._by_kernel

    def asked(*given: Any) -> LowRankUpdates | None:
        found = ask(*given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(LowRankTrainer, "_by_kernel", asked)
    return seen


PLAIN_STEPS: list[dict[str, Any]] = [
    {}, {"batch_size": 2}, {"epochs": 2, "batch_size": 3}, {"epochs": 2},
    {"epochs": 1, "batch_size": 2, "divide_by_learning_rate": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", PLAIN_STEPS)
@pytest.mark.parametrize(
    ("sizes", "activation", "bias"),
    [
        ([30, 4], "none", True),
        ([131, 17, 4], "relu", True),
        ([784, 128, 10], "relu", True),
        ([113, 33, 19, 5], "relu", False),
        ([225, 16, 2], "none", True),
    ],
)
def test_the_kernel_gives_what_torch_gives(
    sizes: list[int], activation: Activation, bias: bool, changes: dict[str, Any], compiled: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    task, local = single(Layers([5, 3, 8, 1, 9], sizes, activation, bias)), _local(**changes)
    found = updates_of(task, local)
    assert compiled
    assert all(compiled)
    monkeypatch.setattr("confide.federated.low_rank.kernel", lambda _: None)
    for (users, one), (others, other) in zip(found, updates_of(task, local), strict=True):
        assert users.tolist() == others.tolist()
        torch.testing.assert_close(one.norms, other.norms, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(one.losses, other.losses, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(one.factors, other.factors, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-8)


@pytest.mark.parametrize(
    ("changes", "activation", "dtype"),
    [
        ({"proximal": 0.5, "batch_size": 2}, "relu", torch.float32),
        ({"gradient_clip": 0.1}, "relu", torch.float32),
        ({}, "tanh", torch.float32),
        ({}, "relu", torch.float64),
    ],
)
def test_what_the_kernel_does_not_know_is_left_to_torch(
    changes: dict[str, Any], activation: Activation, dtype: torch.dtype, compiled: list[bool]
) -> None:
    task = Layers([5, 3], [60, 30, 5], activation)
    updates_of(task if dtype == torch.float64 else single(task), _local(**changes))
    assert compiled
    assert not any(compiled)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_in_the_kernel_too_a_user_of_any_numbers_changes_nobody_else(bad: float, compiled: list[bool]) -> None:
    local = _local(epochs=1, batch_size=2)
    ((_, clean),) = updates_of(single(Layers([4, 4, 4], [60, 30, 5])), local)
    task = single(Layers([4, 4, 4], [60, 30, 5]))
    task.features[5, 7] = bad
    ((_, found),) = updates_of(task, local)
    assert all(compiled)
    assert torch.equal(found.norms[[0, 2]], clean.norms[[0, 2]])
    assert not torch.isfinite(found.norms[1]).all()
    used = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64).expand(-1, 4)
    totals = torch.zeros(2, found.layout.size)
    clean.weighted_sum(used, totals[0])
    found.weighted_sum(used, totals[1])
    assert torch.equal(totals[0], totals[1])


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-8, 1.0, 1e6]), rows=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_norms_are_never_below_those_of_what_is_added(seed: int, scale: float, rows: int) -> None:
    """Examples that nearly repeat each other with opposite labels cancel; rounding must not shrink the norm."""
    task = Layers([rows], [300, 40, 2])
    draw = np.random.default_rng(seed)
    base = draw.normal(size=300)
    task.features = torch.from_numpy(scale * (base + 1e-6 * draw.normal(size=(rows, 300)))).float()
    task.labels = torch.arange(rows) % 2
    central = flatten(task.initial_parameters()).float()
    layout, local, chain = Layout.of(task.initial_parameters()), _local(steps=2), task.chain()
    assert chain is not None
    fast = LowRankTrainer(task, Ranks(chain, layout, local, task.examples), layout, seed=2)
    ((_, updates),) = fast.updates(central, np.array([0]), 0)
    total = torch.zeros_like(central)
    updates.weighted_sum(torch.ones(1, len(layout.names), dtype=torch.float64), total)
    assert bool((layout.norms(total) <= updates.norms[0] * (1 + 1e-12)).all())


@pytest.mark.parametrize("margin", [40.0, 50.0, 54.0, 80.0])
def test_gradients_whose_squares_are_beyond_single_precision_have_norms_all_the_same(margin: float) -> None:
    """Examples that are right by a margin of 50 have gradients of e^-50, whose squares float32 cannot hold."""
    task = Layers([4], [64, 50])
    draw = np.random.default_rng(0)
    task.features = torch.from_numpy(draw.normal(size=(4, 64))).float()
    task.labels = torch.zeros(4, dtype=torch.long)
    central = {name: torch.zeros_like(value).float() for name, value in task.initial_parameters().items()}
    bias = next(name for name, value in central.items() if value.dim() == 1)
    central[bias][0] = margin
    layout, local, chain = Layout.of(central), _local(steps=1), task.chain()
    assert chain is not None
    fast = LowRankTrainer(task, Ranks(chain, layout, local, task.examples), layout, seed=2)
    ((_, updates),) = fast.updates(flatten(central), np.array([0]), 0)
    total = torch.zeros(layout.size)
    rule = bounder(Bounding(rule="normalise", bound=1.0), layout)
    updates.weighted_sum(rule.factors(updates.norms), total)
    assert float(total.double().norm()) <= 1.0


@pytest.mark.parametrize("rule", ["clip", "per_layer_clip", "normalise", "per_layer_normalise", "none"])
def test_a_part_is_the_same_with_every_bounding_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, local = Layers([4, 9, 2, 30, 4, 4], [60, 30, 5]), _local(epochs=1, batch_size=2, proximal=0.2)
    layout = Layout.of(task.initial_parameters())
    bounds = bounder(Bounding.model_validate({"rule": rule, "bound": None if rule == "none" else 0.3}), layout)
    central, weights = flatten(task.initial_parameters()), np.arange(1.0, 7.0)
    fast = PartTrainer(task, layout, local, bounds, weights, 1, central)
    assert fast.low_rank is not None
    # The user with thirty examples is beyond the width and goes through autograd in the same part.
    assert [fast.low_rank.ranks.takes(user) for user in range(6)] == [True, True, True, False, True, True]
    plain = PartTrainer(task, layout, local, bounds, weights, 1, central)
    plain.low_rank = None
    sums = [torch.zeros_like(central), torch.zeros_like(central)]
    tallies = [
        trainer.add_part(central, np.arange(6), 0, total) for trainer, total in zip((fast, plain), sums, strict=True)
    ]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-9, atol=1e-12)
    for name in ("users", "bounded", "not_finite"):
        assert getattr(tallies[0], name) == getattr(tallies[1], name)
    for name in ("loss", "norm", "bounded_norm", "layer_norms", "layer_bounded"):
        assert getattr(tallies[0], name) == pytest.approx(getattr(tallies[1], name), rel=1e-9)


def test_a_user_whose_numbers_are_not_finite_adds_nothing() -> None:
    task, local = Layers([4, 4, 4], [60, 30, 5]), _local(epochs=1, batch_size=2)
    task.features[5] = float("inf")
    layout = Layout.of(task.initial_parameters())
    trainer = PartTrainer(task, layout, local, bounder(Bounding(rule="clip", bound=1.0), layout), np.ones(3), 1,
                          flatten(task.initial_parameters()))  # fmt: skip
    assert trainer.low_rank is not None
    total = torch.zeros(layout.size, dtype=torch.float64)
    tally = trainer.add_part(flatten(task.initial_parameters()), np.arange(3), 0, total)
    assert (tally.users, tally.not_finite) == (3, 1)
    assert bool(torch.isfinite(total).all())
    assert float(total.norm()) > 0


def test_the_engine_takes_factors_only_below_the_width() -> None:
    layout = Layout.of(Layers([20], [784, 128, 10]).initial_parameters())
    few, many = Layers([20] * 9, [784, 128, 10]), Layers([200] * 9, [784, 128, 10])
    assert ranks_of(few, _local(epochs=1), layout) is not None
    assert part_size(few, _local(epochs=1), layout) == 51
    assert ranks_of(many, _local(epochs=1), layout) is None
    assert part_size(many, _local(epochs=1), layout) == 1
    assert ranks_of(many, _local(steps=2, batch_size=10), layout) is not None
    assert ranks_of(few, _local(batch_seconds=1.0), layout) is None


def test_a_chain_that_leaves_tensors_out_is_not_taken() -> None:
    task = Layers([4], [60, 30])
    layout = Layout.of({**task.initial_parameters(), "other": torch.zeros(3)})
    assert ranks_of(task, _local(epochs=1), layout) is None


def test_inner_products_are_as_near_as_they_claim() -> None:
    draw = np.random.default_rng(0)
    one, other = (torch.from_numpy(draw.normal(size=(3, 5, 999)).astype(np.float32)) for _ in range(2))
    exact = one.double() @ other.double().transpose(1, 2)
    lengths = one.double().norm(dim=2)[:, :, None] * other.double().norm(dim=2)[:, None, :]
    assert bool(((inner_products(one, other) - exact).abs() <= 112 * 2.0**-24 * lengths).all())


def test_addresses_draw_what_a_generator_at_that_address_draws() -> None:
    addresses = Addresses(3, "batches", 7)
    for user in (5, 0, 5, 2**40):
        own, expected = addresses.at(user), generator(3, "batches", 7, user)
        assert own.permutation(30).tolist() == expected.permutation(30).tolist()
        assert own.integers(7, size=3).tolist() == expected.integers(7, size=3).tolist()
