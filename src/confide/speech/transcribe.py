"""Transcription of recordings of any length, with times (for use after training; not in the paper).

Models are trained on at most 30 s, so `windows` cuts a longer recording, at quiet places where a cut rarely meets a
word. The decoder gives each word with its frames; a pause or a long line starts a new segment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from confide.errors import UserError
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.decode import Word

LONGEST = 25.0  # seconds of a window: models are trained on at most 30
_HOP = SAMPLE_RATE // 100  # loudness is measured in steps of 10 ms
_LOUDNESS_STEPS = 20  # over 200 ms
_SILENCE = 1e-4  # three steps of a 16-bit recording: nothing was recorded


@dataclass(frozen=True)
class Spoken:
    """A word, in seconds from the start of the recording, with the model's confidence (`decode.confidence`)."""

    text: str
    start: float
    end: float
    confidence: float

    def to_json(self) -> dict[str, Any]:
        times = {"start": round(self.start, 3), "end": round(self.end, 3)}
        return {"word": self.text, **times, "confidence": round(self.confidence, 4)}


@dataclass(frozen=True)
class Segment:
    """Words that belong together."""

    words: tuple[Spoken, ...]

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        return self.words[0].start

    @property
    def end(self) -> float:
        return self.words[-1].end


@dataclass(frozen=True)
class Transcript:
    """What a recording says."""

    seconds: float
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return " ".join(segment.text for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        """The whole text, the length in seconds, and the segments with the times of their words."""
        segments = [
            {
                "start": round(s.start, 3),
                "end": round(s.end, 3),
                "text": s.text,
                "words": [word.to_json() for word in s.words],
            }
            for s in self.segments
        ]
        return {"text": self.text, "seconds": round(self.seconds, 3), "segments": segments}


@dataclass(frozen=True)
class Hearing:
    """How the words of a window become words of a recording.

    `frame_seconds` is the time of an output frame. After `pause` seconds without a word, or when a segment would have
    more than `line` characters, the next one begins. `late` seconds of silence were put before each window.
    """

    recognise: Callable[[np.ndarray], list[Word]]  # the words of one window
    frame_seconds: float
    pause: float = 0.8
    line: int = 80
    late: float = 0.0

    def words(self, piece: np.ndarray, begin: int) -> list[Spoken]:
        """The words of a window that begins with this sample of the recording."""
        found, end = [], (begin + len(piece)) / SAMPLE_RATE
        for word in self.recognise(piece) if np.abs(piece).max() >= _SILENCE else []:
            first, last = (max(0.0, frame * self.frame_seconds - self.late) for frame in (word.first, word.last + 1))
            stop = min(begin / SAMPLE_RATE + last, end)
            found.append(Spoken(word.text, min(begin / SAMPLE_RATE + first, stop), stop, word.confidence))
        return found

    def joined(self, words: Iterable[Spoken]) -> tuple[Segment, ...]:
        """The words of a recording, in segments."""
        segments: list[Segment] = []
        for word in words:
            before = segments[-1] if segments else None
            if before and word.start - before.end < self.pause and len(before.text) + 1 + len(word.text) <= self.line:
                segments[-1] = Segment((*before.words, word))
            else:
                segments.append(Segment((word,)))
        return tuple(segments)


def transcribe(samples: np.ndarray, hearing: Hearing, longest: float = LONGEST) -> Transcript:
    """Cut a recording (n,) at 16 kHz into windows of at most `longest` seconds, and join the words of each."""
    check_samples(samples, longest)
    words = (word for begin, end in windows(samples, longest) for word in hearing.words(samples[begin:end], begin))
    return Transcript(len(samples) / SAMPLE_RATE, hearing.joined(words))


def check_samples(samples: np.ndarray, longest: float) -> None:
    """Refuse what is no recording of one channel, and windows that are too short."""
    if samples.ndim != 1:
        raise UserError(f"samples have shape {samples.shape}; give one channel, for instance the mean of all")
    if not np.isfinite(samples).all():
        raise UserError("the recording holds values that are not numbers; it is damaged, decode it again")
    if longest < 1:
        raise UserError(f"longest={longest} s is too short a window; give at least 1 s")


def windows(samples: np.ndarray, longest: float) -> list[tuple[int, int]]:
    """First sample and end of pieces of at most `longest` seconds, each cut where its second half is quietest."""
    size = int(longest * SAMPLE_RATE)
    borders = [0]
    while len(samples) - borders[-1] > size:
        begin = borders[-1]
        half = begin + size // 2
        steps = samples[half : begin + size].astype(np.float64)
        steps = np.square(steps[: len(steps) // _HOP * _HOP].reshape(-1, _HOP)).sum(axis=1)
        width = min(_LOUDNESS_STEPS, len(steps))
        loudness = np.convolve(steps, np.ones(width), mode="valid")
        borders.append(half + (int(loudness.argmin()) + width // 2) * _HOP)
    borders.append(len(samples))
    return [(a, b) for a, b in pairwise(borders) if b > a]


def as_text(transcript: Transcript) -> str:
    """One segment per line."""
    return "".join(f"{segment.text}\n" for segment in transcript.segments)


def as_words(transcript: Transcript) -> str:
    """One word per line: start, end, confidence, word."""
    words = (word for segment in transcript.segments for word in segment.words)
    return "".join(f"{w.start:.2f}\t{w.end:.2f}\t{w.confidence:.3f}\t{w.text}\n" for w in words)


def as_json(transcript: Transcript) -> str:
    return json.dumps(transcript.to_json(), ensure_ascii=False, indent=2) + "\n"


def as_srt(transcript: Transcript) -> str:
    """SubRip subtitles: number, times, text, empty line."""
    return "".join(
        f"{number}\n{_clock(segment.start)} --> {_clock(segment.end)}\n{segment.text}\n\n"
        for number, segment in enumerate(transcript.segments, start=1)
    )


def _clock(seconds: float) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{milliseconds:03}"
