"""Does the audit catch what it should, and nothing else? Honest runs and five broken mechanisms, over many seeds.

python benchmarks/audit.py --seeds 20
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor


def one(job: tuple[str, str | None, int]) -> tuple[str | None, int, float, float]:
    import torch

    from confide import recipe
    from confide.runs.audit import audit
    from confide.runs.broken import BREAKS

    torch.set_num_threads(1)
    name, wanted, seed = job
    kind = next((known for known in BREAKS if known == wanted), None)
    found = audit(recipe.load(name, [f"run.seed={seed}"]), broken=kind)
    return wanted, seed, found.claimed, found.lower_bound


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
    print(f"{'mechanism':<30} {'claimed':>8} {'lower bound (least, most)':>28} {'above the claim':>16}")
    for kind in kinds:
        own = [row for row in rows if row[0] == kind]
        bounds, above = [row[3] for row in own], sum(row[3] > row[2] for row in own)
        label = kind or "honest"
        print(f"{label:<30} {own[0][2]:>8.3f} {min(bounds):>18.3f}, {max(bounds):.3f} {above:>12} of {len(own)}")


if __name__ == "__main__":
    main()
