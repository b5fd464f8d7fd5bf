"""A model on a frozen encoder after its training: evaluated, used, published, tried on the page; never on another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import confide
from confide.encoders.frames import FrameEncoder
from confide.encoders.weights import encoders_folder
from confide.errors import UserError
from confide.recipe import parse
from confide.runs import folder
from confide.runs.publish import publish
from confide.runs.recogniser import load_recogniser
from confide.speech.settings import SpeechSettings
from confide.speech.task import Speech
from confide.ui.shelf import Shelf

pytestmark = pytest.mark.usefixtures("no_figures_here")
Command = Callable[..., tuple[int, str, str]]


def people(place: Path, part: str, number: int) -> dict[str, Any]:
    return {
        "kind": "population", "part": part, "people": number, "voices": 10, "words": ["one"], "cache": str(place / "p"),
    }  # fmt: skip


def document(place: Path, source: object, **encoder: Any) -> dict[str, Any]:
    return {
        "task": {
            "kind": "speech", "corpus": people(place, "train", 6), "test": people(place, "test", 3),
            "model": {"encoder": {"source": str(source), **encoder}}, "cache": str(place / "states"),
        },
        "sampling": {"kind": "poisson", "cohort": 3},
        "local": {"steps": 1, "learning_rate": 1.0},
        "bounding": {"rule": "normalise", "bound": 1},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": 1, "delta": 1e-3, "source": "system"},
        "central": {"kind": "sgd", "learning_rate": 5.0, "schedule": {"kind": "linear", "steps": 2}},
        "run": {"steps": 2},
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("uses")
    sound = np.random.default_rng(0).normal(size=(9_000, 1)) * 0.1
    soundfile.write(made / "said.wav", sound, 16_000)
    return made


PARTS: dict[str, dict[str, Any]] = {
    "head": {},
    "hidden": {"hidden": 8},
    "lora": {"train": ["head", "lora"], "rank": 2},
    "adapter": {"train": ["head", "adapter"], "first": 1},
    "norms": {"train": ["head", "norms"]},
    "all": {"train": ["head", "all"], "first": 1},
    "parts": {"train": ["head", "lora", "adapter", "norms"], "first": 1, "rank": 2},
}
FAMILIES = {
    "head": "whisper",
    "hidden": "whisper",
    "lora": "wav2vec2",
    "adapter": "hubert",
    "norms": "wavlm",
    "all": "whisper",
    "parts": "moonshine",
}
"""What is trained, and the family of the encoder."""


@pytest.fixture(scope="module", params=PARTS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def encoder(kind: str, place: Path, tiny_speech_model: Callable[[str], Path]) -> Path:
    family = FAMILIES[kind]
    made = place / f"encoder-{family}"
    return made if made.is_dir() else shutil.copytree(tiny_speech_model(family), made)


@pytest.fixture(scope="module")
def other(place: Path, encoder: Path) -> Path:
    """An encoder of the same shape with another number in it."""
    made = place / f"other-{encoder.name}"
    if not made.is_dir():
        shutil.copytree(encoder, made)
        tensors = load_file(made / "model.safetensors")
        tensors[min(tensors)].view(-1)[0] += 1e-3
        save_file(tensors, made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def run(kind: str, place: Path, encoder: Path) -> Path:
    made: Path = place / kind
    folder.train(parse(document(place, encoder, **PARTS[kind])), made, quiet=True)
    return made


@pytest.fixture(scope="module")
def published(run: Path) -> Path:
    out = run.parent / f"{run.name}-published"
    publish(run, out)
    return out


def test_a_run_holds_what_was_trained_and_nothing_else(run: Path, kind: str) -> None:
    marks = {"head": "head.", "lora": ".lora_", "adapter": "adapter.", "norms": "norm", "all": "blocks."}
    marks["hidden"] = "hidden."
    wanted = [*PARTS[kind].get("train", ["head"]), *(["hidden"] if kind == "hidden" else [])]
    names = list(load_file(run / folder.MODEL))
    assert all(any(marks[part] in name for name in names) for part in wanted)
    assert all(any(marks[part] in name for part in wanted) for name in names if not name.startswith("norm."))


def test_what_is_published_holds_no_encoder_and_says_which_one_it_needs(published: Path, encoder: Path) -> None:
    digest = FrameEncoder(str(encoder)).identity
    with safe_open(published / folder.MODEL, framework="pt") as file:
        assert digest.startswith(file.metadata()["encoder"])
        assert not [name for name in file.keys() if "conv" in name]  # noqa: SIM118
    card = (published / "README.md").read_text()
    assert f"a frozen encoder, which was a folder of the owner's, whose digest begins with {digest[:16]}" in card
    assert str(encoder) not in "".join(path.read_text(errors="replace") for path in published.iterdir())


def test_what_is_published_is_used_elsewhere_with_the_encoder_from_where_it_is(
    published: Path, run: Path, encoder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    recording = run.parent / "said.wav"
    code, out, err = command("transcribe", published, recording, "--encoder", encoder)
    assert code == 0, err
    assert out == command("transcribe", run, recording)[1]
    found = confide.evaluate(published, encoder=str(encoder))
    assert found["wer"]["percent"] == pytest.approx(confide.load(run).metrics["wer"])


def test_without_the_place_of_the_encoder_what_is_published_asks_for_it(published: Path, command: Command) -> None:
    for words in (("transcribe", published, "said.wav"), ("evaluate", published)):
        code, _, err = command(*words)
        assert code == 2
        assert "was published without the place of its frozen encoder" in err
        assert "expected --encoder" in err


def test_another_encoder_is_refused_wherever_it_is_named(published: Path, run: Path, other: Path, place: Path) -> None:
    for used in (published, run):
        with pytest.raises(UserError, match="was trained on an encoder with the digest"):
            load_recogniser(used, encoder=str(other))
    given = document(place, other, **PARTS[run.name])["task"] | {"start": run}
    with pytest.raises(UserError, match="a head means nothing on another encoder's states"):
        Speech(SpeechSettings.model_validate(given), 0, quiet=True).starting_parameters()


def test_a_preset_that_is_not_installed_is_named_with_its_command(
    run: Path, encoder: Path, place: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    held = (tmp_path / "run" / folder.RECIPE).read_text().replace(str(encoder), "whisper-tiny.en")
    (tmp_path / "run" / folder.RECIPE).write_text(held)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = command("transcribe", tmp_path / "run", place / "said.wav")
    assert code == 2
    assert "is not installed" in err
    assert "run confide encoder get whisper-tiny.en" in err
    assert str(encoders_folder()) in err


def test_an_encoder_for_a_model_that_has_none_is_refused(tiny: str, tmp_path: Path, command: Command) -> None:
    confide.train(tiny, tmp_path / "run")
    code, _, err = command("evaluate", tmp_path / "run", "--encoder", "whisper-tiny.en")
    assert code == 2
    assert "--encoder are for speech; drop them" in err


def test_the_page_tries_it_and_its_report_is_written(run: Path, published: Path, encoder: Path) -> None:
    shelf = Shelf(run.parent)
    said = shelf.transcribe(run.name, (run.parent / "said.wav").read_bytes(), "said.wav")
    assert said["seconds"] == pytest.approx(9_000 / 16_000, abs=0.001)
    assert "simulated speaker" in shelf.report(run.name)
    assert run.name in {row["name"] for row in shelf.listing()}
    with pytest.raises(UserError, match="expected --encoder"):
        shelf.transcribe(published.name, (run.parent / "said.wav").read_bytes(), "said.wav")


def test_the_summary_and_the_ledger_name_the_encoder(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert "the encoder" in summary["inputs"]
