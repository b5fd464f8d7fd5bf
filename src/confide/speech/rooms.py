"""The room and the background noise in which the embedded corpus records a voice."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

# Sound has decayed by 60 dB, a factor of 1,000, after the time that a room is described by.
_DECAY = np.log(1000.0)
# The first echo arrives after so many seconds.
_FIRST_ECHO = 0.004
# Below so many hertz noise is flat; otherwise nearly all of its energy would lie where nobody hears it.
_CORNER = 100.0


def impulse_response(seconds: float, share: float, rate: int, draw: np.random.Generator) -> Samples:
    """A room's answer to a click: the click, then noise that decays by 60 dB within `seconds`.

    `share` is the energy of all echoes together relative to that of the direct sound.
    """
    response = np.zeros(1 + round(seconds * rate), dtype=np.float32)
    response[0] = 1.0
    first = round(_FIRST_ECHO * rate)
    if len(response) > first and share > 0:
        times = np.arange(first, len(response)) / rate
        echoes = draw.standard_normal(len(times)) * np.exp(-_DECAY * times / seconds)
        response[first:] = echoes * np.sqrt(share / np.square(echoes).sum())
    return response


def add_room_and_noise(
    voice: Samples, response: Samples, snr: float, tilt: float, level: float, rate: int, draw: np.random.Generator
) -> NDArray[np.int16]:
    """Record a voice (n,) in a room with noise `snr` decibels below it, as 16-bit samples whose peak is `level`.

    Above 100 Hz the noise falls by 6 * tilt decibels per octave: 0 is white, 1 sounds like traffic.
    """
    size = 1 << (len(voice) + len(response) - 1).bit_length()
    spectrum = np.fft.rfft(voice, size)
    if len(response) > 1:
        spectrum *= np.fft.rfft(response, size)
    # Noise is made in the same transform: random phases and lengths, shaped by frequency.
    parts = draw.standard_normal((2, len(spectrum)), dtype=np.float32)
    noise = (parts[0] + 1j * parts[1]) * _shape(size, tilt, rate)
    ratio = _energy(spectrum) / _energy(noise)
    noise *= np.float32(np.sqrt(ratio * size / len(voice)) * 10.0 ** (-snr / 20.0))
    sound = np.fft.irfft(spectrum + noise, size)[: len(voice)]
    peak = max(float(np.abs(sound).max()), 1e-9)
    return np.round(sound * (level * 32767.0 / peak)).astype(np.int16)


@lru_cache(maxsize=8)
def _shape(size: int, tilt: float, rate: int) -> Samples:
    """How much of each frequency is in the noise."""  # (size / 2 + 1,)
    hertz = np.fft.rfftfreq(size, 1.0 / rate)
    shape = np.maximum(hertz / _CORNER, 1.0) ** -tilt
    shape[0] = 0.0
    return np.asarray(shape, dtype=np.float32)


def _energy(spectrum: NDArray[np.complexfloating]) -> float:
    return float(np.square(spectrum.real).sum() + np.square(spectrum.imag).sum()) + 1e-20
