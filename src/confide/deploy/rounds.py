"""One round of a deployment: what arrives is checked, bounded again, added up, and counted (PFL-ASR Algorithm 1, 5-14).

A client is not trusted to be the right one, to answer once, to answer in time, to answer for this round, or to have
bounded its update. What it sends reaches the sum only as

    w_k u_k held to the bound,    at most once per user of the cohort,

so whatever arrives, one user moves the sum by at most w_k C, which is what the noise is made for. The sum is one vector
that was made before the round; an answer is added and let go, so memory does not grow with the cohort.

A round closes with those who answered in time. The sum is divided by the expected cohort and gets the whole noise,
whoever is missing: a missing user is one who sent zero, so the accounting of the whole cohort covers it. A user whose
update is not finite has answered and adds zero. With fewer answers than the minimum the round is abandoned, and nothing
of its sum leaves this object: whether it is depends on who answered, never on what is in an update.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.deploy.link import NodeId
from confide.deploy.parcels import Identity, Parcel
from confide.deploy.sums import Sum
from confide.engines.engine import Abandoned
from confide.errors import one_line
from confide.federated.bounding import Bounder
from confide.federated.cohort import Tally
from confide.federated.local import PlainUpdate
from confide.federated.parameters import Layout

ACCEPTED, HELD = "accepted", "bounded again"
LATE, TWICE, STRANGER, OTHER_ROUND = "late", "twice", "not in the cohort", "another round"
OTHER_CLIENT, MALFORMED, NOT_FINITE, FAILED = "another version, recipe or model", "malformed", "not finite", "failed"
_LARGEST_LOSS, _LARGEST_NORM = 1e12, 1e30
_COUNTS, _NORMS = ("users", "not_finite", "bounded"), ("norm", "norm_squared", "bounded_norm")
_LISTS = ("layer_norms", "layer_norms_squared", "layer_bounded", "votes")


@dataclass(frozen=True)
class Call:
    """What the server announces: which step of which run, and what a client must be to take part in it."""

    run: str
    identity: Identity
    step: int
    nonce: str
    """Fresh for every attempt at a step, so that an answer to an earlier one is known as such."""

    @staticmethod
    def new(run: str, identity: Identity, step: int) -> Call:
        return Call(run, identity, step, secrets.token_hex(16))

    def facts(self) -> dict[str, Any]:
        return {"run": self.run, "step": self.step, "nonce": self.nonce, **self.identity.facts()}


@dataclass
class Books:
    """What a round adds to."""

    layout: Layout
    weights: np.ndarray  # (population,) float64
    total: Tensor  # (parameters,)


class Round:
    """Takes parcels until it is closed. Never raises for what a client sent."""

    def __init__(
        self,
        call: Call,
        cohort: dict[int, NodeId | None],
        books: Books,
        rule: Bounder,
        seconds: float,
        vote: bool = False,
        slack: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cohort`: the node that each user was asked through. `slack`: what its own noise may add to a norm."""
        self.call, self.cohort, self.books, self.rule, self.vote, self.slack = call, cohort, books, rule, vote, slack
        self.clock, self.ends = clock, clock() + seconds
        self.tally, self.counts = Tally(), Counter[str]()
        self.done: set[int] = set()
        """Users who have answered."""
        self.notes: list[str] = []
        # Weights add up to 1 at most; a hundredth more, since norms reach their bound only nearly.
        self.sum = Sum(books.total, 1.01 * (rule.sensitivity + slack))

    @property
    def open(self) -> bool:
        return self.clock() < self.ends and len(self.done) < len(self.cohort)

    @property
    def missing(self) -> set[int]:
        return self.cohort.keys() - self.done

    def take(self, node: NodeId, parcel: Parcel, relayed: bool = False) -> str:
        """Check one answer and add it; `relayed` if a relay was asked for the sum of several users.

        Says what became of it; whatever was wrong with it is only counted.
        """
        try:
            verdict, note = self._judge(node, parcel, relayed)
        except Exception as error:  # an answer in a form that nobody thought of is malformed, never a reason to stop
            verdict, note = MALFORMED, f"{type(error).__name__}: {error}"
        self._count(verdict, node, note and f"{verdict}: {note}")
        return verdict

    def miss(self, node: NodeId, reason: str) -> None:
        """Somebody said that no answer will come."""
        self._count(FAILED, node, reason)

    def _count(self, verdict: str, node: NodeId, note: str) -> None:
        self.counts[verdict] += 1
        if note and len(self.notes) < 20:
            self.notes.append(f"node {node}: {one_line(note, 260)}")

    def close(self, minimum: int) -> Tally:
        """The sums of those who answered. Raises `Abandoned` for fewer than `minimum`, with the sum wiped."""
        missing = len(self.cohort) - len(self.done)
        if missing:
            self.counts["missing"] = missing
        if len(self.done) < minimum:
            self.sum.wipe()
            raise Abandoned(
                f"step {self.call.step + 1}: {len(self.done)} of {len(self.cohort)} users answered and at least "
                f"{minimum} are needed ({self.summary()}); nothing was released"
            )
        self.sum.read()
        return self.tally

    def summary(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())) or "no answers"

    def _judge(self, node: NodeId, parcel: Parcel, relayed: bool) -> tuple[str, str]:
        facts = parcel.facts
        if any(facts.get(name) != getattr(self.call, name) for name in ("run", "nonce", "step")):
            return OTHER_ROUND, ""
        differs = self.call.identity.differs(facts)
        if differs:
            return OTHER_CLIENT, differs[1]
        users = facts.get("users") if relayed else [facts.get("user")]
        if not isinstance(users, list) or any(type(u) is not int or self.cohort.get(u) != node for u in users):
            return STRANGER, f"users {users!r:.80}"
        if len(set(users)) < len(users) or self.done & set(users):
            return TWICE, ""
        if self.clock() >= self.ends:
            return LATE, ""
        if relayed:
            return self._add_sum(users, parcel)
        said = self._said(parcel)
        if isinstance(said, str):
            return MALFORMED, said
        return self._add(users[0], *said)

    def _add_sum(self, users: list[int], parcel: Parcel) -> tuple[str, str]:
        """Add what a relay has added up, if no user in it could make it so long."""
        found = parcel.arrays.get("sum")
        if not isinstance(found, np.ndarray) or found.dtype != self.sum.kind or found.shape != self.books.total.shape:
            return MALFORMED, "no array of the sum"
        length, most = self.sum.length(found), self.rule.sensitivity * float(self.books.weights[users].sum())
        if not length <= most * (1 + 1e-6):
            return MALFORMED, f"a sum of norm {length:.6g} over users who together have {most:.6g}"
        tally = _tally(parcel.facts.get("tally"), len(users), len(self.books.layout.names), self._votes)
        if tally is None:
            return MALFORMED, "figures that are none of so many users"
        self.sum.add_sum(found)
        self.tally.add(tally)
        self.done |= set(users)
        self.counts[ACCEPTED] += len(users) - 1 - tally.not_finite
        if tally.not_finite:
            self.counts[NOT_FINITE] += tally.not_finite
        return ACCEPTED, ""

    @property
    def _votes(self) -> int:
        return len(self.rule.bounds) if self.vote else 0

    def _said(self, parcel: Parcel) -> str | tuple[Tensor, Tensor, float, Tensor]:
        """The update, the norms of its tensors before bounding, the loss and the votes; or what is wrong."""
        layout, total = self.books.layout, self.books.total
        update, norms, loss = parcel.arrays.get("update"), parcel.facts.get("norms"), parcel.facts.get("loss")
        kind, size = total.numpy().dtype, total.numel()
        if not isinstance(update, np.ndarray):
            return "no array of the update"
        if update.dtype != kind or update.shape != (size,):
            return f"an update of {update.dtype} {update.shape}, expected {kind} ({size},)"
        if not isinstance(norms, list) or any(type(norm) is not float or norm < 0 for norm in norms):
            return "norms that are not numbers of at least 0"
        if len(norms) != len(layout.names):
            return f"norms that are not {len(layout.names)} numbers"
        if type(loss) is not float or (math.isfinite(loss) and abs(loss) > _LARGEST_LOSS):
            return f"a loss of {loss!r}"
        votes, allowed = parcel.facts.get("votes", []), (0.5, -0.5) if math.isfinite(loss) else (0.5, -0.5, 0.0)
        if not isinstance(votes, list) or len(votes) != self._votes or not all(vote in allowed for vote in votes):
            return "votes that are not +1/2 or -1/2 for each bound"
        told = torch.tensor(norms, dtype=torch.float64), loss, torch.tensor(votes, dtype=torch.float64)
        return torch.from_numpy(update), *told

    def _add(self, user: int, update: Tensor, norms: Tensor, loss: float, votes: Tensor) -> tuple[str, str]:
        weight = float(self.books.weights[user])
        found = self.books.layout.norms(update) / weight  # what arrives is w_k u_k
        if not bool(torch.isfinite(found).all()) or not math.isfinite(loss) or not bool(torch.isfinite(norms).all()):
            self.tally.add(Tally(users=1, not_finite=1))
            self.done.add(user)  # as in one process, such a user counts and adds nothing
            return NOT_FINITE, f"user {user}"
        factors = self.rule.held(found.unsqueeze(0), self.slack)  # (1, layers)
        PlainUpdate(update, self.books.layout, found.unsqueeze(0), torch.zeros(1)).weighted_sum(
            factors, self.sum.into()
        )
        self.sum.added()
        again = bool((factors < 1).any())
        length, norms = float(torch.linalg.vector_norm(norms)), norms.clamp(max=_LARGEST_NORM)
        self.tally.add(
            Tally(
                users=1,
                bounded=int(length > self.rule.sensitivity or again),
                loss=loss,
                norm=min(length, _LARGEST_NORM),
                norm_squared=min(length, _LARGEST_NORM) ** 2,
                bounded_norm=float(torch.linalg.vector_norm(found * factors[0])),
                layer_norms=norms.tolist(),
                layer_norms_squared=norms.square().tolist(),
                layer_bounded=(found * factors[0]).tolist(),
                votes=votes.tolist(),
            )
        )
        self.done.add(user)
        if again:
            self.counts[HELD] += 1
            return ACCEPTED, f"{HELD}: its norm was {float(torch.linalg.vector_norm(found)):.6g}"
        return ACCEPTED, ""


def figures(tally: Tally) -> dict[str, Any]:
    """What a relay says of the users in its sum."""
    return {name: vars(tally)[name] for name in (*_COUNTS, "loss", *_NORMS, *_LISTS)}


def _tally(said: Any, users: int, layers: int, votes: int) -> Tally | None:
    """Read a relay's figures; none if so many users cannot have made them."""
    if not isinstance(said, dict) or not said.keys() <= figures(Tally()).keys():
        return None
    for name, value in said.items():
        if name in _COUNTS:
            fits = type(value) is int and 0 <= value <= users
        elif name in _LISTS:
            fits = isinstance(value, list) and len(value) in (0, votes if name == "votes" else layers)
            least, most = (-users / 2, users / 2) if name == "votes" else (0.0, users * _LARGEST_NORM**2)
            fits = fits and all(type(n) is float and least <= n <= most for n in value)
        else:
            least, most = (-_LARGEST_LOSS, _LARGEST_LOSS) if name == "loss" else (0.0, _LARGEST_NORM**2)
            fits = type(value) is float and users * least <= value <= users * most
        if not fits:
            return None
    tally = Tally(**said)
    return tally if tally.users == users else None
