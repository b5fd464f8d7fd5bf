"""Functions that a recipe names: `module:function`, installed, or in a file of the current folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from confide.errors import UserError

NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def imported(name: str, field: str) -> Any:
    """What the name stands for; a UserError says which part of it is missing."""
    module, function = name.split(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed program does not look where it was called
        sys.path.append(here)
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field}={name}: {error}; run in the folder that has {module.split('.')[0]}.py, or install it"
        ) from error
    except AttributeError as error:
        raise UserError(f"{field}={name}: {module} has no {function}") from error
