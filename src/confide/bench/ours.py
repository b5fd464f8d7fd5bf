"""This project as a candidate: the real loop, with its sampler, plan, ledger (in memory), noise and optimiser.

python -m confide.bench.ours A --workers 2
torchrun --nproc-per-node 2 -m confide.bench.ours A
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from confide.bench import recipes
from confide.bench.protocol import Gate, serve

STEPS = 100_000
SIZES = ("cohort", "users", "parameters")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("workload", choices=list(recipes.MAKE))
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--lines", type=int, default=0, help="in the ledger before the first round")
    for name in SIZES:
        options.add_argument(f"--{name}", type=int)
    given = options.parse_args()
    from confide.build import make_loop, make_trainer_from
    from confide.engines.distributed import follow
    from confide.engines.ranks import place
    from confide.privacy.ledger import Ledger

    here = place()
    if here is not None and here.rank:
        sys.exit(follow(here, make_trainer_from))
    gate = Gate()
    more: dict[str, Any] = {n: value for n, value in vars(given).items() if n in SIZES and value}
    loop = make_loop(
        recipes.MAKE[given.workload](2 * STEPS, **more), lambda header: Ledger.create(None, header), given.workers,
        here=here,
    )  # fmt: skip
    state = loop.start()
    for line in range(given.lines):
        event = loop.plan.mechanism.event_at(line, loop.bounds.bounder.sensitivity)
        loop.ledger.record(line, event, loop.environment)
    state.step = given.lines

    def step() -> dict[str, float]:
        loop.step(state)
        return {}

    def large_step() -> dict[str, float]:
        """A whole step, and then the private part of one user's work and the noise by themselves."""
        from confide.federated.local import PlainUpdate
        from confide.privacy.gaussian import Address

        loop.step(state)
        trainer = loop.engine.trainer  # type: ignore[attr-defined]
        times, central = [time.perf_counter()], state.parameters
        norms = loop.layout.difference(central, trainer.plain.theta, trainer.plain.theta)
        update = PlainUpdate(trainer.plain.theta, loop.layout, norms[None], torch.zeros(1))
        update.weighted_sum(loop.bounds.bounder.factors(update.norms), loop.total)
        times.append(time.perf_counter())
        loop.plan.source.add(loop.total, 1.0, Address(state.step, purpose="bench"))
        times.append(time.perf_counter())
        return {"client": times[1] - times[0], "noise": times[2] - times[1]}

    serve(large_step if given.workload == "C" else step, gate)
    loop.engine.close()


if __name__ == "__main__":
    main()
