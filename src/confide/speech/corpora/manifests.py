"""Manifests, the JSON lines of other toolkits: NeMo's, and lhotse's cuts or supervisions with recordings.

NeMo writes audio_filepath, text, duration and speaker in a line. lhotse writes a cut with its recording and its
supervision in a line, or supervisions in one file and the recordings that they belong to in another. Each may be
compressed (.gz). A line without a speaker is skipped: nobody would know whose guarantee it is under.

Not read: a part of a longer recording. Features are kept by file, so such a line is counted and named; cut the
recordings first (in lhotse `CutSet.save_audios`). The checks of all corpora apply; lengths are read from the files.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpus import OWN_LANGUAGE, AnyLanguage, Corpus, Progress, Skipped

_SLACK = 0.1  # seconds by which a line may be shorter than its recording and still be the whole of it
Line = Mapping[str, Any]


class ManifestSettings(SpeakerSettings):
    """A manifest of NeMo or lhotse: JSON lines, each an utterance with its file, text and speaker (also .gz)."""

    kind: Literal["manifest"] = "manifest"
    file: LocalPath = Field(description="NeMo's manifest, or lhotse's cuts or supervisions")
    recordings: LocalPath | None = Field(None, description="lhotse's recordings, beside a file of supervisions")
    folder: LocalPath | None = Field(
        None, description="what paths in the manifest are relative to; else the manifest's folder"
    )
    language: AnyLanguage = Field("en", description=OWN_LANGUAGE)

    def read(self, progress: Progress | None = None) -> Corpus:
        """One line per utterance."""
        file = self.file.expanduser()
        root = self.folder.expanduser() if self.folder is not None else file.parent
        known = {} if self.recordings is None else _recordings(self.recordings.expanduser())
        listed = (_entry(file, number, line, known, root) for number, line in read_lines(file))
        name = file.name.partition(".")[0]
        return make_corpus(name, self.language, listed, self, progress)


def read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """The objects of a file of JSON lines, counted from 1."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise ValueError(f"it is a {type(line).__name__}")
                    yield number, line
    except OSError as error:
        raise UserError(
            f"cannot read the manifest {path} ({error.strerror or error}); expected a file of JSON lines"
        ) from None
    except (ValueError, EOFError, zlib.error) as error:
        raise UserError(
            f"the manifest {path} is damaged ({error}); expected a JSON object in each line, as NeMo and lhotse write"
        ) from None


def form_of(line: Line) -> Literal["nemo", "cut", "supervision"] | None:
    """Which toolkit writes such a line."""
    if "audio_filepath" in line:
        return "nemo"
    if "supervisions" in line:
        return "cut"
    return "supervision" if "recording_id" in line else None


def _recordings(path: Path) -> dict[str, Line]:
    return {str(line.get("id")): line for _, line in read_lines(path)}


def _entry(path: Path, number: int, line: Line, known: Mapping[str, Line], root: Path) -> Entry | Skipped:
    place, form = f"{path.name}:{number}", form_of(line)
    try:
        if form == "nemo":
            source, text, part = str(line["audio_filepath"]), line.get("text"), float(line.get("offset") or 0.0) > 0
            speaker, name = line.get("speaker", line.get("speaker_id")), source
        elif form is not None:
            said = line if form == "supervision" else _only(line["supervisions"])
            recording = line.get("recording") or known.get(str(said["recording_id"]))
            if recording is None:
                return Skipped(place, f"no recording: {said['recording_id']} is not in the recordings")
            source, text, speaker = _source(recording), said.get("text"), said.get("speaker")
            name, part = str(line["id"]), _is_part(line, recording)
        else:
            raise UserError(
                f"the manifest {path}, line {number} has the keys {', '.join(list(line)[:6]) or 'none'}; expected "
                "those of NeMo (audio_filepath, text, speaker) or of lhotse's cuts or supervisions"
            )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return Skipped(place, f"unreadable line: {error}")
    if part:
        return Skipped(place, "part of a recording: cut the recordings first")
    if speaker in (None, ""):
        return Skipped(place, "no speaker")
    return Entry(name, str(speaker), (root / source,), " ".join(str(text or "").split()))


def _only(said: list[Line]) -> Line:
    if len(said) != 1:
        raise ValueError(f"{len(said)} supervisions in a cut, where one is expected")
    return said[0]


def _source(recording: Line) -> str:
    (source,) = recording["sources"]
    if source["type"] != "file":
        raise ValueError(f"audio of type {source['type']}, where a file is expected")
    return str(source["source"])


def _is_part(line: Line, recording: Line) -> bool:
    whole = float(recording["duration"]) - _SLACK
    return float(line.get("start") or 0.0) > _SLACK or float(line.get("duration", whole)) < whole
