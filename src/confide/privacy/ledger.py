"""The record of what was released: one line on disk, synced, before each release.

`ledger.jsonl` starts with a line about the run and has one line per release after it. Every line carries its own hash
and that of the line before it, so an edit, a gap or a change of order breaks the chain; the checkpoint carries the
number of lines and the last hash, so that lines missing at the end are noticed too. Epsilon is computed from the
lines alone. The chain guards against accidents and careless edits; somebody who rewrites every file of a run folder
can rewrite this one too.

A line is written before its release. A crash between the two leaves a line without a release, which over-counts and
never under-counts. When the run goes on, the step is made again: if seed, recipe and environment are the same, the
value is the same bit for bit and the line stands for it; otherwise noise of a new attempt is drawn and a new line is
written, so that no line ever stands for two values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.privacy import chain
from confide.privacy.events import Event

FILE = "ledger.jsonl"


Pay = Callable[[int, int, Event, str | None], None]
"""From step, attempt, event and environment (none where the noise cannot be drawn again)."""


@dataclass(frozen=True)
class Entry:
    """One release: which step, which attempt at it, under which environment, and what it costs."""

    step: int
    attempt: int
    environment: str
    event: Event


@dataclass
class Ledger:
    """The releases of one run, each written before it is made. `path` None keeps the lines in memory.

    `create` begins a ledger, `read` checks one from disk line by line, `record` writes a release, and `charged` lists
    the events that an accountant composes.

    Examples:
        >>> from pathlib import Path
        >>> from confide.privacy.events import Event
        >>> from confide.privacy.ledger import Ledger
        >>> ledger = Ledger.create(Path("ledger.jsonl"), {"recipe": "an example"})
        >>> ledger.record(0, Event("everyone", 1.0, 10, 10, 2.0, 1.0), environment="here")  # the first attempt
        0
        >>> [event.noise_multiplier for event in Ledger.read(Path("ledger.jsonl")).charged()]
        [2.0]
    """

    path: Path | None
    header: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    head: str = chain.GENESIS
    latest: dict[int, Entry] = field(default_factory=dict)
    """The last attempt at each step."""
    costs: Counter[Event] = field(default_factory=Counter)
    """How many lines there are of each cost (`Event.cost`), counted as they come: a step asks for epsilon so far."""
    heads: set[str] = field(default_factory=set)
    """The hash of every line, each of which was the head once."""
    pay: Pay | None = None
    """Charges a budget over several runs, before the line is written; raises if that is spent."""

    @staticmethod
    def create(path: Path | None, header: dict[str, Any]) -> Ledger:
        ledger = Ledger(path, header)
        ledger._write({"run": header})
        return ledger

    @staticmethod
    def read(path: Path) -> Ledger:
        """Read and check every line. A torn last line was never followed by a release and is left out."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; is this the folder of a run?") from None
        lines = content.split(b"\n")[:-1]
        if not lines:
            raise UserError(f"{path} has no complete line; the first should describe the run")
        ledger = Ledger(path, {})
        for number, line in enumerate(lines, start=1):
            ledger._read_line(number, line)
        return ledger

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def fresh_cohorts(self) -> bool:
        """Whether every attempt at a step draws a cohort of its own, as in all runs but old seeded ones."""
        return bool(self.header.get("fresh_cohorts"))

    def charged(self) -> list[Event]:
        """List the events that an accountant composes: one for each line.

        Correlated noise makes one release of all steps together, which is charged as a whole with its first line, and
        for more where steps were made again (`_whole_run`).
        """
        return [entry.event for entry in self.entries] if self._line_by_line else self._charged_together()

    def counted(self) -> Counter[Event]:
        """Count what an accountant composes: as `charged`, but where lines stand alone nothing is gone through again.

        The bound may have moved from line to line; the events here are in units of it.
        """
        return self.costs if self._line_by_line else Counter(self._charged_together())

    @property
    def _line_by_line(self) -> bool:
        """Whether every line is a release by itself."""
        alone = self.fresh_cohorts or bool(self.header.get("for_release"))
        return alone and not any(cost.whole_run and cost.private for cost in self.costs)

    def _charged_together(self) -> list[Event]:
        whole = [entry for entry in self.entries if entry.event.whole_run and entry.event.private]
        if not whole:
            return self._joined()
        if len(self.costs) > 1 or any(entry.step >= entry.event.rounds for entry in whole):
            raise UserError(
                "the ledger has releases that the noise of this run was not made for; there is no guarantee"
            )
        return self._whole_run(whole)

    @property
    def restarts(self) -> bool:
        """Whether correlated noise begins anew where a step is made again, as in all runs but old ones."""
        return bool(self.header.get("restarts"))

    def _whole_run(self, lines: list[Entry]) -> list[Event]:
        """List what all steps of correlated noise cost together, some of them perhaps made again.

        Each line is a turn of its group, and no column of C is longer than a whole one. Sampled turns are counted: as
        many as the group with the most lines has. Turns without sampling are one Gaussian, whose squared sensitivity
        grows by a whole column a line; a planned run has at least `full` of these. Without restarts a user's turn may
        be in the noise of two histories: a step that was made m times then stands for m runs.
        """
        event, repeats = lines[0].event, max(Counter(entry.step for entry in lines).values())
        if repeats == 1 or not self.restarts:
            return [event] * repeats
        turns = max(Counter(entry.step % event.separation for entry in lines).values())
        if event.sampler == "cyclic_poisson":
            return [replace(event, rounds=max(event.rounds, turns * event.separation))]
        planned, last = divmod(event.rounds, event.separation)
        full = max(1, planned + (last >= event.bands))
        more = min(max(1.0, turns / full), repeats)
        return [replace(event, noise_multiplier=event.noise_multiplier / math.sqrt(more))]

    def _joined(self) -> list[Event]:
        """List one event for each step of a seeded run from before attempts had cohorts of their own.

        Releases over one and the same cohort are one release of it, with z^-2 the sum of theirs.
        """
        steps: dict[int, list[Event]] = {}
        for entry in self.entries:
            steps.setdefault(entry.step, []).append(entry.event)
        return [
            events[0]
            if len(events) == 1 or not all(event.private for event in events)
            else replace(events[0], noise_multiplier=sum(e.noise_multiplier**-2 for e in events) ** -0.5)
            for events in steps.values()
        ]

    def record(self, step: int, event: Event, environment: str, repeatable: bool = True) -> int:
        """Write the release of `step` to disk and return which attempt it is; the noise may only be drawn after that.

        Noise that cannot be drawn again is a new release every time, with a line of its own.
        """
        attempt, past = self.next_attempt(step, event, environment, repeatable), self.latest.get(step)
        if past is None or past.attempt != attempt:
            if self.pay is not None:
                self.pay(step, attempt, event, environment if repeatable else None)
            entry = Entry(step, attempt, environment, event)
            body = {"step": step, "attempt": attempt, "environment": environment, "event": event.to_json()}
            self._write(body, entry)
        return attempt

    def line_of(self, step: int) -> int:
        """Return the number of the line, counted from 0, that stands for the last attempt at `step`."""
        past = self.latest[step]
        return next(n for n in reversed(range(len(self.entries))) if self.entries[n] is past)

    def next_attempt(self, step: int, event: Event, environment: str, repeatable: bool = True) -> int:
        """Return which attempt at `step` its next release will be: the last one, if that can be repeated to the bit."""
        past = self.latest.get(step)
        same = past is not None and (past.environment, past.event) == (environment, event)
        if repeatable and past is not None and same and self._history_stands(past):
            return past.attempt
        return past.attempt + 1 if past else 0

    def _history_stands(self, past: Entry) -> bool:
        """Whether no earlier step was released anew since then; this step would otherwise start from another model."""
        for entry in reversed(self.entries):  # from the end: what comes after it is as much as is made again
            if entry is past or entry.step < past.step:
                return entry is past
        raise AssertionError("unreachable: the last attempt at a step is a line of its own")

    @staticmethod
    def drop_torn_line(path: Path) -> bool:
        """Cut off an unfinished last line. Its write had not ended, so its release had not begun."""
        return chain.drop_torn_line(path)

    def _write(self, body: dict[str, Any], entry: Entry | None = None) -> None:
        line, digest = chain.seal(body, self.head)
        if self.path is not None:
            chain.append(self.path, line)
        self._append(digest, entry)

    def _append(self, digest: str, entry: Entry | None) -> None:
        self.head = digest
        self.heads.add(digest)
        if entry is not None:
            self.entries.append(entry)
            self.costs[entry.event.cost] += 1
            self.latest[entry.step] = entry

    def _read_line(self, number: int, line: bytes) -> None:
        where = f"{self.path}, line {number}"
        body, digest = chain.unseal(line, self.head, where)
        if number == 1:
            self.header = body.get("run", {})
        self._append(digest, _read_entry(body, where) if number > 1 else None)


def _read_entry(body: dict[str, Any], where: str) -> Entry:
    try:
        return Entry(int(body["step"]), int(body["attempt"]), str(body["environment"]), Event.from_json(body["event"]))
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}: a release must have step, attempt, environment and event") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
