"""Against whom a ledger's epsilon holds: whoever sees the models, the server, clients, and both together.

Every adversary gets an epsilon of its own, or the reason why none is stated. By the definition of differential privacy
each of them may know the data of everybody but one user. What sets them apart is whether sampling hides that user from
them, how much of the noise they know, and which two data sets they cannot tell apart: each has an adjacency of its own.
They follow the protocol, and nothing here depends on who took part.

* **Central trust.** The server adds the noise, so nothing is stated against it. Clients see the models, as everybody
  may, and know of themselves whether they took part. With Poisson cohorts that says nothing about others, whose coins
  are independent, and where everybody takes part or the schedule is public there is nothing to know: any number of them
  faces the same epsilon. (Cohorts with a largest size differ from Poisson cohorts so seldom that the share of delta for
  it covers what clients know of their own part too.) In a cohort of fixed size, c clients that are not in it leave its
  places to K - c users, so against them the rate is S / (K - c).
* **Distributed trust.** See `confide.privacy.trust.server_view`.
* **Local trust.** A message is protected by itself, and everything that anybody sees is made from messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from confide.privacy import accountant
from confide.privacy.accountant import Accountant
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.trust.neighbours import quorum
from confide.privacy.trust.server_view import THRESHOLD, half, left_of_clients, left_of_server, server_view
from confide.settings import Section

COLLUDING = (1, 2, 5, 10)
"""Numbers of colluding clients that an epsilon is stated for, where it depends on the number."""
_NOT_HIDDEN = ("poisson", "everyone", "cyclic", "cyclic_poisson")
"""Samplers of which a client learns nothing about others from its own part."""
Who = Literal["models", "server", "clients", "server and clients"]


class Adversary(Section):
    """Somebody whom a guarantee holds against, or of whom nothing is stated."""

    who: Who = Field(description="who it is")
    colluding: int | None = Field(
        None, description="for clients: how many clients of every round work together; none: any number"
    )
    epsilon: float | None = Field(description="an upper bound on epsilon at the stated delta; none: nothing is stated")
    adjacency: str = Field(description="which two data sets are neighbours for this adversary")
    epsilon_replaced: float | None = Field(
        None, description="epsilon for any two data sets of a user, none of them empty; none: not stated"
    )
    because: str = Field(description="why that is so, or why nothing is stated")

    @property
    def said(self) -> str:
        """Who it is, in words."""
        if self.who == "models":
            return "whoever sees the models"
        if self.who == "server":
            return "the server"
        number = "any number of" if self.colluding is None else str(self.colluding)
        clients = "a client of every round" if self.colluding == 1 else f"{number} colluding clients of every round"
        return f"the server with {clients}" if self.who == "server and clients" else clients


def adversaries(book: Ledger, spent: float, delta: float | None, kind: Accountant) -> list[Adversary]:
    """List every adversary of a ledger that spends epsilon `spent` at this delta."""
    events = book.charged()
    adjacency = str(book.header.get("adjacency") or (events[0].adjacency if events else "none"))
    if delta is None or not math.isfinite(spent):
        why = "there is no guarantee"
        return [
            Adversary(who=who, epsilon=None, adjacency=adjacency, because=why)
            for who in ("models", "server", "clients")
        ]
    if any(event.sampler == "local" for event in events):
        return list(_local(spent, adjacency))
    if book.header.get("trust") == "distributed":
        return list(_distributed(book, spent, adjacency, delta, kind))
    return list(_central(events, spent, adjacency, delta, kind))


def _local(spent: float, adjacency: str) -> Iterator[Adversary]:
    why = "every message carries noise of its own, and everything else is made from messages; sampling hides nobody"
    for who in ("server", "models", "clients", "server and clients"):
        yield Adversary(who=who, epsilon=spent, adjacency=adjacency, epsilon_replaced=spent, because=why)


def _central(
    events: Sequence[Event], spent: float, adjacency: str, delta: float, kind: Accountant
) -> Iterator[Adversary]:
    def stated(who: Who, epsilon: float | None, because: str, colluding: int | None = None) -> Adversary:
        return Adversary(
            who=who, colluding=colluding, epsilon=epsilon, adjacency=adjacency, because=because,
            epsilon_replaced=epsilon if sampler == "fixed" else None,
        )  # fmt: skip

    sampler = events[0].sampler if events else "everyone"
    hidden = sampler in ("poisson", "fixed", "cyclic_poisson")
    secret = "who took part stays secret, and the noise is unknown" if hidden else "the noise is unknown"
    yield stated("models", spent, f"every model of the run may be seen; {secret}")
    if sampler in _NOT_HIDDEN:
        yield stated("clients", spent, "they see the models, and from their own part they learn nothing about others")
    elif sampler == "fixed":
        why = "who is not in a cohort of fixed size knows that others are a little more likely to be in it"
        for count in _numbers(events):
            others = [_without(event, count) for event in events]
            yield stated("clients", _finite(accountant.epsilon(others, delta, kind)), why, count)
    else:
        why = f"there is no proof yet for what clients learn about others from {sampler} cohorts"
        yield stated("clients", None, why)
    why = "it is trusted: it sees the sum over the cohort before it adds the noise, and knows who is in it"
    yield stated("server", None, why)
    yield stated("server and clients", None, "the server alone is trusted already")


def _without(event: Event, count: int) -> Event:
    """One release, for so many clients that know their own part: the places of the cohort are shared by the others."""
    left = event.population - count
    if event.cohort >= left:  # then everybody else is in it
        return replace(event, sampler="local", rate=1.0)
    return replace(event, population=left, rate=event.cohort / left)


def _distributed(book: Ledger, spent: float, adjacency: str, delta: float, kind: Accountant) -> Iterator[Adversary]:
    fixed = any(event.sampler == "fixed" for event in book.charged())
    yield Adversary(
        who="models", epsilon=spent, adjacency=adjacency, epsilon_replaced=spent if fixed else None,
        because="every model of the run may be seen; who took part stays secret",
    )  # fmt: skip

    def stated(who: Who, left: float, because: str, colluding: int | None = None) -> Adversary:
        zero, replaced = (_finite(server_view(book.entries, delta, kind, left, any_).epsilon) for any_ in (False, True))
        return Adversary(
            who=who, colluding=colluding, epsilon=zero, epsilon_replaced=replaced, because=because,
            adjacency=f"{'replace one user' if fixed else 'one user sends zero'}, in the same rounds",
        )  # fmt: skip

    least = quorum if book.header.get("threshold") == THRESHOLD else half

    most = server_view(book.entries, delta, kind).releases
    known = (
        f"sampling hides nobody from those who know who is in a round; a user is in at most {most} of {book.count} "
        "releases, but for a part of delta"
    )
    yield stated("server", 1.0, f"it sees masked sums alone; {known}")
    numbers = _numbers(book.charged())
    for count in numbers:
        why = "they know their own shares of the noise, and who is in a round"
        yield stated("clients", left_of_clients(count, least), why, count)
    for count in numbers:
        why = f"they know what the server added, {count} of the shares, and who is in a round"
        yield stated("server and clients", left_of_server(count), why, count)


def _numbers(events: Sequence[Event]) -> list[int]:
    users = min((event.population for event in events), default=0)
    return [count for count in COLLUDING if count < users]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
