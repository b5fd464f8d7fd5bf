"""Whatever is wrong: one clear message that names the place, exit code 2, and nothing overwritten."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide import recipe, run
from confide.build import make_loop, make_task
from confide.engines.processes import WorkerFailed
from confide.errors import Stopped
from confide.federated.parameters import flatten
from confide.privacy import ledger, plan, sampling
from confide.privacy.mechanisms import Occasion
from confide.runs import checkpoint, folder
from confide.runs.simulation import simulate
from support import warm

pytestmark = pytest.mark.usefixtures("no_figures_here")

Command = Callable[..., tuple[int, str, str]]
Contents = Callable[[Path], dict[str, str]]
Refuse = Callable[..., str]
Sender = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def refused(command: Command, contents: Contents, tmp_path: Path) -> Refuse:
    """Runs a command that must fail as the user's mistake and change nothing; answers with what it said."""

    def call(*words: object, lines: int = 1) -> str:
        before = contents(tmp_path)
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        assert len(err.splitlines()) == lines, err
        assert contents(tmp_path) == before
        return err

    return call


@pytest.fixture(scope="module")
def halfway(tiny: str, signal_after: Sender, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 4 of 6."""
    out = tmp_path_factory.mktemp("halfway") / "run"
    with signal_after(4), pytest.raises(Stopped):
        folder.train(recipe.load(tiny), out, quiet=True)
    return out


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    shutil.copytree(halfway, tmp_path / "run")
    return tmp_path / "run"


# Recipes and data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("bounding.bund=1", "bounding.bund: there is no such key; did you mean 'bound'?"),
        ("bounding.bound=-1", "bounding.bound=-1: expected a number above 0"),
        ("sampling.cohort=13", "sampling.cohort=13 is larger than the population of 12 users"),
    ],
)
def test_a_mistake_in_a_recipe_is_found_before_a_folder_is_made(
    change: str, said: str, tiny: str, tmp_path: Path, refused: Refuse
) -> None:
    assert said in refused("train", tiny, "--out", tmp_path / "run", "--set", change, lines=2)
    assert not (tmp_path / "run").exists()


def test_words_that_typer_refuses_also_exit_with_2(command: Command, tiny: str, tmp_path: Path) -> None:
    for wrong in (["train", tiny], ["train", tiny, "--out", tmp_path / "run", "--workers", 0], ["trian"]):
        code, out, err = command(*wrong)
        assert (code, out) == (2, "")
        assert err
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


FASHION = ["--set", "task={kind: convex/logistic, dataset: fashion-mnist, users: 12, folder: FOLDER}"]


def fashion(place: Path) -> list[str]:
    return [word.replace("FOLDER", str(place)) for word in FASHION]


def test_a_missing_data_folder_is_named_with_what_to_do(tiny: str, tmp_path: Path, refused: Refuse) -> None:
    said = refused("train", tiny, "--out", tmp_path / "run", *fashion(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in said
    assert "task.folder" in said
    assert "dataset-fashion-mnist" in said
    # The mistake costs nothing: the same folder can be used once it is mended.
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def write_fashion(place: Path, examples: int) -> None:
    place.mkdir()
    for part in ("train", "t10k"):
        (place / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 0x803, examples, 28, 28) + bytes(examples * 784)
        )
        labels = bytes(k % 10 for k in range(examples))
        (place / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, examples) + labels)


@pytest.mark.parametrize("left", [0, 7, 16, -1], ids=["nothing", "half a header", "a header", "all but a byte"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_truncated_idx_file_is_named_and_nothing_is_started(
    name: str, left: int, tiny: str, tmp_path: Path, refused: Refuse
) -> None:
    write_fashion(tmp_path / "data", 60)
    path = tmp_path / "data" / name
    path.write_bytes(path.read_bytes()[:left])
    assert str(path) in refused("train", tiny, "--out", tmp_path / "run", *fashion(tmp_path / "data"))
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_more_shards_than_examples_are_refused(tiny: str, tmp_path: Path, refused: Refuse) -> None:
    write_fashion(tmp_path / "data", 59)
    said = refused("train", tiny, "--out", tmp_path / "run", *fashion(tmp_path / "data"))
    assert "59 training examples cannot fill 60 shards" in said


def test_a_folder_of_complete_idx_files_trains(tiny: str, tmp_path: Path, command: Command) -> None:
    write_fashion(tmp_path / "data", 60)
    code, *_ = command("train", tiny, "--out", tmp_path / "run", *fashion(tmp_path / "data"))
    assert code == 0


# Folders


def test_a_folder_that_holds_another_recipe_is_left_alone(stopped: Path, tiny: str, refused: Refuse) -> None:
    said = refused("train", tiny, "--out", stopped, "--set", "run.seed=1")
    assert str(stopped) in said
    assert "already holds another run" in said
    assert "--out" in said


def test_a_folder_that_holds_this_run_unfinished_is_left_to_resume(stopped: Path, tiny: str, refused: Refuse) -> None:
    assert f"confide resume {stopped}" in refused("train", tiny, "--out", stopped)


def test_a_folder_with_somebodys_files_is_left_alone(tiny: str, tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Once")
    said = refused("train", tiny, "--out", tmp_path / "thesis")
    assert str(tmp_path / "thesis") in said
    assert "chapter1.tex" in said
    assert not (tmp_path / "thesis" / ".lock").exists()


def test_a_file_in_the_place_of_the_folder_is_left_alone(tiny: str, tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "file").write_text("Once")
    assert str(tmp_path / "file") in refused("train", tiny, "--out", tmp_path / "file")
    assert str(tmp_path / "file") in refused("train", tiny, "--out", tmp_path / "file" / "run")


@pytest.mark.parametrize("words", [["resume"], ["ledger"], ["report"]])
def test_a_folder_without_a_run_is_refused(words: list[str], tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        assert str(place) in refused(*words, place)
        assert not (place / ".lock").exists()


def test_a_second_process_in_a_folder_is_sent_away(
    stopped: Path, tiny: str, tmp_path: Path, refused: Refuse, command: Command
) -> None:
    (tmp_path / "new").mkdir()
    for place, words in (
        (stopped, ["resume", stopped]),
        (tmp_path / "new", ["train", tiny, "--out", tmp_path / "new"]),
    ):
        with (place / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            said = refused(*words)
        assert f"another process is working in {place}" in said
        assert command(*words)[0] == 0


# Damaged runs


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit in the tensors": lambda c: c[:-5] + bytes([c[-5] ^ 1]) + c[-4:],
    "another step in the header": lambda c: c.replace(b'\\"step\\": 4', b'\\"step\\": 5'),
    "another count of releases": lambda c: c.replace(b'\\"ledger_count\\": 4', b'\\"ledger_count\\": 0'),
    "cut short": lambda c: c[:-8],
    "a header alone": lambda c: c[:40],
    "nothing": lambda c: b"",
    "something else": lambda c: b"\x93NUMPY" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_kept_for_inspection(damage: str, stopped: Path, refused: Refuse) -> None:
    before = (stopped / checkpoint.FILE).read_bytes()
    edit(stopped / checkpoint.FILE, DAMAGE[damage])
    assert (stopped / checkpoint.FILE).read_bytes() != before
    for words in ("resume", "ledger"):
        said = refused(words, stopped)
        assert str(stopped / checkpoint.FILE) in said
        assert "damaged" in said
        assert "Put back a copy" in said


def rows(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


EDITS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "more noise than there was": (lambda c: c.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'), "line 2"),
    "another delta": (lambda c: c.replace(b'"delta":1e-05', b'"delta":1e-03'), "line 1"),
    "a line removed": (lambda c: b"".join(rows(c)[:2] + rows(c)[3:]), "line 3"),
    "two lines swapped": (lambda c: b"".join([*rows(c)[:2], rows(c)[3], rows(c)[2], rows(c)[4]]), "line 3"),
    "a line twice": (lambda c: b"".join([*rows(c)[:3], rows(c)[2], *rows(c)[3:]]), "line 4"),
    "the last line removed": (lambda c: b"".join(rows(c)[:-1]), "lines are missing at its end"),
    "the last line torn": (lambda c: c[:-10], "lines are missing at its end"),
    "all but the first line removed": (lambda c: rows(c)[0], "lines are missing at its end"),
    "a line that is no JSON": (lambda c: c.replace(rows(c)[1], b"hello\n"), "line 2"),
    "an empty line": (lambda c: c.replace(rows(c)[1], b"\n" + rows(c)[1]), "line 2"),
    "nothing left": (lambda c: b"", "no complete line"),
    "bytes that are no text": (lambda c: b"\xff\xfe" + c, "line 1"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_ledger_is_found_by_both_commands_that_need_it(name: str, stopped: Path, refused: Refuse) -> None:
    change, where = EDITS[name]
    before = (stopped / ledger.FILE).read_bytes()
    edit(stopped / ledger.FILE, change)
    assert (stopped / ledger.FILE).read_bytes() != before
    for words in ("ledger", "resume"):
        said = refused(words, stopped)
        assert str(stopped / ledger.FILE) in said
        assert where in said


def test_a_ledger_rewritten_with_right_hashes_is_still_not_the_one_of_the_checkpoint(
    stopped: Path, refused: Refuse
) -> None:
    held = ledger.Ledger.read(stopped / ledger.FILE)
    (stopped / ledger.FILE).unlink()
    forged = ledger.Ledger.create(stopped / ledger.FILE, {**held.header, "delta": 0.01})
    for entry in held.entries:
        forged.record(entry.step, entry.event, entry.environment)
    for words in ("ledger", "resume"):
        assert "not the ledger that the checkpoint was written with" in refused(words, stopped)


def test_a_missing_ledger_is_not_replaced_by_an_empty_one(stopped: Path, refused: Refuse) -> None:
    (stopped / ledger.FILE).unlink()
    for words in ("resume", "ledger"):
        assert str(stopped / ledger.FILE) in refused(words, stopped)


@pytest.mark.parametrize("change", [b"seed: 1", b"seed: 0 # ?\n  steps: 7"])
def test_a_recipe_changed_after_the_run_began_is_refused(change: bytes, stopped: Path, refused: Refuse) -> None:
    edit(stopped / "recipe.yaml", lambda c: c.replace(b"seed: 0", change))
    said = refused("resume", stopped)
    assert str(stopped / "recipe.yaml") in said
    assert "changed" in said


def test_a_changed_recipe_is_refused_without_a_checkpoint_too(stopped: Path, refused: Refuse) -> None:
    """Else the steps in the ledger would be released a second time, with the same noise on other sums."""
    (stopped / checkpoint.FILE).unlink()
    edit(stopped / "recipe.yaml", lambda c: c.replace(b"learning_rate: 0.1", b"learning_rate: 0.2"))
    said = refused("resume", stopped)
    assert str(stopped) in said


def test_a_run_whose_checkpoint_was_deleted_goes_through_the_same_releases_again(
    stopped: Path, tiny: str, tmp_path: Path
) -> None:
    (stopped / checkpoint.FILE).unlink()
    summary = folder.resume(stopped, quiet=True)
    folder.train(recipe.load(tiny), tmp_path / "straight", quiet=True)
    assert (stopped / folder.MODEL).read_bytes() == (tmp_path / "straight" / folder.MODEL).read_bytes()
    assert summary["releases"] == 6


@pytest.mark.parametrize("content", [b"task: [", b"hello", b"", b"\xff\xfe\x00", b"task: {kind: none}"])
def test_a_run_folder_whose_recipe_is_damaged_is_refused(
    content: bytes, stopped: Path, command: Command, contents: Contents
) -> None:
    (stopped / "recipe.yaml").write_bytes(content)
    before = contents(stopped)
    code, out, err = command("resume", stopped)
    assert (code, out) == (2, "")
    assert str(stopped / "recipe.yaml") in err
    assert "Traceback" not in err
    assert contents(stopped) == before


def test_a_report_is_drawn_of_a_run_that_was_killed_in_the_middle_of_a_line(stopped: Path, command: Command) -> None:
    with (stopped / folder.METRICS).open("ab") as file:
        file.write(b'{"step": 5, "lo')
    code, out, _ = command("report", stopped)
    assert (code, out.strip()) == (0, str(stopped / "report.html"))
    assert "not finished" in (stopped / "report.html").read_text()


def test_a_report_of_a_run_without_a_step_says_what_is_missing(stopped: Path, command: Command) -> None:
    (stopped / folder.METRICS).unlink()
    code, _, err = command("report", stopped)
    assert code in (0, 2)
    assert "Traceback" not in err


# A full disk


@pytest.mark.parametrize("call", [1, 3, 4, 9, 12, 25])
def test_a_disk_that_fills_up_stops_the_run_with_its_place_and_what_was_saved_goes_on(
    call: int, tiny: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync, calls = tmp_path / "run", os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, printed, err = command("train", tiny, "--out", out)
    assert (code, printed) == (2, "")
    assert "No space left on device" in err
    assert str(out) in err
    begun = (out / "recipe.yaml").exists()
    assert ("confide resume" if begun else "nothing was begun") in err
    assert "Traceback" not in err
    words = ["resume", out] if begun else ["train", tiny, "--out", out]
    assert command(*words)[0] == 0
    folder.train(recipe.load(tiny), tmp_path / "straight", quiet=True)
    assert (out / folder.MODEL).read_bytes() == (tmp_path / "straight" / folder.MODEL).read_bytes()
    assert folder.summary_of(out)["releases"] == 6


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A file system of its own that is soon full."""
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs to mount a file system")
@pytest.mark.parametrize(
    "size", ["12k", "16k", "24k"], ids=["while it starts", "before the first step", "while training"]
)
def test_a_really_full_disk_is_one_message_without_a_traceback(size: str, tiny: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size):
        out = tmp_path / "disk" / "run"
        printed, said = tmp_path / "printed", tmp_path / "said"
        ended = warm.start("train", tiny, "--out", out, "--json", folder=tmp_path, out=printed, err=said)
        ended.join(120)
        assert (ended.exitcode, printed.read_text()) == (2, "")
        *boards, line = said.read_text().splitlines()
        assert all("tensorboard stopped listening" in board for board in boards)  # so there is no traceback
        assert "No space left on device" in line
        assert str(out) in line
        subprocess.run(["mount", "-o", "remount,size=8m", tmp_path / "disk"], check=True)
        if size == "12k":  # a failed start leaves nothing that would block its folder
            folder.train(recipe.load(tiny), out, quiet=True)
        else:
            folder.resume(out, quiet=True)
        folder.train(recipe.load(tiny), tmp_path / "straight", quiet=True)
        assert (out / folder.MODEL).read_bytes() == (tmp_path / "straight" / folder.MODEL).read_bytes()


# Users and models that are not finite


LOGISTIC = ["run={steps: 3}", "evaluation.last=1", "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}"]
QUADRATIC = ["task={kind: convex/quadratics, users: 20, dimension: 6, rank: 3}", "sampling.cohort=20", "run.steps=3"]
QUADRATIC += ["privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}"]
PATHS: dict[str, tuple[str, list[str]]] = {
    "logistic, fast": ("convex/digits", LOGISTIC),
    "logistic, plain": ("convex/digits", [*LOGISTIC, "local.batch_size=2", "local.steps=3"]),
    "quadratics, fast": ("convex/quadratics", QUADRATIC),
    "quadratics, plain": ("convex/quadratics", [*QUADRATIC, "local.gradient_clip=1000"]),
}


def poison(task: Any, user: int, value: float) -> None:
    """Make the data of one user something that no training survives."""
    if hasattr(task, "roots"):
        task.roots[user], task.centres[user], task.gram[user] = value, value, math.nan
        task.evaluate = lambda parameters: {"suboptimality": float(parameters["w"].sum())}
    else:
        task.data.train_features[task.held[user]] = value


def trained(wanted: recipe.Recipe, task: Any) -> tuple[Tensor, list[dict[str, Any]], run.Loop]:
    records: list[dict[str, Any]] = []
    loop, state = simulate(wanted, task, lambda loop, state, record: records.append(record))
    return state.parameters, records, loop


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_a_user_who_is_not_finite_adds_nothing_and_is_counted(
    path: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, sets = PATHS[path]
    wanted = recipe.load(name, sets)
    task = make_task(wanted.task, 0)
    cohorts = [trained(wanted, task)[2].plan.cohort(step) for step in range(3)]
    user = int(cohorts[0][1])  # neither the first nor the last of its part
    poison(task, user, value)
    model, records, _ = trained(wanted, task)
    assert bool(torch.isfinite(model).all())
    assert [r["not_finite"] for r in records] == [int(user in cohort) for cohort in cohorts]
    assert [r["cohort"] for r in records] == [len(cohort) for cohort in cohorts]
    assert all(math.isfinite(v) for r in records for k, v in r.items() if k not in ("evaluation", "layers"))

    draw = sampling.draw_cohort
    with monkeypatch.context() as patch:
        patch.setattr(plan, "draw_cohort", lambda *address: (cohort := draw(*address))[cohort != user])
        without, others, _ = trained(wanted, task)
    torch.testing.assert_close(model, without, rtol=1e-5, atol=1e-6)
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in others], rel=1e-5)


def test_a_cohort_in_which_nobody_is_finite_moves_the_model_by_noise_alone() -> None:
    wanted = recipe.load("convex/digits", [*LOGISTIC, "run.steps=1"])
    task: Any = make_task(wanted.task, 0)
    task.data.train_features.fill_(math.nan)
    model, (record,), loop = trained(wanted, task)
    assert record["not_finite"] == record["cohort"] > 0
    assert (record["signal"], record["loss"], record["update_norm"]) == (0, 0, 0)
    noise = torch.zeros_like(model)
    assert loop.plan.mechanism.release(noise, Occasion(loop.plan.event, np.arange(0), 0, 0, {})) is not None
    torch.testing.assert_close(model, flatten(task.initial_parameters()) - wanted.central.learning_rate * noise)


def test_users_who_are_not_finite_are_counted_in_the_metrics_of_a_folder(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(settings: Any, seed: int) -> Any:
        task: Any = make_task(settings, seed)
        for user in range(0, 287, 2):
            poison(task, user, math.nan)
        return task

    monkeypatch.setattr("confide.build.make_task", poisoned)
    sets = [word for change in LOGISTIC for word in ("--set", change)]
    assert command("train", "convex/digits", "--out", tmp_path / "run", *sets)[0] == 0
    records = [json.loads(line) for line in (tmp_path / "run" / folder.METRICS).read_text().splitlines()]
    assert all(0 < r["not_finite"] < r["cohort"] for r in records)
    assert all(math.isfinite(r["loss"]) for r in records)


def test_a_central_model_that_is_no_longer_finite_stops_the_run_with_the_last_good_checkpoint(
    tiny: str, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "run"
    # Fine for three steps, and then beyond what a double can hold.
    rising = "central={kind: sgd, learning_rate: 1.0e+300, weight_decay: 1.0e+4, schedule: {kind: constant, warmup: 2}}"
    code, printed, err = command("train", tiny, "--out", out, "--set", rising, "--set", "run.checkpoint_every=1")
    assert (code, printed) == (2, "")
    assert "the central model is no longer finite after step" in err
    assert "central.learning_rate" in err
    assert "Traceback" not in err
    saved = checkpoint.load(out)
    assert bool(torch.isfinite(saved.state.parameters).all())
    assert not (out / folder.SUMMARY).exists()
    assert folder.check_ledger(out)["releases"] > saved.state.step
    before = (out / checkpoint.FILE).read_bytes(), (out / ledger.FILE).read_bytes()
    again = command("resume", out)
    assert again[0] == 2
    assert "no longer finite" in again[2]
    assert (out / ledger.FILE).read_bytes() == before[1]
    assert checkpoint.load(out).state.step == saved.state.step


@pytest.mark.parametrize("rate", ["3.4e+38", "1.0e+39"], ids=["largest float32", "beyond float32"])
def test_a_central_model_that_diverges_at_once_leaves_its_start_as_the_checkpoint(
    rate: str, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "run"
    central = f"central={{kind: sgd, learning_rate: {rate}}}"
    sets = [word for change in (*LOGISTIC, central) for word in ("--set", change)]
    code, _, err = command("train", "convex/digits", "--out", out, *sets)
    assert code == 2
    assert "no longer finite after step 1" in err
    assert checkpoint.load(out).state.step == 0


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("convex/digits", [*LOGISTIC, "central={kind: sgd, learning_rate: 1.0e+36}"]),
        ("convex/quadratics", [*QUADRATIC, "central={kind: sgd, learning_rate: 1.0e+200}"]),
    ],
    ids=["loss", "metric"],
)
def test_an_evaluation_that_overflows_does_not_lose_a_run_whose_model_is_finite(
    name: str, sets: list[str], tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "run"
    words = [word for change in (*sets, "evaluation={every: 1, last: 3}") for word in ("--set", change)]
    code, printed, err = command("train", name, "--out", out, *words, "--json")
    assert "Traceback" not in err
    assert code in (0, 2)
    if code == 0:
        assert None in json.loads(printed)["metrics"].values()
    else:
        assert "finite" in err


# Workers


def test_a_worker_that_was_killed_is_reported_and_not_taken_for_a_closed_terminal(tiny: str) -> None:
    """The command line takes a broken pipe for a reader that has gone, and ends without a word."""
    loop = make_loop(recipe.load(tiny), workers=2)
    engine: Any = loop.engine
    try:
        state = loop.start()
        loop.step(state)
        for process in engine.processes:
            process.kill()
            process.join()
        with pytest.raises(WorkerFailed, match="worker"):
            loop.step(state)
    finally:
        engine.close()
