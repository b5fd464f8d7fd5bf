"""Files that are either the old ones or the new ones, never half of each."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, suffix: str = ".tmp") -> None:
    """Temporary file beside the target, fsync, rename, fsync of the folder.

    Where several processes may write the same file, each needs a suffix of its own.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        with temporary.open("wb") as file:
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
