"""Speech Commands (Warden, 2018): single words by thousands of people, one word in a recording of about a second.

Two layouts are read. Google's own has a folder for each word with SPEAKER_nohash_TAKE.wav in it; validation_list.txt
and testing_list.txt name what is not for training, and folders that begin with an underscore (_background_noise_) hold
no words. The other has tables train.tsv and test.tsv, as AN4 has here. Lists and tables part people, not recordings.
Folders of words without lists are read by `subset: all`; shares part their people.

Tables know no validation: `share: 90` trains on nine tenths of the people of `subset: train`, and `share: 10` is the
rest of them, for choosing settings. A recording has the same id in both layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings, find_folder
from confide.speech.corpora.tables import entry_below, read_table
from confide.speech.corpus import Corpus, Progress, Skipped

_SOURCE = "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz (unpack it into a folder of its own)"
_LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
_RECORDING = re.compile(
    r"(?P<word>[^/_][^/]*)/(?P<speaker>[^/_]+)_nohash_(?P<take>\d+)\.(?:wav|flac|ogg|opus)", re.IGNORECASE
)


class SpeechCommandsSettings(SpeakerSettings):
    """Speech Commands: single words by thousands of people, in Google's layout or as tables train.tsv and test.tsv."""

    kind: Literal["speech_commands"] = "speech_commands"
    folder: LocalPath | None = Field(
        None, description="holds the folders of the words, or the tables; else speech_commands in CONFIDE_DATA"
    )
    subset: Literal["train", "validation", "test", "all"] = Field(
        "train",
        description="other people each; tables have no validation: use share 90 and 10 of train; all: everybody, for "
        "folders that have neither lists nor tables",
    )
    words: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, description="only these words, such as [bed, cat]; none: all"
    )

    def read(self, progress: Progress | None = None) -> Corpus:
        """List the recordings of the subset, and keep those of the words that were asked for."""
        folder = find_folder(self.folder, "speech_commands", "Speech Commands", _SOURCE)
        original = self.subset == "all" or any((folder / name).is_file() for name in _LISTS.values())
        listed = list(_list_folders(folder, self.subset) if original else _list_table(folder, self.subset))
        return make_corpus(f"SpeechCommands-{self.subset}", "en", self._choose(listed), self, progress)

    def _choose(self, listed: list[Entry | Skipped]) -> list[Entry | Skipped]:
        if self.words is None:
            return listed
        there = {item.text for item in listed if isinstance(item, Entry)}
        unknown = [word for word in self.words if word not in there]
        if unknown:
            raise UserError(
                f"words={', '.join(unknown)}: nobody says this in the subset {self.subset} of Speech Commands; "
                f"expected some of {', '.join(sorted(there)) or 'none, it is empty'}"
            )
        return [item for item in listed if isinstance(item, Skipped) or item.text in self.words]


def _list_table(folder: Path, subset: str) -> Iterator[Entry | Skipped]:
    if subset == "validation":
        raise UserError(
            f"subset=validation: {folder} has tables, which know only train and test; train on subset train with "
            "share 90, and choose settings on subset train with share 10, who are other people"
        )
    table = folder / f"{subset}.tsv"
    if not table.is_file():
        raise UserError(
            f"Speech Commands in {folder} has neither {table.name} nor {' and '.join(_LISTS.values())}; expected the "
            f"one or the others: check the folder, use subset all with a share, or get the corpus from {_SOURCE}"
        )
    return read_table(table, ("utterance", "speaker", "path", "text"), entry_below(folder), filled=("speaker", "path"))


def _list_folders(folder: Path, subset: str) -> Iterator[Entry | Skipped]:
    """What a list names, for training everything that no list names, and for all everything."""
    if subset in _LISTS:
        for number, name in enumerate(_read_list(folder, subset), start=1):
            entry = _entry(folder, name)
            yield entry or Skipped(f"{_LISTS[subset]}:{number}", f"no WORD/SPEAKER_nohash_TAKE.wav: {name}")
        return
    others = set() if subset == "all" else {name for part in _LISTS for name in _read_list(folder, part)}
    words = sorted(item for item in folder.iterdir() if item.is_dir() and not item.name.startswith(("_", ".")))
    for file in (file for word in words for file in sorted(word.iterdir())):
        name = f"{file.parent.name}/{file.name}"
        entry = _entry(folder, name)
        if entry is not None and name not in others:
            yield entry


def _read_list(folder: Path, subset: str) -> list[str]:
    path = folder / _LISTS[subset]
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} ({error}); expected the list that comes with Speech Commands: without it people who "
            "are kept for validation or test would be trained on"
        ) from None


def _entry(folder: Path, name: str) -> Entry | None:
    match = _RECORDING.fullmatch(name)
    if match is None:
        return None
    word, speaker, take = match["word"], match["speaker"], match["take"]
    return Entry(f"{word}_{speaker}_{take}", speaker, (folder / name,), word)
