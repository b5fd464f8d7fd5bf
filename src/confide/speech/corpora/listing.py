"""From what a corpus lists to what can be used: the checks that all corpora share.

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
    Language,
    Progress,
    Skipped,
    Undecodable,
    Utterance,
    counted,
    measured,
    read_audio,
)

_SHOWN = 3


@dataclass(frozen=True)
class Entry:
    """An utterance as a corpus lists it; without `seconds`, its files have not been looked at yet."""

    id: str
    speaker: str
    audio: tuple[Path, ...]
    text: str
    seconds: float | None = None


def checked_corpus(
    name: str,
    language: Language,
    listed: Iterable[Entry | Skipped],
    settings: SpeakerSettings,
    progress: Progress | None = None,
) -> Corpus:
    """Take the share of the speakers, check each of its utterances, and order what is left.

    The share is taken of the speakers that are listed, before any file is opened, so that a damaged file does not
    move other speakers from one share to the other.
    """
    skipped: list[Skipped] = []
    entries: list[Entry] = []
    for item in listed:
        if isinstance(item, Skipped):
            skipped.append(item)
        else:
            entries.append(item)
    if settings.share is not None and entries:
        chosen = shares.share((entry.speaker for entry in entries), settings.share)
        entries = [entry for entry in entries if entry.speaker in chosen]
        name = f"{name}-{settings.share:02d}"
    usable, refused = _checked(entries, settings.max_seconds, progress)
    speakers: dict[str, list[Utterance]] = {}
    for utterance in sorted(usable, key=lambda u: (u.speaker, u.id)):
        speakers.setdefault(utterance.speaker, []).append(utterance)
    corpus = Corpus(name, language, speakers, [*skipped, *refused])
    if not speakers:
        raise UserError(_nothing_left(corpus))
    return shares.iid(corpus, settings.seed) if settings.users == "iid" else corpus


def lengths(files: Sequence[Path], progress: Progress | None = None) -> Iterator[float | str]:
    """For each file how long it is, in seconds, or why it cannot be used."""
    # One after the other: a header takes a tenth of a millisecond, and handing it to a thread takes longer.
    for done, file in enumerate(files, start=1):
        yield _length(file)
        if progress is not None:
            progress(done, len(files))


def _checked(
    entries: Sequence[Entry], longest: float, progress: Progress | None
) -> tuple[list[Utterance], list[Skipped]]:
    usable: list[Utterance] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    unknown = [entry for entry in entries if entry.seconds is None]
    looked_at = lengths([path for entry in unknown for path in entry.audio], progress)
    for entry in entries:
        parts = [entry.seconds] if entry.seconds is not None else [next(looked_at) for _ in entry.audio]
        seconds = sum(part for part in parts if isinstance(part, float))
        reason = next((part for part in parts if isinstance(part, str)), None)
        reason = reason or _fault(entry, seconds, longest, seen)
        if reason is not None:
            skipped.append(Skipped(entry.id, reason))
        else:
            seen.add(entry.id)
            usable.append(Utterance(entry.id, entry.speaker, entry.audio, seconds, entry.text))
    return usable, skipped


def _fault(entry: Entry, seconds: float, longest: float, seen: set[str]) -> str | None:
    if not entry.text.strip():
        return "empty text"
    if entry.id in seen:
        return "listed twice"
    if seconds > longest:
        return f"longer than {longest:g} s: {seconds:.1f} s"
    return None


def _length(path: Path) -> float | str:
    try:
        return measured(path)
    except Undecodable as error:
        return str(error)


def verified(corpus: Corpus, progress: Progress | None = None) -> Corpus:
    """The corpus after every file was decoded once: what does not decode moves to `skipped`."""
    everything = corpus.utterances()
    speakers: dict[str, list[Utterance]] = {}
    skipped = list(corpus.skipped)
    for done, utterance in enumerate(everything, start=1):
        try:
            read_audio(utterance)
            speakers.setdefault(utterance.speaker, []).append(utterance)
        except Undecodable as error:
            skipped.append(Skipped(utterance.id, str(error)))
        if progress is not None:
            progress(done, len(everything))
    sound = replace(corpus, speakers=speakers, skipped=skipped)
    if not speakers:
        raise UserError(_nothing_left(sound))
    return sound


def _nothing_left(corpus: Corpus) -> str:
    """The message for a corpus without a usable speaker."""
    reasons = "; ".join(f"{count} {kind}" for kind, count in counted(corpus.skipped).items())
    first = ", ".join(f"{item.id} ({item.reason})" for item in corpus.skipped[:_SHOWN])
    found = f"all {len(corpus.skipped)} utterances were skipped: {reasons}; first: {first}" if first else "it is empty"
    return (
        f"the corpus {corpus.name} has no usable speaker, {found}; expected at least one utterance with audio that "
        "decodes, some text, and no more than max_seconds: check the folder and the subset"
    )
