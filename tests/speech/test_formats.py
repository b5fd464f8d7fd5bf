"""Recordings of telephones, languages beyond three, and texts that normalising would damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide import errors, recipe
from confide.errors import UserError
from confide.runs.corpus_choice import check_corpus
from confide.runs.recogniser import tokens_of
from confide.speech.corpora import read_corpus
from confide.speech.corpus import Undecodable, file_seconds, read_file
from confide.speech.tokens import Tokens, damage

Command = Callable[..., tuple[int, str, str]]
SPANISH = "abcdefghijklmnñopqrstuvwxyzáéíóúü"
GREEK = "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώ"


def record(path: Path, seconds: float = 1.0, rate: int = 44_100, channels: int = 2) -> Path:
    """A tone of 440 Hz as a telephone would record it."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.4 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate, dtype=np.float32)
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=rate, layout="stereo" if channels == 2 else "mono")
        frame = av.AudioFrame.from_ndarray(
            np.tile(tone, (channels, 1)), format="fltp", layout="stereo" if channels == 2 else "mono"
        )
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return path


@pytest.mark.parametrize(("rate", "channels"), [(44_100, 2), (16_000, 1)])
def test_m4a_is_read_as_16_khz_mono_at_its_length_and_pitch(rate: int, channels: int, tmp_path: Path) -> None:
    path = record(tmp_path / "a.m4a", 1.0, rate, channels)
    assert file_seconds(path) == pytest.approx(1.0, abs=0.15)
    samples = read_file(path)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(16_000, abs=2_500)
    middle = samples[4_000:12_000]
    assert np.argmax(np.abs(np.fft.rfft(middle))) * 16_000 / len(middle) == pytest.approx(440, abs=4)
    assert np.abs(middle).max() == pytest.approx(0.4, abs=0.05)


def test_a_cut_or_false_m4a_is_undecodable_and_no_end_of_a_run(tmp_path: Path) -> None:
    whole = record(tmp_path / "p" / "a.m4a")
    whole.with_suffix(".txt").write_text("yes")
    for name, content in (("cut", whole.read_bytes()[:2_000]), ("false", b"no sound"), ("empty", b"")):
        (tmp_path / "p" / f"{name}.m4a").write_bytes(content)
        (tmp_path / "p" / f"{name}.txt").write_text("yes")
        with pytest.raises(Undecodable):
            read_file(tmp_path / "p" / f"{name}.m4a")
    corpus = read_corpus(check_corpus("folder", {"folder": str(tmp_path)}))
    assert [u.id for u in corpus.utterances()] == ["p/a"]
    assert len(corpus.skipped) == 3
    with pytest.raises(Undecodable, match="missing"):
        file_seconds(tmp_path / "none.m4a")


def test_m4a_without_its_decoder_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "a.m4a")
    monkeypatch.setitem(errors.MODULES, "formats", ("no_such_module",))
    with pytest.raises(UserError, match=r"the file a.m4a needs no_such_module.*pip install 'confide\[formats\]'"):
        file_seconds(path)


def test_letters_of_a_recipe_are_the_token_set_of_another_language() -> None:
    spanish = Tokens("es", SPANISH)
    assert spanish.normalise("¡El Niño comió Müesli!") == "el niño comió müesli"
    assert spanish.decode(spanish.encode("Niño")) == "niño"
    greek = Tokens("el", GREEK)
    assert greek.normalise("Καλημέρα, world 3") == "καλημέρα"  # nothing that the set lacks gets through
    assert greek.size == 4 + len(GREEK)
    assert len({t.version for t in (spanish, greek, Tokens("en"), Tokens("en", spelled=True))}) == 4
    with pytest.raises(UserError, match=r"no token set for the language 'es'.*task.letters"):
        Tokens("es")


def own(tmp_path: Path, **task: Any) -> dict[str, Any]:
    corpus = {"kind": "folder", "folder": str(tmp_path), "language": "es"}
    return {
        "task": {"kind": "speech", "corpus": corpus, "test": corpus, **task}, "run": {"steps": 1},
        "sampling": {"kind": "fixed", "cohort": 1}, "local": {"steps": 1, "learning_rate": 0.1},
        "central": {"kind": "sgd", "learning_rate": 1}, "bounding": {"rule": "none"},
    }  # fmt: skip


@pytest.mark.parametrize("letters", ["", "abca", "aB", "a b", "ab1", "ab-"])
def test_letters_that_are_none_are_refused(letters: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.letters"):
        recipe.parse(own(tmp_path, letters=letters))


def test_a_run_in_another_language_writes_its_letters(tmp_path: Path) -> None:
    wanted: Any = recipe.parse(own(tmp_path, letters=SPANISH))
    assert tokens_of(wanted.task).names[4:] == tuple(SPANISH)
    plain: Any = recipe.load("speech/an4/head")
    assert "letters" not in plain.to_yaml()
    assert "numbers" not in plain.to_yaml()


@pytest.mark.parametrize(
    ("language", "text", "spoken"),
    [
        ("en", "Room 21, please", "room twenty-one please"),
        ("en", "1,250 people", "one thousand two hundred and fifty people"),
        ("en", "3.5 miles", "three point five miles"),
        ("en", "the 3rd of May", "the third of may"),
        ("en", "version 1.2.3", "version one two three"),
        ("de", "1.250 Leute", "eintausendzweihundertfünfzig leute"),
        ("fr", "3,5 mètres", "trois virgule cinq mètres"),
    ],
)
def test_numbers_are_spelled_in_the_language_where_the_recipe_says_so(language: str, text: str, spoken: str) -> None:
    assert Tokens(language, spelled=True).normalise(text) == spoken
    assert not any(c.isdigit() for c in Tokens(language).normalise(text))


def test_spelling_numbers_needs_a_language_that_can_be_counted_in() -> None:
    with pytest.raises(UserError, match="num2words cannot count in 'el'"):
        Tokens("el", GREEK, spelled=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain words, isn't it?", set()), ("room 21", {"digits removed"}),
        ("5 € →", {"digits removed", "symbols removed"}),
        ("café", {"letters folded"}), ("’tis — so…", set()),
    ],
)  # fmt: skip
def test_damage_names_what_normalising_does(text: str, found: set[str]) -> None:
    assert damage(Tokens("en"), text) == found


def test_letters_that_cannot_be_folded_are_removed_and_said_to_be() -> None:
    assert damage(Tokens("el", GREEK), "καλη mera") == {"letters removed"}
    assert damage(Tokens("en", spelled=True), "room 21") == set()


def test_corpus_stats_counts_and_shows_what_would_be_damaged(tmp_path: Path, command: Command) -> None:
    for number, text in enumerate(("room 21", "21 again", "café", "plain")):
        path = record(tmp_path / "p" / f"{number}.m4a", 0.3)
        path.with_suffix(".txt").write_text(text)
    code, out, _ = command("corpus", "stats", "folder", "--folder", tmp_path)
    assert code == 0
    assert "normalising changes texts: 2 digits removed, 1 letters folded (utterances each)" in out
    code, out, _ = command("corpus", "stats", "folder", "--folder", tmp_path, "--json")
    assert json.loads(out)["damaged"] == {"digits removed": 2, "letters folded": 1}
    code, out, _ = command("corpus", "stats", "folder", "--folder", tmp_path, "--language", "es")
    assert code == 0
    assert "there is no token set for es; a recipe needs its letters in task.letters" in out


def test_init_spells_numbers_and_takes_letters(tmp_path: Path, command: Command) -> None:
    for person in range(3):
        path = record(tmp_path / "own" / f"p{person}" / "a.m4a", 0.3)
        path.with_suffix(".txt").write_text("habitación 21")
    out = tmp_path / "mine.yaml"
    code, _, err = command(
        "init", tmp_path / "own", "--out", out, "--language", "es", "--letters", SPANISH, "--epsilon", "inf"
    )
    assert code == 0, err
    wanted: Any = recipe.load(str(out))
    assert (wanted.task.letters, wanted.task.numbers, wanted.task.corpus.language) == (SPANISH, "spell", "es")
    assert wanted.task.model.encoder.source == "whisper-base"
    assert tokens_of(wanted.task).normalise("habitación 21") == "habitación veintiuno"
