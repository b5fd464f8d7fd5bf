"""The engine for distributed trust: rounds of secure aggregation, of which the server sees the noisy sum alone.

The clients' noise is in what they send, so the loop writes the ledger's line before a round begins, for every attempt.
A round is abandoned, unopened, when fewer than the threshold are left at any of its four exchanges (see `secure`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from confide.deploy.parcels import Parcel
from confide.deploy.remote import Remote
from confide.deploy.rounds import Call
from confide.engines.engine import Abandoned, Traits
from confide.federated.bounding import ROUNDING
from confide.federated.cohort import Tally
from confide.federated.parameters import norm
from confide.privacy.gaussian import Address, System, grid
from confide.privacy.mechanisms.distributed import top_up
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import share_scale
from confide.privacy.trust.secure import KEYS, MASKED, SHARES, UNMASK, Opening, longest, ring_for, threshold

_ENDS = {KEYS: 0.15, SHARES: 0.3, MASKED: 0.85, UNMASK: 1.0}
"""When an exchange ends, as a share of the deadline: whoever is silent in one leaves time for the next."""


class Masked(Remote):
    """As `Remote`, but nobody's update is ever in sight."""

    plan: Plan
    added: Callable[[float, int, int], float] = staticmethod(top_up)
    """The deviation of the server's own noise; an audit that breaks it on purpose puts another here."""

    @property
    def traits(self) -> Traits:
        return Traits(repeatable=False, noisy=True, tries=self.terms.tries)

    def least(self, cohort: int) -> int:
        return threshold(cohort, self.terms.needed(cohort)) if cohort else 0

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        if len(cohort) == 0:  # a release of noise alone
            self._top_up(total.zero_(), share_scale(self.plan, self.rule.sensitivity, 1), 1, 0)
            return Tally()
        call, began = Call.new(self.run, self.door.identity, step), time.monotonic()
        self.look()
        present, least = [user for user in map(int, cohort) if user in self.door.users], self.least(len(cohort))
        facts = call.facts() | {"population": len(self.books.weights)}

        def ask(kind: str, users: Sequence[int], own: Mapping[int, dict[str, Any]], model: bool = False) -> Any:
            _enough(step, kind, len(users), len(cohort), least)
            arrays = {"model": central.detach().numpy()} if model else {}
            parcels = {u: Parcel(facts | {"user": u} | own.get(u, {}), arrays) for u in users}
            for user, parcel in self.exchange(kind, parcels, began + _ENDS[kind] * self.terms.deadline):
                if parcel.facts.get("nonce") == call.nonce and parcel.facts.get("user") == user:
                    yield user, parcel

        keys = {u: p.facts["public"] for u, p in ask(KEYS, present, {}) if _keys(p.facts.get("public"))}
        users = sorted(keys)
        told: dict[str, Any] = {
            "users": users,
            "masking": [keys[u][0] for u in users],
            "sealing": [keys[u][1] for u in users],
        }
        told["least"] = least
        boxes = {
            u: p.facts["sealed"]
            for u, p in ask(SHARES, users, dict.fromkeys(users, told))
            if _boxes(p.facts.get("sealed"), len(users))
        }
        dealt = sorted(boxes)
        own = {u: {"users": dealt, "sealed": [boxes[v][users.index(u)] for v in dealt]} for u in dealt}
        scale = share_scale(self.plan, self.rule.sensitivity, least)
        weight = float(self.books.weights.max())
        ring = ring_for(self.rule.sensitivity, weight, scale, len(users), total.numel(), ROUNDING)
        opening = Opening(ring, call.nonce, step, {u: keys[u][0] for u in dealt}, least)
        tally = Tally()
        for user, parcel in ask(MASKED, dealt, own, True):
            if opening.take(user, parcel.arrays.get("masked")):
                tally.add(Tally(users=1))
        left = sorted(opening.arrived)
        given = 0
        for _, parcel in ask(UNMASK, left, {u: {"arrived": left} for u in left}):
            given += opening.take_shares(parcel.facts.get("shares"))
        _enough(step, "opening", given, len(cohort), least)
        self._open(opening, total, longest(ring, self.rule.sensitivity, weight, scale, len(left)), step)
        self._top_up(total, scale, least, len(left))
        if len(left) < len(cohort):
            self.say(f"step {step + 1}: cohort {len(cohort)}, {len(left)} in the sum, noise made for {least}")
        return tally

    def _top_up(self, total: Tensor, scale: float, least: int, arrived: int) -> None:
        """Add the server's own noise. It is never drawn again, whatever the recipe says: no round can be repeated.

        Rounding must not tell how many answered either: every release is on the grid of the stated deviation.
        """
        stated = scale * math.sqrt(least)
        deviation = self.added(scale, least, arrived)
        if deviation > 0:  # always, but in an audit of what happens without
            System(lattice=grid(stated)).add(total, deviation, Address(0))

    def _open(self, opening: Opening, total: Tensor, limit: float, step: int) -> None:
        try:
            found = opening.open()
        except ValueError as error:
            raise Abandoned(
                f"step {step + 1}: shares of the masks do not fit ({error}); nothing was released"
            ) from None
        length = norm(found)
        if not length <= limit:
            total.zero_()
            raise Abandoned(
                f"step {step + 1}: the sum is longer ({length:.4g}) than honest clients can make it ({limit:.4g}); it "
                "was thrown away"
            )
        total.copy_(found)


def _enough(step: int, what: str, here: int, cohort: int, least: int) -> None:
    if here < least:
        raise Abandoned(
            f"step {step + 1}: {here} of {cohort} users are left at {what!r} and {least} are needed; nothing was opened"
        )


def _keys(value: Any) -> bool:
    return isinstance(value, list) and [len(v) for v in value if isinstance(v, bytes)] == [32, 32]


def _boxes(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(v, bytes) for v in value)
