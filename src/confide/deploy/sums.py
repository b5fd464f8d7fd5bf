"""The sum of a round as whole numbers: the same bytes in whatever order answers come, and whoever adds them up.

Floating-point additions depend on their order, and answers come in any. So an update that was checked and bounded is
rounded to multiples of a step, a power of two so small that no sum within the bound leaves 62 bits, and added up
exactly. The step follows from bounds and weights alone: a relay and the server have the same. Rounding moves a
coordinate by at most 2^-61 of the largest sum, far below what single precision loses.

A model of more than 20 million parameters, or one without a bound, is added up in its own type instead; its sum is then
the same to rounding only.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LARGEST_MODEL = 20_000_000
_AT_ONCE = 1 << 20


class Sum:
    """Adds up in a vector that was made before; `total` holds the sum once it is read."""

    def __init__(self, total: Tensor, largest: float) -> None:
        """`largest`: a norm that no sum exceeds."""
        self.total, self.step = total, math.ldexp(1.0, math.frexp(largest)[1] - 61)
        exact = total.numel() <= _LARGEST_MODEL and math.isfinite(largest)
        self.whole = np.zeros(total.numel(), np.int64) if exact else None
        total.zero_()

    def into(self) -> Tensor:
        """Where the next update is to be added; `added` says that it was."""
        return self.total if self.whole is None else self.total.zero_()

    def added(self) -> None:
        if self.whole is None:
            return
        for at in range(0, len(self.whole), _AT_ONCE):
            part = self.total[at : at + _AT_ONCE].double().numpy()
            self.whole[at : at + _AT_ONCE] += np.rint(part / self.step).astype(np.int64)

    def add_sum(self, other: np.ndarray) -> None:
        """Add what a relay has added up."""
        if self.whole is None:
            self.total += torch.from_numpy(other)
        else:
            self.whole += other

    @property
    def kind(self) -> np.dtype[np.generic]:
        """The type of a sum on the wire."""
        return self.sent().dtype

    def sent(self) -> np.ndarray:
        """The sum as a relay hands it up."""
        return self.total.numpy() if self.whole is None else self.whole

    def length(self, other: np.ndarray) -> float:
        """The norm of what a relay hands up."""
        scale = 1.0 if self.whole is None else self.step
        squares = (
            np.square(other[at : at + _AT_ONCE] * scale, dtype=np.float64).sum()
            for at in range(0, len(other), _AT_ONCE)
        )
        return math.sqrt(math.fsum(squares))

    def read(self) -> Tensor:
        """The sum so far, in `total`."""
        if self.whole is not None:
            for at in range(0, len(self.whole), _AT_ONCE):
                self.total[at : at + _AT_ONCE] = torch.from_numpy(self.whole[at : at + _AT_ONCE] * self.step)
        return self.total

    def wipe(self) -> None:
        self.total.zero_()
        if self.whole is not None:
            self.whole[:] = 0
