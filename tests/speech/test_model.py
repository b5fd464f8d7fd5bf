"""The recogniser is the paper's: sizes, every operation, and no trace of an utterance's neighbours."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from confide.speech.model import (
    PRESETS,
    ModelSettings,
    _attention,
    _mask,
    _mlp,
    ctc_loss,
    forward,
    initial_parameters,
    kind_of,
    parameter_shapes,
)

Parameters = dict[str, Tensor]


def small(**changes: Any) -> ModelSettings:
    return ModelSettings(**{"layers": 2, "width": 16, "mlp": 24, "heads": 2, "tokens": 7, "mels": 5, **changes})


def fresh(settings: ModelSettings, seed: int = 0) -> Parameters:
    """Parameters in which no scale is one and no bias zero, so that each of them is seen."""
    draw = np.random.default_rng(seed)
    parameters = initial_parameters(settings, draw)
    for name, value in parameters.items():
        if name.endswith((".scale", ".bias")):
            value.add_(torch.from_numpy(draw.normal(0, 0.3, value.shape).astype(np.float32)))
    return parameters


def batch(lengths: list[int], mels: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    values = np.random.default_rng(seed).normal(2.0, 3.0, (len(lengths), max(lengths), mels))
    return torch.from_numpy(values.astype(np.float32)), torch.tensor(lengths)


def randomness(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def size(settings: ModelSettings) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(settings).values())


def gradients(settings: ModelSettings, parameters: Parameters, seed: int | None) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    features, lengths = batch([40, 31])
    logits, out_lengths = forward(settings, leaves, features, lengths, None if seed is None else randomness(seed))
    loss = ctc_loss(logits, out_lengths, torch.tensor([[1, 2, 3], [4, 1, 0]]), torch.tensor([3, 2]))
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), found, strict=True)}


# Sizes.


def test_baseline_has_the_released_models_size_to_the_parameter() -> None:
    settings = ModelSettings(preset="baseline")
    assert size(settings) == 255_800_864
    assert len(parameter_shapes(settings)) == 296


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("tiny", 0.44), ("small", 1.16), ("narrow", 114), ("shallow", 114), ("wide", 450), ("deep", 510)],
)
def test_presets_have_the_sizes_of_table_21(preset: Any, millions: float) -> None:
    assert size(ModelSettings(preset=preset)) / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_preset_is_filled_in_and_can_be_overridden_and_survives_a_round_trip() -> None:
    settings = ModelSettings(preset="wide", layers=5)
    assert (settings.layers, settings.width, settings.dropout, settings.layer_drop) == (5, 1024, 0.3, 0.1)
    assert ModelSettings.model_validate(settings.model_dump()) == settings
    assert ModelSettings() == ModelSettings(preset="tiny", **PRESETS["tiny"])
    assert ModelSettings(preset="baseline").layer_drop == 0.3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "huge"}, "tiny"),
        ({"width": 98}, "multiple"),
        ({"width": 97, "heads": 1}, "multiple of 2"),
        ({"kernel": 2}, "stride"),
        ({"dropout": 1.0}, "less than 1"),
        ({"depth": 3}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSettings(**given)


def test_initial_parameters_have_the_shapes_and_the_bounds_of_the_released_code() -> None:
    settings = ModelSettings(preset="small")
    parameters = initial_parameters(settings, np.random.default_rng(0))
    assert {name: tuple(value.shape) for name, value in parameters.items()} == parameter_shapes(settings)
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    bounds = {
        "conv.weight": math.sqrt(3 / 560),
        "conv.bias": math.sqrt(1 / 560),
        "head.weight": math.sqrt(3 / 144),
        "blocks.03.attention.wqkv": math.sqrt(1 / 144),
        "blocks.00.attention.wf": math.sqrt(1 / 144),
        "blocks.00.mlp.w1": math.sqrt(1 / 144),
        "blocks.00.mlp.w2": math.sqrt(1 / 576),
    }
    for name, bound in bounds.items():
        values = parameters[name]
        assert 0.97 * bound < float(values.abs().max()) <= bound * (1 + 1e-6)
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.06)
    assert float(parameters["head.bias"].abs().max()) <= math.sqrt(1 / 144)
    assert bool((parameters["blocks.00.ln1.scale"] == 1).all())
    assert bool((parameters["norm.bias"] == 0).all())
    again = initial_parameters(settings, np.random.default_rng(0))
    assert all(torch.equal(again[name], value) for name, value in parameters.items())


def test_every_tensor_has_one_of_the_papers_kinds() -> None:
    kinds = [kind_of(name) for name in parameter_shapes(ModelSettings(preset="baseline"))]
    counts = {kind: kinds.count(kind) for kind in kinds}
    blocks = {"wqkv": 36, "wf": 36, "w1": 36, "w2": 36, "ln1": 72, "ln2": 72}
    assert counts == blocks | {"utterance": 2, "conv": 2, "norm": 2, "head": 2}


# Every operation, against modules of torch.


def reference(settings: ModelSettings, parameters: Parameters, features: Tensor) -> Tensor:
    """One utterance without padding through nn.Conv1d, nn.MultiheadAttention and nn.LayerNorm, in evaluation."""
    p = parameters

    def norm(name: str, x: Tensor) -> Tensor:
        layer = nn.LayerNorm(settings.width, eps=1e-5)
        layer.weight.data, layer.bias.data = p[f"{name}.scale"], p[f"{name}.bias"]
        return layer(x)  # type: ignore[no-any-return]

    def attention(name: str, x: Tensor) -> Tensor:
        layer = nn.MultiheadAttention(settings.width, settings.heads, bias=False, batch_first=True)
        assert layer.in_proj_weight is not None
        layer.in_proj_weight.data, layer.out_proj.weight.data = p[f"{name}.attention.wqkv"], p[f"{name}.attention.wf"]
        return layer(x, x, x)[0]  # type: ignore[no-any-return]

    def mlp(name: str, x: Tensor) -> Tensor:
        return torch.relu(x @ p[f"{name}.mlp.w1"].T) @ p[f"{name}.mlp.w2"].T

    x = (features - features.mean()) / torch.sqrt(features.var(correction=0) + 1e-7)
    x = x * p["utterance.scale"] + p["utterance.bias"]
    conv = nn.Conv1d(settings.mels, 2 * settings.width, 7, stride=3, padding=2)
    conv.weight.data, conv.bias.data = p["conv.weight"].transpose(1, 2), p["conv.bias"]  # type: ignore[union-attr]
    value, gate = conv(x.T[None]).transpose(1, 2).chunk(2, dim=2)
    x = value * torch.sigmoid(gate)
    for frame, i in itertools.product(range(x.shape[1]), range(settings.width)):
        angle = 30 * 0.03 * (frame - (x.shape[1] - 1) / 2) * 1e4 ** (-(i - i % 2) / settings.width)
        x[0, frame, i] += math.cos(angle) if i % 2 else math.sin(angle)
    for block in (f"blocks.{i:02}" for i in range(settings.layers)):
        if settings.norm == "pre":
            x = x + attention(block, norm(f"{block}.ln1", x))
            x = x + mlp(block, norm(f"{block}.ln2", x))
        else:
            x = norm(f"{block}.ln1", x + attention(block, x))
            x = norm(f"{block}.ln2", x + mlp(block, x))
    x = norm("norm", x) if settings.norm == "pre" else x
    return (x @ p["head.weight"].T + p["head.bias"])[0]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("frames", [3, 27, 28, 29])
def test_evaluation_equals_the_same_network_of_torchs_modules(norm: str, frames: int) -> None:
    settings = small(norm=norm, dropout=0.3, layer_drop=0.3)
    parameters = fresh(settings)
    features, lengths = batch([frames])
    with torch.no_grad():
        logits, out_lengths = forward(settings, parameters, features, lengths, None)
        expected = reference(settings, parameters, features[0])
    assert out_lengths.tolist() == [frames // 3]
    assert logits.shape == (1, frames // 3, 7)
    torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=1e-5)


def test_post_norm_has_no_final_norm() -> None:
    assert set(parameter_shapes(small())) - set(parameter_shapes(small(norm="post"))) == {"norm.scale", "norm.bias"}


def test_gradients_equal_differences_of_the_loss() -> None:
    settings = small(dropout=0.2, layers=1)
    parameters = fresh(settings)
    features, lengths = batch([40, 31])
    targets, target_lengths = torch.tensor([[1, 2, 3], [4, 1, 0]]), torch.tensor([3, 2])

    def loss(at: Parameters) -> float:
        logits, out_lengths = forward(settings, at, features, lengths, randomness(5))
        return float(ctc_loss(logits, out_lengths, targets, target_lengths))

    found = gradients(settings, parameters, 5)
    draw = np.random.default_rng(1)
    for name, value in parameters.items():
        direction = torch.from_numpy(draw.normal(size=tuple(value.shape)).astype(np.float32))
        direction = direction / direction.norm() + found[name] / found[name].norm()  # never orthogonal to it
        step = 1e-2
        up, down = (loss({**parameters, name: value + sign * step * direction}) for sign in (1, -1))
        slope = float((found[name] * direction).sum())
        assert (up - down) / (2 * step) == pytest.approx(slope, rel=0.03, abs=2e-3), name


# Padding and neighbours.


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(3, 50), min_size=2, max_size=4), st.sampled_from(["pre", "post"]))
def test_logits_do_not_depend_on_neighbours_nor_on_what_lies_in_the_padding(lengths: list[int], norm: str) -> None:
    settings = small(norm=norm)
    parameters = fresh(settings)
    features, each = batch(lengths)
    for row, length in enumerate(lengths):
        features[row, length:] = float("nan") if row % 2 else 1e3
    with torch.no_grad():
        together, out_lengths = forward(settings, parameters, features, each, None)
        for row, length in enumerate(lengths):
            alone, _ = forward(settings, parameters, features[row : row + 1, :length], each[row : row + 1], None)
            torch.testing.assert_close(together[row, : int(out_lengths[row])], alone[0], atol=1e-5, rtol=0)


def test_loss_and_gradient_of_a_batch_are_the_mean_over_its_utterances() -> None:
    settings = small()
    leaves = {name: value.requires_grad_() for name, value in fresh(settings).items()}
    features, lengths = batch([45, 30, 20])
    targets, sizes = torch.tensor([[1, 2, 3, 4], [2, 2, 0, 0], [5, 0, 0, 0]]), torch.tensor([4, 2, 1])

    def of(rows: slice, frames: int) -> tuple[Tensor, ...]:
        logits, out = forward(settings, leaves, features[rows, :frames], lengths[rows], None)
        loss = ctc_loss(logits, out, targets[rows], sizes[rows])
        return loss, *torch.autograd.grad(loss, list(leaves.values()))

    together = of(slice(None), 45)
    alone = [of(slice(i, i + 1), int(lengths[i])) for i in range(3)]
    for whole, *parts in zip(together, *alone, strict=True):
        torch.testing.assert_close(whole, torch.stack(parts).mean(dim=0), atol=2e-4, rtol=1e-4)


def test_utterances_shorter_than_the_stride_or_than_their_label_give_zero_loss_and_finite_gradients() -> None:
    settings = small()
    leaves = {name: value.requires_grad_() for name, value in fresh(settings).items()}
    for lengths in ([1, 2], [0, 7], [7, 9]):
        features, each = batch(lengths)
        logits, out = forward(settings, leaves, features, each, randomness())
        loss = ctc_loss(logits, out, torch.ones(2, 9, dtype=torch.long), torch.tensor([9, 9]))
        found = torch.autograd.grad(loss, list(leaves.values()))
        assert float(loss.detach()) == 0
        assert all(bool((gradient == 0).all()) for gradient in found)


def test_ctc_loss_is_the_sum_over_all_alignments() -> None:
    logits = torch.randn(1, 4, 3, generator=randomness())
    log_probs = torch.log_softmax(logits[0], dim=1)
    total = 0.0
    for path in itertools.product(range(3), repeat=4):
        merged = [t for i, t in enumerate(path) if t != 0 and (i == 0 or t != path[i - 1])]
        total += math.exp(sum(float(log_probs[i, t]) for i, t in enumerate(path))) if merged == [1, 2] else 0.0
    loss = ctc_loss(logits, torch.tensor([4]), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert float(loss) == pytest.approx(-math.log(total), rel=1e-5)


# Training: dropout, layer drop, shifted positions.


def test_the_same_generator_gives_the_same_training_step_and_another_one_does_not() -> None:
    settings = small(dropout=0.3, layer_drop=0.3)
    parameters = fresh(settings)
    a, b, c = (gradients(settings, parameters, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["conv.weight"], c["conv.weight"])


def test_global_randomness_is_neither_used_nor_moved() -> None:
    settings = small(dropout=0.3, layer_drop=0.3, checkpoint_activations=True)
    before = torch.random.get_rng_state()
    gradients(settings, fresh(settings), 1)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_changes_nothing(norm: str, dropout: float) -> None:
    plain = small(norm=norm, dropout=dropout, layer_drop=0.3, layers=4)
    frugal = plain.model_copy(update={"checkpoint_activations": True})
    parameters = fresh(plain)
    for seed in range(3):
        a, b = (gradients(s, parameters, seed) for s in (plain, frugal))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_without_dropout_layer_drop_and_shift_training_is_evaluation() -> None:
    settings = small(cape_shift=0.0)
    features, lengths = batch([40, 31])
    with torch.no_grad():
        trained, _ = forward(settings, fresh(settings), features, lengths, randomness())
        evaluated, _ = forward(settings, fresh(settings), features, lengths, None)
    torch.testing.assert_close(trained, evaluated)


def test_both_ways_to_attend_agree() -> None:
    # A dropout too small to take anything out goes the way with masks.
    settings = small(cape_shift=0.0, dropout=1e-9, layers=1)
    features, lengths = batch([20, 14])
    with torch.no_grad():
        masked, _ = forward(settings, fresh(settings), features, lengths, randomness(3))
        fused, _ = forward(settings, fresh(settings), features, lengths, None)
    torch.testing.assert_close(masked[0], fused[0], atol=2e-3, rtol=0)


def test_dropped_blocks_leave_no_gradient_and_nothing_is_rescaled() -> None:
    settings = small(layer_drop=0.5, layers=6, cape_shift=0.0)
    parameters = fresh(settings)
    features, lengths = batch([40, 31])
    for seed in range(4):
        found = gradients(settings, parameters, seed)
        kept = [i for i in range(6) if bool(found[f"blocks.{i:02}.mlp.w1"].any())]
        assert kept == [i for i in range(6) if bool(found[f"blocks.{i:02}.attention.wqkv"].any())]
        shorter = small(layers=max(len(kept), 1), cape_shift=0.0)
        if not kept:
            continue
        rest = {name: value for name, value in parameters.items() if not name.startswith("blocks")}
        for new, old in enumerate(kept):
            rest |= {n.replace(f".{old:02}.", f".{new:02}."): v for n, v in parameters.items() if f"s.{old:02}." in n}
        with torch.no_grad():
            dropped, _ = forward(settings, parameters, features, lengths, randomness(seed))
            expected, _ = forward(shorter, rest, features, lengths, None)
        torch.testing.assert_close(dropped, expected)


def test_layer_drop_takes_out_the_share_it_says() -> None:
    settings = small(layer_drop=0.3, layers=40, width=4, mlp=2)
    leaves = {name: value.requires_grad_() for name, value in fresh(settings).items()}
    weights = [value for name, value in leaves.items() if kind_of(name) == "w1"]
    features, lengths = batch([6])
    kept, source = 0, randomness(0)
    for _ in range(20):
        logits, _ = forward(settings, leaves, features, lengths, source)
        kept += sum(g is not None for g in torch.autograd.grad(logits.sum(), weights, allow_unused=True))
    assert kept / 800 == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 800))


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.9])
def test_masks_drop_the_share_they_say_independently(dropout: float) -> None:
    mask, keep = _mask(torch.Size([301, 1001]), dropout, randomness(7))
    values = mask.double()
    assert keep == pytest.approx(1 - dropout, abs=1e-5)
    assert set(mask.flatten().tolist()) == {0, 1}
    spread = math.sqrt(dropout * (1 - dropout))
    assert float(values.mean()) == pytest.approx(keep, abs=4 * spread / math.sqrt(values.numel()))
    flat = values.flatten()
    for lag in range(4):  # four draws come from one word: each place in it is fair, and they are not related
        assert float(flat[lag::4].mean()) == pytest.approx(keep, abs=8 * spread / math.sqrt(values.numel()))
        related = float(((flat[: -lag - 1] - keep) * (flat[lag + 1 :] - keep)).mean())
        assert abs(related) < 4 * spread**2 / math.sqrt(values.numel())


def test_dropout_keeps_the_mean_of_what_it_touches() -> None:
    # Each of the three places is linear in its own mask, so the mean over masks is the value without any.
    settings = small(layers=1, dropout=0.5, cape_shift=0.0)
    parameters = fresh(settings)
    features, lengths = batch([9])
    x, source = torch.randn(6, 16, generator=randomness(1)), randomness(0)
    entering: list[Tensor] = []

    def after_glu(masks: torch.Generator | None) -> Tensor:
        entering.clear()
        forward(settings, parameters, features, lengths, masks)
        return entering[0]

    def attended(masks: torch.Generator | None) -> Tensor:
        return _attention(settings, parameters, "blocks.00", x, x, 2, None, masks)

    def through_mlp(masks: torch.Generator | None) -> Tensor:
        return _mlp(settings, parameters, "blocks.00", x, x, masks)

    def spy(values: Tensor, *rest: Any) -> Tensor:
        entering.append(values)
        return original(values, *rest)

    original = functional.layer_norm
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "layer_norm", spy)
        for place in (after_glu, attended, through_mlp):
            drawn = torch.stack([place(source) for _ in range(800)])
            error = drawn.std(dim=0) / math.sqrt(len(drawn))
            assert float(error.max()) > 1e-3
            assert bool(((drawn.mean(dim=0) - place(None)).abs() < 5 * error + 1e-6).all()), place


def test_positions_are_shifted_per_utterance_in_training_only() -> None:
    settings = small(layers=1)
    features, lengths = batch([30])
    twice, both = features.repeat(2, 1, 1), lengths.repeat(2)
    with torch.no_grad():
        evaluated, _ = forward(settings, fresh(settings), twice, both, None)
        trained, _ = forward(settings, fresh(settings), twice, both, randomness())
    assert torch.equal(evaluated[0], evaluated[1])
    assert float((trained[0] - trained[1]).abs().max()) > 1e-2


# Types.


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bfloat16_is_close_to_float32_and_leaves_the_parameters_alone(dropout: float) -> None:
    exact = ModelSettings(preset="tiny", dropout=dropout)
    rough = exact.model_copy(update={"dtype": "bfloat16"})
    leaves = {n: v.requires_grad_() for n, v in initial_parameters(exact, np.random.default_rng(0)).items()}
    features, lengths = batch([90, 61], mels=80)
    targets, sizes = torch.tensor([[1, 5, 7], [3, 9, 0]]), torch.tensor([3, 2])
    found = []
    for each in (exact, rough):
        logits, out = forward(each, leaves, features, lengths, randomness(2))
        assert logits.dtype == torch.float32
        gradient = torch.autograd.grad(ctc_loss(logits, out, targets, sizes), list(leaves.values()))
        assert {g.dtype for g in gradient} == {torch.float32}
        found.append((logits, torch.cat([g.flatten() for g in gradient])))
    assert float((found[0][0] - found[1][0]).detach().abs().max()) < 0.1
    cosine = functional.cosine_similarity(found[0][1], found[1][1], dim=0)
    assert float(cosine) > 0.995
