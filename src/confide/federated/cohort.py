"""Train a part of a cohort, bound every update, and keep only sums.

A cohort is cut into parts whose size depends on the task alone, whatever the number of workers, and the parts are added
in order; so the result is the same, bit for bit, wherever the parts were trained, and memory does not grow with the
cohort. A task that trains many users at once wants large parts, and equal ones, so that no worker waits for another.
On the plain path every user is a part, so that a cohort of a few keeps several workers busy, and so that nobody needs a
second sum: see `Layout.add_scaled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from confide.federated.bounding import ROUNDING, Bounder
from confide.federated.buffers import keep_freed_memory
from confide.federated.chain import Ranks, ranks_of
from confide.federated.local import LocalTraining, PlainTrainer, PlainUpdate, Updates
from confide.federated.low_rank import KERNELS, LowRankTrainer
from confide.federated.measures import ACCURACY, Measures
from confide.federated.one_pass import OnePassTrainer, OnePassUpdates, users_at_once
from confide.federated.parameters import Layout
from confide.federated.task import Task
from confide.kernels import described

Way = Literal["short cut", "low rank", "one pass", "plain"]
"""How users are trained; all but the last are exact against it."""
NOTHING = Measures()


@dataclass
class Tally:
    """Sums over users of what is worth watching. None of it is covered by the privacy guarantee."""

    users: int = 0
    not_finite: int = 0
    bounded: int = 0
    loss: float = 0.0
    norm: float = 0.0
    norm_squared: float = 0.0
    bounded_norm: float = 0.0
    layer_norms: list[float] = field(default_factory=list)
    layer_norms_squared: list[float] = field(default_factory=list)
    layer_bounded: list[float] = field(default_factory=list)
    layer_clipped: list[float] = field(default_factory=list)
    """Of each tensor: the norm, its square, the norm once bounded, and how many users' were shortened."""
    gradient: float = 0.0
    layer_gradients: list[float] = field(default_factory=list)
    """Of the local gradients and of each tensor of them, where it is asked for: the norm, mean over a user's steps."""
    votes: list[float] = field(default_factory=list)
    """For an adaptive bound: each counter's sum of +1/2 for a user within it and -1/2 for one beyond."""
    measures: list[float] = field(default_factory=list)
    """Of each figure that is released with noise: the sum of what the users add, from -1/2 to +1/2 each."""
    raw_norms: list[float] = field(default_factory=list)
    """For bounds of the users' own, and only then: each user's norm, in their order; NaN if nothing is sent."""

    def add(self, other: Tally) -> None:
        """Add the sums of other users, entry by entry; raw norms are appended."""
        for name, theirs in vars(other).items():
            mine = vars(self)[name]
            if isinstance(mine, list) and name != "raw_norms" and mine and theirs:
                setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])
            else:
                setattr(self, name, mine + theirs)


def parts(cohort: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut a cohort into equal parts of at most `size`; where users go together, an even number, for two workers."""
    count = -(-len(cohort) // size)
    if 1 < count < len(cohort):
        count += count % 2
    return np.array_split(cohort, count) if count else []


def part_size(task: Task, local: LocalTraining, layout: Layout) -> int:
    """Users in a part: those whom a short cut takes together, and one where there is none."""
    ranks = _ranks(task, local, layout)
    own = task.users_at_once(local) if local.plain else 0
    return own or (ranks.users_at_once() if ranks else users_at_once(task, local, layout)) or 1


def _ranks(task: Task, local: LocalTraining, layout: Layout) -> Ranks | None:
    """Low rank knows plain steps at one local rate for all tensors."""
    return ranks_of(task, local, layout) if local.plain else None


def kernels(task: Task, local: LocalTraining, layout: Layout) -> str:
    """Load what is compiled for the way in which these users are trained, and say what is in use: bits depend on it."""
    if local.plain and task.users_at_once(local):
        return described(getattr(task, "kernels", ()))
    return described(() if _ranks(task, local, layout) is None else KERNELS)


class PartTrainer:
    """Trains the users of one part and adds their bounded, weighted updates to a flat vector."""

    def __init__(
        self, task: Task, layout: Layout, local: LocalTraining, bounder: Bounder, weights: np.ndarray, seed: int,
        like: Tensor, measures: Measures = NOTHING,
    ) -> None:  # fmt: skip
        keep_freed_memory()
        self.task, self.layout, self.local, self.bounder, self.measures = task, layout, local, bounder, measures
        self.weights = torch.from_numpy(weights)  # (population,) float64
        self.with_data = torch.from_numpy(np.asarray(task.examples) > 0)  # (population,)
        self.device = like.device
        self.plain = PlainTrainer(task, layout, local, seed, like)
        ranks = _ranks(task, local, layout)
        self.low_rank = None if ranks is None else LowRankTrainer(task, ranks, layout, seed)
        at_once = users_at_once(task, local, layout)
        self.one_pass = OnePassTrainer(task, layout, local, seed) if at_once else None
        self.part_size, self.kernels = part_size(task, local, layout), kernels(task, local, layout)
        self.one_by_one = not (self.low_rank or self.one_pass or (local.plain and task.users_at_once(local)))
        """Whether a part is one user's plain update, which may as well be added to the sum of those before it."""
        self.taken: Counter[Way] = Counter()
        """How many users were trained in which way since the beginning."""

    def add_part(
        self, central: Tensor, users: np.ndarray, step: int, into: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        """Add sum_k w_k bound(delta_k) over `users` to `into`. `bounds` are given where they adapt."""
        tally, rule = Tally(), self.bounder.at(bounds)
        vote = bounds is not None and not rule.per_user
        order: list[int] = []
        for some, updates in self._updates(central, users, step):
            tally.add(self._add(updates, some, into, rule, vote, self._accuracy(central, some)))
            order += some.tolist()
        if rule.per_user:  # a short cut may have taken some users first
            norms = dict(zip(order, tally.raw_norms, strict=True))
            tally.raw_norms = [norms[user] for user in users.tolist()]
        return tally

    def _updates(self, central: Tensor, users: np.ndarray, step: int) -> Iterator[tuple[np.ndarray, Updates]]:
        """Train by the task's own short cut; else in one pass, or in low rank those users where that is cheaper."""
        # On the processor, where the tasks that have a short cut keep their data; it knows plain steps at one rate.
        if self.device.type == "cpu" and self.local.plain:
            fast = self.task.fast_updates(self.layout.views(central), users, self.local, self.local.rate(step))
            if fast is not None:
                self.taken["short cut"] += len(users)
                yield users, fast
                return
        if self.low_rank is not None:
            few = np.array([self.low_rank.ranks.takes(int(user)) for user in users], dtype=bool)
            self.taken["low rank"] += int(few.sum())
            yield from self.low_rank.updates(central, users[few], step)
            users = users[~few]
        elif self.one_pass is not None:
            self.taken["one pass"] += len(users)
            yield users, self.one_pass.updates(central, users, step)
            return
        self.taken["plain"] += len(users)
        for user in users:
            yield np.array([user]), self.plain.update(central, int(user), step)

    @torch.no_grad()
    def _accuracy(self, central: Tensor, users: np.ndarray) -> Tensor | None:
        """Of each user, the share of its examples that the central model answers right, where that is released."""
        if ACCURACY not in self.measures.bounds:
            return None
        return self.task.own_accuracy(self.layout.views(central.cpu()), users)

    def _add(
        self, updates: Updates, users: np.ndarray, into: Tensor, rule: Bounder, vote: bool, right: Tensor | None = None
    ) -> Tally:
        # Arrays of a few hundred numbers: numpy's calls cost a third of torch's.
        weights, raw, losses = self.weights.numpy()[users], _array(updates.norms), _array(updates.losses)
        finite = np.isfinite(raw).all(axis=1) & np.isfinite(losses) & self.with_data.numpy()[users]  # (users,)
        norms = np.where(finite[:, None], raw, 0.0)
        # A user whose loss or update is not finite contributes zero and is counted. So does one without data, whatever
        # a task's loss says of it: a guarantee compares each user with one that adds nothing.
        found = rule.of(torch.from_numpy(users)).factors(torch.from_numpy(norms)).numpy()
        factors = np.where(finite[:, None], found, 0.0)  # (users, layers)
        updates.weighted_sum(torch.from_numpy(factors * weights[:, None]), into)
        with np.errstate(over="ignore"):
            squares = np.square(norms)
            bounded_norms = norms * factors
            lengths, shorter = np.sqrt(squares.sum(axis=1)), factors < ROUNDING
            sent = np.sqrt(np.square(bounded_norms).sum(axis=1))
        bounded = shorter.any(axis=1) & finite
        watched = updates.watched if isinstance(updates, PlainUpdate | OnePassUpdates) else None
        gradient = [] if watched is None else np.where(finite[:, None], _array(watched), 0.0).sum(axis=0).tolist()
        return Tally(
            users=len(users),
            not_finite=len(users) - int(finite.sum()),
            bounded=int(bounded.sum()),
            loss=float(losses[finite].sum()),
            norm=float(lengths.sum()),
            norm_squared=float(squares.sum()),
            bounded_norm=float(sent.sum()),
            layer_norms=norms.sum(axis=0).tolist(),
            layer_norms_squared=squares.sum(axis=0).tolist(),
            layer_bounded=bounded_norms.sum(axis=0).tolist(),
            layer_clipped=(shorter & finite[:, None]).sum(axis=0).astype(np.float64).tolist(),
            gradient=gradient[0] if gradient else 0.0,
            layer_gradients=gradient[1:],
            votes=self._votes(rule, norms, finite) if vote else [],
            measures=self._measures(losses, lengths, bounded, right, finite) if self.measures.bounds else [],
            raw_norms=np.where(finite, lengths, np.nan).tolist() if rule.per_user else [],
        )

    def _votes(self, rule: Bounder, norms: np.ndarray, finite: np.ndarray) -> list[float]:
        found = rule.votes(torch.from_numpy(norms))
        return list(torch.where(torch.from_numpy(finite)[:, None], found, 0.0).sum(dim=0).tolist())

    def _measures(
        self, losses: np.ndarray, lengths: np.ndarray, bounded: np.ndarray, right: Tensor | None, finite: np.ndarray
    ) -> list[float]:
        known = {
            name: torch.from_numpy(each) for name, each in (("loss", losses), ("norm", lengths), ("bounded", bounded))
        }
        known |= {} if right is None else {ACCURACY: right}
        return list(self.measures.values(known, torch.from_numpy(finite)).sum(dim=0).tolist())


def _array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found
