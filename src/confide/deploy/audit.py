"""The audit of a deployment: a server and clients in processes of their own, over gRPC with TLS, on this machine.

Everything is what `confide deploy` runs: keys, streams, rounds, secure aggregation, the clients' own bounds and
noise. Only the clients' training is replaced: every user of the federation is a canary, and answers with a canary's
update. A client speaks for many of them, as a canary with a process of its own would take a machine for every hundred.

Local trust is not audited here: there each message is a release by itself, which needs no network to be audited.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from torch import Tensor

from confide.build import RemoteEngine
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.client import TrainingClient
from confide.deploy.deployment import check_deployable, remote_engine
from confide.deploy.masked import Masked
from confide.deploy.policy import accepting
from confide.deploy.remote import Remote, Terms
from confide.engines.engine import Engine, Traits
from confide.errors import UserError
from confide.federated.cohort import Tally
from confide.federated.task import Task
from confide.privacy.events import Event
from confide.privacy.gaussian import Seeded
from confide.privacy.mechanisms.distributed import top_up
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import OwnNoise
from confide.privacy.trust.secure import threshold
from confide.recipe import Recipe
from confide.runs.audit import Audit, audit
from confide.runs.broken import Break, BrokenSource, share_of
from confide.runs.canaries import Planting

_HOST = "127.0.0.1"
_PATIENCE = 30.0


def audit_deployed(
    recipe: Recipe,
    clients: int,
    canaries: int | None = None,
    watch: Callable[[int], None] | None = None,
    *,
    broken: Break | None = None,
    task: Task | None = None,
) -> Audit:
    """Audit a recipe as a deployment with so many clients runs it."""
    check_deployable(recipe)
    if recipe.privacy.trust == "local":
        raise UserError(
            "privacy.trust=local: every message is a release by itself, which a network does not change; leave "
            "--deployed out"
        )
    if recipe.users.weights != "uniform":
        raise UserError("users.weights: the canaries of a deployed audit weigh the same; use uniform")
    with tempfile.TemporaryDirectory(prefix="confide-audit-") as folder:

        def deploy(planting: Planting) -> RemoteEngine:
            def engine(wanted: Recipe, task: Task, plan: Plan) -> Engine:
                crew = Crew(planting, clients, broken, Path(folder))
                return Loopback(crew, wanted, task, plan)

            return engine

        return audit(recipe, canaries, watch, broken=broken, task=task, deploy=deploy)


@dataclass(frozen=True)
class Crew:
    """The clients of an audited deployment."""

    planting: Planting
    clients: int
    broken: Break | None
    folder: Path
    """For keys."""


class Loopback:
    """An engine that brings its clients along, and ends them when it is closed."""

    def __init__(self, crew: Crew, wanted: Recipe, task: Task, plan: Plan) -> None:
        from confide.deploy.hub import Hub

        users, secrets = len(plan.weights), crew.folder / "keys"
        federation = keys.make(secrets, min(crew.clients, users), [_HOST], users)
        listening, self.clients = Address(_HOST, 0).listen(), list[BaseProcess]()
        address = Address(_HOST, listening.getsockname()[1])
        link = Hub(listening, secrets)
        try:
            for node in federation.nodes:
                given = ClientStart(crew.planting, node.users, str(address), secrets, node.name, crew.broken)
                self.clients.append(get_context("spawn").Process(target=_answer, args=(given,), daemon=True))
                self.clients[-1].start()
        except BaseException:
            link.close()
            self._end()
            raise
        terms = Terms(deadline=120, join=120)
        try:
            self.remote: Remote = remote_engine(wanted, task, plan, link, link.registry, terms, users)
        except BaseException:  # which has closed the link
            self._end()
            raise
        if isinstance(self.remote, Masked) and crew.broken is not None:
            self.remote.added = _broken_top_up(crew.broken, plan.cohort_size)

    @property
    def traits(self) -> Traits:
        return self.remote.traits

    def gather(self, cohort: np.ndarray, step: int) -> None:
        self.remote.gather(cohort, step)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        return self.remote.train(central, cohort, step, total, bounds)

    def close(self) -> None:
        self.remote.close()
        self._end()

    def _end(self) -> None:
        for process in self.clients:
            process.terminate()
        for process in self.clients:
            process.join(5)
            if process.is_alive():
                process.kill()


def _broken_top_up(kind: Break, expected: int) -> Callable[[float, int, int], float]:
    """The server's own noise, broken as `runs/broken.py` breaks the whole."""
    if kind == "cohort-variance":
        return lambda scale, least, arrived: scale * math.sqrt(least * arrived / threshold(expected, 0))
    return lambda scale, least, arrived: share_of(kind) * top_up(scale, least, arrived)


@dataclass(frozen=True)
class ClientStart:
    """What a client's process is started with."""

    planting: Planting
    users: tuple[int, ...]
    server: str
    keys: Path
    name: str
    broken: Break | None


def _answer(given: ClientStart) -> None:
    """The life of a client whose users are canaries."""
    import torch

    from confide.deploy.node import serve

    torch.set_num_threads(1)
    wanted, planted = Recipe.model_validate_json(given.planting.recipe), given.planting.task()
    task: Task = planted
    roster = keys.roster_of(given.keys / keys.FEDERATION, given.keys / given.name)
    member = CanaryClient(wanted, task, given.users, accepting(given.keys / "state"), lambda text: None, roster)
    member.trainer, member.broken = given.planting.trainer(planted), given.broken
    access = Access(Address.parse(given.server), given.keys / keys.CA, given.keys / given.name)
    serve(access, member, _PATIENCE, lambda text: None)


class CanaryClient(TrainingClient):
    """A client whose users are canaries. It keeps its ledgers in memory, and its noise may be broken on purpose."""

    broken: Break | None = None

    def own_noise(self, plan: Plan, event: Event) -> OwnNoise:
        honest = super().own_noise(plan, event)
        if self.broken is not None:
            share = share_of(self.broken)
            source = BrokenSource(Seeded(plan.seed), lambda: share, self.broken == "same-noise")
            plan = replace(plan, source=source)
        return OwnNoise(plan, event, replace(honest.terms, state=None), self.users)
