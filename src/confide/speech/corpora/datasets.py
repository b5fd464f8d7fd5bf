"""A data set on disk, as Hugging Face's `datasets` saves it: columns for audio, text and speaker (`confide.arrow`).

Audio lies in the Arrow files, as bytes of a sound file (or is a path, where somebody saved it so). It is decoded there
whenever its features are made; no copy of it is written anywhere. A row without a speaker is skipped: nobody would know
whose guarantee it is under. The checks of all corpora apply.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from confide.arrow import cell, open_saved
from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpus import (
    OWN_LANGUAGE,
    SAMPLE_RATE,
    AnyLanguage,
    Corpus,
    Progress,
    Skipped,
    Undecodable,
    file_seconds,
    read_file,
)

if TYPE_CHECKING:
    from confide.speech.corpus import Samples


class DatasetsSettings(SpeakerSettings):
    """A folder saved by Hugging Face's `datasets` (save_to_disk), with columns for audio, text and speaker."""

    kind: Literal["datasets"] = "datasets"
    folder: LocalPath = Field(description="the folder that was saved; of a DatasetDict, that of one split")
    audio_column: str = Field("audio", min_length=1, description="which column has the audio")
    text_column: str = Field("text", min_length=1, description="which column has what was said")
    speaker_column: str = Field("speaker_id", min_length=1, description="which column names the speaker")
    language: AnyLanguage = Field("en", description=OWN_LANGUAGE)

    def read(self, progress: Progress | None = None) -> Corpus:
        """One row per utterance."""
        saved = open_saved(self.folder.expanduser())
        columns = (self.audio_column, self.text_column, self.speaker_column)
        listed = (self._entry(*row) for row in saved.rows(columns))
        name = f"{saved.folder.resolve().parent.name}-{saved.folder.resolve().name}"
        return make_corpus(name, self.language, listed, self, progress)

    def _entry(self, file: Path, row: int, cells: dict[str, Any]) -> Entry | Skipped:
        place, audio, speaker = f"{file.name}:{row}", cells[self.audio_column], cells[self.speaker_column]
        if speaker in (None, ""):
            return Skipped(place, "no speaker")
        text = " ".join(str(cells[self.text_column] or "").split())
        if isinstance(audio, str):
            return Entry(place, str(speaker), (file.parent / audio,), text)
        if not _has_sound(audio):
            return Skipped(place, "no audio: neither bytes nor a path")
        if not audio.get("bytes"):
            return Entry(place, str(speaker), (file.parent / audio["path"],), text)
        named = audio.get("path") or ""
        try:
            seconds = file_seconds(Path(named), audio["bytes"])
        except Undecodable as error:
            return Skipped(place, str(error))
        content = hashlib.sha256(audio["bytes"]).hexdigest()
        made = InArrow(file, row, self.audio_column, named, content, round(seconds * SAMPLE_RATE))
        return Entry(place, str(speaker), (), text, seconds, made)


def _has_sound(audio: Any) -> bool:
    """Whether a cell is of the form that `datasets` gives to audio, and not empty."""
    if not isinstance(audio, dict):
        return False
    content, path = audio.get("bytes"), audio.get("path")
    whole = isinstance(content, bytes | None) and isinstance(path, str | None)
    return whole and bool(content or path)


@dataclass(frozen=True)
class InArrow:
    """Sound that lies in a column of an Arrow file."""

    file: Path
    row: int
    column: str
    name: str
    content: str
    """The digest of its bytes."""
    length: int
    held = True

    @property
    def address(self) -> str:
        return f"arrow/{self.content}"

    def samples(self) -> Samples:
        """Decode it, if it is still what was listed."""
        content: bytes = cell(self.file, self.row, self.column)["bytes"]
        if hashlib.sha256(content).hexdigest() != self.content:
            raise Undecodable(f"changed: row {self.row} of {self.file.name} is not what it was when it was listed")
        return read_file(Path(self.name), content)
