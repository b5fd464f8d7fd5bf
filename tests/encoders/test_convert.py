"""Weights in the forms of packages: every form of one model becomes the same encoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from confide.encoders.convert import convert_ctranslate2, convert_ggml, convert_openai
from confide.encoders.frames import FrameEncoder
from confide.encoders.onnx import convert_onnx
from confide.errors import UserError

library: Any = transformers
WIDTH, MELS, BLOCKS = 64, 8, 2
RENAMED = (
    ("layers.", "blocks."), ("fc1.", "mlp.0."), ("fc2.", "mlp.2."), ("self_attn_layer_norm.", "attn_ln."),
    ("final_layer_norm.", "mlp_ln."), ("self_attn.q_proj.", "attn.query."), ("self_attn.k_proj.", "attn.key."),
    ("self_attn.v_proj.", "attn.value."), ("self_attn.out_proj.", "attn.out."), ("embed_positions.weight",
    "positional_embedding"),
)  # fmt: skip


@pytest.fixture(scope="module")
def whisper() -> Any:
    config = library.WhisperConfig(
        d_model=WIDTH, num_mel_bins=MELS, encoder_layers=BLOCKS, encoder_attention_heads=1, encoder_ffn_dim=96,
        max_source_positions=100, init_std=0.3, pad_token_id=0, bos_token_id=0, eos_token_id=0, vocab_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return library.models.whisper.modeling_whisper.WhisperEncoder(config).eval()


def openai_names(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in RENAMED:
            name = name.replace(ours, theirs)
        found[f"encoder.{name.replace('layer_norm.', 'ln_post.')}"] = tensor
    return found


def write_openai(path: Path, held: dict[str, Tensor]) -> None:
    torch.save({"dims": {"n_audio_head": 1}, "model_state_dict": {**held, "decoder.ln.bias": torch.zeros(3)}}, path)


def write_ggml(path: Path, held: dict[str, Tensor]) -> None:
    content = struct.pack("<12i", 0x67676D6C, *[0] * 11) + struct.pack("<2i", 2, 3) + bytes(4 * 6)
    content += struct.pack("<i", 1) + struct.pack("<i", 5) + b"hello"
    for name, tensor in {**held, "decoder.ln.bias": torch.zeros(3)}.items():
        values = tensor.numpy()[:, None] if "conv" in name and "bias" in name else tensor.numpy()
        content += struct.pack("<3i", values.ndim, len(name), 0) + struct.pack(f"<{values.ndim}i", *values.shape[::-1])
        content += name.encode() + values.astype("<f4").tobytes()
    path.write_bytes(content)


def write_ctranslate2(path: Path, held: dict[str, Tensor]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for block in range(BLOCKS):
        ours, theirs = f"encoder.blocks.{block}", f"encoder/layer_{block}"
        joined = [held[f"{ours}.attn.{each}.weight"] for each in ("query", "key", "value")]
        biases = [held[f"{ours}.attn.query.bias"], torch.zeros(WIDTH), held[f"{ours}.attn.value.bias"]]
        arrays[f"{theirs}/self_attention/linear_0/weight"] = torch.cat(joined).numpy()
        arrays[f"{theirs}/self_attention/linear_0/bias"] = torch.cat(biases).numpy()
        for a, b in (("attn.out", "self_attention/linear_1"), ("mlp.0", "ffn/linear_0"), ("mlp.2", "ffn/linear_1")):
            arrays |= {f"{theirs}/{b}/{kind}": held[f"{ours}.{a}.{kind}"].numpy() for kind in ("weight", "bias")}
        for a, b in (("attn_ln", "self_attention/layer_norm"), ("mlp_ln", "ffn/layer_norm")):
            arrays[f"{theirs}/{b}/gamma"] = held[f"{ours}.{a}.weight"].numpy()
            arrays[f"{theirs}/{b}/beta"] = held[f"{ours}.{a}.bias"].numpy()
    for name in ("conv1", "conv2"):
        arrays |= {f"encoder/{name}/{kind}": held[f"encoder.{name}.{kind}"].numpy() for kind in ("weight", "bias")}
    arrays["encoder/layer_norm/gamma"] = held["encoder.ln_post.weight"].numpy()
    arrays["encoder/layer_norm/beta"] = held["encoder.ln_post.bias"].numpy()
    arrays["encoder/position_encodings/encodings"] = held["encoder.positional_embedding"].numpy()

    def word(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    content = struct.pack("<I", 6) + word("WhisperSpec") + struct.pack("<II", 3, len(arrays))
    for name, values in arrays.items():
        content += word(name) + struct.pack("<B", values.ndim) + struct.pack(f"<{values.ndim}I", *values.shape)
        content += struct.pack("<BI", 0, values.nbytes) + values.tobytes()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "convert"),
    [(write_openai, convert_openai), (write_ggml, convert_ggml), (write_ctranslate2, convert_ctranslate2)],
)
@torch.no_grad()
def test_every_form_of_whisper_is_the_same_encoder(whisper: Any, tmp_path: Path, write: Any, convert: Any) -> None:
    write(tmp_path / "file", openai_names(whisper))
    convert(tmp_path / "file", tmp_path / "model")
    samples = np.random.default_rng(0).normal(scale=0.1, size=2 * 16_000).astype(np.float32)
    extractor = library.WhisperFeatureExtractor(feature_size=MELS, chunk_length=2)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt")["input_features"]
    (found,) = FrameEncoder(str(tmp_path / "model")).states([samples])
    torch.testing.assert_close(found, whisper(features).last_hidden_state[0], atol=1e-4, rtol=1e-4)


def test_a_pickle_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model_state_dict": Hostile()}, tmp_path / "file")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        convert_openai(tmp_path / "file", tmp_path / "model")
    assert not (tmp_path / "ran").exists()


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = b""
    while value >= 128:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


@torch.no_grad()
def test_moonshine_is_read_from_onnx(tmp_path: Path) -> None:
    config = library.MoonshineConfig(
        hidden_size=64, intermediate_size=96, encoder_num_hidden_layers=2, initializer_range=0.3
    )
    torch.manual_seed(0)
    model = library.models.moonshine.modeling_moonshine.MoonshineEncoder(config).eval()
    graph = b""
    for place, (name, tensor) in enumerate(model.state_dict().items()):
        owner, _, last = name.rpartition(".")
        if name.endswith("_proj.weight") or ".fc" in name and last == "weight":  # noqa: RUF021
            node = f"/{owner.replace('o_proj', 'dense').replace('.', '/')}/MatMul".replace("/layers/", "/layers.")
            name, tensor = f"onnx::MatMul_{place}", tensor.T
            graph += _field(1, _field(1, b"x") + _field(1, name.encode()) + _field(3, node.encode()))
        elif owner == "groupnorm":
            operation = "Mul" if last == "weight" else "Add"
            name, tensor = f"onnx::{operation}_{place}", tensor[:, None]
            graph += _field(1, _field(1, name.encode()) + _field(3, f"/groupnorm/{operation}".encode()))
        values = tensor.contiguous().numpy()
        constant = b"".join(_field(1, size) for size in values.shape) + _field(2, 1)
        graph += _field(5, constant + _field(8, name.encode()) + _field(9, values.tobytes()))
    (tmp_path / "file").write_bytes(_field(1, 8) + _field(7, graph))
    convert_onnx(tmp_path / "file", tmp_path / "model")
    samples = np.random.default_rng(0).normal(scale=0.1, size=16_000).astype(np.float32)
    (found,) = FrameEncoder(str(tmp_path / "model")).states([samples])
    wanted = model(torch.from_numpy(samples)[None]).last_hidden_state[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_another_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(_field(7, b""))
    with pytest.raises(UserError, match="holds no encoder of Moonshine"):
        convert_onnx(tmp_path / "file", tmp_path / "model")
