"""AudioMNIST and FSDD: single spoken digits, joined into utterances of two to four digits of one speaker.

Not PFL-ASR's corpora: small real ones, for trying its claims. Each recording is used once per pass. The seed and the
files that are there decide which are joined; an utterance's id names its digits and takes, so that two seeds never give
the same id to different audio.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus, read_lengths
from confide.speech.corpora.settings import SpeakerSettings, find_folder
from confide.speech.corpora.shares import hash_to_integer
from confide.speech.corpus import Corpus, Progress, Skipped
from confide.speech.grammar import DIGITS

# digit_speaker_take.flac, or .wav as both were first published.
_FILE = re.compile(r"\d_[^_]+_\d+\.(?:flac|wav)")
_AUDIOMNIST = "https://github.com/soerenab/AudioMNIST (its folder data)"
_FSDD = "https://github.com/Jakobovski/free-spoken-digit-dataset (its folder recordings)"


class _DigitSettings(SpeakerSettings):
    fewest: int = Field(2, ge=1, le=20, description="digits in the shortest utterance")
    most: int = Field(4, ge=1, le=20, description="digits in the longest utterance")
    passes: int = Field(1, ge=1, le=10, description="times that each recording is used, each time beside others")

    @model_validator(mode="after")
    def _ordered(self) -> _DigitSettings:
        least = 2 * self.fewest - 1
        if self.most < least:
            raise PydanticCustomError(
                "digits", "Input should be most of at least 2 x fewest - 1 = {least}, or recordings would be left over",
                {"least": least},
            )  # fmt: skip
        return self


class AudioMnistSettings(_DigitSettings):
    """AudioMNIST: 60 people, ten digits, several takes, with many accents of English."""

    kind: Literal["audiomnist"] = "audiomnist"
    folder: LocalPath | None = Field(
        None, description="the folder of the speakers' folders 01 to 60; else audiomnist in CONFIDE_DATA"
    )
    subset: Literal["train", "test", "all"] = Field(
        "train", description="train: speakers 01 to 48; test: 49 to 60; all: everyone"
    )

    def read(self, progress: Progress | None = None) -> Corpus:
        """Join the takes of each speaker of the subset."""
        folder = find_folder(self.folder, "audiomnist", "AudioMNIST", _AUDIOMNIST)
        asked = {"train": range(1, 49), "test": range(49, 61), "all": range(1, 61)}[self.subset]
        everyone = (item for item in folder.iterdir() if item.is_dir() and item.name.isdecimal())
        files = (file for person in everyone if int(person.name) in asked for file in person.iterdir())
        name = "AudioMNIST" if self.subset == "all" else f"AudioMNIST-{self.subset}"
        return _join(name, files, self, progress)


class FsddSettings(_DigitSettings):
    """Free Spoken Digit Dataset: 6 people, 8 kHz."""

    kind: Literal["fsdd"] = "fsdd"
    folder: LocalPath | None = Field(None, description="the folder of the recordings; else fsdd in CONFIDE_DATA")

    def read(self, progress: Progress | None = None) -> Corpus:
        """Join the takes of each speaker."""
        folder = find_folder(self.folder, "fsdd", "FSDD", _FSDD)
        return _join("FSDD", folder.iterdir(), self, progress)


def _join(name: str, files: Iterable[Path], settings: _DigitSettings, progress: Progress | None) -> Corpus:
    recordings = sorted(file for file in files if _FILE.fullmatch(file.name))
    takes: dict[str, list[Path]] = {}
    seconds: dict[Path, float] = {}
    skipped: list[Skipped] = []
    # A damaged recording is left out before joining, so that it does not take its neighbours with it.
    for file, length in zip(recordings, read_lengths(recordings, progress), strict=True):
        if isinstance(length, str):
            skipped.append(Skipped(file.name, length))
        else:
            seconds[file] = length
            takes.setdefault(file.stem.split("_")[1], []).append(file)
    entries: dict[str, Entry] = {}
    for speaker, own in sorted(takes.items()):
        if len(own) < settings.fewest:
            reason = f"too few recordings: the speaker has {len(own)}, fewer than the shortest utterance"
            skipped += [Skipped(file.name, reason) for file in own]
            continue
        for seed in range(settings.seed, settings.seed + settings.passes):
            order = sorted(own, key=lambda file: (hash_to_integer(seed, "digits", file.stem), file.stem))
            for group in _groups(order, speaker, seed, settings):
                entry = _entry(speaker, group, sum(seconds[file] for file in group))
                entries[entry.id] = entry  # two passes may join the same recordings; they count once
    return make_corpus(name, "en", [*skipped, *entries.values()], settings)


def _groups(files: list[Path], speaker: str, seed: int, settings: _DigitSettings) -> Iterable[list[Path]]:
    """Cut at least `fewest` files into groups of fewest to most."""
    begin = 0
    while begin < len(files):
        left = len(files) - begin
        sizes = [n for n in range(settings.fewest, settings.most + 1) if left == n or left - n >= settings.fewest]
        size = sizes[hash_to_integer(seed, "length", speaker, str(begin)) % len(sizes)]
        yield files[begin : begin + size]
        begin += size


def _entry(speaker: str, group: list[Path], seconds: float) -> Entry:
    parts = [file.stem.split("_") for file in group]
    takes = "-".join(f"{digit}.{take}" for digit, _, take in parts)
    text = " ".join(DIGITS["en"][int(digit)] for digit, _, _ in parts)
    return Entry(f"{speaker}-{takes}", speaker, tuple(group), text, seconds)
