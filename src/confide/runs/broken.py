"""Mechanisms that are broken on purpose, inside an audit: a smoke alarm is tested with smoke.

Each is broken where noise is drawn or where a canary is bounded, after the plan has stated its claim, so that the
claim, the ledger and everything around it are those of the honest run. Nothing outside an audit imports this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from confide.privacy.gaussian import Address, Seeded, Source
from confide.run import Loop
from confide.runs.canaries import CanaryTrainer

Break = Literal["no-noise", "tenth-noise", "half-noise", "same-noise", "unbounded"]
BREAKS: dict[Break, str] = {
    "no-noise": "no noise at all",
    "tenth-noise": "a tenth of the noise",
    "half-noise": "half of the noise",
    "same-noise": "the same noise at every step",
    "unbounded": "updates that are not bounded",
}
_SHARES: dict[Break, float] = {"no-noise": 0.0, "tenth-noise": 0.1, "half-noise": 0.5}


@dataclass(frozen=True)
class BrokenSource(Source):
    """Seeded noise, but a share of it only, or that of the first step at every step."""

    seeded: Seeded
    share: float
    same: bool
    repeatable: ClassVar[bool] = True

    def _draw(self, out: Tensor, scale: float, at: Address, overwrite: bool) -> float:
        if self.share == 0:
            if overwrite:
                out.zero_()
            return 0.0
        place = replace(at, step=0) if self.same else at
        if not overwrite:
            return self.seeded.add(out, self.share * scale, place)
        squares = self.seeded.fill(out, place)
        out.mul_(self.share * scale)
        return squares * (self.share * scale) ** 2


def break_loop(loop: Loop, trainer: CanaryTrainer, kind: Break) -> Loop:
    """The same loop, broken in this way. What it claims does not change."""
    if kind == "unbounded":
        trainer.unbounded = True
        return loop
    source = BrokenSource(Seeded(loop.plan.seed), _SHARES.get(kind, 1.0), kind == "same-noise")
    loop.plan.mechanism.setting = replace(loop.plan.mechanism.setting, source=source)
    return replace(loop, plan=replace(loop.plan, source=source))
