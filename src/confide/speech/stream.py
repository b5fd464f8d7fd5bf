"""Transcription while the recording is still going on: samples come in chunks, words go out.

A recogniser here hears a whole window at once: its attention looks in both directions, and loudness is brought to one
level over the window. So the words of a window that is still open may change with every chunk, and only those of a
window that is closed never do. Windows are cut as `transcribe` cuts them, at the quietest place of their second half,
which needs no sound after the window's longest end: a stream with windows of 25 s ends with the very transcript of the
whole recording, to the word and its time. Shorter windows settle words sooner, and cost context: then the text may
differ from that of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from confide.speech.corpus import SAMPLE_RATE
from confide.speech.transcribe import LONGEST, Hearing, Spoken, Transcript, check_samples, windows


@dataclass(frozen=True)
class Partial:
    """What has been heard so far."""

    seconds: float
    final: str  # of closed windows: it never changes
    agreed: str  # of the open one: the last two looks agree on it, so that it rarely changes
    rest: str  # the newest words, which often do

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.final, self.agreed, self.rest) if part)


class Stream:
    """Takes samples at 16 kHz, mono, in chunks of any size.

    Args:
        hearing: of a recogniser (`Recogniser.hearing()`).
        longest: seconds of a window.
        every: seconds of new sound after which the open window is looked at again.
    """

    def __init__(self, hearing: Hearing, longest: float = LONGEST, every: float = 1.0) -> None:
        check_samples(np.empty(0), longest)
        self._hearing, self._longest, self._every = hearing, longest, every
        self._open = np.empty(0, dtype=np.float32)  # samples of the open window
        self._begin = 0  # its first sample
        self._final: list[Spoken] = []
        self._looks: tuple[list[Spoken], list[Spoken]] = ([], [])  # at the open window: the last but one, and the last
        self._seen = 0  # samples of the open window at the last look

    def feed(self, samples: np.ndarray) -> Partial:
        """Hear some more; what is known afterwards."""
        check_samples(samples, self._longest)
        self._open = np.concatenate([self._open, samples.astype(np.float32)])
        while len(self._open) > self._longest * SAMPLE_RATE:
            (_, end), *_ = windows(self._open, self._longest)
            self._close(end)
        if len(self._open) - self._seen >= self._every * SAMPLE_RATE:
            self._looks = (self._looks[1], self._hearing.words(self._open, self._begin))
            self._seen = len(self._open)
        return self._partial()

    def finish(self) -> Transcript:
        """Hear the end; the transcript of everything."""
        if len(self._open):
            self._close(len(self._open))
        return Transcript(self._begin / SAMPLE_RATE, self._hearing.joined(self._final))

    def _close(self, end: int) -> None:
        """Close the open window at one of its samples; what comes after it begins the next one."""
        self._final += self._hearing.words(self._open[:end], self._begin)
        self._open, self._begin = self._open[end:], self._begin + end
        self._looks, self._seen = ([], []), 0

    def _partial(self) -> Partial:
        before, now = ([word.text for word in look] for look in self._looks)
        same = next(
            (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
        )
        seconds = (self._begin + len(self._open)) / SAMPLE_RATE
        final = " ".join(word.text for word in self._final)
        return Partial(seconds, final, " ".join(now[:same]), " ".join(now[same:]))
