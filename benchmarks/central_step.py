"""What a central step of a recipe takes of one core, on real data.

    python benchmarks/central_step.py speech/words/private          # a head, 312 people
    python benchmarks/central_step.py speech/words/private-lora --steps 5

Processor time of all threads is taken, so that it does not matter what else the machine does. Making the task (states
of an encoder, which are kept) is not counted, and neither is a test: what is left is the cohort, its training,
bounding, noise and the central move. The first step, which reads kept states from disk, is not counted either.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from statistics import median

import torch

from confide.federated.state import State
from confide.recipe import load
from confide.run import Loop
from confide.runs.records import Record
from confide.runs.simulation import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load(given.recipe, [*given.set, f"run.steps={given.steps}", "evaluation.every=1000000", "final={}"])
    ends, users = [], []

    def watch(loop: Loop, state: State, record: Record) -> None:
        ends.append(time.process_time())
        users.append(record["cohort"])

    loop, _ = simulate(recipe, watch=watch)
    took = [b - a for a, b in pairwise(ends)][:-1]  # the last step is followed by a test
    print(f"{given.recipe}: {loop.layout.size:,} numbers, cohorts of {min(users)} to {max(users)} users")
    print(f"a central step takes {median(took):.2f} s of one core (from {min(took):.2f} to {max(took):.2f})")


if __name__ == "__main__":
    main()
