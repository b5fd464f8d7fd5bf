"""A text's vector is its own, the adapter trains through frozen blocks, and bad models are refused by name."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from confide.encoders.encoder import Encoder, EncoderSettings, length_groups
from confide.errors import UserError

TINY = ["the cat", "dogs ran far away from home while birds sang in old trees", "water", "a mat on the mat"]
REAL = [
    "Ok",
    "Free entry in 2 a wkly comp to win FA Cup final tkts 21st May 2005. Text FA to 87121 now",
    "See you at six?",
]
KINDS = [("causal", "last"), ("causal", "mean"), ("masked", "last"), ("masked", "mean")]


def _alone(encoder: Encoder, texts: list[str], adapter: torch.Tensor | None = None) -> torch.Tensor:
    return torch.cat([encoder.hidden(encoder.tokens([text]), adapter) for text in texts])


@pytest.mark.parametrize(("kind", "pooling"), KINDS)
def test_a_vector_does_not_depend_on_the_neighbours_in_its_batch(
    tiny_encoder: Callable[..., Encoder], kind: str, pooling: str
) -> None:
    encoder = tiny_encoder(kind, pooling)
    adapter = encoder.adapter() + 0.1 * torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    for matrix in (None, adapter):
        together = encoder.hidden(encoder.tokens(TINY), matrix)
        torch.testing.assert_close(together, _alone(encoder, TINY, matrix), atol=1e-5, rtol=0)
    assert (together[0] - together[1]).abs().max() > 0.01  # and texts do differ


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_real_models_vector_does_not_depend_on_the_neighbours_in_its_batch(
    real_encoder: Callable[..., Encoder], name: str, pooling: str
) -> None:
    encoder = real_encoder(name, pooling)
    with torch.no_grad():
        torch.testing.assert_close(encoder.hidden(encoder.tokens(REAL)), _alone(encoder, REAL), atol=1e-4, rtol=0)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 256), min_size=1, max_size=64).map(lambda found: np.array(found)))
def test_passes_by_length_have_every_row_once_and_never_more_tokens(lengths: NDArray[np.int64]) -> None:
    groups = length_groups(lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert sum(len(rows) * lengths[rows].max() for rows in groups) <= len(lengths) * lengths.max()


@pytest.mark.parametrize(("kind", "pooling"), KINDS)
def test_passes_by_length_change_neither_vectors_nor_gradients(
    tiny_encoder: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch, kind: str, pooling: str
) -> None:
    """One pass for the whole batch is the reference."""
    encoder = tiny_encoder(kind, pooling)
    batch = encoder.tokens([*TINY, "birds sang", TINY[1]])
    found = []
    for tokens in (10**9, 0):
        monkeypatch.setattr("confide.encoders.encoder._PASS_TOKENS", tokens)
        adapter = encoder.adapter().requires_grad_()
        hidden = encoder.hidden(batch, adapter)
        found.append((hidden.detach(), *torch.autograd.grad(hidden.square().sum(), adapter)))
    assert len(length_groups(batch.lengths.numpy())) > 2
    for reference, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, reference, atol=1e-4, rtol=1e-5)


def test_the_real_masked_model_knows_what_texts_mean(real_encoder: Callable[..., Encoder]) -> None:
    encoder = real_encoder("minilm", "mean")
    texts = ["A man is eating a meal.", "Somebody has lunch.", "The stock market fell today."]
    near = functional.normalize(encoder.hidden(encoder.tokens(texts)), dim=1)
    assert near[0] @ near[1] > 0.5 > 0.2 > near[0] @ near[2]


def test_the_real_causal_model_goes_on_with_a_text(real_encoder: Callable[..., Encoder]) -> None:
    """Its final states times its own embeddings (tied) are its predictions: decoding the file has kept them right."""
    encoder = real_encoder("smollm2")
    ids = encoder.tokeniser("The capital of France is", return_tensors="pt")["input_ids"]
    states = encoder.model(inputs_embeds=encoder.model.get_input_embeddings()(ids)).last_hidden_state
    best = (states[0, -1] @ encoder.model.get_input_embeddings().weight.T).argmax()
    assert encoder.tokeniser.decode([int(best)]).strip() == "Paris"


@pytest.mark.parametrize(("kind", "pooling"), KINDS)
def test_the_gradient_of_the_adapter_is_that_of_finite_differences(
    tiny_encoder: Callable[..., Encoder], kind: str, pooling: str
) -> None:
    encoder = tiny_encoder(kind, pooling)
    encoder.model.double()
    batch = encoder.tokens(TINY)
    adapter = encoder.adapter().double().requires_grad_()
    direction = torch.randn(16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.randn(4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value(matrix: torch.Tensor) -> torch.Tensor:
        return (encoder.hidden(batch, matrix) * target).sum()

    (gradient,) = torch.autograd.grad(value(adapter), adapter)
    with torch.no_grad():
        step = 1e-4  # Llama's norms round to 32 bits inside, whatever the type
        slope = (value(adapter + step * direction) - value(adapter - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=2e-3)
    assert gradient.abs().sum() > 0
    assert all(p.grad is None and not p.requires_grad for p in encoder.model.parameters())


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_identity_adapter_changes_nothing(tiny_encoder: Callable[..., Encoder], kind: str) -> None:
    encoder = tiny_encoder(kind)
    batch = encoder.tokens(TINY)
    torch.testing.assert_close(encoder.hidden(batch, encoder.adapter()), encoder.hidden(batch), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "last"), [("causal", "</s>"), ("masked", "[SEP]")])
def test_last_token_pooling_takes_the_state_of_the_end_of_text(
    tiny_encoder: Callable[..., Encoder], kind: str, last: str
) -> None:
    encoder = tiny_encoder(kind, "last")
    batch = encoder.tokens(["the cat"])
    assert encoder.tokeniser.convert_ids_to_tokens(int(batch.ids[0, -1])) == last
    states = encoder.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
    torch.testing.assert_close(encoder.hidden(batch)[0], states[0, -1], atol=1e-6, rtol=0)


def test_a_long_text_is_read_in_windows_and_said_so(tiny_encoder: Callable[..., Encoder]) -> None:
    encoder = tiny_encoder("masked", "mean", max_tokens=8, max_windows=2)  # six words to a window
    first, second = "the cat sat on a mat", "and dogs ran"
    batch = encoder.tokens([f"{first} {second}", "water"])
    assert (batch.windowed, batch.cut, batch.owner.tolist()) == (1, 0, [0, 0, 1])
    parts = _alone(encoder, [first, second])
    expected = (8 * parts[0] + 5 * parts[1]) / 13
    torch.testing.assert_close(encoder.hidden(batch)[0], expected, atol=1e-5, rtol=0)
    assert encoder.tokens([" ".join(["cat"] * 13)]).cut == 1


def test_identity_tells_pooling_window_and_weights_apart_and_nothing_else(
    tiny_encoder: Callable[..., Encoder], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("causal"), tmp_path / "copy")
    copy = Encoder(EncoderSettings(source=str(tmp_path / "copy")))
    assert copy.identity == tiny_encoder("causal").identity
    others = [tiny_encoder("causal", "mean"), tiny_encoder("causal", max_tokens=8), tiny_encoder("masked")]
    assert len({copy.identity, *(other.identity for other in others)}) == 4
    copy.model.norm.weight.data[0] += 1
    del copy.identity
    assert copy.identity != tiny_encoder("causal").identity


def test_an_empty_text_and_an_adapter_of_another_width_are_refused(tiny_encoder: Callable[..., Encoder]) -> None:
    encoder = tiny_encoder("causal")
    with pytest.raises(UserError, match="text 2 of 2 is empty"):
        encoder.tokens(["the cat", " \n"])
    with pytest.raises(UserError, match=r"\(8, 8\); expected 16 x 16"):
        encoder.hidden(encoder.tokens(["cat"]), torch.eye(8))


def _spoilt(folder: Path, change: str) -> None:
    if change == "no config":
        (folder / "config.json").unlink()
    elif change == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif change == "no tokeniser":
        (folder / "tokenizer.json").unlink()
    elif change == "cut":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif change == "lacks tensors":
        from safetensors.torch import load_file, save_file

        state: dict[str, Any] = load_file(folder / "model.safetensors")
        state.pop(next(name for name in state if "q_proj" in name))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no config", "not a model: it has no config.json"),
        ("pickle", "is a pickle, which can run code, and is refused"),
        ("no tokeniser", "has no tokeniser"),
        ("cut", "cannot read the encoder"),
        ("lacks tensors", "lacks 1 of its tensors"),
    ],
)
def test_a_folder_that_is_not_a_whole_model_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, change: str, said: str
) -> None:
    shutil.copytree(tiny_model("causal"), tmp_path / "model")
    _spoilt(tmp_path / "model", change)
    with pytest.raises(UserError, match=said):
        Encoder(EncoderSettings(source=str(tmp_path / "model")))


def test_a_file_that_is_no_gguf_and_a_name_that_is_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 a pickle in a zip")
    with pytest.raises(UserError, match="is not a GGUF file"):
        Encoder(EncoderSettings(source=str(tmp_path / "model.gguf")))
    with pytest.raises(UserError, match="it is no folder, no file and no preset"):
        Encoder(EncoderSettings(source="smolm"))


def _gguf(fields: int, *values: bytes) -> bytes:
    """A header of version 3 without tensors, which announces so many fields."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, fields) + b"".join(values)


def _field(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF\x03\x00\x00\x00\x01\x00",
        _gguf(0)[:20],
        _gguf(1 << 62),
        _gguf(1, struct.pack("<Q", 1 << 62)),
        _gguf(1, _field(8, struct.pack("<Q", 1 << 63) + b"x")),
        _gguf(1, _field(9, struct.pack("<IQ", 0, 1 << 62))),  # its reader takes this for a list of 2^62
        _gguf(1, _field(9, struct.pack("<IQ", 8, 1 << 62))),
        _gguf(1, _field(9, struct.pack("<IQ", 9, 1) * 5000)),
        _gguf(1, _field(77, b"")),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        _gguf(0),
    ],
)  # fmt: skip
def test_a_gguf_file_that_is_cut_off_or_says_what_it_does_not_hold_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match="expected a complete GGUF file"):
        Encoder(EncoderSettings(source=str(tmp_path / "model.gguf")))
