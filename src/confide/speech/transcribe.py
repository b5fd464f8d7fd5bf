"""Transcription of recordings of any length, with times (for use after training; not in the paper).

Models are trained on at most 30 s, so `windows` cuts a longer recording, at quiet places where a cut rarely meets a
word. The decoder gives each word with its frames; a pause or a long line starts a new segment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from confide.errors import UserError
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.decode import Word

_HOP = SAMPLE_RATE // 100  # loudness is measured in steps of 10 ms
_LOUDNESS_STEPS = 20  # over 200 ms
_SILENCE = 1e-4  # three steps of a 16-bit recording: nothing was recorded


@dataclass(frozen=True)
class Segment:
    """Words that belong together, in seconds from the start of the recording."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """What a recording says."""

    seconds: float
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return " ".join(segment.text for segment in self.segments)


def transcribe(
    samples: np.ndarray,  # (samples,) 16 kHz mono
    recognise: Callable[[np.ndarray], list[Word]],  # the words of one window
    frame_seconds: float,
    longest: float = 25.0,
    pause: float = 0.8,
    line: int = 80,
    late: float = 0.0,
) -> Transcript:
    """Cut into windows, recognise each one, and join the words into segments.

    `frame_seconds` is the time of an output frame. After `pause` seconds without a word, or when a segment would have
    more than `line` characters, the next one begins. `late` seconds of silence were put before each window.
    """
    if samples.ndim != 1:
        raise UserError(f"samples have shape {samples.shape}; give one channel, for instance the mean of all")
    if not np.isfinite(samples).all():
        raise UserError("the recording holds values that are not numbers; it is damaged, decode it again")
    if longest < 1:
        raise UserError(f"longest={longest} s is too short a window; give at least 1 s")
    segments: list[Segment] = []
    for begin, end in windows(samples, longest):
        piece = samples[begin:end]
        for word in recognise(piece) if np.abs(piece).max() >= _SILENCE else []:
            first, last = (max(0.0, frame * frame_seconds - late) for frame in (word.first, word.last + 1))
            stop = min(begin / SAMPLE_RATE + last, end / SAMPLE_RATE)
            start = min(begin / SAMPLE_RATE + first, stop)
            before = segments[-1] if segments else None
            if before and start - before.end < pause and len(before.text) + 1 + len(word.text) <= line:
                segments[-1] = Segment(before.start, stop, f"{before.text} {word.text}")
            else:
                segments.append(Segment(start, stop, word.text))
    return Transcript(len(samples) / SAMPLE_RATE, tuple(segments))


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


def as_json(transcript: Transcript) -> str:
    """The whole text, the length in seconds and the segments with their times."""
    segments = [{"start": round(s.start, 3), "end": round(s.end, 3), "text": s.text} for s in transcript.segments]
    whole = {"text": transcript.text, "seconds": round(transcript.seconds, 3), "segments": segments}
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"


def as_srt(transcript: Transcript) -> str:
    """SubRip subtitles: number, times, text, empty line."""
    return "".join(
        f"{number}\n{_clock(segment.start)} --> {_clock(segment.end)}\n{segment.text}\n\n"
        for number, segment in enumerate(transcript.segments, start=1)
    )


def _clock(seconds: float) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{milliseconds:03}"
