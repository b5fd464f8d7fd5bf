"""Transcription of recordings of any length, with times (for use after training; not in the paper).

The models are trained on at most 30 s. A longer recording is cut where it is quietest within the second half of what
may be one window, so that a cut rarely meets a word. Words come with the frames in which they were heard; a pause or
a long line starts a new segment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from confide.errors import UserError
from confide.speech.decode import Word

RATE = 16_000
_HOP = RATE // 100  # loudness is measured in steps of 10 ms
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
    features: Callable[[np.ndarray], np.ndarray],  # (samples,) -> (frames, mels)
    logits: Callable[[np.ndarray], np.ndarray],  # (frames, mels) -> (output frames, tokens)
    words: Callable[[np.ndarray], list[Word]],  # (output frames, tokens) -> words: greedy, or a beam search
    longest: float = 25.0,
    frame_seconds: float = 0.03,
    pause: float = 0.8,
    line: int = 80,
) -> Transcript:
    """Cut, recognise each window, and gather the words into segments.

    `frame_seconds` is the time of an output frame. After `pause` seconds without a word, or when a segment would have
    more than `line` characters, the next one begins.
    """
    if samples.ndim != 1:
        raise UserError(f"samples have shape {samples.shape}; give one channel, for instance the mean of all")
    if not np.isfinite(samples).all():
        raise UserError("the recording holds values that are not numbers; it is damaged, decode it again")
    if longest < 1:
        raise UserError(f"longest={longest} s is too short a window; give at least 1 s")
    found: list[tuple[float, float, str]] = []
    for begin, end in windows(samples, longest):
        piece = samples[begin:end]
        if np.abs(piece).max() < _SILENCE:
            continue
        frames = features(piece)
        if len(frames) == 0:  # shorter than one frame
            continue
        for word in words(logits(frames)):
            start = begin / RATE + word.first * frame_seconds
            stop = min(begin / RATE + (word.last + 1) * frame_seconds, end / RATE)
            found.append((min(start, stop), stop, word.text))
    return Transcript(len(samples) / RATE, tuple(_segments(found, pause, line)))


def windows(samples: np.ndarray, longest: float) -> list[tuple[int, int]]:
    """Borders of pieces of at most `longest` seconds, cut at the quietest place of each one's second half."""
    size = int(longest * RATE)
    borders = [0]
    while len(samples) - borders[-1] > size:
        begin = borders[-1]
        half = begin + size // 2
        steps = samples[half : begin + size].astype(np.float64)
        steps = np.square(steps[: len(steps) // _HOP * _HOP].reshape(-1, _HOP)).sum(axis=1)
        loudness = np.convolve(steps, np.ones(min(_LOUDNESS_STEPS, len(steps))), mode="valid")
        quietest = int(loudness.argmin()) + min(_LOUDNESS_STEPS, len(steps)) // 2
        borders.append(half + quietest * _HOP)
    borders.append(len(samples))
    return [(a, b) for a, b in pairwise(borders) if b > a]


def _segments(found: list[tuple[float, float, str]], pause: float, line: int) -> list[Segment]:
    segments: list[Segment] = []
    for start, end, text in found:
        last = segments[-1] if segments else None
        if last and start - last.end < pause and len(last.text) + 1 + len(text) <= line:
            segments[-1] = Segment(last.start, end, f"{last.text} {text}")
        else:
            segments.append(Segment(start, end, text))
    return segments


def as_text(transcript: Transcript) -> str:
    """One segment per line."""
    return "".join(f"{segment.text}\n" for segment in transcript.segments)


def as_json(transcript: Transcript) -> str:
    """The whole text, the length in seconds and the segments with their times."""
    whole = {"text": transcript.text, "seconds": round(transcript.seconds, 3)}
    segments = [
        {**asdict(segment), "start": round(segment.start, 3), "end": round(segment.end, 3)}
        for segment in transcript.segments
    ]
    return json.dumps({**whole, "segments": segments}, ensure_ascii=False, indent=2) + "\n"


def as_srt(transcript: Transcript) -> str:
    """SubRip subtitles: number, times, text, empty line."""
    return "".join(
        f"{number}\n{_clock(segment.start)} --> {_clock(segment.end)}\n{segment.text}\n\n"
        for number, segment in enumerate(transcript.segments, start=1)
    )


def _clock(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    whole, milliseconds = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole:02},{milliseconds:03}"
