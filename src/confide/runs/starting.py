"""The start of a run in a new folder. One that fails leaves nothing behind, so that it can be mended and tried again.

A recipe that stayed after a failed start would make its folder that of another run. What has made a release is never
undone: from there on `confide.runs.folder` keeps everything, and `confide resume` goes on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confide.errors import Stopped, UserError
from confide.files import SECRET

LOCK, DEPLOYED = ".lock", "deployed"
_KEPT = (LOCK, SECRET, DEPLOYED)
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)


def make_folder(folder: Path) -> bool:
    """Make the folder of a new run, and say whether it was not there; one that holds something else is refused."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --out folder")
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strangers = [p.name for p in folder.iterdir() if p.name not in _KEPT and p.suffix != ".tmp"]
        if not strangers:
            (folder / LOCK).open("a").close()
    except OSError as error:
        raise UserError(_unwritable(folder, error)) from None
    if strangers:
        raise UserError(f"{folder} is not empty and holds no run ({strangers[0]}, ...); choose another --out folder")
    return new


@contextmanager
def undone_if_it_fails(folder: Path, new: bool) -> Iterator[None]:
    """Take back what a start wrote into the folder if it fails or is stopped; nothing has been released by then."""
    before = set(os.listdir(folder))
    try:
        yield
    except BaseException as problem:
        for name in set(os.listdir(folder)) - before:
            (folder / name).unlink()
        if new and set(os.listdir(folder)) <= {LOCK}:
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
        if isinstance(problem, KeyboardInterrupt):
            raise Stopped(
                f"stopped before the first step; nothing was begun, and nothing is left in {folder}"
            ) from None
        if isinstance(problem, OSError) and problem.errno in _WRITING and _inside(problem, folder):
            raise UserError(_unwritable(folder, problem)) from None
        raise


def _inside(problem: OSError, folder: Path) -> bool:
    """Whether it happened while writing to the folder, and not while reading data."""
    return problem.filename is None or Path(str(problem.filename)).is_relative_to(folder)


def _unwritable(folder: Path, error: OSError) -> str:
    return (
        f"--out {folder} cannot be written ({error.strerror}); nothing was begun. Mend this, or choose another folder"
    )
