"""Epsilon against those who know who is in each round (`privacy.trust: distributed`): its server and its clients.

Such a server sees only noisy sums, but sampling hides nobody from it, nor from the clients of the round. A user who
was in m releases of multiplier z is protected by m Gaussians, without amplification. The ledger does not record
cohorts, which would undo the amplification for whoever reads it, so m is a number of draws that a user exceeds with a
probability of at most delta / 2. That probability is taken from delta and the Gaussians use the rest, so (epsilon,
delta) is the whole promise. A round that was made again may have the same cohort: each repetition counts for everyone.

Who is in a round is known to them, so no two data sets are compared in which somebody takes part or not: a user sends
zero in one and its update in the other, in the same rounds. For two updates neither of which is zero, a sum moves by
twice as much, and m Gaussians of z / 2 are stated beside it.

What of the noise they cannot know. Let V be the variance that the ledger states. A share has V / t, where t is the
threshold of the round: more than two thirds of its cohort (in older runs more than half: `half`), and the least number
of shares in a sum that is opened. The server brings every release up to 2 V.

* The server knows what it added. At least t shares are left: V or more.
* The server with c clients of the round: of a sum's t or more shares they know c, and never the user's own, so
  max(t - c, 1) / t of V is left. Over every t this is least at t = c + 1: V / (c + 1).
* c clients without the server know c shares of a release of 2 V. With the user they are c + 1 in the cohort, so t is at
  least 2 (c + 1) // 3 + 1, and 2 V - c V / t is left: of V, over all numbers up to c, 3 / 2 for one, 4 / 3 for two, and
  (k + 2) / (2 k + 1) for 3 k to 3 k + 2 of them, which is more than a half.

All of them follow the protocol. Against a server that does not, nothing can be stated from the server's own ledger.
What holds then is what each client counts itself: rounds that it chose to answer, and the share `HONEST` of V. Fewer
than a third of a round, c < n / 3, are hostile there, and t > 2 n / 3, so that (t - c) / t of V is left, which is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from confide.privacy import accountant
from confide.privacy.accountant import Accountant
from confide.privacy.ledger import Entry
from confide.privacy.trust.neighbours import quorum

HONEST = 0.5
"""What is left of the variance to honest clients, while less than a third of a round is hostile."""
THRESHOLD = "two thirds"
"""What the ledger's first line says of the threshold; runs from before it said so had `half`."""


@dataclass(frozen=True)
class ServerView:
    """What a run costs a user against those who know who is in a round."""

    releases: int
    """In how many releases a user was at most, but for a part of delta."""
    epsilon: float


def left_of_server(clients: int) -> float:
    """The share of the stated variance that the server and so many clients of every round cannot know."""
    return 1 / (clients + 1)


def left_of_clients(clients: int, least: Callable[[int], int] = quorum) -> float:
    """The share of the stated variance that so many clients of every round cannot know without the server.

    `least` is the lowest threshold of a cohort.
    """
    return min(2 - some / least(some + 1) for some in range(1, clients + 1))


def half(cohort: int) -> int:
    """The lowest threshold of runs from before it was two thirds."""
    return cohort // 2 + 1


def server_view(
    entries: Sequence[Entry], delta: float, kind: Accountant, left: float = 1.0, replaced: bool = False
) -> ServerView:
    """Epsilon against whoever knows who is in a round and all noise but a share `left` of the stated variance.

    `replaced`: for any two data sets of a user, also where the ledger's own neighbours have none of one user's.
    """
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
        event, sampler="local" if replaced or event.sampler == "fixed" else "everyone", rate=1.0, most=0,
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
