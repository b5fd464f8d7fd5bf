"""What a benchmark found, as a JSON document that can lie in docs/results, with the command that made it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any


def write_record(path: Path, rows: Any) -> None:
    """Write the rows, one on each line, and the command as it was typed."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    command = json.dumps(shlex.join(["python", *sys.argv]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "command": {command},\n "rows": [\n  {lines}\n ]\n}}\n')
