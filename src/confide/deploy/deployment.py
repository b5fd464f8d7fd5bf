"""A deployment from its options: the server's run over a SuperLink, and a client's life.

The server builds the recipe's task for its model and its test data. If the task has as many users as the federation,
the clients are taken to hold slices of that very corpus (a simulation over a real network); otherwise users are only
counted, and each client has data of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # before anything of Flower is imported

from confide.build import make_task
from confide.deploy import keys
from confide.deploy.client import OwnData, Population, RefusedByClient, TrainingClient
from confide.deploy.masked import Masked
from confide.deploy.parcels import Parcel, identity
from confide.deploy.remote import JOIN, Door, Link, Remote, Terms
from confide.deploy.rounds import Books
from confide.encoders.weights import is_url
from confide.engines.engine import Abandoned, Engine
from confide.errors import UserError
from confide.federated.bounding import bounder
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.recipe import Recipe, parse
from confide.report.page import write_report
from confide.retrieval.settings import RetrievalSettings
from confide.runs import folder
from confide.settings import local_paths, named_code

LOG = "superlink.log"
_REPLACED = ("corpus.folder", "test.folder", "data.queries", "data.test", "start")
"""Paths of a task that do not matter to a client with data of its own: `own_data` fills them in, and the server sends
the model to start from."""


@dataclass(frozen=True)
class Hosting:
    """Where the server listens and whom it lets in. Without keys everything is plain, for `population` users."""

    listen: str
    keys: Path | None
    population: int | None = None


def serve(
    wanted: Recipe, out: Path, hosting: Hosting, terms: Terms, first: int = 1, quiet: bool = False
) -> dict[str, Any]:
    """Start a run, or go on with it: the same command does both."""
    from confide.deploy.superlink import Address, SuperLink, check_free

    address = Address.parse(hosting.listen)
    federation = None if hosting.keys is None else keys.read(hosting.keys)
    population = hosting.population if federation is None else federation.population
    if population is None:
        raise UserError("--plain: without keys nobody knows how many users there are; give --users")
    check_free(address)
    if hosting.keys is not None:
        for name in (keys.SERVER, keys.CA):
            keys.check_certificate(hosting.keys / name)
    check_deployable(wanted)
    _warn(wanted, hosting)

    def link() -> tuple[Link, Mapping[int, Sequence[int]] | None]:
        made = SuperLink(address, hosting.keys, federation, out / LOG)
        return made, made.registry

    def engine(wanted: Recipe, task: Task, plan: Plan) -> Engine:
        return remote_engine(wanted, task, plan, *link(), terms, first)

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


def remote_engine(
    wanted: Recipe,
    task: Task,
    plan: Plan,
    link: Link,
    registry: Mapping[int, Sequence[int]] | None,
    terms: Terms,
    first: int = 1,
) -> Remote:
    """The engine of a run over a link, once `first` users are here."""
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters)
    door = Door(identity(wanted, layout, like), registry, len(plan.weights), wanted.model_dump_json())
    kind = Masked if wanted.privacy.trust == "distributed" else Remote
    books, rule = Books(layout, plan.weights, like.new_empty(0)), bounder(wanted.bounding, layout)
    del parameters, like  # clients may take hours to come
    made = kind(link, door, os.urandom(16).hex(), books, rule, terms, plan)
    try:
        made.wait_for(first)
    except BaseException:
        made.close()
        raise
    return made


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


class Client:
    """A client that builds its task when it knows the recipe: its own copy, or the one that the server tells."""

    def __init__(self, own: Recipe | None, users: Sequence[int], data: Path | None, state: Path | None = None) -> None:
        if data is not None and len(users) != 1:
            raise UserError(f"--data is one user's; this client speaks for {len(users)} users")
        self.users, self.data, self.state = list(users), data, state
        self.member = None if own is None else self._member(own)

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        if self.member is None:
            told = parcel.facts.get("told")
            if kind != JOIN or not isinstance(told, str):
                raise RefusedByClient("this client has no recipe yet; the server must ask it to join first")
            self.member = self._member(_told(told, self.data))
        return self.member.answer(kind, parcel)

    def _member(self, wanted: Recipe) -> TrainingClient:
        task = make_task(wanted.task if self.data is None else own_data(wanted, self.data), wanted.run.seed)
        if self.data is not None:
            return TrainingClient(wanted, OwnData(task, self.users[0]), self.users, self.state)
        unknown = [user for user in self.users if user >= len(task.examples)]
        if unknown:
            raise UserError(
                f"--users {unknown}: the recipe's corpus has users 0 to {len(task.examples) - 1}; a client with data "
                "of its own names them with --data"
            )
        return TrainingClient(wanted, task, self.users, self.state)


def own_data(wanted: Recipe, data: Path) -> Any:
    """The recipe's task with this client's data in place of the corpus, all of it one user."""
    task = wanted.task.model_dump(mode="json")
    if task["kind"] == "speech":
        here = {"kind": "folder", "folder": str(data)}
        speakers = sum(path.is_dir() for path in data.iterdir()) if data.is_dir() else 0
        # To pool is to deal in another order; one speaker is one user already.
        task |= {"corpus": here, "test": here, "pool": None if speakers == 1 else 1}
    elif task["kind"] == "retrieval" and task["data"]["kind"] == "table":
        task["data"] |= {"queries": str(data), "test": str(data), "client_column": None}
        task["clients"] = {"kind": "even", "clients": 1}
    else:
        raise UserError(
            f"--data: a recipe with task {task['kind']} has no data of one's own; expected speech (a folder of audio "
            "and text), or retrieval with data.kind table (a file of queries)"
        )
    return type(wanted.task).model_validate(task)


def _told(text: str, data: Path | None) -> Recipe:
    """A recipe from the server. It may not run code, nor point at files of this machine other than the client's data.

    A client trusts no server: what a recipe may name is what its types do not mark.
    """
    try:
        told = parse(json.loads(text), "the server's recipe")
    except (ValueError, TypeError, UserError) as error:
        raise RefusedByClient(f"the server's recipe cannot be read: {error}") from None
    if code := named_code(told):
        listed = ", ".join(f"{where}={name}" for where, name in code.items())
        raise RefusedByClient(
            f"the server's recipe would run code of its choice here ({listed}); start the client with its own "
            "copy of the recipe if you trust it"
        )
    if isinstance(told.task, RetrievalSettings) and is_url(told.task.encoder.source):
        raise RefusedByClient(
            f"the server's recipe would send this client's texts to {told.task.encoder.source}; start the client with "
            "its own copy of the recipe if you trust it"
        )
    task = told.task if data is None else own_data(told, data)
    named = [path for path in local_paths(task) if data is None or path not in _REPLACED]
    if named:
        raise RefusedByClient(
            f"the server's recipe names files of this machine ({', '.join(f'task.{path}' for path in named)}); start "
            "the client with its own copy of the recipe, or with --data"
        )
    return told
