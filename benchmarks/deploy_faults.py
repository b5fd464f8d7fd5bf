"""Rounds in which 30 % of the clients are killed, for 20 rounds: none may be lost, and epsilon never counted too low.

python benchmarks/deploy_faults.py [--rounds 20] [--share 0.3] [--clients 20]

Clients are real ones without a network (`engines.flower.rehearsal`); a killed one fails before or during its
training: it never answers, or fails with an error. The loop, ledger and noise are a run's own.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from confide.engines.flower.parcels import Parcel
from confide.engines.flower.rehearsal import engine
from confide.engines.flower.remote import TRAIN, Terms
from confide.privacy.ledger import Ledger
from confide.recipe import load
from confide.run import make_loop, simulate


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--share", type=float, default=0.3)
    words.add_argument("--clients", type=int, default=20)
    given = words.parse_args()
    recipe = load("convex/digits", [f"run.steps={given.rounds}", "evaluation.last=1"])
    draw, killed, asked = np.random.default_rng(0), 0, 0
    ends: dict[tuple[str, int], str] = {}

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        nonlocal killed, asked
        if kind != TRAIN:
            return ""
        at = (str(parcel.facts["nonce"]), int(parcel.facts["user"]))
        if at not in ends:
            asked += 1
            dies = draw.random() < given.share
            killed += dies
            ends[at] = str(draw.choice(["lost", "killed while training"])) if dies else ""
        return ends[at]

    terms = Terms(deadline=3.0, poll=0.01, minimum=0.3)
    loop = make_loop(recipe, lambda header: Ledger.create(None, header), remote=engine(given.clients, fate, terms))
    state, began = loop.start(), time.monotonic()
    while state.step < recipe.run.steps:
        loop.step(state)
    alone, _ = simulate(recipe)
    print(
        f"{state.step} of {given.rounds} rounds, {killed} of {asked} clients killed ({killed / asked:.0%}), "
        f"{time.monotonic() - began:.1f} s\n"
        f"ledger lines {loop.ledger.count}, epsilon {loop.plan.epsilon(loop.charges):.4f}; "
        f"with nobody killed {alone.plan.epsilon(alone.charges):.4f}"
    )


if __name__ == "__main__":
    main()
