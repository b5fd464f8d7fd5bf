"""Throughput of the sources of noise against `torch.Tensor.normal_` on one thread.

    python benchmarks/noise.py                               # a quick look, seconds
    python benchmarks/noise.py --size 255000000              # the size of PFL-ASR's model: 1 GB, half a minute

Every repeat times each candidate once, in turn, so that whatever else the machine does falls on all of them alike.
Ratios above 1 are faster than `normal_`. "wall" is what was waited for and is only meaningful when as many cores are
free as there are threads; "cpu" is `normal_`'s processor time over the candidate's per thread, which is what free cores
would give if they did not get into each other's way.

`philox` is numpy's `standard_normal` and `torch blocks` is `normal_` with a generator per block: the two candidates
that the seeded source was chosen over. The first is slower; the second is a little faster, but a torch generator keeps
only 32 bits of its seed, so that among some 100,000 blocks (two hundred steps of the full model) two would be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
import torch
from torch import Tensor

from confide.privacy.gaussian import BLOCK, Address, Seeded, System
from confide.randomness import generator

HERE = Address(step=0)


def philox(out: Tensor, threads: int) -> None:
    values = out.numpy()

    def block(index: int) -> None:
        part = values[index * BLOCK : (index + 1) * BLOCK]
        generator(0, f"noise/{index}").standard_normal(dtype=np.float32, out=part)

    _over(block, out, threads)


def torch_blocks(out: Tensor, threads: int) -> None:
    def block(index: int) -> None:
        out[index * BLOCK : (index + 1) * BLOCK].normal_(generator=torch.Generator().manual_seed(index))

    _over(block, out, threads)


def _over(block: Callable[[int], None], out: Tensor, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(block, range(-(-out.numel() // BLOCK))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 24, help="float32 values in the vector")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    out, threads = torch.zeros(given.size), given.threads
    seeded, system = Seeded(0, threads), System(threads)
    candidates: dict[str, tuple[int, Callable[[], object]]] = {
        "normal_, one thread": (1, lambda: out.normal_()),
        "seeded, fill": (threads, lambda: seeded.fill(out, HERE)),
        "seeded, add": (threads, lambda: seeded.add(out, 1.0, HERE)),
        "system, fill": (threads, lambda: system.fill(out, HERE)),
        "system, add": (threads, lambda: system.add(out, 1.0, HERE)),
        "philox": (threads, lambda: philox(out, threads)),
        "torch blocks": (threads, lambda: torch_blocks(out, threads)),
    }
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(given.repeats):
        for name, (_, call) in candidates.items():
            began, used = time.perf_counter(), time.process_time()
            call()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
    print(f"{given.size:,} float32 values, {threads} threads, median of {given.repeats}")
    print(f"{'':20s} {'wall s':>8s} {'cpu s':>8s} {'ns/value':>9s} {'wall ratio':>11s} {'cpu ratio':>10s}")
    base_wall, base_cpu = (median(times["normal_, one thread"]) for times in (wall, cpu))
    for name, (shared, _) in candidates.items():
        seconds, used = median(wall[name]), median(cpu[name])
        print(
            f"{name:20s} {seconds:8.3f} {used:8.3f} {seconds / given.size * 1e9:9.2f} "
            f"{base_wall / seconds:11.2f} {base_cpu * shared / used:10.2f}"
        )


if __name__ == "__main__":
    main()
