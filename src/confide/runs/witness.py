"""What an auditor sees of each step: the release, less what it is allowed to know.

The auditor made the canaries, so it can work out what they sent. What an engine hands over less that is the other
users' share, which a guarantee lets the adversary know, whichever processes trained it. Where users add noise
themselves (a deployment with distributed trust), the sum is never seen without it; only canaries take part there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from confide.engines.engine import Engine, Traits
from confide.federated.cohort import Tally
from confide.federated.state import State
from confide.privacy.noise_check import chance_of_following
from confide.run import Loop
from confide.runs.canaries import CanaryTrainer


class Witness:
    """An engine that remembers the last step: what others sent, what canaries sent, and how many answered."""

    def __init__(self, engine: Engine, trainer: CanaryTrainer, like: Tensor) -> None:
        self.engine, self.trainer = engine, trainer
        self.known, self.planted = torch.zeros_like(like), torch.zeros_like(like)
        self.arrived, self.complete = 0, True

    @property
    def traits(self) -> Traits:
        return self.engine.traits

    def gather(self, cohort: np.ndarray, step: int) -> None:
        self.engine.gather(cohort, step)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        tally = self.engine.train(central, cohort, step, total, bounds)
        self.trainer.add_canaries(cohort, step, self.planted.zero_(), bounds)
        if not self.traits.noisy:
            torch.sub(total, self.planted, out=self.known)
        self.arrived, self.complete = tally.users, tally.users == len(cohort)
        return tally

    def close(self) -> None:
        self.engine.close()


@dataclass
class Noise:
    """The noise of every step of an audited run, as a number: what `privacy/noise_check.py` asks for."""

    squares: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @staticmethod
    def is_checked(loop: Loop) -> bool:
        """Whether the claim rests on secret cohorts, and the noise of a step is stated to be independent and alike."""
        privacy = loop.recipe.privacy
        return privacy.mechanism == "gaussian" and privacy.trust != "local" and loop.plan.sampler == "poisson"

    def take(self, noise: Tensor, variance: float, arrived: int) -> None:
        self.squares.append(float(noise.double().square().sum()) / variance)
        self.sizes.append(arrived)

    def chance(self, dimension: int) -> float | None:
        return chance_of_following(self.squares, self.sizes, dimension)


def stated_variance(loop: Loop, state: State) -> float:
    """Of the noise on one coordinate in the step that is next."""
    event = loop.plan.mechanism.event_at(state.step, loop.bounds.rule(state).sensitivity)
    return loop.plan.mechanism.variance(event)
