"""`partial`: the noise of `gaussian`, value for value, but on some tensors only (PFL-ASR Figures 15 and 16).

It shows what noise does to a kind of tensor. Its event has a noise multiplier of 0, so nothing can take it for a
guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from confide.errors import UserError
from confide.privacy.events import Event
from confide.privacy.mechanisms.base import Asked, CommonSettings, Mechanism, Occasion, Setting
from confide.privacy.mechanisms.none import NOTHING_TO_EXTRAPOLATE

Spans = tuple[tuple[int, int], ...]
"""Stretches of the flat vector, each from its first coordinate to the one after its last."""


class PartialSettings(CommonSettings):
    tensors: tuple[str, ...] = Field((), description="for partial: patterns of names of the tensors that get noise")
    all_but: bool = Field(False, description="for partial: noise on all tensors but these")
    elsewhere: float = Field(
        0.0, ge=0, lt=1, description="for partial: the deviation on the other tensors, as a share (Figure 16 has 0.5)"
    )


class Partial(Mechanism):
    name = "partial"
    summary = "noise on `tensors` only, for analysis, without any guarantee"
    keys = ("tensors", "all_but", "elsewhere")
    guaranteed: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        if not isinstance(setting.privacy, PartialSettings):
            raise TypeError("the partial mechanism needs its own settings")
        self.elsewhere = setting.privacy.elsewhere
        self.spans = spans_of(setting.privacy, setting.names, setting.sizes)
        super().__init__(setting)

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        privacy, problems = asked.privacy, cls.noise_refusals(asked)
        if isinstance(privacy, PartialSettings) and not privacy.tensors:
            problems.append(
                "privacy.tensors: required with mechanism partial, patterns of names, for example ['*.mlp.*']"
            )
        for name in ("target_epsilon", "delta"):
            if getattr(privacy, name) is not None:
                problems.append(
                    f"privacy.{name}: noise on a part of the tensors gives no guarantee (privacy.mechanism: partial); "
                    "leave it out, and give noise_multiplier or noise_scale"
                )
        problems += cls.trust_refusals(asked)
        if privacy.source == "system":
            problems.append(
                "privacy.source=system: cannot be combined with privacy.mechanism: partial, an analysis that has no "
                "guarantee to release with"
            )
        if asked.sampling.kind.startswith("cyclic"):
            problems.append(
                f"sampling.kind={asked.sampling.kind}: cannot be combined with privacy.mechanism: partial; "
                "use poisson or fixed"
            )
        if asked.follows is not None:
            problems.append("bounding.adaptive: cannot be combined with privacy.mechanism: partial; leave it out")
        return problems

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        return ["privacy.mechanism=partial is an analysis without a guarantee; it is not for a deployment"]

    def charge(self, bare: Event, z: float) -> Event:
        return bare

    def release(self, total: Tensor, occasion: Occasion) -> float | None:
        """Draw all of the noise, so that runs with noise on other tensors can be compared value for value."""
        if occasion.event.sensitivity is None:
            return None
        fresh = torch.zeros_like(total)
        self.add_independent(fresh, self.multiplier * occasion.event.sensitivity, occasion)
        end = 0
        for start, stop in (*self.spans, (len(fresh), len(fresh))):
            fresh[end:start].mul_(self.elsewhere)
            end = stop
        total.add_(fresh)
        return float(torch.linalg.vector_norm(fresh))

    def noisy_sizes(self, sizes: Sequence[int]) -> list[float]:
        ends = np.cumsum(sizes).tolist()
        inside = [
            sum(max(0, min(end, stop) - max(end - size, start)) for start, stop in self.spans)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return [noisy + self.elsewhere**2 * (size - noisy) for noisy, size in zip(inside, sizes, strict=True)]

    def variance(self, event: Event) -> float:
        return 0.0 if event.sensitivity is None else (self.multiplier * event.sensitivity) ** 2

    @classmethod
    def words(cls, privacy: Any) -> str:
        which, rest = ", ".join(privacy.tensors), privacy.elsewhere
        return (
            f"Noise was added {'' if rest else 'only '}to {'all tensors but ' if privacy.all_but else ''}{which}"
            f"{f', and {rest:g} times as much to the others' if rest else ''}, to see what it does there: this run "
            "gives no privacy guarantee."
        )

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return NOTHING_TO_EXTRAPOLATE


def spans_of(settings: PartialSettings, names: Sequence[str], sizes: Sequence[int]) -> Spans:
    """Where the noise goes, in the flat vector of all tensors."""
    for pattern in settings.tensors:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"privacy.tensors: no tensor of the model matches {pattern!r}; there are {len(names)}, "
                f"for example {', '.join(names[:: max(1, len(names) // 6)])}"
            )
    spans = tuple(
        (end - size, end)
        for name, size, end in zip(names, sizes, np.cumsum(sizes).tolist(), strict=True)
        if any(fnmatchcase(name, pattern) for pattern in settings.tensors) != settings.all_but
    )
    if not spans:
        raise UserError("privacy.all_but: the patterns of privacy.tensors match every tensor; none is left for noise")
    return spans
