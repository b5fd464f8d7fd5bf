"""Memory is used again: between calls, and by the allocator."""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from confide.federated.buffers import Buffers, keep_freed_memory


def test_a_name_has_one_memory_that_grows_and_every_thread_has_its_own() -> None:
    held = Buffers()
    large = held.take("x", (3, 4), torch.float32)
    assert held.take("x", (2, 2), torch.float32).data_ptr() == large.data_ptr()
    assert held.take("y", (2, 2), torch.float32).data_ptr() != large.data_ptr()
    assert held.take("x", (2, 2), torch.float64).dtype == torch.float64
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(held.take, "y", (2, 2), torch.float32).result()
    assert theirs.data_ptr() != held.take("y", (2, 2), torch.float32).data_ptr()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults; glibc alone is told")
def test_freed_memory_is_not_given_back_and_asked_for_again() -> None:
    keep_freed_memory()

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def use() -> None:
        held = [torch.zeros(1 << 20) for _ in range(4)]  # 4 MiB each, 4,096 pages together
        del held

    use()
    before = faults()
    for _ in range(5):
        use()
    assert faults() - before < 4096
