"""Counter-based randomness: every draw is addressed by (seed, purpose, step, user).

A Philox generator is a pure function of a key and a counter, so a value does not depend on what was drawn before
it, on the process that draws it, or on the number of workers. The key is a hash of the run's seed and the
purpose; step and user are the upper words of the counter, which leaves 2**128 draws to each address.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, step: int = 0, user: int = 0) -> np.random.Generator:
    """The generator at one address. Two addresses never share a draw; the same address repeats its own."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, user, step]))


class Addresses:
    """The generators of many users at one step, for whoever needs them in numbers.

    `at(user)` draws what `generator(seed, purpose, step, user)` draws, in a tenth of the time: it is the same object
    every time, set to another address, and therefore only valid until the next call.
    """

    def __init__(self, seed: int, purpose: str, step: int) -> None:
        self._generator = generator(seed, purpose, step)
        self._bits = self._generator.bit_generator
        self._fresh = self._bits.state

    def at(self, user: int) -> np.random.Generator:
        self._fresh["state"]["counter"][2] = user
        self._bits.state = self._fresh
        return self._generator
