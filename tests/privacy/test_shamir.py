"""Shares open a secret from the threshold on, and whatever shares they are."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from confide.privacy.trust.shamir import PRIME, combine_shares, create_shares


@pytest.mark.parametrize("secret", [bytes(range(32)), bytes(32), b"\xff" * 32])
def test_any_shares_from_the_threshold_on_open_the_secret_and_fewer_do_not(secret: bytes) -> None:
    shares = create_shares(secret, 3, [1, 7, 8, 200, 10**9])
    for some in itertools.combinations(shares.items(), 3):
        assert combine_shares(dict(some)) == secret
    for points in itertools.combinations(shares, 2):
        with contextlib.suppress(ValueError):
            assert combine_shares({point: shares[point] for point in points}) != secret


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    """Perfect secrecy: for the two shares of somebody there is a third that opens any secret."""
    shares = create_shares(bytes(32), 3, [1, 2, 3])
    for wanted in (0, 1, 2**255):
        # f(0) = 3 f(1) - 3 f(2) + f(3)
        one, two = (int.from_bytes(shares[point], "big") for point in (1, 2))
        third = (wanted - 3 * one + 3 * two) % PRIME
        found = combine_shares({1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")})
        assert int.from_bytes(found, "big") == wanted


def test_the_field_is_one() -> None:
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


def test_one_share_is_enough_where_the_threshold_is_one() -> None:
    assert combine_shares(create_shares(b"x" * 32, 1, [5])) == b"x" * 32


@pytest.mark.parametrize("shares", [{}, {1: b""}, {1: b"x" * 33, 2: b"x" * 32}, {1: b"\xff" * 34}])
def test_shares_that_do_not_fit_are_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match="length"):
        combine_shares(shares)


@pytest.mark.parametrize(
    ("secret", "threshold", "points"), [(b"x", 2, [1, 2]), (bytes(32), 3, [1, 2]), (bytes(32), 1, [0])]
)
def test_what_cannot_be_shared_is_refused(secret: bytes, threshold: int, points: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        create_shares(secret, threshold, points)
