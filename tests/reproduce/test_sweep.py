"""Sweeps train every setting with every seed, go on after a stop, choose on people held out, and say what it costs."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from confide import recipe
from confide.reproduce import grid, sweep
from confide.runs import folder
from support import warm

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")
DIGITS = ("--set", "run.steps=6", "--set", "evaluation.every=6", "--set", "evaluation.last=1")
RATES = ("--set", "central.learning_rate=0.0001,0.016")


class Here:
    """The pool without processes: a cell is measured when it is handed in."""

    def __init__(self, workers: int, **_: Any) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def submit(self, measure: Callable[[Any], Any], cell: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(measure(cell))
        except BaseException as problem:
            done.set_exception(problem)
        return done


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ProcessPoolExecutor", Here)


def swept(command: Command, out: Path, *words: object) -> dict[str, Any]:
    code, said, err = command("sweep", "convex/digits", "--out", out, *DIGITS, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(said)
    return found


def times(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}


@pytest.mark.usefixtures("here")
def test_every_setting_is_trained_with_every_seed_once_and_a_sweep_can_grow(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = swept(command, tmp_path, *RATES, "--seeds", "2", "--workers", "2")
    assert [one["group"] for one in found["settings"]] == ["learning_rate=0.0001", "learning_rate=0.016"]
    assert [one["seeds"] for one in found["settings"]] == [[0, 1], [0, 1]]
    assert found["best"] == "learning_rate=0.016"
    best = found["settings"][1]
    own = [folder.summary_of(tmp_path / f"learning_rate=0.016-seed{seed}") for seed in (0, 1)]
    assert best["values"] == [one["metrics"]["accuracy"] for one in own]
    assert best["mean"] == pytest.approx(sum(best["values"]) / 2)
    assert [one["seed"] for one in own] == [0, 1]
    assert "--set central.learning_rate=0.016" in found["command"]
    assert "--set run.steps=6" in found["command"]
    with (tmp_path / "rows.csv").open() as file:
        assert [float(row["mean"]) for row in csv.DictReader(file)] == [one["mean"] for one in found["settings"]]
    assert "id=verdicts" in (tmp_path / "comparison.html").read_text()

    before = times(tmp_path)
    assert len(before) == 4
    grown = swept(command, tmp_path, "--set", "central.learning_rate=0.0001,0.016,0.02", "--seeds", "2")
    assert grown["settings"][:2] == found["settings"]
    assert {name: time for name, time in times(tmp_path).items() if name in before} == before
    monkeypatch.setattr(grid, "ProcessPoolExecutor", None)  # nothing is left to run
    assert swept(command, tmp_path, "--set", "central.learning_rate=0.0001,0.016,0.02", "--seeds", "2") == grown


@pytest.mark.usefixtures("here")
def test_ctrl_c_stops_a_sweep_within_a_run_and_the_same_command_goes_on_there(
    tmp_path: Path, command: Command, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    words = ("sweep", "convex/digits", "--out", tmp_path, *DIGITS, "--seeds", "2")
    with signal_after(4):
        code, _, err = command(*words)
    assert code == 130
    assert "The same command goes on from there" in err
    assert steps(tmp_path / "seed0") == [1, 2, 3, 4]
    assert not (tmp_path / "seed1").exists()
    code, out, err = command(*words)
    assert code == 0, err
    assert steps(tmp_path / "seed0") == steps(tmp_path / "seed1") == [1, 2, 3, 4, 5, 6]
    assert "best: " in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_a_sweep_leaves_no_process_behind_and_goes_on(
    number: int, tmp_path: Path, command: Command
) -> None:
    words = ("sweep", "convex/digits", "--out", tmp_path / "out", "--set", "privacy={mechanism: none}", "--set",
             "run.steps=800", "--set", "evaluation.every=800", "--seeds", "2")  # fmt: skip
    process = warm.start(*words, folder=tmp_path, out=tmp_path / "log")
    first, second = (tmp_path / "out" / f"seed{seed}" for seed in (0, 1))
    until(lambda: (first / "metrics.jsonl").exists() and bool(steps(first)))
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert 0 < len(steps(first)) < 800
    assert not second.exists()
    code, _, err = command(*words)
    assert code == 0, err
    assert [folder.summary_of(each)["steps"] for each in (first, second)] == [800, 800]


def steps(run: Path) -> list[int]:
    """The steps on record; a line that is being written is none."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]


def until(holds: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("here")
def test_a_private_sweep_says_that_no_guarantee_covers_the_choice(tmp_path: Path, command: Command) -> None:
    found = swept(command, tmp_path / "private", "--seeds", "1")
    assert any("no guarantee covers the choice" in one and "no budget is charged" in one for one in found["warnings"])
    assert any("people (or examples) that the recipe evaluates on" in one for one in found["warnings"])
    none = swept(command, tmp_path / "none", "--seeds", "1", "--set", "privacy={mechanism: none}")
    assert not any("guarantee" in one for one in none["warnings"])


@pytest.mark.usefixtures("here")
def test_every_run_of_a_sweep_charges_the_budget_of_its_people(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "people.budget"
    assert command("budget", "--init", path, "--epsilon", 20, "--delta", "1e-5", "--population", "writers")[0] == 0
    found = swept(command, tmp_path / "out", "--set", f"privacy.budget={path}", *RATES, "--seeds", "1")
    assert any(str(path) in one for one in found["warnings"])
    assert json.loads(command("budget", path, "--json")[1])["releases"] == 12


@pytest.mark.usefixtures("here")
def test_a_run_whose_budget_ended_it_early_is_named(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "people.budget"
    words = ("--set", f"privacy.budget={path}", "--set", "final.count=1", *RATES, "--seeds", "1")
    assert command("budget", "--init", path, "--epsilon", 8, "--delta", "1e-5", "--population", "writers")[0] == 0
    found = swept(command, tmp_path / "out", *words)
    made = folder.summary_of(tmp_path / "out" / "learning_rate=0.016-seed0")["steps"]
    assert 0 < made < 6
    assert any(f"learning_rate=0.016-seed0 made {made} of 6 steps" in note for note in found["notes"])
    assert not any("learning_rate=0.0001-seed0 made" in note for note in found["notes"])


@pytest.mark.usefixtures("here")
def test_a_setting_without_a_finite_mean_is_not_among_those_as_good_as_the_best(
    tmp_path: Path, command: Command
) -> None:
    words = ("--set", "run.steps=100", "--set", "central.learning_rate=0.01,1e200", "--seeds", "2")
    code, said, err = command("sweep", "convex/quadratics", "--out", tmp_path, *words, "--json")
    assert code == 0, err
    found = json.loads(said)
    assert found["best"] == "learning_rate=0.01"
    assert found["settings"][1]["mean"] is None
    assert found["not_shown_to_be_worse"] == []


def test_a_setting_that_is_wrong_is_refused_before_anything_is_trained(tmp_path: Path, command: Command) -> None:
    for words, said in (
        (("--set", "central.learning_rate=0.1,-1"), "central.learning_rate=-1"),
        (("--set", "central.learning_rat=0.1,1"), "did you mean 'learning_rate'"),
        (("--set", "run.seed=1,2"), "use --seeds"),
    ):
        code, _, err = command("sweep", "convex/digits", "--out", tmp_path / "out", *words)
        assert code == 2
        assert said in err
        assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("here")
def test_a_folder_with_a_run_of_another_recipe_is_refused_with_what_to_do(tmp_path: Path, command: Command) -> None:
    swept(command, tmp_path, "--seeds", "1")
    words = ("sweep", "convex/digits", "--out", tmp_path, "--seeds", "1", "--set", "run.steps=5")
    code, _, err = command(*words)
    assert code == 2
    assert "another recipe" in err
    assert "another --out" in err


def test_values_that_are_lists_or_sections_are_tried_whole() -> None:
    fixed, tried = sweep._read(["bounding={rule: clip, bound: 1},{rule: normalise, bound: 2}", "users.weights=[1,2]"])
    assert fixed == ["users.weights=[1,2]"]
    assert [json.loads(one)["rule"] for one in tried["bounding"]] == ["clip", "normalise"]
    name = sweep._folder_name(tried, tried["bounding"][:1] if len(tried) == 1 else [])
    assert "/" not in name
    assert name != sweep._folder_name(tried, tried["bounding"][1:])


# People held out


def changed(name: str, percent: int, *sets: str) -> recipe.Recipe | None:
    base = recipe.load(name, sets)
    changes = base.task.held_out(percent)
    if changes is None:
        return None
    return recipe.load(name, [*sets, *(f"task.{key}={json.dumps(value)}" for key, value in changes.items())])


def test_speakers_are_held_out_of_the_training_people_and_the_test_people_take_no_part() -> None:
    found: Any = changed("speech/words/private", 20)
    assert found.task.corpus.share == 80
    assert found.task.test.share == 20
    assert found.task.test.model_dump(exclude={"share"}) == found.task.corpus.model_dump(exclude={"share"})
    simulated: Any = changed("speech/population/private", 20)
    assert (simulated.task.corpus.part, simulated.task.test.part) == ("train", "validation")
    assert changed("speech/words/private", 20, "task.corpus.share=90") is None  # a share has no shares


def test_queries_are_held_out_and_a_task_that_cannot_says_so() -> None:
    found: Any = changed("retrieval/embedded", 25)
    assert found.task.data.held_out == 0.25
    assert changed("convex/digits", 20) is None


@pytest.fixture
def few(tiny_model: Callable[..., Path]) -> list[str]:
    """A few queries of two households, and an encoder that nobody has to fetch."""
    data = "{kind: embedded, documents: 4, queries_per_document: 10, households: 2}"
    sets = (f"task.data={data}", f"task.encoder.source={tiny_model('masked')}", "sampling.cohort=2")
    return [word for one in sets for word in ("--set", one)]


@pytest.mark.usefixtures("here")
def test_a_sweep_evaluates_who_is_held_out_and_trains_on_everybody_in_the_end(
    tmp_path: Path, command: Command, few: list[str]
) -> None:
    words = [*few, "--set", "run.steps=1"]
    code, out, err = command(
        "sweep", "retrieval/embedded", "--out", tmp_path, *words, "--seeds", "1", "--held-out", "25", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    held: Any = folder.held_recipe(tmp_path / "seed0")
    assert held.task.data.held_out == 0.25
    assert "held_out" not in document["command"]
    assert not any("evaluates on" in one for one in document["warnings"])


@pytest.mark.usefixtures("here")
def test_a_cohort_of_everybody_is_refused_with_what_the_sweep_has_to_do_with_it(
    tmp_path: Path, command: Command, few: list[str]
) -> None:
    words = [*few, "--set", "task.clients={kind: even, clients: 32}"]
    code, _, err = command("sweep", "retrieval/embedded", "--out", tmp_path, *words, "--seeds", "1")
    assert code == 2
    assert "clients=32" in err
    assert "--held-out 0" in err
