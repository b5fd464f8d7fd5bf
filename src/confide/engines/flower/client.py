"""What a client does with what the server sends: check it, train its own user, bound the update, answer.

The same task, local training and bounding code as in one process: a user's answer is what `PartTrainer` adds for it.
The recipe is the server's, but the client holds its own copy and refuses a server that runs another one, another
version or another model; only where its data lie is its own. Nothing that arrives is code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.engines.flower.parcels import Parcel, identity
from confide.engines.flower.remote import JOIN, TRAIN
from confide.errors import UserError
from confide.federated.bounding import bounder
from confide.federated.cohort import PartTrainer
from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout, flatten
from confide.federated.task import Task
from confide.recipe import Recipe


class Refused(UserError):
    """The server and this client do not fit together."""


class OwnData:
    """A task whose one user, this client's own data, is called `user` in the federation."""

    def __init__(self, task: Task, user: int) -> None:
        self.task, self.user = task, user
        self.name, self.metric = task.name, task.metric
        self._examples = np.zeros(user + 1, dtype=np.int64)
        self._examples[user] = task.examples[0]

    @property
    def examples(self) -> np.ndarray:
        return self._examples

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.task.initial_parameters()

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return self.task.batch(0, examples, draw)

    def seconds(self, user: int) -> np.ndarray | None:
        return self.task.seconds(0)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return self.task.loss(parameters, batch)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return self.task.evaluate(parameters)

    def users_at_once(self, local: LocalTraining) -> int:
        return self.task.users_at_once(local)

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return self.task.fast_updates(parameters, np.zeros_like(users), local, learning_rate)


class Population:
    """The server's task where users' data are elsewhere: model and test data are real, the users are a number."""

    def __init__(self, task: Task, population: int) -> None:
        self.task, self.name, self.metric = task, task.name, task.metric
        self.left_out = getattr(task, "left_out", {})
        self._examples = np.ones(population, dtype=np.int64)

    @property
    def examples(self) -> np.ndarray:
        return self._examples

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


class Member:
    """A client's whole part in a run, without any network."""

    def __init__(self, recipe: Recipe, task: Task, users: Sequence[int]) -> None:
        parameters = task.initial_parameters()
        layout, like = Layout.of(parameters), flatten(parameters)
        self.users, self.identity, self.sum = list(users), identity(recipe, layout, like), torch.empty_like(like)
        rule = bounder(recipe.bounding, layout)
        weights = np.zeros(max(users) + 1)  # each user's comes with the question
        self.trainer = PartTrainer(task, layout, recipe.local, rule, weights, recipe.run.seed, like)

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        if kind == JOIN:
            return self._join(parcel.facts)
        if kind == TRAIN:
            return self._train(parcel)
        raise Refused(f"the server asks for {kind!r}, which this client does not know")

    def _join(self, facts: Mapping[str, Any]) -> Parcel:
        differs = self.identity.differs(facts)
        return Parcel({"users": self.users, **self.identity.facts(), **({"refuses": differs} if differs else {})})

    def _train(self, parcel: Parcel) -> Parcel:
        facts, user = parcel.facts, parcel.facts["user"]
        differs = self.identity.differs(facts)
        if differs:
            raise Refused(f"the server has {differs}")
        if user not in self.users:
            raise Refused(f"the server asks for user {user}; this client has {self.users}")
        model = torch.from_numpy(np.array(parcel.arrays["model"]))
        if model.shape != self.sum.shape or model.dtype != self.sum.dtype or not bool(torch.isfinite(model).all()):
            raise Refused(f"the server's model is {model.dtype} {tuple(model.shape)} or not finite")
        weight = facts["weight"]
        if type(weight) is not float or not 0 < weight <= 1:
            raise Refused(f"the server gives user {user} a weight of {weight!r}")
        self.trainer.weights[user] = weight
        bounds = torch.tensor(facts["bounds"], dtype=torch.float64) if facts.get("bounds") else None
        self.sum.zero_()
        tally = self.trainer.add_part(model, np.array([user]), int(facts["step"]), self.sum, bounds)
        loss = float("nan") if tally.not_finite else float(tally.loss)
        back = {name: facts[name] for name in ("run", "step", "nonce")} | self.identity.facts()
        return Parcel(
            back | {"user": user, "loss": loss, "votes": tally.votes, "norms": tally.layer_norms},
            {"update": self.sum.numpy()},
        )
