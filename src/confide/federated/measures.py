"""What each user adds to the figures that a step releases beside the update: numbers from -1/2 to +1/2.

A figure is a mean over users of something that lies between 0 and a stated bound B. A user adds value / B - 1/2, with
the value cut to 0 and B, so one user moves the sum by at most 1/2: as the votes of an adaptive bound do (Andrew et al.
2021), and the plan releases both in one vector. A user whose loss or update is not finite adds 0 to each.

| figure   | a user's value                                                    | B      |
|----------|-------------------------------------------------------------------|--------|
| loss     | the loss of the central model on its data, before it trains       | stated |
| norm     | the norm of its update, before it is bounded                      | stated |
| bounded  | 1 if its update was shortened, else 0                             | 1      |
| accuracy | the share of its examples that the central model answers right    | 1      |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confide.errors import UserError
from confide.federated.task import BasicTask, Task

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Measures:
    """Which figures a step releases, and the bound of each.

    Examples:
        >>> import torch
        >>> from confide.federated.measures import Measures
        >>> asked = Measures({"loss": 4.0, "bounded": 1.0})
        >>> known = {"loss": torch.tensor([1.0, 9.0]), "bounded": torch.tensor([0.0, 1.0])}
        >>> asked.values(known, torch.tensor([True, True])).tolist()  # a row for each user
        [[-0.25, -0.5], [0.5, 0.5]]
        >>> asked.in_units(torch.tensor([0.625, 0.5]))  # from the shares that a plan releases
        {'loss': 2.5, 'bounded': 0.5}
    """

    bounds: Mapping[str, float] = field(default_factory=dict)

    def values(self, known: Mapping[str, Tensor], finite: Tensor) -> Tensor:
        """What each user adds; 0 where it sends nothing, or nobody knows."""  # known (users,) -> (users, figures)
        columns = [
            torch.where(finite, _share(known[name], bound) - 0.5, 0.0) if name in known else torch.zeros(len(finite))
            for name, bound in self.bounds.items()
        ]
        return torch.stack([column.double() for column in columns], dim=1)

    def in_units(self, shares: Tensor) -> dict[str, float]:
        """The figures, from what the plan released: shares of the bounds."""  # (figures,)
        return {name: bound * share for (name, bound), share in zip(self.bounds.items(), shares.tolist(), strict=True)}

    def check(self, task: Task) -> None:
        """Refuse a figure that the task cannot give."""
        plain = getattr(task.own_accuracy, "__func__", None) is BasicTask.own_accuracy
        if ACCURACY in self.bounds and plain:
            raise UserError(
                f"privacy.metrics.accuracy: the task {task.name} cannot tell how many of a user's own examples a model "
                "answers right; leave it out, or give the task a method own_accuracy"
            )


def _share(values: Tensor, bound: float) -> Tensor:
    return values.double().nan_to_num().clamp(min=0.0, max=bound) / bound
