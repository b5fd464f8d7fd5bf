"""Claims about the key under which a step repeats itself: everything that decides its bits changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from confide import kernels
from confide.engines import environment as module
from confide.engines.environment import environment, software

Patch = pytest.MonkeyPatch


def other_blas(patch: Patch) -> None:
    shown = torch.__config__.show()
    patch.setattr(
        "torch.__config__.show", lambda: shown.replace("BLAS_INFO=mkl", "BLAS_INFO=open").replace("2024", "2025")
    )


CHANGES: dict[str, Callable[[Patch], None]] = {
    "another BLAS": other_blas,
    "oneDNN switched off": lambda patch: patch.setattr("torch.backends.mkldnn.enabled", False),
    "ATEN_CPU_CAPABILITY": lambda patch: patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT"),
    "MKL's reproducible mode": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "another torch": lambda patch: patch.setattr("torch.__version__", "0.1"),
    "another confide": lambda patch: patch.setattr(module, "__version__", "0.1"),
    "other code of the same version": lambda patch: patch.setattr(module, "_code", lambda: "other"),
    "another kind of machine": lambda patch: patch.setattr("platform.machine", lambda: "other"),
    "another numpy": lambda patch: patch.setattr("numpy.__version__", "0.1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_decides_the_bits_changes_the_key(change: Callable[[Patch], None], monkeypatch: Patch) -> None:
    before = environment(), software()
    assert before == (environment(), software())
    change(monkeypatch)
    assert environment() != before[0]
    assert software() != before[1]


def test_a_compiled_kernel_changes_the_key_and_so_does_another_one() -> None:
    """A step that was made with a kernel does not repeat itself without it, or with one of other source."""
    states = ["none", "head plain", "head 0123456789abcdef", "head fedcba9876543210"]
    assert len({environment(each) for each in states}) == len({software(each) for each in states}) == 4
    assert environment() == environment("none")


def test_the_digest_of_the_code_follows_every_file_of_the_package(monkeypatch: Patch, tmp_path: Path) -> None:
    """A changed line anywhere in it may change the bits of a step."""
    for name in ("engines/environment.py", "federated/local.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first = 1\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "engines" / "environment.py"))
    before = module._code.__wrapped__()
    assert module._code.__wrapped__() == before
    (tmp_path / "federated" / "local.py").write_text("first = 2\n")
    assert module._code.__wrapped__() != before


def test_another_processor_changes_the_key_but_ranks_may_differ_in_it(monkeypatch: Patch, tmp_path: Path) -> None:
    """MKL and oneDNN choose kernels by the processor; `ATEN_CPU_CAPABILITY` does not make two of them alike."""
    keys, ranks = set(), set()
    for model, speed in [("1", "2000"), ("1", "3000"), ("2", "2000")]:
        file = tmp_path / "cpuinfo"
        file.write_text(f"vendor_id : Some\nmodel : {model}\ncpu MHz : {speed}\nflags : avx2\n\nprocessor : 1\n")
        monkeypatch.setattr(kernels, "_CPUINFO", file)
        keys.add(environment())
        ranks.add(software())
    assert len(keys) == 2, "the clock's speed changes nothing"
    assert len(ranks) == 1


def test_a_machine_without_a_list_of_processors_has_a_key(monkeypatch: Patch, tmp_path: Path) -> None:
    here = environment()
    monkeypatch.setattr(kernels, "_CPUINFO", tmp_path / "none")
    assert environment() != here
