"""Mechanisms that are broken on purpose, inside an audit: a smoke alarm is tested with smoke.

Each is broken where noise is drawn or where a canary is bounded, after the plan has stated its claim, so that the
claim, the ledger and everything around it are those of the honest run. Nothing outside an audit imports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from confide.privacy.gaussian import Address, Seeded, Source
from confide.run import Loop

Break = Literal["no-noise", "tenth-noise", "half-noise", "same-noise", "unbounded", "cohort-variance"]
BREAKS: dict[Break, str] = {
    "no-noise": "no noise at all",
    "tenth-noise": "a tenth of the noise",
    "half-noise": "half of the noise",
    "same-noise": "the same noise at every step",
    "unbounded": "updates that are not bounded",
    "cohort-variance": "noise that grows with the cohort",
}
_SHARES: dict[Break, float] = {"no-noise": 0.0, "tenth-noise": 0.1, "half-noise": 0.5}


@dataclass(frozen=True)
class BrokenSource(Source):
    """Seeded noise, but a share of it only, or that of the first step at every step."""

    seeded: Seeded
    share: Callable[[], float]
    same: bool = False
    repeatable: ClassVar[bool] = True

    def _draw(self, out: Tensor, scale: float, at: Address, overwrite: bool) -> float:
        share = self.share()
        if share == 0:
            if overwrite:
                out.zero_()
            return 0.0
        place = replace(at, step=0) if self.same else at
        if not overwrite:
            return self.seeded.add(out, share * scale, place)
        squares = self.seeded.fill(out, place)
        out.mul_(share * scale)
        return squares * (share * scale) ** 2


def share_of(kind: Break) -> float:
    """How much of the noise is left, where that is the same in every step."""
    return _SHARES.get(kind, 1.0)


def break_loop(loop: Loop, arrived: Callable[[], int], kind: Break) -> Loop:
    """The same loop, broken in this way. What it claims does not change. `unbounded` is broken where canaries are made.

    `arrived` says how many users' updates are in the sum. Noise that grows with them is what distributed trust once
    had: m shares of the noise, each made for t = half of the expected cohort and one more, have m / t of its variance.
    """
    least = loop.plan.cohort_size // 2 + 1
    follows = kind == "cohort-variance"
    source = BrokenSource(
        Seeded(loop.plan.seed),
        (lambda: math.sqrt(arrived() / least)) if follows else (lambda: share_of(kind)),
        kind == "same-noise",
    )
    loop.plan.mechanism.setting = replace(loop.plan.mechanism.setting, source=source)
    return replace(loop, plan=replace(loop.plan, source=source))
