"""What an operator watches: counters of the transport and of the rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Counters; each is written by one thread and may be read by others."""

    connected: int = 0
    bytes_moved: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def moved(self, size: int) -> None:
        self.bytes_moved += size

    def count(self, what: str) -> None:
        self.refusals[what] += 1
