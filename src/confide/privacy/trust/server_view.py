"""Epsilon against a server that knows who is in each round (`privacy.trust: distributed`).

Such a server sees only noisy sums, but sampling hides nobody from it, nor from the clients of the round. A user who
was in m releases of multiplier z is protected by m Gaussians, without amplification. The ledger does not record
cohorts, which would undo the amplification for whoever reads it, so m is a number of draws that a user exceeds with a
probability of at most delta / 2. That probability is taken from delta and the Gaussians use the rest, so (epsilon,
delta) is the whole promise. A round that was made again may have the same cohort: each repetition counts for everyone.
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
    """What a run costs a user against those who know who is in a round."""

    releases: int
    """In how many releases a user was at most, but for a part of delta."""
    server: float
    """Epsilon against the server alone, or a client of the round alone, who does not know what the server added."""
    with_client: float
    """Epsilon against the server together with one client of every round, who knows its own share of the noise.

    A round with a user and such a client has a threshold of at least two, so half of the stated variance remains. Two
    clients and the server could be all of a small round but its user: against these nothing is stated.
    """


def server_view(entries: Sequence[Entry], delta: float, kind: Accountant) -> ServerView:
    if not entries:
        return ServerView(0, 0.0, 0.0)
    event, steps = entries[0].event, len({entry.step for entry in entries})
    draws, more = most_draws(steps, max(entry.event.rate for entry in entries), delta / 2)
    most = draws + len(entries) - steps
    if not all(entry.event.private for entry in entries):
        return ServerView(most, math.inf, math.inf)
    least = min(entry.event.noise_multiplier for entry in entries)
    # Where cohorts have a fixed size a user's data are replaced, as with local noise; otherwise they are left out.
    bare = replace(event, sampler="local" if event.sampler == "fixed" else "everyone", rate=1.0)
    server, with_client = (
        accountant.epsilon([replace(bare, noise_multiplier=z)] * most, delta - more, kind)
        for z in (least, least / math.sqrt(2))
    )
    return ServerView(most, server, with_client)


def most_draws(steps: int, rate: float, unlikely: float) -> tuple[int, float]:
    """Return the most steps that a user is in, and the probability (at most `unlikely`) that it is in more of them."""
    from scipy import stats  # type: ignore[import-untyped]

    if rate >= 1:
        return steps, 0.0
    most = min(steps, int(stats.binom.isf(unlikely, steps, rate)))
    return most, float(stats.binom.sf(most, steps, rate))


def against_server(found: dict[str, Any]) -> str:
    """Say, for a ledger or summary with distributed trust, what holds against those who know who is in a round."""
    most = f"a user in at most {found['releases_of_a_user']} of {found['releases']} releases, but for a part of delta"
    stated = (
        f"epsilon {accountant.shown(found['epsilon_server'])} against the server or a client of a round, who know who "
        f"is in it: no amplification, {most}"
    )
    if "epsilon_server_and_client" not in found:  # a summary from before it was stated
        return stated
    return f"{stated}; {accountant.shown(found['epsilon_server_and_client'])} against the two together"
