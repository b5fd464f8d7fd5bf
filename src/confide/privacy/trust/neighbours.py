"""How many neighbours a client has in a round of secure aggregation (Bell et al. 2020), and how many must agree.

Every client draws its neighbours itself, from the operating system's generator, once the server has said who is in the
round. So neither the server nor hostile clients choose who keeps an honest client's shares, and trying again and again
gains them nothing: a draw is used once. A client shares its secrets among its m neighbours (itself one of them), masks
towards them and towards those who drew it, and asks them what they have seen. Its cost grows with m, not with the
cohort.

A quorum is more than two thirds of the m. With at most a third of them hostile,

    both secrets of a client are never opened: honest neighbours give one share each, and 2 quorum > m + m / 3;
    no two views of a round, nor two parts of it, are both agreed on: the neighbours of one would have to lie in it.

m is the smallest number for which, over all clients of a cohort,

    a third or more of somebody's neighbours are hostile, a tenth of the cohort being so: probability at most 2^-40,
    too few of somebody's neighbours are left, a tenth of the cohort having dropped out:  probability at most 2^-10,

by the hypergeometric distribution. Up to 64 clients everybody is everybody's neighbour. Differs from the paper: shares
go to those whom a client drew and not to those who drew it, so that hostile clients cannot crowd into a neighbourhood.

1. J. Bell et al. Secure single-server aggregation with (poly)logarithmic overhead. CCS 2020.
"""

from __future__ import annotations

import math
from functools import cache

HOSTILE = DROPPED = 0.1
"""Shares of a cohort that a neighbourhood is made for."""
_EVERYBODY = 64
_INSECURE, _LOST = 2.0**-40, 2.0**-10


def quorum(size: int) -> int:
    """More than two thirds."""
    return 2 * size // 3 + 1


@cache
def neighbourhood(cohort: int) -> int:
    """How many neighbours a client has, itself counted."""
    for size in range(min(_EVERYBODY, cohort), cohort):
        if insecure(cohort, size) <= _INSECURE and lost(cohort, size) <= _LOST:
            return size
    return cohort


def insecure(cohort: int, size: int, hostile: float = HOSTILE) -> float:
    """A bound on the probability that some client has so many hostile neighbours that they open its update."""
    return cohort * _tail(cohort - 1, math.floor(hostile * cohort), size - 1, 2 * quorum(size) - size)


def lost(cohort: int, size: int, dropped: float = DROPPED) -> float:
    """A bound on the probability that some client has too few neighbours left."""
    return cohort * _tail(cohort - 1, math.floor(dropped * cohort), size - 1, size - quorum(size) + 1)


def _tail(others: int, marked: int, drawn: int, least: int) -> float:
    """The probability that at least so many of `drawn` out of `others` are marked."""

    def ways(all_: int, some: int) -> float:
        return math.lgamma(all_ + 1) - math.lgamma(some + 1) - math.lgamma(all_ - some + 1)

    least = max(least, drawn - (others - marked))
    logs = (
        ways(marked, k) + ways(others - marked, drawn - k) - ways(others, drawn)
        for k in range(least, min(marked, drawn) + 1)
    )
    return math.fsum(map(math.exp, logs))
