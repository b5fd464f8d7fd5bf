"""Reading audio: whatever the file holds, out come 16 kHz mono samples, or a reason why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide.speech.corpus import (
    SAMPLE_RATE,
    Skipped,
    Undecodable,
    Utterance,
    count_by_reason,
    file_seconds,
    read_audio,
    read_file,
)


def tone(seconds: float, rate: int, hertz: float = 440.0) -> Any:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def loudest(samples: Any) -> float:
    """The frequency with the most energy, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * SAMPLE_RATE / len(samples))


def reason(path: Path, read: Any) -> str:
    with pytest.raises(Undecodable) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize("ending", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_any_rate_and_format_becomes_the_same_tone_at_16_khz(tmp_path: Path, ending: str, rate: int) -> None:
    path = tmp_path / f"tone.{ending}"
    soundfile.write(path, tone(1.0, rate), rate)
    samples = read_file(path)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) == pytest.approx(SAMPLE_RATE, abs=2)
    assert loudest(samples) == pytest.approx(440, abs=2)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert file_seconds(path) == pytest.approx(1.0, abs=0.001)


def test_stereo_becomes_the_mean_of_its_channels(tmp_path: Path) -> None:
    left, right = tone(0.5, SAMPLE_RATE, 300), tone(0.5, SAMPLE_RATE, 900)
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([left, right], axis=1), SAMPLE_RATE, subtype="FLOAT")
    np.testing.assert_allclose(read_file(path), (left + right) / 2, atol=1e-6)


def test_a_16_khz_mono_file_is_read_sample_for_sample(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, 5_000).astype(np.float32)
    path = tmp_path / "exact.wav"
    soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
    np.testing.assert_array_equal(read_file(path), samples)


def test_resampling_leaves_out_what_16_khz_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "high.wav"
    soundfile.write(path, tone(0.5, 48_000, 12_000), 48_000)
    assert np.abs(read_file(path)[1_000:-1_000]).max() < 1e-3


def test_files_of_an_utterance_are_joined_in_order_whatever_their_rates(tmp_path: Path) -> None:
    files = []
    for name, rate, hertz in (("first.flac", 8_000, 500.0), ("second.mp3", 44_100, 1_500.0)):
        soundfile.write(tmp_path / name, tone(0.5, rate, hertz), rate)
        files.append(tmp_path / name)
    samples = read_audio(Utterance("u", "s", tuple(files), 1.0, "text"))
    assert len(samples) == pytest.approx(SAMPLE_RATE, abs=4)
    assert loudest(samples[: SAMPLE_RATE // 2]) == pytest.approx(500, abs=4)
    assert loudest(samples[SAMPLE_RATE // 2 :]) == pytest.approx(1_500, abs=4)


@pytest.mark.parametrize("ending", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_truncated_file_is_found_at_the_latest_when_it_is_read(tmp_path: Path, ending: str, kept: float) -> None:
    whole, cut = tmp_path / f"whole.{ending}", tmp_path / f"cut.{ending}"
    soundfile.write(whole, np.random.default_rng(0).uniform(-0.5, 0.5, 48_000), SAMPLE_RATE)
    content = whole.read_bytes()
    cut.write_bytes(content[: int(kept * len(content))])
    read_file(whole)
    if ending == "ogg":
        # An Ogg stream ends where its pages end; what is left is whole.
        assert len(read_file(cut)) < 48_000
    else:
        assert reason(cut, read_file).startswith("truncated: cut.")


def test_a_truncated_wav_file_is_found_by_its_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "cut.wav"
    soundfile.write(path, tone(1.0, SAMPLE_RATE), SAMPLE_RATE)
    path.write_bytes(path.read_bytes()[:20_000])
    assert reason(path, file_seconds) == "truncated: cut.wav holds 19,956 of the 32,000 bytes it promises"


def test_a_wav_file_written_to_a_pipe_is_whole_although_its_header_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "piped.wav"
    soundfile.write(path, tone(1.0, SAMPLE_RATE), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert file_seconds(path) == 1.0
    assert len(read_file(path)) == SAMPLE_RATE


def test_a_flac_file_that_does_not_say_its_length_is_refused_not_fatal(tmp_path: Path) -> None:
    path = tmp_path / "piped.flac"
    soundfile.write(path, tone(1.0, SAMPLE_RATE), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = b"\0\0\0\0"
    path.write_bytes(content)
    for read in (file_seconds, read_file):
        assert "does not say how many samples" in reason(path, read)


@pytest.mark.parametrize("ending", ["wav", "flac", "mp3"])
def test_no_bytes_no_samples_and_no_audio_are_told_apart(tmp_path: Path, ending: str) -> None:
    empty, text = tmp_path / f"empty.{ending}", tmp_path / f"text.{ending}"
    empty.touch()
    text.write_text("this is not audio\n" * 100)
    for read in (file_seconds, read_file):
        assert reason(empty, read) == "no samples: the file has no bytes"
        assert reason(text, read).startswith("undecodable: no audio of a known format")
        assert reason(tmp_path / f"absent.{ending}", read) == "missing: there is no such file"
        assert reason(tmp_path, read) == "undecodable: not a file"


def test_a_header_without_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "header.wav"
    soundfile.write(path, np.zeros(0), SAMPLE_RATE)
    assert reason(path, file_seconds).startswith("no samples: the file holds a header")


def test_less_than_one_sample_at_16_khz_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "short.wav"
    soundfile.write(path, np.zeros(1), 96_000)
    assert "no samples" in reason(path, read_file)


def test_samples_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    samples = tone(0.1, SAMPLE_RATE).astype(np.float32)
    samples[7] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, SAMPLE_RATE, subtype="FLOAT")
    assert "not numbers" in reason(tmp_path / "nan.wav", read_file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_says_so(tmp_path: Path) -> None:
    path = tmp_path / "locked.wav"
    soundfile.write(path, tone(0.1, SAMPLE_RATE), SAMPLE_RATE)
    path.chmod(0)
    assert "permission" in reason(path, file_seconds)


def test_silence_is_audio(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.flac", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    assert not read_file(tmp_path / "silence.flac").any()


def test_reasons_are_counted_by_what_stands_before_the_colon() -> None:
    skipped = [Skipped("a", "empty text"), Skipped("b", "truncated: 3 of 4"), Skipped("c", "truncated: 1 of 9")]
    assert count_by_reason(skipped) == {"truncated": 2, "empty text": 1}
