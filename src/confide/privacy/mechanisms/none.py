"""`none`: no noise, and no guarantee."""

from __future__ import annotations

from typing import Any

from confide.privacy.events import Event
from confide.privacy.mechanisms.base import Asked, Mechanism

NOTHING_TO_EXTRAPOLATE = "Without a guarantee there is nothing to extrapolate, whatever the number of users."


class Nothing(Mechanism):
    name = "none"
    summary = "no noise, and no guarantee"
    guaranteed = False

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        given = [*asked.privacy.given, *(["trust"] if asked.privacy.trust == "local" else [])]
        problems = [f"privacy.{n}: has no meaning with privacy.mechanism=none; use mechanism: gaussian" for n in given]
        return problems or cls.trust_refusals(asked)

    def calibrate(self, bare: Event) -> float:
        return 0.0

    @classmethod
    def words(cls, privacy: Any) -> str:
        return "No noise was added: this run gives no privacy guarantee."

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return NOTHING_TO_EXTRAPOLATE
