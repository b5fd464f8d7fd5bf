"""Recordings of any length become segments with the right times."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import UserError
from confide.speech.corpus import SAMPLE_RATE as RATE
from confide.speech.decode import Word, greedy_words
from confide.speech.transcribe import Segment, Transcript, as_json, as_srt, as_text, transcribe, windows

TONES = {400.0: "low", 1200.0: "high"}
NAMES = ["<blank>", "|", *"abcdefghijklmnopqrstuvwxyz"]


def tone_logits(samples: np.ndarray) -> np.ndarray:
    """A recogniser of two tones: spells a tone's name over the 30 ms frames in which it sounds."""
    pieces = samples[: len(samples) // 480 * 480].reshape(-1, 480)
    spectrum = np.abs(np.fft.rfft(pieces, axis=1))
    path = np.zeros(len(pieces), dtype=np.int64)
    loud = np.abs(pieces).max(axis=1) > 0.1
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(int), [0]])))
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        pitch = np.bincount(spectrum[first:after].argmax(axis=1)).argmax() * RATE / 480
        name = TONES[min(TONES, key=lambda hertz: abs(hertz - pitch))]
        spelt = [NAMES.index(letter) for letter in name]
        path[first : first + len(spelt)] = spelt
        path[first + len(spelt) : after] = spelt[-1]
        if after < len(path):
            path[after] = 1
    return np.eye(len(NAMES), dtype=np.float32)[path]


def heard(samples: np.ndarray) -> list[Word]:
    return greedy_words(tone_logits(samples), lambda ids: "".join(NAMES[i] for i in ids), boundary=1)


def recording(seconds: float, tones: list[tuple[float, float]]) -> np.ndarray:
    """Tones of half a second over faint noise."""
    samples = np.random.default_rng(0).normal(0, 0.001, int(seconds * RATE))
    for start, hertz in tones:
        at = int(start * RATE)
        samples[at : at + RATE // 2] += 0.5 * np.sin(2 * np.pi * hertz * np.arange(RATE // 2) / RATE)
    return samples.astype(np.float32)


def test_a_long_recording_keeps_every_word_and_its_time() -> None:
    tones = [(0.7 + 0.75 * i, 400.0 if i % 3 else 1200.0) for i in range(100)]  # pauses of a quarter of a second
    got = transcribe(recording(77, tones), heard, 0.03, longest=10.0, pause=0.1)
    assert [s.text for s in got.segments] == [TONES[hertz] for _, hertz in tones]
    for segment, (start, _) in zip(got.segments, tones, strict=True):
        assert segment.start == pytest.approx(start, abs=0.06)
        assert segment.end == pytest.approx(start + 0.5, abs=0.06)


def test_cuts_lie_in_pauses_and_windows_are_short_enough() -> None:
    samples = recording(60, [(0.6 * i, 400.0) for i in range(100)])
    borders = [end for _, end in windows(samples, 7.0)][:-1]
    assert len(borders) >= 8
    for border in borders:
        assert border % int(0.6 * RATE) >= 0.5 * RATE  # between two tones


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20 * RATE), st.floats(1, 8))
def test_windows_cover_every_sample_once(size: int, longest: float) -> None:
    pieces = windows(np.random.default_rng(size).normal(size=size).astype(np.float32), longest)
    assert sum(end - begin for begin, end in pieces) == size
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert all(0 < end - begin <= longest * RATE for begin, end in pieces)


def test_a_pause_or_a_full_line_starts_a_segment() -> None:
    samples = recording(12, [(1.0, 400.0), (1.7, 1200.0), (5.0, 400.0)])
    assert [s.text for s in transcribe(samples, heard, 0.03).segments] == ["low high", "low"]
    short = transcribe(samples, heard, 0.03, line=5)
    assert [s.text for s in short.segments] == ["low", "high", "low"]


@pytest.mark.parametrize("size", [0, 1, 100, 400])
def test_nothing_in_nothing_out(size: int) -> None:
    got = transcribe(np.ones(size, dtype=np.float32), lambda _: [], 0.03)
    assert got == Transcript(size / RATE, ())
    assert as_text(got) == as_srt(got) == ""
    assert json.loads(as_json(got)) == {"text": "", "seconds": round(size / RATE, 3), "segments": []}


def test_silence_never_reaches_the_model() -> None:
    def never(_: np.ndarray) -> list[Word]:
        raise AssertionError

    assert transcribe(np.zeros(40 * RATE, dtype=np.float32), never, 0.03).segments == ()


def test_stereo_and_damaged_samples_are_errors() -> None:
    with pytest.raises(UserError, match="one channel"):
        transcribe(np.zeros((2, 100)), heard, 0.03)
    with pytest.raises(UserError, match="not numbers"):
        transcribe(np.array([0.0, np.nan]), heard, 0.03)
    with pytest.raises(UserError, match="at least 1 s"):
        transcribe(np.zeros(100), heard, 0.03, longest=0.0)


def test_subtitles_have_the_format_of_subrip() -> None:
    got = Transcript(4000.0, (Segment(0.0, 1.9999, "eins"), Segment(3599.9996, 3661.5, "zwölf")))
    assert as_srt(got) == ("1\n00:00:00,000 --> 00:00:02,000\neins\n\n2\n01:00:00,000 --> 01:01:01,500\nzwölf\n\n")
    assert re.fullmatch(r"eins\nzwölf\n", as_text(got))
    whole = json.loads(as_json(got))
    assert whole["text"] == "eins zwölf"
    assert whole["segments"][1] == {"start": 3600.0, "end": 3661.5, "text": "zwölf"}
    assert "zwölf" in as_json(got)
