"""Turn the weights of speech encoders, in the forms in which packages hold them, into transformers folders.

Only the encoder is kept: the decoder would write words of its own, and it is most of the file. Whisper comes as
OpenAI's own file (a pickle, which is read with `weights_only`: it can hold numbers and nothing else), from CTranslate2
or from ggml; all three name the same tensors. Numbers stay in the precision that they come in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError

# OpenAI's names, in the order of replacement, and those of transformers' WhisperEncoder.
_WHISPER = (
    ("blocks.", "layers."),
    ("mlp.0.", "fc1."),
    ("mlp.2.", "fc2."),
    ("mlp_ln.", "final_layer_norm."),
    ("attn_ln.", "self_attn_layer_norm."),
    (".attn.query.", ".self_attn.q_proj."),
    (".attn.key.", ".self_attn.k_proj."),
    (".attn.value.", ".self_attn.v_proj."),
    (".attn.out.", ".self_attn.out_proj."),
    ("ln_post.", "layer_norm."),
    ("positional_embedding", "embed_positions.weight"),
)
_HEAD_WIDTH = 64  # of every Whisper
_CTRANSLATE2 = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
_GGML_MAGIC = 0x67676D6C
_GGML = {0: "<f4", 1: "<f2"}


def convert_openai(file: Path, folder: Path) -> None:
    """Read OpenAI's own file of a Whisper model."""
    found = torch.load(file, map_location="cpu", weights_only=True)
    _save_whisper(folder, found["model_state_dict"])


def convert_ctranslate2(file: Path, folder: Path) -> None:
    """Read a Whisper model as CTranslate2 keeps it: projections of one input are joined, keys have a bias of zero."""
    held = _read_ctranslate2(file)
    found: dict[str, Tensor] = {}

    def linear(ours: str, names: tuple[str, ...], theirs: str) -> None:
        weights, biases = (np.split(held[f"{theirs}/{kind}"], len(names)) for kind in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            found[f"{ours}{name}.weight"] = _tensor(weight)
            if not name.endswith("key"):
                found[f"{ours}{name}.bias"] = _tensor(bias)
            elif bias.any():
                raise UserError(f"{file.name}: the keys of {theirs} have a bias, which Whisper does not have")

    def norm(ours: str, theirs: str) -> None:
        found[f"{ours}.weight"], found[f"{ours}.bias"] = (_tensor(held[f"{theirs}/{k}"]) for k in ("gamma", "beta"))

    block = 0
    while f"encoder/layer_{block}/ffn/linear_0/weight" in held:
        theirs, ours = f"encoder/layer_{block}", f"encoder.blocks.{block}"
        linear(f"{ours}.attn.", ("query", "key", "value"), f"{theirs}/self_attention/linear_0")
        linear(f"{ours}.attn.", ("out",), f"{theirs}/self_attention/linear_1")
        linear(f"{ours}.mlp.", ("0",), f"{theirs}/ffn/linear_0")
        linear(f"{ours}.mlp.", ("2",), f"{theirs}/ffn/linear_1")
        norm(f"{ours}.attn_ln", f"{theirs}/self_attention/layer_norm")
        norm(f"{ours}.mlp_ln", f"{theirs}/ffn/layer_norm")
        block += 1
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        found[f"encoder.{name}"] = _tensor(held[f"encoder/{name.replace('.', '/')}"])
    found["encoder.positional_embedding"] = _tensor(held["encoder/position_encodings/encodings"])
    norm("encoder.ln_post", "encoder/layer_norm")
    _save_whisper(folder, found)


def convert_ggml(file: Path, folder: Path) -> None:
    """Read a Whisper model as whisper.cpp keeps it: OpenAI's names, after a header, filters and the vocabulary."""
    found: dict[str, Tensor] = {}
    with file.open("rb") as source:
        if _numbers(source, "i")[0] != _GGML_MAGIC:
            raise UserError(f"{file.name} does not begin as a ggml file; expected a model of whisper.cpp")
        _numbers(source, "11i")  # sizes, which the tensors tell as well
        mels, bins = _numbers(source, "2i")
        source.seek(4 * mels * bins, 1)
        for _ in range(_numbers(source, "i")[0]):
            source.seek(_numbers(source, "i")[0], 1)
        while head := source.read(12):
            dimensions, length, kind = struct.unpack("<3i", head)
            shape = _numbers(source, f"{dimensions}i")[::-1]
            name, dtype = source.read(length).decode(), np.dtype(_GGML[kind])
            values = np.frombuffer(source.read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
            if name.startswith("encoder."):
                found[name] = _tensor(
                    values.squeeze() if name.startswith("encoder.conv") and "bias" in name else values
                )
    _save_whisper(folder, found)


def _save_whisper(folder: Path, found: Mapping[str, Tensor]) -> None:
    """Write the encoder of OpenAI's tensors; all sizes follow from their shapes."""
    tensors = {}
    for name, tensor in found.items():
        if name.startswith("encoder."):
            renamed = name.removeprefix("encoder.")
            for theirs, ours in _WHISPER:
                renamed = renamed.replace(theirs, ours)
            tensors[f"model.encoder.{renamed}"] = tensor.contiguous()
    width, mels = tensors["model.encoder.conv1.weight"].shape[:2]
    blocks = sum(name.endswith(".fc1.weight") for name in tensors)
    config = {
        "model_type": "whisper", "architectures": ["WhisperModel"], "d_model": width, "num_mel_bins": mels,
        "encoder_layers": blocks, "encoder_attention_heads": width // _HEAD_WIDTH,
        "encoder_ffn_dim": tensors["model.encoder.layers.0.fc1.weight"].shape[0],
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
    }  # fmt: skip
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": mels, "sampling_rate": 16_000}
    save_folder(folder, tensors, config, extractor)


def save_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], extractor: Mapping[str, Any]
) -> None:
    """Write a transformers folder of a speech encoder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, content in (("config.json", config), ("preprocessor_config.json", extractor)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_ctranslate2(file: Path) -> dict[str, np.ndarray]:
    held: dict[str, np.ndarray] = {}
    with file.open("rb") as source:

        def word() -> str:
            return source.read(_numbers(source, "H")[0])[:-1].decode()

        _numbers(source, "I")  # version of the format
        word()  # name of the model's class
        _numbers(source, "I")  # its revision
        for _ in range(_numbers(source, "I")[0]):
            name, dimensions = word(), _numbers(source, "B")[0]
            shape = _numbers(source, f"{dimensions}I")
            kind, size = _numbers(source, "B")[0], _numbers(source, "I")[0]
            held[name] = np.frombuffer(source.read(size), _CTRANSLATE2[kind]).reshape(shape)
    return held


def _numbers(source: BinaryIO, form: str) -> tuple[int, ...]:
    packed = struct.Struct(f"<{form}")
    return packed.unpack(source.read(packed.size))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values))
