"""Processor time of a round, for machines that others use too: this project, plain PyTorch and pfl, in turn.

Each candidate has a process of its own with one thread, and makes a few rounds at a time; the least turn counts.
Two processes are left out: what they gain is time on the clock, which a busy machine cannot show.

python benchmarks/processor_time.py D --peers .peers
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from confide.bench import compare

SHOWN = (("confide", "1 workers"), ("plain loop", ""), ("pfl", "1 process"))


def spent(pid: int) -> float:
    """Seconds of processor time that a process and its children have taken so far."""
    ticks, waiting = 0, [pid]
    while waiting:
        here = Path(f"/proc/{waiting.pop()}")
        fields = (here / "stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
        waiting += [int(child) for task in here.glob("task/*/children") for child in task.read_text().split()]
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("workload", choices=[name for name in compare.WORKLOADS if name != "C"])
    options.add_argument("--peers", type=Path, default=Path(".peers"))
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--rounds", type=int, default=3, help="in a turn")
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[float]] = {}
    with compare.importable_folder() as package:
        running = []
        for number, each in enumerate(compare.candidates(given.workload, 1)):
            python = compare.python_of(each, given.peers)
            if (each.system, each.setting) in SHOWN and python is not None:
                runner = compare.Runner(each, python, package, package / f"{number}.log")
                running.append((each, runner))
                runner.next_answer()
                runner.round()
                runner.round()
        for _ in range(given.turns):
            for each, runner in running:
                before = spent(runner.process.pid)
                for _ in range(given.rounds):
                    runner.round()
                found.setdefault(each.name, []).append((spent(runner.process.pid) - before) / given.rounds)
        for _, runner in running:
            runner.end()
    ours = min(found["confide, 1 workers"])
    for name, seconds in found.items():
        print(f"{given.workload}  {name:<20} {min(seconds):.4f} s  {min(seconds) / ours:.2f} times confide's")


if __name__ == "__main__":
    main()
