"""Noise that a client adds itself, and the client's own record of it (PFL-ASR Algorithm 1, line 13; CAR section 3.4).

    local         w_k (u_k + N(0, (z C)^2))          what the server sees of a user is private by itself
    distributed   w_k u_k + N(0, (z C w)^2 / m)      m such terms make the noise z C w of the sum, w the largest weight;
                                                     the server tops it up to the same variance in every round

The scale comes from the client's own plan, which was held against its policy. The client keeps the budget of each of
its users' lives, over all servers and runs (`confide.privacy.budget`), written before anything is sent, and stops
answering when the releases of the whole run or the
epsilon of its lifetime are spent: a server that asks twice cannot get more. For distributed trust a client alone hides
nothing; m is the number of answers below which nobody helps to unmask the sum, so fewer noises than that are never
seen. What a sum costs whoever is in it is a Gaussian of multiplier z, without amplification: the server knows who is.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confide.errors import UserError
from confide.privacy.budget import FILE, Budget, BudgetSpent, RunSpent
from confide.privacy.events import Event
from confide.privacy.gaussian import Address
from confide.privacy.plan import Plan

TAIL = 10.0
"""A Gaussian vector of d coordinates is longer than (sqrt(d) + 10) deviations with probability below 2e-22."""


@dataclass(frozen=True)
class OwnTerms:
    """What this client's owner has decided: where the budget lies (none: nothing is kept), and what a life may cost.

    `digest` identifies the recipe, and `what` says to people which run it is.
    """

    state: Path | None
    epsilon: float
    delta: float
    digest: str
    what: str


class OwnNoise:
    """One client's noise in one run, and the lifetime budget of each of its users."""

    def __init__(self, plan: Plan, event: Event, terms: OwnTerms, users: Sequence[int]) -> None:
        """`event` is what one answer costs the user who gives it."""
        self.plan, self.event, self.terms, self.users = plan, event, terms, list(users)
        self._books: dict[int, Budget] = {}

    def add_local(self, update: Tensor, weight: float, user: int, step: int) -> None:
        """Add w_k N(0, (z C)^2) to w_k u_k, with the line on this client's disk before."""
        attempt, bound = self.charge(user, step), self.plan.mechanism.setting.bound
        scale = weight * self.plan.event.update_multiplier * bound
        self.plan.source.add(update, scale, Address(step, user + 1, attempt))

    def charge(self, user: int, step: int) -> int:
        """Write the line of an answer, and return which attempt at the step it is; refuse what passes the limits."""
        book, run = self._book(user), self.terms.digest
        if book is None:
            return 0
        attempt = sum(each == run and key.startswith(f"{step}/") for each, key in book.keys)
        try:
            self._pay(book, run, f"{step}/{secrets.token_hex(8)}", 1, claimed=False, most=self.plan.steps)
        except RunSpent:
            raise Spent(
                f"user {user} of this client has answered {book.counts[run]} times, which is all that its guarantee "
                f"was made for (run.steps={self.plan.steps}); it answers no more in this run"
            ) from None
        return attempt

    def claim(self, user: int, started: str) -> None:
        """Count all that a server says that its run costs, where it adds the noise itself; once for each start of it.

        Amplification by sampling holds for all steps together, also for those that the user is not in: its coins are
        tossed there as well. So the whole run is paid for before the first of them, and not by how often the user is
        asked, which would tell by what is left of its life how they fell. `started` is the server's name for this
        start: a recipe that is run again costs again. A run that goes on after a stop cannot be told from that, and is
        counted from its first step on: too much, but never too little.
        """
        book = self._book(user)
        if book is not None:
            count = 1 if self.event.whole_run else self.plan.steps
            self._pay(book, f"{self.terms.digest}/{started}", "whole run", count, claimed=True)

    def _pay(self, book: Budget, run: str, key: str, count: int, claimed: bool, most: int | None = None) -> None:
        try:
            book.charge(run, self.event, key, self.terms.what, count, claimed, most)
        except BudgetSpent as spent:
            raise Spent(f"{spent}: this client answers no more", lifetime=True) from None

    def _book(self, user: int) -> Budget | None:
        if self.terms.state is None:
            return None
        if user not in self._books:
            self._books[user] = lifetime(self.terms, user if len(self.users) > 1 else None)
        return self._books[user]


def lifetime(terms: OwnTerms, user: int | None = None) -> Budget:
    """Open the budget of a client's life, or begin it; each of several users has one."""
    if terms.state is None:
        raise RuntimeError("a budget needs a folder")
    folder = terms.state if user is None else terms.state / f"user-{user}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if not path.exists():
        try:
            return Budget.create(path, terms.epsilon, terms.delta, "this client", shared=False)
        except UserError:
            if not path.exists():  # else another process was quicker
                raise
    book = Budget.read(path)
    begun = (book.header["epsilon"], book.header["delta"])
    if begun != (terms.epsilon, terms.delta):
        raise UserError(
            f"{path} was begun with epsilon {begun[0]:g} at delta {begun[1]:g}, and the policy says {terms.epsilon:g} "
            f"at {terms.delta:g}; what a life may cost is fixed before the first answer. Put the policy's numbers back"
        )
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
