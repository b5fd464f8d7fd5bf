"""`confide corpus`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from confide.commands.corpus import app
from confide.errors import UserError


def call(*words: object) -> str:
    """Standard output; the errors that the command line would print come as exceptions."""
    result = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Three speakers, one of whose files breaks off."""
    root = tmp_path / "own"
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, 16_000)
    for speaker, count in (("ann", 1), ("bob", 2), ("eve", 3)):
        (root / speaker).mkdir(parents=True)
        for number in range(count):
            soundfile.write(root / speaker / f"{number}.flac", noise, 16_000)
            (root / speaker / f"{number}.txt").write_text("three short words")
    broken = root / "eve" / "0.flac"
    broken.write_bytes(broken.read_bytes()[:10_000])
    (root / "eve" / "1.txt").write_text("")
    return root


def test_statistics_are_printed_and_what_is_skipped_is_named(own: Path) -> None:
    out = call("stats", "folder", "--folder", own)
    assert "own: 3 speakers" in out
    assert "5 utterances used, 1 skipped (1 empty text)" in out
    assert "skipped eve/1: empty text" in out


def test_a_thorough_look_finds_files_that_break_off(own: Path) -> None:
    out = call("stats", "folder", "--folder", own, "--thorough", "--skipped", 1)
    assert "4 utterances used, 2 skipped (1 empty text, 1 truncated)" in out
    assert "1 more were skipped; --json names all of them" in out


def test_json_is_one_document_with_every_skipped_utterance(own: Path) -> None:
    document = json.loads(call("stats", "folder", "--folder", own, "--json"))
    assert document["speakers"] == 3
    assert document["utterances_per_speaker"] == {
        "mean": pytest.approx(5 / 3), "deviation": pytest.approx(np.std([1, 2, 2])), "minimum": 1, "median": 2,
        "maximum": 2,
    }  # fmt: skip
    assert document["minutes_per_speaker"]["maximum"] == pytest.approx(2 / 60)
    assert document["words"] == 15
    assert document["skipped_utterances"] == [{"id": "eve/1", "reason": "empty text"}]


def test_a_figure_is_written_where_asked(own: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "own.png"
    assert str(picture) in call("stats", "folder", "--folder", own, "--figure", picture).replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"ends in \.png"):
        call("stats", "folder", "--folder", own, "--figure", tmp_path / "own.pdf")


def test_shares_and_the_control_are_options(own: Path) -> None:
    small = json.loads(call("stats", "folder", "--folder", own, "--share", 40, "--json"))
    large = json.loads(call("stats", "folder", "--folder", own, "--share", 60, "--json"))
    assert (small["corpus"], small["speakers"], large["speakers"]) == ("own-40", 1, 2)
    mixed = json.loads(call("stats", "folder", "--folder", own, "--iid", "--set", "seed=2", "--json"))
    assert (mixed["corpus"], mixed["utterances"]) == ("own-IID", 5)


def test_any_setting_can_be_set(own: Path) -> None:
    with pytest.raises(UserError, match=r"no usable speaker.*longer than 0\.5 s"):
        call("stats", "folder", "--folder", own, "--set", "max_seconds=0.5")


def test_the_papers_row_is_shown_beside_ours(tmp_path: Path) -> None:
    chapter = tmp_path / "LibriSpeech" / "train-clean-100" / "7" / "1"
    chapter.mkdir(parents=True)
    soundfile.write(chapter / "7-1-0000.flac", np.zeros(16_000), 16_000)
    (chapter / "7-1.trans.txt").write_text("7-1-0000 HELLO\n")
    out = call("stats", "librispeech", "--folder", tmp_path, "--subset", "LS-100")
    assert "minutes, paper" in out
    assert "the paper has 251 speakers and 100.6 h" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["librispeach"], r"no kind of corpus.*did you mean 'librispeech'\?"),
        (["an4", "--subset", "dev"], r"subset=dev: expected one of train, test"),
        (["an4", "--language", "fr"], r"language: there is no such key; expected one of .*folder, subset"),
        (["an4", "--share", "50"], r"share=50: expected other than 50"),
        (["fsdd", "--set", "fewest=4"], r"fsdd: expected most of at least"),
        (["folder"], r"folder: required \(the folder whose subfolders are the speakers\)"),
        (["tsv"], r"file: required"),
        (["fsdd", "--set", "seed"], r"not of the form key=value"),
        (["fsdd", "--set", "seed=["], r"not valid YAML"),
        (["common_voice", "--subset", "CV-fr-train-10", "--share", "20"], r"a share that agrees with CV-fr-train-10"),
    ],
)
def test_mistakes_say_what_was_given_and_what_was_expected(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call("stats", *words)


def test_every_kind_is_listed_with_what_it_needs() -> None:
    out = call("list")
    kinds = ["librispeech", "common_voice", "an4", "audiomnist", "fsdd", "speech_commands", "folder", "tsv"]
    kinds += ["manifest", "datasets", "synthetic", "population", "python"]
    assert [line.partition(":")[0] for line in out.splitlines() if line and line[0].islower()] == kinds
    assert "folder (required): the folder whose subfolders are the speakers" in out
    assert "max_seconds (default 30)" in out
    document = json.loads(call("list", "--json"))
    assert list(document) == kinds
    assert all(text for kind in document.values() for text in kind["settings"].values())


def test_help_does_not_wait_for_heavy_imports() -> None:
    program = (
        "import sys, confide.commands.corpus\n"
        "print([m for m in ('torch', 'lhotse', 'soundfile', 'soxr', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
