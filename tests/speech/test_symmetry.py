"""Claims about freedoms of scale: what a model computes stays, updates change as they should, balance is the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from confide.build import make_loop
from confide.errors import UserError
from confide.federated.bounding import Bounding
from confide.federated.symmetry import balanced, balancing_factors, imbalance, scaled
from confide.recipe import load
from confide.speech.model import ModelSettings, forward, initial_parameters
from confide.speech.symmetry import model_scalings, unbalanced, whisper_scalings
from confide.speech.tokens import Tokens

torch.set_num_threads(1)
CALM = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
models = st.builds(
    lambda layers, heads, size, mlp, norm: ModelSettings(
        layers=layers, heads=heads, width=heads * size, mlp=mlp, norm=norm, tokens=6, mels=4
    ),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4]), st.integers(1, 9), st.sampled_from(["pre", "post"]),
)  # fmt: skip


def trained(chosen: ModelSettings, seed: int) -> dict[str, Tensor]:
    """Weights that look trained: no LayerNorm is at ones, no bias at zero."""
    draw = np.random.default_rng(seed)
    fresh = initial_parameters(chosen, draw)
    return {
        name: tensor * torch.from_numpy(np.exp(0.5 * draw.standard_normal(tuple(tensor.shape)))).float()
        + 0.1 * torch.from_numpy(draw.standard_normal(tuple(tensor.shape))).float()
        for name, tensor in fresh.items()
    }


def answer(chosen: ModelSettings, parameters: dict[str, Tensor], seed: int) -> Tensor:
    draw = np.random.default_rng(seed)
    features = torch.from_numpy(draw.standard_normal((2, 15, 4))).to(next(iter(parameters.values())).dtype)
    return forward(chosen, parameters, features, torch.tensor([15, 9]), None)[0]


@CALM
@given(models, st.integers(0, 10**6), st.data())
def test_every_scaling_leaves_what_the_model_computes(chosen: ModelSettings, seed: int, data: st.DataObject) -> None:
    # In double precision: a LayerNorm over two numbers can enlarge the rounding of float32 a thousandfold.
    parameters = {name: tensor.double() for name, tensor in trained(chosen, seed).items()}
    scalings = model_scalings(chosen)
    factors = {each.name: data.draw(st.floats(0.2, 5.0)) for each in scalings}
    before, after = (answer(chosen, each, seed) for each in (parameters, scaled(parameters, scalings, factors)))
    assert before.dtype == torch.float64
    assert float((before - after).abs().max()) <= 1e-7 * float(before.abs().max())


def test_half_of_a_scaling_changes_what_the_model_computes() -> None:
    chosen = ModelSettings(layers=2, heads=2, width=8, mlp=12, tokens=6, mels=4)
    parameters = trained(chosen, 0)
    before = answer(chosen, parameters, 0)
    for scaling in model_scalings(chosen):
        half = replace(scaling, powers=scaling.powers[:1])
        after = answer(chosen, scaled(parameters, [half], {scaling.name: 1.5}), 0)
        assert float((before - after).abs().max()) > 1e-3 * float(before.abs().max()), scaling.name


@CALM
@given(st.integers(0, 10**6), st.floats(1.0, 6.0))
def test_the_constructed_imbalance_computes_the_same_and_its_gradients_shrink_by_what_tensors_grew(
    seed: int, c: float
) -> None:
    chosen = ModelSettings(layers=2, heads=2, width=8, mlp=12, tokens=6, mels=4)
    model = trained(chosen, seed)
    gradients = []
    for parameters in (model, unbalanced(model, chosen, c)):
        leaves = {name: tensor.double().float().requires_grad_() for name, tensor in parameters.items()}
        loss = answer(chosen, leaves, seed).square().mean()
        found = torch.autograd.grad(loss, list(leaves.values()))
        gradients.append((float(loss.detach()), dict(zip(leaves, found, strict=True))))
    (before, plain), (after, moved) = gradients
    assert after == pytest.approx(before, rel=1e-3)
    for name, power in {
        "blocks.00.ln1.scale": -2, "blocks.01.ln2.bias": -2, "blocks.00.attention.wf": 1, "blocks.01.mlp.w1": 1,
        "blocks.01.mlp.w2": 1, "norm.scale": -1, "head.weight": 1, "head.bias": 0, "conv.weight": 0,
    }.items():  # fmt: skip
        assert float(moved[name].norm()) == pytest.approx(float(plain[name].norm()) / c**power, rel=5e-3)


@CALM
@given(models, st.integers(0, 10**6), st.data())
def test_balance_forgets_how_a_model_was_scaled_and_has_the_least_norm(
    chosen: ModelSettings, seed: int, data: st.DataObject
) -> None:
    # In double precision: a LayerNorm over two numbers can enlarge the rounding of float32 a thousandfold.
    parameters = {name: tensor.double() for name, tensor in trained(chosen, seed).items()}
    scalings = model_scalings(chosen)
    factors = {each.name: data.draw(st.floats(0.1, 10.0)) for each in scalings}
    best = balanced(parameters, scalings)
    again = balanced(scaled(parameters, scalings, factors), scalings)
    for name, tensor in best.items():
        assert torch.allclose(tensor, again[name], rtol=1e-4, atol=1e-6)
    least = sum(float(tensor.double().square().sum()) for tensor in best.values())
    nudged = scaled(best, scalings, {each.name: data.draw(st.floats(0.8, 1.25)) for each in scalings})
    assert sum(float(tensor.double().square().sum()) for tensor in nudged.values()) >= least * (1 - 1e-6)
    assert imbalance(best, scalings) == pytest.approx(1.0, abs=1e-4)


def test_balanced_tensors_that_follow_each_other_have_one_norm() -> None:
    chosen = ModelSettings(layers=2, heads=2, width=8, mlp=12, tokens=6, mels=4)
    best = balanced(unbalanced(trained(chosen, 3), chosen, 5.0), model_scalings(chosen))

    def norm(*names: str) -> float:
        return float(torch.cat([best[name].flatten() for name in names]).norm())

    block = "blocks.01"
    mlp = norm(f"{block}.ln2.scale", f"{block}.ln2.bias"), norm(f"{block}.mlp.w1"), norm(f"{block}.mlp.w2")
    assert mlp == pytest.approx((mlp[0],) * 3, rel=1e-5)
    attention = norm(f"{block}.ln1.scale", f"{block}.ln1.bias"), norm(f"{block}.attention.wqkv")
    assert attention == pytest.approx((attention[0],) * 2, rel=1e-5)


def test_imbalance_grows_with_the_constructed_one_and_zero_tensors_are_left_alone() -> None:
    chosen = ModelSettings(layers=2, heads=2, width=8, mlp=12, tokens=6, mels=4)
    model, scalings = trained(chosen, 1), model_scalings(chosen)
    start = balanced(model, scalings)
    found = [imbalance(unbalanced(start, chosen, c), scalings) for c in (1.0, 2.0, 3.0, 5.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1.0, abs=1e-4)
    model["blocks.00.mlp.w1"].zero_()
    kept = balanced(model, scalings)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.values())
    assert not {"blocks.00.mlp", "blocks.00.hidden"} & set(balancing_factors(model, scalings))


def test_whispers_encoder_computes_the_same_when_scaled() -> None:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=4,
        max_source_positions=10,
    )  # fmt: skip
    encoder: Any = WhisperEncoder(config)
    encoder.eval()
    scalings, sound = whisper_scalings(["layers.0", "layers.1"]), torch.randn(1, 4, 20)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with torch.no_grad():
        before = encoder(sound).last_hidden_state
        encoder.load_state_dict(scaled(state, scalings, {each.name: 3.0 for each in scalings}))
        after = encoder(sound).last_hidden_state
        encoder.load_state_dict(balanced(state, scalings))
        even = encoder(sound).last_hidden_state
    assert torch.allclose(before, after, atol=1e-4)
    assert torch.allclose(before, even, atol=1e-4)


SMALL = """\
task:
  kind: speech
  corpus: {kind: synthetic, speakers: 4, utterances: 3, sentences: digits, digits: [1, 2], population: federated}
  test: {kind: synthetic, speakers: 2, utterances: 3, sentences: digits, digits: [1, 2], population: test}
  model: {preset: tiny, layers: 1, width: 16, mlp: 16}
  augment: null
sampling: {kind: poisson, cohort: 2}
local: {steps: 1, learning_rate: 0.1, batch_seconds: 4}
bounding: {rule: clip, bound: 0.01, balance: true}
central: {kind: lamb, learning_rate: 0.01}
run: {steps: 1}
"""


def test_a_run_with_balance_begins_with_the_balanced_model_that_computes_the_same(tmp_path: Path) -> None:
    (tmp_path / "small").write_text(SMALL)
    draw, model = np.random.default_rng(0), load(str(tmp_path / "small")).task.model  # type: ignore[union-attr]
    tokens = model.model_copy(update={"tokens": Tokens("en").size})
    save_file(unbalanced(initial_parameters(tokens, draw), tokens, 3.0), tmp_path / "seed")
    chosen = load(str(tmp_path / "small"), [f"task.start={tmp_path / 'seed'}"])
    assert "balance" not in Bounding(rule="clip", bound=1.0).model_dump()
    loop = make_loop(chosen)
    start, plain = loop.layout.views(loop.start().parameters), loop.task.starting_parameters()
    assert imbalance(start, loop.task.scalings) == pytest.approx(1.0, abs=1e-4)
    assert imbalance(plain, loop.task.scalings) > 3
    found, expected = loop.task.evaluate(start), loop.task.evaluate(plain)
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)


def test_a_model_without_scalings_cannot_be_balanced() -> None:
    with pytest.raises(UserError, match=r"bounding\.balance: nothing in the model of the task convex/logistic"):
        make_loop(load("convex/digits", ["bounding.balance=true"]))
