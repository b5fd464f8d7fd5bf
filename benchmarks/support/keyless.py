"""What two runs of one recipe have in common: all but the key of their digests, and the time that they took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from confide.privacy.ledger import FILE, Entry, Ledger


def ledger_without_key(run: Path) -> tuple[dict[str, Any], set[str], list[Entry]]:
    """Read a checked ledger: its first line without the keyed digests, the names of those, and every release."""
    book = Ledger.read(run / FILE)
    rest = {name: value for name, value in book.header.items() if name != "inputs"}
    return rest, set(book.header["inputs"]), book.entries


def summary_without_key(run: Path) -> dict[str, Any]:
    """Read a summary without what follows from the key or the clock."""
    summary = json.loads((run / "summary.json").read_text())
    summary.get("statement", {}).pop("ledger_head", None)
    return {name: value for name, value in summary.items() if name not in ("inputs", "ledger_head", "seconds")}
