"""Rounds in which 30 % of the clients are killed, for 20 rounds: none may be lost, and epsilon never counted too low.

python benchmarks/deploy_faults.py [--processes] [--rounds 20] [--share 0.3] [--clients 20]

With --processes server and clients are processes that speak gRPC over TLS; in every round some clients get SIGKILL and
are started again at once. Otherwise clients are real ones without a network (`support.rehearsal`); a killed one fails
before or during its training: it never answers, or fails with an error. The loop, ledger and noise are a run's own.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from confide.deploy.parcels import Parcel
from confide.deploy.remote import TRAIN, Terms
from confide.recipe import Recipe, load
from confide.runs import folder
from confide.runs.simulation import simulate
from support.loopback import Loopback
from support.rehearsal import engine, run_over

RECIPE, USERS = "convex/digits", 287


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--processes", action="store_true")
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--share", type=float, default=0.3)
    words.add_argument("--clients", type=int, default=20)
    given = words.parse_args()
    sets = [f"run.steps={given.rounds}", "evaluation.last=1"]
    began, recipe = time.monotonic(), load(RECIPE, sets)
    if given.processes:
        said = over_processes(sets, given.rounds, given.clients, given.share)
    else:
        said = rehearsed(recipe, given.clients, given.share)
    alone, _ = simulate(recipe)
    print(f"{said}; with nobody killed {alone.plan.epsilon(alone.charges):.4f}\n{time.monotonic() - began:.0f} s")


def over_processes(sets: list[str], rounds: int, clients: int, share: float) -> str:
    draw, killed = np.random.default_rng(0), 0
    options = [word for each in sets for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as place, Loopback(Path(place), clients, USERS) as here:

        def start(number: int) -> None:
            here.client(number, range(number, USERS, clients), RECIPE, *options)

        for number in range(clients):
            start(number)
        here.serve(RECIPE, *options, "--wait-for", USERS, "--deadline", 60, "--minimum", 0.3)
        here.wait(lambda: (here.run / folder.METRICS).exists())
        for step in range(rounds):
            here.wait(lambda step=step: here.steps() >= step)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.5))
            for number in draw.choice(clients, round(share * clients), replace=False).tolist():
                here.clients[number].kill()
                here.clients[number].join()
                start(number)
                killed += 1
        here.finish()
        spent, said = folder.check_ledger(here.run), here.log("server").read_text()
    answered = [int(n) / int(m) for m, n in re.findall(r"cohort (\d+), accepted (\d+)", said)]
    again = said.count("asking again")
    return (
        f"{spent['steps']} of {rounds} rounds, {killed} kills of {clients} client processes, {again} asked again\n"
        f"{len(answered)} rounds with users missing, who answered in them: {min(answered):.0%} to {max(answered):.0%}\n"
        f"ledger lines {spent['releases']}, epsilon {spent['epsilon']:.4f}"
    )


def rehearsed(recipe: Recipe, clients: int, share: float) -> str:
    draw, killed, asked = np.random.default_rng(0), 0, 0
    ends: dict[tuple[str, int], str] = {}

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        nonlocal killed, asked
        if kind != TRAIN:
            return ""
        at = (str(parcel.facts["nonce"]), int(parcel.facts["user"]))
        if at not in ends:
            asked += 1
            dies = draw.random() < share
            killed += dies
            ends[at] = str(draw.choice(["lost", "killed while training"])) if dies else ""
        return ends[at]

    terms = Terms(deadline=3.01, minimum=0.3)
    loop, state = run_over(recipe, engine(clients, fate, terms))
    return (
        f"{state.step} of {recipe.run.steps} rounds, {killed} of {asked} clients killed ({killed / asked:.0%})\n"
        f"ledger lines {loop.ledger.count}, epsilon {loop.plan.epsilon(loop.charges):.4f}"
    )


if __name__ == "__main__":
    main()
