"""A deployment from its options: the server's run over its streams, and a client's life.

The server builds the recipe's task for its model and its test data. If the task has as many users as the federation,
the clients are taken to hold slices of that very corpus (a simulation over a real network); otherwise users are only
counted, and each client has data of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confide.build import RemoteEngine, make_task
from confide.deploy import keys, refusals
from confide.deploy.address import Access, Address
from confide.deploy.client import OwnData, Population, TrainingClient
from confide.deploy.judge import look_ahead
from confide.deploy.link import Link, NodeId
from confide.deploy.masked import Masked
from confide.deploy.metrics import Meter, watched
from confide.deploy.parcels import Parcel, identity
from confide.deploy.policy import Policy, own_task, told_recipe
from confide.deploy.refusals import RefusedByClient, to_owner
from confide.deploy.remote import JOIN, Door, Remote, Terms
from confide.deploy.rounds import Books
from confide.deploy.told import with_own
from confide.engines.engine import Abandoned, Engine
from confide.errors import UserError
from confide.federated.bounding import bounder
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.recipe import Recipe
from confide.report.page import write_report
from confide.runs import folder


@dataclass(frozen=True)
class Hosting:
    """Where the server listens and whom it lets in. Without keys everything is plain, for `population` users."""

    listen: str
    keys: Path | None
    population: int | None = None
    watch: str | None = None
    """Where `/metrics` and `/health` are, if anywhere."""


def serve(
    wanted: Recipe, out: Path, hosting: Hosting, terms: Terms, first: int = 1, quiet: bool = False
) -> dict[str, Any]:
    """Start a run, or go on with it: the same command does both."""
    from confide.deploy.hub import Hub

    address = Address.parse(hosting.listen)
    federation = None if hosting.keys is None else keys.read(hosting.keys)
    population = hosting.population if federation is None else federation.population
    if population is None:
        raise UserError("--plain: without keys nobody knows how many users there are; give --users")
    if hosting.keys is not None:
        for name in (keys.SERVER, keys.CA):
            keys.check_certificate(hosting.keys / name)
    check_deployable(wanted)
    listening, meter = address.listen(), Meter()
    _warn(wanted, hosting)

    def engine(wanted: Recipe, task: Task, plan: Plan) -> Engine:
        hub = Hub(listening, hosting.keys, meter=meter)
        say_places(hub.limits.admitted, hub.registry, first)
        return remote_engine(wanted, task, plan, hub, hub.registry, terms, first)

    try:
        with watched(hosting.watch, meter, out / folder.METRICS):
            return carry_out(wanted, out, population, engine, quiet)
    finally:
        listening.close()


def carry_out(wanted: Recipe, out: Path, population: int, engine: RemoteEngine, quiet: bool) -> dict[str, Any]:
    """Begin a run over clients elsewhere, or go on with the one that the folder holds."""
    deployed = folder.Deployed(server_task(wanted, population), engine)
    begun = (out / folder.RECIPE).exists() and not (out / folder.SUMMARY).exists()
    try:
        if begun and folder.held_recipe(out).digest == wanted.digest:
            return folder.resume(out, quiet=quiet, deployed=deployed, page=write_report)
        return folder.train(wanted, out, quiet=quiet, deployed=deployed, page=write_report)
    except Abandoned as too_few:
        raise UserError(
            f"{too_few}. The run was stopped and can go on with the same command, when more clients are there or with "
            "a longer --deadline or a lower --minimum"
        ) from None


def relay(wanted: Recipe, hosting: Hosting, access: Access, terms: Terms, first: int, patience: float) -> None:
    """Stand between the clients of a folder of keys and a server, until it is stopped."""
    from confide.deploy import node
    from confide.deploy.hub import Hub
    from confide.deploy.relay import Relay

    if hosting.keys is None:
        raise UserError("a relay needs keys for its clients: `confide deploy keys make`, with --first-user")
    registry: dict[NodeId, Sequence[int]] = {each.name: each.users for each in keys.read(hosting.keys, part=True).nodes}
    task = make_task(wanted.task, wanted.run.seed)
    listening = Address.parse(hosting.listen).listen()
    hub = Hub(listening, hosting.keys, part=True)
    say_places(hub.limits.admitted, hub.registry, first)
    try:
        with watched(hosting.watch, hub.meter):
            node.serve(access, Relay(wanted, task, hub, registry, terms, first), patience)
    finally:
        hub.close()
        listening.close()


def remote_engine(
    wanted: Recipe,
    task: Task,
    plan: Plan,
    link: Link,
    registry: Mapping[Any, Sequence[int]] | None,
    terms: Terms,
    first: int = 1,
) -> Remote:
    """The engine of a run over a link, once `first` users are here."""
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters)
    door = Door(identity(wanted, task, layout, like), registry, len(plan.weights), wanted.model_dump_json())
    kind = Masked if wanted.privacy.trust == "distributed" else Remote
    link.arrays = 8 * like.numel()  # numbers of 64 bits at most, as secure sums have
    books, rule = Books(layout, plan.weights, like.new_empty(0)), bounder(wanted.bounding, layout)
    del parameters, like  # clients may take hours to come
    made = kind(link, door, os.urandom(16).hex(), books, rule, terms, plan)
    try:
        if made.wait_for(first):
            return made
        refused = "".join(f"; node {node} was refused: {reason}" for node, reason in door.refused.items())
        raise UserError(
            f"{len(door.users)} users are here after {terms.join:g} s, {first} are wanted{refused}. Start more clients "
            "with `confide deploy client`, then this command again"
        )
    except BaseException:
        made.close()
        raise


def server_task(wanted: Recipe, population: int) -> Task:
    task = make_task(wanted.task, wanted.run.seed)
    if len(task.examples) == population:
        return task
    if wanted.users.weights == "examples":
        raise UserError(
            f"users.weights=examples: the recipe's own corpus has {len(task.examples)} users and the federation "
            f"{population}, whose numbers of examples the server does not know; use uniform, or list the weights"
        )
    counted: Any = Population(task, population)
    return counted  # type: ignore[no-any-return]


def check_deployable(wanted: Recipe) -> None:
    """Refuse what cannot be kept when users are elsewhere."""
    kind = folder.mechanism_for(wanted)
    problems = kind.deployed_refusals(wanted.asked())
    if wanted.privacy.mechanism == "python" and wanted.privacy.trust != "central":
        problems.append(
            "privacy.mechanism=python: clients add their noise by the mechanisms of this package; use trust: central"
        )
    if wanted.local.gradient_norms:
        problems.append("local.gradient_norms: clients do not tell a server how long their gradients are; leave it out")
    if problems:
        raise UserError("; ".join(problems))


def _warn(wanted: Recipe, hosting: Hosting) -> None:
    if hosting.keys is None:
        print("--plain: no encryption, and anybody who reaches the port may take part", file=sys.stderr)
    if wanted.privacy.mechanism != "none" and wanted.privacy.source == "seeded":
        print(
            "privacy.source=seeded: every client knows the seed and can take the noise off again; for a release use "
            "--set privacy.source=system",
            file=sys.stderr,
        )


def say_places(
    places: int, registry: Mapping[NodeId, Sequence[int]] | None, first: int, say: Callable[[str], None] = to_owner
) -> None:
    """Warn where fewer clients can be connected than it takes to begin."""
    sizes = [1] * first if registry is None else sorted(map(len, registry.values()), reverse=True)
    if sum(sizes[:places]) < first:
        say(
            f"--wait-for {first}: the system lets this process hold {places} clients at once, who speak for "
            f"{sum(sizes[:places])} users at most; let it open more files (`ulimit -n`, or LimitNOFILE= of a service), "
            "about three for each client"
        )


class Client:
    """A client that builds its task when it knows the recipe: its own copy, or what a server may tell of one."""

    def __init__(
        self,
        policy: Policy,
        users: Sequence[int],
        own: Recipe | None = None,
        say: Callable[[str], None] = to_owner,
        key: Path | None = None,
    ) -> None:
        if policy.data is not None and len(users) != 1:
            raise UserError(f"the policy's data are one user's; this client speaks for {len(users)} users")
        self.policy, self.users, self.say = policy, list(users), say
        self.told: object = None
        self.roster = keys.roster_of(policy.roster, key)
        self.own = own is not None
        self.member = None if own is None else self._member(own)

    @property
    def arrays(self) -> int:
        return 0 if self.member is None else self.member.arrays

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        if kind == JOIN and not self.own and parcel.facts.get("told") != self.told:
            try:
                self._learn(parcel.facts.get("told"), parcel.facts.get("population"))
            except RefusedByClient as refused:
                self.say(str(refused))
                return Parcel({"users": self.users, "refuses": refused.code})
        if self.member is None:
            raise RefusedByClient(refusals.JOIN_FIRST, "the server asks for an answer before it has told a recipe")
        return self.member.answer(kind, parcel)

    def _learn(self, told: object, population: object) -> None:
        """Make a run of what the server tells, if the policy has nothing against what it says."""
        self.member = None
        wanted = told_recipe(told, self.policy)
        look_ahead(self.policy, wanted, population, self.roster())
        try:
            self.member = self._member(wanted)
        except RefusedByClient:
            raise
        except (UserError, OSError) as error:
            raise RefusedByClient(refusals.DATA, str(error)) from None
        self.told = told

    def _member(self, wanted: Recipe) -> TrainingClient:
        """Train with the policy's data in place of the corpus, all of it one user, and with its encoder."""
        policy, document = self.policy, wanted.model_dump(mode="json")
        if own := own_task(policy, document["task"]):
            wanted = with_own(document, own)
        task = make_task(wanted.task, wanted.run.seed)
        if policy.data is not None:
            one: Any = OwnData(task, self.users[0])
            return TrainingClient(wanted, one, self.users, policy, self.say, self.roster)
        unknown = [user for user in self.users if user >= len(task.examples)]
        if unknown:
            raise UserError(
                f"--users {unknown}: the recipe's corpus has users 0 to {len(task.examples) - 1}; a client with data "
                "of its own names them in its policy (`data`)"
            )
        return TrainingClient(wanted, task, self.users, policy, self.say, self.roster)
