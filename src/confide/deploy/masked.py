"""The engine for distributed trust: rounds of secure aggregation, of which the server sees the noisy sum alone.

The clients' noise is in what they send, so the loop writes the ledger's line before a round begins, for every attempt.
A round is abandoned, unopened, when fewer than the threshold are left at any of its exchanges (see `secure`).

Culprits. Who sends what no honest client sends is excluded: it is not asked again until the server is started anew.
That somebody's shares are damaged is the word of one client against another's, and neither can prove it: to show a
share to the server would be to give it away. So words are counted, under the assumption that secrecy needs too: fewer
than a third are hostile. Whoever is accused by a third of its neighbours or more has dealt damaged shares, and whoever
accuses a third of a cohort or more lies. With fewer words both sides are named, and nobody is excluded.

What is left to one hostile client: it is silent, as one whose connection was lost is. Or it damages fewer shares than a
third, and is named with those who say so; the round is lost if so many others drop out that just these shares are
wanted, and so is the next. Whoever runs the server then has to choose whom to revoke. False words cost a round no more
than silence would.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from confide.deploy.parcels import Parcel
from confide.deploy.remote import Remote
from confide.deploy.rounds import Call
from confide.engines.engine import Abandoned
from confide.federated.bounding import ROUNDING
from confide.federated.cohort import Tally
from confide.federated.parameters import norm
from confide.privacy.gaussian import Address, System, grid
from confide.privacy.mechanisms.distributed import top_up
from confide.privacy.trust.neighbours import neighbourhood, quorum
from confide.privacy.trust.opening import Deal, Opening, Unopened
from confide.privacy.trust.own_noise import share_scale
from confide.privacy.trust.secure import (
    CONFIRM,
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    context,
    keys_message,
    list_message,
    longest,
    ring_for,
    threshold,
)

_ENDS = {KEYS: 0.12, SHARES: 0.25, MASKED: 0.8, CONFIRM: 0.9, UNMASK: 1.0}
"""When an exchange ends, as a share of the deadline: whoever is silent in one leaves time for the next."""


@dataclass(eq=False)
class Masked(Remote):
    """As `Remote`, but nobody's update is ever in sight."""

    added: Callable[[float, int, int], float] = top_up
    """The deviation of the server's own noise; an audit that breaks it on purpose puts another here."""
    excluded: dict[int, str] = field(default_factory=dict)
    """Users who did not follow the protocol, and how. They count as missing until the server is started again."""
    noisy = True

    def least(self, cohort: int) -> int:
        return threshold(cohort, self.terms.needed(cohort)) if cohort else 0

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        if len(cohort) == 0:  # a release of noise alone
            self._top_up(total.zero_(), share_scale(self.plan, self.rule.sensitivity, 1), 1, 0)
            return Tally()
        self.look()
        held = _Held(self, central, list(map(int, cohort)), step, self.least(len(cohort)))
        deals, edges = held.deals(held.keys())
        scale, weight = share_scale(self.plan, self.rule.sensitivity, held.least), float(self.books.weights.max())
        ring = ring_for(self.rule.sensitivity, weight, scale, len(held.present), total.numel(), ROUNDING)
        opening = Opening(ring, held.call.nonce, step, deals, edges)
        held.sum_up(opening)
        held.unmask(opening)
        arrived = len(opening.arrived)
        self._open(opening, held, total, longest(ring, self.rule.sensitivity, weight, scale, arrived))
        self._top_up(total, scale, held.least, arrived)
        if arrived < len(cohort):
            self.say(f"step {step + 1}: cohort {len(cohort)}, {arrived} in the sum, noise made for {held.least}")
        return Tally(users=arrived)

    def accuse(self, user: int, what: str, exclude: bool = True) -> None:
        """Name who did not follow the protocol; whoever does so on purpose is not asked again."""
        node = self.door.users.get(user, "that is gone")
        self.say(f"user {user}, node {node}: {what}" + ("; it is not asked any more" if exclude else ""))
        if exclude:
            self.excluded[user] = what

    def _top_up(self, total: Tensor, scale: float, least: int, arrived: int) -> None:
        """Add the server's own noise. It is never drawn again, whatever the recipe says: no round can be repeated.

        Rounding must not tell how many answered either: every release is on the grid of the stated deviation.
        """
        stated = scale * math.sqrt(least)
        deviation = self.added(scale, least, arrived)
        if deviation > 0:  # always, but in an audit of what happens without
            System(lattice=grid(stated)).add(total, deviation, Address(0))

    def _open(self, opening: Opening, held: _Held, total: Tensor, limit: float) -> None:
        try:
            found = opening.open(held.quorum)
        except Unopened as error:
            for user, what in error.culprits.items():
                self.accuse(user, what)
            raise Abandoned(f"step {held.step + 1}: {error}; nothing was released") from None
        length = norm(found)
        if not length <= limit:
            total.zero_()
            raise Abandoned(
                f"step {held.step + 1}: the sum is longer ({length:.4g}) than honest clients can make it "
                f"({limit:.4g}); it was thrown away"
            )
        total.copy_(found)


class _Held:
    """The exchanges of one round. Whoever is silent, refuses or sends what cannot be is left out from then on."""

    def __init__(self, engine: Masked, central: Tensor, cohort: list[int], step: int, least: int) -> None:
        self.engine, self.central, self.cohort, self.step, self.least = engine, central, cohort, step, least
        self.call, self.began = Call.new(engine.run, engine.door.identity, step), time.monotonic()
        here = engine.door.users.keys() - engine.excluded.keys()
        self.present = sorted(user for user in cohort if user in here)
        self.roster, self.quorum = engine.link.roster, quorum(neighbourhood(len(self.present)))
        size = neighbourhood(len(cohort))
        self.few = max(1, size - quorum(size)), max(1, len(cohort) - quorum(len(cohort)))
        """As many neighbours of an honest client may be hostile, and as many of a cohort: fewer than a third."""
        self.context = context(self.call.nonce, step, self.present, least)
        self.public: dict[int, list[bytes]] = {}

    def keys(self) -> dict[int, set[int]]:
        """Have keys made. Returns whom each user drew as its neighbours."""
        told = {"cohort": self.present, "least": self.least}
        picks = dict[int, set[int]]()
        for user, parcel in self._exchange(KEYS, dict.fromkeys(self.present, told)):
            public, drawn = parcel.facts.get("public", []), parcel.facts.get("picks", [])
            if not _keys(public) or not _drawn(drawn, user, self.present):
                self.engine.accuse(user, "its keys or neighbours are malformed")
            elif not self.roster.verify(user, public[2], keys_message(self.context, user, *public[:2])):
                self.engine.accuse(user, "its keys are not signed by it", exclude=False)
            else:
                self.public[user], picks[user] = public, set(drawn)
        return picks

    def deals(self, picks: dict[int, set[int]]) -> tuple[dict[int, Deal], dict[int, set[int]]]:
        """Have shares dealt. Returns them, and the neighbours of each user who dealt."""
        edges = {user: (drawn & picks.keys()) - {user} for user, drawn in picks.items()}
        for user, drawn in list(edges.items()):
            for other in drawn:
                edges[other].add(user)
        told = {u: {"peers": [[v, *self.public[v]] for v in sorted(edges[u])]} for u in edges}
        deals = dict[int, Deal]()
        for user, parcel in self._exchange(SHARES, told):
            deal = Deal.read(user, self.public[user][0], picks[user] & picks.keys(), parcel.facts)
            if deal is None:
                self.engine.accuse(user, "its shares are malformed")
            else:
                deals[user] = deal
        return deals, {user: edges[user] & deals.keys() for user in deals}

    def sum_up(self, opening: Opening) -> None:
        """Have the users train, and add up what they send."""
        deals, told = opening.deals, dict[int, dict[str, Any]]()
        for user, peers in opening.edges.items():
            boxes = [[v, *deals[v].for_holder(user)] for v in sorted(peers) if user in deals[v].holders]
            told[user] = {"dealt": sorted(peers), "boxes": boxes}
        model = {"model": self.central.detach().numpy()}
        for user, parcel in self._exchange(MASKED, told, model):
            if not opening.take(user, parcel.arrays.get("masked"), parcel.facts.get("damaged")):
                self.engine.accuse(user, "its masked update is malformed")
        self._judge(deals)

    def _judge(self, deals: dict[int, Deal]) -> None:
        """Say who calls whose shares damaged, and exclude whom more say so of, or who says so of more, than can lie."""
        neighbours, members = self.few
        accused = Counter(user for deal in deals.values() for user in deal.damaged)
        liars = {user for user, count in accused.items() if count > members}
        for user in sorted(liars):
            self.engine.accuse(user, f"it says that the shares of {accused[user]} users are damaged")
        for user, deal in deals.items():
            if accusers := sorted(deal.damaged - liars):
                said = f"users {accusers[:8]} say that its shares are damaged"
                self.engine.accuse(user, said, exclude=len(accusers) > neighbours)

    def unmask(self, opening: Opening) -> None:
        """Have the list of those who arrived signed, and then shares of their secrets given."""
        arrived, signatures = sorted(opening.arrived), dict[int, Any]()
        message = list_message(self.context, arrived)
        for user, parcel in self._exchange(CONFIRM, {user: {"arrived": arrived} for user in arrived}):
            signature = parcel.facts.get("signature")
            if self.roster.verify(user, signature, message):
                signatures[user] = signature
            else:
                self.engine.accuse(user, "it has not signed the list of those who arrived")
        signed = signatures.keys()
        told = {
            u: {"signatures": [[v, signatures[v]] for v in sorted(opening.deals[u].holders) if v in signed]}
            for u in signed
        }
        for user, parcel in self._exchange(UNMASK, told):
            if not opening.take_shares(user, parcel.facts.get("of"), parcel.facts.get("shares")):
                self.engine.accuse(user, "the shares that it gives are not those that were dealt to it")

    def _exchange(
        self, kind: str, own: Mapping[int, dict[str, Any]], arrays: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[tuple[int, Parcel]]:
        """Ask each user its own, with what all are told, and yield what comes in time."""
        if len(own) < self.least:
            raise Abandoned(
                f"step {self.step + 1}: {len(own)} of {len(self.cohort)} users are left at {kind!r} and {self.least} "
                "are needed; nothing was opened"
            )
        facts = self.call.facts() | {"population": len(self.engine.books.weights)}
        parcels = {u: Parcel(facts | {"user": u} | own[u], arrays) for u in sorted(own)}
        ends = self.began + _ENDS[kind] * self.engine.terms.deadline
        for user, parcel in self.engine.exchange(kind, parcels, ends):
            if parcel.facts.get("nonce") == self.call.nonce and parcel.facts.get("user") == user:
                yield user, parcel


def _keys(value: Any) -> bool:
    """Whether these are two keys that others can agree with, and a signature."""
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, bytes) for v in value):
        return False
    try:
        for key in value[:2]:
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def _drawn(value: Any, user: int, users: list[int]) -> bool:
    if not isinstance(value, list) or len(value) != neighbourhood(len(users)) or any(type(u) is not int for u in value):
        return False
    return value == sorted(set(value)) and user in value and set(value) <= set(users)
