"""Claims about the central optimisers: they follow torch, the written-out recurrences, and their own past."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from confide.errors import UserError
from confide.federated.optimisers import Adagrad, Adam, Lamb, Lars, Optimiser, Sgd, init, update
from confide.federated.schedules import Constant, Exponential, PerRound, Schedule

Array = NDArray[np.float64]
Tensors = dict[str, Tensor]

READER: TypeAdapter[Optimiser] = TypeAdapter(Optimiser)
STEPS = 50
DECAY = Exponential(rate=0.6, start=10, transition=15, warmup=3)
SCHEDULES = [Constant(), DECAY, PerRound(factor=0.97)]

EVERY_KIND = [
    Sgd(learning_rate=0.1),
    Sgd(learning_rate=0.1, momentum=0.8, weight_decay=0.01),
    Adam(learning_rate=0.01, weight_decay=0.01),
    Adagrad(learning_rate=0.1, initial_accumulator=0.1),
    Lars(learning_rate=0.5, weight_decay=0.01),
    Lars(learning_rate=0.5, momentum=0.0),
    Lamb(learning_rate=0.006, weight_decay=0.01),
    Lamb(learning_rate=0.006, bias_correction=True, schedule=DECAY),
]


def start(dtype: torch.dtype = torch.float64) -> Tensors:
    """Tensors of several shapes, of which one begins at zero and one has a single element."""
    draw = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(4, 3, generator=draw, dtype=dtype),
        "zero": torch.zeros(5, dtype=dtype),
        "single": torch.randn(1, generator=draw, dtype=dtype),
        "scalar": torch.randn((), generator=draw, dtype=dtype),
        "unused": torch.randn(2, 2, generator=draw, dtype=dtype),
    }


def gradient_at(step: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Gradients of very different sizes, so that no epsilon is negligible everywhere; "unused" gets none."""
    draw = torch.Generator().manual_seed(1000 + step)
    scales = {"matrix": 1.0, "zero": 1e-3, "single": 1e-6, "scalar": 10.0, "unused": 0.0}
    return {name: scales[name] * torch.randn(p.shape, generator=draw, dtype=dtype) for name, p in start().items()}


def run(settings: Optimiser, steps: int = STEPS) -> list[Tensors]:
    """The parameters after every step."""
    parameters = start()
    state = init(settings, parameters)
    history = []
    for step in range(steps):
        update(settings, parameters, gradient_at(step), state, step)
        history.append({name: p.clone() for name, p in parameters.items()})
    return history


def assert_same(ours: list[Tensors], reference: list[Tensors]) -> None:
    for step, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        for name, expected in theirs.items():
            where = f"tensor {name} after step {step}"
            torch.testing.assert_close(mine[name], expected, rtol=1e-9, atol=1e-15, msg=where)


# Against torch.optim


def run_torch(build: Callable[[list[Tensor]], torch.optim.Optimizer], rate: float, schedule: Schedule) -> list[Tensors]:
    parameters = start()
    optimiser = build(list(parameters.values()))
    history = []
    for step in range(STEPS):
        for name, gradient in gradient_at(step).items():
            parameters[name].grad = gradient
        optimiser.param_groups[0]["lr"] = rate * schedule(step)
        optimiser.step()
        history.append({name: p.clone() for name, p in parameters.items()})
    return history


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_follows_torch(schedule: Schedule, momentum: float, decay: float) -> None:
    settings = Sgd(learning_rate=0.3, schedule=schedule, momentum=momentum, weight_decay=decay)
    reference = run_torch(lambda p: torch.optim.SGD(p, lr=0.3, momentum=momentum, weight_decay=decay), 0.3, schedule)
    assert_same(run(settings), reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("betas", "epsilon"), [((0.9, 0.999), 1e-8), ((0.0, 0.5), 0.01)])
def test_adam_without_weight_decay_follows_torch_adam(
    schedule: Schedule, betas: tuple[float, float], epsilon: float
) -> None:
    settings = Adam(learning_rate=0.02, schedule=schedule, betas=betas, epsilon=epsilon)
    reference = run_torch(lambda p: torch.optim.Adam(p, lr=0.02, betas=betas, eps=epsilon), 0.02, schedule)
    assert_same(run(settings), reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adam_with_weight_decay_follows_torch_adamw(schedule: Schedule) -> None:
    settings = Adam(learning_rate=0.02, schedule=schedule, weight_decay=0.1)
    reference = run_torch(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1), 0.02, schedule)
    assert_same(run(settings), reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulator", [0.0, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad_follows_torch(schedule: Schedule, accumulator: float, decay: float) -> None:
    settings = Adagrad(learning_rate=0.1, schedule=schedule, initial_accumulator=accumulator, weight_decay=decay)
    reference = run_torch(
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=accumulator, weight_decay=decay),
        0.1,
        schedule,
    )
    assert_same(run(settings), reference)


# Against the recurrences, written out coordinate by coordinate


def euclidean(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def run_plain(rule: Callable[[list[float], list[list[float]]], list[list[float]]]) -> list[Tensors]:
    """Apply `rule(weights, gradients of all steps) -> weights after each step` to every tensor."""
    history: list[Tensors] = [{} for _ in range(STEPS)]
    for name, parameter in start().items():
        gradients: list[list[float]] = [gradient_at(step)[name].reshape(-1).tolist() for step in range(STEPS)]
        for step, weights in enumerate(rule(parameter.reshape(-1).tolist(), gradients)):
            values: Array = np.array(weights).reshape(parameter.shape)
            history[step][name] = torch.from_numpy(values)
    return history


def plain_lars(s: Lars) -> Callable[[list[float], list[list[float]]], list[list[float]]]:
    def rule(w: list[float], gradients: list[list[float]]) -> list[list[float]]:
        m, history = [0.0] * len(w), []
        for t, g in enumerate(gradients):
            eta = s.learning_rate * s.schedule(t)
            decayed = [g_i + s.weight_decay * w_i for g_i, w_i in zip(g, w, strict=True)]
            above, below = euclidean(w), euclidean(decayed)
            trust = s.coefficient * above / below if above > 0 and below > 0 else 1.0
            m = [s.momentum * m_i + eta * trust * d_i for m_i, d_i in zip(m, decayed, strict=True)]
            w = [w_i - m_i for w_i, m_i in zip(w, m, strict=True)]
            history.append(w)
        return history

    return rule


def plain_lamb(s: Lamb) -> Callable[[list[float], list[list[float]]], list[list[float]]]:
    b1, b2 = s.betas

    def rule(w: list[float], gradients: list[list[float]]) -> list[list[float]]:
        m, v, history = [0.0] * len(w), [0.0] * len(w), []
        for t, g in enumerate(gradients):
            eta = s.learning_rate * s.schedule(t)
            m = [b1 * m_i + (1 - b1) * g_i for m_i, g_i in zip(m, g, strict=True)]
            v = [b2 * v_i + (1 - b2) * g_i**2 for v_i, g_i in zip(v, g, strict=True)]
            c1, c2 = (1 - b1 ** (t + 1), 1 - b2 ** (t + 1)) if s.bias_correction else (1.0, 1.0)
            u = [(m_i / c1) / (math.sqrt(v_i / c2) + s.epsilon) for m_i, v_i in zip(m, v, strict=True)]
            d = [u_i + s.weight_decay * w_i for u_i, w_i in zip(u, w, strict=True)]
            above, below = euclidean(w), euclidean(d)
            trust = above / below if above > 0 and below > 0 else 1.0
            w = [w_i - eta * trust * d_i for w_i, d_i in zip(w, d, strict=True)]
            history.append(w)
        return history

    return rule


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_follows_its_recurrence(schedule: Schedule, momentum: float, decay: float) -> None:
    settings = Lars(learning_rate=0.5, schedule=schedule, momentum=momentum, weight_decay=decay)
    assert_same(run(settings), run_plain(plain_lars(settings)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epsilon", [1e-6, 0.01])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("corrected", [False, True])
def test_lamb_follows_equations_8_and_9(schedule: Schedule, epsilon: float, decay: float, corrected: bool) -> None:
    settings = Lamb(
        learning_rate=0.006, schedule=schedule, epsilon=epsilon, weight_decay=decay, bias_correction=corrected
    )
    assert_same(run(settings), run_plain(plain_lamb(settings)))


# Trust ratios


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_takes_a_plain_step_from_a_zero_tensor(decay: float) -> None:
    settings = Lars(learning_rate=0.5, momentum=0.0, weight_decay=decay)
    parameters = {"w": torch.zeros(3, dtype=torch.float64)}
    gradient = {"w": torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)}
    update(settings, parameters, gradient, init(settings, parameters), 0)
    assert parameters["w"].tolist() == [-0.5, 1.0, 0.0]


@pytest.mark.parametrize("corrected", [False, True])
def test_lamb_takes_a_plain_step_from_a_zero_tensor(corrected: bool) -> None:
    settings = Lamb(learning_rate=0.5, betas=(0.0, 0.0), epsilon=1.0, bias_correction=corrected)
    parameters = {"w": torch.zeros(3, dtype=torch.float64)}
    gradient = {"w": torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64)}
    update(settings, parameters, gradient, init(settings, parameters), 0)
    assert parameters["w"].tolist() == [-0.25, 0.375, 0.0]


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_a_zero_gradient_never_makes_a_number_that_is_not_finite(settings: Optimiser) -> None:
    parameters = start()
    state = init(settings, parameters)
    for step in range(3):
        update(settings, parameters, {n: torch.zeros_like(p) for n, p in parameters.items()}, state, step)
    assert all(torch.isfinite(tensor).all() for tensor in [*parameters.values(), *state.values()])
    assert torch.equal(parameters["zero"], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_lamb_step_moves_a_tensor_by_its_share_whatever_the_gradient(scale: float) -> None:
    settings = Lamb(learning_rate=0.006, epsilon=1e-30)
    parameters = start()
    gradient = {name: scale * g for name, g in gradient_at(0).items()}
    before = parameters["matrix"].clone()
    update(settings, parameters, gradient, init(settings, parameters), 0)
    moved = torch.linalg.vector_norm(parameters["matrix"] - before) / torch.linalg.vector_norm(before)
    assert moved.item() == pytest.approx(0.006, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_low_precision_tensor_is_right(dtype: torch.dtype) -> None:
    """The first weight is zero and alone has a gradient, so its value after the step shows the ratio."""
    settings = Lars(learning_rate=1.0, coefficient=1.0, momentum=0.0)
    weight = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradient = torch.zeros_like(weight)
    weight[0], gradient[0] = 0.0, 1.0
    expected = -torch.linalg.vector_norm(weight.double()).item()
    update(settings, {"w": weight}, {"w": gradient}, {}, 0)
    assert weight[0].item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 2**-8)


# State


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resuming_from_a_checkpoint_is_bit_identical(settings: Optimiser, dtype: torch.dtype) -> None:
    parameters = start(dtype)
    state = init(settings, parameters)
    for step in range(20):
        if step == 7:
            saved = safetensors.torch.save(parameters), safetensors.torch.save(state)
        update(settings, parameters, gradient_at(step, dtype), state, step)
    again, again_state = safetensors.torch.load(saved[0]), safetensors.torch.load(saved[1])
    for step in range(7, 20):
        update(settings, again, gradient_at(step, dtype), again_state, step)
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)
    assert again_state.keys() == state.keys()
    assert all(torch.equal(again_state[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        (Sgd(learning_rate=1), []),
        (Sgd(learning_rate=1, momentum=0.8), ["momentum"]),
        (Adam(learning_rate=1), ["first_moment", "second_moment"]),
        (Adagrad(learning_rate=1), ["sum_of_squares"]),
        (Lars(learning_rate=1), ["momentum"]),
        (Lars(learning_rate=1, momentum=0), []),
        (Lamb(learning_rate=1), ["first_moment", "second_moment"]),
    ],
)
def test_state_names_are_the_ones_in_checkpoints(settings: Optimiser, slots: list[str]) -> None:
    parameters = start(torch.bfloat16)
    state = init(settings, parameters)
    assert list(state) == [f"{slot}/{name}" for slot in slots for name in parameters]
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_update_works_in_place_on_leaves_and_leaves_the_gradient_alone(settings: Optimiser) -> None:
    parameters = {name: torch.nn.Parameter(p) for name, p in start().items()}
    state = init(settings, parameters)
    gradient = gradient_at(0)
    tensors = [*parameters.values(), *state.values()]
    places = [tensor.data_ptr() for tensor in tensors]
    update(settings, parameters, gradient, state, 0)
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert all(torch.equal(gradient[name], g) for name, g in gradient_at(0).items())
    assert not torch.equal(parameters["matrix"], start()["matrix"])
    assert not any(tensor.requires_grad for tensor in state.values())


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_bfloat16_parameters_follow_float32_ones(settings: Optimiser) -> None:
    low, high = start(torch.bfloat16), {n: p.float() for n, p in start(torch.bfloat16).items()}
    low_state, high_state = init(settings, low), init(settings, high)
    gradient = gradient_at(0, torch.bfloat16)
    update(settings, low, gradient, low_state, 0)
    update(settings, high, {name: g.float() for name, g in gradient.items()}, high_state, 0)
    for name, p in low.items():
        torch.testing.assert_close(p.float(), high[name], rtol=2**-7, atol=1e-30)


# Refusals


@pytest.mark.parametrize(
    "gradient",
    [
        {"w": torch.ones(3)},
        {"w": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)},
        {"w": torch.ones(1), "b": torch.ones(2)},
    ],
    ids=["missing", "unknown", "would broadcast"],
)
def test_a_gradient_of_another_model_is_refused_and_nothing_changes(gradient: Tensors) -> None:
    parameters = {"w": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(ValueError, match="gradient does not have the parameters' names and shapes"):
        update(Sgd(learning_rate=1), parameters, gradient, {}, 0)
    assert all(torch.equal(p, torch.ones_like(p)) for p in parameters.values())


@pytest.mark.parametrize("other", [Sgd(learning_rate=1), Lars(learning_rate=1)])
def test_the_state_of_another_optimiser_is_refused(other: Optimiser) -> None:
    parameters = start()
    with pytest.raises(UserError, match=r"does not fit lamb .* first_moment/matrix.* and \d+ more; resume"):
        update(Lamb(learning_rate=1), parameters, gradient_at(0), init(other, parameters), 0)


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "sgd"},
        {"kind": "rmsprop", "learning_rate": 1},
        {"learning_rate": 1},
        {"kind": "sgd", "learning_rate": 0},
        {"kind": "sgd", "learning_rate": float("inf")},
        {"kind": "sgd", "learning_rate": 1, "momentum": 1},
        {"kind": "sgd", "learning_rate": 1, "nesterov": True},
        {"kind": "sgd", "learning_rate": 1, "weight_decay": -0.1},
        {"kind": "adam", "learning_rate": 1, "betas": [0.9, 1.0]},
        {"kind": "adam", "learning_rate": 1, "betas": [-0.1, 0.9]},
        {"kind": "adam", "learning_rate": 1, "betas": [0.9]},
        {"kind": "adam", "learning_rate": 1, "epsilon": 0},
        {"kind": "adagrad", "learning_rate": 1, "initial_accumulator": -1},
        {"kind": "lars", "learning_rate": 1, "coefficient": 0},
        {"kind": "lamb", "learning_rate": 1, "epsilon": 0},
        {"kind": "lamb", "learning_rate": 1, "schedule": {"kind": "per_round", "factor": 2}},
    ],
)
def test_settings_out_of_range_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        READER.validate_python(document)


def test_a_recipe_names_its_optimiser_by_kind() -> None:
    document = {
        "kind": "lamb",
        "learning_rate": 0.006,
        "betas": [0.9, 0.999],
        "schedule": {"kind": "exponential", "rate": 0.6, "start": 1000, "transition": 500},
    }
    schedule = Exponential(rate=0.6, start=1000, transition=500)
    expected = Lamb(learning_rate=0.006, schedule=schedule)
    assert READER.validate_python(document) == expected
    assert READER.validate_json(READER.dump_json(expected)) == expected


@pytest.mark.parametrize("model", [Sgd, Adam, Adagrad, Lars, Lamb])
def test_every_field_says_what_it_is_and_kind_comes_first(model: type[Sgd]) -> None:
    properties = model.model_json_schema()["properties"]
    assert next(iter(properties)) == "kind"
    assert all(field["description"].endswith(".") for field in properties.values())
