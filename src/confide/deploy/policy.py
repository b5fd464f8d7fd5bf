"""A client's policy: what its owner has decided, which no server can change.

One YAML file (`confide deploy client --init FILE` makes one) says where the data are and which encoder reads them, whom
the client answers, how much it trusts the server, and what an answer and all answers of its life may cost. A server
asks for a run; `confide.deploy.judge` holds that against the policy and refuses whatever is below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter

from confide.deploy import refusals
from confide.deploy.refusals import RefusedByClient
from confide.deploy.told import read_told, with_own
from confide.errors import UserError
from confide.recipe import Recipe
from confide.retrieval.table import TableSettings
from confide.settings import LocalPath, Section, read_yaml, validate
from confide.speech.corpora.own import FolderSettings

Trust = Literal["central", "distributed", "local"]
TRUSTS: tuple[Trust, ...] = ("central", "distributed", "local")
"""From the one that relies on the server most to the one that does not rely on it."""
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_TASKS = {"folder": "speech", "table": "retrieval"}
"""The task that can use data of a kind."""
FINGERPRINT = r"^sha256:[0-9a-f]{64}$"


class Server(Section):
    """A server that the client answers."""

    address: str = Field(min_length=3, description="HOST:PORT, as --server gives it")
    authority: Annotated[str, Field(pattern=FINGERPRINT)] | None = Field(
        None, description="sha256:... of the federation's ca.pem, as `confide deploy keys` prints it; none: any --ca"
    )


class Believed(Section):
    """How many users there can be."""

    least: int = Field(2, ge=1, description="a federation of fewer users is refused")
    most: int = Field(ge=1, lt=2**31, description="a server that claims more is refused: more users, less noise")


class Policy(Section):
    """What a client's owner has decided."""

    servers: tuple[Server, ...] = Field(min_length=1, description="whom this client answers")
    data: Annotated[FolderSettings | TableSettings, Field(discriminator="kind")] | None = Field(
        None, description="this client's own data; none: made-up data of the recipe's task, for a rehearsal"
    )
    encoder: str | None = Field(
        None, min_length=1, description="the frozen model that reads the texts or hears the speech: a preset, a folder"
    )
    cache: LocalPath | None = Field(None, description="where features or states are kept; none: the usual folder")
    state: LocalPath = Field(description="the folder of this client's lifetime budget")
    roster: LocalPath | None = Field(
        None, description="federation.json, from whoever knows its clients: which key speaks for whom"
    )
    trust: Trust = Field(description="the least that is accepted: central, distributed or local")
    noise_multiplier: _Positive | None = Field(None, description="the least z of a run")
    epsilon_round: _Positive | None = Field(None, description="the largest epsilon of one answer")
    epsilon: float = Field(gt=0, allow_inf_nan=False, description="the largest epsilon of all answers together")
    delta: float = Field(gt=0, lt=1, description="delta of both epsilons")
    population: Believed
    most_numbers: int = Field(
        500_000_000, ge=1, description="a model that is larger, with the made-up data of a rehearsal, is never made"
    )
    rehearsal: bool = Field(False, description="whether seeded noise, and none, are accepted: not with private data")

    def resolved(self, folder: Path) -> Policy:
        """Read relative paths as relative to the policy's own folder."""

        def placed(section: Section) -> dict[str, Any]:
            return {name: folder / value.expanduser() for name, value in section if isinstance(value, Path)}

        here = placed(self)
        if self.data is not None:
            here["data"] = self.data.model_copy(update=placed(self.data))
        if self.encoder is not None and self.encoder.startswith((".", "~")):
            here["encoder"] = str(folder / Path(self.encoder).expanduser())
        return self.model_copy(update=here)

    def check_server(self, address: str, authority: str | None) -> None:
        """Refuse to speak to a server that the owner has not named."""
        for server in self.servers:
            if server.address == address and server.authority in (None, authority):
                return
        named = ", ".join(f"{server.address} ({server.authority or 'any authority'})" for server in self.servers)
        raise UserError(
            f"the policy does not name the server {address} with the authority {authority or 'none (--plain)'}; it "
            f"names {named}. Change `servers` in the policy if you want to answer it"
        )


def read_policy(path: Path | None) -> Policy:
    """Read a client's policy; without one a client does nothing."""
    if path is None:
        raise UserError(
            "a client trains by a policy of its own, and none was given: make one with `confide deploy client --init "
            "policy.yaml`, read and change it, and start the client with --policy policy.yaml"
        )
    try:
        document = read_yaml(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make a policy with `confide deploy client --init {path}`") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"policy {path} cannot be read: {error}") from None
    policy, problems = validate(TypeAdapter(Policy), document, whole="the policy")
    if not problems and policy.noise_multiplier is None and policy.epsilon_round is None:
        problems = ["give noise_multiplier (the least) or epsilon_round (the largest of one answer), or both"]
    if not problems and policy.population.least > policy.population.most:
        problems = [f"population: least={policy.population.least} is above most={policy.population.most}"]
    if problems:
        raise UserError(f"policy {path}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    made: Policy = policy
    return made.resolved(path.absolute().parent)


def accepting(state: Path) -> Policy:
    """Make a policy that refuses nothing, for made-up users such as canaries."""
    return Policy(
        servers=(Server(address="anywhere:1"),), state=state, trust="central", noise_multiplier=1e-9, epsilon=1e9,
        delta=1e-5, population=Believed(least=1, most=2**31 - 1), rehearsal=True,
    )  # fmt: skip


def told_recipe(text: object, policy: Policy) -> Recipe:
    """Make a recipe from what a server told, with data and encoder from the policy."""
    try:
        told = read_told(text)
        task = told.get("task") or {}
        kind, own = task.get("kind"), own_task(policy, task)
        if kind == "speech" and policy.data is None:
            raise UserError("the run is of speech: say in the policy where this client's own is (`data`)")
        if kind == "retrieval" and policy.encoder is None:
            raise UserError("the run is of retrieval: say in the policy which `encoder` may read this client's texts")
        if kind == "speech" and _hears(task) and policy.encoder is None:
            raise UserError(
                "the run trains on a frozen encoder of speech: say in the policy which `encoder` may hear this client's"
            )
        made = with_own(told, own)
        if made.privacy.mechanism == "python":
            raise UserError("the server's recipe names a mechanism by code of its own")
        return made
    except UserError as error:
        raise RefusedByClient(refusals.RECIPE, str(error)) from None


def _hears(task: Mapping[str, Any]) -> bool:
    """Whether a speech task's model is trained on a frozen encoder."""
    model = task.get("model")
    return isinstance(model, Mapping) and model.get("encoder") is not None


def own_task(policy: Policy, task: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task that the policy decides, all of the data one user."""
    own: dict[str, Any] = {}
    kind = task.get("kind")
    data = None if policy.data is None else policy.data.model_dump(mode="json")
    if data is not None and _TASKS[data["kind"]] != kind:
        raise UserError(
            f"the policy's data are of kind {data['kind']}, which the task {kind!r:.40} cannot use; expected a run of "
            f"{_TASKS[data['kind']]} (or no `data`, for a rehearsal with made-up ones)"
        )
    if isinstance(policy.data, FolderSettings):
        folder = policy.data.folder
        speakers = sum(path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0
        # To pool is to deal in another order; one speaker is one user already.
        own = {"corpus": data, "test": data, "pool": None if speakers == 1 else 1}
    elif data is not None:
        data |= {"test": data["test"] or data["queries"], "client_column": None}
        own = {"data": data, "clients": {"kind": "even", "clients": 1}}
    if kind == "retrieval" and policy.encoder is not None:
        own["encoder"] = {"source": policy.encoder}
    if kind == "speech" and policy.encoder is not None and _hears(task):
        own["model"] = {"encoder": {"source": policy.encoder}}
    if kind in _TASKS.values() and policy.cache is not None:
        own["cache"] = str(policy.cache)
    return own


TEMPLATE = """\
# What this client does for whom, and what it refuses. No server can change it. Paths are relative to this file.

# Whom it answers. `authority` is the fingerprint of the federation's ca.pem (`confide deploy keys` prints it): a server
# whose certificate was not signed by it is never spoken to. null: whatever --ca names.
servers:
  - address: {address}
    authority: {authority}

# This client's own data, all of it one user. Speech is a folder of speakers with audio and text; queries are a table.
# null: the made-up data of the recipe's task, for a rehearsal.
#   data: {{kind: folder, folder: ./speech}}
#   data: {{kind: table, queries: ./queries.csv, documents: ./documents.csv}}
data: null

# Which frozen model reads this client's texts or hears its speech: a preset, a folder, or for texts the address of a
# service that you trust with the texts themselves. A server cannot name another.
#   encoder: minilm
#   encoder: whisper-tiny.en
encoder: null

# Where this client keeps its lifetime budget (`confide budget`). Keep it: it says what was spent.
state: ./state

# The least trust that it accepts.
#   local        it adds all the noise itself, to what it sends; it relies on nobody.
#   distributed  it adds a share, and the server sees the sum alone: it relies on more than two thirds of each cohort,
#                and on a `roster` of the others' keys that the server has not made up.
#   central      it adds NO noise. It relies on the server to add it, to keep every update to itself, and to have the
#                users that it claims. All epsilons below are then claims of the server's, which nothing here enforces.
trust: local

# Which key speaks for which user: the federation's federation.json, from somebody whom you believe. Distributed trust
# needs it: without it a server could pose as all the others.
roster: null

# What an answer may cost at most, and all answers in this client's life: over all servers and runs.
noise_multiplier: null  # the least z, if you would rather say that; or both
epsilon_round: 1
epsilon: 8
delta: 1.0e-6

# How many users you believe there can be. Where the noise is made for a target epsilon, a server that claims more users
# than there are would get less of it.
population: {{least: 2, most: 10000}}

# A server may not have this client make a larger model than of so many numbers (4 bytes each, several times over).
most_numbers: 500000000

# Whether it takes part in runs with seeded noise (the server could subtract it) or with none. Only for data that are
# not private.
rehearsal: false
"""


def write_policy(path: Path, address: str, authority: str | None) -> None:
    """Write a policy to begin with; an existing file is left alone."""
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.format(address=address, authority=authority or "null"))
    except FileExistsError:
        raise UserError(f"{path} exists; a policy is never overwritten. Edit it, or name another file") from None
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); expected a file in a folder that is there") from None
