"""Ranks of torch.distributed: the bytes of one process, one voice, and a clean end when one of them is lost.

Most ranks here are forks of this process that get what torchrun would set in their environment; they are real processes
which meet over real sockets and can be killed, but start at once. Two tests start torchrun itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide import build, cli, recipe
from confide.engines import distributed, environment
from confide.engines.distributed import Distributed, RankTrainer
from confide.engines.ranks import place
from confide.errors import UserError
from confide.federated.cohort import PartTrainer
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Plan, Release
from confide.runs import checkpoint, folder
from support.keyless import ledger_without_key, summary_without_key

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forks"),
    pytest.mark.usefixtures("no_figures_here", "imported"),
]

# The plain path, so that every user is a part of its own.
PLAIN = ["local.gradient_clip=10"]
ADAPTIVE = ["bounding.adaptive={count_noise: 2}"]
CAR = ["privacy={}", "bounding.adaptive={kind: car, warm_up: 2}"]
Hook = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class End:
    code: int | None
    printed: str
    said: str


def together(count: int, place: Path, *words: object, sets: list[str] | None = None, **hooks: Hook) -> list[End]:
    """`confide ...` on each rank; `rank1=hook` changes the program of rank 1 before it begins. 0: no ranks at all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*map(str, words), *(word for change in sets or [] for word in ("--set", change))]
    place.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    members = []
    for rank in range(max(count, 1)):
        settings = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        hook = hooks.get(f"rank{rank}")
        member = context.Process(
            target=_rank, args=(settings if count else {}, command, hook, place / f"out{rank}", place / f"err{rank}")
        )
        member.start()
        members.append(member)
    for member in members:
        member.join(120)
        if member.is_alive():
            member.kill()
            member.join()
    texts = [((place / f"out{r}").read_text(), (place / f"err{r}").read_text()) for r in range(len(members))]
    return [End(member.exitcode, *text) for member, text in zip(members, texts, strict=True)]


def _rank(settings: dict[str, Any], command: list[str], hook: Hook | None, out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ |= {name: str(value) for name, value in settings.items()}
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["confide", *command])
    if hook is not None:
        hook(patch)
    cli.main()


def dies_in(step: int, after_part: bool = False) -> Hook:
    """Killed at its first part of a central step, before or after it is trained."""

    def hook(patch: pytest.MonkeyPatch) -> None:
        original = PartTrainer.add_part

        def add_part(self: PartTrainer, central: Any, users: Any, at: int, *more: Any) -> Any:
            if at == step - 1 and not after_part:
                os.kill(os.getpid(), signal.SIGKILL)
            tally = original(self, central, users, at, *more)
            if at == step - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return tally

        patch.setattr(PartTrainer, "add_part", add_part)
        deal_evenly(patch)

    return hook


def deal_evenly(patch: pytest.MonkeyPatch) -> None:
    """Let rank 0 deal parts as if all ranks were equally fast: by the clock, a rank could be left without any."""
    patch.setattr(Distributed, "_speeds", lambda engine: np.ones(engine.here.ranks))


def one_slot(patch: pytest.MonkeyPatch) -> None:
    """As with a large model: many windows of one part a rank."""
    patch.setattr(distributed, "_SLOTS", 1)


@pytest.fixture(scope="module")
def straight(tiny: str, tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Callable[..., Path]:
    """The run of one process."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*sets: str) -> Path:
        if sets not in made:
            made[sets] = tmp_path_factory.mktemp("straight") / "run"
            folder.train(recipe.load(tiny, [*PLAIN, *sets]), made[sets], quiet=True)
        return made[sets]

    return make


@pytest.fixture(scope="module")
def imported(straight: Callable[..., Path]) -> None:
    """Have everything that a run needs imported before the first fork."""
    straight()


def same(one: Path, other: Path) -> bool:
    """Compare all but the time, the key, and the epsilon on the way: a step made again was charged before."""
    records = [[json.loads(line) for line in (run / folder.METRICS).read_text().splitlines()] for run in (one, other)]
    for record in (*records[0], *records[1]):
        del record["seconds"]
        record.pop("epsilon", None)
    files = (folder.MODEL, folder.LAYERS, folder.RECIPE)
    return (
        all((one / name).read_bytes() == (other / name).read_bytes() for name in files)
        and records[0] == records[1]
        and ledger_without_key(one) == ledger_without_key(other)
        and summary_without_key(one) == summary_without_key(other)
    )


# The same result


@pytest.mark.parametrize(
    ("count", "sets", "hook"),
    [(1, [], None), (2, [], None), (3, ADAPTIVE, one_slot), (2, CAR, one_slot)],
    ids=["1", "2", "3, adaptive bounds, many windows", "2, a bound for every user"],
)
def test_any_number_of_ranks_leaves_the_bytes_of_one_process(
    count: int, sets: list[str], hook: Hook | None, tiny: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    hooks = {f"rank{rank}": hook for rank in range(count) if hook is not None}
    words = ("train", tiny, "--out", tmp_path / "run", "--json")
    first, *others = together(count, tmp_path, *words, sets=[*PLAIN, *sets], **hooks)
    assert first.code == 0, first.said
    assert json.loads(first.printed)["steps"] == 6
    assert [*others] == [End(0, "", "")] * (count - 1), "only rank 0 speaks"
    assert same(tmp_path / "run", straight(*sets))


def test_every_rank_trains_and_rank_0_alone_samples_and_writes(tiny: str, tmp_path: Path) -> None:
    def watched(rank: int) -> Hook:
        def hook(patch: pytest.MonkeyPatch) -> None:
            watched = {
                "add_part": PartTrainer, "cohort": Plan, "add_noise": Release, "record": Ledger, "save": checkpoint,
            }  # fmt: skip
            for name, owner in watched.items():
                _note_calls(patch, owner, name, tmp_path / f"calls{rank}")

        return hook

    words = ("train", tiny, "--out", tmp_path / "run")
    ends = together(2, tmp_path, *words, sets=PLAIN, rank0=watched(0), rank1=watched(1))
    assert [end.code for end in ends] == [0, 0], ends[0].said
    calls = [(tmp_path / f"calls{rank}").read_text().split() for rank in (0, 1)]
    assert set(calls[0]) == {"add_part", "cohort", "add_noise", "record", "save"}
    assert set(calls[1]) == {"add_part"}
    total = sum(json.loads(line)["cohort"] for line in (tmp_path / "run" / folder.METRICS).read_text().splitlines())
    trained = [each.count("add_part") for each in calls]
    assert sum(trained) == total
    assert min(trained) >= total // 4


def _note_calls(patch: pytest.MonkeyPatch, owner: Any, name: str, path: Path) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        with path.open("a") as file:
            file.write(name + "\n")
        return original(*args, **options)

    patch.setattr(owner, name, noted)


# A rank is lost


@pytest.mark.parametrize("after_part", [False, True], ids=["before its part", "after its part"])
def test_a_killed_rank_ends_the_step_for_all_and_the_run_goes_on_with_fewer(
    after_part: bool, tiny: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    ends = together(
        3, tmp_path / "first", "train", tiny, "--out", out, sets=PLAIN, rank0=deal_evenly, rank1=dies_in(4, after_part)
    )  # fmt: skip
    assert [end.code for end in ends] == [1, -signal.SIGKILL, 1]
    assert "a rank was lost in central step 4" in ends[0].said
    assert f"Go on with `confide resume {out}`" in ends[0].said
    assert re.fullmatch(r"rank 2: a rank was lost .*\n", ends[2].said)
    assert not any("Traceback" in end.said for end in ends)
    assert checkpoint.load(out).state.step == 2
    assert folder.check_ledger(out)["releases"] == 3, "nothing of the step that was lost"
    ends = together(2, tmp_path / "second", "resume", out)
    assert [end.code for end in ends] == [0, 0], ends[0].said
    assert same(out, straight())


def test_when_rank_0_is_killed_the_others_end_and_one_process_goes_on(
    tiny: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    ends = together(2, tmp_path / "first", "train", tiny, "--out", out, sets=PLAIN, rank0=dies_in(4))
    assert [end.code for end in ends] == [-signal.SIGKILL, 1]
    assert re.fullmatch(r"rank 1: a rank was lost .*\n", ends[1].said)
    assert folder.check_ledger(out)["releases"] == 3
    (end,) = together(0, tmp_path / "second", "resume", out)
    assert end.code == 0, end.said
    assert same(out, straight())


def test_a_rank_that_does_not_answer_is_given_up_after_the_timeout(tiny: str, tmp_path: Path) -> None:
    def impatient(patch: pytest.MonkeyPatch) -> None:
        patch.setenv("CONFIDE_RANK_TIMEOUT", "3")

    def silent(patch: pytest.MonkeyPatch) -> None:
        def wait(*_: Any) -> None:
            while "lost" not in (tmp_path / "err0").read_text():
                time.sleep(0.05)

        patch.setattr(RankTrainer, "_train_mine", wait)

    words = ("train", tiny, "--out", tmp_path / "run")
    first, _ = together(2, tmp_path, *words, sets=PLAIN, rank0=impatient, rank1=silent)
    assert first.code == 1
    assert "did not answer in 3 s" in first.said
    assert folder.check_ledger(tmp_path / "run")["releases"] == 0


# Mistakes and defects


def test_a_mistake_in_the_recipe_is_said_once(tiny: str, tmp_path: Path) -> None:
    first, *others = together(3, tmp_path, "train", tiny, "--out", tmp_path / "run", sets=["local.stepz=2"])
    assert first.code == 2
    assert first.said.count("stepz") >= 1
    assert others == [End(0, "", "")] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["train", "--help"], ["train"], ["recipe", "list"]], ids=" ".join)
def test_what_needs_no_training_is_answered_by_rank_0(words: list[str], tmp_path: Path) -> None:
    first, other = together(2, tmp_path, *words)
    assert first.code == (2 if words == ["train"] else 0)
    assert first.printed + first.said
    assert other == End(0, "", "")


def test_a_finished_run_answers_at_once_and_sends_the_others_home(
    tiny: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    first, other = together(2, tmp_path, "train", tiny, "--out", straight(), "--json", sets=PLAIN)
    assert (first.code, json.loads(first.printed)) == (0, folder.summary_of(straight()))
    assert other == End(0, "", "")


def test_workers_within_ranks_are_refused(tiny: str, tmp_path: Path) -> None:
    first, other = together(2, tmp_path, "train", tiny, "--out", tmp_path / "run", "--workers", 2)
    assert first.code == 2
    assert "--nproc-per-node" in first.said
    assert other == End(0, "", "")


def test_a_rank_that_cannot_build_the_task_says_why_through_rank_0(tiny: str, tmp_path: Path) -> None:
    def without_data(patch: pytest.MonkeyPatch) -> None:
        def make_trainer(*_: Any) -> Any:
            raise UserError("there is no folder data/speech; name another in task.data")

        patch.setattr(build, "make_trainer", make_trainer)

    first, other = together(2, tmp_path, "train", tiny, "--out", tmp_path / "run", sets=PLAIN, rank1=without_data)
    assert (first.code, first.said) == (2, "rank 1: there is no folder data/speech; name another in task.data\n")
    assert other == End(0, "", "")
    assert not (tmp_path / "run" / folder.RECIPE).exists(), "nothing has begun"


def test_a_rank_of_another_version_is_refused(tiny: str, tmp_path: Path) -> None:
    def older(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(environment, "__version__", "0.0.1")

    first, other = together(2, tmp_path, "train", tiny, "--out", tmp_path / "run", sets=PLAIN, rank1=older)
    assert first.code == 2
    assert "rank 1 has processor and versions" in first.said
    assert other == End(0, "", "")


def test_steps_of_unlike_processors_are_never_taken_for_repetitions(tiny: str, tmp_path: Path) -> None:
    """Bits may differ between processors, and who trains a part follows the clock: every step is kept at once."""

    def unlike(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(environment, "processor", lambda: ["another make"])

    def noting(patch: pytest.MonkeyPatch) -> None:
        _note_calls(patch, checkpoint, "save", tmp_path / "saves")

    words = ("train", tiny, "--out", tmp_path / "run")
    first, other = together(2, tmp_path, *words, sets=PLAIN, rank0=noting, rank1=unlike)
    assert (first.code, other.code) == (0, 0), first.said
    steps = len((tmp_path / "run" / folder.METRICS).read_text().splitlines())
    assert len((tmp_path / "saves").read_text().split()) >= steps + 1


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_part_is_shown_once_and_everybody_leaves(
    failing: int, tiny: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    def fails(patch: pytest.MonkeyPatch) -> None:
        original = PartTrainer.add_part

        def add_part(self: PartTrainer, central: Any, users: Any, at: int, *more: Any) -> Any:
            if at == 2:
                raise ZeroDivisionError("a defect in a task")
            return original(self, central, users, at, *more)

        patch.setattr(PartTrainer, "add_part", add_part)

    hooks = {f"rank{failing}": fails}
    first, other = together(2, tmp_path / "first", "train", tiny, "--out", tmp_path / "run", sets=PLAIN, **hooks)
    assert first.code == 1
    assert first.said.count("ZeroDivisionError: a defect in a task") == 1
    assert ("rank 1 failed" in first.said) == (failing == 1)
    assert other == End(0, "", "")
    (end,) = together(0, tmp_path / "second", "resume", tmp_path / "run")
    assert end.code == 0
    assert same(tmp_path / "run", straight())


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("x", "2"), ("-1", "2")])
def test_an_environment_that_makes_no_sense_is_refused(rank: str, size: str) -> None:
    with pytest.raises(UserError, match=f"RANK={rank}"):
        place({"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_without_torchrun_there_are_no_ranks() -> None:
    assert place({}) is None
    assert place({"RANK": "0", "WORLD_SIZE": "2"}) is None


# torchrun itself

# Slow enough for signals to land in it.
SLOW = ["task.users=60", "sampling.cohort=20", "evaluation.every=100"]
SLOW += ["run={steps: 40, checkpoint_every: 10}"]


@contextmanager
def torchrun(*words: object, sets: list[str]) -> Iterator[subprocess.Popen[str]]:
    changes = [word for change in sets for word in ("--set", change)]
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words), *changes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], object], process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def records(out: Path) -> int:
    return (out / folder.METRICS).read_bytes().count(b"\n") if (out / folder.METRICS).exists() else 0


def children(parent: int) -> dict[str, int]:
    """The ranks that a torchrun has started, from /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"\nPPid:\t{parent}\n" in (entry / "status").read_text():
                settings = dict(s.split("=", 1) for s in (entry / "environ").read_text().split("\0") if "=" in s)
                found[settings["RANK"]] = int(entry.name)
        except (OSError, KeyError):
            continue
    return found


@pytest.fixture(scope="module")
def slow_straight(straight: Callable[..., Path]) -> Path:
    return straight(*SLOW)


@pytest.mark.slow
def test_ctrl_c_on_torchrun_stops_after_saving_and_the_run_ends_identically(
    tiny: str, slow_straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with torchrun("--nproc-per-node=2", "-m", "confide", "train", tiny, "--out", out, sets=[*PLAIN, *SLOW]) as process:
        wait_for(lambda: records(out) >= 5, process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    step = checkpoint.load(out).state.step
    assert f"stopped after step {step} of 40; go on with `confide resume {out}`" in said
    assert "rank 1:" not in said
    assert records(out) == folder.check_ledger(out)["releases"] == step
    (end,) = together(0, tmp_path / "second", "resume", out)
    assert end.code == 0
    assert same(out, slow_straight)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_torchrun_goes_on_by_itself_when_a_rank_is_killed_and_restarts_are_allowed(
    tiny: str, slow_straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ("--nproc-per-node=2", "--max-restarts=1", "-m", "confide", "train", tiny, "--out", out)
    with torchrun(*words, sets=[*PLAIN, *SLOW]) as process:
        wait_for(lambda: records(out) >= 12, process)
        os.kill(children(process.pid)["1"], signal.SIGKILL)
        _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "a rank was lost in central step" in said
    assert same(out, slow_straight)
