"""LibriSpeech in its published layout: SUBSET/SPEAKER/CHAPTER/*.flac with SPEAKER-CHAPTER.trans.txt beside them.

Serves PFL-ASR, section 4 and Table 2: LS-100, LS-360 and LS-500 are the three training subsets, LS-860 and LS-960
their unions. Any other subset folder that is there, such as train-clean-5 of Mini LibriSpeech, goes by its own name.

Differs from the usual tool: lhotse's recipe reads the same layout, and a test compares the two lists, but it stops at
the first damaged file or empty transcript and passes over a missing file. A run here goes on and names each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import Local, LocalPath, is_path
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings, find_folder
from confide.speech.corpus import Corpus, Progress, Skipped

UNIONS: dict[str, tuple[str, ...]] = {
    "LS-100": ("train-clean-100",),
    "LS-360": ("train-clean-360",),
    "LS-500": ("train-other-500",),
    "LS-860": ("train-clean-360", "train-other-500"),
    "LS-960": ("train-clean-100", "train-clean-360", "train-other-500"),
}
_SOURCE = "https://www.openslr.org/12"


class LibriSpeechSettings(SpeakerSettings):
    """LibriSpeech: read English books, 16 kHz."""

    kind: Literal["librispeech"] = "librispeech"
    folder: LocalPath | None = Field(
        None, description="the folder LibriSpeech, or the one around it; else LibriSpeech in CONFIDE_DATA"
    )
    subset: Annotated[str, Local(is_path)] = Field(
        "LS-960",
        min_length=1,
        description="LS-100, LS-360, LS-500, LS-860, LS-960, or the name of a subset folder such as dev-clean",
    )

    def read(self, progress: Progress | None = None) -> Corpus:
        """Read the subset's transcripts; the speaker is the first part of an utterance's name."""
        root = find_folder(self.folder, "LibriSpeech", "LibriSpeech", _SOURCE)
        if (root / "LibriSpeech").is_dir():
            root = root / "LibriSpeech"
        folders = [_find_subset(root, part, self.subset) for part in UNIONS.get(self.subset, (self.subset,))]
        transcripts = (transcript for folder in folders for transcript in sorted(folder.rglob("*.trans.txt")))
        listed = chain.from_iterable(map(_read, transcripts))
        return make_corpus(_name(self.subset), "en", listed, self, progress)


def _find_subset(root: Path, part: str, asked: str) -> Path:
    folder = root / part
    if not folder.is_dir():
        there = sorted(item.name for item in root.iterdir() if item.is_dir())
        raise UserError(
            f"LibriSpeech in {root} has no subset folder {part!r}, which subset={asked} needs; it has "
            f"{', '.join(there) or 'none'}: choose one of those, or get {part} from {_SOURCE} (small subsets: "
            "https://www.openslr.org/31)"
        )
    return folder


def _read(transcript: Path) -> Iterator[Entry | Skipped]:
    try:
        lines = transcript.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        yield Skipped(str(transcript), f"unreadable transcript: {error}")
        return
    for line in lines:
        name, _, text = line.strip().partition(" ")
        if name:
            yield Entry(name, name.partition("-")[0], (transcript.parent / f"{name}.flac",), text.strip())


def _name(subset: str) -> str:
    """The name that Table 2 gives a subset, or one like it."""
    short = {parts[0]: name for name, parts in UNIONS.items() if len(parts) == 1}
    return short.get(subset, subset if subset in UNIONS else f"LS-{subset}")
