"""Does the audit catch what it should, and nothing else? Honest runs and four broken mechanisms, over many seeds.

python benchmarks/audit.py --seeds 20
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

# A small run whose claim a thousand canaries can disprove.
QUICK = ("task.users=60", "sampling.cohort=12", "run.steps=30", "evaluation.last=1", "privacy.target_epsilon=2.5")
BROKEN = ("no noise", "a tenth of the noise", "the same noise at every step", "canaries not bounded")


@contextmanager
def broken(kind: str) -> Iterator[None]:
    """Break the mechanism where it is made, and nothing around it."""
    import torch

    from confide.federated.bounding import Bounder
    from confide.privacy.gaussian import Seeded

    draw = Seeded._draw

    def no_noise(self: Any, out: Any, scale: float, at: Any, overwrite: bool) -> float:
        if overwrite:
            out.fill_(1e-12)
        return 1e-30

    def tenth(self: Any, out: Any, scale: float, at: Any, overwrite: bool) -> float:
        return draw(self, out, scale / 10, at, overwrite)

    def same(self: Any, out: Any, scale: float, at: Any, overwrite: bool) -> float:
        return draw(self, out, scale, replace(at, step=0), overwrite)

    factors = Bounder.factors

    def unbounded(self: Any, norms: Any) -> Any:
        """Users are bounded; whoever is ten times beyond the bound, as a canary is, is not."""
        far = norms.norm(dim=1, keepdim=True) > 9.99 * self.sensitivity
        return torch.where(far, torch.ones_like(norms), factors(self, norms))

    patches: dict[str, AbstractContextManager[Any]] = {
        "no noise": mock.patch.object(Seeded, "_draw", no_noise),
        "a tenth of the noise": mock.patch.object(Seeded, "_draw", tenth),
        "the same noise at every step": mock.patch.object(Seeded, "_draw", same),
        "canaries not bounded": mock.patch.object(Bounder, "factors", unbounded),
    }
    with patches[kind]:
        yield


def one(job: tuple[str, int]) -> tuple[str, int, float, float]:
    from contextlib import nullcontext

    from confide import recipe
    from confide.runs.audit import audit

    kind, seed = job
    with broken(kind) if kind != "honest" else nullcontext():
        found = audit(recipe.load("convex/digits", [*QUICK, f"run.seed={seed}"]))
    return kind, seed, found.claimed, found.lower_bound


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = options.parse_args()
    jobs = [(kind, seed) for kind in ("honest", *BROKEN) for seed in range(given.seeds)]
    with ProcessPoolExecutor(given.workers) as pool:
        rows = list(pool.map(one, jobs))
    print(f"{'mechanism':<30} {'claimed':>8} {'lower bound (least, most)':>28} {'above the claim':>16}")
    for kind in ("honest", *BROKEN):
        own = [row for row in rows if row[0] == kind]
        bounds, above = [row[3] for row in own], sum(row[3] > row[2] for row in own)
        print(f"{kind:<30} {own[0][2]:>8.3f} {min(bounds):>18.3f}, {max(bounds):.3f} {above:>12} of {len(own)}")


if __name__ == "__main__":
    main()
