"""Does `confide diagnose` name the term that dominates, and does its advice help? 20 random runs whose truth is known.

The truth of a run is found by making it again without each of its causes (support.trials); runs in which no
cause is clearly the largest are passed over and counted. The advice that comes first is then followed.

python benchmarks/diagnose.py --trials 20
"""

from __future__ import annotations

import argparse
from itertools import count

import torch

from confide.theory.terms import CAUSES
from support.trials import known, trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="how many runs with a known dominant term")
    parser.add_argument("--seeds", type=int, default=2, help="runs that each figure is the mean of")
    parser.add_argument(
        "--first", type=int, default=10, help="seed of the first problems; the method was made on 0 and 1"
    )
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    right, better, done, unclear = 0, 0, 0, 0
    for place in count():
        if done == wanted.trials:
            break
        given = trial(CAUSES[place % len(CAUSES)], wanted.first + place // len(CAUSES))
        truth = known(given, wanted.seeds)
        if truth is None:
            unclear += 1
            continue
        found = given.diagnose()
        first = found.advice[0]
        followed = given.changed(first.settings)
        before, after = (sum(each.run(s)[0] for s in range(wanted.seeds)) / wanted.seeds for each in (given, followed))
        right, better, done = right + (found.cause == truth), better + (after < before), done + 1
        print(
            f"{done:>2} known {truth:<12} named {found.cause:<12} {'right' if found.cause == truth else 'WRONG'}  "
            f"suboptimality {before:.4g} -> {after:.4g} after: {first.what}",
            flush=True,
        )
    print(
        f"named right in {right} of {done}; the first advice improved {better} of {done}; {unclear} unclear, left out"
    )


if __name__ == "__main__":
    main()
