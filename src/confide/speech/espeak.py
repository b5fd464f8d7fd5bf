"""A process that makes synthetic voices with the espeak-ng library of the `espeakng_loader` wheel.

`python -m confide.speech.espeak` reads one job (a speaker with its sentences, as JSON) per line and answers with a line
of JSON when that speaker's folder is complete. What the library says depends on what it said before; neither a change
of voice nor a new initialisation clears its state. Therefore a fork of a process in which the library has said nothing
yet speaks for each speaker, so that a speaker's bytes depend on the job alone, not on the order of speakers or an
earlier interruption. This module imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from confide.randomness import generator
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.rooms import add_room_and_noise, impulse_response

RECORD = "speaker.json"

# Values of espeak-ng's speak_lib.h.
_SYNCHRONOUS, _RETURN_ON_ERROR = 2, 0x8000
_RATE, _PITCH, _RANGE = 1, 3, 4
_CHARACTERS, _UTF8 = 1, 1
_BUFFER_MILLISECONDS = 500
# What a fault of the library ends a process with. Somebody's kill is another thing.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Voice:
    """Who speaks, and where."""

    accent: str
    variant: str
    pitch: int  # 0 to 99
    pitch_range: int  # 0 to 99: monotonous to lively
    rate: int  # words per minute
    snr: float  # decibels of the voice over the noise
    tilt: float  # of the noise, see `rooms`
    reverberation: float  # seconds; 0: no room
    echo: float  # energy of the echoes relative to the direct sound
    level: float  # peak of a recording, 1 is the loudest


@dataclass(frozen=True)
class Recording:
    """One speaker's recordings: FLAC files and a record of them in `folder`, which appears when it is complete."""

    speaker: str
    folder: str
    voice: Voice
    texts: tuple[str, ...]
    seed: int
    purpose: str
    number: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Recording:
        raw = json.loads(line)
        return cls(**{**raw, "voice": Voice(**raw["voice"]), "texts": tuple(raw["texts"])})


class Espeak:
    """The library, set up once per process."""

    def __init__(self) -> None:
        import espeakng_loader

        self.data = Path(espeakng_loader.get_data_path())
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate: int = self.library.espeak_Initialize(
            _SYNCHRONOUS, _BUFFER_MILLISECONDS, str(self.data).encode(), _RETURN_ON_ERROR
        )
        if self.rate <= 0:
            raise RuntimeError(f"espeak-ng did not start with the data in {self.data} (code {self.rate})")
        self._pieces: list[bytes] = []
        self._callback = _CALLBACK(self._receive)  # kept, or it would be collected while the library calls it
        self.library.espeak_SetSynthCallback(self._callback)

    def _receive(self, wave: ctypes._Pointer[ctypes.c_short], count: int, events: int | None) -> int:
        if wave and count > 0:
            self._pieces.append(ctypes.string_at(wave, 2 * count))
        return 0

    def use(self, voice: Voice) -> None:
        # The library takes an unknown variant for the plain voice without a word.
        if not (self.data / "voices" / "!v" / voice.variant).is_file():
            raise LookupError(f"espeak-ng has no voice variant {voice.variant!r} in {self.data}")
        code = self.library.espeak_SetVoiceByName(f"{voice.accent}+{voice.variant}".encode())
        if code != 0:
            raise LookupError(f"espeak-ng has no accent {voice.accent!r} in {self.data} (code {code})")
        for parameter, value in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.pitch_range)):
            self.library.espeak_SetParameter(parameter, value, 0)

    def say(self, text: str) -> NDArray[np.int16]:
        self._pieces.clear()
        encoded = text.encode() + b"\0"
        code = self.library.espeak_Synth(encoded, len(encoded), 0, _CHARACTERS, 0, _UTF8, None, None)
        if code != 0 or not self._pieces:
            raise RuntimeError(f"espeak-ng could not say {text!r} (code {code})")
        return np.frombuffer(b"".join(self._pieces), dtype=np.int16)


def speak(job: Recording, espeak: Espeak) -> None:
    """Make the folder of a speaker: under another name first, so that it exists only when it is complete."""
    import soundfile
    import soxr

    folder = Path(job.folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    draw = generator(job.seed, f"{job.purpose}/sound", user=job.number)
    espeak.library.espeak_ng_SetRandSeed(ctypes.c_long(int(draw.random() * 2**31)))
    espeak.use(job.voice)
    response = impulse_response(job.voice.reverberation, job.voice.echo, SAMPLE_RATE, draw)
    rows = []
    for number, text in enumerate(job.texts):
        spoken = soxr.resample(espeak.say(text).astype(np.float32) / 32768.0, espeak.rate, SAMPLE_RATE)
        before, after = (round((0.05 + 0.25 * chance) * SAMPLE_RATE) for chance in draw.random(2))
        room = (response, job.voice.snr, job.voice.tilt, job.voice.level)
        samples = add_room_and_noise(np.pad(spoken, (before, after)), *room, SAMPLE_RATE, draw)
        path = temporary / f"{number:04d}.flac"
        soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
        rows.append({"file": path.name, "text": text, "samples": len(samples), "bytes": path.stat().st_size})
    record = {"speaker": job.speaker, "voice": asdict(job.voice), "utterances": rows}
    (temporary / RECORD).write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    try:
        temporary.rename(folder)
    except OSError:
        # Another process made the same speaker meanwhile; the bytes are the same.
        shutil.rmtree(temporary)
        if not folder.is_dir():
            raise


def _in_a_fork(job: Recording, espeak: Espeak) -> dict[str, str]:
    """Speak in a copy of this process, whose library has said nothing yet. The answer holds an error, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            speak(job, espeak)
            code = 0
        except OSError as error:
            os.write(writing, f"{error.strerror}: {error.filename or job.folder}".encode())
        except BaseException as error:
            os.write(writing, "".join(traceback.format_exception(error))[-4000:].encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in _CRASHES:
        return {"crash": f"espeak-ng crashed ({signal.Signals(-code).name})"}
    return {} if code == 0 else {"error": said or f"the voice process ended with code {code}"}


def main() -> None:
    """Answer jobs until there are no more."""
    import soundfile  # noqa: F401  before the first fork, so that no child pays for it
    import soxr  # noqa: F401

    try:
        espeak = Espeak()
        for line in sys.stdin:
            print(json.dumps(_in_a_fork(Recording.from_json(line), espeak)), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


if __name__ == "__main__":
    main()
