"""A pool of words that espeak-ng has said once, for a population that borrows them (see `personas`).

A pool holds every word in every base voice: a pair of accent and variant with a pitch, a liveliness and a rate of its
own. Each part of a population has other pairs, so no test person has a voice that was trained on. Two hundred voices
and the ten digits are 27 MB of 16-bit samples in one file, made in some twenty seconds and never again. How many
people borrow from it makes no difference to its size.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from confide.errors import UserError
from confide.files import cache_folder, make_folder, write_atomically
from confide.progress import Reporter
from confide.randomness import generator
from confide.speech.corpus import SAMPLE_RATE, Language, read_file
from confide.speech.espeak import Recording, Voice
from confide.speech.voices import digest_with_wheel, pairs, public_pairs, speak_all, sweep

Part = Literal["seed", "train", "validation", "test"]

# Part of the file's name: change it whenever the same settings would give other samples.
_SCHEME = 2
# One of the users' pairs of accent and variant in so many belongs to the people for validation.
_VALIDATION_SHARE = 5
# From where to where a base voice's properties are drawn uniformly.
_RANGES = {"pitch": (15, 85), "pitch_range": (20, 90), "rate": (120, 220)}
_QUIET = {"snr": 90.0, "tilt": 0.0, "reverberation": 0.0, "echo": 0.0, "level": 0.5}
# A word begins where it first exceeds this share of its peak, less the margin.
_SILENCE, _MARGIN = 0.01, round(0.01 * SAMPLE_RATE)


@dataclass(frozen=True)
class PoolSettings:
    """What is in a pool: every word in so many voices of one part of the population."""

    language: Language
    part: Part
    voices: int
    words: tuple[str, ...]

    @property
    def digest(self) -> str:
        return digest_with_wheel({**asdict(self), "scheme": _SCHEME})


@dataclass(frozen=True)
class Pool:
    """Words one after the other, and where each begins."""

    samples: NDArray[np.int16]  # (all samples,)
    begins: NDArray[np.int64]  # (voices, words)
    lengths: NDArray[np.int64]  # (voices, words)

    def word(self, voice: int, word: int) -> NDArray[np.int16]:
        begin = self.begins[voice, word]
        return self.samples[begin : begin + self.lengths[voice, word]]


@cache
def voice_pairs(language: Language, part: Part) -> tuple[tuple[str, str], ...]:
    """The accents and variants that a part's base voices may have; no pair is in two parts."""
    if part in ("seed", "test"):
        return public_pairs(language) if part == "seed" else pairs(language, "test")
    federated = pairs(language, "federated")
    hashes = {pair: hashlib.blake2b("+".join(pair).encode(), key=b"validation").digest()[0] for pair in federated}
    return tuple(p for p in federated if (hashes[p] % _VALIDATION_SHARE == 0) == (part == "validation"))


def base_voice(settings: PoolSettings, number: int) -> Voice:
    """One voice of the pool. The pairs take turns in a random order, so that each is used as often."""
    purpose = f"pool/{settings.language}/{settings.part}"
    options = voice_pairs(settings.language, settings.part)
    turn, place = divmod(number, len(options))
    accent, variant = options[int(np.argsort(generator(0, f"{purpose}/order", user=turn).random(len(options)))[place])]
    chances = generator(0, purpose, user=number).random(len(_RANGES))
    drawn = {
        name: round(low + (high - low) * c) for (name, (low, high)), c in zip(_RANGES.items(), chances, strict=True)
    }
    values: dict[str, Any] = {**_QUIET, **drawn}
    return Voice(accent, variant, **values)


@cache
def open_pool(settings: PoolSettings, folder: Path | None = None, quiet: bool = False) -> Pool:
    """The pool from the cache, made if it is not there or not as it was written."""
    place = (folder or cache_folder() / "voices").expanduser()
    path = place / f"pool-{settings.digest}.npy"
    pool = _read(path, settings)
    if pool is None:
        make_folder(place)
        _make(path, settings, quiet)
        pool = _read(path, settings)
    if pool is None:
        raise UserError(
            f"the pool of voices {path} is damaged although it was just made; expected a folder that keeps what is "
            "written: check the disk, or name another cache"
        )
    return pool


def _read(path: Path, settings: PoolSettings) -> Pool | None:
    try:
        samples = np.load(path, mmap_mode="r", allow_pickle=False)
        note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        lengths = np.array(note["lengths"], dtype=np.int64)
        if samples.dtype != np.int16 or zlib.crc32(samples.tobytes()) != note["checksum"]:
            return None
        if lengths.shape != (settings.voices, len(settings.words)) or lengths.sum() != len(samples):
            return None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    ends = np.cumsum(lengths).reshape(lengths.shape)
    return Pool(samples, ends - lengths, lengths)


def _make(path: Path, settings: PoolSettings, quiet: bool) -> None:
    """Let espeak-ng say every word in every voice, and write them into one file."""
    sweep(path.parent, ())
    making = path.parent / f".{path.stem}.{os.getpid()}"
    try:
        names = [f"voice-{number:05d}" for number in range(settings.voices)]
        jobs = (
            Recording(name, str(making / name), base_voice(settings, n), settings.words, 0, "pool", n)
            for n, name in enumerate(names)
        )

        def other(job: Recording, turn: int) -> Recording:
            """Of a speaker who crashes the library on some word, the same with a voice that nobody has."""
            return replace(job, voice=base_voice(settings, job.number + turn * settings.voices))

        with Reporter(f"base voices ({settings.part})", settings.voices, quiet=quiet) as reporter:
            speak_all(jobs, reporter.advance, other)
        words = list(_read_words(making, names, settings))
    finally:
        shutil.rmtree(making, ignore_errors=True)
    samples = np.concatenate(words)
    lengths = np.array([len(word) for word in words]).reshape(settings.voices, len(settings.words))
    note = {**asdict(settings), "lengths": lengths.tolist(), "checksum": zlib.crc32(samples.tobytes())}
    _write(path.with_suffix(".json"), json.dumps(note, ensure_ascii=False).encode())
    _write(path, _to_npy(samples))


def _read_words(folder: Path, names: list[str], settings: PoolSettings) -> Iterator[NDArray[np.int16]]:
    for name, number in product(names, range(len(settings.words))):
        sound = read_file(folder / name / f"{number:04d}.flac")
        loud = np.flatnonzero(np.abs(sound) > _SILENCE * np.abs(sound).max())
        begin, end = max(int(loud[0]) - _MARGIN, 0), int(loud[-1]) + _MARGIN
        yield np.round(sound[begin:end] * 32767.0).astype(np.int16)


def _to_npy(samples: NDArray[np.int16]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, samples, allow_pickle=False)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content, f".{os.getpid()}.tmp")
    except OSError as error:
        raise UserError(
            f"cannot write the pool of voices to {path} ({error.strerror}); expected a writable folder with "
            f"{len(content) / 1e6:.1f} MB free: name another cache folder"
        ) from error
