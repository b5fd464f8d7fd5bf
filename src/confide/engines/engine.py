"""What the loop asks of an engine, and the plain engine that trains the cohort in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from confide.federated.cohort import PartTrainer, Tally, parts


@dataclass(frozen=True)
class Traits:
    """What the loop has to know of an engine."""

    repeatable: bool = True
    """Whether a step that is made again gives the same sum, bit for bit. If not, each time is a release of its own."""
    noisy: bool = False
    """Whether users add their noise themselves. What they send is then the release, and must be paid for before."""
    tries: int = 1
    """How often a step is tried when too few users answer."""


class Engine(Protocol):
    @property
    def traits(self) -> Traits: ...

    def gather(self, cohort: np.ndarray, step: int) -> None:
        """Wait until a cohort can be asked, before its step costs anything; raise `Abandoned` if it cannot."""
        ...

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        """Write sum_k w_k bound(delta_k) over the cohort into `total`, with these bounds if they adapt."""
        ...

    def close(self) -> None: ...


class Abandoned(Exception):
    """Too few users answered; nothing was released."""


class InProcess:
    """Trains one part after the other in this process."""

    def __init__(self, trainer: PartTrainer) -> None:
        self.traits = Traits()
        self.trainer = trainer
        self._part: Tensor | None = None

    def gather(self, cohort: np.ndarray, step: int) -> None:
        pass

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        total.zero_()
        tally = Tally()
        for place, users in enumerate(parts(cohort, self.trainer.part_size)):
            if place == 0 or self.trainer.one_by_one:
                tally.add(self.trainer.add_part(central, users, step, total, bounds))
                continue
            # A part is summed on its own first: the order of additions must not depend on who trains it.
            if self._part is None:
                self._part = torch.empty_like(total)
            tally.add(self.trainer.add_part(central, users, step, self._part.zero_(), bounds))
            total.add_(self._part)
        return tally

    def close(self) -> None:
        pass


class OnDevice(InProcess):
    """Trains in this process on a GPU: the central model goes there, and only the sum comes back.

    Who takes part is drawn, noise is added and the central step is made in main memory, as everywhere: nothing that
    privacy rests on depends on the GPU but the bounded updates, whose norms are measured in double precision.
    """

    def __init__(self, trainer: PartTrainer, like: Tensor) -> None:
        super().__init__(trainer)
        # A GPU adds in an order of its own, so a step that is made again is a release of its own.
        self.traits = Traits(repeatable=trainer.device.type == "cpu")
        self._central, self._total = (torch.empty_like(like, device=trainer.device) for _ in range(2))

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        tally = super().train(self._central.copy_(central), cohort, step, self._total, bounds)
        total.copy_(self._total)
        return tally
