"""Engine of a deployment: asks the clients of a cohort, and closes the round with those who answered.

It knows a `Link` that carries parcels to nodes and back, and nothing of what the link is made of: gRPC's streams in a
deployment, a few objects in a test. Sampling, noise, optimiser, ledger and checkpoints are the loop's, as with any
other engine. Every user of the cohort gets a parcel of its own with the central model, so a node that speaks for
several users (a simulation) trains them one after the other.

Who may speak for whom is the registry's: a node is known to the link by its key, and a client that claims to be
another's user is not in the cohort.

Outages. A round ends when everybody who is connected has answered, if those are enough; otherwise it waits until its
deadline for users who come, or come back, and asks them too. Before a round costs anything, `gather` waits as long for
enough of its users to be there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from confide.deploy.link import Came, Gone, Link, NodeId, Reply
from confide.deploy.parcels import Identity, Parcel
from confide.deploy.refusals import JOIN_FIRST, MODEL, OTHER_RECIPE, VERSION, meaning, to_owner
from confide.deploy.rounds import ACCEPTED, Books, Call, Round
from confide.engines.engine import Abandoned, Traits
from confide.errors import one_line
from confide.federated.bounding import Bounder
from confide.federated.cohort import Tally
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import local_slack

TRAIN, JOIN, SUM = "train", "join", "sum"
_ASKED = 3
"""How often a user is asked in one round, if its client is lost and comes back."""


@dataclass(frozen=True)
class Terms:
    """How a round is held."""

    deadline: float = 600.0
    """Seconds from the announcement to the end of a round."""
    minimum: float = 0.5
    """The share of the cohort that has to answer; with less the round is abandoned."""
    tries: int = 3
    """How often a step is tried before the run stops."""
    join: float = 600.0
    """Seconds to wait for enough clients at the start."""
    greeting: float = 600.0
    """Seconds after which a client that has not said who it is is asked again; it may have data to read first."""

    def needed(self, cohort: int) -> int:
        return math.ceil(self.minimum * cohort)


@dataclass
class Door:
    """Who was let in: the users that each node speaks for, and who was refused, with the reason."""

    identity: Identity
    registry: Mapping[NodeId, Sequence[int]] | None
    """The users of each node, by its key; none where nodes have no keys and say themselves who they are."""
    population: int
    recipe: str = ""
    """What a client is told that has no copy of its own."""
    users: dict[int, NodeId] = field(default_factory=dict)
    """user -> node"""
    refused: dict[NodeId, str] = field(default_factory=dict)
    relays: set[NodeId] = field(default_factory=set)
    """Nodes that add up what their own clients send."""

    def answer(self, node: NodeId, facts: Mapping[str, Any]) -> str | None:
        """Let a node in, or say why not."""
        differs, refuses = self.identity.differs(facts), facts.get("refuses")
        if refuses and (differs is None or refuses not in (VERSION, OTHER_RECIPE, MODEL)):
            reason: str | None = meaning(refuses)
        else:
            reason = differs[1] if differs else self._claims(node, facts.get("users"))
        if reason:
            self.refused[node] = reason
        elif facts.get("relay") is True:
            self.relays.add(node)
        return reason

    def _claims(self, node: NodeId, users: object) -> str | None:
        if not isinstance(users, list) or not users or not all(type(user) is int for user in users):
            return "it does not say for which users it speaks"
        if self.registry is not None and set(users) - set(self.registry.get(node, ())):
            return f"it speaks for users {users}, but its key is registered for {list(self.registry.get(node, ()))}"
        if min(users) < 0 or max(users) >= self.population:
            return f"it speaks for users {users} of a population of {self.population}"
        self.users.update(dict.fromkeys(users, node))
        return None

    def forget(self, node: NodeId) -> None:
        self.users = {user: owner for user, owner in self.users.items() if owner != node}
        self.refused.pop(node, None)
        self.relays.discard(node)


@dataclass(eq=False)
class Remote:
    """The engine. `traits` tell the loop that a round is never the same twice."""

    link: Link
    door: Door
    run: str
    books: Books
    rule: Bounder
    terms: Terms
    plan: Plan
    say: Callable[[str], None] = to_owner
    _unmet: dict[NodeId, tuple[int, float]] = field(default_factory=dict)
    """Nodes that have not said who they are: the ticket of the question, and when it is asked again."""

    @property
    def traits(self) -> Traits:
        return Traits(repeatable=False, noisy=self.noisy, tries=self.terms.tries)

    @property
    def noisy(self) -> bool:
        return self.plan.event.sampler == "local"

    def gather(self, cohort: np.ndarray, step: int) -> None:
        """Wait until enough of a cohort are here. Nothing was asked or paid for when it raises `Abandoned`."""
        users, needed = set(map(int, cohort)), self.least(len(cohort))

        def here() -> int:
            return len(users & self.door.users.keys())

        if not self._come(here, needed, self.terms.deadline, f"step {step + 1}"):
            raise Abandoned(
                f"step {step + 1}: {here()} of {len(users)} users are connected and at least {needed} are needed; "
                "nobody was asked, and nothing was released"
            )

    def wait_for(self, users: int) -> bool:
        """Until so many users are here; whether they came."""
        return self._come(lambda: len(self.door.users), users, self.terms.join, "start")

    def _come(self, here: Callable[[], int], wanted: int, seconds: float, what: str) -> bool:
        ends, said = time.monotonic() + seconds, False
        self.look()
        while here() < wanted:
            if time.monotonic() >= ends:
                return False
            if not said:
                self.say(f"{what}: waiting for clients, {here()} users are connected and {wanted} are needed")
                said = True
            self.look(ends - time.monotonic())
        return True

    def least(self, cohort: int) -> int:
        """How many of a cohort have to answer."""
        return self.terms.needed(cohort)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        books = Books(self.books.layout, self.books.weights, total)
        call = Call.new(self.run, self.door.identity, step)
        asked, rule = dict.fromkeys(map(int, cohort)), self.rule.at(bounds)
        # Clients with noise of their own are held to the bound and what the noise can add.
        slack = local_slack(self.plan, rule.sensitivity, total.numel()) if self.noisy else 0.0
        held = Round(call, asked, books, rule, self.terms.deadline, bounds is not None, slack)
        facts = call.facts() | {"bounds": [] if bounds is None else bounds.tolist()}
        facts["population"] = len(self.books.weights)
        needed = self.terms.needed(len(cohort))
        self.hold(held, facts, {"model": central.detach().numpy()}, needed)
        try:
            return held.close(needed)
        finally:
            self.report(held)

    def report(self, held: Round) -> None:
        """Say what was wrong in a round."""
        if held.counts[ACCEPTED] < len(held.cohort) or held.notes:
            self.say(f"step {held.call.step + 1}: cohort {len(held.cohort)}, {held.summary()}")
            for note in held.notes[:5]:
                self.say(f"  {note}")

    def hold(self, held: Round, facts: dict[str, Any], model: Mapping[str, Any], needed: int) -> None:
        """Ask everybody who is here or comes, until all have answered or the time is over."""
        asked, waiting, joined = Counter[int](), dict[int, tuple[str, Sequence[int]]](), True
        while held.open:
            if joined:  # also those who were lost and have come back
                new = [user for user in held.missing - {u for _, users in waiting.values() for u in users}
                       if user in self.door.users and asked[user] < _ASKED]  # fmt: skip
                asked.update(new)
                for user in new:
                    held.cohort[user] = self.door.users[user]
                waiting |= self._ask_all(held, sorted(new), facts, model)
            if not waiting and (len(held.done) >= needed or held.missing <= self.door.users.keys()):
                return  # those who are connected have said all that they will say
            joined = False
            for event in self._pump(held.ends - time.monotonic()):
                if isinstance(event, Came):
                    joined = True
                elif event.ticket in waiting:
                    kind, _ = waiting.pop(event.ticket)
                    if event.parcel is None:
                        held.miss(event.node, event.error)
                    else:
                        held.take(event.node, event.parcel, kind == SUM)
                        event.parcel = None  # it is in the sum; what follows may need its memory

    def _ask_all(
        self, held: Round, users: list[int], facts: dict[str, Any], model: Mapping[str, Any]
    ) -> dict[int, tuple[str, Sequence[int]]]:
        """Ask each user, or its relay for all of its users at once; the tickets, with kind and users of each."""
        weights, single, relays = held.books.weights, dict[int, Parcel](), dict[NodeId, list[int]]()
        for user in users:
            if (node := self.door.users[user]) in self.door.relays:
                relays.setdefault(node, []).append(user)
            else:
                single[user] = Parcel(facts | {"user": user, "weight": float(weights[user])}, model)
        tickets = self._ask(TRAIN, single, held.ends)
        found: dict[int, tuple[str, Sequence[int]]] = {t: (TRAIN, [user]) for t, user in tickets.items()}
        left = held.ends - time.monotonic()
        for node, some in relays.items():
            own = {"users": some, "weights": [float(weights[user]) for user in some], "seconds": 0.9 * left,
                   "needed": self.terms.needed(len(some))}  # fmt: skip
            found[self.link.ask(SUM, [(node, Parcel(facts | own, model))], left)[0]] = SUM, some
        return found

    def exchange(self, kind: str, parcels: dict[int, Parcel], ends: float) -> Iterator[tuple[int, Parcel]]:
        """Ask users through their nodes, and yield what each answers; who fails or is late is left out."""
        waiting = self._ask(kind, {u: parcel for u, parcel in parcels.items() if u in self.door.users}, ends)
        while waiting and time.monotonic() < ends:
            for event in self._pump(ends - time.monotonic()):
                if isinstance(event, Came) or event.ticket not in waiting:
                    continue
                user = waiting.pop(event.ticket)
                if event.parcel is None:
                    self.say(f"node {event.node}, user {user}: {one_line(event.error, 200)}")
                else:
                    yield user, event.parcel
                    event.parcel = None

    def _ask(self, kind: str, parcels: Mapping[int, Parcel], ends: float) -> dict[int, int]:
        """Ask users through their nodes; the tickets, with the user of each."""
        sent = [(self.door.users[user], parcel) for user, parcel in parcels.items()]
        tickets = self.link.ask(kind, sent, ends - time.monotonic())
        return dict(zip(tickets, parcels, strict=True))

    def look(self, seconds: float = 0.0) -> None:
        """Meet whoever has come, forget whoever has gone; what was answered too late is let go."""
        for _ in self._pump(seconds):
            pass

    def _pump(self, seconds: float) -> Iterator[Came | Reply]:
        """Replies to the questions of a round, and `Came` for each node that was let in."""
        now = time.monotonic()
        for node in [node for node, (_, again) in self._unmet.items() if again <= now]:
            self.greet(node)
        soon = min((again - now for _, again in self._unmet.values()), default=math.inf)
        for event in self.link.events(min(seconds, soon)):
            if isinstance(event, Came):
                self.greet(event.node)
            elif isinstance(event, Gone):
                self.door.forget(event.node)
                self._unmet.pop(event.node, None)
            elif self._unmet.get(event.node, (0, 0))[0] == event.ticket:
                if self._met(event):
                    yield Came(event.node)
            else:
                if event.code == JOIN_FIRST:  # started anew, so quickly that nobody saw it gone
                    self.greet(event.node)
                yield event
            self.link.meter.users, self.link.meter.refused = len(self.door.users), len(self.door.refused)

    @property
    def nodes(self) -> set[NodeId]:
        """Everybody who is connected."""
        return {*self.door.users.values(), *self.door.refused, *self._unmet}

    def greet(self, node: NodeId) -> None:
        facts = {"run": self.run, "told": self.door.recipe, "population": self.door.population}
        question = Parcel(facts | self.door.identity.facts())
        self.door.forget(node)
        (ticket,) = self.link.ask(JOIN, [(node, question)], self.terms.greeting)
        self._unmet[node] = ticket, time.monotonic() + self.terms.greeting

    def _let_in(self, node: NodeId, facts: Mapping[str, Any]) -> str | None:
        try:
            return self.door.answer(node, facts)
        except Exception as error:  # whatever a client says of itself, it is one client that is not let in
            self.door.refused[node] = f"what it says of itself is malformed ({type(error).__name__})"
            return self.door.refused[node]

    def _met(self, reply: Reply) -> bool:
        node = reply.node
        if reply.parcel is None:
            self.say(f"node {node} did not join: {one_line(reply.error, 300)}; it is asked again later")
            return False
        del self._unmet[node]
        before = dict(self.door.users)
        reason = self._let_in(node, reply.parcel.facts)
        if reason:
            self.say(f"node {node} was refused: {one_line(reason, 300)}")
            return False
        own = {user for user, owner in self.door.users.items() if owner == node}
        for other in {before[user] for user in own & before.keys()} - {node}:  # of two without keys the last one counts
            self.link.drop(other)
            self.door.forget(other)
        self.say(f"node {node} joined for users {_listed(sorted(own))}")
        return True

    def close(self) -> None:
        self.link.close()


def _listed(users: list[int]) -> str:
    return ", ".join(map(str, users[:8])) + (f", ... ({len(users)})" if len(users) > 8 else "")
