"""What finished runs answer to whoever asks: from Python, on the page, and over HTTP (`confide serve`).

A model is opened once and used by one caller at a time. Few are held, since each may take gigabytes; one whose file has
changed is opened again.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from confide.errors import UserError
from confide.runs import folder

if TYPE_CHECKING:
    from confide.runs.library import RetrievedDocument
    from confide.speech.transcribe import Transcript

AUDIO = {".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a"}
MOST_SECONDS, MOST_LETTERS, MOST_DOCUMENTS = 600.0, 4000, 50  # of what strangers may ask
_using = threading.Lock()


def transcribe(
    run: Path, recording: Path | np.ndarray, language_model: Path | None = None, encoder: str | None = None
) -> Transcript:
    """What a recording says, by a finished speech run: a file, or samples (n,) at 16 kHz."""
    from confide.runs.recogniser import load_recogniser, silent_libraries
    from confide.speech.corpus import Undecodable, read_file

    if isinstance(recording, np.ndarray):
        samples = recording
    else:
        try:
            with silent_libraries():
                samples = read_file(recording)
        except Undecodable as error:
            raise UserError(f"{recording} cannot be read as a recording: {error}; expected {_ENDINGS}") from None
    with _using:
        transcript: Transcript = _opened(load_recogniser, run, language_model, encoder).transcribe(samples)
    return transcript


def retrieve(
    run: Path, query: str, k: int, documents: Path | None = None, encoder: str | None = None
) -> list[RetrievedDocument]:
    """The best documents of a query, by a finished retrieval run, or one that was published."""
    from confide.runs.library import open_run

    with _using:
        found: list[RetrievedDocument] = _opened(open_run, run, True, documents, encoder).find(query, k)
    return found


def open_model(run: Path, encoder: str | None = None, documents: Path | None = None) -> str:
    """Open the model of a finished run, so that its first answer does not wait for it; the kind of its task."""
    from confide.runs.library import open_run
    from confide.runs.recogniser import load_recogniser

    kind = folder.held_recipe(run).task.kind
    if kind not in ("speech", "retrieval"):
        raise UserError(f"{run} holds a run of {kind}, which answers nobody; give one of speech or retrieval")
    if documents is not None and kind != "retrieval":
        raise UserError(f"--documents {documents}: is for retrieval, and {run} is of task {kind}; drop it")
    with _using:
        if kind == "speech":
            _opened(load_recogniser, run, None, encoder).transcribe(np.full(1600, 0.1, dtype=np.float32))
        else:
            _opened(open_run, run, True, documents, encoder)
    return kind


def heard(run: Path, sound: bytes, filename: str, encoder: str | None = None) -> dict[str, Any]:
    """What a recording that somebody sent says, as JSON; its ending tells the format."""
    from confide.runs.recogniser import load_recogniser
    from confide.speech.corpus import Undecodable, read_file

    suffix = Path(filename).suffix.lower()
    if suffix not in AUDIO:
        raise UserError(f"{suffix or 'a file without an ending'}: expected one of {_ENDINGS}")
    with _using, tempfile.NamedTemporaryFile(suffix=suffix) as file:
        recogniser = _opened(load_recogniser, run, None, encoder)
        file.write(sound)
        file.flush()
        began = time.perf_counter()
        try:
            samples = read_file(Path(file.name))
        except Undecodable as error:
            said = str(error).replace(file.name, "the recording")
            raise UserError(f"the recording cannot be read: {said}") from None
        if len(samples) > MOST_SECONDS * 16_000:
            raise UserError(f"the recording is longer than {MOST_SECONDS / 60:.0f} minutes; use `confide transcribe`")
        transcript = recogniser.transcribe(samples)
    return {**transcript.to_json(), "took": time.perf_counter() - began}


def found(run: Path, query: str, k: int, documents: Path | None = None, encoder: str | None = None) -> dict[str, Any]:
    """The documents for a query that somebody sent, as JSON."""
    from confide.runs.library import open_run

    if len(query) > MOST_LETTERS:
        raise UserError(f"the query has {len(query):,} characters; expected at most {MOST_LETTERS:,}")
    with _using:
        library = _opened(open_run, run, True, documents, encoder)
        best = library.find(query, min(max(k, 1), MOST_DOCUMENTS))
    return {"method": library.method, "score": library.scale, "documents": [each.to_json() for each in best]}


_ENDINGS = ", ".join(sorted(AUDIO))


def _opened(load: Callable[..., Any], run: Path, *options: Any) -> Any:
    try:
        changed = (run / folder.MODEL).stat().st_mtime_ns
    except OSError:
        changed = 0
    return _load(load, run, changed, *options)


@lru_cache(maxsize=2)
def _load(load: Callable[..., Any], run: Path, changed: int, *options: Any) -> Any:
    return load(run, *options)
