"""Where computed things are kept between runs, and where data is looked for that is asked for by name."""

from __future__ import annotations

import os
from pathlib import Path

from confide.errors import UserError

DATA_ENV = "CONFIDE_DATA"
_USUAL = Path("../shared/data")
CACHE_ENV = "CONFIDE_CACHE"


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
