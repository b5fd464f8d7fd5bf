"""Personas: simulated people in any number, who borrow the words of a base voice and make them their own.

A persona is a base voice with its accent, pitch and rate (see `pool`), a vocal tract (a factor on all frequencies,
which moves pitch and rate along), a habit of pausing, a room, a microphone (a slope and the edges of its band), a noise
and a level. All of it is drawn at the address (seed, purpose, person), and what differs between two utterances of one
person at (seed, purpose, utterance, person). So a person sounds the same on every worker and in every order, and
nothing is stored for anybody. Computing an utterance of 1.3 s takes about a millisecond of one core.

It is practice, not evidence about people: everybody is espeak-ng at heart, reads each word in one way only, and differs
from the others along these lines and no others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from confide.randomness import Addresses, generator
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.rooms import impulse_response

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from confide.speech.corpus import Samples
    from confide.speech.pool import Pool

# From where to where each property is drawn: a factor between two people is as likely as its inverse, the rest uniform.
_FACTORS = {"tract": (0.87, 1.15), "low": (40.0, 300.0), "high": (3_400.0, 8_000.0)}
_UNIFORM = {
    "pause": (0.03, 0.35), "reverberation": (0.05, 0.5), "echo": (0.0, 0.7), "slope": (-3.0, 3.0), "snr": (8.0, 35.0),
    "tilt": (0.0, 1.0), "level": (0.1, 0.85),
}  # fmt: skip
# How much of it may change from one utterance of a person to the next.
_SPEED, _DECIBELS = 0.04, 2.0
_CORNER = 100.0  # below so many hertz noise is flat
_EDGE = 0.05  # seconds of silence before and after an utterance, at least
_TELEPHONE = (3_400.0, 4_000.0)  # hertz: between these lies where a telephone ends, and nothing is left above


@dataclass(frozen=True)
class Persona:
    """Who speaks, where, and into what."""

    voice: int  # which base voice of the pool
    tract: float  # factor on all frequencies: above 1 a shorter vocal tract
    low: float  # hertz, where the microphone's band begins
    high: float  # hertz, where it ends
    pause: float  # seconds between words, on average
    reverberation: float  # seconds until the room's echoes are 60 dB down
    echo: float  # energy of the echoes relative to the direct sound
    slope: float  # decibels per octave that the microphone adds
    snr: float  # decibels of the voice over the noise
    tilt: float  # of the noise: 0 is white, 1 falls by 6 decibels per octave
    level: float  # peak of a recording, 1 is the loudest


@dataclass(frozen=True)
class Saying:
    """One utterance before it is spoken: which words, with how many samples of silence before, between and after."""

    words: tuple[int, ...]
    silences: tuple[int, ...]
    ratio: float  # how many samples of the base voice become one
    length: int  # samples
    snr: float
    level: float


@dataclass(frozen=True)
class Crowd:
    """The people of one part of a population, and how many words they say at once."""

    pool: Pool
    seed: int
    purpose: str
    count: tuple[int, int]
    telephones: float = 0.0  # which share of the people speaks into a telephone

    def persona(self, person: int) -> Persona:
        return self._persona(generator(self.seed, f"{self.purpose}/persona", user=person))

    def saying(self, person: int, utterance: int) -> Saying:
        draw = generator(self.seed, f"{self.purpose}/utterance", utterance, person)
        return self._saying(self.persona(person), draw)

    def sayings(self, people: int, utterances: int) -> list[list[Saying]]:
        """The sayings of all people, as `saying` gives them, in a fraction of the time."""
        voices = Addresses(self.seed, f"{self.purpose}/persona", 0)
        said = [Addresses(self.seed, f"{self.purpose}/utterance", number) for number in range(utterances)]
        personas = [self._persona(voices.at(person)) for person in range(people)]
        return [[self._saying(own, draw.at(person)) for draw in said] for person, own in enumerate(personas)]

    def speak(self, person: int, utterance: int) -> Samples:
        """The recording of one utterance: float32 samples of 16 bits, 16 kHz."""
        import soxr

        about = generator(self.seed, f"{self.purpose}/persona", user=person)
        persona = self._persona(about)
        draw = generator(self.seed, f"{self.purpose}/utterance", utterance, person)
        saying = self._saying(persona, draw)
        joined = self._join(persona, saying)
        spoken = soxr.resample(joined, SAMPLE_RATE * saying.ratio, SAMPLE_RATE, "MQ")
        voice = np.zeros(saying.length, dtype=np.float32)  # the resampler's own length may differ by a sample
        voice[: len(spoken)] = spoken[: saying.length]
        room = impulse_response(persona.reverberation, persona.echo, SAMPLE_RATE, about)
        return _record(voice, room, persona, saying, draw, self.limit(person))

    def limit(self, person: int) -> float:
        """Hertz above which nothing is left of what a person says: infinity but for those who telephone."""
        if not self.telephones:
            return math.inf
        # An address of its own, so that a person who telephones differs in nothing else.
        chosen, place = generator(self.seed, f"{self.purpose}/telephone", user=person).random(2).tolist()
        low, high = _TELEPHONE
        return low + (high - low) * place if chosen < self.telephones else math.inf

    def _persona(self, draw: np.random.Generator) -> Persona:
        # Only `random` is called: of numpy's methods it is the one least likely to change its numbers.
        chance = iter(draw.random(1 + len(_FACTORS) + len(_UNIFORM)).tolist())
        voice = int(next(chance) * len(self.pool.lengths))
        values = {name: low * (high / low) ** next(chance) for name, (low, high) in _FACTORS.items()}
        values |= {name: low + (high - low) * next(chance) for name, (low, high) in _UNIFORM.items()}
        return Persona(voice, **values)

    def _saying(self, persona: Persona, draw: np.random.Generator) -> Saying:
        fewest, most = self.count
        chance = draw.random(2 * most + 5).tolist()
        size = fewest + int(chance[0] * (most - fewest + 1))
        vocabulary = self.pool.lengths.shape[1]
        words = tuple(int(c * vocabulary) for c in chance[1 : 1 + size])
        between = [persona.pause * (0.5 + c) for c in chance[1 + most : size + most]]
        edges = [_EDGE + persona.pause * c for c in chance[2 * most : 2 * most + 2]]
        silences = tuple(round(s * SAMPLE_RATE) for s in (edges[0], *between, edges[1]))
        speed, louder, nearer = (2 * c - 1 for c in chance[2 * most + 2 :])
        ratio = persona.tract * (1 + _SPEED * speed)
        samples = sum(silences) + sum(int(self.pool.lengths[persona.voice, word]) for word in words)
        level = min(persona.level * 10.0 ** (_DECIBELS * nearer / 20.0), 0.95)
        return Saying(words, silences, ratio, round(samples / ratio), persona.snr + _DECIBELS * louder, level)

    def _join(self, persona: Persona, saying: Saying) -> Samples:
        parts: list[NDArray[np.int16]] = [np.zeros(saying.silences[0], dtype=np.int16)]
        for word, silence in zip(saying.words, saying.silences[1:], strict=True):
            parts += [self.pool.word(persona.voice, word), np.zeros(silence, dtype=np.int16)]
        return np.concatenate(parts).astype(np.float32)


def _record(
    voice: Samples, room: Samples, persona: Persona, saying: Saying, draw: np.random.Generator, limit: float
) -> Samples:
    """Bring a voice (n,) through a room and a microphone, with the room's noise, to 16 bits."""
    from scipy import fft  # type: ignore[import-untyped]

    size = fft.next_fast_len(len(voice) + len(room) - 1, real=True)
    spectrum = fft.rfft(voice, size) * fft.rfft(room, size)  # (size / 2 + 1,)
    octaves, hertz = _frequencies(size)
    parts = draw.standard_normal((2, len(spectrum)), dtype=np.float32)
    # Octaves count from 1 kHz on: the noise is flat up to the corner and falls by 6 * tilt decibels per octave.
    falling = np.maximum(octaves, np.float32(np.log2(_CORNER / 1000.0)))
    noise = (parts[0] + 1j * parts[1]) * np.exp2(falling * np.float32(-persona.tilt))
    ratio = _energy(spectrum) / _energy(noise)
    noise *= np.float32(np.sqrt(ratio * size / len(voice)) * 10.0 ** (-saying.snr / 20.0))
    spectrum += noise
    spectrum *= np.exp2(octaves * np.float32(persona.slope / 6.02))
    below, above = np.square(np.float32(persona.low) / hertz), np.square(np.square(hertz / np.float32(persona.high)))
    spectrum /= np.sqrt((1 + np.square(below)) * (1 + np.square(above)))  # falls by 12 and 24 decibels per octave
    spectrum[hertz > limit] = 0
    sound = fft.irfft(spectrum, size)[: len(voice)]
    peak = max(float(np.abs(sound).max()), 1e-9)
    return np.asarray(np.round(sound * np.float32(saying.level * 32767.0 / peak)) / np.float32(32768.0), np.float32)


@lru_cache(maxsize=64)
def _frequencies(size: int) -> tuple[Samples, Samples]:
    """Octaves above 1 kHz, and hertz, of each frequency of a transform; the constant part counts as 1 Hz."""
    hertz = np.maximum(np.fft.rfftfreq(size, 1.0 / SAMPLE_RATE), 1.0).astype(np.float32)
    return np.log2(hertz / np.float32(1000.0)), hertz


def _energy(spectrum: NDArray[np.complexfloating]) -> float:
    return float(np.square(spectrum.real).sum() + np.square(spectrum.imag).sum()) + 1e-20
