"""Secure aggregation over clients: the server learns the noisy sum and no single update (Bonawitz et al. 2017).

Four exchanges in a round, over any `Link`:

1. keys     every user of the cohort makes two fresh X25519 key pairs and sends the public halves;
2. shares   each draws a seed of its own, splits it and its masking key into Shamir shares, one for each other user,
            and sends them encrypted for their owners;
3. masked   each trains, bounds, adds its share of the noise, rounds to the ring, adds the masks of all pairs and of
            its own seed, and sends the result;
4. unmask   each of those who are left gives, for a user whose masked update arrived, the share of its seed, and for
            one who vanished the share of its masking key; never both.

Threshold. t is more than half of the cohort, and at least the round's minimum. A client helps to unmask only if t
masked updates have arrived, and each share of the noise is made for t of them (`own_noise`): a sum with less noise than
the ledger says is never opened, and with fewer answers the round is abandoned. How many answered must not show in the
noise, or the models would tell the cohort's size: the server brings it up to the same variance in every round.

Arithmetic. `secure_sum`'s ring of 64 bits: sums are exact, and the rounding's sensitivity is within what
bounding keeps back. Shamir's scheme is pycryptodome's (`shamir`); masks are AES in counter mode.

Why not Flower's SecAgg+ as it is shipped: its workflow weighs and averages in its own FedAvg loop, clips coordinates to
a range and rounds them at random to 2^22 levels of 32 bits, after the noise would have been added. Both change the
sensitivity and the noise by an amount that no line of the ledger knows.

Guarantee and limits. The server is taken to be honest but curious: it does as it should and may look at all it gets.
One that lies could pretend to be clients (their keys are not certified to each other). It cannot bound again what it
cannot see: a hostile client can spoil a round, and is only caught if the whole sum is longer than bounds and noise
allow. Clients know their own noise. Against c of them 2 - c / t of the stated variance remain, since they do not know
what the server added; against the server with c of them (t - c) / t (`server_view` states both for one client).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from confide.errors import UserError
from confide.privacy.trust.own_noise import TAIL
from confide.privacy.trust.secure_sum import Ring, Vector, dequantise, make_ring, mask, prg, sensitivity
from confide.privacy.trust.shamir import combine_shares, create_shares

KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"
_NOISE_ENDS = 13.0  # no noise is longer, in deviations: gaussian.System ends at 12.7


def threshold(cohort: int, minimum: int) -> int:
    """How many of a cohort have to answer: more than half. One user alone answers under noise that is whole."""
    return max(minimum, cohort // 2 + 1)


def ring_for(bound: float, weight: float, scale: float, cohort: int, dimension: int, used: float) -> Ring:
    """The ring of a round. Bounded updates use at most the share `used` of the bound; rounding must fit the rest."""
    largest = weight * bound
    ring = make_ring(largest + _NOISE_ENDS * scale, cohort, dimension)
    if sensitivity(largest * used, ring.step, dimension) > largest:
        raise UserError(
            f"a cohort of {cohort} and {dimension} parameters leave too little room for exact sums in 64 bits; lower "
            "the cohort or the noise"
        )
    return ring


def clamp(ring: Ring, values: Vector) -> Vector:
    """Whole steps as numbers of the ring, none beyond what it has room for."""
    most = math.floor(ring.bound / ring.step)
    return np.clip(values, -most, most).astype(np.int64).astype(ring.dtype)


@dataclass
class Session:
    """One user's part in one round. All secrets are fresh and live as long as the round."""

    user: int
    nonce: str
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    sealing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    seed: bytes = b""
    least: int = 0
    peers: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of each user whose shares came: its seed's and its masking key's."""
    opened: bool = False

    def public(self) -> list[bytes]:
        return [self.masking.public_key().public_bytes_raw(), self.sealing.public_key().public_bytes_raw()]

    def deal(self, users: list[int], masking: list[bytes], sealing: list[bytes], least: int) -> list[bytes]:
        """Draw this user's seed and return shares of its secrets for each of `users`, each sealed for its owner."""
        if self.peers or self.user not in users or len(set(users)) != len(users):
            raise UserError("the server's list of users is not one of a round that this client is in")
        if not len(users) // 2 < least <= len(users):
            raise UserError(f"a threshold of {least} for {len(users)} users is not more than half of them")
        self.least, self.seed = least, os.urandom(32)
        self.peers = {u: (m, s) for u, m, s in zip(users, masking, sealing, strict=True)}
        seeds, secrets = (
            create_shares(secret, least, len(users)) if least > 1 else [secret]  # Shamir's scheme needs two users
            for secret in (self.seed, self.masking.private_bytes_raw())
        )
        return [
            self._cipher(user).encrypt(_direction(self.user, user), seed + secret, None)
            for user, seed, secret in zip(users, seeds, secrets, strict=True)
        ]

    def receive(self, users: list[int], sealed: list[bytes]) -> None:
        if self.held:  # two updates under one mask would differ by something that nothing hides
            raise UserError("this client has already sent its masked update of this round")
        for user, box in zip(users, sealed, strict=True):
            try:
                content = self._cipher(user).decrypt(_direction(user, self.user), box, None)
            except InvalidTag:
                raise UserError(f"the shares of user {user} are damaged or not meant for user {self.user}") from None
            self.held[user] = (content[: len(content) // 2], content[len(content) // 2 :])
        if len(self.held) < self.least or self.user not in self.held:
            raise UserError(f"shares of {len(self.held)} users came, and {self.least} are needed")

    def mask(self, ring: Ring, step: int) -> Vector:
        pairs = {u: agree(self.masking, self.peers[u][0], self.nonce, "mask") for u in self.held if u != self.user}
        return mask(ring, self.user, pairs, step, self.seed)

    def shares(self, arrived: list[int]) -> list[bytes]:
        """Give the seed's share of each user who arrived and the key's of each other one, sorted by user; once only."""
        if self.opened or len(set(arrived)) < self.least or set(arrived) - set(self.held) or self.user not in arrived:
            raise UserError(f"{len(set(arrived))} masked updates are not enough to open the sum; {self.least} are")
        self.opened = True
        return [self.held[u][0] if u in arrived else self.held[u][1] for u in sorted(self.held)]

    def _cipher(self, user: int) -> ChaCha20Poly1305:
        """The cipher that seals shares between this user and another."""
        return ChaCha20Poly1305(agree(self.sealing, self.peers[user][1], self.nonce, "seal"))


def agree(own: X25519PrivateKey, theirs: bytes, nonce: str, purpose: str) -> bytes:
    """Derive the key of a pair of users, for one round and one purpose."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    return HKDF(hashes.SHA256(), 32, nonce.encode(), f"confide {purpose}".encode()).derive(shared)


def _direction(sender: int, receiver: int) -> bytes:
    """A nonce for each direction of a pair: the two use one key."""
    return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


class Opening:
    """The server's sum of masked updates, from which it takes the masks off at the end."""

    def __init__(self, ring: Ring, nonce: str, step: int, public: Mapping[int, bytes], least: int) -> None:
        """`public`: the masking keys of the users whose shares were dealt."""
        self.ring, self.nonce, self.step, self.public, self.least = ring, nonce, step, public, least
        self.total = np.zeros(ring.dimension, dtype=ring.dtype)
        self.arrived: set[int] = set()
        self.shares: dict[int, list[bytes]] = {user: [] for user in public}

    def take(self, user: int, vector: Any) -> bool:
        if user in self.arrived or user not in self.public:
            return False
        if not isinstance(vector, np.ndarray) or vector.dtype != self.ring.dtype or vector.shape != self.total.shape:
            return False
        self.total += vector
        self.arrived.add(user)
        return True

    def take_shares(self, shares: Any) -> bool:
        users = sorted(self.public)
        if not isinstance(shares, list) or len(shares) != len(users) or not all(isinstance(s, bytes) for s in shares):
            return False
        for user, share in zip(users, shares, strict=True):
            self.shares[user].append(share)
        return True

    def open(self) -> Tensor:
        """The sum of the noisy updates, in double precision. Raises ValueError if shares do not fit."""
        total = self.total.copy()
        for user in sorted(self.public):
            shares = self.shares[user][: self.least]
            secret = combine_shares(shares) if self.least > 1 else shares[0]
            if user in self.arrived:
                total -= prg(self.ring, secret, self.step)
            else:
                key = X25519PrivateKey.from_private_bytes(secret)
                pairs = {u: agree(key, self.public[u], self.nonce, "mask") for u in self.arrived}
                total += mask(self.ring, user, pairs, self.step)
        return dequantise(self.ring, total)


def longest(ring: Ring, bound: float, weight: float, scale: float, arrived: int) -> float:
    """Return the norm that no sum of so many honest answers exceeds, but with probability 2e-22."""
    noise = scale * math.sqrt(arrived) * (math.sqrt(ring.dimension) + TAIL)
    return float(arrived * weight * bound + noise + ring.step * math.sqrt(ring.dimension) * arrived)
