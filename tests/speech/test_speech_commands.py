"""Speech Commands: both layouts, who is in which part, chosen words, and what is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide.errors import UserError
from confide.speech.corpora import read_corpus
from confide.speech.corpora.speech_commands import SpeechCommandsSettings
from confide.speech.corpus import SAMPLE_RATE, Corpus, count_by_reason, read_audio

DATA = Path(os.environ.get("CONFIDE_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")
WORDS = ("bed", "cat", "happy")
# Twelve people: the first eight for training, two for validation, two for the test.
PEOPLE = tuple(f"{0xA1B2C300 + number:08x}" for number in range(12))


def write(path: Path, seconds: float = 0.2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(1).uniform(-0.1, 0.1, round(seconds * SAMPLE_RATE)), SAMPLE_RATE)


def read(folder: Path, **settings: Any) -> Corpus:
    return read_corpus(SpeechCommandsSettings(folder=folder, **settings))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Google's layout: each person says each word twice."""
    root = tmp_path / "SpeechCommands2" / "speech_commands_v0.02"
    names = {person: [f"{word}/{person}_nohash_{take}.wav" for word in WORDS for take in range(2)] for person in PEOPLE}
    for name in (name for own in names.values() for name in own):
        write(root / name)
    write(root / "_background_noise_" / "running_tap.wav", 1.0)
    for file, people in (("validation_list.txt", PEOPLE[8:10]), ("testing_list.txt", PEOPLE[10:])):
        (root / file).write_text("".join(f"{name}\n" for person in people for name in names[person]))
    (root / "README.md").write_text("a corpus\n")
    return root


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    root = tmp_path / "tables"
    for part, people in (("train", PEOPLE[:10]), ("test", PEOPLE[10:])):
        rows = ["utterance\tspeaker\tpath\ttext"]
        for person in people:
            for word in WORDS:
                path = f"{part}/{person}/{word}_{person}_0.ogg"
                write(root / path)
                rows.append(f"{word}_{person}_0\t{person}\t{path}\t{word}")
        (root / f"{part}.tsv").write_text("\n".join(rows) + "\n")
    return root


def test_the_original_lists_part_the_people(original: Path) -> None:
    parts = {part: read(original, subset=part) for part in ("train", "validation", "test")}
    found = {part: tuple(corpus.speakers) for part, corpus in parts.items()}
    assert found == {"train": PEOPLE[:8], "validation": PEOPLE[8:10], "test": PEOPLE[10:]}
    assert all(len(own) == 6 for corpus in parts.values() for own in corpus.speakers.values())
    assert not any(corpus.skipped for corpus in parts.values())
    assert {u.text for u in parts["train"].utterances()} == set(WORDS), "noise is no word"


def test_a_recording_has_one_id_in_both_layouts(original: Path, tables: Path) -> None:
    first, second = (read(folder, subset="test").utterances() for folder in (original, tables))
    assert {u.id for u in second} <= {u.id for u in first}


def test_the_original_layout_is_the_list_that_lhotse_makes(original: Path) -> None:
    lhotse = pytest.importorskip("lhotse.recipes.speechcommands")
    write(original.parent / "speech_commands_test_set_v0.02" / "yes" / f"{PEOPLE[0]}_nohash_0.wav")
    manifests = lhotse.prepare_speechcommands("2", original.parent)
    for part, ours in (("train", "train"), ("valid", "validation")):
        theirs = {(s.id, s.speaker, s.text, s.duration) for s in manifests[part]["supervisions"] if s.text}
        found = read(original, subset=ours).utterances()
        assert {(f"{u.text}_{u.audio[0].stem}", u.speaker, u.text, u.seconds) for u in found} == theirs


def test_only_the_chosen_words_are_read(original: Path, tables: Path) -> None:
    for folder in (original, tables):
        chosen = read(folder, words=["bed", "happy"])
        assert {u.text for u in chosen.utterances()} == {"bed", "happy"}
        with pytest.raises(UserError, match=r"words=dog: nobody says this in the subset train.*bed, cat, happy"):
            read(folder, words=["cat", "dog"])


@pytest.mark.parametrize("seed", [0, 3])
def test_settings_are_chosen_on_people_who_are_neither_trained_on_nor_tested_on(tables: Path, seed: int) -> None:
    train, held, test = (
        set(read(tables, subset=part, share=share, seed=seed).speakers)
        for part, share in (("train", 90), ("train", 10), ("test", None))
    )
    assert (len(train), len(held), len(test)) == (9, 1, 2)
    assert train | held == set(PEOPLE[:10])
    assert not train & held
    assert not (train | held) & test
    with pytest.raises(UserError, match=r"subset=validation.*share 90.*share 10"):
        read(tables, subset="validation")


def test_what_is_missing_or_damaged_is_counted_and_costs_nobody_else(original: Path, tables: Path) -> None:
    (original / "bed" / f"{PEOPLE[0]}_nohash_0.wav").write_bytes(b"RIFF")
    (original / "cat" / f"{PEOPLE[10]}_nohash_1.wav").unlink()
    with (original / "testing_list.txt").open("a") as file:
        file.write("../secret.wav\n")
    assert count_by_reason(read(original).skipped) == {"undecodable": 1}
    test = read(original, subset="test")
    assert sorted(item.kind for item in test.skipped) == ["missing", "no WORD/SPEAKER_nohash_TAKE.wav"]
    assert len(test.utterances()) == 11
    (tables / "train" / PEOPLE[1] / f"bed_{PEOPLE[1]}_0.ogg").unlink()
    with (tables / "train.tsv").open("a") as file:
        file.write("short\trow\n")
    corpus = read(tables)
    assert sorted(item.kind for item in corpus.skipped) == ["missing", "short row"]
    assert len(corpus.utterances()) == 29


def test_without_its_lists_nobody_is_trained_on(original: Path) -> None:
    (original / "testing_list.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read .*testing_list.txt.*would be trained on"):
        read(original)
    (original / "validation_list.txt").unlink()
    with pytest.raises(UserError, match=r"neither train.tsv nor validation_list.txt and testing_list.txt"):
        read(original)


def test_the_real_people_are_all_there(command: Callable[..., tuple[int, str, str]]) -> None:
    folder = DATA / "speech_commands"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; name the folder that holds speech_commands in CONFIDE_DATA")
    train, test = (read(folder, subset=part) for part in ("train", "test"))
    assert (len(train.speakers), len(test.speakers)) == (1_560, 174)
    assert not set(train.speakers) & set(test.speakers)
    assert (len(train.utterances()) + len(train.skipped), len(test.utterances())) == (4_696, 492)
    # One recording was encoded from nothing, and holds no sound.
    assert [item.id for item in train.skipped] == ["bed_c4f875a9_2"]
    utterance = train.utterances()[0]
    assert len(read_audio(utterance)) == pytest.approx(utterance.seconds * SAMPLE_RATE, abs=1)
    code, out, _ = command("corpus", "stats", "speech_commands", "--folder", folder, "--subset", "test")
    assert code == 0
    assert "SpeechCommands-test: 174 speakers" in out
