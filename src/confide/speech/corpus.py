"""What a speech corpus is: speakers with utterances, and how their audio is read.

Serves PFL-ASR, section 4 and appendix F: a user is a speaker, and all audio is brought to 16 kHz. A file that is
damaged is never fatal. What its header gives away is found when a corpus is listed (`measured`); the rest, such as
a FLAC file that breaks off, when its samples are read: `read_audio` then raises `Undecodable`, for the caller to
count, name and skip.

A cut file is recognised by a header that promises more samples than there are. An MP3 file without a Xing or Info
header promises nothing: its end may be missing without a trace.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

Language = Literal["en", "fr", "de"]
Progress = Callable[[int, int], None]
"""Called with the number of files done and of all files."""

SAMPLE_RATE = 16_000

# What libsndfile counts in a FLAC file whose writer could not go back to say how much it wrote. It cannot read one.
_UNKNOWN = 2**62
# The same in a WAV file: from here on the size of its data is a placeholder.
_PLACEHOLDER = 0x7FFF0000
_DATA = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)

# An intact MP3 file decodes to within one frame of 1,152 samples of what its header promises.
_MP3_FRAME = 1152


class Undecodable(Exception):
    """A file whose samples cannot be had: missing, damaged, cut short, empty, or no audio at all."""


@dataclass(frozen=True)
class Utterance:
    """One thing said by one speaker. `audio` is joined in order and usually one file; `text` is the corpus's own."""

    id: str
    speaker: str
    audio: tuple[Path, ...]
    seconds: float
    text: str


@dataclass(frozen=True)
class Skipped:
    """What was left out and why; what differs within a kind of reason stands after its colon."""

    id: str
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


@dataclass(frozen=True)
class Corpus:
    """Speakers in the order of their names, each with at least one utterance, in the order of their ids."""

    name: str
    language: Language
    speakers: dict[str, list[Utterance]]
    skipped: list[Skipped]

    def utterances(self) -> list[Utterance]:
        return [utterance for own in self.speakers.values() for utterance in own]


def counted(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many were left out for each kind of reason, the most frequent first."""
    return dict(Counter(item.kind for item in skipped).most_common())


def measured(path: Path) -> float:
    """The length of a file in seconds, from its header alone."""
    with _opened(path) as file:
        return float(file.frames / file.samplerate)


def read_file(path: Path) -> Samples:
    """The samples of one file, float32, mono, at 16 kHz: channels are averaged, other rates resampled by soxr."""
    import numpy as np
    import soxr

    with _opened(path) as file:
        rate, promised = file.samplerate, file.frames
        slack = _MP3_FRAME if file.format == "MP3" else 0
        channels = _read(file, path)  # (samples, channels)
    if len(channels) + slack < promised:
        raise Undecodable(f"truncated: {path.name} holds {len(channels):,} of the {promised:,} samples it promises")
    if not np.isfinite(channels).all():
        raise Undecodable(f"undecodable: {path.name} holds samples that are not numbers")
    samples = channels.mean(axis=1)  # (samples,)
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    if len(samples) == 0:
        raise Undecodable(f"no samples: {path.name} is shorter than one sample at {SAMPLE_RATE:,} Hz")
    return np.ascontiguousarray(samples, dtype=np.float32)


def read_audio(utterance: Utterance) -> Samples:
    """The samples (n,) of an utterance: float32, mono, 16 kHz, several files joined. May raise `Undecodable`."""
    import numpy as np

    parts = [read_file(path) for path in utterance.audio]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open sound file that has samples, and as many as its header promises as far as the header can tell."""
    import soundfile

    try:
        file = soundfile.SoundFile(str(path))
    except (soundfile.SoundFileError, OSError):
        raise _refused(path) from None
    with file:
        if file.frames == 0:
            raise Undecodable("no samples: the file holds a header and nothing else")
        if file.frames >= _UNKNOWN:
            raise Undecodable("undecodable: the header does not say how many samples there are; write the file anew")
        # libsndfile shortens a cut WAV file to what is there, and says so only in its log.
        size = _DATA.search(file.extra_info)
        if size is not None and int(size[2]) < int(size[1]) < _PLACEHOLDER:
            raise Undecodable(
                f"truncated: {path.name} holds {int(size[2]):,} of the {int(size[1]):,} bytes it promises"
            )
        yield file


def _read(file: Any, path: Path) -> Samples:
    """All samples (samples, channels) of an open file."""
    import numpy as np
    import soundfile

    try:
        return np.asarray(file.read(dtype="float32", always_2d=True))
    except (soundfile.SoundFileError, OSError) as error:
        raise Undecodable(f"truncated: {path.name} opens but does not decode ({_sentence(error)})") from None


def _refused(path: Path) -> Undecodable:
    """Why a file does not open; libsndfile's own words say of an MP3 file that is no audio that it does not exist."""
    if not path.exists():
        return Undecodable("missing: there is no such file")
    if not path.is_file():
        return Undecodable("undecodable: not a file")
    if path.stat().st_size == 0:
        return Undecodable("no samples: the file has no bytes")
    if not os.access(path, os.R_OK):
        return Undecodable("undecodable: no permission to read the file")
    return Undecodable("undecodable: no audio of a known format, or damaged at its beginning")


def _sentence(error: Exception) -> str:
    """libsndfile's own words, without the path, which the reader of the reason has already."""
    return str(getattr(error, "error_string", error)).removeprefix("Error : ").strip().rstrip(".")
