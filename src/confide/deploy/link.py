"""What the engine of a deployment knows of a transport: it carries parcels to nodes and back, and says who is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from confide.deploy.metrics import Meter
from confide.deploy.parcels import Parcel
from confide.privacy.trust.roster import Roster

NodeId = int | str
"""A client as the transport knows it: the name of its key; where there are no keys, a number."""


@dataclass(frozen=True)
class Came:
    """A client is connected."""

    node: NodeId


@dataclass(frozen=True)
class Gone:
    """A client is not connected any more."""

    node: NodeId


@dataclass
class Reply:
    """What came back for one question: a parcel, or why there is none."""

    ticket: int
    node: NodeId
    parcel: Parcel | None
    error: str = ""
    code: str = ""
    """The refusal's code, where the client sent one."""
    size: int = 0
    """Bytes of its arrays, which are let go with the next look at `events`."""


Event = Came | Gone | Reply


class Link(Protocol):
    """Carries parcels. `ask` hands over and returns at once; `events` waits for what comes."""

    arrays: int
    """Bytes of arrays that an answer may have."""
    roster: Roster
    """Who signs with which key."""
    meter: Meter
    """What an operator watches."""

    def ask(self, kind: str, parcels: Sequence[tuple[NodeId, Parcel]], seconds: float) -> list[int]:
        """Send questions, whose answers count for so long; a ticket for each."""
        ...

    def events(self, seconds: float) -> Iterable[Event]:
        """Return what has come; if there is nothing, wait at most so long for it."""
        ...

    def drop(self, node: NodeId) -> None:
        """End the connection of a client that another has taken the place of."""
        ...

    def close(self) -> None: ...
