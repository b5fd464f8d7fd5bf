"""What anybody saw of a run, written down apart from it, and what the ledgers owe for that.

`attend` stands in a client's or a relay's own process: it notes every model that arrives before it is looked at, and
every answer before it is sent. A note may so be of an answer that a SIGKILL kept back, but none that was sent is
missing. `under_counts` holds the ledgers against the notes; `forget` makes a run that it has to find.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from confide.deploy import node
from confide.deploy.parcels import Parcel
from confide.deploy.remote import JOIN, TRAIN
from confide.deploy.wire import Incoming
from confide.privacy import ledger
from confide.privacy.budget import Budget
from confide.privacy.ledger import Ledger
from confide.privacy.trust.own_noise import OwnNoise
from confide.privacy.trust.secure import MASKED

_COSTS = {"central": (), "local": (TRAIN,), "distributed": (MASKED,)}
"""Answers that are releases: what the server sees of them is the client's to account for."""


def attend(path: Path) -> None:
    """Note from now on what this process's client is sent, and what it answers."""
    honest = node.reply_to

    def noted(asked: Incoming, answerer: node.Answerer, say: node.Say) -> tuple[str, Parcel]:
        kind, facts, model = asked.kind, asked.facts, asked.arrays.get("model")
        if model is not None and facts["step"] > 0:
            _note(path, model=sha256(model.tobytes()).hexdigest())
        code, parcel = honest(asked, answerer, say)
        if not code and kind != JOIN:
            _note(path, answered=kind, run=facts["run"], nonce=facts["nonce"])
        return code, parcel

    node.reply_to = noted


def _note(path: Path, **what: str) -> None:
    with path.open("ab", 0) as file:  # one write: a kill leaves the line, or nothing of it
        file.write(json.dumps(what).encode() + b"\n")


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def under_counts(place: Path, run: Path, trust: str) -> list[str]:
    """What the ledgers of a run have too little, right now. Notes are in `place/seen-NAME`, and are read first."""
    seen = {path.name.removeprefix("seen-"): list(_notes(path)) for path in place.glob("seen-*")}
    notes = [note for some in seen.values() for note in some]
    models = {note["model"] for note in notes if "model" in note}
    rounds = {note["nonce"] for note in notes if note.get("answered") in _COSTS[trust]}
    lines = _releases(run)
    found = [f"{len(models)} models seen, {lines} lines"] if len(models) > lines else []
    found += [f"{len(rounds)} rounds answered, {lines} lines"] if len(rounds) > lines else []
    for name, some in seen.items():
        given = [note for note in some if "answered" in note]
        owed = len({note["run"] for note in given})  # with central trust a client pays for each start of a run
        if trust != "central":
            owed = sum(note["answered"] in _COSTS[trust] for note in given)
        state = place / name.replace("client", "state") / "budget.jsonl"
        paid = len(Budget.read(state).charges) if state.exists() else 0
        if paid < owed and name.startswith("client"):  # a relay owes nothing: it has no data
            found.append(f"{name} answered {owed} times, and its budget has {paid} lines")
    return found


def _releases(run: Path) -> int:
    """Complete lines of the server's ledger, without the one that describes the run."""
    path = run / ledger.FILE
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def forget(share: int = 5) -> None:
    """Set a fire: this process leaves out the line of one in `share` of its steps, as a server or as a client."""
    record, charge = Ledger.record, OwnNoise.charge

    def recorded(self: Ledger, step: int, *given: Any, **named: Any) -> int:
        path, self.path = self.path, self.path if step % share else None
        try:
            return record(self, step, *given, **named)
        finally:
            self.path = path

    def charged(self: OwnNoise, user: int, step: int) -> int:
        return charge(self, user, step) if step % share else 0

    Ledger.record, OwnNoise.charge = recorded, charged  # type: ignore[method-assign]


def hooks(place: Path, burning: str = "") -> Any:
    """What `Loopback` does first in a process, by its name: notes in clients and relays, and a fire in one of them."""

    def first(name: str) -> list[Any]:
        made: list[Any] = [] if name == "server" else [partial(attend, place / f"seen-{name}")]
        return made + ([forget] if burning and name.startswith(burning) else [])

    return first
