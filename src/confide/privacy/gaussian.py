"""Where Gaussian noise comes from: `Seeded` for research, `System` for a release. Both add it in place, over threads.

A keystream of AES in counter mode is cut into words, and the Box-Muller transform makes two normal values of two
words: r = sqrt(-2 log u), (r cos a, r sin a). A vector is cut into blocks; block b of it reads the counters from
b 2^64 on, so blocks share nothing, and neither the number of threads nor their order changes a value. A block per
thread is all the memory used besides the vector itself. No draw is rejected, so the time taken reveals nothing about
the noise (the timing attack of Jin et al. 2022 on discrete samplers).

`Seeded` takes its key from a hash of seed, purpose, step, user and attempt, and can be drawn again by whoever knows
these. Its lowest bits are not protected. In single precision its |x| end at 6.56 (`SEEDED_END`), which 5 in 10^11 of a
true Gaussian exceed: a release beyond that end shows that somebody moved it there. An update on one coordinate does
so with probability P(x > 6.56 - 1/z), which is 1.4e-8 in a step at z = 1 and 2.6e-6 at z = 0.5; one that is spread
evenly over d coordinates with about 1.9e-10 sqrt(d) / z. No stated delta includes this (in double precision the end is
9.35).

`System` takes a fresh key from the operating system for every vector. The key is never stored and never returned, so
no crash, checkpoint or copy of the machine's disk can make it draw the same noise again.

Attacks on floating point. Floating-point samplers miss some values, and a sum of floating-point numbers keeps a trace
of its terms in the lowest bits: whether a released value is possible at all can depend on the secret (Mironov 2012 for
Laplace noise; Jin et al. 2022 for Gaussian noise, with success against DP-SGD). `System` releases, for a sum s,

    round(s + scale x + dither) to multiples of grid,    grid in (2^-11, 2^-10] scale,    dither uniform in +-grid / 2.

Guarantee: dither and rounding only process s + scale x, so if x is Gaussian the release is exactly as private as the
Gaussian mechanism with that scale, and its sensitivity is unchanged. What they take away is the attack: every multiple
of the grid is possible for every s, and the lattice of x in single precision (2^-24 near 1, ten thousand points in the
dither) is smoothed before it can be seen. Cost: the variance grows by grid^2 / 6, less than 2 in 10^7.

Limits. x is not proven Gaussian but is so up to the accuracy of single-precision log, sin and cos (relative 1e-7, scale
rounded up). The uniform u has 24 significant bits at any magnitude and ends at 2^-117: |x| ends at 12.7, a pair of a
true Gaussian lies beyond with probability 6e-36, and any of 2,000 vectors of 255 million values with 2e-24. The
truncation's whole share in delta is at most 1 + e^epsilon times that. Summing the users' updates in floating point
before the noise has rounding of its own (Casacuberta et al. 2022), which `secure_sum` avoids. Python cannot wipe the
key from memory.

Differs from the papers: Mironov snaps a clamped Laplace release; here the Gaussian is unclamped and dithered.
Holohan and Braghin (2021, section 5.1; Opacus' secure mode) add 2n >= 4 Gaussians per value so that a search for the
uniforms behind an observed value takes 2^(53 (2n - 1)) trials, but their sum still carries its lowest bits into the
release. Here 127 random bits go into two values of which rounding leaves about 12 bits each, so every pair of values
has some 2^100 explanations for every s, and a search has nothing to find: one Box-Muller pair for two values is enough.

1. I. Mironov. On significance of the least significant bits for differential privacy. CCS 2012.
2. J. Jin, E. McMurtry, B. Rubinstein, O. Ohrimenko. Are we there yet? Timing and floating-point attacks on differential
   privacy systems. IEEE S&P 2022.
3. N. Holohan, S. Braghin. Secure random sampling in differential privacy. ESORICS 2021.
4. S. Casacuberta, M. Shoemate, S. Vadhan, C. Wagaman. Widespread underestimation of sensitivity in differentially
   private libraries and how to fix it. CCS 2022.
5. G. Box, M. Muller. A note on the generation of random normal deviates. Ann. Math. Stat. 1958.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from confide.errors import UserError
from confide.files import usable_cores

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 19
"""Coordinates at a time, with counters of their own. Fewer would fit a nearer cache, but threads would then wait for
the interpreter's lock between their short calls, which costs more; with these, scratch is 12 MB a thread."""
GRID_BITS = 10
SEEDED_END = math.sqrt(62 * math.log(2))
"""The largest |x| of seeded noise in single precision: its uniform has 31 bits."""
SYSTEM_END = math.sqrt(234 * math.log(2))
"""The largest |x| of system noise, whose uniform ends at 2^-117."""
_AES_BLOCK = 16
_FULL_RESOLUTION = 2.0**24  # single precision tells all integers below this apart


@dataclass(frozen=True)
class Address:
    """Where a draw of noise belongs: a seeded draw is a function of the seed and this."""

    step: int
    user: int = 0
    attempt: int = 0
    purpose: str = "noise"


class Source(ABC):
    """Standard normal noise. Both methods return the sum of squares of what they drew, added up in a fixed order."""

    repeatable: ClassVar[bool]
    """Whether the same address gives the same noise again; if not, each draw needs a ledger line of its own."""

    def fill(self, out: Tensor, address: Address) -> float:
        """Overwrite a flat vector."""
        return self._draw(out, 1.0, address, True)

    def add(self, out: Tensor, scale: float, address: Address) -> float:
        """Add noise of standard deviation `scale` to a flat vector."""
        return self._draw(out, scale, address, False)

    @abstractmethod
    def _draw(self, out: Tensor, scale: float, at: Address, overwrite: bool) -> float: ...


@dataclass(frozen=True)
class Seeded(Source):
    """Repeatable noise for research. Not for release: whoever knows the seed can subtract it."""

    seed: int
    threads: int | None = None
    repeatable: ClassVar[bool] = True

    def _draw(self, out: Tensor, scale: float, at: Address, overwrite: bool) -> float:
        place = f"{self.seed}/{at.purpose}/{at.step}/{at.user}/{at.attempt}"
        key = hashlib.blake2b(place.encode(), digest_size=16, person=b"confide noise").digest()
        wide = out.dtype == torch.float64
        kinds = (np.int64, np.int64, np.float64) if wide else (np.int32, np.int32, np.float32)

        def one(part: Array, scratch: _Scratch) -> float:
            return _put_normal(part, scratch, scale, overwrite)

        return _run_over_blocks(out, scale, key, self.threads, lambda pairs: _Scratch(pairs, *kinds), one)


@dataclass(frozen=True)
class System(Source):
    """Cryptographic noise for a release: a fresh key for every call, so addresses are not used and nothing repeats."""

    threads: int | None = None
    lattice: float | None = None
    """What released values are multiples of, where that must not follow the scale; none: `grid(scale)`."""
    repeatable: ClassVar[bool] = False

    def _draw(self, out: Tensor, scale: float, at: Address, overwrite: bool) -> float:
        kind: type[Any] = np.float64 if out.dtype == torch.float64 else np.float32
        step = self.lattice or grid(scale)
        # Adding and subtracting this rounds to multiples of `step`, which is what its last bit is worth. Values so
        # large that it does not (thousands of scales) have a last bit worth at least half a step themselves.
        anchor = np.array(1.5 * 2.0 ** np.finfo(kind).nmant * step, dtype=kind)
        dither_step = np.array(step * 2.0**-16, dtype=np.float32)

        def one(part: Array, scratch: _Scratch) -> float:
            squares = _put_normal(part, scratch, scale, overwrite, open_tail=True)
            np.copyto(scratch.normal, scratch.dither)
            np.multiply(scratch.normal, dither_step, out=scratch.normal)
            np.add(part, scratch.normal[: len(part)], out=part)
            np.add(part, anchor, out=part)
            np.subtract(part, anchor, out=part)
            return squares

        kinds = (np.int64, np.int32, np.float32)
        key = os.urandom(32)
        return _run_over_blocks(out, scale, key, self.threads, lambda pairs: _Scratch(pairs, *kinds, dither=True), one)


def grid(scale: float) -> float:
    """`System` releases multiples of this: the power of two in (2^-11, 2^-10] scale."""
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


class _Scratch:
    """The memory that one block is made in: words of keystream, each pair's radius and angle, its two normal values."""

    def __init__(self, pairs: int, radius: type[Any], angle: type[Any], real: type[Any], dither: bool = False) -> None:
        words = [np.dtype(radius).itemsize * pairs, np.dtype(angle).itemsize * pairs, 4 * pairs if dither else 0]
        ends = np.cumsum(words)
        self.zeros = bytes(int(ends[-1]))
        stream = np.empty(len(self.zeros) + _AES_BLOCK, dtype=np.uint8)
        self.stream = stream.data
        self.radius: Array = stream[: ends[0]].view(radius)
        self.angle: Array = stream[ends[0] : ends[1]].view(angle)
        self.dither: Array = stream[ends[1] : ends[2]].view(np.int16)
        self.normal: Array = np.empty(2 * pairs, dtype=real)
        self.first, self.second = self.normal[:pairs], self.normal[pairs:]
        self.turn: Array = np.empty(pairs, dtype=real)
        # numpy has the cheaper calls, torch the faster log, sin and cos; both see the same memory.
        self.log_of, self.sin_of, self.cos_of = (torch.from_numpy(a) for a in (self.first, self.second, self.turn))
        # Words made negative stand for the upper ends of cells of (0, 1]: none is 0, and it takes one operation.
        self.sign = np.array(np.iinfo(radius).min, dtype=radius)
        self.unit = np.array(-(2.0 ** (1 - np.iinfo(radius).bits)), dtype=real)
        self.half_turn = np.array(math.pi * 2.0 ** (1 - np.iinfo(angle).bits), dtype=real)


def _put_normal(part: Array, scratch: _Scratch, scale: float, overwrite: bool, open_tail: bool = False) -> float:
    """Write normal values into `part`, or add them to it, by Box-Muller; return the sum of their squares."""
    radius, other, turn = scratch.first, scratch.second, scratch.turn
    np.bitwise_or(scratch.radius, scratch.sign, out=scratch.radius)
    np.copyto(radius, scratch.radius, casting="unsafe")
    if open_tail:
        _open_tail(radius)
    np.multiply(radius, scratch.unit, out=radius)
    torch.log(scratch.log_of, out=scratch.log_of)
    np.multiply(radius, -_rounded_up(2 * scale * scale, radius.dtype), out=radius)
    # In a cascade, so good to 1e-7, in a third of numpy's time; blocks are added up in double precision.
    squares = float(torch.sum(scratch.log_of))
    np.sqrt(radius, out=radius)
    np.copyto(turn, scratch.angle, casting="unsafe")
    np.multiply(turn, scratch.half_turn, out=turn)
    torch.sin(scratch.cos_of, out=scratch.sin_of)
    torch.cos(scratch.cos_of, out=scratch.cos_of)
    np.multiply(other, radius, out=other)
    np.multiply(radius, turn, out=radius)
    values = scratch.normal[: len(part)]
    if overwrite:
        np.copyto(part, values)
    else:
        np.add(part, values, out=part)
    return squares if len(part) == len(scratch.normal) else squares - float(other[-1]) ** 2


def _open_tail(integers: Array) -> None:
    """Spread integers too near 0 for full resolution, once in 2^39 draws, over their cells, with 53 fresh bits each."""
    if integers.max() > -_FULL_RESOLUTION:
        low = np.flatnonzero(integers > -_FULL_RESOLUTION)
        fresh = (np.frombuffer(os.urandom(8 * len(low)), dtype=np.uint64) >> np.uint64(11)) + 0.5
        integers[low] = integers[low].astype(np.float64) + 1 - fresh * 2.0**-53


def _rounded_up(value: float, kind: np.dtype[Any]) -> Array:
    """`value` in this precision, never below it."""
    near = np.array(value, dtype=kind)
    return near if float(near) >= value else np.nextafter(near, np.array(np.inf, dtype=kind))


def keystream(key: bytes, block: int) -> CipherContext:
    """AES in counter mode, from counter `block` times 2^64 on."""
    return Cipher(algorithms.AES(key), modes.CTR((block << 64).to_bytes(_AES_BLOCK, "big"))).encryptor()


def _run_over_blocks(
    out: Tensor, scale: float, key: bytes, threads: int | None, make: Callable[[int], _Scratch],
    one: Callable[[Array, _Scratch], float],
) -> float:  # fmt: skip
    """Run `one` over every block of a vector, and add up what it returns."""
    if out.dim() != 1 or out.device.type != "cpu" or out.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"noise needs a flat float32 or float64 vector in main memory, not {out.dtype} of shape "
            f"{tuple(out.shape)} on {out.device}; train in one of these types or move the vector"
        )
    if not 1e-15 <= scale <= 1e15:
        raise UserError(f"noise scale={scale:g} must lie between 1e-15 and 1e15; rescale the bound or the noise")
    vector: Array = np.asarray(out.detach().numpy())
    own: dict[int, _Scratch] = {}  # every thread has its own, made once

    def block(index: int) -> float:
        part = vector[index * BLOCK : (index + 1) * BLOCK]
        pairs = (len(part) + 1) // 2
        scratch = own.get(threading.get_ident())
        if scratch is None or len(scratch.first) != pairs:
            scratch = own[threading.get_ident()] = make(pairs)
        keystream(key, index).update_into(scratch.zeros, scratch.stream)
        return one(part, scratch)

    blocks = range(-(-len(vector) // BLOCK))
    workers = min(threads or usable_cores(), len(blocks))
    if workers <= 1:
        return math.fsum(map(block, blocks))
    with ThreadPoolExecutor(workers) as pool:
        return math.fsum(pool.map(block, blocks))
