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
from confide.speech.stream import Partial, Stream
from confide.speech.transcribe import (
    Hearing,
    Segment,
    Spoken,
    Transcript,
    as_json,
    as_srt,
    as_text,
    as_words,
    transcribe,
    windows,
)

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
        path[first : first + len(spelt)] = spelt[: len(path) - first]
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
    got = transcribe(recording(77, tones), Hearing(heard, 0.03, pause=0.1), longest=10.0)
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
    assert [s.text for s in transcribe(samples, Hearing(heard, 0.03)).segments] == ["low high", "low"]
    short = transcribe(samples, Hearing(heard, 0.03, line=5))
    assert [s.text for s in short.segments] == ["low", "high", "low"]


@pytest.mark.parametrize("size", [0, 1, 100, 400])
def test_nothing_in_nothing_out(size: int) -> None:
    got = transcribe(np.ones(size, dtype=np.float32), Hearing(lambda _: [], 0.03))
    assert got == Transcript(size / RATE, ())
    assert as_text(got) == as_srt(got) == ""
    assert json.loads(as_json(got)) == {"text": "", "seconds": round(size / RATE, 3), "segments": []}


def test_silence_never_reaches_the_model() -> None:
    def never(_: np.ndarray) -> list[Word]:
        raise AssertionError

    assert transcribe(np.zeros(40 * RATE, dtype=np.float32), Hearing(never, 0.03)).segments == ()


def test_stereo_and_damaged_samples_are_errors() -> None:
    with pytest.raises(UserError, match="one channel"):
        transcribe(np.zeros((2, 100)), Hearing(heard, 0.03))
    with pytest.raises(UserError, match="not numbers"):
        transcribe(np.array([0.0, np.nan]), Hearing(heard, 0.03))
    with pytest.raises(UserError, match="at least 1 s"):
        transcribe(np.zeros(100), Hearing(heard, 0.03), longest=0.0)


def test_subtitles_have_the_format_of_subrip() -> None:
    words = Spoken("eins", 0.0, 1.9999, 0.5), Spoken("zwölf", 3599.9996, 3661.5, 0.98765)
    got = Transcript(4000.0, tuple(Segment((word,)) for word in words))
    assert as_srt(got) == ("1\n00:00:00,000 --> 00:00:02,000\neins\n\n2\n01:00:00,000 --> 01:01:01,500\nzwölf\n\n")
    assert re.fullmatch(r"eins\nzwölf\n", as_text(got))
    whole = json.loads(as_json(got))
    assert whole["text"] == "eins zwölf"
    times = {"start": 3600.0, "end": 3661.5}
    said = {"word": "zwölf", **times, "confidence": 0.9877}
    assert whole["segments"][1] == {**times, "text": "zwölf", "words": [said]}
    assert as_words(got) == "0.00\t2.00\t0.500\teins\n3600.00\t3661.50\t0.988\tzwölf\n"
    assert "zwölf" in as_json(got)


# Streams


def chunked(samples: np.ndarray, size: int, **more: float) -> tuple[list[Partial], Transcript]:
    stream = Stream(Hearing(heard, 0.03), **more)
    return [stream.feed(samples[i : i + size]) for i in range(0, len(samples), size)], stream.finish()


@pytest.mark.parametrize("size", [700, 8_000, 200_000])
def test_a_stream_ends_as_the_whole_recording_whatever_the_chunks(size: int) -> None:
    samples = recording(62, [(0.7 + 0.75 * i, 400.0 if i % 3 else 1200.0) for i in range(80)])
    _, ended = chunked(samples, size, every=5.0)
    whole = transcribe(samples, Hearing(heard, 0.03))
    assert ended == whole
    assert len(whole.text.split()) == 80


def test_what_a_stream_calls_final_never_changes_and_the_rest_catches_up() -> None:
    samples = recording(30, [(0.7 + 0.75 * i, 400.0 if i % 3 else 1200.0) for i in range(38)])
    partials, ended = chunked(samples, 8_000, longest=8.0, every=0.5)
    assert all(after.final.startswith(before.final) for before, after in pairwise(partials))
    assert ended.text.startswith(partials[-1].final)
    assert len({partial.final for partial in partials}) >= 4  # windows were closed on the way
    assert partials[5].final == ""  # 3 s: the first window is still open
    assert partials[5].agreed == "high low low"
    behind = [len(ended.text.split()[: round(p.seconds / 0.75)]) - len(p.text.split()) for p in partials]
    assert max(behind) <= 2


def test_a_window_that_is_too_short_for_a_stream_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1 s"):
        Stream(Hearing(heard, 0.03), longest=0.2)
