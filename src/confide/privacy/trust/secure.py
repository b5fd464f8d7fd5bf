"""Secure aggregation over clients: the server learns the noisy sum and no single update (Bonawitz et al. 2017).

Five exchanges in a round, over any link. A client trusts the server with none of them:

1. keys     the server says who is in the round and the threshold t; each draws its neighbours (`neighbours`), makes two
            fresh X25519 key pairs, and signs the public halves with its node key, together with what it was told;
2. shares   each checks its neighbours' signatures against its own roster (`roster`), draws a seed, splits it and its
            masking key into Shamir shares among those whom it drew, and sends them encrypted for their owners;
3. masked   each trains, bounds, adds its share of the noise, rounds to the ring, adds the masks of all pairs and of
            its own seed, and sends the result; it names those whose shares are damaged;
4. confirm  the server says whose masked updates arrived; each signs that list, if t are in it;
5. unmask   each sees that a quorum of its neighbours has signed the same list, and gives, for a user whose masked
            update arrived, the share of its seed, and for one who vanished the share of its masking key; never both.

Threshold. t is more than two thirds of the cohort, and at least the round's minimum. A client helps to unmask only if t
masked updates have arrived, and each share of the noise is made for t of them (`own_noise`): a sum with less noise than
the ledger says is never opened, and with fewer answers the round is abandoned. How many answered must not show in the
noise, or the models would tell the cohort's size: the server brings it up to the same variance in every round.

Arithmetic. `secure_sum`'s ring of 64 bits: sums are exact, and the rounding's sensitivity is within what
bounding keeps back. Masks are AES in counter mode.

Why not Flower's SecAgg+ as it is shipped: its workflow weighs and averages in its own FedAvg loop, clips coordinates to
a range and rounds them at random to 2^22 levels of 32 bits, after the noise would have been added. Both change the
sensitivity and the noise by an amount that no line of the ledger knows.

Guarantee and limits. With a roster that the server did not make, a server that lies, replaces keys, says different
things to different clients or asks for both shares gets no sum of fewer than t updates, as long as less than a third of
a cohort is hostile (a tenth, where it has more than 64 clients). Without keys it has to be honest, if curious. A share
of a secret is hashed by who dealt it, so that whoever gives a false one is known (`opening`). Nobody can bound again
what nobody sees: a hostile client can spoil a round by a long update, and is only caught if the whole sum is longer
than bounds and noise allow. Clients know their own noise. Against c of them 2 - c / t of the stated variance
remain, since they do not know what the server added; against the server with c of them (t - c) / t.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256
from random import SystemRandom
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from confide.errors import UserError
from confide.privacy.trust.neighbours import neighbourhood, quorum
from confide.privacy.trust.own_noise import TAIL
from confide.privacy.trust.roster import UNSIGNED, Roster
from confide.privacy.trust.secure_sum import Ring, Vector, make_ring, mask, sensitivity
from confide.privacy.trust.shamir import SHARE, create_shares

KEYS, SHARES, MASKED, CONFIRM, UNMASK = "keys", "shares", "masked", "confirm", "unmask"
_TAG = 16  # of ChaCha20Poly1305
BOX = 2 * SHARE + _TAG
"""Bytes of the two shares that one user deals to another, sealed."""
_NOISE_ENDS = 13.0  # no noise is longer, in deviations: gaussian.System ends at 12.7


def threshold(cohort: int, minimum: int) -> int:
    """How many of a cohort have to answer: more than two thirds. One user alone answers under noise that is whole."""
    return max(minimum, quorum(cohort))


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


class Distrust(UserError):
    """What the server says does not fit what this client or its peers know. It leaves the round, not the run."""


@dataclass
class Session:
    """One user's part in one round. All secrets are fresh and live as long as the round."""

    user: int
    nonce: str
    step: int
    cohort: list[int]
    """Who is in the round, as the server says."""
    least: int
    roster: Roster = UNSIGNED
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    sealing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    seed: bytes = field(default_factory=lambda: os.urandom(32))
    peers: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)
    """The neighbours who dealt shares, towards whom this user masks."""
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of each user whose shares came: its seed's and its masking key's."""
    arrived: frozenset[int] | None = None
    opened: bool = False

    def __post_init__(self) -> None:
        users, size = self.cohort, len(self.cohort)
        if any(type(user) is not int or user < 0 for user in users) or len(set(users)) != size:
            raise Distrust("the server's list of users is none of a round")
        strangers = [user for user in users if not self.roster.knows(user)]
        if self.user not in users or strangers:
            raise Distrust(f"the server's round has users {strangers[:5]} that this client's roster has not")
        if not 2 * size // 3 < self.least <= size:
            raise Distrust(f"a threshold of {self.least} for {size} users is not more than two thirds of them")
        self.context = context(self.nonce, self.step, users, self.least)
        wanted = neighbourhood(size)
        self.quorum = quorum(wanted)
        others = [user for user in users if user != self.user]
        self.picks = {self.user, *SystemRandom().sample(others, wanted - 1)}

    def begin(self) -> dict[str, Any]:
        """Say this user's public keys, signed, and the neighbours that it drew."""
        public = [key.public_key().public_bytes_raw() for key in (self.masking, self.sealing)]
        signature = self.roster.sign(keys_message(self.context, self.user, *public))
        return {"public": [*public, signature], "picks": sorted(self.picks)}

    def deal(self, peers: list[list[Any]]) -> dict[str, Any]:
        """Return shares of this user's secrets for each neighbour, sealed for it, and what they are checked by."""
        if self.peers:
            raise Distrust("this client has already dealt its shares of this round")
        for user, masking, sealing, signature in peers:
            message = keys_message(self.context, user, masking, sealing)
            if user not in self.cohort or not self.roster.verify(user, signature, message):
                raise Distrust(f"the keys of user {user!r:.20} are not signed by it for this round")
            self.peers[user] = (masking, sealing)
        holders = sorted(self.picks & (self.peers.keys() | {self.user}))
        self._enough(holders, "are in the round")
        secrets = self.seed, self.masking.private_bytes_raw()
        seeds, keys = (create_shares(secret, self.quorum, (u + 1 for u in holders)) for secret in secrets)
        hashes = [share_hash(seeds[u + 1]) + share_hash(keys[u + 1]) for u in holders]
        self.held[self.user] = seeds[self.user + 1], keys[self.user + 1]
        boxes = [
            b"" if u == self.user
            else self._cipher(u).encrypt(_direction(self.user, u), seeds[u + 1] + keys[u + 1], about)
            for u, about in zip(holders, hashes, strict=True)
        ]  # fmt: skip
        return {"holders": holders, "boxes": boxes, "hashes": hashes, "commitment": seed_hash(self.seed)}

    def receive(self, dealt: list[int], boxes: list[list[Any]]) -> list[int]:
        """Take the shares of those who drew this user; return whose are damaged."""
        if self.active or not self.peers.keys() >= set(dealt):  # two updates under one mask: nothing hides what differs
            raise Distrust("this client has sent its masked update of this round, or was told of other peers")
        self._enough(self.picks & {*dealt, self.user}, "have dealt shares")
        self.active, damaged = {*dealt, self.user}, []
        for user, about, box in boxes:
            try:
                content = self._cipher(user).decrypt(_direction(user, self.user), box, about)
                seed, key = content[: len(content) // 2], content[len(content) // 2 :]
                if share_hash(seed) + share_hash(key) != about:
                    raise ValueError("shares that are not what was said of them")
                self.held[user] = seed, key
            except (InvalidTag, ValueError):
                damaged.append(user)
        return damaged

    def mask(self, ring: Ring) -> Vector:
        pairs = {u: agree(self.masking, self.peers[u][0], self.nonce, "mask") for u in self.active if u != self.user}
        return mask(ring, self.user, pairs, self.step, self.seed)

    def confirm(self, arrived: list[int]) -> bytes:
        """Sign the list of those whose masked updates arrived; one list only."""
        found = frozenset(arrived)
        if self.arrived is not None or not self.active:
            raise Distrust("this client has signed the list of this round, or has sent nothing in it")
        if len(found) < self.least or self.user not in found or not found <= set(self.cohort):
            raise Distrust(f"{len(found)} masked updates are not enough to open the sum; {self.least} are")
        self._enough(self.picks & self.active & found, "have arrived")
        self.arrived = found
        return self.roster.sign(list_message(self.context, found))

    def shares(self, signatures: list[list[Any]]) -> dict[str, Any]:
        """Give the seed's share of each user who arrived and the key's of each other one; once only."""
        if self.opened or self.arrived is None:
            raise Distrust("this client has given its shares of this round, or has signed no list")
        message, found = list_message(self.context, self.arrived), self.arrived
        agree_ = {u for u, s in signatures if u in self.picks & found and self.roster.verify(u, s, message)}
        self._enough(agree_ | {self.user}, "have signed the same list")
        self.opened = True
        given = sorted(self.held)
        return {"of": given, "shares": [self.held[u][0 if u in found else 1] for u in given]}

    def _enough(self, here: Collection[int], what: str) -> None:
        if len(here) < self.quorum:
            raise Distrust(
                f"{len(here)} of this client's {len(self.picks)} neighbours {what}; {self.quorum} are needed"
            )

    def _cipher(self, user: int) -> ChaCha20Poly1305:
        """The cipher that seals shares between this user and another."""
        return ChaCha20Poly1305(agree(self.sealing, self.peers[user][1], self.nonce, "seal"))


def context(nonce: str, step: int, cohort: Collection[int], least: int) -> bytes:
    """Name a round as it was announced: who was told another thing names another round."""
    return _digest("round", nonce, step, least, *sorted(cohort))


def keys_message(context: bytes, user: int, masking: bytes, sealing: bytes) -> bytes:
    """What a user signs about its keys."""
    return _digest("keys", context, user, masking, sealing)


def list_message(context: bytes, arrived: Collection[int]) -> bytes:
    """What a user signs about who has arrived."""
    return _digest("arrived", context, *sorted(arrived))


def share_hash(share: bytes) -> bytes:
    return _digest("share", share)[:16]


def seed_hash(seed: bytes) -> bytes:
    return _digest("seed", seed)


def _digest(*parts: object) -> bytes:
    return sha256(repr(("confide secure sum", *parts)).encode()).digest()


def agree(own: X25519PrivateKey, theirs: bytes, nonce: str, purpose: str) -> bytes:
    """Derive the key of a pair of users, for one round and one purpose."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    return HKDF(hashes.SHA256(), 32, nonce.encode(), f"confide {purpose}".encode()).derive(shared)


def _direction(sender: int, receiver: int) -> bytes:
    """A nonce for each direction of a pair: the two use one key."""
    return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


def longest(ring: Ring, bound: float, weight: float, scale: float, arrived: int) -> float:
    """Return the norm that no sum of so many honest answers exceeds, but with probability 2e-22."""
    noise = scale * math.sqrt(arrived) * (math.sqrt(ring.dimension) + TAIL)
    return float(arrived * weight * bound + noise + ring.step * math.sqrt(ring.dimension) * arrived)
