"""DP-FTRL in numbers: error beside independent noise and binary trees, time and memory.

    python benchmarks/factorisation.py --out factorisation.png

`confide plan mechanism` compares with Poisson sampling.

A minute on one core, most of it for the memory: 2,000 rounds with a million parameters in one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from confide.privacy.factorisation import init, next_noise, optimised_coefficients
from support.prefix_sums import compare
from support.prefix_sums_figure import draw_factorisation

ROUNDS = (100, 200, 300, 500, 700, 1000, 1400, 2000)
SEPARATION = 100
BANDS = (4, 16, 64)
Array = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("factorisation.png"), help="where the figure goes")
    parser.add_argument("--dimension", type=int, default=1_000_000, help="parameters in the test of memory")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds in the test of memory")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    # First, because the peak of memory that is measured never falls again.
    memory(settings.dimension, settings.rounds, bands=16)
    began = time.perf_counter()
    tables = {rounds: compare(rounds, SEPARATION, BANDS) for rounds in ROUNDS}
    print(f"\nall coefficients and variances: {time.perf_counter() - began:.1f} s")
    for rounds in (200, 2000):
        errors(rounds, tables[rounds])
    print(f"\nfigure: {draw_factorisation(settings.out, SEPARATION, tables)}")


def memory(dimension: int, rounds: int, bands: int) -> None:
    """Peak memory of the process after 50 rounds and at the end: the state is a ring and does not grow."""
    coefficients = optimised_coefficients(bands, rounds)
    draw = torch.Generator().manual_seed(0)
    fresh = torch.empty(dimension)
    state = init(bands, fresh)
    print(f"memory: {dimension:,} parameters, {bands} bands, ring of {state['ring'].nbytes / 2**20:.0f} MiB")
    spent, early = 0.0, 0
    for step in range(rounds):
        fresh.normal_(generator=draw)
        began = time.perf_counter()
        next_noise(coefficients, state, fresh, step)
        spent += time.perf_counter() - began
        if step + 1 == min(50, rounds):
            early = _peak()
    print(f"  peak {early / 1024:.1f} MiB after 50 rounds, {_peak() / 1024:.1f} MiB after {rounds:,} rounds")
    print(f"  growth {(_peak() - early) / 1024:.2f} MiB; {1000 * spent / rounds:.1f} ms a round to correlate the noise")


def errors(rounds: int, table: dict[str, Array]) -> None:
    base = table["independent noise"].sum()
    print(f"\n{rounds:,} rounds, a turn every {SEPARATION}, z = 1      total variance      share    rms error")
    for name, variance in table.items():
        rms = np.sqrt(variance.mean())
        print(f"  {name:40} {variance.sum():16.4g} {100 * variance.sum() / base:9.2f} % {rms:10.2f}")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


if __name__ == "__main__":
    main()
