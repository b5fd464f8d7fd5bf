"""Candidates side by side: one process each, rounds in turn, so that whatever else the machine does falls on all alike.

Medians over rounds after warm-up, and ratios: how many times as long as this project's best each of the others takes.
Runners of other systems and of plain PyTorch lie in `benchmarks/peers` of the source tree; the wheel has none of them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import confide
from confide.errors import UserError

OURS = "confide"
WORKLOADS = {
    "A": "many small clients: cohort 100, MLP 784-128-10, 2 local steps",
    "B": "a speech client: cohort 16, 4 blocks of width 144 with CTC, 2 local steps",
    "C": "a large model: difference, norms, clipping and addition of one client; noise once a round",
    "D": "heads on kept states: cohort 312, 3 utterances of 80 states of width 384, linear CTC head, 1 local step",
    "E": "retrieval's head: all of 4,459 users, one vector of width 384 each, 2 documents, 1 local step",
}
LONGEST = 600.0  # seconds that a candidate may take to start or for a round
PEERS = ("pfl", "flower", "fedjax")
RUNNERS = Path(confide.__file__).parents[2] / "benchmarks" / "peers"
NO_RUNNERS = "not part of an installed package; its runner is in benchmarks/peers of the source tree"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One system with one setting. Candidates of the same system compete; the best of them stands for it."""

    system: str
    setting: str
    command: tuple[str, ...]
    environment: str = ""
    """Which peer's environment; none for this one."""

    @property
    def name(self) -> str:
        return f"{self.system}, {self.setting}" if self.setting else self.system

    @property
    def foreign(self) -> bool:
        """Whether its runner lies outside the package."""
        return any(word.startswith(f"{RUNNERS.name}.") for word in self.command)


@dataclass
class Measured:
    """What a candidate's rounds took."""

    candidate: Candidate
    times: dict[str, list[float]] = field(default_factory=dict)
    peak_mib: float | None = None
    problem: str = ""

    def median(self, kind: str = "seconds") -> float | None:
        return median(self.times[kind]) if self.times.get(kind) else None


def candidates(workload: str, parameters: int) -> list[Candidate]:
    """Whom to compare on a workload."""
    ours, floors = ("confide.bench.ours", workload), ("peers.floors", workload)
    if workload == "C":
        size = ("--parameters", str(parameters))
        return [
            Candidate(OURS, "", (*ours, *size)),
            Candidate("one subtraction, norm and addition; normal_", "", (*floors, "flat", *size)),
            Candidate("pfl", "", ("peers.pfl_runner", workload, *size), "pfl"),
            Candidate("flower", "", ("peers.flower_runner", workload, *size), "flower"),
        ]
    two = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    flower = [Candidate("flower", "", ("peers.flower_runner", workload), "flower")]
    fedjax = [Candidate("fedjax", "", ("peers.fedjax_runner", workload), "fedjax")]
    return [
        *(Candidate(OURS, f"{n} workers", (*ours, "--workers", str(n))) for n in (1, 2)),
        Candidate("flat buffers, 2 processes", "", (*floors, "flat")),
        Candidate("plain loop", "", (*floors, "plain")),
        Candidate("pfl", "1 process", ("peers.pfl_runner", workload), "pfl"),
        Candidate("pfl", "2 processes", (*two, "peers.pfl_runner", workload), "pfl"),
        *(flower if workload in "AB" else []),
        *(fedjax if workload == "A" else []),
    ]


def python_of(candidate: Candidate, peers: Path) -> Path | None:
    """The interpreter of a candidate; none if its environment was not made."""
    if not candidate.environment:
        return Path(sys.executable)
    found = peers / candidate.environment / "bin" / "python"
    return found if found.exists() else None


class Runner:
    """A candidate's process."""

    def __init__(self, candidate: Candidate, python: Path, package: Path, log: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        # The package and the runners, and nothing else of this environment, is what they may import.
        # Ray would make Flower's clients give way to everything else on the machine.
        environment |= {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu", "RAY_worker_niceness": "0"}
        if "plain" not in candidate.command:
            environment["OMP_NUM_THREADS"] = "1"
        self.log = log
        self.process = subprocess.Popen(
            [python, "-m", *candidate.command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("wb"),
            env=environment, text=True, start_new_session=True,
        )  # fmt: skip

    def next_answer(self, limit: float = LONGEST) -> dict[str, Any]:
        """The next answer. A process that ends without one gives the end of what it printed."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit)[0]:
            raise UserError(f"no answer in {limit:g} s")
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise UserError(said[-1] if said else f"ended with code {self.process.wait()} and said nothing")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `next_answer` says why
            self.process.stdin.write("round\n")
            self.process.stdin.flush()
        return self.next_answer()

    def end(self) -> None:
        """By closing its input, and by a signal to its own session if that does not help."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)  # what it started and left behind; the session is its own
        self.process.wait()


def peak_mib(pid: int) -> float | None:
    """The sum of the peaks of a process and all that descend from it; none where the system does not tell."""
    if (own := _peak_kib(pid)) is None:
        return None
    waiting, total = [pid], own
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            total += sum(_peak_kib(child) or 0.0 for child in children)
            waiting += children
    return total / 1024


def _peak_kib(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


@contextmanager
def importable_folder() -> Iterator[Path]:
    """A folder that holds this package, the runners where there are any, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="confide-bench-") as folder:
        (Path(folder) / "confide").symlink_to(Path(confide.__file__).parent)
        if RUNNERS.is_dir():
            (Path(folder) / RUNNERS.name).symlink_to(RUNNERS)
        yield Path(folder)


def compare(
    chosen: list[Candidate], peers: Path, rounds: int, warm_up: int, say: Say = lambda _: None
) -> list[Measured]:
    """All candidates, round by round. Whoever fails is left out with the reason; the others go on."""
    results = [Measured(candidate) for candidate in chosen]
    if not RUNNERS.is_dir():
        say(f"only {OURS} itself can be run: there is no {RUNNERS}; for the other systems run this in a source tree")
    with importable_folder() as package:
        running: list[tuple[Measured, Runner]] = []
        try:
            for number, result in enumerate(results):
                if result.candidate.foreign and not RUNNERS.is_dir():
                    result.problem = NO_RUNNERS
                    continue
                python = python_of(result.candidate, peers)
                if python is None:
                    name = result.candidate.environment
                    result.problem = f"no environment {peers / name}; make it with `benchmarks/setup_peers.sh {peers}`"
                    continue
                say(f"starting {result.candidate.name}")
                running.append((result, Runner(result.candidate, python, package, package / f"{number}.log")))
                _try(result, running[-1][1].next_answer)
            for number in range(warm_up + rounds):
                for result, runner in running:
                    answer = None if result.problem else _try(result, runner.round)
                    if answer is not None and number >= warm_up:
                        for kind, seconds in answer.items():
                            result.times.setdefault(kind, []).append(seconds)
                say(f"round {number + 1} of {warm_up + rounds}")
            for result, runner in running:
                result.peak_mib = None if result.problem else peak_mib(runner.process.pid)
        finally:
            for _, runner in running:
                runner.end()
    return results


def _try(result: Measured, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return call()
    except (UserError, OSError, ValueError) as error:
        result.problem = f"failed: {error}"
        return None


def best(results: list[Measured], system: str, kind: str = "seconds") -> Measured | None:
    found = [r for r in results if r.candidate.system == system and not r.problem and r.times.get(kind)]
    return min(found, key=lambda r: r.median(kind) or 0.0) if found else None


def table(workload: str, results: list[Measured]) -> list[dict[str, Any]]:
    """A row for each candidate and kind of time; `ratio` is to the best of this project."""
    rows = []
    kinds = {"seconds": "round"} if workload != "C" else {"client": "a client", "noise": "noise"}
    for result in results:
        for kind in kinds:
            ours = best(results, OURS, kind)
            taken, base = result.median(kind), ours.median(kind) if ours else None
            rows.append({
                "workload": workload, "candidate": result.candidate.name, "what": kinds[kind], "seconds": taken,
                "ratio": taken / base if taken is not None and base else None,
                "rounds": len(result.times.get(kind, [])), "peak_mib": result.peak_mib, "problem": result.problem,
            })  # fmt: skip
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["candidate"]) for row in rows)
    lines = [f"{'':<{width}}  {'':<9} {'median s':>9} {'x confide':>10} {'peak MiB':>9}"]
    for row in rows:
        if row["seconds"] is None:
            lines.append(f"{row['candidate']:<{width}}  {row['what']:<9} {row['problem'] or 'not measured'}")
            continue
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
        lines.append(f"{row['candidate']:<{width}}  {row['what']:<9} {row['seconds']:>9.4f} {ratio:>10} {peak:>9}")
    return "\n".join(lines)


def as_json(results: list[Measured]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]
