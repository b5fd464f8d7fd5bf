"""The central step: the optimiser moves the model along the noisy aggregate (PFL-ASR Algorithm 1, line 16)."""

from __future__ import annotations

from torch import Tensor

from confide.errors import UserError
from confide.federated import optimisers
from confide.federated.optimisers import Optimiser
from confide.federated.parameters import Layout, all_finite
from confide.federated.state import State


class Diverged(UserError):
    """The central model is no longer finite."""


class CentralStep:
    """A central optimiser over the tensors of one model."""

    def __init__(self, settings: Optimiser, layout: Layout) -> None:
        self.settings, self.layout = settings, layout

    def start(self, parameters: Tensor) -> dict[str, Tensor]:
        """The optimiser's own state before the first step."""
        return optimisers.init(self.settings, self.layout.views(parameters))

    def move(self, state: State, gradient: Tensor) -> None:
        """Move the model in place. Raises `Diverged` if a number is beyond what the model's type can hold."""
        try:
            weights, direction = self.layout.views(state.parameters), self.layout.views(gradient)
            optimisers.update(self.settings, weights, direction, state.optimiser, state.step)
            finite = all_finite(state.parameters)
        except (RuntimeError, OverflowError) as error:
            if "overflow" not in str(error):
                raise
            finite = False
        if not finite:
            raise Diverged(
                f"the central model is no longer finite after step {state.step + 1}; the last checkpoint was kept. "
                "Lower central.learning_rate or local.learning_rate, or bound the updates"
            )
