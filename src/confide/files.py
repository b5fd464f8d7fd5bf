"""The machine: files that are never half-written, digests and their keys, where data lie, and how many cores."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

DATA_ENV = "CONFIDE_DATA"
_USUAL = Path("../shared/data")
CACHE_ENV = "CONFIDE_CACHE"
SECRET = "secret.key"
"""The file of a run's folder with the key of its digests. It must not leave the folder."""
_SECRET_BYTES = 32


def write_atomically(path: Path, content: bytes, suffix: str = ".tmp", mode: int = 0o666) -> None:
    """Write a temporary file beside the target, sync it, rename it, and sync the folder.

    Where several processes may write the same file, each needs a suffix of its own. `mode` says who may read it, less
    what the umask takes away.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        temporary.unlink(missing_ok=True)  # what a kill left there, or somebody's link to another file
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_plain(folder: Path) -> None:
    """Refuse a run's folder with a pipe, a device or a link in it: reading would wait for ever, or writing go astray.

    Folders of runs are passed on. A link may stand where this only reads (a large checkpoint that lies elsewhere), but
    not where it appends, and it must lead to a plain file.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and (path.suffix == ".jsonl" or path.name == ".lock"):
            raise UserError(
                f"{path} is a link; expected a file of the run's own: put the file itself there, or remove it"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a pipe or a device; expected a file: remove it")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a process that was killed may have left a part of one at the end."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def digest(pieces: Iterable[str | bytes | Tensor | np.ndarray]) -> str:
    """Of texts and arrays in their order; where one ends and the next begins counts."""
    import numpy as np
    from torch import Tensor

    total = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        if isinstance(piece, Tensor):
            piece = piece.detach().cpu().numpy()
        if isinstance(piece, np.ndarray):
            total.update(f"array {piece.dtype} {piece.shape}".encode())
            total.update(np.ascontiguousarray(piece).data.cast("B") if piece.size else b"")
        else:
            own = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
            total.update(f"bytes {len(own)} ".encode())
            total.update(own)
    return total.hexdigest()


def seal(digests: Mapping[str, str], key: bytes) -> dict[str, str]:
    """Key digests of data, so that nobody without the key can test a guess of the data against them.

    An empty key leaves them as they are, as in runs from before there was a key.
    """
    if not key:
        return dict(digests)
    return {
        name: hashlib.blake2b(f"{name}\n{value}".encode(), key=key, digest_size=16).hexdigest()
        for name, value in digests.items()
    }


def new_secret() -> bytes:
    """Draw a key for `seal` from the operating system."""
    return secrets.token_bytes(_SECRET_BYTES)


def read_secret(folder: Path) -> bytes | None:
    """Read the key of a run's digests; none if the folder has no such file."""
    try:
        key = (folder / SECRET).read_bytes()
    except FileNotFoundError:
        return None
    if len(key) != _SECRET_BYTES:
        raise UserError(f"{folder / SECRET} has {len(key)} bytes; expected {_SECRET_BYTES}: put the run's own back")
    return key


def data_folder() -> Path:
    """CONFIDE_DATA, else ../shared/data."""
    own = os.environ.get(DATA_ENV)
    return Path(own).expanduser() if own else _USUAL


def cache_folder() -> Path:
    """CONFIDE_CACHE, else XDG_CACHE_HOME/confide, else ~/.cache/confide."""
    if own := os.environ.get(CACHE_ENV):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "confide"
    return Path.home() / ".cache" / "confide"


def make_folder(folder: Path) -> None:
    """Make a folder, and say at once if it cannot be written to: before the minutes of computing, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder} ({error.strerror}); expected a folder that can be written to: "
            f"name another one in the recipe or in the environment variable {CACHE_ENV}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"the cache folder {folder} cannot be written to; expected one that can: change its permissions, or name "
            f"another one in the recipe or in the environment variable {CACHE_ENV}"
        )


def usable_cores() -> int:
    """The processors that this process may use, which a container or `taskset` can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
