"""Who takes part in a central step. The sampler that runs is the one that is accounted for."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from confide.privacy.events import Sampler
from confide.randomness import generator


class Sampling(BaseModel):
    """How the cohort of a central step is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["poisson", "fixed"] = Field(
        "poisson",
        description="poisson: every user independently; fixed: exactly `cohort` users without replacement",
    )
    cohort: int = Field(gt=0, description="S, the expected (poisson) or exact (fixed) number of users in a step")


def sampler_of(settings: Sampling, population: int) -> Sampler:
    """Full participation is the plain Gaussian mechanism, whichever way it was asked for."""
    return "everyone" if settings.cohort == population else settings.kind


def draw_cohort(sampler: Sampler, cohort: int, population: int, seed: int, step: int) -> np.ndarray:
    """Indices of the cohort's users in rising order."""
    if sampler == "everyone":
        return np.arange(population)
    draw = generator(seed, "cohort", step)
    if sampler == "poisson":
        return np.flatnonzero(draw.random(population) < cohort / population)
    return np.sort(draw.choice(population, size=cohort, replace=False))
