"""The checks of all corpora: which of the listed utterances can be used.

PFL-ASR, section 4, uses utterances of at most 30 s. Here an utterance that is longer, has no text, or whose file
cannot be opened is counted and named, and never stops a run; a corpus of which nothing is left is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from confide.errors import UserError
from confide.speech.corpora import shares
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpus import (
    Corpus,
    Made,
    Progress,
    Skipped,
    Undecodable,
    Utterance,
    count_by_reason,
    file_seconds,
    read_audio,
)

_SHOWN = 3


@dataclass(frozen=True)
class Entry:
    """An utterance as a corpus lists it; where `seconds` is None, `make_corpus` reads the length from its files."""

    id: str
    speaker: str
    audio: tuple[Path, ...]
    text: str
    seconds: float | None = None
    made: Made | None = None
    """Where there are no files: what gives the sound."""


def make_corpus(
    name: str, language: str, listed: Iterable[Entry | Skipped], settings: SpeakerSettings,
    progress: Progress | None = None,
) -> Corpus:  # fmt: skip
    """Take the share of the speakers, check each of its utterances, and order what is left.

    The share is taken of the speakers that are listed, before any file is opened, so that a damaged file does not
    move other speakers from one share to the other.
    """
    everything = list(listed)
    skipped = [item for item in everything if isinstance(item, Skipped)]
    entries = [item for item in everything if isinstance(item, Entry)]
    if settings.share is not None and entries:
        chosen = shares.choose_share((entry.speaker for entry in entries), settings.share)
        entries = [entry for entry in entries if entry.speaker in chosen]
        name = f"{name}-{settings.share:02d}"
    usable: dict[str, Utterance] = {}
    unknown = [path for entry in entries if entry.seconds is None for path in entry.audio]
    lengths = read_lengths(unknown, progress)
    for entry in entries:
        parts = [entry.seconds] if entry.seconds is not None else [next(lengths) for _ in entry.audio]
        seconds = sum(part for part in parts if isinstance(part, float))
        faults = [part for part in parts if isinstance(part, str)]
        if not entry.text.strip():
            faults.append("empty text")
        if entry.id in usable:
            faults.append("listed twice")
        if seconds > settings.max_seconds:
            faults.append(f"longer than {settings.max_seconds:g} s: {seconds:.1f} s")
        if faults:
            skipped.append(Skipped(entry.id, faults[0]))
        else:
            usable[entry.id] = Utterance(entry.id, entry.speaker, entry.audio, seconds, entry.text, entry.made)
    ordered = sorted(usable.values(), key=lambda u: (u.speaker, u.id))
    corpus = _group_by_speaker(Corpus(name, language, {}, skipped), ordered)
    return shares.assign_at_random(corpus, settings.seed) if settings.users == "iid" else corpus


def read_lengths(files: Sequence[Path], progress: Progress | None = None) -> Iterator[float | str]:
    """For each file its length in seconds, or why it cannot be used."""
    # One after the other: a header takes a tenth of a millisecond, and handing it to a thread takes longer.
    for done, file in enumerate(files, start=1):
        try:
            yield file_seconds(file)
        except Undecodable as error:
            yield str(error)
        if progress is not None:
            progress(done, len(files))


def decode_all(corpus: Corpus, progress: Progress | None = None) -> Corpus:
    """Decode every file once, and move what does not decode to `skipped`."""
    everything = corpus.utterances()
    sound, skipped = [], list(corpus.skipped)
    for done, utterance in enumerate(everything, start=1):
        try:
            read_audio(utterance)
            sound.append(utterance)
        except Undecodable as error:
            skipped.append(Skipped(utterance.id, str(error)))
        if progress is not None:
            progress(done, len(everything))
    return _group_by_speaker(replace(corpus, skipped=skipped), sound)


def _group_by_speaker(corpus: Corpus, utterances: Iterable[Utterance]) -> Corpus:
    """The corpus with these utterances; one without any is refused."""
    speakers: dict[str, list[Utterance]] = {}
    for utterance in utterances:
        speakers.setdefault(utterance.speaker, []).append(utterance)
    if speakers:
        return replace(corpus, speakers=speakers)
    reasons = "; ".join(f"{count} {kind}" for kind, count in count_by_reason(corpus.skipped).items())
    first = ", ".join(f"{item.id} ({item.reason})" for item in corpus.skipped[:_SHOWN])
    found = f"all {len(corpus.skipped)} utterances were skipped: {reasons}; first: {first}" if first else "it is empty"
    raise UserError(
        f"the corpus {corpus.name} has no usable speaker, {found}; expected at least one utterance with audio that "
        "decodes, some text, and no more than max_seconds: check the folder and the subset"
    )
