"""Data sets that Hugging Face's `datasets` saved: recordings inside Arrow files, and rows of texts."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide import arrow, errors
from confide.errors import UserError
from confide.retrieval.table import TableSettings
from confide.runs.corpus_choice import check_corpus
from confide.speech.corpora import read_corpus
from confide.speech.corpus import Corpus, Undecodable, read_audio, read_file
from confide.speech.features import FeatureSettings
from confide.speech.store import LogMel, open_store
from confide.speech.tokens import Tokens

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'confide[arrow]'")
Command = Callable[..., tuple[int, str, str]]


def sound(seed: int, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * rate))
    soundfile.write(file, samples, rate, format="FLAC")
    return file.getvalue()


def save(folder: Path, columns: dict[str, Any], features: dict[str, Any], files: int = 1) -> Path:
    """What save_to_disk writes; tests with `datasets` itself are below."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    kinds = {"Audio": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})}
    for number, name in enumerate(names):
        arrays = {
            key: pyarrow.array(list(values)[number::files], type=kinds.get(features[key]["_type"]))
            for key, values in columns.items()
        }
        table = pyarrow.table(arrays)
        with pyarrow.OSFile(str(folder / name), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


TEXT = {"dtype": "string", "_type": "Value"}
SPOKEN = {"audio": {"sampling_rate": 16_000, "_type": "Audio"}, "text": TEXT, "speaker_id": TEXT}


def spoken(folder: Path, files: int = 1) -> Path:
    audio = [{"bytes": sound(seed, 1 + seed / 10), "path": f"{seed}.flac"} for seed in range(6)]
    texts, speakers = ["yes", "no", "yes please", "no", "go", "stop"], ["ann", "bob", "ann", "bob", "eve", "eve"]
    return save(folder, {"audio": audio, "text": texts, "speaker_id": speakers}, SPOKEN, files)


def read(folder: Path, **settings: Any) -> Corpus:
    return read_corpus(check_corpus("datasets", {"folder": str(folder), **settings}))


@pytest.mark.parametrize("files", [1, 2])
def test_recordings_inside_of_arrow_files_are_those_that_were_saved(files: int, tmp_path: Path) -> None:
    corpus = read(spoken(tmp_path / "set", files))
    assert list(corpus.speakers) == ["ann", "bob", "eve"]
    found = {(u.speaker, u.text): u for u in corpus.utterances()}
    assert set(found) == {("ann", "yes"), ("ann", "yes please"), ("bob", "no"), ("eve", "go"), ("eve", "stop")}
    assert len(corpus.utterances()) == 6
    utterance = found["ann", "yes please"]
    assert utterance.seconds == pytest.approx(1.2)
    (tmp_path / "2.flac").write_bytes(sound(2, 1.2))
    np.testing.assert_array_equal(read_audio(utterance), read_file(tmp_path / "2.flac"))
    assert utterance.made is not None
    assert utterance.made.length == len(read_audio(utterance))


def test_its_features_are_kept_as_those_of_files_and_are_the_same(tmp_path: Path) -> None:
    corpus = read(spoken(tmp_path / "set"))
    for speaker, own in corpus.speakers.items():
        for number, utterance in enumerate(own):
            place = tmp_path / "files" / speaker / f"{number}.flac"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(arrow.cell(utterance.made.file, utterance.made.row, "audio")["bytes"])  # type: ignore[union-attr]
            place.with_suffix(".txt").write_text(utterance.text)
    same = read_corpus(check_corpus("folder", {"folder": str(tmp_path / "files")}))
    stores = [
        open_store(each, Tokens("en"), LogMel(FeatureSettings()), tmp_path / "kept", quiet=True)
        for each in (corpus, same)
    ]
    assert stores[0].kept is not None
    for user in range(3):
        for one, two in zip(*(store.features(user, [0, 1]) for store in stores), strict=True):
            np.testing.assert_array_equal(one, two)
    assert stores[0].speakers == stores[1].speakers


def test_what_cannot_be_used_is_counted_and_named(tmp_path: Path) -> None:
    audio = [
        {"bytes": sound(0), "path": "0.flac"}, {"bytes": b"no sound", "path": "1.flac"}, {"bytes": None, "path": None},
        {"bytes": sound(3), "path": None}, {"bytes": sound(4), "path": None},
    ]  # fmt: skip
    columns = {"audio": audio, "text": ["a", "b", "c", "d", ""], "speaker_id": ["x", "x", "x", None, "x"]}
    corpus = read(save(tmp_path / "set", columns, SPOKEN))
    assert [u.text for u in corpus.utterances()] == ["a"]
    reasons = {item.id.rpartition(":")[2]: item.kind for item in corpus.skipped}
    assert reasons == {"1": "undecodable", "2": "no audio", "3": "no speaker", "4": "empty text"}


def test_cells_of_another_type_than_sound_are_skipped(tmp_path: Path) -> None:
    place = save(tmp_path / "set", {"audio": ["x"], "text": ["a"], "speaker_id": ["x"]}, {**SPOKEN, "audio": TEXT})
    (file,) = place.glob("*.arrow")
    audio = [{"bytes": "abc", "path": "a.wav"}, {"bytes": "d", "path": None}]
    table = pyarrow.table({"audio": audio, "text": ["a", "b"], "speaker_id": ["x", "x"]})
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="2 no audio"):
        read(place)


def test_a_path_in_place_of_bytes_is_a_file_and_columns_have_names(tmp_path: Path) -> None:
    features = {"clip": SPOKEN["audio"], "said": TEXT, "who": {"dtype": "int64", "_type": "Value"}}
    columns = {"clip": [{"bytes": None, "path": "a.flac"}], "said": ["yes"], "who": [7]}
    place = save(tmp_path / "set", columns, features)
    (place / "a.flac").write_bytes(sound(0))
    names = {"audio_column": "clip", "text_column": "said", "speaker_column": "who"}
    (utterance,) = read(place, **names).utterances()
    assert (utterance.speaker, utterance.audio) == ("7", (place / "a.flac",))
    with pytest.raises(UserError, match=r"has the columns clip, said, who; expected also audio, text, speaker_id"):
        read(place)


def test_a_recording_that_was_changed_after_it_was_listed_is_not_trained_on(tmp_path: Path) -> None:
    first = read(spoken(tmp_path / "set")).utterances()[0]
    assert first.made is not None
    from dataclasses import replace

    changed: Any = replace(first.made, row=1)  # type: ignore[type-var]
    with pytest.raises(Undecodable, match="changed"):
        changed.samples()


def test_a_folder_of_splits_says_which_to_give(tmp_path: Path) -> None:
    spoken(tmp_path / "sets" / "train")
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"it has the splits train, test: give .*/sets/train"):
        read(tmp_path / "sets")
    assert len(read(tmp_path / "sets" / "train").speakers) == 3


@pytest.mark.parametrize(
    "damage", ["cut", "gone", "state", "escape", "offsets", "letters", "lacks", "twice", "classes", "names", "pipe"]
)
def test_a_damaged_data_set_is_refused_in_words(damage: str, tmp_path: Path) -> None:
    place = spoken(tmp_path / "set")
    (file,) = place.glob("*.arrow")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:3_000])
    elif damage == "gone":
        file.unlink()
    elif damage == "offsets":  # of the texts: where each begins and ends
        content = file.read_bytes()
        begins = np.array([0, 3, 5, 15], dtype="<i4").tobytes()[:8]
        assert begins in content
        file.write_bytes(content.replace(begins, np.array([0, 2**30], dtype="<i4").tobytes()))
    elif damage == "letters":
        file.write_bytes(file.read_bytes().replace(b"yes", b"\xff\xfe\xfd"))
    elif damage in ("lacks", "twice"):
        names = ["audio", "text"] if damage == "lacks" else ["audio", "text", "text", "speaker_id"]
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * len(names), names=names)
        with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    elif damage == "names":
        file.write_bytes(file.read_bytes().replace(b"path", b"p\xff\xfeh"))
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif damage == "classes":
        kinds = {**SPOKEN, "speaker_id": {"_type": "ClassLabel"}}
        (place / "dataset_info.json").write_text(json.dumps({"features": kinds}))
    else:
        named = {"state": "[]", "escape": '{"_data_files": [{"filename": "../other.arrow"}]}'}[damage]
        (place / "state.json").write_text(named)
    with pytest.raises(UserError, match="save"):
        read(place)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = spoken(tmp_path / "set")
    monkeypatch.setitem(errors.MODULES, "arrow", ("no_such_module",))
    with pytest.raises(UserError, match=r"needs no_such_module.*pip install 'confide\[arrow\]'"):
        read(place)


def test_corpus_stats_looks_at_a_data_set(tmp_path: Path, command: Command) -> None:
    code, out, err = command("corpus", "stats", "datasets", "--folder", spoken(tmp_path / "set"), "--json")
    assert code == 0, err
    assert json.loads(out)["speakers"] == 3


def test_rows_of_texts_are_queries_and_numbers_of_classes_are_their_names(tmp_path: Path) -> None:
    features = {"query": TEXT, "document": {"names": ["bill", "heat"], "_type": "ClassLabel"}, "owner": TEXT}
    columns = {
        "query": [f"question {number}" for number in range(12)],
        "document": [number % 2 for number in range(12)],
        "owner": [f"home {number % 3}" for number in range(12)],
    }
    place = save(tmp_path / "set", columns, features, files=2)
    settings = TableSettings(queries=place, client_column="owner", test_share=0.25)
    corpus = settings.read(0)
    assert sorted(document.id for document in corpus.documents) == ["bill", "heat"]
    assert len(corpus.train) + len(corpus.test) == 12
    assert set(corpus.train.groups or ()) == {"home 0", "home 1", "home 2"}
    with pytest.raises(UserError, match="expected also what"):
        TableSettings(queries=place, query_column="what").read(0)


def test_what_datasets_itself_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed: pip install datasets")
    for number in range(2):
        (tmp_path / f"{number}.flac").write_bytes(sound(number))
    columns = {"audio": [str(tmp_path / f"{n}.flac") for n in range(2)], "text": ["yes", "no"], "speaker_id": [1, 2]}
    made = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio(sampling_rate=16_000))
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "saved"))
    corpus = read(tmp_path / "saved" / "train")
    assert [(u.speaker, u.text) for u in corpus.utterances()] == [("1", "yes"), ("2", "no")]
    np.testing.assert_array_equal(read_audio(corpus.utterances()[0]), read_file(tmp_path / "0.flac"))
    assert [u.text for u in read(tmp_path / "saved" / "test").utterances()] == ["no"]
