"""DP-FTRL in numbers: error beside independent noise and binary trees, where sampling is better, time and memory.

    python benchmarks/factorisation.py --out factorisation.png

A minute on one core, most of it for the memory: 2,000 rounds with a million parameters in one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from confide.privacy.accountant import noise_multiplier
from confide.privacy.events import Event
from confide.privacy.factorisation import compare, init, next_noise, optimised_coefficients
from confide.report.figures.sheets import sheet

ROUNDS = (100, 200, 300, 500, 700, 1000, 1400, 2000)
SEPARATION = 100
BANDS = (4, 16, 64)
BASELINES = {"independent noise": "#57534e", "binary tree": "#15803d"}
SHADES = ("#93c5fd", "#3b82f6", "#1e3a8a", "#7c3aed", "#c026d3")
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
    beside_sampling(tables[2000])
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


def beside_sampling(table: dict[str, Array]) -> None:
    """Independent noise on Poisson cohorts of the same expected size is amplified; this mechanism is not."""
    steps, population, delta = 2000, 100_000, 1e-6
    cohort = population // SEPARATION
    names = ("binary tree", *(f"optimised, {bands} bands" for bands in BANDS))
    print(f"\ntotal variance beside Poisson-sampled independent noise (100 %), {steps:,} rounds, delta {delta:g}")
    print("  epsilon   " + "".join(f"{name:>22}" for name in names))
    for target in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        sampled = Event("poisson", 1 / SEPARATION, cohort, population, 0.0, 1.0)
        whole = Event("everyone", 1.0, population, population, 0.0, 1.0)
        independent = noise_multiplier(target, delta, steps, "pld", sampled) ** 2 * steps * (steps + 1) / 2
        once = noise_multiplier(target, delta, 1, "pld", whole) ** 2
        shares = [100 * once * table[name].sum() / independent for name in names]
        print(f"  {target:<10g}" + "".join(f"{share:20.1f} %" for share in shares))


def draw_factorisation(path: Path, separation: int, tables: Mapping[int, Mapping[str, Array]]) -> Path:
    """`tables`: number of rounds -> mechanism -> variance of each prefix sum, as `factorisation.compare` returns it.

    Left, how the error grows with the number of rounds; right, the totals of the longest run.
    """
    rounds = sorted(tables)
    longest = tables[rounds[-1]]
    looks = _looks(longest)
    with sheet(path, 1, 2, (11, 4.2)) as (figure, axes):
        left, right = axes[0]
        for name, (colour, line) in looks.items():
            error = [float(np.sqrt(tables[count][name].mean())) for count in rounds]
            left.plot(rounds, error, line, color=colour, lw=1.6, marker="o", ms=3, label=name)
        left.set(
            xscale="log",
            yscale="log",
            xlabel="rounds in the run",
            ylabel="root mean square error of a prefix sum",
            title="error against the number of rounds",
        )
        left.set_xticks(rounds, [f"{count:,}" for count in rounds])
        left.minorticks_off()
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.legend(loc="upper left", handlelength=3.5)
        _bars(right, longest, {name: colour for name, (colour, _) in looks.items()})
        right.set_title(f"totals over {rounds[-1]:,} rounds")
        figure.suptitle(
            f"z = 1 for the whole run, contributions of norm 1, a user's turn every {separation} rounds, "
            "no amplification by sampling",
            fontsize=9,
        )
    return path


def _bars(axis: Any, table: Mapping[str, Array], colours: Mapping[str, str]) -> None:
    totals = {name: float(variance.sum()) for name, variance in table.items()}
    share = [100 * total / totals["independent noise"] for total in totals.values()]
    names: Sequence[str] = list(totals)
    places = range(len(names))
    bars = axis.barh(places, share, color=[colours[name] for name in names], height=0.7)
    for place, value, bar in zip(places, share, bars, strict=True):
        axis.text(value + 1, place, f"{value:.3g} %", va="center", fontsize=8)
        if names[place].startswith("square root"):
            bar.set(hatch="///", edgecolor="white")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set(xlim=(0, 115), xlabel="total variance, % of independent noise")
    axis.grid(False, axis="y")


def _looks(table: Mapping[str, Array]) -> dict[str, tuple[str, str]]:
    """Colour and line of each mechanism: the darker, the more bands; the plain square root is dashed, or hatched."""
    bands = [name.split(", ")[1] for name in table if name.startswith("optimised")]
    shade = dict(zip(bands, SHADES, strict=False))
    looks: dict[str, tuple[str, str]] = {}
    for name in table:
        if name in BASELINES:
            looks[name] = BASELINES[name], "-"
        else:
            kind, count = name.split(", ")
            looks[name] = shade[count], "-" if kind == "optimised" else "--"
    return looks


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


if __name__ == "__main__":
    main()
