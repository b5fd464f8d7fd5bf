"""A deployment without a network: real clients in this process, and ways to misbehave."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from confide.build import make_loop
from confide.deploy.client import TrainingClient
from confide.deploy.deployment import remote_engine
from confide.deploy.link import Came, Event, NodeId, Reply
from confide.deploy.metrics import Meter
from confide.deploy.parcels import Parcel
from confide.deploy.policy import Policy, accepting
from confide.deploy.refusals import code_of, meaning
from confide.deploy.remote import JOIN, Remote, Terms
from confide.errors import UserError
from confide.federated.state import State
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.privacy.trust.roster import UNSIGNED, Roster
from confide.recipe import Recipe
from confide.run import Loop

Fate = Callable[[str, Any, Parcel], str]
"""What becomes of a parcel on its way: "" if it arrives, "lost", or a reason for which the client fails."""


@dataclass
class Local:
    """Parcels are answered when somebody looks for the reply."""

    members: dict[Any, Any]
    fate: Fate = lambda kind, node, parcel: ""
    waiting: dict[int, tuple[str, NodeId, Parcel]] = field(default_factory=dict)
    here: set[NodeId] = field(default_factory=set)
    tickets: int = 0
    closed: bool = False
    arrays: int = 0
    roster: Roster = UNSIGNED
    meter: Meter = field(default_factory=Meter)

    def ask(self, kind: str, parcels: Sequence[tuple[NodeId, Parcel]], seconds: float) -> list[int]:
        sent = []
        for node, parcel in parcels:
            self.tickets += 1
            self.waiting[self.tickets] = (kind, node, parcel)
            sent.append(self.tickets)
        return sent

    def events(self, seconds: float) -> list[Event]:
        came = self.members.keys() - self.here
        self.here |= came
        if came:
            return [Came(node) for node in sorted(came)]
        joins = [ticket for ticket, (kind, _, _) in self.waiting.items() if kind == JOIN]
        if joins:
            return [each for ticket in joins for each in self._answer(ticket)]
        for ticket in list(self.waiting):
            answered = self._answer(ticket)
            if answered:
                return answered
        time.sleep(min(max(seconds, 0.0), 0.01))
        return []

    def _answer(self, ticket: int) -> list[Event]:
        kind, node, parcel = self.waiting.pop(ticket)
        end = self.fate(kind, node, parcel)
        if end == "lost":
            return []
        if end:
            return [Reply(ticket, node, None, end)]
        try:
            return [Reply(ticket, node, self.members[node].answer(kind, parcel))]
        except UserError as error:
            return [Reply(ticket, node, None, meaning(code_of(error)), code_of(error))]

    def drop(self, node: NodeId) -> None:
        self.members.pop(node, None)

    def close(self) -> None:
        self.closed = True


def lenient(state: Path, **stricter: Any) -> Policy:
    """The policy of a client that takes part in everything, but for what is given."""
    return Policy.model_validate(accepting(state).model_dump() | stricter)


def loop_over(recipe: Recipe, remote: Callable[..., Remote]) -> Loop:
    """The run's own loop over such clients, with its ledger in memory."""
    return make_loop(recipe, remote=remote)


def run_over(recipe: Recipe, remote: Callable[..., Remote]) -> tuple[Loop, State]:
    """The whole run: its loop and its last state."""
    loop = loop_over(recipe, remote)
    state = loop.start()
    while state.step < recipe.run.steps:
        loop.step(state)
    return loop, state


def engine(
    clients: int = 3,
    fate: Fate | None = None,
    terms: Terms | None = None,
    state: Path | None = None,
    signed: bool = False,
) -> Callable[[Recipe, Task, Plan], Remote]:
    """What `make_loop` takes as `remote`: users dealt to so many clients of this process."""

    def make(recipe: Recipe, task: Task, plan: Plan) -> Remote:
        place = state or Path(tempfile.mkdtemp(prefix="confide-rehearsal-"))
        shares = {100 + n: list(range(n, len(plan.weights), clients)) for n in range(clients)}
        secrets = {node: ec.generate_private_key(ec.SECP256R1()) for node in shares}
        public = {user: secrets[node].public_key() for node, users in shares.items() for user in users}
        rosters = {node: Roster(public, key) if signed else UNSIGNED for node, key in secrets.items()}
        members = {
            node: TrainingClient(
                recipe, task, users, lenient(place / str(node)), lambda text: None, partial(rosters.__getitem__, node)
            )
            for node, users in shares.items()
        }
        link = Local(dict(members), roster=Roster(public) if signed else UNSIGNED)
        if fate is not None:
            link.fate = fate
        return remote_engine(recipe, task, plan, link, shares, terms or Terms(deadline=60.0))

    return make
