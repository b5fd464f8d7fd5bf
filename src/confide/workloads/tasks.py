"""The workloads as tasks, for the loop to train like any other. Made-up data: they measure machines, not models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from confide.federated.chain import Affine, Chain
from confide.federated.task import BasicTask, Task, TaskSection
from confide.randomness import generator
from confide.settings import MADE_UP, Unit
from confide.speech import model
from confide.workloads import data

TOKENS = 29


class Workload(BasicTask):
    """What the workloads have in common."""

    metric = "loss"
    better: Literal["lower"] = "lower"

    def __init__(self, users: int, examples: int) -> None:
        self.examples = np.broadcast_to(np.int64(examples), users)  # however many users, one number


class MlpSettings(TaskSection):
    """Workload A: many small users, a perceptron with one hidden layer."""

    kind: Literal["bench/mlp"] = "bench/mlp"
    users: int = Field(1000, gt=0, description="population")
    distinct: int = Field(1000, gt=0, description="so many have data of their own; the others repeat theirs")
    examples: int = Field(20, gt=0, description="examples of a user")
    width: int = Field(784, gt=0, description="numbers of an example")
    hidden: int = Field(128, gt=0, description="hidden units")
    classes: int = Field(10, ge=2, description="that an example can belong to")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return self.distinct * self.examples * self.width + self.hidden * (self.width + self.classes)

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return Mlp(self, seed)


class Mlp(Workload):
    """A: two linear layers with a ReLU between them."""

    name = "bench/mlp"

    def __init__(self, settings: MlpSettings, seed: int) -> None:
        super().__init__(settings.users, settings.examples)
        self.settings, self.seed = settings, seed
        self.distinct = min(settings.distinct, settings.users)

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """Features (rows, width) and labels (rows,), made when somebody trains: a parent of workers never does."""
        sizes = self.distinct, self.settings.examples, self.settings.width, self.settings.classes
        features, labels = map(torch.from_numpy, data.small_clients(*sizes))
        return features.flatten(0, 1), labels.flatten()

    def initial_parameters(self) -> dict[str, Tensor]:
        draw = generator(self.seed, "model")
        parameters: dict[str, Tensor] = {}
        sizes = (self.settings.width, self.settings.hidden, self.settings.classes)
        for number, (wide, out) in enumerate(pairwise(sizes), start=1):
            values = torch.from_numpy(draw.random((out, wide + 1), dtype=np.float32)).mul_(2).sub_(1) / math.sqrt(wide)
            parameters |= {f"weight{number}": values[:, :wide].clone(), f"bias{number}": values[:, wide].clone()}
        return parameters

    def chain(self) -> Chain:
        return Chain((Affine("weight1", "bias1", "relu"), Affine("weight2", "bias2")))

    def rows(self, user: int) -> np.ndarray:
        return user % self.distinct * self.settings.examples + np.arange(self.settings.examples)

    def inputs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        features, labels = self.held
        return features.index_select(0, torch.from_numpy(rows)), labels[rows]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        own = self.rows(user)
        return self.inputs(own if examples is None else own[examples])

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        inner = torch.relu(functional.linear(batch[0], parameters["weight1"], parameters["bias1"]))
        return functional.cross_entropy(functional.linear(inner, parameters["weight2"], parameters["bias2"]), batch[1])

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        features, labels = self.held
        return {"loss": float(self.loss(parameters, (features[:1000], labels[:1000])))}


class SpeechClientSettings(TaskSection):
    """Workload B: users with utterances of random features and random labels, a small recogniser with CTC."""

    kind: Literal["bench/speech"] = "bench/speech"
    users: int = Field(100, gt=0, description="population")
    utterances: int = Field(4, gt=0, description="of a user")
    frames: int = Field(300, ge=3, description="of an utterance")
    labels: int = Field(20, gt=0, description="of an utterance")
    layers: int = Field(4, gt=0, description="blocks of attention and MLP")
    width: int = Field(144, gt=0, multiple_of=4, description="size of a frame's embedding")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        data = self.users * self.utterances * (80 * self.frames + self.labels)
        return data + self.width * (12 * self.layers * self.width + TOKENS)

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return SpeechClient(self, seed)


class SpeechClient(Workload):
    """B: the package's own recogniser, without dropout."""

    name = "bench/speech"

    def __init__(self, settings: SpeechClientSettings, seed: int) -> None:
        super().__init__(settings.users, settings.utterances)
        self.settings, self.seed = settings, seed
        self.model = model.ModelSettings(
            preset="small", layers=settings.layers, width=settings.width, mlp=4 * settings.width, dropout=0.0,
            tokens=TOKENS,
        )  # fmt: skip

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """Features (users, utterances, frames, 80) and labels, made when somebody trains."""
        own = self.settings
        made = data.speech_clients(own.users, own.utterances, own.frames, own.labels, TOKENS)
        return torch.from_numpy(made[0]), torch.from_numpy(made[1])

    def initial_parameters(self) -> dict[str, Tensor]:
        return model.initial_parameters(self.model, generator(self.seed, "model"))

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        chosen = slice(None) if examples is None else torch.from_numpy(examples)
        features, labels = self.held
        return features[user][chosen], labels[user][chosen]

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, labels = batch
        count, frames, _ = features.shape
        whole = torch.full((count,), frames, device=features.device)
        logits, lengths = model.forward(self.model, parameters, features, whole, None)
        return model.ctc_loss(logits, lengths, labels, torch.full((count,), labels.shape[1]))

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(self.loss(parameters, self.batch(0, None, generator(self.seed, "evaluation"))))}


class VectorSettings(TaskSection):
    """Workload C: a large model of which users train one tensor; the rest is there to be read, bounded and summed."""

    kind: Literal["bench/vector"] = "bench/vector"
    users: int = Field(1000, gt=0, description="population")
    parameters: int = Field(255_000_000, gt=0, description="of the model")
    tensors: int = Field(300, gt=0, description="that they lie in")

    @property
    def population(self) -> int:
        return self.users

    @property
    def size(self) -> int:
        return self.parameters + self.tensors

    @property
    def unit(self) -> Unit:
        return MADE_UP

    def make(self, seed: int) -> Task:
        return Vector(self, seed)


class Vector(Workload):
    """C: as many parameters as are wanted, in equal tensors. The loss sees the first one only."""

    name = "bench/vector"

    def __init__(self, settings: VectorSettings, seed: int) -> None:
        super().__init__(settings.users, 1)
        tensors = min(settings.tensors, settings.parameters)
        self.sizes = np.diff(np.linspace(0, settings.parameters, tensors + 1).astype(np.int64)).tolist()

    def initial_parameters(self) -> dict[str, Tensor]:
        return {f"tensor{index:04}": torch.full((size,), 1e-3) for index, size in enumerate(self.sizes)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return (torch.tensor(float(user % 7 + 1)),)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return batch[0] * parameters["tensor0000"].square().sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(parameters["tensor0000"].square().sum())}
