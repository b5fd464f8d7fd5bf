"""The recogniser: a transformer encoder with CTC (PFL-ASR appendix F, "Model" and "Positional Embedding").

Features are normalised per utterance, a convolution with GLU takes every third frame, CAPE positions are added,
blocks of self-attention and MLP follow, then a LayerNorm and a linear layer to the tokens. Where the paper is silent,
the values are those of its released code: block weights without biases, U(+-sqrt(1/fan_in)); convolution and head
U(+-sqrt(3/fan_in)); dropout after the GLU, on the attention's probabilities and after the ReLU, nowhere else; layer
drop leaves out both halves of a block for the whole batch and rescales nothing. All functions are pure: they depend on
(settings, parameters, input, randomness) alone.

Differs from the paper: there, SAME padding depends on the length of the padded batch, so an utterance's alignment
changes with its neighbours; here the padding is always that of a multiple of the stride. The rate of dropout is rounded
to 1/65536. Presets tiny and small are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from confide.federated.taps import Derived, add_linear, layer_norm, linear
from confide.federated.task import WIDE
from confide.settings import Section
from confide.speech.pretrained import PretrainedSettings

FRAME_SECONDS = 0.01  # a step of the features
EPS_UTTERANCE, EPS_LAYER = 1e-7, 1e-5
CAPE_SCALE, CAPE_BASE = 30.0, 1e4

_PAPER = {"layers": 36, "width": 768, "mlp": 3072, "heads": 4, "dropout": 0.3, "layer_drop": 0.1}
PRESETS: dict[str, dict[str, float]] = {
    "tiny": {"layers": 3, "width": 96, "mlp": 384, "heads": 4, "dropout": 0.0, "layer_drop": 0.0},  # 0.4M, ours
    "small": {"layers": 4, "width": 144, "mlp": 576, "heads": 4, "dropout": 0.1, "layer_drop": 0.0},  # 1.2M, ours
    "narrow": {**_PAPER, "width": 512, "mlp": 2048},  # 114M
    "shallow": {**_PAPER, "layers": 16},  # 114M
    "baseline": {**_PAPER, "layer_drop": 0.3},  # 255.8M; Table 21 gives it a layer drop of 0.1 too
    "wide": {**_PAPER, "width": 1024, "mlp": 4096},  # 454M
    "deep": {**_PAPER, "layers": 72},  # 511M
}


_MATRICES = 400
"""In a large encoder, each with two low-rank factors."""


class ModelSettings(Section):
    """A preset, and whatever is to differ from it."""

    preset: Literal["tiny", "small", "narrow", "shallow", "baseline", "wide", "deep"] = Field(
        "tiny", description="named sizes; every other field overrides its value"
    )
    layers: int = Field(3, ge=1, description="blocks of attention and MLP")
    width: int = Field(96, ge=2, multiple_of=2, description="size of a frame's embedding")
    mlp: int = Field(384, ge=1, description="size of the MLP's hidden layer")
    heads: int = Field(4, ge=1, description="attention heads; they share the width")
    dropout: float = Field(0.0, ge=0, lt=1, description="after GLU, on attention probabilities, after ReLU")
    layer_drop: float = Field(0.0, ge=0, lt=1, description="chance of a block to be left out, per batch")
    norm: Literal["pre", "post"] = Field("pre", description="LayerNorm before each half of a block, or after")
    kernel: int = Field(7, ge=1, description="frames that the convolution sees")
    stride: int = Field(3, ge=1, description="frames of the features to a frame of the output")
    cape_shift: float = Field(30.0, ge=0, allow_inf_nan=False, description="global shift of positions, seconds")
    tokens: int = Field(30, ge=2, description="size of the output, blank included")
    mels: int = Field(80, ge=1, description="filterbanks of the features")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and activations while computing")
    checkpoint_activations: bool = Field(False, description="recompute blocks when going back: less memory, slower")
    encoder: PretrainedSettings | None = Field(
        None, exclude_if=lambda value: value is None,
        description="a frozen pretrained encoder to train on, in place of everything else in this section",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**PRESETS.get(str(given.get("preset", "tiny")), {}), **given}

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        if self.encoder is not None and (changed := self._changed()):
            raise ValueError(f"{', '.join(changed)}: of the model that is trained whole; drop it, or drop encoder")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} cannot be shared by heads={self.heads}; make it a multiple of them")
        if self.kernel < self.stride:
            raise ValueError(f"kernel={self.kernel} is below stride={self.stride}: frames would be skipped unseen")
        return self

    @property
    def size(self) -> int:
        """About how many numbers a model has (`TaskSection.size`)."""
        if self.encoder is not None:
            return WIDE * ((self.encoder.hidden or 0) + _MATRICES * self.encoder.rank)
        blocks = self.layers * self.width * (4 * self.width + 2 * self.mlp + 4)
        return blocks + self.width * (2 * self.kernel * self.mels + self.tokens)

    def _changed(self) -> list[str]:
        """Fields beside the encoder that are not what an empty section has."""
        usual = PRESETS["tiny"]
        return [
            name
            for name, field in ModelSettings.model_fields.items()
            if name != "encoder" and getattr(self, name) != usual.get(name, field.default)
        ]


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, in the order of the computation; a linear layer is (out, in)."""
    width, mlp = settings.width, settings.mlp
    shapes: dict[str, tuple[int, ...]] = {
        "utterance.scale": (1,),
        "utterance.bias": (1,),
        "conv.weight": (2 * width, settings.kernel, settings.mels),
        "conv.bias": (2 * width,),
    }
    for index in range(settings.layers):
        shapes |= {
            f"blocks.{index:02}.ln1.scale": (width,),
            f"blocks.{index:02}.ln1.bias": (width,),
            f"blocks.{index:02}.attention.wqkv": (3 * width, width),
            f"blocks.{index:02}.attention.wf": (width, width),
            f"blocks.{index:02}.ln2.scale": (width,),
            f"blocks.{index:02}.ln2.bias": (width,),
            f"blocks.{index:02}.mlp.w1": (mlp, width),
            f"blocks.{index:02}.mlp.w2": (width, mlp),
        }
    if settings.norm == "pre":
        shapes |= {"norm.scale": (width,), "norm.bias": (width,)}
    return shapes | {"head.weight": (settings.tokens, width), "head.bias": (settings.tokens,)}


def kind_of(name: str) -> str:
    """The paper's kind of a tensor (Figure 5): wqkv, wf, w1, w2, ln1, ln2; also conv, head, norm and utterance."""
    *_, owner, last = name.split(".")
    return owner if last in {"scale", "bias", "weight"} else last


def initial_parameters(settings: ModelSettings, draw: np.random.Generator) -> dict[str, Tensor]:
    """Draw fresh weights, always in float32, whatever `settings.dtype` is."""
    parameters = {}
    for name, shape in parameter_shapes(settings).items():
        owner, last = name.split(".")[-2:]
        if last == "scale":
            parameters[name] = torch.ones(shape)
        elif last == "bias" and owner not in {"conv", "head"}:
            parameters[name] = torch.zeros(shape)
        else:
            fan_in = {"conv": settings.kernel * settings.mels, "head": settings.width}.get(owner, shape[-1])
            bound = math.sqrt((3 if last == "weight" else 1) / fan_in)
            values = draw.random(shape, dtype=np.float32)
            parameters[name] = torch.from_numpy(values).mul_(2 * bound).sub_(bound)
    return parameters


def forward(
    settings: ModelSettings,
    parameters: Mapping[str, Tensor],
    features: Tensor,  # (batch, frames, mels)
    lengths: Tensor | None,  # (batch,) valid frames; none: all of them
    randomness: torch.Generator | None,
    shifts: Tensor | None = None,  # (batch,) seconds
) -> tuple[Tensor, Tensor]:
    """Logits (batch, frames // stride, tokens) and how many of each utterance's frames are valid.

    They are in float32, or in float64 where the parameters are, which tests of exact equalities need.

    `randomness` is for training: dropout, layer drop and shifted positions. Without it the answer is deterministic.
    `shifts` are given where utterances of several users come together, each with the shift that its user has drawn.
    Frames beyond an utterance's length have no influence. A batch shorter than the stride still gives one frame, with
    valid lengths of 0, so that its loss has a gradient (of zero).
    """
    dropout = 0.0 if randomness is None else settings.dropout
    exact = torch.promote_types(torch.float32, parameters["head.bias"].dtype)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else exact
    padded = lengths is not None
    lengths = torch.full(features.shape[:1], features.shape[1], device=features.device) if lengths is None else lengths
    out_lengths = lengths // settings.stride

    x = _strided_frames(settings, parameters, features, lengths, dtype)  # (batch, frames, width)
    batch, frames, width = x.shape
    if dropout and randomness is not None:
        mask, keep = _mask(x.shape, dropout, randomness)
        x = x * mask.to(x.device) / keep
    if randomness is not None and settings.cape_shift:
        shifts = cape_shifts(settings, batch, randomness)
    x = (x + _positions(settings, out_lengths, frames, shifts).to(dtype)).view(batch * frames, width)

    # A block's masks come from a generator of its own, so that recomputing it draws the same ones.
    seeds, dropped = [0] * settings.layers, [False] * settings.layers
    if randomness is not None:
        seeds = torch.randint(2**31, (settings.layers,), generator=randomness, device=randomness.device).tolist()
        if settings.layer_drop:
            chance = torch.rand(settings.layers, generator=randomness, device=randomness.device)
            dropped = (chance < settings.layer_drop).tolist()

    keys = _key_bias(out_lengths, frames, dtype) if padded else None
    for index, (seed, drop) in enumerate(zip(seeds, dropped, strict=True)):
        if drop and settings.norm == "pre":
            continue
        arguments = (settings, parameters, f"blocks.{index:02}", x, batch, keys, dropout, seed, drop)
        if settings.checkpoint_activations and torch.is_grad_enabled():
            x = checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _block(*arguments)
    if settings.norm == "pre":
        x = _layer_norm(parameters, "norm", x)
    logits = linear(parameters, x, "head.weight", "head.bias")
    return logits.to(exact).view(batch, frames, settings.tokens), out_lengths


def ctc_loss(logits: Tensor, out_lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Mean over utterances of -log p(target), not divided by its length; a target too long for its frames adds zero."""
    return ctc_losses(logits, out_lengths, targets, target_lengths).sum() / logits.shape[0]


def ctc_losses(logits: Tensor, out_lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Of each utterance, -log p(target), or zero."""  # (batch,)
    log_probs = functional.log_softmax(logits.float(), dim=-1).transpose(0, 1)  # (frames, batch, tokens)
    lengths = out_lengths, target_lengths
    return functional.ctc_loss(log_probs, targets, *lengths, reduction="none", zero_infinity=True)


def _strided_frames(
    settings: ModelSettings, parameters: Mapping[str, Tensor], features: Tensor, lengths: Tensor, dtype: torch.dtype
) -> Tensor:
    """Utterance norm, convolution and GLU."""  # (batch, frames // stride, width)
    kernel, stride, mels = settings.kernel, settings.stride, settings.mels
    batch, frames, _ = features.shape
    before = (kernel - stride) // 2
    valid = (torch.arange(frames, device=features.device) < lengths[:, None]).unsqueeze(2)  # (batch, frames, 1)
    count = (lengths.clamp(min=1) * mels).view(batch, 1, 1)
    values = features.float().masked_fill(~valid, 0.0)
    values = (values - values.sum(dim=(1, 2), keepdim=True) / count) * valid
    values = values * torch.rsqrt(values.square().sum(dim=(1, 2), keepdim=True) / count + EPS_UTTERANCE)

    # The norm's scale s and bias b go into the kernel: w (s x + b) = (s w) x + (b sum w) 1, where 1 is one more channel
    # that says which frames are valid. So no gradient has to go back to the features, which is a third of the work.
    channels, after = mels + 1, kernel - stride - before + max(stride - frames, 0)
    padded = functional.pad(torch.cat([values, valid.to(values.dtype)], dim=2), (0, 0, before, after)).to(dtype)
    windows = padded.flatten(1).unfold(1, kernel * channels, stride * channels)  # a frame's inputs lie side by side
    return functional.glu(linear(parameters, windows, _FOLDED, "conv.bias"), dim=-1)


def _fold(weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The kernel with the norm's scale and bias in it."""  # (2 width, kernel x (mels + 1))
    return torch.cat([weight * scale, weight.sum(dim=2, keepdim=True) * bias], dim=2).flatten(1)


_FOLDED = Derived(_fold, ("conv.weight", "utterance.scale", "utterance.bias"))


def cape_shifts(settings: ModelSettings, batch: int, randomness: torch.Generator) -> Tensor:
    """Draw how far the positions of each utterance are shifted, in seconds."""  # (batch,)
    return (2 * torch.rand(batch, generator=randomness, device=randomness.device) - 1) * settings.cape_shift


def _positions(settings: ModelSettings, out_lengths: Tensor, frames: int, shifts: Tensor | None) -> Tensor:
    """CAPE: sines and cosines, in turn, of seconds from the utterance's middle."""  # (batch, frames, width)
    device, step = out_lengths.device, FRAME_SECONDS * settings.stride
    start = (out_lengths - 1) * (-0.5 * step)  # (batch,)
    if shifts is not None:
        start = start + shifts.to(device)
    seconds = start[:, None] + torch.arange(frames, device=device) * step  # (batch, frames)
    index = torch.arange(settings.width, device=device)
    rates = CAPE_SCALE * torch.exp((index // 2) * (-2 * math.log(CAPE_BASE) / settings.width))
    phases = (index % 2) * (math.pi / 2)  # sin(x + pi/2) = cos(x)
    return torch.addcmul(phases, seconds.unsqueeze(2), rates).sin_()


def _key_bias(out_lengths: Tensor, frames: int, dtype: torch.dtype) -> Tensor | None:
    """Minus infinity where a key is padding, else zero; None if nothing is padding."""  # (batch, 1, 1, frames)
    if int(out_lengths.min()) == frames:
        return None
    seen = out_lengths.clamp(min=1)[:, None]  # an utterance without frames sees one: a softmax needs a key
    padding = torch.arange(frames, device=out_lengths.device) >= seen
    bias = torch.zeros(padding.shape, dtype=dtype, device=padding.device).masked_fill_(padding, -math.inf)
    return bias[:, None, None, :]


def _block(
    settings: ModelSettings, parameters: Mapping[str, Tensor], name: str, x: Tensor, batch: int, keys: Tensor | None,
    dropout: float, seed: int, drop: bool,
) -> Tensor:  # fmt: skip
    """One block on (batch x frames, width). `drop` leaves out all but the norms; only post-norm calls it so."""
    masks = torch.Generator(device=x.device).manual_seed(seed) if dropout else None
    if settings.norm == "pre":
        x = _attention(settings, parameters, name, x, _layer_norm(parameters, f"{name}.ln1", x), batch, keys, masks)
        return _mlp(settings, parameters, name, x, _layer_norm(parameters, f"{name}.ln2", x), masks)
    x = x if drop else _attention(settings, parameters, name, x, x, batch, keys, masks)
    x = _layer_norm(parameters, f"{name}.ln1", x)
    x = x if drop else _mlp(settings, parameters, name, x, x, masks)
    return _layer_norm(parameters, f"{name}.ln2", x)


def _attention(
    settings: ModelSettings, parameters: Mapping[str, Tensor], name: str, residual: Tensor, x: Tensor, batch: int,
    keys: Tensor | None, masks: torch.Generator | None,
) -> Tensor:  # fmt: skip
    """residual + wf(attention(x)), with dropout on the probabilities."""
    size = settings.width // settings.heads
    qkv = linear(parameters, x, f"{name}.attention.wqkv").view(batch, -1, 3, settings.heads, size)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, frames, size)
    scale = 1.0
    if masks is None:
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=keys)
    else:
        scores = (query * size**-0.5) @ key.transpose(2, 3)  # (batch, heads, frames, frames)
        probabilities = torch.softmax(scores if keys is None else scores + keys, dim=-1)
        mask, keep = _mask(probabilities.shape, settings.dropout, masks)
        mixed, scale = (probabilities * mask) @ value, 1 / keep
    mixed = mixed.transpose(1, 2).reshape(residual.shape)
    return add_linear(parameters, residual, mixed, f"{name}.attention.wf", scale)


def _mlp(
    settings: ModelSettings, parameters: Mapping[str, Tensor], name: str, residual: Tensor, x: Tensor,
    masks: torch.Generator | None,
) -> Tensor:  # fmt: skip
    """residual + w2(dropout(relu(w1 x))); the last product applies dropout's factor."""
    hidden, scale = linear(parameters, x, f"{name}.mlp.w1").relu_(), 1.0
    if masks is not None:
        mask, keep = _mask(hidden.shape, settings.dropout, masks)
        hidden, scale = hidden * mask, 1 / keep
    return add_linear(parameters, residual, hidden, f"{name}.mlp.w2", scale)


def _layer_norm(parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return layer_norm(parameters, x, f"{name}.scale", f"{name}.bias", EPS_LAYER)


def _mask(shape: torch.Size, dropout: float, randomness: torch.Generator) -> tuple[Tensor, float]:
    """Bytes that are 0 with a chance of `dropout`, else 1; and the exact chance of a 1.

    Each random word gives four draws of 16 bits: six times faster on a CPU than one Bernoulli draw per element.
    """
    count, ones = math.prod(shape), min(max(round((1 - dropout) * 65536), 1), 65535)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=randomness.device)
    words.random_(-(2**63), None, generator=randomness)
    kept = words.view(torch.int16)[:count] < ones - 32768
    return kept.view(torch.uint8).view(shape), ones / 65536
