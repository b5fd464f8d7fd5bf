"""An aggregator between clients and server: it asks its clients, adds up what they send, and hands one sum up.

To its clients it is a server (`hub`, `remote`), with keys of its own for them; to the server it is one client that
speaks for all of their users. Every answer is checked and bounded again here, as a server does it, and the server
checks that the whole sum is within the bounds of the users in it. Sums are whole numbers (`sums`), so a tree of relays
gives the model of no relay, byte for byte. A relay sees single updates, so it is for central trust alone, and whoever
runs it is trusted as the server is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from confide.deploy import refusals
from confide.deploy.judge import judge
from confide.deploy.link import Link, NodeId
from confide.deploy.parcels import Parcel, identity
from confide.deploy.policy import accepting
from confide.deploy.refusals import QUESTION, RefusedByClient, to_owner
from confide.deploy.remote import JOIN, SUM, Door, Remote, Terms
from confide.deploy.rounds import Books, Call, Round, figures
from confide.errors import UserError
from confide.federated.bounding import bounder
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.recipe import Recipe


class Relay:
    """What a relay answers to the server above it."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        link: Link,
        registry: Mapping[NodeId, Sequence[int]],
        terms: Terms,
        first: int = 1,
        say: Callable[[str], None] = to_owner,
    ) -> None:
        if recipe.privacy.trust != "central":
            raise UserError(
                f"privacy.trust={recipe.privacy.trust}: a relay sees single updates and adds them up, which only "
                "central trust allows; let these clients connect to the server itself"
            )
        parameters = task.initial_parameters()
        self.layout, self.like = Layout.of(parameters), flatten(parameters)
        self.recipe, self.link, self.registry, self.terms, self.first, self.say = (
            recipe, link, registry, terms, first, say,
        )  # fmt: skip
        self.identity, self.rule = identity(recipe, task, self.layout, self.like), bounder(recipe.bounding, self.layout)
        self.users = sorted(user for users in registry.values() for user in users)
        self.below: Remote | None = None
        link.arrays = self.arrays

    @property
    def arrays(self) -> int:
        """Bytes of a sum, or of the model."""
        return 8 * self.like.numel()

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        facts = parcel.facts
        differs = self.identity.differs(facts)
        if kind == JOIN:
            said = {"users": self.users, "relay": True, **self.identity.facts()}
            if not differs:
                self._begin(facts.get("population"), str(facts.get("run")))
            return Parcel(said | ({"refuses": differs[0]} if differs else {}))
        if differs or kind != SUM or self.below is None:
            raise RefusedByClient(differs[0] if differs else QUESTION, f"the server asks a relay for {kind!r:.40}")
        return self._sum(self.below, parcel)

    def _begin(self, population: object, run: str) -> None:
        """Let clients in, once it is known how many users the server speaks of; anew for every start of a run."""
        if type(population) is not int or population <= max(self.users):
            raise RefusedByClient(refusals.POPULATION, f"the server speaks of {population!r:.40} users")
        if self.below is None or (self.below.run, self.below.door.population) != (run, population):
            here = () if self.below is None else self.below.nodes
            plan = judge(accepting(Path()), self.recipe, population, self.layout).plan
            door = Door(self.identity, self.registry, population, self.recipe.model_dump_json())
            books = Books(self.layout, np.zeros(population), self.like)
            self.below = Remote(self.link, door, run, books, self.rule, self.terms, plan, self.say)
            for node in here:
                self.below.greet(node)
        if not self.below.wait_for(self.first):
            came = f"{len(self.below.door.users)} users are here, {self.first} are wanted"
            raise RefusedByClient(refusals.WAITING, f"{came}; the server asks again")
        self.first = 0  # from now on whoever is away is missing, and nobody waits

    def _sum(self, below: Remote, parcel: Parcel) -> Parcel:
        facts, model = parcel.facts, parcel.arrays["model"]
        users, weights, seconds, needed = facts["users"], facts["weights"], facts["seconds"], facts["needed"]
        fits = isinstance(users, list) and set(users) <= set(self.users) and len(users) == len(weights)
        fits = fits and type(needed) is int and all(type(w) is float and 0 < w <= 1 for w in weights)
        if not fits or not 0 < seconds < math.inf:
            raise RefusedByClient(QUESTION, f"the server asks for users {users!r:.40}; this relay has {self.users}")
        below.books.weights[users] = weights
        books = Books(self.layout, below.books.weights, torch.empty_like(self.like))
        bounds = torch.tensor(facts["bounds"], dtype=torch.float64) if facts["bounds"] else None
        call = Call(facts["run"], self.identity, facts["step"], facts["nonce"])
        cohort: dict[int, NodeId | None] = dict.fromkeys(users)
        held = Round(call, cohort, books, self.rule.at(bounds), min(seconds, self.terms.deadline), bounds is not None)
        told = {name: facts[name] for name in ("bounds", "population")} | call.facts()
        below.hold(held, told, {"model": model}, needed)
        below.report(held)
        said = {"users": sorted(held.done), "tally": figures(held.tally)}
        return Parcel(call.facts() | said, {"sum": held.sum.sent()})
