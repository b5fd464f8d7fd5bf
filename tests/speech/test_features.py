"""Log-mels: against kaldi-native-fbank, against the formula written out, and on audio that is hardly audio."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from confide.speech.features import FeatureSettings, frame_count, log_mel

PAPER = FeatureSettings()
RAW = PAPER.model_copy(update={"normalise": False})
DATA = Path(os.environ.get("CONFIDE_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


def _kaldi(samples: np.ndarray, in_hertz: bool) -> np.ndarray:
    """Kaldi's filterbank magnitudes with our settings; triangles linear in hertz, as librosa's, or in mels."""
    import kaldi_native_fbank

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0
    options.frame_opts.preemph_coeff = 0.97
    options.frame_opts.remove_dc_offset = False
    options.frame_opts.window_type = "hamming"
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = 80
    options.mel_opts.low_freq = 0
    options.mel_opts.high_freq = 8000
    options.mel_opts.is_librosa = in_hertz
    options.mel_opts.norm = ""
    options.mel_opts.use_slaney_mel_scale = False
    options.use_power = False
    options.use_log_fbank = False
    bank = kaldi_native_fbank.OnlineFbank(options)
    bank.accept_waveform(16_000, (samples * 32768.0).tolist())
    bank.input_finished()
    return np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])


def _noisy_tone(seconds: float, seed: int = 0) -> np.ndarray:
    times = np.arange(round(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).standard_normal(len(times))
    return (0.3 * np.sin(2 * np.pi * 440 * times) + 0.01 * noise).astype(np.float32)


def _speech() -> np.ndarray:
    import soundfile

    path = DATA / "audiomnist" / "01" / "0_01_0.flac"
    if not path.exists():
        pytest.skip(f"no real speech at {path}; name the folder in CONFIDE_DATA")
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 16_000
    return np.asarray(samples)


@pytest.mark.parametrize("real", [False, True])
def test_log_mels_are_kaldis(real: bool) -> None:
    samples = _speech() if real else _noisy_tone(1.0)
    # Both compute in float32 but transform in another order: 2.7e-5 was seen, a bin off by one gives 1e-1 and more.
    theirs = np.log(np.maximum(_kaldi(samples, in_hertz=True), 1.0))
    np.testing.assert_allclose(log_mel(samples, RAW), theirs, atol=2e-4)
    # Kaldi's own triangles are linear in mels, not in hertz, which is all the difference there may be.
    np.testing.assert_allclose(log_mel(samples, RAW), np.log(np.maximum(_kaldi(samples, False), 1.0)), atol=3e-2)


def test_log_mels_are_the_formula_written_out() -> None:
    samples = _noisy_tone(0.05).astype(np.float64)
    mel = [2595 * np.log10(1 + f / 700) for f in (0.0, 8000.0)]
    corners = [700 * (10 ** ((mel[0] + (mel[1] - mel[0]) * i / 81) / 2595) - 1) for i in range(82)]
    expected = []
    for begin in range(0, len(samples) - 399, 160):
        x = samples[begin : begin + 400] * 32768
        y = [x[0] - 0.97 * x[0]] + [x[i] - 0.97 * x[i - 1] for i in range(1, 400)]
        z = [y[i] * (0.54 - 0.46 * np.cos(2 * np.pi * i / 399)) for i in range(400)]
        size = [abs(sum(z[i] * np.exp(-2j * np.pi * k * i / 512) for i in range(400))) for k in range(257)]
        row = []
        for left, peak, right in zip(corners, corners[1:], corners[2:], strict=False):
            hertz = [k * 16_000 / 512 for k in range(257)]
            heights = [max(0.0, min((f - left) / (peak - left), (right - f) / (right - peak))) for f in hertz]
            row.append(np.log(max(1.0, sum(h * s for h, s in zip(heights, size, strict=True)))))
        expected.append(row)
    ours = log_mel(samples, RAW)
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    scaled = (np.array(expected) - np.mean(expected)) / np.std(expected)
    np.testing.assert_allclose(log_mel(samples, PAPER), scaled, atol=1e-3)


@given(st.integers(0, 20_000), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_features_are_finite_and_normalised_whatever_the_length(samples: int, seed: int) -> None:
    features = log_mel(_noisy_tone(samples / 16_000, seed), PAPER)
    assert features.shape == (frame_count(samples, PAPER), 80)
    assert features.dtype == np.float32
    assert np.isfinite(features).all()
    if samples:
        assert features.mean() == pytest.approx(0, abs=1e-3)
        assert features.std() == pytest.approx(1, abs=1e-3)


def test_frames_are_whole_windows_but_at_least_one() -> None:
    counts = {n: frame_count(n, PAPER) for n in (0, 1, 399, 400, 559, 560, 16_000)}
    assert counts == {0: 0, 1: 1, 399: 1, 400: 1, 559: 1, 560: 2, 16_000: 98}


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-6])
@pytest.mark.parametrize("length", [1, 399, 400, 16_000])
def test_silence_and_constant_signals_give_finite_features(value: float, length: int) -> None:
    features = log_mel(np.full(length, value, dtype=np.float32), PAPER)
    assert np.isfinite(features).all()
    if value == 0.0:
        assert not features.any()


def test_long_audio_is_the_same_as_its_blocks() -> None:
    samples = _noisy_tone(8.0)
    whole = log_mel(samples, RAW)
    part = log_mel(samples[160 * 300 :], RAW)
    np.testing.assert_allclose(whole[300:], part, atol=1e-5)


def test_extraction_transforms_many_frames_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    original = np.fft.rfft

    def counted(block: np.ndarray, size: int) -> np.ndarray:
        frames.append(len(block))
        return original(block, size)

    monkeypatch.setattr(np.fft, "rfft", counted)
    features = log_mel(_noisy_tone(20.0), PAPER)
    assert sum(frames) == len(features)  # none twice
    assert min(frames[:-1]) >= 100


def test_the_preset_has_the_released_codes_values() -> None:
    chosen = (PAPER.window_samples, PAPER.step_samples, PAPER.fft, PAPER.mels, PAPER.lowest, PAPER.highest)
    assert chosen == (400, 160, 512, 80, 0.0, 8000.0)
    assert (PAPER.scale, PAPER.pre_emphasis, PAPER.floor, PAPER.normalise) == (32768.0, 0.97, 1.0, True)


@pytest.mark.parametrize(
    "wrong", [{"fft": 256}, {"highest": 9000.0}, {"lowest": 8000.0}, {"melz": 40}, {"sample_rate": 44_100, "fft": 2048}]
)
def test_settings_that_do_not_fit_together_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        FeatureSettings.model_validate(wrong)


def test_features_at_half_the_rate_have_the_same_frames_and_the_same_low_bands() -> None:
    """Filters up to 4 kHz see the same in 16 kHz audio and in its 8 kHz copy; magnitudes halve with the samples."""
    common = {"highest": 3500.0, "mels": 20, "normalise": False, "pre_emphasis": 0.0}
    full = FeatureSettings.model_validate({**common, "fft": 1024})
    half = FeatureSettings.model_validate({**common, "fft": 512, "sample_rate": 8_000})
    samples = _noisy_tone(2.0)
    ours, theirs = log_mel(samples, full), log_mel(samples, half)
    assert ours.shape == theirs.shape
    loud = ours[1:-1] > 5  # away from the floor and from the ends, where the resampler has no neighbours
    assert loud.mean() > 0.5
    apart = np.abs(ours[1:-1] - theirs[1:-1] - np.log(2))[loud]
    assert np.median(apart) < 0.02
    assert np.quantile(apart, 0.99) < 0.1
