"""Noise that a client adds itself, and the client's own record of it (PFL-ASR Algorithm 1, line 13; CAR section 3.4).

    local         w_k (u_k + N(0, (z C)^2))          what the server sees of a user is private by itself
    distributed   w_k u_k + N(0, (z C w)^2 / m)      m such terms make the noise z C w of the sum, w the largest weight;
                                                     the server tops it up to the same variance in every round

The scale comes from the client's own plan, which was held against its policy. The client keeps a ledger of its own for
each of its users, written before anything is sent, and stops answering when the releases of the whole run or the
epsilon of its lifetime are spent: a server that asks twice cannot get more. For distributed trust a client alone hides
nothing; m is the number of answers below which nobody helps to unmask the sum, so fewer noises than that are never
seen. What a sum costs whoever is in it is a Gaussian of multiplier z, without amplification: the server knows who is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.privacy.accountant import epsilon, shown
from confide.privacy.events import Event
from confide.privacy.gaussian import Address
from confide.privacy.ledger import FILE, Ledger
from confide.privacy.plan import Plan
from confide.settings import UNSAID, Unit

TAIL = 10.0
"""A Gaussian vector of d coordinates is longer than (sqrt(d) + 10) deviations with probability below 2e-22."""


@dataclass(frozen=True)
class OwnTerms:
    """What this client's owner has decided: where the ledger lies (none: in memory), and what all answers may cost.

    `digest` identifies the recipe. `begins_elsewhere` says that the run begins with a model that was made before it,
    whose data no ledger covers.
    """

    state: Path | None
    epsilon: float
    delta: float
    digest: str
    begins_elsewhere: bool
    unit: Unit = UNSAID
    """What one user is, as this client's copy of the recipe says."""


class OwnNoise:
    """One client's noise in one run, and the ledger of each of its users."""

    def __init__(self, plan: Plan, event: Event, terms: OwnTerms, users: Sequence[int]) -> None:
        """`event` is what one answer costs the user who gives it."""
        self.plan, self.event, self.terms, self.users = plan, event, terms, list(users)
        self._books: dict[int, Ledger] = {}

    def add_local(self, update: Tensor, weight: float, user: int, step: int) -> None:
        """Add w_k N(0, (z C)^2) to w_k u_k, with the line on this client's disk before."""
        attempt, bound = self.charge(user, step), self.plan.mechanism.setting.bound
        scale = weight * self.plan.event.update_multiplier * bound
        self.plan.source.add(update, scale, Address(step, user + 1, attempt))

    def charge(self, user: int, step: int) -> int:
        """Write the line of an answer, and return which attempt at the step it is; refuse what passes the limits."""
        book, terms = self._book(user), self.terms
        if book.count >= self.plan.steps:
            raise Spent(
                f"user {user} of this client has answered {book.count} times, which is all that its guarantee was made "
                f"for (run.steps={self.plan.steps}); it answers no more in this run"
            )
        after = epsilon([*book.charged(), self.event], terms.delta, "rdp" if self.event.sampler == "fixed" else "pld")
        if after > terms.epsilon:
            raise Spent(
                f"this answer would bring user {user} of this client to epsilon {shown(after)}, above the lifetime's "
                f"{terms.epsilon:g} at delta {terms.delta:g}; it answers no more",
                lifetime=True,
            )
        return book.record(step, self.event, "client", repeatable=False)

    def _book(self, user: int) -> Ledger:
        if user not in self._books:
            self._books[user] = self._open(user)
        return self._books[user]

    def _open(self, user: int) -> Ledger:
        plan, terms = self.plan, self.terms
        header = {
            "recipe": terms.digest, "delta": terms.delta, "accountant": plan.accountant,
            "adjacency": self.event.adjacency, "noise_source": plan.mechanism.setting.privacy.source,
            "for_release": not plan.source.repeatable, "begins_elsewhere": terms.begins_elsewhere,
            "trust": plan.mechanism.trust, "unit": terms.unit.model_dump(), "sampler": plan.sampler,
        }  # fmt: skip
        if terms.state is None:
            return Ledger.create(None, header)
        folder = terms.state if len(self.users) == 1 else terms.state / f"user-{user}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        if not path.exists() or (Ledger.drop_torn_line(path) and path.stat().st_size == 0):
            return Ledger.create(path, header)
        book = Ledger.read(path)
        if book.header.get("recipe") != terms.digest:
            raise UserError(f"{path} is the ledger of another run; give each run its own `state` folder")
        return book


class Spent(UserError):
    """This client answers no more: in this run, or ever (`lifetime`)."""

    def __init__(self, text: str, lifetime: bool = False) -> None:
        super().__init__(text)
        self.lifetime = lifetime


def share_scale(plan: Plan, bound: float, least: int) -> float:
    """The deviation of one client's share of the noise on sum w_k u_k, if at least `least` shares are in it."""
    return plan.event.update_multiplier * bound * float(plan.weights.max()) / math.sqrt(least)


def local_slack(plan: Plan, bound: float, dimension: int) -> float:
    """What local noise may add to the norm of u_k: beyond it a message is held like any that is too long."""
    return plan.event.update_multiplier * bound * (math.sqrt(dimension) + TAIL)


def noisy_share(update: Tensor, step: float, plan: Plan, scale: float, user: int, at: int, attempt: int) -> np.ndarray:
    """Round an update to multiples of `step`, add noise, and return it as whole multiples."""
    rounded = torch.from_numpy(np.rint(update.double().numpy() / step) * step)
    plan.source.add(rounded, scale, Address(at, user + 1, attempt))
    return np.rint(rounded.numpy() / step)
