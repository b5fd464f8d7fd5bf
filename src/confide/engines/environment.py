"""What the bytes of a step depend on, besides recipe and seed."""

from __future__ import annotations

import hashlib
import platform

import numpy as np
import torch

from confide import __version__


def environment() -> str:
    """A digest of versions and processor: two machines with the same one repeat a step bit for bit."""
    versions, capability = (__version__, torch.__version__, np.__version__), torch.backends.cpu.get_cpu_capability()
    return hashlib.sha256("/".join([*map(str, versions), capability, platform.machine()]).encode()).hexdigest()[:16]
