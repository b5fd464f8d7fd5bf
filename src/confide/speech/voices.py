"""The embedded corpus: synthetic speakers who say digits and commands, made on first use and kept in a cache.

It stands in for the paper's corpora (PFL-ASR, section 4) where none can be had. Its three populations copy the
paper's most realistic setting, a seed model from one distribution and users from another: the seed's speakers have one
accent, a few voices and quiet studios; the federated users and the test speakers have other accents, other voices,
faster and slower speech, noise and rooms. A pair of accent and voice belongs either to the federated users or to the
test speakers, so no test speaker has a voice that was trained on. espeak-ng knows one German accent, so there the
populations differ in all but accent.

A speaker depends on (seed, language, population, number) alone: asking for more speakers later adds to the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from confide.errors import UserError
from confide.files import cache_folder, make_folder
from confide.progress import Reporter
from confide.randomness import generator
from confide.settings import LocalPath, Section
from confide.speech.corpus import SAMPLE_RATE, Corpus, Language, Progress, Utterance
from confide.speech.espeak import RECORD, Recording, Voice
from confide.speech.grammar import Sentences, choose, make_sentence

Population = Literal["seed", "federated", "test"]

# Part of the cache's key: change it whenever the same settings would give other recordings.
_SCHEME = 1
_OTHERS = 20  # voices that may take the place of one that crashes the library
_WHEEL = "espeakng-loader"

_ACCENTS: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "seed": ("en-us",),
        "users": ("en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc"),
    },
    "fr": {"seed": ("fr",), "users": ("fr-be", "fr-ch")},
    "de": {"seed": ("de",), "users": ("de",)},
}
_VARIANTS = {
    "seed": ("m1", "m3", "m7", "f1", "f2"),
    # What is left of the wheel's variants without whispers, robots and tests.
    "users": (
        "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo", "Jacky",
        "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "Reed", "RicishayMax", "RicishayMax2", "RicishayMax3",
        "adam", "anika", "antonio", "aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward",
        "edward2", "f3", "f4", "f5", "grandma", "grandpa", "gustave", "ian", "iven", "iven2", "iven3", "iven4", "john",
        "kaukovalta", "klatt", "klatt2", "klatt3", "klatt4", "linda", "m2", "m4", "m5", "m6", "m8", "marcelo", "max",
        "michel", "miguel", "mike2", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro",
        "shelby", "steph", "steph2", "steph3", "travis", "victor", "zac",
    ),
}  # fmt: skip
# One pair of accent and variant in so many belongs to the test speakers.
_TEST_SHARE = 5
# From where to where each property of a voice is drawn uniformly, in this order; studios have no echo.
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "seed": {
        "pitch": (40, 60), "pitch_range": (40, 60), "rate": (150, 185), "snr": (30, 40), "tilt": (0, 1),
        "level": (0.3, 0.8),
    },
    "users": {
        "pitch": (20, 80), "pitch_range": (20, 90), "rate": (130, 240), "snr": (8, 30), "tilt": (0, 1),
        "reverberation": (0.1, 0.5), "echo": (0.05, 0.8), "level": (0.1, 0.9),
    },
}  # fmt: skip


class SyntheticSettings(Section):
    """Synthetic voices that need nothing but the installed package."""

    kind: Literal["synthetic"] = "synthetic"
    language: Language = Field("en", description="en, fr or de")
    population: Population = Field("federated", description="seed, federated or test: who speaks")
    speakers: int = Field(100, gt=0, le=100_000, description="how many speakers")
    utterances: int = Field(10, gt=0, le=9_999, description="how many sentences each says")
    sentences: Sentences = Field("both", description="digits, commands or both")
    digits: tuple[int, int] = Field((2, 6), description="fewest and most digits in a sentence of digits")
    users: Literal["speakers", "iid"] = Field(
        "speakers", description="a user is a speaker, or (the control) each utterance gets a user drawn uniformly"
    )
    seed: int = Field(0, ge=0, description="another seed gives other speakers")
    cache: LocalPath | None = Field(None, description="where recordings are kept; none: the user's cache folder")

    @field_validator("digits")
    @classmethod
    def _in_order(cls, digits: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= digits[0] <= digits[1] <= 50:
            raise ValueError(f"digits={digits} must be two numbers from 1 to 50, the smaller one first")
        return digits

    def read(self, progress: Progress | None = None) -> Corpus:
        """Make or find the speakers, with a bar that counts them."""
        from confide.speech.corpora.shares import assign_at_random  # whose package imports this module

        corpus = synthetic_corpus(self)
        return assign_at_random(corpus, self.seed) if self.users == "iid" else corpus


@cache
def pairs(language: Language, population: Population) -> tuple[tuple[str, str], ...]:
    """The accents and voice variants that a population's speakers may have."""
    kind = "seed" if population == "seed" else "users"
    everything = tuple(product(_ACCENTS[language][kind], _VARIANTS[kind]))
    if kind == "seed":
        return everything
    hashes = {pair: hashlib.blake2b("+".join(pair).encode()).digest()[0] for pair in everything}
    return tuple(pair for pair in everything if (hashes[pair] % _TEST_SHARE == 0) == (population == "test"))


@cache
def public_pairs(language: Language) -> tuple[tuple[str, str], ...]:
    """The seed's accent with every variant, less what users or test speakers have (German has one accent only)."""
    everything = product(_ACCENTS[language]["seed"], (*_VARIANTS["seed"], *_VARIANTS["users"]))
    taken = {*pairs(language, "federated"), *pairs(language, "test")}
    return tuple(pair for pair in everything if pair not in taken)


def draw_voice(settings: SyntheticSettings, number: int) -> Voice:
    """The voice of one speaker."""
    draw = generator(settings.seed, f"{_purpose(settings)}/voice", user=number)
    accent, variant = choose(pairs(settings.language, settings.population), draw)
    ranges = _RANGES["seed" if settings.population == "seed" else "users"]
    values: dict[str, Any] = {"reverberation": 0.0, "echo": 0.0}
    values |= {name: low + (high - low) * float(draw.random()) for name, (low, high) in ranges.items()}
    values |= {name: round(values[name]) for name in ("pitch", "pitch_range", "rate")}
    return Voice(accent, variant, **values)


def synthetic_corpus(settings: SyntheticSettings, quiet: bool = False) -> Corpus:
    """The corpus. Makes the speakers that the cache does not hold, also after an earlier making was stopped."""
    folder = (settings.cache or cache_folder() / "voices").expanduser() / _digest(settings)
    names = [f"{settings.language}-{settings.population}-{number:05d}" for number in range(settings.speakers)]
    speakers = {name: _read_speaker(folder / name, name, settings) for name in names}
    missing = {name: number for number, name in enumerate(names) if speakers[name] is None}
    if missing:
        make_folder(folder)
        sweep(folder, missing)
        jobs = (
            Recording(
                name, str(folder / name), draw_voice(settings, number), draw_texts(settings, number),
                settings.seed, _purpose(settings), number,
            )
            for name, number in missing.items()
        )  # fmt: skip
        done = len(names) - len(missing)
        with Reporter(f"voices ({settings.population})", len(names), done=done, quiet=quiet) as reporter:
            speak_all(jobs, reporter.advance)
        speakers |= {name: _read_speaker(folder / name, name, settings) for name in missing}
    complete = {name: own for name, own in speakers.items() if own is not None}
    if len(complete) < len(names):
        raise UserError(
            f"{len(names) - len(complete)} of {len(names)} synthetic speakers in {folder} are damaged although they "
            "were just made; expected a folder that keeps what is written: check the disk, or name another cache"
        )
    return Corpus(name=f"synthetic-{settings.population}", language=settings.language, speakers=complete, skipped=[])


def _purpose(settings: SyntheticSettings) -> str:
    return f"synthetic/{settings.language}/{settings.population}"


def _digest(settings: SyntheticSettings) -> str:
    """The folder of these settings. The number of speakers is no part of it: more of them only add to the folder."""
    own = settings.model_dump(mode="json", exclude={"speakers", "cache", "users"})
    return digest_with_wheel({**own, "scheme": _SCHEME})


def digest_with_wheel(key: dict[str, Any]) -> str:
    """A name for what these settings and the installed voices make."""
    try:
        wheel = metadata.version(_WHEEL)
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"the synthetic voices need the package {_WHEEL}, which is not installed; "
            f"run `pip install {_WHEEL}`, or choose another corpus"
        ) from error
    return hashlib.sha256(json.dumps({**key, "wheel": wheel}, sort_keys=True).encode()).hexdigest()[:16]


def draw_texts(settings: SyntheticSettings, number: int) -> tuple[str, ...]:
    """What one speaker says."""
    draw = generator(settings.seed, f"{_purpose(settings)}/text", user=number)
    count = settings.utterances
    return tuple(make_sentence(settings.language, settings.sentences, settings.digits, draw) for _ in range(count))


def _read_speaker(folder: Path, name: str, settings: SyntheticSettings) -> list[Utterance] | None:
    """A speaker's utterances, or None if they are not there, or not as they were written."""
    try:
        rows: list[dict[str, Any]] = json.loads((folder / RECORD).read_text(encoding="utf-8"))["utterances"]
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
        if len(rows) != settings.utterances or any(sizes.get(row["file"]) != row["bytes"] for row in rows):
            return None
        paths = [folder / row["file"] for row in rows]
        return [
            Utterance(f"{name}-{path.stem}", name, (path,), row["samples"] / SAMPLE_RATE, row["text"])
            for path, row in zip(paths, rows, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sweep(folder: Path, names: Iterable[str]) -> None:
    """Remove damaged speakers, and the temporary folders of processes that have ended."""
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    for left in folder.glob(".*-*.*"):
        owner = left.name.rpartition(".")[2]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it runs, for another user
    return True


def speak_all(
    jobs: Iterable[Recording],
    advance: Callable[[str], None],
    instead: Callable[[Recording, int], Recording] | None = None,
) -> None:
    """Let a process of `confide.speech.espeak` make one speaker after the other; the first failure ends it.

    Some voices crash the library on some words ("april" by a low en-us+rob), whatever was said before. Where `instead`
    is given, it names another voice for such a speaker, at most `_OTHERS` times for each.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "confide.speech.espeak"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
    ) as process:  # fmt: skip
        try:
            for job in jobs:
                said, turn = _ask(process, job), 0
                while said is not None and instead is not None and turn < _OTHERS:
                    turn += 1
                    said = _ask(process, instead(job, turn))
                if said is not None:
                    raise UserError(
                        f"the synthetic speaker {job.speaker} could not be made: {said} on one of the "
                        f"{len(job.texts)} texts that begin with {job.texts[0]!r}; expected words that espeak-ng can "
                        "say: leave out unusual ones"
                    )
                advance(job.speaker)
        except BaseException:
            process.kill()
            raise


def _ask(process: subprocess.Popen[str], job: Recording) -> str | None:
    """Have a speaker made. A crash of the library is answered, everything else that fails is raised."""
    answer = ""
    if process.stdin is not None and process.stdout is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
    found: dict[str, str] = json.loads(answer) if answer else {"error": "the voice process ended without an answer"}
    if "error" in found:
        raise UserError(
            f"the synthetic speaker {job.speaker} could not be made in {Path(job.folder).parent}: {found['error']}; "
            f"expected a working {_WHEEL} and a folder that can be written to: reinstall the one or name another cache"
        )
    return found.get("crash")
