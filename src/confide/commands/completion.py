"""What the shell offers after the Tab key. Nothing heavy is imported: a shell waits for it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def recipe_names(incomplete: str) -> list[str]:
    """Shipped recipes that begin so; files are the shell's own business."""
    root = Path(str(files("confide") / "recipes"))
    names = sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
    return [name for name in names if name.startswith(incomplete)]
