"""What the bytes of a step depend on, besides recipe and seed.

A ledger's line may only stand for a step that is made again if the step gives the same bits again. These depend on the
versions, on the instructions that torch uses, on the BLAS and oneDNN in torch's build and on the processor, because
both choose their kernels by it, whatever torch itself uses; and on our own compiled kernels, where the way of training
has any (`confide.kernels.described`). (The number of threads also matters. It is always 1.)

Lines from before BLAS and processor were part of the key have another key, and no longer match any machine. A step
that such a run makes again after its last checkpoint is charged again, with fresh noise. To accept the old key would
be wrong: it does not say which BLAS or which processor made the first value, so the two values could differ under the
same noise.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.backends import mkldnn

from confide import __version__
from confide.kernels import processor

_KERNEL_CHOICES = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
"""Environment variables by which a user makes MKL, oneDNN or OpenBLAS take other kernels than the processor's best."""


def environment(kernels: str = "none") -> str:
    """Return a digest of software and processor: where it is the same, a step repeats itself bit for bit."""
    return _digest([*_software(kernels), *processor()])


def software(kernels: str = "none") -> str:
    """Return a digest of versions, BLAS, instructions and kernels, which all ranks of a run must share."""
    return _digest(_software(kernels))


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]


def _software(kernels: str) -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()  # follows ATEN_CPU_CAPABILITY
    chosen = [f"{name}={os.environ.get(name)}" for name in _KERNEL_CHOICES]
    versions = [__version__, _code(), torch.__version__, np.__version__]
    build = [capability, platform.machine(), torch.__config__.show(), f"oneDNN {mkldnn.enabled}"]
    return [*versions, *build, *chosen, f"kernels {kernels}"]


@cache
def _code() -> str:
    """Return a digest of this package's code: another version of a mechanism must not repeat the noise of this one."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
