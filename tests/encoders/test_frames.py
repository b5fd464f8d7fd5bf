"""Frozen speech encoders: every family gives what transformers gives, at any length and in any company."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from confide.encoders.frames import FrameEncoder
from confide.errors import UserError

FAMILIES = [
    "wav2vec2", "wav2vec2-stable", "hubert", "wavlm", "wavlm-stable", "data2vec", "moonshine", "whisper",
]  # fmt: skip
library: Any = transformers


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.1, size=samples).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_states_are_those_of_transformers(tiny_speech_model: Callable[[str], Path], family: str) -> None:
    folder = tiny_speech_model(family)
    encoder, samples = FrameEncoder(str(folder)), noise(8 * 16_000)  # 8 s: the whole window of the tiny Whisper
    model = library.AutoModel.from_pretrained(str(folder)).eval()
    if family == "whisper":
        features = library.WhisperFeatureExtractor(chunk_length=8)(samples, sampling_rate=16_000, return_tensors="pt")
        wanted = model.encoder(features["input_features"]).last_hidden_state[0]
    else:
        scaled = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7) if "stable" in family else samples
        wanted = (model.encoder if family == "moonshine" else model)(torch.from_numpy(scaled)[None]).last_hidden_state[
            0
        ]
    (found,) = encoder.states([samples])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert abs(len(found) * encoder.frame_seconds - 8) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_company_does_not_change_a_state(tiny_speech_model: Callable[[str], Path], family: str) -> None:
    encoder = FrameEncoder(str(tiny_speech_model(family)))
    short, long = noise(5_000), noise(12_000, 1)
    (alone,) = encoder.states([short])
    together, _ = encoder.states([short, long])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    # The claim can fail: without the mask the padding would be heard.
    stems = [encoder.stem(samples) for samples in (short, long)]
    x = torch.nn.utils.rnn.pad_sequence(stems, batch_first=True)
    blind = encoder.context(x, torch.full((2,), x.shape[1]))
    for index in range(len(encoder.layers)):
        x = encoder.block(index, x, blind)
    assert (encoder.finish(x)[0, : len(alone)] - alone).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_layers_can_be_run_first_and_the_others_later(
    tiny_speech_model: Callable[[str], Path], family: str
) -> None:
    encoder, utterances = FrameEncoder(str(tiny_speech_model(family))), [noise(5_000), noise(7_000, 1)]
    halfway = encoder.states(utterances, depth=1)
    x = torch.nn.utils.rnn.pad_sequence(halfway, batch_first=True)
    context = encoder.context(x, torch.tensor([len(each) for each in halfway]))
    x = encoder.finish(encoder.block(1, x, context))
    for row, wanted in zip(x, encoder.states(utterances), strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shortest_utterance_gives_one_frame(tiny_speech_model: Callable[[str], Path], family: str) -> None:
    encoder = FrameEncoder(str(tiny_speech_model(family)))
    (found,) = encoder.states([noise(encoder.shortest)])
    assert found.shape == (1, 16)


def test_another_weight_or_another_setting_is_another_encoder(
    tiny_speech_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_speech_model("whisper")
    identity = FrameEncoder(str(folder)).identity
    same = shutil.copytree(folder, tmp_path / "same")
    assert FrameEncoder(str(same)).identity == identity
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "encoder_attention_heads": 4}))
    assert FrameEncoder(str(same)).identity != identity
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["encoder.conv1.bias"][3] += 1e-3
    save_file(tensors, other / "model.safetensors")
    assert FrameEncoder(str(other)).identity != identity


def test_describe_says_what_an_encoder_of_speech_is(
    tiny_speech_model: Callable[[str], Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = command("encoder", "describe", tiny_speech_model("moonshine"))
    assert code == 0
    assert "moonshine, speech, 2 blocks, 16 wide" in out
    assert "41.7 frames a second" in out


def test_what_cannot_be_an_encoder_is_explained(
    tiny_speech_model: Callable[[str], Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="of type bert, which gives no frames; expected Whisper"):
        FrameEncoder(str(tiny_model("masked")))
    with pytest.raises(UserError, match=r"minilm is one of text; expected one of speech, such as whisper-tiny\.en"):
        FrameEncoder("minilm")
    cut = shutil.copytree(tiny_speech_model("whisper"), tmp_path / "cut")
    tensors = load_file(cut / "model.safetensors")
    del tensors["encoder.layers.1.fc1.weight"]
    save_file(tensors, cut / "model.safetensors")
    with pytest.raises(UserError, match=r"cannot read the encoder .*layers.1.fc1.weight.*the complete weights"):
        FrameEncoder(str(cut)).states([noise(5_000)])
    pickled = shutil.copytree(tiny_speech_model("hubert"), tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle, which can run code"):
        FrameEncoder(str(pickled))
