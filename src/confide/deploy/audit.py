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
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from confide.build import RemoteEngine
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.client import TrainingClient
from confide.deploy.deployment import check_deployable, remote_engine
from confide.deploy.masked import Masked
from confide.deploy.policy import accepting
from confide.deploy.remote import Terms
from confide.engines.engine import Engine
from confide.errors import UserError
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
            return partial(_loopback, planting, clients, broken, Path(folder))

        return audit(recipe, canaries, watch, broken=broken, task=task, deploy=deploy)


def _loopback(
    planting: Planting, clients: int, broken: Break | None, folder: Path, wanted: Recipe, task: Task, plan: Plan
) -> Engine:
    """An engine that brings its clients along, and ends them when it is closed."""
    from confide.deploy.hub import Hub

    users, secrets, begun = len(plan.weights), folder / "keys", list[BaseProcess]()
    federation = keys.make(secrets, min(clients, users), [_HOST], users)
    listening = Address(_HOST, 0).listen()
    access = Access(Address(_HOST, listening.getsockname()[1]), secrets / keys.CA, None)
    link = Hub(listening, secrets)

    def close() -> None:
        link.close()
        for process in begun:
            process.terminate()
        for process in begun:
            process.join(5)
            if process.is_alive():
                process.kill()

    try:
        for node in federation.nodes:
            given = planting, node.users, replace(access, key=secrets / node.name), broken
            begun.append(get_context("spawn").Process(target=_answer, args=given, daemon=True))
            begun[-1].start()
        made = remote_engine(wanted, task, plan, link, link.registry, Terms(deadline=120, join=120), users)
    except BaseException:
        close()
        raise
    made.close = close  # type: ignore[method-assign]
    if isinstance(made, Masked) and broken is not None:
        made.added = _broken_top_up(broken, plan.cohort_size)
    return made


def _broken_top_up(kind: Break, expected: int) -> Callable[[float, int, int], float]:
    """The server's own noise, broken as `runs/broken.py` breaks the whole."""
    if kind == "cohort-variance":
        return lambda scale, least, arrived: scale * math.sqrt(least * arrived / threshold(expected, 0))
    return lambda scale, least, arrived: share_of(kind) * top_up(scale, least, arrived)


def _answer(planting: Planting, users: tuple[int, ...], access: Access, broken: Break | None) -> None:
    """The life of a client whose users are canaries."""
    import torch

    from confide.deploy.node import serve

    torch.set_num_threads(1)
    wanted, planted = Recipe.model_validate_json(planting.recipe), planting.task()
    task: Task = planted
    folder = access.key.parent if access.key else Path()
    policy, roster = accepting(folder / "state"), keys.roster_of(folder / keys.FEDERATION, access.key)
    member = CanaryClient(wanted, task, users, policy, lambda text: None, roster)
    member.trainer, member.broken = planting.trainer(planted), broken
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
