"""Our own C++, compiled on the machine where it runs, for inner loops that take torch a hundred small calls.

A kernel is a file beside this one: functions of plain C types that are given addresses of arrays. The compiler is the
machine's g++. What it makes lies in the cache, in a folder of the user's own, under a digest of everything that decides
it: source, compiler, flags and processor. Nothing is loaded that others could have written. Without a compiler, on
another system, on a processor without vectors of 512 bits, or with CONFIDE_KERNELS=off there is no kernel, and its
caller takes the plain path, which is the reference.

Sums in another order have other last bits, so whether there is a kernel, and which one, belongs to what a step's bytes
depend on (`engines/environment.py`). A process decides once; `described` says how.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from confide.files import cache_folder, digest, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

ENV = "CONFIDE_KERNELS"
FOLDER = "kernels"
_COMPILER = "g++"
# Never -ffast-math: tests for numbers that are not finite need numbers as IEEE has them.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_SECONDS = 120
_CHECK = 32  # bytes of a digest
_SOURCES = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU variant", "CPU part", "Features")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """Functions that are ready to be called, and the digest of source, compiler and flags."""

    key: str
    functions: ctypes.CDLL


@cache
def kernel(name: str) -> Kernel | None:
    """The kernel of this name, compiled if it was not yet; none where this machine cannot have it."""
    try:
        found = _load(name)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("kernel %s: the plain path is taken (%s)", name, error)
        return None
    _log.debug("kernel %s: %s is in use", name, found.key)
    return found


def described(names: Iterable[str]) -> str:
    """Which of these kernels are in use here: the same text, the same bits."""
    found = {name: kernel(name) for name in names}
    return ", ".join(f"{name} {each.key if each else 'plain'}" for name, each in found.items()) or "none"


def processor() -> list[str]:
    """What identifies the kind of processor: make, model and features; on Linux from the kernel."""
    if not _CPUINFO.exists():
        return [platform.processor()]
    first = _CPUINFO.read_text().split("\n\n")[0]  # one block for each core, all of a kind
    return [line for line in first.splitlines() if line.split(":")[0].strip() in _IDENTITY]


def address(array: np.ndarray | Tensor) -> ctypes.c_void_p:
    """Where an array begins; whoever passes it on keeps the array."""
    return ctypes.c_void_p(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def _load(name: str) -> Kernel:
    if os.environ.get(ENV, "on") == "off":
        raise OSError(f"{ENV}=off")
    features = " ".join(processor())
    if sys.platform != "linux" or "avx512f" not in features.split():
        raise OSError("not Linux on a processor with AVX-512")
    compiler = shutil.which(_COMPILER)
    if compiler is None:
        raise OSError(f"no {_COMPILER}")
    source = _SOURCES / f"{name}.cpp"
    said = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS).stdout
    key = digest([source.read_bytes(), said, *_FLAGS])[:16]
    library = _own_folder() / f"{name}-{key}-{digest([features])[:8]}.so"
    try:
        return Kernel(key, _open(library))
    except OSError:  # not there yet, or left half-written by a machine that went down
        _compile(compiler, source, library)
        return Kernel(key, _open(library))


def _own_folder() -> Path:
    """The folder of compiled kernels, made for its owner alone; refused if others can write there."""
    folder = cache_folder() / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder.lstat(), stat.S_IFDIR, folder)
    return folder


def _open(library: Path) -> ctypes.CDLL:
    """Load a file that nobody else can have written: the very file that was looked at, whatever its name leads to."""
    descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(descriptor), stat.S_IFREG, library)
        content = library.read_bytes()
        if content != _signed(content[:-_CHECK]):
            raise OSError(f"{library} is not whole")  # to load it could end the process
        # It stays open: the system's loader knows libraries by name, and would take another one of it for this one.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        raise


def _check_owner(state: os.stat_result, kind: int, path: Path) -> None:
    if stat.S_IFMT(state.st_mode) != kind or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise OSError(f"{path} is not this user's alone to write")


def _signed(content: bytes) -> bytes:
    """A library, and after its end, where nobody looks, a digest of it."""
    return content + hashlib.sha256(content).digest()


def _compile(compiler: str, source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "made.so"
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), str(source)], capture_output=True, check=True, timeout=_SECONDS
        )
        write_atomically(library, _signed(made.read_bytes()), suffix=f".{secrets.token_hex(4)}.tmp", mode=0o600)
