"""Lines in a file, each with its own hash and that of the line before: what a ledger and a budget are made of.

An edit, a gap or a change of order breaks the chain. A line is on disk, synced, before `append` returns; one that did
not fit on the disk is taken back whole, and one that a kill has torn is cut off before the next is written. Neither was
followed by what it stands for.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from confide.errors import UserError

GENESIS = "0" * 64
VOID = "The privacy spent cannot be stated from this file"
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_PIECE = 1 << 12  # bytes read at a time from the end of a file


def seal(body: dict[str, Any], head: str) -> tuple[bytes, str]:
    """Make the line of a body that follows the line with hash `head`: its bytes, and its own hash."""
    body = {**body, "previous": head}
    digest = hashlib.sha256(_encode(body)).hexdigest()
    return _encode({**body, "hash": digest}), digest


def unseal(line: bytes, head: str, where: str) -> tuple[dict[str, Any], str]:
    """Check one line, and return its body and its hash."""
    try:
        body = json.loads(line)
        digest = body.pop("hash")
        previous = body["previous"]
        if line != _encode({**body, "hash": digest}):
            raise ValueError("not as it was written")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{where}: not a line of a ledger; the file was edited or damaged") from None
    if digest != hashlib.sha256(_encode(body)).hexdigest():
        raise UserError(f"{where}: was edited after it was written. {VOID}")
    if previous != head:
        raise UserError(f"{where}: does not follow the line before it; a line was removed, added or moved. {VOID}")
    return body, digest


def append(path: Path, line: bytes) -> None:
    """Write one line and sync it."""
    with path.open("ab") as file:
        append_to(file, line)


def append_to(file: BinaryIO, line: bytes) -> None:
    """Write one line at the end of an open file, and sync it; nothing of it stays where that fails."""
    size = at = file.seek(0, os.SEEK_END)
    left = memoryview(line + b"\n")
    try:
        while left:  # past the file's buffer, which would write the rest of a line that failed when it is closed
            at, left = at + (done := os.pwrite(file.fileno(), left, at)), left[done:]
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def drop_torn_line(path: Path) -> bool:
    """Cut off an unfinished last line. Its write had not ended, so what it stands for had not begun."""
    with path.open("r+b") as file:
        return drop_torn_end(file)


def drop_torn_end(file: BinaryIO) -> bool:
    """The same for an open file, of which only the end is read: a budget does this before every charge."""
    size = whole = file.seek(0, os.SEEK_END)
    while whole > 0:
        start = max(0, whole - _PIECE)
        file.seek(start)
        newline = file.read(whole - start).rfind(b"\n")
        whole = start + newline + 1
        if newline >= 0:
            break
    if whole == size:
        return False
    os.ftruncate(file.fileno(), whole)
    os.fsync(file.fileno())
    return True


def _encode(body: dict[str, Any]) -> bytes:
    return _JSON.encode(body).encode()
