"""Mistakes that people make with encoders of speech: each is explained in a sentence, and none with a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from confide.errors import UserError
from confide.recipe import parse
from confide.runs import folder
from confide.speech.parts import Parts

pytestmark = pytest.mark.usefixtures("no_figures_here")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


def document(place: Path, source: str, **encoder: Any) -> dict[str, Any]:
    people = {"kind": "population", "people": 3, "voices": 10, "words": ["one"], "cache": str(place / "p")}
    return {
        "task": {
            "kind": "speech", "corpus": {**people, "part": "train"}, "test": {**people, "part": "test"},
            "model": {"encoder": {"source": source, **encoder}}, "cache": str(place / "states"),
        },
        "sampling": {"kind": "fixed", "cohort": 2},
        "local": {"steps": 1, "learning_rate": 1.0},
        "bounding": {"rule": "normalise", "bound": 1},
        "central": {"kind": "sgd", "learning_rate": 5.0},
        "run": {"steps": 1},
    }  # fmt: skip


def _cut(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])


def _empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def _pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _write(name: str, **content: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        before = json.loads((path / name).read_text()) if (path / name).is_file() else {}
        (path / name).write_text(json.dumps({**before, **content}))

    return write


def _half_a_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def _change(number: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        tensors["encoder.layers.0.fc1.bias"][0] = number
        save_file(tensors, path / "model.safetensors")

    return change


_HEARS = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "padding_value": 0.0}
_MELS = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16_000, "feature_size": 40}
DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "half a file of weights": ("whisper", _cut, r"cannot read the weights of the encoder .*install the encoder again"),
    "half a file, wav2vec 2.0": ("wav2vec2", _cut, r"cannot read the weights of the encoder .*complete \*.safetensors"),
    "an empty file of weights": ("hubert", _empty, r"cannot read the weights of the encoder .*install"),
    "a pickle": ("whisper", _pickle, r"is a pickle, which can run code, and is refused"),
    "no weights": ("wavlm", _without("model.safetensors"), r"has no \*.safetensors; expected weights"),
    "no configuration": ("whisper", _without("config.json"), r"is not a model: it has no config.json"),
    "half a configuration": ("whisper", _half_a_config, r"config.json' is not a valid JSON file"),
    "another width": ("whisper", _write("config.json", d_model=32), r"size mismatch .*the complete weights"),
    "another width, HuBERT": ("hubert", _write("config.json", hidden_size=32), r"cannot read .*the complete weights"),
    "fewer blocks": ("whisper", _write("config.json", encoder_layers=1), r"Unexpected key.*the complete weights"),
    "telephone speech": (
        "wav2vec2", _write("preprocessor_config.json", sampling_rate=8000, **_HEARS),
        r"hears 8000 samples a second; expected 16000",
    ),
    "features of another model": (
        "whisper", _write("preprocessor_config.json", **_MELS),
        r"wants 80 mels \(config.json\), and its preprocessor_config.json makes 40; expected files of one model",
    ),
    "a weight that is not a number": ("whisper", _change(torch.nan), r"not finite came out.*install it again"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_explained(
    name: str, place: Path, tmp_path: Path, tiny_speech_model: Callable[[str], Path]
) -> None:
    family, damage, said = DAMAGES[name]
    source = shutil.copytree(tiny_speech_model(family), tmp_path / "encoder")
    damage(source)
    with pytest.raises(UserError, match=said):
        folder.train(parse(document(place, str(source))), tmp_path / "run", quiet=True)


SOURCES = {
    "/no/such/folder": r"it is no folder, no file and no preset; expected a transformers folder, one of whisper",
    "whisper-tiny-en": r"no encoder 'whisper-tiny-en': .*whisper-tiny.en, whisper-base",
    "minilm": r"minilm is one of text; expected one of speech, such as whisper-tiny.en",
    "openai/whisper-tiny": r"cannot fetch the encoder openai/whisper-tiny .*expected a network that reaches the hub",
    "FILE": r"model.safetensors is a file; expected the folder of a speech encoder",
    "TEXT": r"of type bert, which gives no frames; expected Whisper",
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_is_no_encoder_of_speech_is_explained(
    source: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_speech_model: Callable[[str], Path],
    tiny_model: Callable[..., Path],
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    made = {"FILE": tiny_speech_model("whisper") / "model.safetensors", "TEXT": tiny_model("masked")}
    with pytest.raises(UserError, match=SOURCES[source]):
        folder.train(parse(document(place, str(made.get(source, source)))), tmp_path / "run", quiet=True)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"train": []}, "at least 1 item"),
    ({"train": ["head", "loar"]}, "train.1.*'lora'"),
    ({"train": ["head", "head"]}, "head, head names a part twice; expected each once"),
    ({"train": ["head", "lora"], "first": 2}, "has 2 blocks, which count from 0; expected at most 1"),
    ({"train": ["head", "lora"], "rank": 17}, "rank=17: the smallest matrix of .* has rank 16 at most"),
]


@pytest.mark.parametrize(("encoder", "said"), SETTINGS)
def test_settings_that_the_encoder_has_no_place_for_are_explained(
    encoder: dict[str, Any], said: str, place: Path, tmp_path: Path, tiny_speech_model: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError) as raised:
        folder.train(parse(document(place, str(tiny_speech_model("whisper")), **encoder)), tmp_path / "run", quiet=True)
    assert re.search(said, str(raised.value), re.DOTALL), raised.value


@pytest.mark.parametrize(("part", "what"), [("lora", "matrices"), ("norms", "norms")])
def test_a_part_that_the_blocks_do_not_have_is_explained(
    part: str,
    what: str,
    place: Path,
    tmp_path: Path,
    tiny_speech_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Parts, "_found", lambda *_: iter(()))
    given = parse(document(place, str(tiny_speech_model("whisper")), train=["head", part]))
    with pytest.raises(UserError, match=f"train: {part} needs {what}, and the encoder .* has none"):
        folder.train(given, tmp_path / "run", quiet=True)
