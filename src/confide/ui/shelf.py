"""Finds, lists, renders and tries the runs under a folder. A name from the page is looked up, never opened."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.runs import answering
from confide.runs import folder as runs
from confide.runs.watch import Watched, busy

DEEPEST, MOST_RUNS = 4, 2000
HOME = "/#runs"
_RECORDS = (runs.METRICS, runs.SUMMARY, "scores.json")


@dataclass
class Shelf:
    """One folder."""

    root: Path
    _watched: dict[str, Watched] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def names(self) -> dict[str, Path]:
        """Find runs; their names are their paths below the folder. Links that lead out of it are not followed."""
        root, found = self.root.resolve(), {}
        for place, folders, files in os.walk(root, followlinks=False):
            here = Path(place)
            depth = len(here.relative_to(root).parts)
            folders[:] = sorted(f for f in folders if not f.startswith(".")) if depth < DEEPEST else []
            if runs.RECIPE in files and (here / runs.RECIPE).resolve().is_relative_to(root):
                found[str(here.relative_to(root)) if depth else root.name] = here
                folders[:] = []
            if len(found) >= MOST_RUNS:
                break
        return found

    def find(self, name: str) -> Path:
        place = self.names().get(name)
        if place is None:
            raise UserError(f"there is no run {name!r} under {self.root.name}; expected one of those that are listed")
        return place

    def listing(self) -> list[dict[str, Any]]:
        """List every run with how far it is, the running ones first."""
        rows = []
        for name, place in self.names().items():
            try:
                rows.append({"name": name, **self._look(name, place)})
            except (UserError, OSError, ValueError, KeyError, TypeError) as error:
                rows.append({"name": name, "state": "damaged", "said": str(error)[:300]})
        return sorted(rows, key=lambda row: (row["state"] != "running", row["name"]))

    def report(self, name: str) -> str:
        """A run's page as of now."""
        place = self.find(name)
        return _render_report(place, (*(_changed(place / file) for file in _RECORDS), busy(place)))

    def comparison(self, names: Iterable[str]) -> str:
        """A page that compares runs as of now."""
        places = tuple(self.find(name) for name in dict.fromkeys(names))
        if len(places) > 12:
            raise UserError(f"{len(places)} runs are too many for one page; choose at most 12")
        return _render_comparison(places, tuple(_changed(place / runs.SUMMARY) for place in places))

    def transcribe(self, name: str, sound: bytes, filename: str) -> dict[str, Any]:
        """Transcribe a recording by a finished speech run."""
        with self._without_places():
            return answering.heard(self.find(name), sound, filename)

    def retrieve(self, name: str, query: str, k: int) -> dict[str, Any]:
        """Find documents for a query by a finished retrieval run."""
        with self._without_places():
            return answering.found(self.find(name), query, k)

    @contextmanager
    def _without_places(self) -> Iterator[None]:
        """Explain mistakes without saying where the folder lies: beyond loopback, others read them."""
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace(f"{self.root}/", "").replace(f"{self.root.resolve()}/", "")) from None

    def _look(self, name: str, place: Path) -> dict[str, Any]:
        with self._lock:
            held = self._watched.get(name)
            if held is None or held.folder != place:
                held = self._watched[name] = Watched(place, runs.held_recipe(place))
            held.look()
            return held.to_json()


@lru_cache(maxsize=16)
def _render_report(place: Path, changed: tuple[int, ...]) -> str:
    from confide.report.page import render

    return render(place, runs.held_recipe(place), runs.summary_if_finished(place), HOME)


@lru_cache(maxsize=16)
def _render_comparison(places: tuple[Path, ...], changed: tuple[int, ...]) -> str:
    from confide.report.comparison import render
    from confide.runs.comparison import compare

    return render(compare(list(places)), HOME)


def _changed(path: Path) -> int:
    """When a file was written, in nanoseconds; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
