"""Which model a run leaves behind: the last iterate, the mean of the last few, or a uniformly random one (NORM)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from confide.federated.state import State
from confide.randomness import generator
from confide.settings import Section


class Final(Section):
    """Which model a run leaves behind."""

    kind: Literal["last", "mean", "random"] = Field(
        "last", description="last iterate, mean of the last `count`, or a uniformly random iterate (NORM)"
    )
    count: int = Field(1, ge=1, description="for mean: over how many last iterates")


class FinalModel:
    """Keeps what the final model needs of the iterates, in the run's state."""

    def __init__(self, settings: Final, steps: int, seed: int) -> None:
        self.settings, self.steps = settings, steps
        self.chosen = int(generator(seed, "final").integers(steps)) if settings.kind == "random" else -1

    def keep(self, state: State) -> None:
        """Keep iterate w_t, before the step that leaves it, if the final model needs it."""
        if state.step == self.chosen:
            state.final["chosen"] = state.parameters.clone()
        if self.settings.kind == "mean":
            if "sum" not in state.final:
                state.final["sum"] = torch.zeros_like(state.parameters)
            if state.step > self.steps - self.settings.count:
                state.final["sum"].add_(state.parameters)

    def model(self, state: State) -> Tensor:
        """The final model, once the last step is made; of a run that had to end before it, the last iterate."""
        if state.step < self.steps:
            return state.parameters  # (parameters,)
        if self.settings.kind == "mean":
            # The last iterate is not yet in the sum: an iterate is kept when the next step begins.
            return (state.final["sum"] + state.parameters) / self.settings.count
        return state.final["chosen"] if self.settings.kind == "random" else state.parameters
