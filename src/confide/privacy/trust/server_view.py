"""Epsilon against a server that knows who is in each round (`privacy.trust: distributed`).

Such a server sees noisy sums alone, but sampling hides nobody from it, nor from the clients of the round. A user who
was in m releases of multiplier z is covered by m Gaussians, without amplification. The ledger does not hold cohorts,
which would undo the amplification for whoever reads it, so m is what a user's draws exceed with a probability of at
most delta / 2. That probability is taken from delta and the Gaussians have the rest, so (epsilon, delta) is the whole
promise. A round that was made again may have the same cohort: each repetition counts for everyone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from confide.privacy import accountant
from confide.privacy.accountant import Accountant
from confide.privacy.ledger import Entry


@dataclass(frozen=True)
class ServerView:
    """What a run costs a user of whom the server knows when it took part."""

    releases: int
    """That a user was in at most, but for a probability that delta includes."""
    epsilon: float


def server_view(entries: Sequence[Entry], delta: float, kind: Accountant) -> ServerView:
    if not entries:
        return ServerView(0, 0.0)
    event, steps = entries[0].event, len({entry.step for entry in entries})
    draws, more = most_draws(steps, event.rate, delta / 2)
    most = draws + len(entries) - steps
    if not all(entry.event.private for entry in entries):
        return ServerView(most, math.inf)
    least = min(entry.event.noise_multiplier for entry in entries)
    # Where cohorts have a fixed size a user's data are replaced, as with local noise; otherwise they are left out.
    bare = replace(event, sampler="local" if event.sampler == "fixed" else "everyone", noise_multiplier=least)
    return ServerView(most, accountant.epsilon([replace(bare, rate=1.0)] * most, delta - more, kind))


def most_draws(steps: int, rate: float, unlikely: float) -> tuple[int, float]:
    """In how many of so many steps a user is, but with a probability of at most `unlikely`; and that probability."""
    from scipy import stats  # type: ignore[import-untyped]

    if rate >= 1:
        return steps, 0.0
    most = min(steps, int(stats.binom.isf(unlikely, steps, rate)))
    return most, float(stats.binom.sf(most, steps, rate))


def against_server(found: dict[str, Any]) -> str:
    """Of a ledger or summary with distributed trust: what holds against those who know who is in a round."""
    most = f"a user in at most {found['releases_of_a_user']} of {found['releases']} releases, but for a part of delta"
    return (
        f"epsilon {accountant.shown(found['epsilon_server'])} against the server and the clients of a round, who know "
        f"who is in it: no amplification, {most}"
    )
