"""The registry of mechanisms, and the recipe's privacy section, which is made of their settings.

To add a mechanism: a file with its class (and its settings, if it has any), its name in `MECHANISMS`, and its settings
among the bases of `Privacy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from confide.errors import UserError
from confide.privacy.mechanisms.banded import Banded, BandedSettings
from confide.privacy.mechanisms.base import Asked, CommonSettings, Mechanism, Occasion, Setting
from confide.privacy.mechanisms.car import CarNoise
from confide.privacy.mechanisms.distributed import Distributed
from confide.privacy.mechanisms.gaussian import Gaussian
from confide.privacy.mechanisms.local import Local
from confide.privacy.mechanisms.none import Nothing
from confide.privacy.mechanisms.partial import Partial, PartialSettings
from confide.privacy.mechanisms.realised import Realised, RealisedSettings
from confide.settings import imported

__all__ = ["MECHANISMS", "PYTHON", "Asked", "Mechanism", "Occasion", "Privacy", "Setting", "mechanism_of", "refusals"]

# The first that takes a recipe is meant. CAR's is chosen by the rule of the bounds, whatever the privacy section says.
MECHANISMS: tuple[type[Mechanism], ...] = (CarNoise, Distributed, Local, Gaussian, Banded, Realised, Partial, Nothing)
PYTHON = "python"
_SUMMARIES = {kind.name: kind.summary for kind in MECHANISMS if kind is not CarNoise}
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[(*_SUMMARIES, PYTHON)]


class Privacy(PartialSettings, RealisedSettings, BandedSettings):
    """The noise and the guarantee that it buys."""

    mechanism: Name = Field(
        "none",
        description="; ".join(f"{name}: {summary}" for name, summary in _SUMMARIES.items())
        + "; python: a class of yours, named by `factory`",
    )


def mechanism_of(privacy: CommonSettings, follows: str | None = None) -> type[Mechanism]:
    """The class that a privacy section means, where the bound follows this from step to step (quantile, car)."""
    for kind in MECHANISMS:
        if kind.takes(privacy, follows):
            return kind
    found = imported(privacy.factory, "privacy.factory") if privacy.factory else None
    if not (isinstance(found, type) and issubclass(found, Mechanism)):
        raise UserError(
            f"privacy.factory={privacy.factory}: expected module:Class, a subclass of "
            "confide.privacy.mechanisms.Mechanism"
        )
    return found


def refusals(asked: Asked) -> list[str]:
    """Everything that the mechanism of a recipe refuses, and keys that belong to another one."""
    privacy = asked.privacy
    if (privacy.mechanism == PYTHON) != (privacy.factory is not None):
        return ["privacy.factory: required by mechanism python, module:Class, and only used by it"]
    kind = mechanism_of(privacy, asked.follows)
    problems = [*asked.sampling.refusals, *kind.refusals(asked), *kind.metrics_refusals(asked)]
    for other in MECHANISMS:
        given = [key for key in other.keys if key not in kind.keys and getattr(privacy, key, None)]
        problems += [f"privacy.{key}: only used with privacy.mechanism: {other.name}" for key in given]
    if privacy.options and privacy.mechanism != PYTHON:
        problems.append("privacy.options: only used with privacy.mechanism: python")
    return problems
