"""Who signs with which key, as a client was told by somebody else than the server.

Secure aggregation against a server that lies needs keys that the server cannot make up (Bonawitz et al. 2017, section
6.2): what a client says to its peers through the server is signed by its node key, and they look the key up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

_HASH = ec.ECDSA(hashes.SHA256())
_LONGEST = 72
"""Bytes of a signature: the others are told it, so nobody's may be long, checked or not."""


@dataclass(frozen=True)
class Roster:
    """The public key that speaks for each user, and one's own private key. Without keys nothing is signed."""

    keys: Mapping[int, ec.EllipticCurvePublicKey] | None = None
    own: ec.EllipticCurvePrivateKey | None = None

    @property
    def signed(self) -> bool:
        return self.keys is not None

    def knows(self, user: int) -> bool:
        return self.keys is None or user in self.keys

    def sign(self, message: bytes) -> bytes:
        return b"" if self.own is None else self.own.sign(message, _HASH)

    def verify(self, user: int, signature: object, message: bytes) -> bool:
        """Whether this user has signed the message; where there are no keys nobody can tell."""
        if not isinstance(signature, bytes) or len(signature) > _LONGEST:
            return False
        if self.keys is None:
            return True
        if user not in self.keys:
            return False
        try:
            self.keys[user].verify(signature, message, _HASH)
        except InvalidSignature:
            return False
        return True


UNSIGNED = Roster()
"""For rehearsals, and for servers that are believed to follow the protocol."""
