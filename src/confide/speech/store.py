"""Features on disk, one file per speaker, so that a client's step does no signal processing.

Serves PFL-ASR, section 4: features and targets of every utterance are computed once, before training. A speaker's file
is named after everything that decides its contents (feature settings, token set, stride, and the utterances' ids,
texts, files, sizes and times of change). So a later run finds it again, also for another corpus with the same speaker,
and computes anew what has changed. An index of the whole corpus saves opening every file.

With the features goes a digest of the recordings' bytes, by which a resumed run tells that the audio is the same. It
costs a second reading of each recording when its features are made, and nothing when a store is opened again. Features
from before there were such digests are kept; their recordings are read once more, without signal processing.

Features are kept as float16: normalised log-mels lie within about +-5, where its error is at most 2e-3 and on average
1.5e-4 of a standard deviation; a tiny model's log-probabilities move by less than 1e-2 and its greedy labels stay.

Sound that a corpus computes (`Utterance.made`) has no file here: its features are computed when they are asked for, in
about the time that reading and writing them would take, and the first few thousand are kept in memory.

An utterance is skipped, counted and named when it cannot be decoded, has no word, or has a label that is longer than
CTC can align: floor(frames / stride) must be at least the number of tokens and one more for each repeated neighbour.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from confide.errors import UserError
from confide.files import cache_folder, digest, make_folder, write_atomically
from confide.progress import Reporter
from confide.speech.corpus import SAMPLE_RATE, Corpus, Skipped, Undecodable, Utterance, read_audio
from confide.speech.features import FeatureSettings, frame_count, log_mel
from confide.speech.tokens import Tokens

# Part of every file's name: change it whenever the same audio would give other features or another file.
_SCHEME = 1
_RESAMPLED = 2  # of audio at another rate than 16 kHz, which scheme 1 took for 16 kHz
_STRIDE = 3
_NUMBERS = ("kept", "frames", "lengths", "tokens")  # what a speaker's file holds besides features
_REMEMBERED = 4_000  # utterances of computed sound whose features are kept in memory: 100 MB at 1.5 s each
_NO_TEXT = "no text: nothing is left of it in the token set"
_DAMAGES = (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError)  # from reading a damaged file


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
    """What the index knows of a speaker: n kept utterances with all their tokens one after the other."""

    name: str
    key: str
    size: int  # bytes of the file, to notice one that was cut
    checksum: int
    audio: str  # a digest of the recordings; empty in files from before there was one
    skipped: list[tuple[str, str]]  # id and reason
    kept: NDArray[np.int32]  # (n,) positions among the corpus's utterances of this speaker
    frames: NDArray[np.int32]  # (n,)
    lengths: NDArray[np.int32]  # (n,) of the targets
    tokens: NDArray[np.uint8]  # (sum of lengths,)


@dataclass
class FeatureStore:
    """The users of a corpus, numbered in the order of `speakers`. Each call of `features` reads them from disk."""

    folder: Path
    token_set: Tokens
    front: FrontEnd
    speakers: list[str]
    skipped: list[Skipped]
    _index: list[_Speaker]
    _utterances: list[list[Utterance]]
    _checked: set[int] = field(default_factory=set)
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
        speaker, edge = self._index[user], 0 if self.front.edges else 1
        ends = np.cumsum(speaker.lengths)
        starts = ends - speaker.lengths
        return [speaker.tokens[starts[i] + edge : ends[i] - edge].astype(np.int64) for i in indices]

    def features(self, user: int, indices: Sequence[int] | np.ndarray) -> list[NDArray[np.float32]]:
        """Features (frames, mels) of the chosen utterances, read from the speaker's file."""
        speaker = self._index[user]
        if not speaker.key:
            return [self._compute(user, int(i)).astype(np.float32) for i in indices]
        path = _path(self.folder, speaker.key)
        if user not in self._checked:
            self._check_file(speaker, self._utterances[user], path)
            self._checked.add(user)
        ends = np.cumsum(speaker.frames, dtype=np.int64)
        with safetensors.safe_open(path, framework="np") as file:
            rows = file.get_slice("features")
            return [rows[int(ends[i] - speaker.frames[i]) : int(ends[i])].astype(np.float32) for i in indices]

    def _compute(self, user: int, index: int) -> NDArray[np.float16]:
        """Features of sound that is in no file, rounded as those in files are."""
        known = self._remembered.get((user, index))
        if known is None:
            utterance = self._utterances[user][self._index[user].kept[index]]
            known = self.front.make([read_audio(utterance)])[0].astype(np.float16)
            if len(self._remembered) < _REMEMBERED:  # whoever comes first stays: a cycle longer than this gains nothing
                self._remembered[user, index] = known
        return known

    def _check_file(self, speaker: _Speaker, utterances: list[Utterance], path: Path) -> None:
        """Make a file again that has changed since it was written."""
        if _read(path, speaker.name) is not None:
            return
        again = _make(path, speaker.name, utterances, self.token_set, self.front)
        if again.checksum != speaker.checksum:
            raise UserError(
                f"the audio of speaker {speaker.name} has changed since its features were made in {path}; "
                "expected it to stay as it is during a run: start the run again"
            )


def open_store(
    corpus: Corpus, tokens: Tokens, front: FrontEnd, folder: Path | None = None, quiet: bool = False
) -> FeatureStore:
    """The features of a corpus, made where `folder` (none: the user's cache) does not hold them yet."""
    computed = any(utterance.made is not None for own in corpus.speakers.values() for utterance in own[:1])
    if computed and isinstance(front, LogMel):  # what an encoder makes takes longer, and is kept as of recordings
        made = [_describe_made(name, own, tokens, front) for name, own in corpus.speakers.items()]
        return _collect(corpus, made, Path(), tokens, front)
    place = (folder or cache_folder() / "features").expanduser()
    resampled = isinstance(front, LogMel) and front.settings.sample_rate != SAMPLE_RATE
    common = f"{_RESAMPLED if resampled else _SCHEME}\n{front.key}\n{tokens.version}\n{front.stride}"
    paths = {name: _path(place, _key(common, name, own)) for name, own in corpus.speakers.items()}
    named = hashlib.sha256("\n".join(path.stem for path in paths.values()).encode())
    index_path = place / f"{named.hexdigest()[:32]}.index"
    index = _read_index(index_path, place)
    if index is None:
        make_folder(place)
        found = {name: _read(path, name) for name, path in paths.items()}
        missing = [name for name, speaker in found.items() if speaker is None]
        done = len(found) - len(missing)
        with Reporter(f"features ({corpus.name})", len(found), done=done, quiet=quiet) as reporter:
            for name in missing:
                found[name] = _make(paths[name], name, corpus.speakers[name], tokens, front)
                reporter.advance(name)
        index = [
            speaker if speaker.audio else replace(speaker, audio=_digest_audio(corpus.speakers[name]))
            for name, speaker in found.items()
            if speaker is not None
        ]
        _write(index_path, _pack_index(index))
    return _collect(corpus, index, place, tokens, front)


def _collect(corpus: Corpus, index: list[_Speaker], place: Path, tokens: Tokens, front: FrontEnd) -> FeatureStore:
    """The store of all who have something left to train on."""
    usable = [speaker for speaker in index if len(speaker.kept)]
    skipped = [Skipped(*item) for speaker in index for item in speaker.skipped]
    if not usable:
        reasons = "; ".join(f"{item.id}: {item.reason}" for item in skipped[:3])
        raise UserError(
            f"the corpus {corpus.name} has no usable utterance among {len(skipped)} ({reasons}); expected at least "
            "one speaker with readable audio and text that fits it: check the corpus's folder and language"
        )
    names = [speaker.name for speaker in usable]
    utterances = [corpus.speakers[name] for name in names]
    return FeatureStore(place, tokens, front, names, skipped, usable, utterances)


def frames_needed(labels: Sequence[int]) -> int:
    """The fewest frames to which CTC can align the labels: a blank must part equal neighbours."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))


def _key(common: str, name: str, utterances: list[Utterance]) -> str:
    total = hashlib.sha256(f"{common}\n{name}\n".encode())
    for utterance in utterances:
        total.update(f"{utterance.id}\n{utterance.text}\n".encode())
        if utterance.made is not None:
            total.update(f"{utterance.made.address}\n".encode())
        for path in utterance.audio:
            try:
                state = os.stat(path)
                total.update(f"{path}\n{state.st_size}\n{state.st_mtime_ns}\n".encode())
            except OSError:
                total.update(f"{path}\nmissing\n".encode())
    return total.hexdigest()[:32]


def _path(folder: Path, key: str) -> Path:
    # Two characters of folder: tens of thousands of files in one folder are slow on some systems.
    return folder / key[:2] / f"{key}.safetensors"


def _make(path: Path, name: str, utterances: list[Utterance], tokens: Tokens, front: FrontEnd) -> _Speaker:
    """Compute and write one speaker's file."""
    kept, features, targets = [], [], []
    skipped: list[tuple[str, str]] = []
    for batch in _readable(utterances, tokens, front, skipped):
        for (position, target, _), values in zip(batch, front.make([samples for *_, samples in batch]), strict=True):
            try:
                _check_label(target, len(values), front.stride)
            except Undecodable as error:
                skipped.append((utterances[position].id, str(error)))
                continue
            kept.append(position)
            features.append(values.astype(np.float16))
            targets.append(np.array(target, dtype=np.uint8))
    arrays: dict[str, np.ndarray] = {
        "features": np.concatenate(features) if features else np.empty((0, front.width), dtype=np.float16),
        "kept": np.array(kept, dtype=np.int32),
        "frames": np.array([len(f) for f in features], dtype=np.int32),
        "lengths": np.array([len(t) for t in targets], dtype=np.int32),
        "tokens": np.concatenate(targets) if targets else np.empty(0, dtype=np.uint8),
    }
    checksum = _checksum(arrays.values())
    audio = _digest_audio(utterances)
    content = save(arrays, metadata={"note": json.dumps({"checksum": checksum, "audio": audio, "skipped": skipped})})
    _write(path, content)
    numbers = (arrays[each] for each in _NUMBERS)
    return _Speaker(name, path.stem, len(content), checksum, audio, skipped, *numbers)


def _describe_made(name: str, utterances: list[Utterance], tokens: Tokens, front: LogMel) -> _Speaker:
    """What the index says of a speaker whose sound is computed: all from its length and its address."""
    kept, frames, targets, skipped, addresses = [], [], [], [], []
    for position, utterance in enumerate(utterances):
        if utterance.made is None:
            raise TypeError(f"{utterance.id} is a recording among sound that is computed; a corpus has one kind only")
        target = tokens.encode(utterance.text)
        there = frame_count(utterance.made.length * front.settings.sample_rate // SAMPLE_RATE, front.settings)
        try:
            _check_label(target, there, front.stride)
        except Undecodable as error:
            skipped.append((utterance.id, str(error)))
            continue
        kept.append(position)
        frames.append(there)
        targets.append(target)
        addresses.append(utterance.made.address)
    kept_, frames_, lengths = (np.array(each, np.int32) for each in (kept, frames, [len(t) for t in targets]))
    spelt = np.array([token for target in targets for token in target], dtype=np.uint8)
    return _Speaker(name, "", 0, 0, digest(addresses), skipped, kept_, frames_, lengths, spelt)


def _check_label(target: Sequence[int], frames: int, stride: int) -> None:
    needed, there = frames_needed(target), frames // stride
    if not target:
        raise Undecodable(_NO_TEXT)
    if there < needed:
        raise Undecodable(f"label too long: {needed} frames needed after the stride, {there} there")


def _readable(
    utterances: list[Utterance], tokens: Tokens, front: FrontEnd, skipped: list[tuple[str, str]]
) -> Iterator[list[tuple[int, list[int], np.ndarray]]]:
    """Utterances that have a text and can be read: position, target and samples, as many as go together."""
    batch: list[tuple[int, list[int], np.ndarray]] = []
    seconds = 0.0
    for position, utterance in enumerate(utterances):
        target = tokens.encode(utterance.text)
        try:
            if not target:
                raise Undecodable(_NO_TEXT)
            samples = read_audio(utterance)
            front.check(samples)
        except Undecodable as error:
            skipped.append((utterance.id, str(error)))
            continue
        batch.append((position, target, samples))
        seconds += len(samples) / SAMPLE_RATE
        if seconds >= front.together:
            yield batch
            batch, seconds = [], 0.0
    if batch:
        yield batch


def _digest_audio(utterances: list[Utterance]) -> str:
    """Digest the bytes of a speaker's recordings: of files, since decoded sound and features vary between machines."""
    made = [utterance.made.address for utterance in utterances if utterance.made is not None]
    return digest(made or (_recording(path) for utterance in utterances for path in utterance.audio))


def _recording(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # its utterance is skipped


def _checksum(arrays: Iterable[np.ndarray]) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(array.tobytes(), value)
    return value


def _read(path: Path, name: str) -> _Speaker | None:
    """What a speaker's file holds, or None if it is missing or not as it was written."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            note = json.loads((file.metadata() or {})["note"])
            arrays = {key: file.get_tensor(key) for key in ("features", *_NUMBERS)}
        if _checksum(arrays.values()) != note["checksum"] or arrays["frames"].sum() != len(arrays["features"]):
            return None
        numbers = (arrays[each] for each in _NUMBERS)
        size, audio = path.stat().st_size, note.get("audio", "")
        return _Speaker(name, path.stem, size, note["checksum"], audio, note["skipped"], *numbers)
    except _DAMAGES:
        return None


def _pack_index(index: list[_Speaker]) -> bytes:
    arrays = {key: np.concatenate([getattr(speaker, key) for speaker in index]) for key in _NUMBERS}
    speakers = [[s.name, s.key, s.size, s.checksum, s.audio, len(s.kept), len(s.tokens), s.skipped] for s in index]
    arrays["speakers"] = np.frombuffer(json.dumps(speakers).encode(), dtype=np.uint8)
    in_order = (arrays[key] for key in sorted(arrays))
    return save({**arrays, "check": np.array([_checksum(in_order)], dtype=np.uint32)})


def _read_index(path: Path, folder: Path) -> list[_Speaker] | None:
    """The index, or None if there is none, if it is damaged, or if a file that it names is gone or cut."""
    try:
        arrays = load(path.read_bytes())
        if int(arrays.pop("check")[0]) != _checksum(arrays[key] for key in sorted(arrays)):
            return None
        index, rows, letters = [], 0, 0
        for name, key, size, checksum, audio, kept, tokens, skipped in json.loads(arrays["speakers"].tobytes()):
            if os.stat(_path(folder, key)).st_size != size:
                return None
            own = [arrays[each][rows : rows + kept] for each in _NUMBERS[:3]]
            own.append(arrays["tokens"][letters : letters + tokens])
            index.append(_Speaker(name, key, size, checksum, audio, skipped, *own))
            rows, letters = rows + kept, letters + tokens
        return index
    except _DAMAGES:
        return None


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, f".{os.getpid()}.tmp")
    except OSError as error:
        raise UserError(
            f"cannot write features to {path} ({error.strerror}); expected a writable folder with "
            f"{len(content) / 1e6:.1f} MB free: name another cache folder"
        ) from error
