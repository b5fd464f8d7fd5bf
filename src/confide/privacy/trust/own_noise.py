"""Noise that a client adds itself, and the client's own record of it (PFL-ASR Algorithm 1, line 13; CAR section 3.4).

    local         w_k (u_k + N(0, (z C)^2))          what the server sees of a user is private by itself
    distributed   w_k u_k + N(0, (z C w)^2 / m)      m such terms make the noise z C w of the sum, w the largest weight;
                                                     the server tops it up to the same variance in every round

The scale is taken from the client's own copy of the recipe and from its own plan, never from the server. For local
trust the client keeps a ledger of its own, written before anything is sent, and stops answering when the releases of
the whole run are spent: a server that asks twice cannot get more. For distributed trust a client alone hides nothing;
m is the number of answers below which nobody helps to unmask the sum, so fewer noises than that are never seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.privacy.gaussian import Address
from confide.privacy.ledger import FILE, Ledger
from confide.privacy.mechanisms import Privacy
from confide.privacy.plan import Plan, make_plan
from confide.privacy.sampling import Sampling
from confide.settings import UNSAID, Unit

TAIL = 10.0
"""A Gaussian vector of d coordinates is longer than (sqrt(d) + 10) deviations with probability below 2e-22."""


@dataclass(frozen=True)
class OwnTerms:
    """What this client's own copy of the recipe says about noise; `digest` identifies the recipe.

    `begins_elsewhere` says that the run begins with a model that was made before it, whose data no ledger covers.
    """

    privacy: Privacy
    sampling: Sampling
    steps: int
    seed: int
    digest: str
    begins_elsewhere: bool
    unit: Unit = UNSAID
    """What one user is, as this client's copy of the recipe says."""


class OwnNoise:
    """One client's noise in one run."""

    def __init__(self, terms: OwnTerms, bound: float, state: Path | None) -> None:
        if terms.privacy.trust == "local" and state is None:
            raise UserError("privacy.trust=local: give --state FOLDER, where this client keeps its own privacy ledger")
        self.terms, self.bound, self.state = terms, bound, state
        self._made: tuple[Plan, Ledger] | None = None

    def plan_for(self, population: int) -> tuple[Plan, Ledger]:
        """Make this client's own plan and ledger for a federation of this size, or return those already made."""
        if self._made is None or len(self._made[0].weights) != population:
            terms, weights = self.terms, np.full(population, 1 / population)
            plan = make_plan(terms.privacy, terms.sampling, weights, self.bound, terms.steps, terms.seed)
            self._made = plan, self._open(plan)
        return self._made

    def add_local(self, update: Tensor, weight: float, user: int, step: int, population: int) -> None:
        """Add w_k N(0, (z C)^2) to w_k u_k, with the line on this client's disk before."""
        plan, book = self.plan_for(population)
        if book.count >= self.terms.steps:
            raise UserError(
                f"this client has answered {book.count} times, which is all that its guarantee was made for "
                f"(run.steps={self.terms.steps}); it answers no more in this run"
            )
        attempt = book.record(step, plan.event, "client", repeatable=False)
        plan.source.add(update, weight * plan.event.update_multiplier * self.bound, Address(step, user + 1, attempt))

    def _open(self, plan: Plan) -> Ledger:
        header = {
            "recipe": self.terms.digest, "delta": plan.delta, "accountant": plan.accountant,
            "adjacency": plan.event.adjacency, "noise_source": self.terms.privacy.source,
            "for_release": not plan.source.repeatable, "begins_elsewhere": self.terms.begins_elsewhere,
            "trust": self.terms.privacy.trust, "unit": self.terms.unit.model_dump(), "sampler": plan.sampler,
        }  # fmt: skip
        if self.state is None:
            return Ledger.create(None, header)
        self.state.mkdir(parents=True, exist_ok=True)
        path = self.state / FILE
        if not path.exists() or (Ledger.drop_torn_line(path) and path.stat().st_size == 0):
            return Ledger.create(path, header)
        book = Ledger.read(path)
        if book.header.get("recipe") != self.terms.digest:
            raise UserError(f"{path} is the ledger of another run; give each run its own --state folder")
        return book


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
