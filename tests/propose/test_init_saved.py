"""`confide init` takes what Hugging Face's `datasets` saved: recordings inside Arrow files, and rows of texts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide import recipe
from confide.errors import UserError
from confide.propose.look import Columns, look
from confide.propose.proposal import propose
from confide.settings import read_yaml
from confide.speech.corpora import read_corpus

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'confide[arrow]'")
Command = Callable[..., tuple[int, str, str]]

TEXT = {"dtype": "string", "_type": "Value"}
AUDIO = {"sampling_rate": 16_000, "_type": "Audio"}
LABEL = {"names": ["bill", "heat"], "_type": "ClassLabel"}


def save(folder: Path, features: dict[str, Any], columns: dict[str, list[Any]]) -> Path:
    """What save_to_disk writes."""
    folder.mkdir(parents=True)
    kinds = {"Audio": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})}
    table = pyarrow.table({
        key: pyarrow.array(values, type=kinds.get(features[key]["_type"])) for key, values in columns.items()
    })  # fmt: skip
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def splits(folder: Path, *names: str) -> Path:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names)}))
    return folder


def spoken(folder: Path, people: range, speaker: str = "client_id", text: str = "sentence") -> Path:
    sound = io.BytesIO()
    soundfile.write(sound, np.full(8000, 0.1), 16_000, format="FLAC")
    audio = [{"bytes": sound.getvalue(), "path": f"{person}.flac"} for person in people]
    names = [f"p{person}" for person in people]
    columns: dict[str, list[Any]] = {"audio": audio, text: ["yes please"] * len(people), speaker: names}
    return save(folder, {"audio": AUDIO, text: TEXT, speaker: TEXT}, columns)


def written(folder: Path, people: range, owner: bool = True) -> Path:
    columns: dict[str, list[Any]] = {
        "message": [f"question {person} {turn}" for person in people for turn in range(4)],
        "kind": [turn % 2 for _ in people for turn in range(4)],
    }
    features: dict[str, Any] = {"message": TEXT, "kind": LABEL}
    if owner:
        columns["author"] = [f"home {person}" for person in people for _ in range(4)]
        features["author"] = TEXT
    return save(folder, features, columns)


def proposed(place: Path, **columns: str) -> Any:
    made = propose(look(place, Columns(**columns), "en"), "mine", None)
    return recipe.parse(read_yaml(made.text))


def test_recordings_that_were_saved_get_a_recipe_with_other_people_in_the_test(
    tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "mine.yaml"
    code, printed, err = command("init", spoken(tmp_path / "set", range(6)), "--out", out)
    assert code == 0, err
    assert "a saved data set of recordings (audio, sentence, client_id)" in printed
    wanted: Any = recipe.load(str(out))
    assert (wanted.task.corpus.text_column, wanted.task.corpus.speaker_column) == ("sentence", "client_id")
    people, tested = (set(read_corpus(part).speakers) for part in (wanted.task.corpus, wanted.task.test))
    assert people | tested == {f"p{person}" for person in range(6)}
    assert people
    assert tested
    assert not people & tested


def test_of_splits_the_one_for_training_is_trained_on_and_the_one_for_test_tests(tmp_path: Path) -> None:
    spoken(tmp_path / "set" / "validation", range(20, 22), "speaker_id", "text")
    spoken(tmp_path / "set" / "test", range(10, 13), "speaker_id", "text")
    spoken(tmp_path / "set" / "train", range(5), "speaker_id", "text")
    wanted = proposed(splits(tmp_path / "set", "validation", "test", "train"))
    assert wanted.task.corpus.folder == tmp_path / "set" / "train"
    assert wanted.task.test.folder == tmp_path / "set" / "test"
    assert len(read_corpus(wanted.task.corpus).speakers) == 5


def test_texts_that_were_saved_are_told_by_their_text_class_and_owner(tmp_path: Path) -> None:
    wanted = proposed(written(tmp_path / "set", range(10)))
    corpus = wanted.task.data.read(0)
    assert sorted(document.id for document in corpus.documents) == ["bill", "heat"]
    assert set(corpus.train.groups).isdisjoint(corpus.test.groups)
    assert len(set(corpus.test.groups)) == 2
    nobody = proposed(written(tmp_path / "nobody", range(10), owner=False)).task
    assert nobody.clients.kind == "even"
    assert nobody.data.client_column is None


@pytest.mark.parametrize(("first", "held"), [(100, 3), (2, 2)], ids=["others", "the same"])
def test_a_split_whose_owners_train_too_does_not_test(first: int, held: int, tmp_path: Path) -> None:
    written(tmp_path / "set" / "train", range(10))
    written(tmp_path / "set" / "test", range(first, first + 3))
    wanted = proposed(splits(tmp_path / "set", "train", "test"))
    corpus = wanted.task.data.read(0)
    assert set(corpus.train.groups).isdisjoint(corpus.test.groups)
    assert len(set(corpus.test.groups)) == held
    assert (wanted.task.data.test is None) == (first == 2)


def test_a_column_that_is_missing_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    spoken(tmp_path / "nobody", range(4), speaker="who")
    with pytest.raises(UserError, match=r"columns audio, sentence, who, and none says who speaks.*--speaker-column"):
        proposed(tmp_path / "nobody")
    assert proposed(tmp_path / "nobody", speaker="who").task.corpus.speaker_column == "who"
    spoken(tmp_path / "silent", range(4), text="said")
    with pytest.raises(UserError, match=r"none has what was said; expected one such as text, .*--text-column"):
        proposed(tmp_path / "silent")
    save(tmp_path / "plain", {"message": TEXT}, {"message": ["a", "b"]})
    with pytest.raises(UserError, match=r"none has their labels; expected one such as label, .*--label-column"):
        proposed(tmp_path / "plain")
    with pytest.raises(UserError, match="there is no column 'sound'; expected one of message"):
        proposed(tmp_path / "plain", path="sound")
