"""The freedoms of scale of a transformer block (`confide.federated.symmetry`), of our model and of Whisper's encoder.

In a block with LayerNorms in front (pre), these leave everything that the model computes as it is:

    attention   LayerNorm ln1 (scale and bias) by 1/r, all of wqkv by r
    values      the rows of wqkv that make values by 1/r, wf by r
    mlp         LayerNorm ln2 by 1/r, w1 by r
    hidden      w1 by 1/r, w2 by r (a ReLU of r x is r times that of x)
    head        the last LayerNorm by 1/r, the head's weights by r

With LayerNorms behind (post), the residual passes through them too, and only `values` and `hidden` are left. Whisper's
MLP has a GELU, so it lacks `hidden`; its biases behind a matrix stay. The two numbers of the utterance's norm and the
convolution behind them have such a freedom as well, which is left out: the gradient of two numbers that all of the
input goes through is nothing like that of a matrix, and the least norm is no balance there (it was measured).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from confide.federated.symmetry import Part, Scaling, scaled
from confide.speech.model import ModelSettings


def model_scalings(settings: ModelSettings) -> list[Scaling]:
    """The freedoms of our own transformer."""
    width, pre = settings.width, settings.norm == "pre"
    found = []
    for index in range(settings.layers):
        block = f"blocks.{index:02}"
        ln1, ln2 = ((f"{block}.{norm}.scale", f"{block}.{norm}.bias") for norm in ("ln1", "ln2"))
        queries = Part(f"{block}.attention.wqkv", 0, 2 * width)
        values = Part(f"{block}.attention.wqkv", 2 * width)
        out, w1, w2 = (Part(f"{block}.{name}") for name in ("attention.wf", "mlp.w1", "mlp.w2"))
        if pre:
            found.append(_scaling(f"{block}.attention", ln1, (queries, values)))
        found.append(_scaling(f"{block}.values", (values,), (out,)))
        if pre:
            found.append(_scaling(f"{block}.mlp", ln2, (w1,)))
        found.append(_scaling(f"{block}.hidden", (w1,), (w2,)))
    if pre:
        found.append(_scaling("head", ("norm.scale", "norm.bias"), ("head.weight",)))
    return found


def whisper_scalings(blocks: Sequence[str]) -> list[Scaling]:
    """The freedoms of these blocks of transformers' WhisperEncoder, such as layers.0."""
    found = []
    for block in blocks:
        attention = f"{block}.self_attn"
        first = f"{block}.self_attn_layer_norm.weight", f"{block}.self_attn_layer_norm.bias"
        second = f"{block}.final_layer_norm.weight", f"{block}.final_layer_norm.bias"
        into = tuple(f"{attention}.{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))
        values = f"{attention}.v_proj.weight", f"{attention}.v_proj.bias"
        found.append(_scaling(f"{block}.attention", first, into))
        found.append(_scaling(f"{block}.values", values, (f"{attention}.out_proj.weight",)))
        found.append(_scaling(f"{block}.mlp", second, (f"{block}.fc1.weight",)))
    return found


def unbalanced(parameters: Mapping[str, Tensor], settings: ModelSettings, c: float) -> dict[str, Tensor]:
    """The same recogniser with long updates of its LayerNorms and short ones of its matrices, for c above 1.

    LayerNorms are divided by c^2 and the last one by c; q and k grow by c^2, all other matrices of a block and the
    head by c.

    Examples:
        >>> import numpy as np
        >>> from confide.speech.model import ModelSettings, initial_parameters
        >>> from confide.speech.symmetry import unbalanced
        >>> settings = ModelSettings(layers=1, width=8, mlp=8, heads=2)
        >>> model = initial_parameters(settings, np.random.default_rng(0))
        >>> moved = unbalanced(model, settings, 5.0)
        >>> float(moved["blocks.00.ln1.scale"][0]), float(moved["norm.scale"][0])
        (0.03999999910593033, 0.20000000298023224)
    """
    powers = {"attention": 2, "values": 1, "mlp": 2, "hidden": 1, "head": 1}
    scalings = model_scalings(settings)
    return scaled(parameters, scalings, {each.name: c ** powers[each.name.split(".")[-1]] for each in scalings})


def _scaling(name: str, down: tuple[Any, ...], up: tuple[Any, ...]) -> Scaling:
    """These parts, or tensors by name, by 1/r and those by r."""
    sides = [(each, -1) for each in down] + [(each, 1) for each in up]
    return Scaling(name, tuple((each if isinstance(each, Part) else Part(each), power) for each, power in sides))
