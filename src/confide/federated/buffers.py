"""Memory that is used again from call to call: with new memory each time, touching its pages would take the longest."""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import suppress

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Buffers(threading.local):
    """Tensors by name, each thread with its own. What one holds is anyone's guess, and it ends at the next call."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape that shares its memory with the last one of this name."""
        count, held = math.prod(shape), self._held.get(name)
        if held is None or held.dtype != dtype or held.numel() < count:
            held = self._held[name] = torch.empty(count, dtype=dtype)
        return held[:count].view(shape)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next call, and not give it back; other libraries go on as they do."""
    with suppress(OSError, TypeError, AttributeError):
        settle = ctypes.CDLL(None).mallopt
        settle(_MMAP_THRESHOLD, 1 << 25)  # the most that glibc allows
        settle(_TRIM_THRESHOLD, 1 << 27)
