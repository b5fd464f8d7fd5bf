"""Shamir's secret sharing: so many shares open a secret, and fewer say nothing of it (Shamir 1979).

The field is GF(2^128), by pycryptodome; a secret is cut into blocks of 16 bytes, each shared with the same points.
"""

from __future__ import annotations

_BLOCK, _POINT = 16, 4


def create_shares(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret of whole blocks into `count` shares, of which `threshold` open it."""
    from Crypto.Protocol.SecretSharing import Shamir

    if not secret or len(secret) % _BLOCK or not 2 <= threshold <= count:
        raise ValueError(f"{len(secret)} bytes cannot be shared among {count} with a threshold of {threshold}")
    shares = [point.to_bytes(_POINT, "big") for point in range(1, count + 1)]
    for at in range(0, len(secret), _BLOCK):
        for point, value in Shamir.split(threshold, count, secret[at : at + _BLOCK], ssss=False):
            shares[point - 1] += value
    return shares


def combine_shares(shares: list[bytes]) -> bytes:
    """Put a secret together again. Raises ValueError for shares that do not fit each other."""
    from Crypto.Protocol.SecretSharing import Shamir

    sizes = {len(share) for share in shares}
    if len(sizes) != 1 or (size := sizes.pop()) <= _POINT or (size - _POINT) % _BLOCK:
        raise ValueError("shares of different or of other lengths")
    secret = b""
    for at in range(_POINT, size, _BLOCK):
        points = [(int.from_bytes(share[:_POINT], "big"), share[at : at + _BLOCK]) for share in shares]
        secret += Shamir.combine(points, ssss=False)
    return secret
