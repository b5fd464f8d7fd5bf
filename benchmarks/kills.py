"""Kill real runs with SIGKILL at random instants, resume them until they end, and compare with an undisturbed run.

Every run is a process of its own that gets a SIGKILL at an instant drawn uniformly from the time that an undisturbed
run takes: while it makes its task and its folder, while users train, while the results are written. What was killed is
resumed, and killed again, until one process outlives its instant. A run passes if its model is the same to the byte,
its epsilon the same number, and its ledger never, after any kill, had fewer releases than there were steps.

    python benchmarks/kills.py --kills 30

Processes are forked once everything is imported, so that the instants fall where something is done; `--start spawn`
starts Python anew for each and kills it while it imports, too.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from confide import cli
from confide.privacy import ledger
from confide.runs import checkpoint, folder

# Seconds of training, and a state with everything in it: moments, a mean of iterates, evaluations to average.
SETS = [
    "run={steps: 300, checkpoint_every: 7}",
    "evaluation={every: 5, last: 20}",
    "final={kind: mean, count: 40}",
    "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}",
    "central={kind: adam, learning_rate: 0.01}",
]
PHASES = ("starting", "training", "finishing")
HEAVY = ("confide.report.page", "torch.utils.tensorboard", "dp_accounting", "sklearn.datasets")


@dataclass
class Ending:
    """One run: the kills that it took, and how it ended."""

    phases: list[str] = field(default_factory=list)
    identical: bool = False
    under_counts: int = 0


def confide(words: list[str], log: str) -> None:
    """The command line, in a process of its own, with all that it says in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["confide", *words, "--json"]
    cli.main()


def launch(recipe: str, out: Path, start: str) -> BaseProcess:
    """Train, or resume where there is something to resume."""
    words = ["train", recipe, "--out", str(out), *(word for change in SETS for word in ("--set", change))]
    if (out / folder.RECIPE).exists():
        words = ["resume", str(out)]
    process: BaseProcess = get_context(start).Process(target=confide, args=(words, f"{out}.log"))  # type: ignore[attr-defined]
    process.start()
    return process


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def releases(out: Path) -> int:
    """By the ledger's complete lines, of which the first describes the run."""
    return max(lines(out / ledger.FILE) - 1, 0)


def steps_done(out: Path) -> int:
    """By everything else in the folder."""
    saved = checkpoint.load(out).state.step if (out / checkpoint.FILE).exists() else 0
    return max(saved, lines(out / folder.METRICS))


def phase(out: Path, launched: float, steps: int) -> str:
    """Where a process was when it was killed: it is starting until it writes its first file."""
    files = [path for path in out.glob("*") if path.name != ".lock"] if out.exists() else []
    if not any(path.stat().st_mtime > launched for path in files):
        return "starting"
    return "finishing" if lines(out / folder.METRICS) >= steps else "training"


def check(process: BaseProcess, out: Path) -> None:
    if process.exitcode is not None and process.exitcode > 0:
        sys.exit(f"a run failed by itself:\n{Path(f'{out}.log').read_text()}")


def undisturbed(recipe: str, out: Path, start: str) -> float:
    """How long a run takes when nobody kills it."""
    began = time.monotonic()
    process = launch(recipe, out, start)
    process.join()
    check(process, out)
    return time.monotonic() - began


def kill_until_it_ends(
    recipe: str, out: Path, straight: Path, seconds: float, chance: random.Random, start: str
) -> Ending:
    """At least one kill: where the first process outlives its instant, the run is begun again."""
    expected, ending = folder.summary_of(straight), Ending()
    while True:
        launched = time.time()
        process = launch(recipe, out, start)
        # The range grows with every kill, so that a run ends even if the machine has become slower.
        process.join(chance.uniform(0, seconds * 1.2 ** len(ending.phases)))
        process.kill()
        process.join()
        check(process, out)
        if process.exitcode == 0 and ending.phases:
            break
        if process.exitcode == 0:
            shutil.rmtree(out)
            continue
        ending.phases.append(phase(out, launched, expected["steps"]))
        ending.under_counts += releases(out) < steps_done(out)
    found = folder.summary_of(out)
    ending.identical = (out / folder.MODEL).read_bytes() == (straight / folder.MODEL).read_bytes()
    ending.identical &= found["epsilon"] == expected["epsilon"]
    ending.under_counts += found["releases"] < expected["releases"]
    return ending


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="runs, each killed at least once (default 30)")
    parser.add_argument("--recipe", default="convex/quadratics", help="a name or path (default convex/quadratics)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default 0)")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="of processes (default fork)")
    options = parser.parse_args()
    for module in HEAVY:
        importlib.import_module(module)
    chance, began = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        straight = Path(place) / "straight"
        seconds = undisturbed(options.recipe, straight, options.start)
        print(f"an undisturbed run takes {seconds:.1f} s; instants are drawn from that", flush=True)
        print(f"{'run':>4} {'kills':>6} {'identical':>10} {'under-counts':>13}  killed while", flush=True)
        endings = []
        for number in range(1, options.kills + 1):
            out = Path(place) / str(number)
            ending = kill_until_it_ends(options.recipe, out, straight, seconds, chance, options.start)
            shutil.rmtree(out)
            endings.append(ending)
            print(
                f"{number:>4} {len(ending.phases):>6} {'yes' if ending.identical else 'NO':>10} "
                f"{ending.under_counts:>13}  {', '.join(ending.phases)}",
                flush=True,
            )
    where = Counter(phase for ending in endings for phase in ending.phases)
    identical, under = sum(e.identical for e in endings), sum(e.under_counts for e in endings)
    print(
        f"{where.total()} kills ({', '.join(f'{where[p]} {p}' for p in PHASES)}) in {len(endings)} runs: "
        f"{identical} identical endings, {under} under-counts, {time.monotonic() - began:.0f} s"
    )
    sys.exit(0 if identical == len(endings) and not under else 1)


if __name__ == "__main__":
    main()
