"""Workloads D and E: heads on what a frozen encoder made, through the code that speech and retrieval train with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.federated.chain import Affine, Chain
from confide.federated.local import LocalTraining, Updates
from confide.federated.task import Task, TaskSection
from confide.randomness import generator
from confide.retrieval import head
from confide.settings import MADE_UP, Unit
from confide.speech import model, pretrained
from confide.speech.head_updates import KERNELS, Scales, head_updates, users_together
from confide.workloads import data
from confide.workloads.tasks import TOKENS, Workload


class StatesSettings(TaskSection):
    """Workload D: users with a few utterances of kept states, a linear CTC head."""

    kind: Literal["bench/states"] = "bench/states"
    users: int = Field(1560, gt=0, description="population")
    distinct: int = Field(390, gt=0, description="so many have data of their own; the others repeat theirs")
    utterances: int = Field(3, gt=0, description="of a user")
    frames: int = Field(80, gt=0, description="of an utterance")
    width: int = Field(384, gt=0, description="numbers of a state")
    labels: int = Field(5, gt=0, description="of an utterance")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return self.distinct * self.utterances * (self.frames * self.width + self.labels) + TOKENS * self.width

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return StatesHead(self, seed)


class StatesHead(Workload):
    """D: the head that `speech/words/private` trains on a frozen encoder."""

    name = "bench/states"
    kernels = KERNELS

    def __init__(self, settings: StatesSettings, seed: int) -> None:
        super().__init__(settings.users, settings.utterances)
        self.settings, self.seed = settings, seed
        self.distinct = min(settings.distinct, settings.users)
        self.scales = Scales()

    @cached_property
    def utterances(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The same of each user and utterance."""
        states, labels = ([list(own) for own in some] for some in self.held)
        return states, labels

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """States and labels, made when somebody trains."""
        own = self.settings
        made = data.kept_states(self.distinct, own.utterances, own.frames, own.width, own.labels, TOKENS)
        return torch.from_numpy(made[0]), torch.from_numpy(made[1])

    def initial_parameters(self) -> dict[str, Tensor]:
        draw = generator(self.seed, "model")
        return pretrained.initial_parameters(pretrained.PretrainedSettings(), self.settings.width, TOKENS, draw)

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        states, labels = self.held
        chosen = slice(None) if examples is None else torch.from_numpy(examples)
        return states[user % self.distinct][chosen], labels[user % self.distinct][chosen]

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        states, labels = batch
        frames, sizes = (torch.full((len(states),), each.shape[1]) for each in batch)
        return model.ctc_loss(pretrained.head(parameters, states), frames, labels, sizes)

    def users_at_once(self, local: LocalTraining) -> int:
        return users_together(local, self.settings.utterances)

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        if not self.users_at_once(local):
            return None
        own, (states, labels), count = (users % self.distinct).tolist(), self.utterances, self.settings.utterances
        inputs, targets = ([each for user in own for each in some[user]] for some in (states, labels))
        scales = [self.scales.of(user, states[user]) for user in own]
        return head_updates(parameters, inputs, scales, targets, [count] * len(own), local, learning_rate)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(self.loss(parameters, self.batch(0, None, generator(self.seed, "evaluation"))))}


class QueriesSettings(TaskSection):
    """Workload E: users with one query's vector each, the classifier that retrieves."""

    kind: Literal["bench/queries"] = "bench/queries"
    users: int = Field(4459, gt=0, description="population")
    width: int = Field(384, gt=0, description="numbers of a vector")
    documents: int = Field(2, ge=2, description="that a query can ask for")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return (self.users + self.documents) * self.width

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return QueriesHead(self, seed)


class QueriesHead(Workload):
    """E: the head that `retrieval/sms-private` trains, with every message a user of its own."""

    name = "bench/queries"
    head = head.HeadSettings(scale="unit")

    def __init__(self, settings: QueriesSettings, seed: int) -> None:
        super().__init__(settings.users, 1)
        self.settings, self.seed = settings, seed

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """Vectors (users, width) and labels (users,), made when somebody trains."""
        made = data.query_vectors(self.settings.users, self.settings.width, self.settings.documents)
        return torch.from_numpy(made[0]).flatten(0, 1), torch.from_numpy(made[1]).flatten()

    def initial_parameters(self) -> dict[str, Tensor]:
        draw = generator(self.seed, "model")
        return head.initial_parameters(self.head, self.settings.width, self.settings.documents, draw)

    def chain(self) -> Chain:
        return Chain((Affine("head.weight", "head.bias"),))

    def rows(self, user: int) -> np.ndarray:
        return np.array([user])

    def inputs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        vectors, labels = self.held
        return head.scaled(self.head.scale, vectors[rows]), labels[rows]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        vectors, labels = self.held
        return vectors[user : user + 1], labels[user : user + 1]

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return head.loss(head.forward(self.head, parameters, batch[0]), batch[1])

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(self.loss(parameters, self.held))}
