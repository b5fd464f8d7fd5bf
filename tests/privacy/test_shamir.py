"""Shares open a secret from the threshold on, and whatever shares they are."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("Crypto", reason="needs the extra deploy")

from confide.privacy.trust.shamir import combine_shares, create_shares


def test_any_shares_from_the_threshold_on_open_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = create_shares(secret, 3, 5)
    assert all(combine_shares(list(some)) == secret for some in itertools.permutations(shares, 3))
    assert combine_shares(shares) == secret
    assert all(combine_shares(list(some)) != secret for some in itertools.combinations(shares, 2))


@pytest.mark.parametrize("shares", [[b""], [b"1234"], [b"x" * 20, b"x" * 36], [b"x" * 21], [b"x" * 20, b"x" * 20]])
def test_shares_that_do_not_fit_are_refused(shares: list[bytes]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        combine_shares(shares)
