"""Does the audit catch what it should, and nothing else? Honest runs and six broken mechanisms, over many seeds.

python benchmarks/audit.py --seeds 20

`least p` is the smallest p-value of "the noise does not follow the cohort"; an alarm is a lower bound above the claim,
or a p-value below 0.001.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor


def one(job: tuple[str, str | None, int]) -> tuple[str | None, float, float, float | None, bool]:
    import torch

    from confide import recipe
    from confide.runs.audit import audit
    from confide.runs.broken import BREAKS

    torch.set_num_threads(1)
    name, wanted, seed = job
    kind = next((known for known in BREAKS if known == wanted), None)
    found = audit(recipe.load(name, [f"run.seed={seed}"]), broken=kind)
    return wanted, found.claimed, found.lower_bound, found.cohort_chance, found.passed


def main() -> None:
    from confide.runs.broken import BREAKS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", default="convex/digits")
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = options.parse_args()
    kinds = (None, *BREAKS)
    jobs = [(given.recipe, kind, seed) for kind in kinds for seed in range(given.seeds)]
    with ProcessPoolExecutor(given.workers) as pool:
        rows = list(pool.map(one, jobs))
    print(f"{'mechanism':<16} {'claimed':>8} {'lower bound':>18} {'above claim':>12} {'least p':>8} {'alarms':>9}")
    for kind in kinds:
        own = [row for row in rows if row[0] == kind]
        bounds, above = [row[2] for row in own], sum(row[2] > row[1] for row in own)
        least = min((row[3] for row in own if row[3] is not None), default=float("nan"))
        rung = sum(not row[4] for row in own)
        spread = f"{min(bounds):.3f} to {max(bounds):.3f}"
        label = kind or "honest"
        print(f"{label:<16} {own[0][1]:>8.3f} {spread:>18} {above:>12} {least:>8.4f} {rung:>3} of {len(own)}")


if __name__ == "__main__":
    main()
