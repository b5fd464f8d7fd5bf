"""Killed at any instant, a run that is resumed ends as if it had not been, and its ledger never counts too little.

Most kills here are simulated: at a chosen call of a function the program dies, and from then on nothing it does
reaches the disk. That covers every write of a run, one after the other. A few real processes get real signals.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from confide import build, recipe
from confide.federated import optimisers
from confide.privacy import ledger
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Release
from confide.recipe import Recipe
from confide.report.page import write_report
from confide.runs import checkpoint, folder, recording
from confide.runs.recording import Recording
from support import warm
from support.keyless import ledger_without_key, summary_without_key

pytestmark = pytest.mark.usefixtures("no_figures_here")

Command = Callable[..., tuple[int, str, str]]

# Where a simulated kill can strike: every sync, every rename, and both sides of every stage of a central step.
PLACES: dict[str, tuple[Any, str]] = {
    "sync": (os, "fsync"),
    "rename": (os, "replace"),
    "ledger line": (Ledger, "record"),
    "noise": (Release, "add_noise"),
    "optimiser": (optimisers, "update"),
    "metrics line": (Recording, "write"),
    "any line": (recording, "_write_line"),
    "checkpoint": (checkpoint, "save"),
}
SIDES = ("before", "after")


class Killed(BaseException):
    """Not an Exception: nothing may handle it."""


@contextmanager
def killed_at(place: str, call: int, side: str) -> Iterator[Callable[[], int]]:
    """Die before or after the n-th call, from 1, of a function; yields how often it was called."""
    owner, name = PLACES[place]
    original, calls, dead = getattr(owner, name), 0, False
    unlink = Path.unlink

    def strike(*args: Any, **options: Any) -> Any:
        nonlocal calls, dead
        calls += 1
        if calls == call and side == "before":
            dead = True
            raise Killed
        answer = original(*args, **options)
        if calls == call:
            dead = True
            raise Killed
        return answer

    def leave(path: Path, missing_ok: bool = False) -> None:
        # The dead do not tidy up after themselves.
        if not dead:
            unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, strike)
        patch.setattr(Path, "unlink", leave)
        yield lambda: calls


def train(wanted: Recipe, out: Path) -> None:
    folder.train(wanted, out, quiet=True, page=write_report)


def finish(out: Path, wanted: Recipe) -> dict[str, Any]:
    """What a person would type next: resume, or train again where the kill came before there was a run."""
    if (out / folder.RECIPE).exists():
        return folder.resume(out, quiet=True, page=write_report)
    return folder.train(wanted, out, quiet=True, page=write_report)


def steps_done(out: Path) -> int:
    """How many releases the rest of the folder speaks of."""
    saved = checkpoint.load(out).state.step if (out / checkpoint.FILE).exists() else 0
    metrics = (out / folder.METRICS).read_bytes().count(b"\n") if (out / folder.METRICS).exists() else 0
    return max(saved, metrics)


def releases(out: Path) -> int:
    """How many releases the ledger's complete lines count; the first line describes the run."""
    path = out / ledger.FILE
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


@pytest.fixture(scope="module")
def wanted(tiny: str) -> Recipe:
    return recipe.load(tiny)


@pytest.fixture(scope="module")
def straight(wanted: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(wanted, out)
    return out


def ends_like(out: Path, straight: Path) -> bool:
    """Model, norms, ledger and summary are the same, but for time and key, and every step is in the metrics once."""
    one, other = summary_without_key(out), summary_without_key(straight)
    steps = [json.loads(line)["step"] for line in (out / folder.METRICS).read_text().splitlines()]
    return (
        (out / folder.MODEL).read_bytes() == (straight / folder.MODEL).read_bytes()
        and ledger_without_key(out) == ledger_without_key(straight)
        and (out / folder.LAYERS).read_bytes() == (straight / folder.LAYERS).read_bytes()
        and one == other
        and steps == list(range(1, one["steps"] + 1))
    )


# After a sync is before what follows it, and so is the rest that is left out here.
INSTANTS = [(p, s) for p in PLACES for s in SIDES if (p, s) not in {("sync", "after"), ("noise", "before")}]


@pytest.mark.parametrize(("place", "side"), INSTANTS)
def test_killed_at_any_call_a_resumed_run_ends_identically_and_never_counts_less(
    place: str, side: str, wanted: Recipe, straight: Path, tmp_path: Path
) -> None:
    with killed_at(place, 0, side) as calls:
        train(wanted, tmp_path / "counted")
        total = calls()
    assert total >= 4
    for call in range(1, total + 1):
        out = tmp_path / str(call)
        with killed_at(place, call, side), pytest.raises(Killed):
            train(wanted, out)
        assert releases(out) >= steps_done(out), f"call {call}"
        finish(out, wanted)
        assert ends_like(out, straight), f"call {call}"


def test_killed_again_and_again_a_run_still_ends_identically(wanted: Recipe, straight: Path, tmp_path: Path) -> None:
    chance, kills = random.Random(2), 0
    for attempt in range(6):
        out = tmp_path / str(attempt)
        for _ in range(4):
            place, side = chance.choice(list(PLACES)), chance.choice(SIDES)
            with killed_at(place, chance.randint(1, 3), side):
                try:
                    finish(out, wanted)
                except Killed:
                    kills += 1
            assert releases(out) >= steps_done(out)
        finish(out, wanted)
        assert ends_like(out, straight)
    assert kills >= 12


@pytest.fixture(scope="module")
def killed(wanted: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after the noise of step 5 was drawn, one step beyond its checkpoint."""
    out = tmp_path_factory.mktemp("killed") / "run"
    with killed_at("noise", 6, "after"), pytest.raises(Killed):
        train(wanted, out)
    assert checkpoint.load(out).state.step == 4
    assert releases(out) == 6
    assert steps_done(out) == 5
    return out


@pytest.mark.parametrize("left", [1, 10, 100, -1], ids=["one byte", "ten bytes", "a third", "all but the newline"])
def test_a_torn_last_line_of_the_ledger_is_a_release_that_had_not_begun(
    left: int, killed: Path, straight: Path, wanted: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    *whole, last = (out / ledger.FILE).read_bytes().splitlines(keepends=True)
    (out / ledger.FILE).write_bytes(b"".join(whole) + last[:left])
    assert releases(out) == 5
    finish(out, wanted)
    assert ends_like(out, straight)


@pytest.mark.parametrize("name", [folder.METRICS, folder.LAYERS])
@pytest.mark.parametrize("torn", [b"{", b'{"step": 6', b'{"step": 6, "loss": 0.5}', b"\x00" * 512])
def test_a_torn_last_line_of_the_metrics_is_made_again(
    torn: bytes, name: str, killed: Path, straight: Path, wanted: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    with (out / name).open("ab") as file:
        file.write(torn)
    finish(out, wanted)
    assert ends_like(out, straight)


def test_temporary_files_that_a_kill_left_behind_are_no_obstacle_and_do_not_stay(
    killed: Path, straight: Path, wanted: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    for name in (checkpoint.FILE, folder.METRICS, folder.MODEL, folder.SUMMARY, "report.html"):
        (out / f"{name}.tmp").write_bytes(b"half of")
    finish(out, wanted)
    assert ends_like(out, straight)
    assert list(out.glob("*.tmp")) == []


def test_a_folder_with_nothing_but_a_temporary_recipe_is_taken_for_a_new_run(
    wanted: Recipe, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.yaml.tmp").write_text("task:")
    (out / ".lock").touch()
    train(wanted, out)
    assert ends_like(out, straight)


def test_the_epsilon_of_a_killed_run_covers_the_release_whose_step_was_lost(killed: Path, straight: Path) -> None:
    assert folder.check_ledger(killed)["releases"] == 6
    assert folder.check_ledger(killed)["epsilon"] == folder.check_ledger(straight)["epsilon"]


# Where the same bits cannot be had again


@contextmanager
def released(values: dict[tuple[int, int], set[bytes]]) -> Iterator[None]:
    """Collect, for every entry (step, attempt) of the ledger, the sums that were released with its noise."""
    original = Release.add_noise

    def release(made: Release, total: Tensor, *rest: Any) -> Any:
        values.setdefault((made.step, made.attempt), set()).add(total.numpy().tobytes())
        return original(made, total, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Release, "add_noise", release)
        yield


def test_in_another_environment_a_step_is_another_release_with_a_line_of_its_own(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Recipe
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    monkeypatch.setattr(build, "environment", lambda _: "another machine")
    before = folder.check_ledger(out)
    summary = finish(out, wanted)
    book = Ledger.read(out / ledger.FILE)
    assert [(e.step, e.attempt) for e in book.entries[6:]] == [(4, 1), (5, 1)]
    assert summary["releases"] == 8
    assert summary["epsilon"] > before["epsilon"]


def test_no_entry_of_the_ledger_ever_stands_for_two_values_when_a_run_wanders_between_machines(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 0 to 3 on machine a, step 0 again on b, and then on a once more: its old lines fit no longer."""
    wanted, out = recipe.load(tiny, ["run.checkpoint_every=100"]), tmp_path / "run"
    values: dict[tuple[int, int], set[bytes]] = {}
    for machine, last in (("a", 4), ("b", 1), ("a", 0)):
        monkeypatch.setattr(build, "environment", lambda _, machine=machine: machine)
        with released(values), killed_at("optimiser", last, "after"):
            try:
                finish(out, wanted)
            except Killed:
                assert last
    assert folder.summary_of(out)["steps"] == 6
    assert {entry: len(sums) for entry, sums in values.items() if len(sums) > 1} == {}
    assert folder.check_ledger(out)["releases"] == len(values)


def test_a_resumed_run_releases_the_same_value_under_the_entry_it_finds(wanted: Recipe, tmp_path: Path) -> None:
    values: dict[tuple[int, int], set[bytes]] = {}
    with released(values):
        for call in (3, 4, 2, 5):
            with killed_at("metrics line", call, "before"):
                try:
                    finish(tmp_path / "run", wanted)
                except Killed:
                    continue
        finish(tmp_path / "run", wanted)
    assert {entry: len(sums) for entry, sums in values.items()} == {(step, 0): 1 for step in range(6)}


# Real processes


# Slow enough for signals to land in it, and of several parts, so that workers share it.
SLOW = ["task.users=200", "task.dimension=200", "task.rank=5", "sampling.cohort=200", "evaluation.every=100"]
SLOW += ["run={steps: 120, checkpoint_every: 10}", "privacy.accountant=rdp"]


@pytest.fixture(scope="module")
def slow(tiny: str) -> Recipe:
    return recipe.load(tiny, SLOW)


@pytest.fixture(scope="module")
def slow_straight(slow: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("slow") / "run"
    train(slow, out)
    return out


def wait_for(what: Callable[[], object], seconds: float = 90) -> None:
    """Poll until something is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def records(out: Path) -> int:
    return (out / folder.METRICS).read_bytes().count(b"\n") if (out / folder.METRICS).exists() else 0


@contextmanager
def training(tiny: str, out: Path, *options: object) -> Iterator[ForkServerProcess]:
    """A process that trains into a folder; what it prints and says is in files beside that."""
    changes = [word for change in SLOW for word in ("--set", change)]
    words = ("train", tiny, "--out", out, *options, *changes)
    process = warm.start(*words, folder=out.parent, out=out.parent / "printed", err=out.parent / "said")
    try:
        yield process
    finally:
        process.kill()
        process.join()


def send(process: ForkServerProcess, number: int) -> int | None:
    """Send a signal and wait for the end, whose code is the answer."""
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize(
    ("least", "most"), [(0, 0), (1, 40), (41, 90)], ids=["while it starts", "early in training", "late in training"]
)
def test_a_process_killed_by_sigkill_at_a_random_instant_ends_identically(
    least: int, most: int, tiny: str, slow: Recipe, slow_straight: Path, tmp_path: Path
) -> None:
    out, chance = tmp_path / "run", random.Random(least)
    steps = chance.randint(least, most)
    with training(tiny, out) as process:
        wait_for(lambda: out.exists() and records(out) >= steps)
        time.sleep(chance.uniform(0, 0.02))
        assert send(process, signal.SIGKILL) == -signal.SIGKILL
    assert not (out / folder.SUMMARY).exists()
    assert releases(out) >= steps_done(out)
    finish(out, slow)
    assert ends_like(out, slow_straight)


def test_ctrl_c_stops_a_process_after_saving_and_says_how_to_go_on(
    tiny: str, slow: Recipe, slow_straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with training(tiny, out, "--json") as process:
        wait_for(lambda: records(out) >= 5)
        assert send(process, signal.SIGINT) == 130
    assert (tmp_path / "printed").read_text() == ""
    said = (tmp_path / "said").read_text()
    assert f"`confide resume {out}`" in said
    assert "Traceback" not in said
    step = checkpoint.load(out).state.step
    assert f"stopped after step {step} of 120" in said
    assert records(out) == releases(out) == step
    finish(out, slow)
    assert ends_like(out, slow_straight)


def test_ctrl_c_before_training_begins_ends_at_once_and_says_that_nothing_was_begun(
    tiny: str, wanted: Recipe, straight: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # until it arrives: the signal may reach another thread first

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "make_loop", interrupted)
        code, printed, said = command("train", tiny, "--out", out)
    assert (code, printed) == (130, "")
    assert "nothing was begun" in said
    finish(out, wanted)
    assert ends_like(out, straight)


def children(parent: int) -> list[int]:
    """The processes that were started by one, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (about := status(int(entry.name))) and int(about["PPid"]) == parent:
            found.append(int(entry.name))
    return found


def status(process: int) -> dict[str, str]:
    """Of a process that is alive: nothing once it is gone or only waits to be buried."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    about = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {} if about["State"].startswith("Z") else about


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_workers_do_not_outlive_a_killed_parent_and_its_run_ends_identically(
    tiny: str, slow: Recipe, slow_straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with training(tiny, out, "--workers", 2) as process:
        wait_for(lambda: records(out) >= 5)
        assert process.pid is not None
        workers = children(process.pid)
        assert len(workers) >= 2
        send(process, signal.SIGKILL)
        wait_for(lambda: not any(status(worker) for worker in workers), seconds=20)
    assert releases(out) >= steps_done(out)
    finish(out, slow)
    assert ends_like(out, slow_straight)
