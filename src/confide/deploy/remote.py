"""Engine of a deployment: asks the clients of a cohort, and closes the round with those who answered.

It knows a `Link` that carries parcels to nodes and back, and nothing of what the link is made of: Flower's grid in a
deployment, a few objects in a test. Sampling, noise, optimiser, ledger and checkpoints are the loop's, as with any
other engine. Every user of the cohort gets a parcel of its own with the central model, so a node that speaks for
several users (a simulation) trains them one after the other.

Who may speak for whom is the `Registry`'s: a node is known to the link by the key that it signs with, and a client
that claims to be another's user is not in the cohort.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from confide.deploy.parcels import Identity, Parcel
from confide.deploy.refusals import MODEL, OTHER_RECIPE, VERSION, meaning
from confide.deploy.rounds import ACCEPTED, Books, Call, Round
from confide.engines.engine import Traits
from confide.errors import UserError
from confide.federated.bounding import Bounder
from confide.federated.cohort import Tally
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import local_slack

TRAIN, JOIN = "train", "join"


@dataclass(frozen=True)
class Reply:
    """What came back for one parcel: another parcel, or why there is none."""

    ticket: str
    node: int
    parcel: Parcel | None
    error: str = ""


class Link(Protocol):
    """Carries parcels. `ask` hands over and returns at once; `replies` says what has come for some tickets."""

    def nodes(self) -> set[int]:
        """Who is connected now."""
        ...

    def ask(self, kind: str, parcels: Sequence[tuple[int, Parcel]], seconds: float) -> list[str | None]:
        """A ticket for each; none where it could not be sent."""
        ...

    def replies(self, tickets: Iterable[str]) -> list[Reply]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Terms:
    """How a round is held."""

    deadline: float = 600.0
    """Seconds from the announcement to the end of a round."""
    minimum: float = 0.5
    """The share of the cohort that has to answer; with less the round is abandoned."""
    tries: int = 3
    """How often a step is tried before the run stops."""
    poll: float = 0.1
    """Seconds between two looks at what has come."""
    join: float = 600.0
    """Seconds to wait for enough clients at the start, and whenever none is there."""
    greeting: float = 30.0
    """Seconds after which a node that has not said who it is is asked again."""

    def needed(self, cohort: int) -> int:
        return math.ceil(self.minimum * cohort)


@dataclass
class Door:
    """Who was let in: the users that each node speaks for, and who was refused, with the reason."""

    identity: Identity
    registry: Mapping[int, Sequence[int]] | None
    """The users of each node, by its key; none where nodes have no keys and say themselves who they are."""
    population: int
    recipe: str = ""
    """What a client is told that has no copy of its own."""
    users: dict[int, int] = field(default_factory=dict)
    """user -> node"""
    refused: dict[int, str] = field(default_factory=dict)

    def answer(self, node: int, facts: Mapping[str, Any]) -> str | None:
        """Let a node in, or say why not."""
        differs, refuses = self.identity.differs(facts), facts.get("refuses")
        if refuses and (differs is None or refuses not in (VERSION, OTHER_RECIPE, MODEL)):
            reason: str | None = meaning(refuses)
        else:
            reason = differs[1] if differs else self._claims(node, facts.get("users"))
        if reason:
            self.refused[node] = reason
        return reason

    def _claims(self, node: int, users: object) -> str | None:
        if not isinstance(users, list) or not users or not all(type(user) is int for user in users):
            return "it does not say for which users it speaks"
        if self.registry is not None and set(users) - set(self.registry.get(node, ())):
            return f"it speaks for users {users}, but its key is registered for {list(self.registry.get(node, ()))}"
        if min(users) < 0 or max(users) >= self.population:
            return f"it speaks for users {users} of a population of {self.population}"
        if self.registry is None and any(self.users.get(user, node) != node for user in users):
            return f"another client already speaks for one of its users {users}"
        self.users.update(dict.fromkeys(users, node))
        return None

    def forget(self, node: int) -> None:
        self.users = {user: owner for user, owner in self.users.items() if owner != node}
        self.refused.pop(node, None)


class Remote:
    """The engine. `traits` tell the loop that a round is never the same twice."""

    def __init__(
        self,
        link: Link,
        door: Door,
        run: str,
        books: Books,
        rule: Bounder,
        terms: Terms,
        plan: Plan,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.link, self.door, self.run, self.books, self.rule, self.terms = link, door, run, books, rule, terms
        self.plan = plan
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.known: set[int] = set()
        self.asked: dict[str, tuple[int, float]] = {}
        """Tickets of nodes that were asked who they are, and until when their answer counts."""

    @property
    def traits(self) -> Traits:
        return Traits(repeatable=False, noisy=self.plan.event.sampler == "local", tries=self.terms.tries)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        books = Books(self.books.layout, self.books.weights, total)
        call = Call.new(self.run, self.door.identity, step)
        owners = self._owners(cohort)
        rule, vote = self.rule.at(bounds), bounds is not None
        held = Round(call, owners, books, rule, self.terms.deadline, vote, self._slack(rule, total))
        facts = call.facts() | {"bounds": [] if bounds is None else bounds.tolist()}
        facts["population"] = len(self.books.weights)
        model = {"model": central.detach().numpy()}
        own = {user: {"user": user, "weight": float(self.books.weights[user])} for user in owners}
        self._hold(held, {u: (node, Parcel(facts | own[u], model)) for u, node in owners.items() if node >= 0})
        tally = held.close(self.terms.needed(len(cohort)))
        if held.counts[ACCEPTED] < len(cohort) or held.notes:
            self.say(f"step {step + 1}: cohort {len(cohort)}, {held.summary()}")
            for note in held.notes[:5]:
                self.say(f"  {note}")
        return tally

    def _slack(self, rule: Bounder, total: Tensor) -> float:
        """Clients with noise of their own are held to the bound and what the noise can add."""
        return local_slack(self.plan, rule.sensitivity, total.numel()) if self.traits.noisy else 0.0

    def _owners(self, cohort: np.ndarray) -> dict[int, int]:
        """The node of each user of the cohort; -1 for a user that nobody speaks for now."""
        self.look()
        if len(cohort) and not any(int(user) in self.door.users for user in cohort):
            self.wait_for(1)
        return {int(user): self.door.users.get(int(user), -1) for user in cohort}

    def _hold(self, held: Round, parcels: dict[int, tuple[int, Parcel]]) -> None:
        for user, reply in self._replies(TRAIN, parcels, held.ends):
            if reply.parcel is None:
                held.miss(parcels[user][0], reply.error)
            else:
                held.take(reply.node, reply.parcel)

    def exchange(self, kind: str, parcels: dict[int, tuple[int, Parcel]], ends: float) -> Iterator[tuple[int, Parcel]]:
        """Ask users through their nodes, and yield what each answers; who fails or is late is left out."""
        for user, reply in self._replies(kind, parcels, ends):
            if reply.parcel is None:
                self.say(f"node {parcels[user][0]}, user {user}: {reply.error[:200]}")
            elif reply.node == parcels[user][0]:
                yield user, reply.parcel

    def _replies(self, kind: str, parcels: dict[int, tuple[int, Parcel]], ends: float) -> Iterator[tuple[int, Reply]]:
        sent = self.link.ask(kind, list(parcels.values()), max(ends - time.monotonic(), 1.0))
        waiting = {ticket: user for ticket, user in zip(sent, parcels, strict=True) if ticket is not None}
        while waiting and time.monotonic() < ends:
            replies = self.link.replies(list(waiting))
            for reply in replies:
                user = waiting.pop(reply.ticket)
                if reply.parcel is None:  # it may have been started anew, and is asked again who it is
                    self.known.discard(parcels[user][0])
                yield user, reply
            if waiting and not replies:
                time.sleep(self.terms.poll)

    def look(self) -> None:
        """Meet whoever has come, forget whoever has gone. Never waits: a node that is silent holds up nobody."""
        here = self.link.nodes()
        for node in self.known - here:
            self.door.forget(node)
        self.known &= here
        now = time.monotonic()
        self.asked = {ticket: (node, ends) for ticket, (node, ends) in self.asked.items() if ends > now}
        new = sorted(here - self.known - {node for node, _ in self.asked.values()})
        facts = {"run": self.run, "told": self.door.recipe, "population": self.door.population}
        question = Parcel(facts | self.door.identity.facts())
        sent = self.link.ask(JOIN, [(node, question) for node in new], self.terms.greeting)
        for ticket, node in zip(sent, new, strict=True):
            if ticket is not None:
                self.asked[ticket] = (node, now + self.terms.greeting)
        while self.asked:
            replies = self.link.replies(list(self.asked))
            for reply in replies:
                self._met(self.asked.pop(reply.ticket)[0], reply)
            if not replies:
                return

    def _met(self, node: int, reply: Reply) -> None:
        if reply.parcel is None:
            self.say(f"node {node} did not join: {reply.error[:300]}")
            return  # it is asked again: a client that is starting may answer later
        self.known.add(node)
        reason = self.door.answer(node, reply.parcel.facts)
        if reason:
            self.say(f"node {node} was refused: {str(reason)[:300]}")
        else:
            self.say(f"node {node} joined for users {_listed([u for u, n in self.door.users.items() if n == node])}")

    def wait_for(self, users: int) -> None:
        """Until so many users are here."""
        ends, said = time.monotonic() + self.terms.join, False
        while True:
            self.look()
            if len(self.door.users) >= users:
                return
            if not said:
                self.say(f"waiting for clients: {len(self.door.users)} users here, {users} wanted")
                said = True
            if time.monotonic() > ends:
                refused = "".join(f"; node {n} was refused: {r}" for n, r in self.door.refused.items())
                raise UserError(
                    f"{len(self.door.users)} users are here after {self.terms.join:g} s, {users} are wanted{refused}. "
                    "Start more clients with `confide deploy client`, then this command again"
                )
            time.sleep(self.terms.poll)

    def close(self) -> None:
        self.link.close()


def _listed(users: list[int]) -> str:
    return ", ".join(map(str, users[:8])) + (f", ... ({len(users)})" if len(users) > 8 else "")
