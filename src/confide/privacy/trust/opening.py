"""The server's side of secure aggregation: the sum of masked updates, from which the masks are taken at the end.

Whoever deals shares says a hash of each, and of its seed; whoever gets one sees that it fits, or names the dealer. So a
share that does not fit its hash was made up by who gives it, and shares that fit and do not open what they should were
made up by who dealt them: the culprit has a name, whoever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from confide.privacy.trust.secure import BOX, agree, seed_hash, share_hash
from confide.privacy.trust.secure_sum import Ring, dequantise, mask, prg
from confide.privacy.trust.shamir import SHARE, combine_shares


class Unopened(ValueError):
    """The masks of a sum cannot be taken off; `culprits` says because of whom, as far as it is known."""

    def __init__(self, text: str, culprits: Mapping[int, str]) -> None:
        super().__init__(text)
        self.culprits = dict(culprits)


@dataclass
class Deal:
    """What one user dealt, as the server sees it."""

    masking: bytes
    holders: list[int]
    boxes: list[bytes]
    hashes: list[bytes]
    commitment: bytes
    damaged: set[int] = field(default_factory=set)
    """Who says that its share is damaged."""
    shares: dict[int, bytes] = field(default_factory=dict)
    """Of the seed, or of the masking key, by holder."""

    @staticmethod
    def read(user: int, masking: bytes, picks: set[int], facts: Mapping[str, Any]) -> Deal | None:
        """A deal for exactly those whom the user drew and who are here; none if it is malformed.

        What is passed on has the size that it has to have: nobody can make the message to another too long to be sent.
        """
        holders, commitment = sorted(picks), facts.get("commitment")
        boxes, hashes = facts.get("boxes"), facts.get("hashes")
        lengths = [0 if holder == user else BOX for holder in holders]
        if user not in picks or facts.get("holders") != holders or not _sized(boxes, lengths):
            return None
        if not _sized(hashes, [32] * len(holders)) or not isinstance(commitment, bytes) or len(commitment) != 32:
            return None
        return Deal(masking, holders, boxes, hashes, commitment)

    def for_holder(self, holder: int) -> tuple[bytes, bytes]:
        """The hashes of a holder's shares, and the box that they are in."""
        at = self.holders.index(holder)
        return self.hashes[at], self.boxes[at]


class Opening:
    """The sum, while it is masked."""

    def __init__(
        self, ring: Ring, nonce: str, step: int, deals: dict[int, Deal], edges: Mapping[int, set[int]]
    ) -> None:
        """`edges`: towards whom each user of `deals` has masked."""
        self.ring, self.nonce, self.step, self.deals, self.edges = ring, nonce, step, deals, edges
        self.total = np.zeros(ring.dimension, dtype=ring.dtype)
        self.arrived: set[int] = set()

    def take(self, user: int, vector: Any, damaged: Any) -> bool:
        """Add a masked update; `damaged` are those whose shares this user could not read."""
        if user in self.arrived or user not in self.deals:
            return False
        if not isinstance(damaged, list) or any(type(dealer) is not int for dealer in damaged):
            return False
        if not isinstance(vector, np.ndarray) or vector.dtype != self.ring.dtype or vector.shape != self.total.shape:
            return False
        self.total += vector
        self.arrived.add(user)
        for dealer in damaged:
            if dealer in self.deals and user in self.deals[dealer].holders:
                self.deals[dealer].damaged.add(user)
        return True

    def take_shares(self, holder: int, of: Any, shares: Any) -> bool:
        """Keep the shares that a user gives, and say whether these are all that it has, as their dealers said."""
        dealers = {dealer for dealer in self.edges[holder] | {holder} if holder in self.deals[dealer].holders}
        owed = sorted(dealer for dealer in dealers if holder not in self.deals[dealer].damaged)
        if of != owed or not _sized(shares, [SHARE] * len(owed)):
            return False
        honest = True
        for dealer, share in zip(owed, shares, strict=True):
            deal = self.deals[dealer]
            said = deal.for_holder(holder)[0]
            if share_hash(share) == (said[:16] if dealer in self.arrived else said[16:]):
                deal.shares[holder] = share
            else:
                honest = False
        return honest

    def open(self, quorum: int) -> Tensor:
        """The sum of the noisy updates, in double precision. Raises `Unopened` where shares do not open it."""
        total, culprits, short = self.total.copy(), dict[int, str](), list[int]()
        for user, deal in self.deals.items():
            if len(deal.shares) < quorum:
                short.append(user)
                continue
            secret = self._secret(user, {holder + 1: deal.shares[holder] for holder in sorted(deal.shares)[:quorum]})
            if secret is None:
                culprits[user] = "the shares that it dealt do not open its secret"
            elif user in self.arrived:
                total -= prg(self.ring, secret, self.step)
            else:
                key = X25519PrivateKey.from_private_bytes(secret)
                peers = self.edges[user] & self.arrived
                pairs = {u: agree(key, self.deals[u].masking, self.nonce, "mask") for u in peers}
                total += mask(self.ring, user, pairs, self.step)
        if culprits or short:
            raise Unopened(f"the shares of {len(short) + len(culprits)} users do not open", culprits)
        return dequantise(self.ring, total)

    def _secret(self, user: int, shares: dict[int, bytes]) -> bytes | None:
        """A user's seed, or its masking key if it has not arrived; none where it is not what it has to be."""
        try:
            secret = combine_shares(shares)
        except ValueError:
            return None
        deal = self.deals[user]
        if user in self.arrived:
            return secret if seed_hash(secret) == deal.commitment else None
        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        return secret if public == deal.masking else None


def _sized(values: Any, sizes: list[int]) -> TypeGuard[list[bytes]]:
    """Whether these are bytes of these lengths."""
    if not isinstance(values, list) or len(values) != len(sizes):
        return False
    return all(isinstance(value, bytes) and len(value) == size for value, size in zip(values, sizes, strict=True))
