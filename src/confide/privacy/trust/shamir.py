"""Shamir's secret sharing: so many shares open a secret, and fewer say nothing of it (Shamir 1979).

The field is that of the smallest prime above 2^256, so a secret of 32 bytes is one number. A share is the value of a
random polynomial at a point that is known from elsewhere (whose share it is), so nobody can lie about the point.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297
SHARE = 33
"""Bytes of a share."""


def create_shares(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Split a secret of 32 bytes into a share for each point, of which `threshold` open it."""
    wanted = sorted(set(points))
    if len(secret) != 32 or not 1 <= threshold <= len(wanted) or not 0 < wanted[0] <= wanted[-1] < PRIME:
        raise ValueError(f"{len(secret)} bytes cannot be shared among {len(wanted)} with a threshold of {threshold}")
    slopes = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for point in wanted:
        value = 0
        for slope in slopes:
            value = (value + slope) * point % PRIME
        shares[point] = ((value + int.from_bytes(secret, "big")) % PRIME).to_bytes(SHARE, "big")
    return shares


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Put a secret together from exactly `threshold` shares. Raises ValueError for what cannot be one."""
    if not shares or any(len(share) != SHARE for share in shares.values()):
        raise ValueError("shares of another length")
    total = 0
    for point, share in shares.items():  # Lagrange's polynomial at 0
        above = below = 1
        for other in shares:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >= 2**256:
        raise ValueError("shares that do not fit each other")
    return secret.to_bytes(32, "big")
