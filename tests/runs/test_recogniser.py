"""A trained recogniser is scored and used from its run's folder alone."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
import typer
from pydantic import TypeAdapter
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import confide
from confide.commands import evaluate as evaluate_command
from confide.commands import transcribe as transcribe_command
from confide.errors import UserError
from confide.recipe import parse
from confide.runs import answering, folder
from confide.runs.corpus_choice import corpus_kinds
from confide.runs.evaluation import evaluate_speech
from confide.runs.export import export, open_onnx
from confide.runs.notes import read_notes, serialise
from confide.runs.parameters import load_parameters
from confide.runs.recogniser import language_of, load_recogniser
from confide.speech.corpora import CorpusSettings, read_corpus
from confide.speech.corpus import read_audio
from confide.speech.transcribe import windows
from confide.speech.voices import SyntheticSettings, synthetic_corpus

pytestmark = pytest.mark.usefixtures("no_figures_here")
RATE = 16_000
ARPA = "\\data\\\nngram 1={n}\nngram 2=1\n\n\\1-grams:\n{lines}\n\\2-grams:\n-1\t{first} {first}\n\n\\end\\\n"


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def call(*words: object) -> Called:
    """`confide ...`; the errors that the command line would print come as exceptions."""
    app = typer.Typer()
    app.command()(evaluate_command.evaluate)
    app.command()(transcribe_command.transcribe)
    result = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Called(result.return_value or result.exit_code, result.stdout, result.stderr)


@dataclass(frozen=True)
class Learned:
    """A run whose model knows what two speakers said by heart; their corpus is gone."""

    run: Path
    summary: dict[str, Any]
    corpus: Path  # a copy
    said: dict[str, np.ndarray]  # text to samples


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Learned:
    place = tmp_path_factory.mktemp("use")
    settings = SyntheticSettings(
        population="seed", speakers=2, utterances=2, sentences="digits", digits=(2, 3), cache=place / "voices"
    )
    said, original = {}, place / "original"
    for utterance in synthetic_corpus(settings, quiet=True).utterances():
        home = original / utterance.speaker
        home.mkdir(parents=True, exist_ok=True)
        said[utterance.text] = read_audio(utterance)
        soundfile.write(home / f"{utterance.id}.flac", said[utterance.text], RATE)
        (home / f"{utterance.id}.txt").write_text(utterance.text)
    assert len(said) == 4
    shutil.copytree(original, place / "copy")
    corpus = {"kind": "folder", "folder": str(original)}
    document: dict[str, Any] = {
        "task": {
            "kind": "speech", "corpus": corpus, "test": corpus, "pool": 1, "augment": None,
            "cache": str(place / "features"),
            "model": {"layers": 1, "width": 32, "mlp": 64, "heads": 2, "cape_shift": 0},
        },
        "sampling": {"kind": "fixed", "cohort": 1},
        "local": {"steps": 1, "learning_rate": 1.0},
        "bounding": {"rule": "none"},
        "central": {"kind": "adam", "learning_rate": 0.01},
        "evaluation": {"every": 1000},
        "run": {"steps": 100, "checkpoint_every": 1000},
    }  # fmt: skip
    summary = folder.train(parse(document), place / "run", quiet=True)
    shutil.rmtree(original)
    return Learned(place / "run", summary, place / "copy", said)


@pytest.fixture
def files(learned: Learned, tmp_path: Path) -> dict[str, Path]:
    """One recording in many forms; and what is no recording."""
    text, samples = next(iter(learned.said.items()))
    forms = {
        "plain.wav": (samples, RATE),
        "stereo.flac": (np.stack([samples, samples], axis=1), RATE),
        "fast.wav": (soxr.resample(samples, RATE, 44_100), 44_100),
        "phone.wav": (soxr.resample(samples, RATE, 8000), 8000),
        "coded.mp3": (soxr.resample(samples, RATE, 32_000), 32_000),
        "silent.wav": (np.zeros(RATE), RATE),
        "instant.wav": (samples[:50], RATE),
        "zero.wav": (np.zeros(0), RATE),
    }
    for name, (values, rate) in forms.items():
        soundfile.write(tmp_path / name, values, rate)
    whole = (tmp_path / "stereo.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.wav").touch()
    (tmp_path / "story.mp3").write_text(f"this is not audio: {text}")
    return {path.name: path for path in tmp_path.iterdir()}


# Loading


def test_the_language_of_a_corpus_follows_from_its_settings_alone(learned: Learned, tmp_path: Path) -> None:
    assert language_of(SyntheticSettings(language="fr")) == "fr"
    without = {kind for kind, model in corpus_kinds().items() if "language" not in model.model_fields}
    assert without == {"librispeech", "an4", "audiomnist", "fsdd", "speech_commands"}  # English, all of them
    given: Any = {"kind": "folder", "folder": learned.corpus, "language": "de"}
    settings: CorpusSettings = TypeAdapter(CorpusSettings).validate_python(given)
    assert language_of(settings) == read_corpus(settings).language == "de"


def test_a_run_that_is_not_finished_has_no_model_to_use(learned: Learned, tmp_path: Path) -> None:
    shutil.copy(learned.run / folder.RECIPE, tmp_path)
    with pytest.raises(UserError, match="not finished; go on with `confide resume"):
        load_recogniser(tmp_path)
    with pytest.raises(UserError, match="holds no run"):
        load_recogniser(tmp_path / "elsewhere")


def test_a_models_file_says_what_it_hears_and_writes_and_that_it_promises_nothing(learned: Learned) -> None:
    about = read_notes(learned.run / folder.MODEL)
    recogniser = load_recogniser(learned.run)
    assert tuple(json.loads(about["tokens"])) == recogniser.tokens.names
    assert (about["sample_rate"], about["language"], about["epsilon"]) == ("16000", "en", "null")
    assert json.loads(about["architecture"])["model"]["width"] == 32
    assert str(learned.corpus.parent) not in json.dumps(about)


def test_a_file_from_before_there_were_notes_is_read_all_the_same(learned: Learned, tmp_path: Path) -> None:
    shutil.copy(learned.run / folder.RECIPE, tmp_path)
    save_file(load_file(learned.run / folder.MODEL), tmp_path / folder.MODEL)
    assert read_notes(tmp_path / folder.MODEL) == {}
    old, new = load_recogniser(tmp_path), load_recogniser(learned.run)
    assert all(torch.equal(old.parameters[name], tensor) for name, tensor in new.parameters.items())


def test_the_notes_of_a_file_are_in_one_order_so_that_equal_models_are_equal_bytes() -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2)}
    notes = {name: name.upper() for name in ("zeta", "alpha", "encoder", "é", "task")}
    content = serialise(tensors, notes)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == sorted([*notes, "format"])
    found = load_tensors(content)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_damaged_model_is_refused(learned: Learned, tmp_path: Path) -> None:
    shutil.copy(learned.run / folder.RECIPE, tmp_path)
    (tmp_path / folder.MODEL).write_bytes((learned.run / folder.MODEL).read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read as a model"):
        load_recogniser(tmp_path)


def test_a_model_that_does_not_fit_its_recipe_is_refused(learned: Learned, tmp_path: Path) -> None:
    shutil.copy(learned.run / folder.MODEL, tmp_path)
    changed = (learned.run / folder.RECIPE).read_text().replace("width: 32", "width: 64")
    (tmp_path / folder.RECIPE).write_text(changed)
    with pytest.raises(UserError, match="does not fit"):
        load_recogniser(tmp_path)
    shapes = {name: tuple(t.shape) for name, t in load_recogniser(learned.run).parameters.items()}
    del shapes["norm.scale"]
    with pytest.raises(UserError, match=r"norm\.scale should be nothing but \(32,\) was found"):
        load_parameters(learned.run, shapes)


# Evaluating


def test_evaluating_needs_no_training_corpus_and_agrees_with_the_runs_own_figures(learned: Learned) -> None:
    found = call("evaluate", learned.run, "--set", f"folder={learned.corpus}", "--json").document
    assert found["wer"]["percent"] == learned.summary["metrics"]["wer"] == 0
    assert found["cer"]["percent"] == learned.summary["metrics"]["cer"] == 0
    assert (found["utterances"], found["words"]) == (4, sum(len(text.split()) for text in learned.said))
    assert found["decoder"] == "greedy"
    with pytest.raises(UserError, match="is no folder"):
        call("evaluate", learned.run)


def test_rates_are_counted_over_the_corpus_and_over_each_speaker(learned: Learned, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(learned.corpus, corpus)
    worst, best = sorted(home.name for home in corpus.iterdir())
    wrong = 0
    for path in sorted((corpus / worst).glob("*.txt")):
        wrong += 1
        path.write_text(path.read_text() + " never")  # a word that was not said
    found = call("evaluate", learned.run, "--corpus", "folder", "--set", f"folder={corpus}", "--json").document
    assert [speaker["name"] for speaker in found["speakers"]] == [worst, best]
    assert sum(speaker["words"] for speaker in found["speakers"]) == found["words"] == found["wer"]["total"]
    assert found["wer"]["errors"] == wrong == 2
    assert found["wer"]["percent"] == pytest.approx(100 * wrong / found["words"])
    assert found["speakers"][0]["wer"] == pytest.approx(100 * wrong / found["speakers"][0]["words"])
    assert found["speakers"][0]["cer"] == pytest.approx(
        100 * 12 / sum(len(p.read_text()) for p in (corpus / worst).glob("*.txt"))
    )
    assert found["speakers"][1]["wer"] == 0
    assert found["wer"]["low"] == 0 <= found["wer"]["percent"] <= found["wer"]["high"] == found["speakers"][0]["wer"]


def test_what_cannot_be_evaluated_is_counted_by_reason_and_named(learned: Learned, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(learned.corpus, corpus)
    home = next(corpus.iterdir())
    broken = {"a": b"", "b": b"no audio at all"}
    for name, content in broken.items():
        (home / f"{name}.wav").write_bytes(content)
        (home / f"{name}.txt").write_text("one")
    soundfile.write(home / "c.wav", np.zeros(RATE // 5), RATE)
    (home / "c.txt").write_text("a text that is much too long for a fifth of a second")
    words = ["evaluate", learned.run, "--corpus", "folder", "--set", f"folder={corpus}"]
    found = call(*words, "--json").document
    assert found["utterances"] == 4
    assert found["skipped"] == {"no samples": 1, "undecodable": 1, "label too long": 1}
    assert {Path(item["id"]).name for item in found["skipped_utterances"]} == {"a", "b", "c"}
    shown = call(*words).out
    assert "3 utterances skipped (" in shown
    assert "1 label too long" in shown


def test_the_screen_shows_the_worst_and_the_best_of_many_speakers(learned: Learned, tmp_path: Path) -> None:
    text, samples = max(learned.said.items(), key=lambda item: len(item[1]))  # it has to hold ten more letters
    for number in range(11):
        (tmp_path / f"s{number:02}").mkdir()
        soundfile.write(tmp_path / f"s{number:02}" / "u.wav", samples, RATE)
        (tmp_path / f"s{number:02}" / "u.txt").write_text(text + " a" * number)
    out = call("evaluate", learned.run, "--corpus", "folder", "--set", f"folder={tmp_path}").out
    assert re.findall(r"s\d\d", out) == ["s10", "s09", "s08", "s07", "s03", "s02", "s01", "s00"]
    assert "... 3 more ..." in out
    assert "11 speakers, 11 utterances" in out


def test_a_corpus_in_another_language_is_refused_before_it_is_read(learned: Learned) -> None:
    with pytest.raises(UserError, match="is in 'fr' and the model writes 'en'"):
        call("evaluate", learned.run, "--corpus", "common_voice", "--set", "language=fr", "--set", "folder=nowhere")
    corpus = read_corpus(TypeAdapter(CorpusSettings).validate_python({"kind": "folder", "folder": learned.corpus}))
    from dataclasses import replace

    with pytest.raises(UserError, match="is in 'de'"):
        evaluate_speech(load_recogniser(learned.run), replace(corpus, language="de"), quiet=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--corpus", "foldr"], "did you mean 'folder'"),
        (["--corpus", "folder"], "folder: required"),
        (["--set", "subset=test"], "subset: there is no such key"),
        (["--set", "folder"], "not of the form key=value"),
        (["--language-model", "missing.arpa"], "there is no file missing.arpa"),
    ],
)
def test_mistakes_in_the_corpus_are_explained(learned: Learned, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        call("evaluate", learned.run, *words)


def test_a_run_of_another_task_is_evaluated_by_its_task(tiny: str, tmp_path: Path) -> None:
    from confide.recipe import load

    summary = folder.train(load(tiny, ["privacy={mechanism: none}"]), tmp_path / "run", quiet=True)
    found = call("evaluate", tmp_path / "run", "--json").document
    assert found == {"task": "convex/quadratics", "run": str(tmp_path / "run"), "metrics": summary["metrics"]}
    assert f"{next(iter(summary['metrics']))}: " in call("evaluate", tmp_path / "run").out
    with pytest.raises(UserError, match="are for speech"):
        call("evaluate", tmp_path / "run", "--corpus", "an4")
    with pytest.raises(UserError, match="holds a run of convex/quadratics"):
        call("transcribe", tmp_path / "run", "any.wav")


# Transcribing


def test_words_come_with_times_and_confidences(learned: Learned, files: dict[str, Path]) -> None:
    (only,) = call("transcribe", learned.run, files["plain.wav"], "--json").document["files"]
    words = [word for segment in only["segments"] for word in segment["words"]]
    assert [word["word"] for word in words] == next(iter(learned.said)).split()
    assert all(0 <= word["start"] < word["end"] <= only["seconds"] for word in words)
    assert all(0.5 < word["confidence"] <= 1 for word in words)  # learned by heart
    shown = call("transcribe", learned.run, files["plain.wav"], "--format", "words").out
    assert [line.split("\t")[3] for line in shown.splitlines()] == [word["word"] for word in words]


def test_a_stream_ends_with_the_transcript_of_the_whole(
    learned: Learned, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, samples = next(iter(learned.said.items()))
    (only,) = call("transcribe", learned.run, files["plain.wav"], "--stream", "--json").document["files"]
    assert only["text"] == text
    assert only["partials"][-1]["final"] == ""  # shorter than a window: nothing was final before the end
    raw = io.BytesIO((samples * 32767).astype("<i2").tobytes())
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": raw}))
    pieces = np.concatenate(list(transcribe_command._chunks(Path("-"))))
    np.testing.assert_allclose(pieces, samples, atol=1e-4)
    assert call("transcribe", learned.run, files["plain.wav"], "--stream").out.splitlines()[-1] == text
    with pytest.raises(UserError, match="drop --format and --out"):
        call("transcribe", learned.run, files["plain.wav"], "--stream", "--out", tmp_path)


def test_python_and_the_page_hear_what_the_command_hears(learned: Learned, files: dict[str, Path]) -> None:
    text, samples = next(iter(learned.said.items()))
    assert confide.transcribe(learned.run, files["plain.wav"]).text == text
    assert confide.transcribe(str(learned.run), samples).text == text
    answer = answering.heard(learned.run, files["stereo.flac"].read_bytes(), "x.FLAC")
    assert (answer["text"], len(answer["segments"][0]["words"])) == (text, len(text.split()))
    with pytest.raises(UserError, match="cannot be read as a recording"):
        confide.transcribe(learned.run, files["story.mp3"])
    with pytest.raises(UserError, match=r"expected one of \.flac"):
        answering.heard(learned.run, b"", "notes.txt")


def test_its_onnx_file_gives_the_same_transcripts(learned: Learned, files: dict[str, Path], tmp_path: Path) -> None:
    """Read by somebody who has nothing but the file: tokens are in its metadata."""
    export(learned.run, tmp_path / "model.onnx", recordings=[files["plain.wav"], files["coded.mp3"]])
    session = open_onnx(tmp_path / "model.onnx")
    names = json.loads(session.get_modelmeta().custom_metadata_map["tokens"])
    for text, samples in learned.said.items():
        (found,) = session.run(None, {"samples": samples.astype(np.float32)})
        best = found.argmax(axis=1)
        kept = [token for token, before in zip(best, [0, *best], strict=False) if token not in (0, before)]
        assert "".join(names[token] for token in kept).replace("|", " ").split() == text.split()
    with pytest.raises(UserError, match="expected a recording that can be read"):
        export(learned.run, tmp_path / "other.onnx", recordings=[files["story.mp3"]])


@pytest.mark.parametrize("name", ["plain.wav", "stereo.flac", "fast.wav", "coded.mp3"])
def test_rate_channels_and_coding_do_not_change_the_words(learned: Learned, files: dict[str, Path], name: str) -> None:
    found = call("transcribe", learned.run, files[name])
    assert (found.code, found.out.strip()) == (0, next(iter(learned.said)))
    assert "times real time" in found.err


def test_a_recording_at_8_khz_is_taken_for_as_long_as_it_lasts(learned: Learned, files: dict[str, Path]) -> None:
    words = ["transcribe", learned.run, files["phone.wav"], files["plain.wav"], "--json"]
    phone, plain = call(*words).document["files"]
    assert phone["seconds"] == pytest.approx(plain["seconds"], abs=2e-3)
    assert phone["segments"][-1]["end"] <= phone["seconds"]


@pytest.mark.parametrize("name", ["silent.wav", "instant.wav"])
def test_silence_and_an_instant_give_an_empty_transcript(learned: Learned, files: dict[str, Path], name: str) -> None:
    found = call("transcribe", learned.run, files[name], "--json")
    assert found.code == 0
    assert found.document["files"][0]["text"] == ""
    assert found.document["files"][0]["segments"] == []


def test_broken_files_get_a_line_each_and_the_others_are_transcribed(
    learned: Learned, files: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "zero.wav": "no samples",
        "empty.wav": "no samples",
        "story.mp3": "undecodable",
        "cut.flac": "truncated",
        "gone.wav": "missing",
    }
    paths = [files.get(name, Path("gone.wav")) for name in bad]
    found = call("transcribe", learned.run, paths[0], files["plain.wav"], *paths[1:], files["stereo.flac"])
    text = next(iter(learned.said))
    assert found.code == 2
    assert found.out == f"==> {files['plain.wav']} <==\n{text}\n==> {files['stereo.flac']} <==\n{text}\n"
    lines = found.err.splitlines()
    assert [line.partition(": ")[0] for line in lines[:-1]] == [str(path) for path in paths]
    assert all(reason in line for reason, line in zip(bad.values(), lines, strict=False))
    assert capfd.readouterr().err == ""  # nor does a library write past Python

    found = call("transcribe", learned.run, paths[0], files["plain.wav"], "--json")
    assert found.code == 2
    assert [item["text"] for item in found.document["files"]] == [text]
    assert [item["file"] for item in found.document["failed"]] == [str(paths[0])]


def test_only_broken_files_leave_nothing_on_standard_output(learned: Learned, files: dict[str, Path]) -> None:
    found = call("transcribe", learned.run, files["zero.wav"])
    assert (found.code, found.out) == (2, "")
    assert len(found.err.splitlines()) == 1


def test_a_long_recording_is_heard_window_by_window_with_its_times(learned: Learned, tmp_path: Path) -> None:
    once = np.concatenate(list(learned.said.values()))
    samples = np.tile(once, 1 + 60 * RATE // len(once))
    soundfile.write(tmp_path / "long.wav", samples, RATE, subtype="FLOAT")
    (only,) = call("transcribe", learned.run, tmp_path / "long.wav", "--format", "json").document["files"]
    recogniser, heard = load_recogniser(learned.run), []
    for begin, end in windows(samples, 25.0):
        assert end - begin <= 25 * RATE
        piece = recogniser.transcribe(samples[begin:end])
        heard.append(piece.text)
    assert len(heard) >= 3
    assert only["text"] == " ".join(heard)
    assert only["segments"][-1]["end"] == pytest.approx(begin / RATE + piece.segments[-1].end, abs=1e-3)
    assert only["seconds"] == pytest.approx(len(samples) / RATE, abs=1e-3)


@pytest.mark.parametrize("form", ["text", "json", "srt"])
def test_transcripts_are_written_beside_each_other(
    learned: Learned, files: dict[str, Path], tmp_path: Path, form: str
) -> None:
    out = tmp_path / "deep" / "out"
    words = ["transcribe", learned.run, files["plain.wav"], files["zero.wav"], files["silent.wav"], "--format", form]
    found = call(*words, "--out", out)
    ending = "txt" if form == "text" else form
    assert found.code == 2
    assert sorted(path.name for path in out.iterdir()) == [f"plain.{ending}", f"silent.{ending}"]
    content, text = (out / f"plain.{ending}").read_text(), next(iter(learned.said))
    if form == "json":
        assert json.loads(content)["text"] == text
    else:
        assert text in content
    assert ("-->" in content) == (form == "srt")
    assert found.out.splitlines() == [str(out / f"plain.{ending}"), str(out / f"silent.{ending}")]


def test_nothing_is_ever_written_over(learned: Learned, files: dict[str, Path], tmp_path: Path) -> None:
    home = next(learned.corpus.iterdir())
    audio = next(home.glob("*.flac"))
    before = audio.with_suffix(".txt").read_text()
    with pytest.raises(UserError, match="is there already and was not touched"):
        call("transcribe", learned.run, audio, "--out", home)
    assert audio.with_suffix(".txt").read_text() == before
    (tmp_path / "other").mkdir()
    shutil.copy(files["plain.wav"], tmp_path / "other")
    with pytest.raises(UserError, match="would both be written to"):
        call("transcribe", learned.run, files["plain.wav"], tmp_path / "other" / "plain.wav", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="cannot be made"):
        call("transcribe", learned.run, files["plain.wav"], "--out", files["empty.wav"])


def test_subtitles_of_several_recordings_need_a_folder(learned: Learned, files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="--out"):
        call("transcribe", learned.run, files["plain.wav"], files["stereo.flac"], "--format", "srt")
    shown = call("transcribe", learned.run, files["plain.wav"], "--format", "srt").out
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n", shown)


def test_a_language_model_decides_which_words_can_be_heard(
    learned: Learned, files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flashlight.lib.text", reason="beam search needs flashlight-text")
    text = next(iter(learned.said))
    known = sorted(set(text.split()))
    lines = "".join(f"-1\t{word}\t-0.3\n" for word in ("<s>", "</s>", "<unk>", *known))
    path = tmp_path / "digits.arpa"
    path.write_text(ARPA.format(n=len(known) + 3, lines=lines, first=known[0]))
    found = call("transcribe", learned.run, files["plain.wav"], "--language-model", path, "--json").document
    assert found["files"][0]["text"] == text
    assert found["decoder"] == "beam search with a language model"
    assert capfd.readouterr().err == ""
    words = ["evaluate", learned.run, "--set", f"folder={learned.corpus}", "--json", "--language-model", path]
    scores = call(*words).document
    unknown = sum(word not in known for said in learned.said for word in said.split())
    assert scores["wer"]["errors"] >= unknown > 0


def test_the_commands_do_not_load_what_help_does_not_need(run_python: Callable[[str], str]) -> None:
    modules = "confide.commands.evaluate, confide.commands.transcribe"
    loaded = run_python(f"import sys, {modules}; print('torch' in sys.modules, 'jiwer' in sys.modules)")
    assert loaded.split() == ["False", "False"]


@pytest.fixture
def run_python() -> Callable[[str], str]:
    import subprocess
    import sys

    def run(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    return run
