"""Everything that the next central step depends on: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class State:
    """The state of a run between two central steps, and the time that was spent to get here."""

    step: int
    parameters: Tensor  # (parameters,) the central model
    optimiser: dict[str, Tensor]
    final: dict[str, Tensor] = field(default_factory=dict)
    """What the final model is made of: a sum of the last iterates, or the chosen one."""
    noise: dict[str, Tensor] = field(default_factory=dict)
    """What the mechanism remembers where its noise is correlated over steps."""
    bounds: Tensor | None = None
    """The bounds of the users' updates, where they follow a quantile."""
    seconds: float = 0.0
    recent: list[dict[str, float]] = field(default_factory=list)
    """The evaluations of the last steps, whose mean the summary reports."""
    clients: dict[str, Tensor] = field(default_factory=dict)
    """What each user remembers from round to round under CAR's adaptive bounds."""
    pending: Tensor | None = None
    """The cohort of a step that too few users answered, to be asked again: a new draw is not accounted for."""
