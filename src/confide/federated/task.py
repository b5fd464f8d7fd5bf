"""What the loop asks of a task: a model, users with data, a loss, and an evaluation. Nothing about privacy.

To add a task: a class that inherits `BasicTask`, its `TaskSection` for recipes, and the section's name in the union
`TaskSettings` of `confide.recipe`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from confide.federated.items import Items
from confide.federated.local import LocalTraining, Updates
from confide.federated.symmetry import Scaling
from confide.settings import Section, Unit


class Task(Protocol):
    """What the loop asks of a learning problem that is split over users.

    A task of your own has `name`, `metric`, `examples`, `initial_parameters`, `batch`, `loss` and `evaluate`;
    `BasicTask` has the other members.

    Examples:
        >>> from confide.build import make_task
        >>> from confide.recipe import load
        >>> task = make_task(load("convex/digits").task, seed=0)
        >>> task.name, task.metric, len(task.examples)
        ('convex/logistic', 'accuracy', 287)
    """

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str:
        """The evaluation that sums the task up, for example `accuracy`."""
        ...

    @property
    def better(self) -> Literal["higher", "lower"] | None:
        """Which way the metric is good, where `scored` gives no test items that say so; none if nobody knows."""
        ...

    @property
    def examples(self) -> np.ndarray:
        """How many examples each user holds; its length is the population."""  # (population,) int64
        ...

    def initial_parameters(self) -> dict[str, Tensor]:
        """The fresh model."""
        ...

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        """The user's examples with these indices, or all of them; `draw` is for augmentation and dropout."""
        ...

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        """Mean loss of a batch, a scalar that can be differentiated."""
        ...

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]: ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of what the task was made from, by name: a run that is resumed must find the same."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """How much of the data was not used, by reason; the summary says so."""
        ...

    def starting_parameters(self) -> dict[str, Tensor]:
        """What a run begins with, where that is not the fresh model."""
        ...

    @property
    def scalings(self) -> Sequence[Scaling]:
        """How tensors of the model can be scaled without changing what it computes, for `bounding.balance`."""
        ...

    @property
    def begins_elsewhere(self) -> bool:
        """Whether a run begins with a model that was made before it, whose data its guarantee does not cover."""
        ...

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items] | None:
        """The evaluation with how each test item was answered; none if the task has no test items."""
        ...

    def own_accuracy(self, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor | None:
        """Of each of these users, the share of its own examples that a model answers right; none if nobody can tell."""
        ...  # (users,) float64

    def seconds(self, user: int) -> np.ndarray | None:
        """How long each of the user's examples lasts, for batches by seconds; none if that has no meaning."""
        ...

    def users_at_once(self, local: LocalTraining) -> int:
        """How many users `fast_updates` should get at a time; 0 if it has no short cut for these settings."""
        ...

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        """The updates of many users at once, if the task knows an exact short cut for these settings."""
        ...


class BasicTask:
    """The base of a task of your own: it has every member of `Task` that most tasks need not write.

    A run begins with the fresh model, no data are left out, and there is no short cut.

    Examples:
        >>> import numpy as np, torch
        >>> from confide.federated.task import BasicTask
        >>> class Means(BasicTask):
        ...     name, metric = "means", "distance"
        ...     examples = np.full(30, 5)  # 30 users with 5 numbers each
        ...     def initial_parameters(self):
        ...         return {"mean": torch.zeros(1)}
        ...     def batch(self, user, examples, draw):
        ...         return (torch.full((5,), user / 30),)
        ...     def loss(self, parameters, batch):
        ...         return (parameters["mean"] - batch[0]).square().mean()
        ...     def evaluate(self, parameters):
        ...         return {"distance": float((parameters["mean"] - 0.5).abs())}
        >>> from confide.recipe import load
        >>> from confide.runs.simulation import simulate
        >>> recipe = load("convex/digits", ["run.steps=5", "sampling.cohort=10"])
        >>> loop, state = simulate(recipe, Means())
        >>> sorted(loop.layout.views(loop.final.model(state)))
        ['mean']
    """

    left_out: Mapping[str, int] = {}
    on_gpu = True
    """Whether `loss` can be computed where its batch and the parameters are; not if it runs a frozen encoder."""
    better: Literal["higher", "lower"] | None = None
    at_most: int | None = None
    """How many users there can be, where that is known before their data are made ready."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        return {}

    @property
    def scalings(self) -> Sequence[Scaling]:
        return ()

    def starting_parameters(self: Task) -> dict[str, Tensor]:
        return self.initial_parameters()

    @property
    def begins_elsewhere(self: Task) -> bool:
        """Tell whether a task has its own `starting_parameters`: nobody knows what data these were made from."""
        return self.starting_parameters != MethodType(BasicTask.starting_parameters, self)

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items] | None:
        return None

    def own_accuracy(self, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor | None:
        return None

    def seconds(self, user: int) -> np.ndarray | None:
        return None

    def users_at_once(self, local: LocalTraining) -> int:
        return 0

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return None


WIDE = 8192


class TaskSection(Section, ABC):
    """The base of a task's section in a recipe."""

    @abstractmethod
    def make(self, seed: int) -> Task:
        """The task that the section describes."""

    @property
    def population(self) -> int | None:
        """How many users there are, where the section says so; none where only the data tell."""
        return None

    @property
    def unit(self) -> Unit:
        """What one user is."""
        return Unit(name="owner of data, as the task's own code has it", person=False, origin="found")

    @property
    def size(self) -> int:
        """About how many numbers its model and its made-up data have: what a client looks at before it makes them.

        What lies on disk (a data set, a frozen encoder) does not count; of an encoder that is not loaded, a vector has
        `WIDE` numbers.
        """
        return 0

    def held_out(self, percent: int) -> dict[str, Any] | None:
        """What to change, to choose settings by: so many percent of the training people (or examples) are evaluated.

        They do not train then, and nobody of the test takes part. Keys are those of the section, with dots; none where
        the task cannot do it.
        """
        return None
