"""Epsilon against those who know who is in each round (`privacy.trust: distributed`): its server and its clients.

Such a server sees only noisy sums, but sampling hides nobody from it, nor from the clients of the round. A user who
was in m releases of multiplier z is protected by m Gaussians, without amplification. The ledger does not record
cohorts, which would undo the amplification for whoever reads it, so m is a number of draws that a user exceeds with a
probability of at most delta / 2. That probability is taken from delta and the Gaussians use the rest, so (epsilon,
delta) is the whole promise. A round that was made again may have the same cohort: each repetition counts for everyone.

What of the noise they cannot know. Let V be the variance that the ledger states. A share has V / t, where t is the
threshold of the round: more than half of its cohort, and the least number of shares in a sum that is opened. The
server brings every release up to 2 V.

* The server knows what it added. At least t shares are left: V or more.
* The server with c clients of the round: of a sum's t or more shares they know c, and never the user's own, so
  max(t - c, 1) / t of V is left. Over every t this is least at t = c + 1: V / (c + 1).
* c clients without the server know c shares of a release of 2 V. With the user they are c + 1 in the cohort, so t is at
  least (c + 1) // 2 + 1, and 2 V - c V / t is left: of V, over all numbers up to c, 4 / (c + 2) for an even c, and the
  same as for c - 1 for an odd one beyond 1, for which it is 3 / 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from confide.privacy import accountant
from confide.privacy.accountant import Accountant
from confide.privacy.ledger import Entry


@dataclass(frozen=True)
class ServerView:
    """What a run costs a user against those who know who is in a round."""

    releases: int
    """In how many releases a user was at most, but for a part of delta."""
    epsilon: float


def left_of_server(clients: int) -> float:
    """The share of the stated variance that the server and so many clients of every round cannot know."""
    return 1 / (clients + 1)


def left_of_clients(clients: int) -> float:
    """The share of the stated variance that so many clients of every round cannot know without the server."""
    even = clients // 2 * 2
    return 4 / (even + 2) if even else 2 - clients / 2


def server_view(entries: Sequence[Entry], delta: float, kind: Accountant, left: float = 1.0) -> ServerView:
    """Epsilon against whoever knows who is in a round and all noise but a share `left` of the stated variance."""
    if not entries:
        return ServerView(0, 0.0)
    event, steps = entries[0].event, len({entry.step for entry in entries})
    draws, more = most_draws(steps, max(entry.event.rate for entry in entries), delta / 2)
    most = draws + len(entries) - steps
    if not all(entry.event.private for entry in entries):
        return ServerView(most, math.inf)
    least = min(entry.event.noise_multiplier for entry in entries)
    # Where cohorts have a fixed size a user's data are replaced, as with local noise; otherwise they are left out.
    known = replace(
        event, sampler="local" if event.sampler == "fixed" else "everyone", rate=1.0, most=0,
        noise_multiplier=least * math.sqrt(left),
    )  # fmt: skip
    return ServerView(most, accountant.epsilon([known] * most, delta - more, kind))


def most_draws(steps: int, rate: float, unlikely: float) -> tuple[int, float]:
    """Return the most steps that a user is in, and the probability (at most `unlikely`) that it is in more of them."""
    from scipy import stats  # type: ignore[import-untyped]

    if rate >= 1:
        return steps, 0.0
    most = min(steps, int(stats.binom.isf(unlikely, steps, rate)))
    return most, float(stats.binom.sf(most, steps, rate))
