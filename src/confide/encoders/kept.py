"""Arrays that are computed once and then read from disk: features of speech, states of frozen encoders.

Serves PFL-ASR, section 4 (features are made before training) and CAR, section 6.4 (only the head trains). An item is
rows (n, width) with a note, under a key: a digest of everything that decides them. Items of one maker lie in one
folder, in blocks of many. A block is a safetensors file of which only the head is read until somebody wants its rows;
these are memory-mapped, and checked before their first use. What is missing, cut or damaged is made again, at once or
in the middle of a run.

    place / digest of the maker / digest of the keys.kept

Several processes may use a place at once, and any may be killed: a block appears whole or not at all, under a name that
follows from its keys, so that two who make the same one write the same file. Blocks are made on all cores by threads
with one torch thread each. How items are dealt into blocks does not depend on the cores, so neither do the bytes.

Blocks are made from people's recordings and texts, so only their owner may read them (0700, 0600).

When blocks are written and their place holds more than `CONFIDE_CACHE_GB` (64), those not used for longest go, but none
that was used within the hour.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confide.errors import UserError
from confide.files import cache_folder, digest, make_folder, usable_cores, write_atomically
from confide.progress import Reporter

LIMIT_ENV = "CONFIDE_CACHE_GB"
_LIMIT = 64.0
_SCHEME = "1"  # part of every folder's name: change it when blocks look different
SUFFIX = ".kept"
_TRIES = 4  # of making what is missing and finding it
_STALE = 3600.0  # seconds: a temporary file that is older is a dead process's
_TYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "U8": np.uint8}
_HEAD = ("keys", "sizes", "notes")


@dataclass(frozen=True)
class Item:
    """What belongs to one key: rows (n, width), and whatever JSON can say of them."""

    rows: NDArray[Any]
    note: Any = None


@dataclass(frozen=True)
class Maker:
    """Makes the items of some numbers; `deal` says which of those that are missing share a block."""

    key: str  # everything that decides what `make` gives, beside an item's own key
    width: int
    make: Callable[[list[int]], list[Item]]
    deal: Callable[[list[int]], Iterable[list[int]]]
    label: str
    dtype: type[np.floating[Any]] = np.float32


class _Block:
    """A file, of which the head is read at once. Raises for one that is not as it was written."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.rows = path, np.empty((0, width))
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            told: dict[str, Any] = json.loads(file.read(begin - 8))
            parts = []
            for name in _HEAD:
                start, end = told[name]["data_offsets"]
                file.seek(begin + start)
                parts.append(np.frombuffer(file.read(end - start), _TYPES[told[name]["dtype"]]))
        check, self._check = told["__metadata__"]["checks"].split()
        self._type, self._shape = _TYPES[told["rows"]["dtype"]], tuple(told["rows"]["shape"])
        self._start, end = (begin + offset for offset in told["rows"]["data_offsets"])
        if self._shape[1] != width or _checksum(parts) != check or path.stat().st_size < end:
            raise ValueError(f"{path} is damaged")
        self.keys = [key.tobytes().hex() for key in parts[0].reshape(len(parts[1]), -1)]
        self.sizes: list[int] = parts[1].tolist()
        self.notes: list[Any] = json.loads(parts[2].tobytes())

    def open(self) -> bool:
        """Memory-map the rows before their first use; say whether they are as they were written."""
        if len(self.rows) < self._shape[0]:
            try:
                rows = np.memmap(self.path, self._type, "r", self._start, self._shape)
            except (OSError, ValueError):
                return False
            if _checksum([rows]) != self._check:
                return False
            self.rows = rows
        return True


@dataclass
class Kept:
    """The items of some keys, in their order."""

    folder: Path
    maker: Maker
    keys: list[str]
    quiet: bool
    notes: list[Any] = field(default_factory=list)
    _blocks: list[_Block] = field(default_factory=list)
    _where: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))  # block, first row, rows

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, item: int) -> NDArray[Any]:
        """An item's rows (n, width), memory-mapped."""
        ((block, start, size),) = self._find(np.array([item])).tolist()
        found: NDArray[Any] = self._blocks[block].rows[start : start + size]
        return found

    def first_rows(self, items: NDArray[np.int64]) -> NDArray[Any]:
        """Of each item the first row."""  # (items, width)
        where = self._find(items)
        found = np.empty((len(items), self.maker.width), self.maker.dtype)
        for block in np.unique(where[:, 0]):
            here = where[:, 0] == block
            found[here] = self._blocks[block].rows[where[here, 1]]
        return found

    def _find(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where items are, in blocks that are whole; others are made again."""
        blocks = {self._blocks[number] for number in np.unique(self._where[items, 0])}
        damaged = [block for block in blocks if not block.open()]
        if not damaged:
            return self._where[items]
        for block in damaged:
            try:
                block.path.unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"{block.path} is damaged and cannot be removed ({error.strerror}); expected a cache folder that "
                    "can be written to: change its permissions or name another; what is missing is made there"
                ) from error
        self.open()
        return self._find(items)

    def open(self) -> None:
        """Find all items, and make those that are missing."""
        made = False
        for _ in range(_TRIES):
            found = self._scan()
            missing = {key: item for item, key in enumerate(self.keys) if key not in found}
            if not missing:
                break
            self._make(sorted(missing.values()), len(set(self.keys)))
            made = True
        else:  # another process that makes room may have removed what took hours to make, but not so often
            raise UserError(
                f"{len(missing)} items that were written to {self.folder} are not there or damaged; expected a folder "
                "that keeps what is written: check the disk, or name another cache folder"
            )
        own = [found[key] for key in self.keys]
        self.notes = [note for *_, note in own]
        self._where = np.array([where for *where, _ in own], dtype=np.int64).reshape(-1, 3)
        used = {self._blocks[number].path for number in np.unique(self._where[:, 0])}
        trim(self.folder.parent, used, room=made)

    def _scan(self) -> dict[str, tuple[int, int, int, Any]]:
        """Of each key its block, first row, number of rows and note. Damaged blocks are left out."""
        found: dict[str, tuple[int, int, int, Any]] = {}
        self._blocks = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                block = _Block(path, self.maker.width)
            except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError):
                continue
            starts = [0, *accumulate(block.sizes)]
            for key, start, size, note in zip(block.keys, starts[:-1], block.sizes, block.notes, strict=True):
                found[key] = (len(self._blocks), start, size, note)
            self._blocks.append(block)
        return found

    def _make(self, missing: list[int], total: int) -> None:
        import torch

        make_folder(self.folder)
        self.folder.chmod(0o700)  # what is made of people's voices and texts is theirs
        threads = torch.get_num_threads()
        # A pass of one thread gives the same bytes on every number of cores.
        pool = ThreadPoolExecutor(usable_cores(), initializer=torch.set_num_threads, initargs=(1,))
        with Reporter(self.maker.label, total, done=total - len(missing), quiet=self.quiet) as reporter:
            try:
                for job in as_completed([pool.submit(self._write, items) for items in self.maker.deal(missing)]):
                    reporter.done += job.result() - 1
                    reporter.advance("")
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(threads)

    def _write(self, items: list[int]) -> int:
        """Make one block."""
        from safetensors.numpy import save

        made = self.maker.make(items)
        keys = bytes.fromhex("".join(self.keys[item] for item in items))
        arrays: dict[str, NDArray[Any]] = {
            "keys": np.frombuffer(keys, np.uint8).reshape(len(items), -1),
            "sizes": np.array([len(item.rows) for item in made], np.int64),
            "notes": np.frombuffer(json.dumps([item.note for item in made]).encode(), np.uint8),
            "rows": np.concatenate([item.rows for item in made]).astype(self.maker.dtype, copy=False),
        }
        if not np.isfinite(arrays["rows"]).all():
            raise UserError(
                f"{self.maker.label}: a number that is not finite came out; expected finite ones: if an encoder made "
                "it, its weights are damaged or do not belong to its configuration: install it again"
            )
        checks = f"{_checksum(arrays[name] for name in _HEAD)} {_checksum([arrays['rows']])}"
        content = save(arrays, metadata={"checks": checks})  # of several entries the order would be random
        try:
            # Not the process's number: two containers that share a cache may have the same.
            write_atomically(self.folder / f"{digest([keys])}{SUFFIX}", content, f".{secrets.token_hex(8)}.tmp", 0o600)
        except OSError as error:
            raise UserError(
                f"cannot write to the cache folder {self.folder} ({error.strerror}); expected a writable one with "
                f"{len(content) / 1e6:.1f} MB free: make room or name another; what is there already is kept"
            ) from error
        return len(items)


def keep(maker: Maker, keys: Sequence[str], place: Path | None, quiet: bool = False) -> Kept:
    """The items of some keys (32 hexadecimal digits each), made where `place` (none: the cache) does not have them."""
    name = digest([_SCHEME, maker.key, str(maker.width), np.dtype(maker.dtype).name])
    kept = Kept((place or cache_folder() / "kept").expanduser() / name, maker, list(keys), quiet)
    kept.open()
    return kept


def _checksum(arrays: Iterable[NDArray[Any]]) -> str:
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"", value)
    return str(value)


def trim(place: Path, used: set[Path], room: bool, gigabytes: float | None = None) -> None:
    """Note what is in use, by its time of change; to make room, remove the oldest and what was left half-written.

    What was touched within the hour stays: another process may be about to open it. `gigabytes` is the limit, if not
    that of the environment.
    """
    given, old = os.environ.get(LIMIT_ENV, ""), time.time() - _STALE
    try:
        limit = (float(given or _LIMIT) if gigabytes is None else gigabytes) * 1e9
        if not limit >= 0:
            raise ValueError
    except ValueError:
        raise UserError(f"{LIMIT_ENV}={given!r} is no number of gigabytes; expected 0 or more, such as 20") from None
    total, others = 0, []
    for path in used | set(place.glob(f"*/*{SUFFIX}*") if room else ()):
        with suppress(OSError):  # another process was quicker, or the folder may only be read
            state = path.stat()
            total += state.st_size
            if path in used:
                os.utime(path)
            elif state.st_mtime < old:
                others.append((path.suffix == SUFFIX, state.st_mtime, state.st_size, path))
    for whole, _, size, path in sorted(others):
        if total > limit or not whole:
            path.unlink(missing_ok=True)
            total -= size
