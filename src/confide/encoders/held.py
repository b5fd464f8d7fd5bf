"""What is kept on this machine beside runs, where, and how to be rid of it: `confide cache`.

Features and states are made from people's recordings and texts, one row for each stretch of speech or query: they are
personal data as the recordings are. So they lie in folders that only their owner may open, and can be removed. They
are made again when somebody wants them. Weights of encoders and synthetic voices are nobody's data.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from confide.encoders.kept import SUFFIX, trim
from confide.errors import UserError
from confide.files import cache_folder

KINDS = {
    "kept": "features of speech and states of encoders: personal data, if the recordings and texts are",
    "voices": "synthetic voices",
    "encoders": "weights of pretrained encoders",
    "kernels": "our own C++, compiled for this machine",
}


@dataclass(frozen=True)
class Held:
    """One thing that is kept."""

    kind: str
    path: Path
    bytes: int
    used: float
    """When it was last used or made, in seconds since 1970."""

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "path": str(self.path), "bytes": self.bytes, "last_used": self.used,
                "personal": self.kind == "kept"}  # fmt: skip


def held(place: Path | None = None) -> list[Held]:
    """Everything that is kept in the cache, or of the features and states in another folder, the largest first."""
    places = {kind: cache_folder() / kind for kind in KINDS} if place is None else {"kept": place.expanduser()}
    found = [one for kind, folder in places.items() if folder.is_dir() for one in _look(kind, folder)]
    return sorted(found, key=lambda one: -one.bytes)


def clear(things: list[Held]) -> int:
    """Remove these, and say how many bytes that freed."""
    for one in things:
        if one.path.is_dir():
            shutil.rmtree(one.path)
        else:
            one.path.unlink(missing_ok=True)
    return sum(one.bytes for one in things)


def limit(gigabytes: float, place: Path | None = None) -> int:
    """Remove features and states, those not used for longest first, until so much is left; what an hour used stays."""
    folder = cache_folder() / "kept" if place is None else place.expanduser()
    before = sum(one.bytes for one in held(place) if one.kind == "kept")
    trim(folder, set(), room=True, gigabytes=gigabytes)
    return before - sum(one.bytes for one in held(place) if one.kind == "kept")


def chosen(kind: str | None, days: float, place: Path | None = None) -> list[Held]:
    """What of a kind was not used for so many days."""
    if kind is not None and kind not in KINDS:
        raise UserError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    old = time.time() - days * 86_400
    return [one for one in held(place) if kind in (None, one.kind) and one.used <= old]


def _look(kind: str, folder: Path) -> Iterator[Held]:
    for path in sorted(folder.iterdir()):
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        if kind == "kept" and path.is_dir() and any(each.suffix != SUFFIX for each in files if ".tmp" not in each.name):
            continue  # a folder that somebody else filled
        if files:
            states = [each.stat() for each in files]
            yield Held(kind, path, sum(state.st_size for state in states), max(state.st_mtime for state in states))
