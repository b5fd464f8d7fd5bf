"""Features on disk, so that a client's step does no signal processing.

Serves PFL-ASR, section 4: features of every utterance are computed once, before training, and kept speaker by speaker
(`encoders.kept`) under everything that decides them: the front end, and the utterances' ids, files, sizes and times of
change. So a later run finds them again, also for another corpus with the same speaker, and computes anew what has
changed. Targets are spelt each time.

With the features goes a digest of the recordings' bytes, by which a resumed run tells that the audio is the same. It
costs a second reading of each recording when its features are made, and nothing when a store is opened again.

Features are kept as float16: normalised log-mels lie within about +-5, where its error is at most 2e-3 and on average
1.5e-4 of a standard deviation; a tiny model's log-probabilities move by less than 1e-2 and its greedy labels stay.

Sound that a corpus computes (`Utterance.made`, unless it is held in a larger file) has no file here: its features are
computed when they are asked for, in about the time that reading and writing them would take, and the first few thousand
are kept in memory.

An utterance is skipped, counted and named when it cannot be decoded, has no word, or has a label that is longer than
CTC can align: floor(frames / stride) must be at least the number of tokens and one more for each repeated neighbour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from confide.encoders.kept import Item, Kept, Maker, keep
from confide.errors import UserError
from confide.files import digest
from confide.speech.corpus import SAMPLE_RATE, Corpus, Skipped, Undecodable, Utterance, read_audio
from confide.speech.features import FeatureSettings, frame_count, log_mel
from confide.speech.tokens import Tokens

_STRIDE = 3
# Seconds of audio in a block: at least a minute, to keep few files, and at most five (5 to 30 MB): each core holds
# one in memory, and a run that is stopped loses those.
_BLOCK_SECONDS, _LARGEST_BLOCK, _BLOCKS = 60.0, 300.0, 64
_REMEMBERED = 4_000  # utterances of computed sound whose features are kept in memory: 100 MB at 1.5 s each


class FrontEnd(Protocol):
    """How samples become what a store keeps."""

    @property
    def key(self) -> str:
        """Everything that decides the outcome."""
        ...

    @property
    def width(self) -> int:
        """Numbers of a frame."""
        ...

    @property
    def stride(self) -> int:
        """Frames that the model makes one frame of its output of."""
        ...

    @property
    def together(self) -> float:
        """Seconds of audio to give it at once; 0 for one utterance at a time."""
        ...

    @property
    def edges(self) -> bool:
        """Whether a target begins and ends with a word boundary, as in PFL-ASR."""
        ...

    def check(self, samples: np.ndarray) -> None:
        """Raise `Undecodable` for an utterance (n,) that it cannot take."""
        ...

    def make(self, utterances: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Frames (frames, width) of each utterance (n,)."""
        ...


@dataclass(frozen=True)
class LogMel:
    """Log-mel features, of which the model takes every few frames."""

    settings: FeatureSettings
    stride: int = _STRIDE
    together: float = 0.0
    edges: bool = True

    @property
    def key(self) -> str:
        return self.settings.model_dump_json()

    @property
    def width(self) -> int:
        return self.settings.mels

    def check(self, samples: np.ndarray) -> None:
        """Take any."""

    def make(self, utterances: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [log_mel(samples, self.settings) for samples in utterances]


@dataclass(frozen=True)
class _Speaker:
    """A speaker's n usable utterances."""

    name: str
    audio: str  # a digest of the recordings
    item: int | None  # which of what is kept; none for sound that is computed
    kept: NDArray[np.int32]  # (n,) positions among the corpus's utterances of this speaker
    starts: NDArray[np.int64]  # (n,) first rows among the speaker's
    frames: NDArray[np.int32]  # (n,)
    targets: list[NDArray[np.uint8]]  # n, with boundaries at both ends


@dataclass
class FeatureStore:
    """The users of a corpus, numbered in the order of `speakers`. Each call of `features` reads them from disk."""

    kept: Kept | None
    token_set: Tokens
    front: FrontEnd
    speakers: list[str]
    skipped: list[Skipped]
    _index: list[_Speaker]
    _utterances: list[list[Utterance]]
    _remembered: dict[tuple[int, int], NDArray[np.float16]] = field(default_factory=dict)

    @property
    def examples(self) -> NDArray[np.int64]:
        """How many utterances each user has."""  # (users,)
        return np.array([len(speaker.kept) for speaker in self._index], dtype=np.int64)

    @property
    def audio(self) -> list[str]:
        """A digest of each user's recordings."""
        return [speaker.audio for speaker in self._index]

    def utterances(self, user: int) -> list[Utterance]:
        """A user's usable utterances."""
        own = self._utterances[user]
        return [own[position] for position in self._index[user].kept]

    def texts(self, user: int) -> list[str]:
        """What a user says, as the tokens spell it: the reference of a word error rate."""
        return [self.token_set.normalise(utterance.text) for utterance in self.utterances(user)]

    def seconds(self, user: int) -> NDArray[np.float64]:
        """The length of each of a user's utterances."""  # (n,)
        return np.array([utterance.seconds for utterance in self.utterances(user)], dtype=np.float64)

    def frames(self, user: int) -> NDArray[np.int32]:
        """The number of frames of each of a user's utterances."""  # (n,)
        return self._index[user].frames

    def targets(self, user: int, indices: Sequence[int] | np.ndarray) -> list[NDArray[np.int64]]:
        """Token numbers of the chosen utterances."""
        own, edge = self._index[user].targets, 0 if self.front.edges else 1
        return [own[i][edge : len(own[i]) - edge].astype(np.int64) for i in indices]

    def features(self, user: int, indices: Sequence[int] | np.ndarray) -> list[NDArray[np.float32]]:
        """Features (frames, mels) of the chosen utterances, read from disk."""
        speaker = self._index[user]
        if self.kept is None or speaker.item is None:
            return [self._compute(user, int(i)).astype(np.float32) for i in indices]
        rows = self.kept.rows(speaker.item)
        return [rows[speaker.starts[i] : speaker.starts[i] + speaker.frames[i]].astype(np.float32) for i in indices]

    def _compute(self, user: int, index: int) -> NDArray[np.float16]:
        """Features of sound that is in no file, rounded as those in files are."""
        known = self._remembered.get((user, index))
        if known is None:
            utterance = self._utterances[user][self._index[user].kept[index]]
            known = self.front.make([read_audio(utterance)])[0].astype(np.float16)
            if len(self._remembered) < _REMEMBERED:  # whoever comes first stays: a cycle longer than this gains nothing
                self._remembered[user, index] = known
        return known


def open_store(
    corpus: Corpus, tokens: Tokens, front: FrontEnd, folder: Path | None = None, quiet: bool = False
) -> FeatureStore:
    """The features of a corpus, made where `folder` (none: the user's cache) does not hold them yet."""
    computed = any(
        utterance.made is not None and not utterance.made.held
        for own in corpus.speakers.values()
        for utterance in own[:1]
    )
    names, people = list(corpus.speakers), list(corpus.speakers.values())
    kept: Kept | None = None
    if computed and isinstance(front, LogMel):  # what an encoder makes takes longer, and is kept as of recordings
        notes = [_describe_made(own, front) for own in people]
    else:
        kept = _keep(corpus, front, folder, quiet)
        notes = kept.notes
    spell = cache(lambda text: np.array(tokens.encode(text), dtype=np.uint8))
    index, skipped = [], []
    for item, (name, own, note) in enumerate(zip(names, people, notes, strict=True)):
        frames = np.array(note["frames"], np.int32)  # (utterances,)
        reasons: dict[str, str] = note["skipped"]
        usable: list[int] = []
        for position, utterance in enumerate(own):
            why = reasons.get(str(position)) or _misfit(spell(utterance.text), frames[position] // front.stride)
            if why:
                skipped.append(Skipped(utterance.id, why))
            else:
                usable.append(position)
        starts, targets = np.cumsum(frames, dtype=np.int64) - frames, [spell(own[position].text) for position in usable]
        chosen = np.array(usable, np.int32)
        where = None if kept is None else item
        index.append(_Speaker(name, note["audio"], where, chosen, starts[chosen], frames[chosen], targets))
    usable_people = [speaker for speaker in index if len(speaker.kept)]
    if not usable_people:
        given = "; ".join(f"{item.id}: {item.reason}" for item in skipped[:3])
        raise UserError(
            f"the corpus {corpus.name} has no usable utterance among {len(skipped)} ({given}); expected at least "
            "one speaker with readable audio and text that fits it: check the corpus's folder and language"
        )
    named = [speaker.name for speaker in usable_people]
    return FeatureStore(kept, tokens, front, named, skipped, usable_people, [corpus.speakers[name] for name in named])


def frames_needed(labels: Sequence[int]) -> int:
    """The fewest frames to which CTC can align the labels: a blank must part equal neighbours."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))


def _misfit(target: NDArray[np.uint8], there: int) -> str:
    """Why CTC cannot align a target to so many frames; empty if it can."""
    if not len(target):
        return "no text: nothing is left of it in the token set"
    needed = frames_needed(target.tolist())
    return f"label too long: {needed} frames needed after the stride, {there} there" if there < needed else ""


def _keep(corpus: Corpus, front: FrontEnd, folder: Path | None, quiet: bool) -> Kept:
    names, people = list(corpus.speakers), list(corpus.speakers.values())
    keys = [_key(name, own) for name, own in corpus.speakers.items()]

    def deal(missing: list[int]) -> Iterator[list[int]]:
        lengths = {item: sum(utterance.seconds for utterance in people[item]) for item in missing}
        enough = min(max(sum(lengths.values()) / _BLOCKS, _BLOCK_SECONDS), _LARGEST_BLOCK)
        block, seconds = [], 0.0
        for item in missing:
            block.append(item)
            seconds += lengths[item]
            if seconds >= enough or item == missing[-1]:
                yield block
                block, seconds = [], 0.0

    def make(items: list[int]) -> list[Item]:
        for item in items:
            if _key(names[item], people[item]) != keys[item]:
                raise UserError(
                    f"the audio of speaker {names[item]} has changed since its features were asked for; expected it "
                    "to stay as it is during a run: start the run again"
                )
        return [_make(people[item], front) for item in items]

    maker = Maker(front.key, front.width, make, deal, f"features ({corpus.name})", np.float16)
    return keep(maker, keys, folder, quiet)


def _key(name: str, utterances: list[Utterance]) -> str:
    pieces = [name]
    for utterance in utterances:
        pieces += [utterance.id, utterance.made.address if utterance.made is not None else ""]
        for path in utterance.audio:
            try:
                state = os.stat(path)
                pieces.append(f"{path}\n{state.st_size}\n{state.st_mtime_ns}")
            except OSError:
                pieces.append(f"{path}\nmissing")
    return digest(pieces)


def _make(utterances: list[Utterance], front: FrontEnd) -> Item:
    """The features of one speaker, with how many frames each utterance has, and why some have none."""
    features = [np.empty((0, front.width), np.float16)] * len(utterances)
    skipped: dict[str, str] = {}
    for batch in _readable(utterances, front, skipped):
        for (position, _), values in zip(batch, front.make([samples for _, samples in batch]), strict=True):
            features[position] = values.astype(np.float16)
    note = {"frames": [len(each) for each in features], "audio": _digest_audio(utterances), "skipped": skipped}
    return Item(np.concatenate(features), note)


def _describe_made(utterances: list[Utterance], front: LogMel) -> dict[str, Any]:
    """What a note says of a speaker whose sound is computed: all from its length and its address."""
    frames = []
    for utterance in utterances:
        if utterance.made is None:
            raise TypeError(f"{utterance.id} is a recording among sound that is computed; a corpus has one kind only")
        length = utterance.made.length * front.settings.sample_rate // SAMPLE_RATE
        frames.append(frame_count(length, front.settings))
    return {"frames": frames, "audio": _digest_audio(utterances), "skipped": {}}


def _readable(
    utterances: list[Utterance], front: FrontEnd, skipped: dict[str, str]
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Utterances that can be read: position and samples, as many as go together."""
    batch: list[tuple[int, np.ndarray]] = []
    seconds = 0.0
    for position, utterance in enumerate(utterances):
        try:
            samples = read_audio(utterance)
            front.check(samples)
        except Undecodable as error:
            skipped[str(position)] = str(error)
            continue
        batch.append((position, samples))
        seconds += len(samples) / SAMPLE_RATE
        if seconds >= front.together:
            yield batch
            batch, seconds = [], 0.0
    if batch:
        yield batch


def _digest_audio(utterances: list[Utterance]) -> str:
    """Digest the bytes of a speaker's recordings: of files, since decoded sound and features vary between machines."""
    made = [utterance.made.address for utterance in utterances if utterance.made is not None]
    return digest([*made, *(_recording(path) for utterance in utterances for path in utterance.audio)])


def _recording(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # its utterance is skipped
