"""One candidate in a process of its own, which makes a round when it is told to, so that rounds can be interleaved.

Standard library and numpy only: runners of other systems import this in their own environments. The parent writes
`round` or `end`, a line each; the runner answers with a JSON document a line. What the system itself prints goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Gate:
    """Lets one round through at a time, for systems that run their own loop."""

    def __init__(self) -> None:
        self._orders = os.fdopen(os.dup(0), "r")
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        sys.stdout = sys.stderr
        self._began: float | None = None

    def ready(self, **facts: Any) -> None:
        self._say({"ready": True, **facts})

    def open(self) -> bool:
        """Wait for the next order; False when there will be no more."""
        order = self._orders.readline().strip()
        self._began = time.perf_counter()
        return order == "round"

    def close(self, **times: float) -> None:
        """The round is over."""
        if self._began is not None:
            self._say({"seconds": time.perf_counter() - self._began, **times})
        self._began = None

    def _say(self, document: dict[str, Any]) -> None:
        self._answers.write(json.dumps(document) + "\n")
        self._answers.flush()


def serve(make_round: Callable[[], dict[str, float] | None], gate: Gate | None = None, **facts: Any) -> None:
    """For candidates that are called: a round whenever one is asked for."""
    gate = gate or Gate()
    gate.ready(**facts)
    while gate.open():
        gate.close(**(make_round() or {}))
