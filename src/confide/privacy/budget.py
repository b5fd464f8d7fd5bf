"""The budget of people over several runs and models: one file that every run over them charges before each release.

A run's ledger says what the run has spent. Whoever is in several runs has spent all of it together, so the budget of a
population is a file of its own: an append-only chain of lines as a ledger's (`confide.privacy.chain`), whose first line
fixes (epsilon, delta) for good. A privacy filter (`confide.privacy.renyi_filter`) refuses the release that would pass
it. A deployed client keeps the budget of its own life with the same code, over all servers and recipes.

What it promises. Its (epsilon, delta) over all runs together, however these are chosen, against whoever sees the
models: the releases are charged as the runs' own ledgers state them. (A deployed client with local or distributed trust
charges what its answers cost against the server.) Two neighbours differ in one user, whose data are there in one and
empty in the other, in all runs alike; the number of users is the same. Runs of different adjacencies can be added up:

    poisson, everyone              a user that is not there adds nothing to any sum, as one with empty data;
    cyclic, cyclic_poisson         the same, beside a public schedule or public groups;
    fixed, local                   a user's data are replaced by any other, also by empty ones: charged for more.

For two data sets of a user of which none is empty, a budget promises twice its epsilon at (1 + e^epsilon) times its
delta, by way of the empty one: P(S) <= e^epsilon (e^epsilon P'(S) + delta) + delta.

Never too little. Under a lock on the file the new lines of others are read, the filter is asked, and the line is on
disk before the run's own ledger gets its line, and before the release. A kill in between leaves a charge without a
release. Charging step by step needs no settlement: a run that ends early has charged what it made. Two runs at once
wait for each other at the lock, and each sees what the other has charged.

Never twice for the same bits. A step that is made again after a stop and gives the same value bit for bit has the same
key (run, step, attempt, environment) and is one charge. Noise that cannot be drawn again has no such key: every try is
charged. Correlated noise is one release for the whole run, charged once for each attempt.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from confide.errors import UserError
from confide.privacy import chain
from confide.privacy.accountant import Accountant, epsilon
from confide.privacy.events import Event
from confide.privacy.renyi_filter import RenyiFilter

FILE = "budget.jsonl"
NEIGHBOURS = "a user's data are there or are empty, in all runs alike; the number of users is the same"
"""The adjacency of every budget."""


class BudgetSpent(UserError):
    """The release would pass the budget; it was not made."""


class RunSpent(UserError):
    """A run has made all the releases that it may make."""


@dataclass(frozen=True)
class Charge:
    """A line: releases of one run that cost the same."""

    run: str
    what: str
    """What people call the run: its recipe, or its server's."""
    key: str
    event: Event
    count: int
    claimed: bool
    """Whether a server claims that it is so, and nothing here enforces it."""


@dataclass
class Budget:
    """What some people have spent, over all runs with their data.

    Examples:
        >>> from pathlib import Path
        >>> from confide.privacy.budget import Budget
        >>> from confide.privacy.events import Event
        >>> people = Budget.create(Path("budget.jsonl"), epsilon=2.0, delta=1e-5, population="the clinic's patients")
        >>> people.charge("first run", Event("everyone", 1.0, 10, 10, noise_multiplier=5.0, sensitivity=1.0))
        >>> Budget.read(Path("budget.jsonl")).filter.taken
        1
    """

    path: Path
    header: dict[str, Any]
    filter: RenyiFilter
    charges: list[Charge] = field(default_factory=list)
    keys: set[tuple[str, str]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """How many releases each run was charged for."""
    populations: set[int] = field(default_factory=set)
    """How many users the runs had: one number, where the budget is of a population."""
    head: str = chain.GENESIS
    size: int = 0
    """Bytes of the file that have been read."""

    @staticmethod
    def create(path: Path, epsilon: float, delta: float, population: str, shared: bool = True) -> Budget:
        """Begin a budget; `shared` says that it is of a population, whose number of users must stay the same."""
        if not (epsilon > 0 and 0 < delta < 1):
            raise UserError(f"epsilon={epsilon:g}, delta={delta:g}: expected epsilon above 0 and delta between 0 and 1")
        header = {
            "id": secrets.token_hex(8), "epsilon": epsilon, "delta": delta, "population": population, "shared": shared,
        }  # fmt: skip
        line, _ = chain.seal({"budget": header}, chain.GENESIS)
        whole = path.with_name(f"{path.name}.{header['id']}.tmp")
        try:
            chain.append(whole, line)
            os.link(whole, path)  # there at once and whole, and never in place of another
        except FileExistsError:
            raise UserError(f"{path} exists; a budget is never overwritten. Name another file") from None
        except OSError as error:
            raise UserError(f"cannot write the budget {path} ({error.strerror})") from error
        finally:
            whole.unlink(missing_ok=True)
        return Budget.read(path)

    @staticmethod
    def read(path: Path) -> Budget:
        """Read and check every line."""
        made = Budget(path, {}, RenyiFilter(0.0, 0.5))
        with made._locked() as file:
            made._catch_up(file)
        return made

    def charge(
        self,
        run: str,
        event: Event,
        key: str = "",
        what: str = "",
        count: int = 1,
        claimed: bool = False,
        most: int | None = None,
    ) -> None:
        """Have the cost of a release on disk, or refuse it. A key that was charged before is not charged again.

        `most`: how many releases this run may have, by whatever process.
        """
        key = key or secrets.token_hex(8)
        with self._locked() as file:
            chain.drop_torn_end(file)
            self._catch_up(file)
            if (run, key) in self.keys:
                return
            if most is not None and self.counts[run] + count > most:
                raise RunSpent(f"{self.counts[run]} releases were made, and the run has {most}")
            self._check(event, count)
            body = {"run": run, "what": what, "key": key, "event": event.to_json(), "count": count, "claimed": claimed}
            line, digest = chain.seal(body, self.head)
            chain.append_to(file, line)
            self.size += len(line) + 1
            self._add(body, digest, "")

    def check_population(self, users: int) -> None:
        """Refuse a run over other people, as far as their number tells."""
        others = self.populations - {users} if self.header["shared"] else set[int]()
        if others:
            raise UserError(
                f"{self.path} is the budget of {others.pop()} users ({self.header['population']}) and the run has "
                f"{users}; a budget belongs to one population. Begin another with `confide budget --init`"
            )

    def summary(self) -> dict[str, Any]:
        """How far it is: the share that is used, the loss so far, and epsilon had all runs been planned beforehand."""
        events = [event for charge in self.charges for event in [charge.event] * charge.count]
        planned = composed(events, float(self.header["delta"]))
        return {"used": self.filter.used, "loss": self.filter.loss, "planned": planned, "releases": len(events)}

    def _check(self, event: Event, count: int) -> None:
        if self.header["shared"]:
            self.check_population(event.population)
        if not self.filter.takes(event, count):
            raise BudgetSpent(
                f"{self.path} ({self.header['population']}): the release would pass epsilon {self.header['epsilon']:g} "
                f"at delta {self.header['delta']:g}; {percent(self.filter.used)} of that is used, by "
                f"{self.filter.taken} releases. It was not made"
            )

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        try:
            file = self.path.open("r+b")
        except FileNotFoundError:
            raise UserError(
                f"{self.path} does not exist; begin a budget with `confide budget --init {self.path} --epsilon 8 "
                "--delta 1e-5 --population NAME`"
            ) from None
        except OSError as error:
            raise UserError(f"the budget {self.path} cannot be opened to read and write: {error.strerror}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by a kill
            yield file

    def _catch_up(self, file: BinaryIO) -> None:
        """Read the lines that are new, also those of other processes; a torn last one stands for nothing."""
        file.seek(0, 2)
        if file.tell() < self.size:
            raise UserError(f"{self.path} has become shorter; lines are missing at its end. {chain.VOID}")
        file.seek(self.size)
        new = file.read()
        for line in new.split(b"\n")[:-1]:
            where = f"{self.path}, line {len(self.charges) + 2 if self.header else 1}"
            body, digest = chain.unseal(line, self.head, where)
            self._add(body, digest, where)
            self.size += len(line) + 1
        if not self.header:
            raise UserError(f"{self.path} has no complete line; the first should describe the budget")

    def _add(self, body: dict[str, Any], digest: str, where: str) -> None:
        self.head = digest
        try:
            if not self.header:
                self.header = dict(body["budget"])
                self.filter = RenyiFilter(float(self.header["epsilon"]), float(self.header["delta"]))
                _ = self.header["population"], self.header["shared"], self.header["id"]
                return
            event = Event.from_json(body["event"])
            charge = Charge(
                str(body["run"]), str(body["what"]), str(body["key"]), event, int(body["count"]), bool(body["claimed"])
            )
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{where}: not a line of a budget") from None
        self.charges.append(charge)
        self.keys.add((charge.run, charge.key))
        self.counts[charge.run] += charge.count
        self.populations.add(event.population)
        self.filter.take(event, charge.count)


def percent(share: float) -> str:
    """A share that is used, rounded up."""
    return f"{min(100.0, math.ceil(1000 * min(share, 1.0)) / 10):g} %"


def composed(events: list[Event], delta: float) -> float:
    """Epsilon of releases that were all planned beforehand, for a user whose data are there or are empty.

    Of one adjacency: by PLD where it has a proof, else by RDP. Of several: by basic composition, with delta shared out
    among them.
    """
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault(event.adjacency, []).append(event)
    total = 0.0
    for group in groups.values():
        kind: Accountant = "rdp" if any(event.sampler == "fixed" for event in group) else "pld"
        total += epsilon(group, delta / len(groups), kind)
    return total


def by_run(budget: Budget) -> list[dict[str, Any]]:
    """What each run was charged, in the order of its first release; epsilons are of the run alone."""
    delta, found = float(budget.header["delta"]), []
    for run in dict.fromkeys(charge.run for charge in budget.charges):
        own = [charge for charge in budget.charges if charge.run == run]
        counts = Counter[Event]()
        for charge in own:
            counts[charge.event] += charge.count
        events = list(counts.elements())
        found.append({
            "run": run, "what": own[0].what, "releases": len(events), "epsilon": composed(events, delta),
            "claimed": any(charge.claimed for charge in own),
        })  # fmt: skip
    return found
