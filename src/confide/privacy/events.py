"""What a release was, in the words that an accountant understands.

An event is everything that decides the privacy loss of one central step: who could have been in the sum, how likely,
and how much noise there was for the largest possible contribution. It is written into the ledger as JSON and read
back from there, so what is accounted for is what was written before the release.

Adjacency. Poisson sampling and full participation are accounted for when a user is added or removed. For a cohort of
fixed size that notion does not apply (the size would change); there a user's data are replaced by another's, and
the sum can move by twice the bound. The event carries its adjacency, so that nobody compares the two by mistake.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from confide.errors import UserError

Sampler = Literal["poisson", "fixed", "everyone"]
ADD_OR_REMOVE = "add-or-remove one user"
REPLACE = "replace one user"


@dataclass(frozen=True)
class Event:
    """One noisy sum over a sampled cohort. A noise multiplier of 0 is a release without any guarantee."""

    sampler: Sampler
    rate: float
    cohort: float
    population: int
    noise_multiplier: float
    """z: the noise's standard deviation divided by the largest norm that one user adds to the sum."""
    sensitivity: float | None
    """That largest norm, in the model's units; none where nothing bounds it."""

    @property
    def adjacency(self) -> str:
        return REPLACE if self.sampler == "fixed" else ADD_OR_REMOVE

    @property
    def private(self) -> bool:
        return self.noise_multiplier > 0 and self.sensitivity is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> Event:
        """Read an event back; anything that is not exactly an event is refused."""
        try:
            event = Event(**document)  # type: ignore[arg-type]
            numbers = (event.rate, event.cohort, event.population, event.noise_multiplier)
            known = event.sampler in ("poisson", "fixed", "everyone") and all(map(_number, numbers))
            bounded = event.sensitivity is None or (_number(event.sensitivity) and event.sensitivity > 0)
            ranges = 0 < event.rate <= 1 and 0 < event.cohort <= event.population and event.noise_multiplier >= 0
            if known and bounded and ranges:
                return event
        except TypeError:
            pass
        raise UserError(f"event {document!r} is not one that the accountant knows; it is refused")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
