"""The task sections of the workloads. Made-up data: these tasks measure machines, not models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from confide.federated.task import Task, TaskSection


class MlpSettings(TaskSection):
    """Workload A: many small users, a perceptron with one hidden layer."""

    kind: Literal["bench/mlp"] = "bench/mlp"
    users: int = Field(1000, gt=0, description="population")
    distinct: int = Field(1000, gt=0, description="so many have data of their own; the others repeat theirs")
    examples: int = Field(20, gt=0, description="examples of a user")
    width: int = Field(784, gt=0, description="numbers of an example")
    hidden: int = Field(128, gt=0, description="hidden units")
    classes: int = Field(10, ge=2, description="that an example can belong to")

    def make(self, seed: int) -> Task:
        from confide.workloads.tasks import Mlp

        return Mlp(self, seed)


class SpeechClientSettings(TaskSection):
    """Workload B: users with utterances of random features and random labels, a small recogniser with CTC."""

    kind: Literal["bench/speech"] = "bench/speech"
    users: int = Field(100, gt=0, description="population")
    utterances: int = Field(4, gt=0, description="of a user")
    frames: int = Field(300, ge=3, description="of an utterance")
    labels: int = Field(20, gt=0, description="of an utterance")
    layers: int = Field(4, gt=0, description="blocks of attention and MLP")
    width: int = Field(144, gt=0, multiple_of=4, description="size of a frame's embedding")

    def make(self, seed: int) -> Task:
        from confide.workloads.tasks import SpeechClient

        return SpeechClient(self, seed)


class VectorSettings(TaskSection):
    """Workload C: a large model of which users train one tensor; the rest is there to be read, bounded and summed."""

    kind: Literal["bench/vector"] = "bench/vector"
    users: int = Field(1000, gt=0, description="population")
    parameters: int = Field(255_000_000, gt=0, description="of the model")
    tensors: int = Field(300, gt=0, description="that they lie in")

    def make(self, seed: int) -> Task:
        from confide.workloads.tasks import Vector

        return Vector(self, seed)
