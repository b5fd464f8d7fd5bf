"""A speech corpus (speakers with utterances), and how its audio is read.

Serves PFL-ASR, section 4 and appendix F: a user is a speaker, and all audio is brought to 16 kHz. A damaged file never
ends a run. `file_seconds` finds what the header gives away when a corpus is listed; `read_audio` finds the rest, such
as a FLAC file that breaks off. Both raise `Undecodable`, for the caller to count, name and skip.

The header of a cut file promises more samples than there are. An MP3 file without a Xing or Info header promises
nothing, so nobody can tell whether its end is missing.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from confide.speech import coded
from confide.speech.coded import Undecodable as Undecodable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

Language = Literal["en", "fr", "de"]
"""Those that have voices and a token set here."""
AnyLanguage = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
"""A language by its code; one beyond `Language` needs `task.letters` in the recipe."""
OWN_LANGUAGE = "en, fr or de; another code, such as es, needs task.letters"
Progress = Callable[[int, int], None]
"""Called with the number of files done and of all files."""

SAMPLE_RATE = 16_000

# A number of frames from here on means that a FLAC file's header does not tell it. libsndfile cannot read such a file.
_UNKNOWN = 2**62
# From here on the size of a WAV file's data is a placeholder.
_PLACEHOLDER = 0x7FFF0000
_DATA = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)

_UNKNOWN_FORMAT = "undecodable: no audio of a known format, or damaged at its beginning"

# An intact MP3 file decodes to within one frame of 1,152 samples of what its header promises.
_MP3_FRAME = 1152


class Made(Protocol):
    """Sound that is in no file of its own: computed whenever it is asked for, or held in a larger file."""

    @property
    def held(self) -> bool:
        """Whether it is held somewhere: its features are then kept as those of a file are."""

    @property
    def address(self) -> str:
        """Everything that decides the samples: it stands for them in digests and names of caches."""

    @property
    def length(self) -> int:
        """How many samples there are, without computing them."""

    def samples(self) -> Samples:
        """The samples (n,), float32, mono, 16 kHz."""


@dataclass(frozen=True)
class Utterance:
    """One thing said by one speaker. `audio` is joined in order and usually one file; `text` is the corpus's own.

    Where `made` is given there are no files, and `read_audio` computes the sound.
    """

    id: str
    speaker: str
    audio: tuple[Path, ...]
    seconds: float
    text: str
    made: Made | None = None


@dataclass(frozen=True)
class Skipped:
    """What was left out and why: the kind of reason, then a colon and the details."""

    id: str
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


@dataclass(frozen=True)
class Corpus:
    """Speakers in the order of their names, each with at least one utterance, in the order of their ids."""

    name: str
    language: str
    speakers: dict[str, list[Utterance]]
    skipped: list[Skipped]

    def utterances(self) -> list[Utterance]:
        return [utterance for own in self.speakers.values() for utterance in own]


def count_by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many were left out for each kind of reason, the most frequent first."""
    return dict(Counter(item.kind for item in skipped).most_common())


def file_seconds(path: Path, content: bytes | None = None) -> float:
    """The length of a file in seconds, from its header alone; `content` has its bytes where they are not on disk."""
    if content is None and coded.is_coded(path):
        return coded.seconds(path)
    with _open(path, content) as file:
        return float(file.frames / file.samplerate)


def read_file(path: Path, content: bytes | None = None) -> Samples:
    """The samples of one file, float32, mono, at 16 kHz: channels are averaged, other rates resampled by soxr.

    `content` has its bytes where they are not on disk.
    """
    import numpy as np

    channels, rate = coded.decode(path) if content is None and coded.is_coded(path) else _decode(path, content)
    if not np.isfinite(channels).all():
        raise Undecodable(f"undecodable: {path.name} holds samples that are not numbers")
    samples = channels.mean(axis=1)  # (samples,)
    if rate != SAMPLE_RATE:
        import soxr

        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    if len(samples) == 0:
        raise Undecodable(f"no samples: {path.name} is shorter than one sample at {SAMPLE_RATE:,} Hz")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _decode(path: Path, content: bytes | None) -> tuple[Samples, int]:
    """Samples (n, channels) of a file that libsndfile reads, and its rate."""
    import soundfile

    with _open(path, content) as file:
        rate, promised = file.samplerate, file.frames
        slack = _MP3_FRAME if file.format == "MP3" else 0
        try:
            channels = file.read(dtype="float32", always_2d=True)  # (samples, channels)
        except (soundfile.SoundFileError, OSError) as error:
            words = error.error_string if isinstance(error, soundfile.LibsndfileError) else str(error)
            cause = words.removeprefix("Error : ").strip().rstrip(".")
            raise Undecodable(f"truncated: {path.name} opens but does not decode ({cause})") from None
    if len(channels) + slack < promised:
        raise Undecodable(f"truncated: {path.name} holds {len(channels):,} of the {promised:,} samples it promises")
    return channels, rate


def read_audio(utterance: Utterance) -> Samples:
    """The samples (n,) of an utterance: float32, mono, 16 kHz, several files joined. May raise `Undecodable`."""
    import numpy as np

    if utterance.made is not None:
        return utterance.made.samples()
    parts = [read_file(path) for path in utterance.audio]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@contextmanager
def _open(path: Path, content: bytes | None = None) -> Iterator[Any]:
    """Open a sound file, and refuse one that has no samples or, as far as its header can tell, lacks some."""
    import soundfile

    try:
        file = soundfile.SoundFile(str(path) if content is None else io.BytesIO(content))
    except (soundfile.SoundFileError, OSError):
        raise Undecodable(_UNKNOWN_FORMAT if content is not None else _why_not_open(path)) from None
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


def _why_not_open(path: Path) -> str:
    """Why a file does not open. libsndfile says of an MP3 file that holds no audio that it does not exist."""
    if not path.exists():
        return "missing: there is no such file"
    if not path.is_file():
        return "undecodable: not a file"
    if path.stat().st_size == 0:
        return "no samples: the file has no bytes"
    if not os.access(path, os.R_OK):
        return "undecodable: no permission to read the file"
    return _UNKNOWN_FORMAT
