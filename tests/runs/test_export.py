"""A model's ONNX file answers as the model does, at any length, and says for itself what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.encoders.frames import FrameEncoder
from confide.encoders.graph import Normalised, WhisperFeatures
from confide.errors import UserError
from confide.recipe import load
from confide.runs import export, folder, publish
from confide.speech.features import FeatureSettings, log_mel
from confide.speech.graph import LogMelGraph

pytestmark = pytest.mark.usefixtures("no_figures_here")
Command = Callable[..., tuple[int, str, str]]
LeftRun = Callable[[Path, dict[str, Any]], Path]


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.1, size=samples).astype(np.float32)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Path:
    place = tmp_path_factory.mktemp("digits") / "run"
    folder.train(load("convex/digits", ["run.steps=5", "privacy.source=system"]), place, quiet=True)
    return place


# Features


@pytest.mark.parametrize("changes", [{}, {"mels": 40, "step": 0.0125, "normalise": False, "pre_emphasis": 0.0}])
@pytest.mark.parametrize("samples", [400, 5_001, 33_333])
def test_the_graphs_log_mel_is_the_programs(changes: dict[str, Any], samples: int) -> None:
    settings = FeatureSettings(**changes)
    sound = noise(samples) * np.linspace(0, 1, samples, dtype=np.float32)
    found = LogMelGraph(settings)(torch.from_numpy(sound))[0].numpy()
    np.testing.assert_allclose(found, log_mel(sound, settings), atol=2e-3)
    other = log_mel(sound, FeatureSettings(**{**changes, "highest": 7000.0}))
    assert np.abs(found - other).max() > 0.05  # the claim can fail


@pytest.mark.parametrize("family", ["whisper", "wav2vec2", "wav2vec2-stable"])
def test_the_graphs_features_are_those_of_the_encoders_extractor(
    tiny_speech_model: Callable[[str], Path], family: str
) -> None:
    extractor = FrameEncoder(str(tiny_speech_model(family))).extractor
    made = WhisperFeatures(extractor) if family == "whisper" else Normalised(extractor)
    for samples in (4_000, 12_345):
        wanted = extractor(noise(samples), sampling_rate=16_000, padding=False, truncation=False, return_tensors="pt")
        found = made(torch.from_numpy(noise(samples)))
        torch.testing.assert_close(found, next(iter(wanted.values())), atol=1e-4, rtol=1e-4)


# Files


def test_a_classifiers_file_answers_as_the_model_and_holds_its_notes(digits: Path, tmp_path: Path) -> None:
    made = export.export(digits, tmp_path / "a" / "digits.onnx")
    session = export.open_onnx(tmp_path / "a" / "digits.onnx")
    assert session.get_modelmeta().custom_metadata_map == made["notes"]
    assert json.loads(made["notes"]["epsilon"]) == folder.summary_of(digits)["epsilon"]
    assert (made["notes"]["for_release"], made["inputs"]) == ("true", {"features": ["examples", 64]})
    given = np.random.default_rng(0).random((7, 64), dtype=np.float32)
    (found,) = session.run(None, {"features": given})
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, atol=1e-5)
    publish.publish(digits, tmp_path / "public")
    published = export.export(tmp_path / "public", tmp_path / "public.onnx")
    assert published["notes"] == made["notes"]
    np.testing.assert_array_equal(export.open_onnx(tmp_path / "public.onnx").run(None, {"features": given})[0], found)
    with pytest.raises(UserError, match="there already and was not touched"):
        export.export(digits, tmp_path / "public.onnx")


def test_a_file_that_answers_otherwise_is_not_written(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = export._logistic

    def wrong(run: Path, source: str | None) -> export.Graph:
        graph = straight(run, source)
        right = graph.module.get_buffer("bias")
        graph.module.register_buffer("bias", right + torch.arange(len(right)) / 100)
        return graph

    monkeypatch.setattr(export, "_logistic", wrong)
    with pytest.raises(UserError, match="nothing was written"):
        export.export(digits, tmp_path / "digits.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_was_written_and_whether_it_may_leave(
    command: Command, tmp_path: Path, digits: Path, tiny: str
) -> None:
    code, out, _ = command("export", digits, "--out", tmp_path / "digits.onnx")
    assert code == 0
    assert "from features (examples, 64) to log_probabilities" in out
    assert "must not leave" not in out
    folder.train(load(tiny), tmp_path / "quadratics", quiet=True)
    code, _, err = command("export", tmp_path / "quadratics", "--out", tmp_path / "q.onnx")
    assert (code, "whose model answers nothing by itself" in err) == (2, True)
    code, _, err = command("export", digits, "--out", tmp_path / "x.onnx", "--check", "a.wav")
    assert (code, "which hears nothing" in err) == (2, True)


def test_a_whole_recogniser_takes_samples_of_any_length(tmp_path: Path, left_run: LeftRun) -> None:
    run = left_run(tmp_path / "run", {"model": {"layers": 1, "width": 16, "mlp": 32, "heads": 2}})
    made = export.export(run, tmp_path / "model.onnx")
    assert made["difference"] < 1e-3
    assert len(made["checked"]) == 3
    session = export.open_onnx(tmp_path / "model.onnx")
    least = int(made["notes"]["least_samples"])
    shapes = [session.run(None, {"samples": noise(n)})[0].shape for n in (least, 16_000, 50_000)]
    assert shapes == [(1, 30), (32, 30), (103, 30)]
    assert made["notes"]["for_release"] == "false"


# Encoders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("whisper", ["head", "lora"]), ("wav2vec2-stable", ["head"]), ("wavlm", ["head", "norms"]),
        ("moonshine", ["head", "adapter"]),
    ],
)  # fmt: skip
def test_a_head_is_written_with_its_frozen_encoder(
    tiny_speech_model: Callable[[str], Path], tmp_path: Path, left_run: LeftRun, family: str, train: list[str]
) -> None:
    parts = {"train": train, **({"rank": 2} if "lora" in train else {})}
    run = left_run(tmp_path / "run", {"model": {"encoder": {"source": str(tiny_speech_model(family)), **parts}}})
    made = export.export(run, tmp_path / "model.onnx")
    assert made["difference"] < 1e-3
    assert str(tiny_speech_model(family)) not in (tmp_path / "model.onnx").read_bytes().decode("latin-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "output"),
    [
        ("causal", {"method": "head"}, "log_probabilities"),
        ("masked", {"method": "adapter_head", "experts": {"clusters": 2, "active": 2}}, "log_probabilities"),
        ("masked", {"method": "adapter_search", "search": {"normalise": True}}, "vector"),
    ],
)
def test_a_retriever_is_written_with_its_frozen_encoder(
    tiny_model: Callable[..., Path], tmp_path: Path, left_run: LeftRun, kind: str, more: dict[str, Any], output: str
) -> None:
    pooling = "last" if kind == "causal" else "mean"
    task = {
        "kind": "retrieval", "encoder": {"source": str(tiny_model(kind)), "pooling": pooling, "max_tokens": 16},
        "data": {"kind": "embedded", "documents": 6, "queries_per_document": 6, "households": 3},
        "cache": str(tmp_path / "states"), **more,
    }  # fmt: skip
    run = left_run(tmp_path / "run", task)
    made = export.export(run, tmp_path / "model.onnx")
    assert (made["output"], made["difference"] < 1e-3) == (output, True)
    assert [shape[0] for shape in made["checked"]] == [1, 1, 2]  # the last text has two windows
