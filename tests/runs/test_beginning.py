"""Every run measures the model that it begins with, and says whether it ended better or worse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide import recipe
from confide.build import make_task
from confide.errors import Stopped, UserError
from confide.federated.items import Items
from confide.report.page import write_report
from confide.runs import beginning, folder
from confide.runs.beginning import Beginning

Command = Callable[..., tuple[int, str, str]]
Contents = Callable[[Path], dict[str, str]]
pytestmark = pytest.mark.usefixtures("no_figures")
SHORT = ("run.steps=5", "evaluation.every=5", "sampling.cohort=64", "privacy.target_epsilon=40")
WORSE = ("central.kind=sgd", "central.learning_rate=1e4")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    folder.train(recipe.load("convex/digits", SHORT), run, quiet=True)
    return run


def items(right: list[int]) -> Items:
    many = len(right)
    return Items(
        "accuracy", "higher", 1.0, "class", False, ("all",), np.zeros(many, dtype=np.int64),
        np.array(right, dtype=np.float64), np.ones(many), "one test set",
    )  # fmt: skip


def test_the_start_is_the_evaluation_of_the_fresh_model(digits: Path) -> None:
    wanted = folder.held_recipe(digits)
    task = make_task(wanted.task, wanted.run.seed)
    began = beginning.read(digits)
    assert began is not None
    assert began.metrics == task.evaluate(task.starting_parameters())
    summary = folder.summary_of(digits)
    assert summary["start"]["metrics"] == began.metrics
    assert summary["start"]["gain"] == summary["metrics"]["accuracy"] - began.metrics["accuracy"] > 0.3
    low, high = summary["start"]["interval"]
    assert low < summary["start"]["gain"] < high
    assert summary["start"]["p"] < 0.01
    points = 100 * summary["start"]["gain"]
    assert summary["start"]["said"] == f"better than its start by {points:.1f} points"


def test_train_prints_the_gain_and_warns_on_stderr_where_the_end_is_worse(
    tmp_path: Path, tiny: str, command: Command
) -> None:
    code, out, err = command("train", tiny, "--out", tmp_path / "good")
    assert code == 0
    assert "better than its start by" in out
    assert "warning" not in err
    code, out, err = command("train", tiny, "--out", tmp_path / "bad", *(w for s in WORSE for w in ("--set", s)))
    assert code == 0
    assert "warning: this run ended worse than its start by" in err
    assert f"confide diagnose {tmp_path / 'bad'}" in err
    assert command("train", tiny, "--out", tmp_path / "bad2", "--json", "--set", WORSE[0], "--set", WORSE[1])[2] != ""


def test_page_watch_and_compare_say_it(digits: Path, tmp_path: Path, command: Command) -> None:
    said = folder.summary_of(digits)["start"]["said"]
    page = write_report(digits, folder.held_recipe(digits), folder.summary_of(digits)).read_text()
    assert said.capitalize() in page
    assert said in command("watch", digits)[1]
    other = tmp_path / "other"
    folder.train(recipe.load("convex/digits", [*SHORT, "run.seed=1"]), other, quiet=True)
    code, out, _ = command("compare", digits, other, "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["start"]["said"] == said
    assert f"digits: {said}\n" in command("compare", digits, other, "--out", tmp_path / "page.html")[1]
    page = (tmp_path / "page.html").read_text()
    assert "<th scope=col>against its start</th>" in page
    assert f"<td>{said.replace(' than its start', '')}</td>" in page


def test_a_resumed_run_keeps_its_start_and_says_what_a_whole_one_says(
    tmp_path: Path, tiny: str, signal_after: Callable[[int], AbstractContextManager[None]]
) -> None:
    wanted = recipe.load(tiny)
    whole = folder.train(wanted, tmp_path / "whole", quiet=True)
    with signal_after(3), pytest.raises(Stopped):
        folder.train(wanted, tmp_path / "halved", quiet=True)
    kept = (tmp_path / "halved" / beginning.FILE).read_bytes()
    assert folder.resume(tmp_path / "halved", quiet=True)["start"] == whole["start"]
    assert (tmp_path / "halved" / beginning.FILE).read_bytes() == kept == (tmp_path / "whole/start.json").read_bytes()


def test_a_folder_from_before_it_was_measured_says_nothing_of_it(
    tmp_path: Path, tiny: str, command: Command, signal_after: Callable[[int], AbstractContextManager[None]]
) -> None:
    with signal_after(3), pytest.raises(Stopped):
        folder.train(recipe.load(tiny), tmp_path / "old", quiet=True)
    (tmp_path / "old" / beginning.FILE).unlink()
    summary = folder.resume(tmp_path / "old", quiet=True)
    assert summary["start"] is None
    document: dict[str, Any] = json.loads((tmp_path / "old" / folder.SUMMARY).read_text())
    del document["start"]
    (tmp_path / "old" / folder.SUMMARY).write_text(json.dumps(document))
    folder.train(recipe.load(tiny), tmp_path / "new", quiet=True)
    assert command("watch", tmp_path / "old")[0] == 0
    assert command("report", tmp_path / "old")[0] == 0
    code, out, _ = command("compare", tmp_path / "old", tmp_path / "new")
    assert code == 0
    assert "old: where it began was not recorded" in out


def test_the_start_can_be_left_out_and_does_not_change_the_digest(tmp_path: Path, tiny: str) -> None:
    assert recipe.load(tiny, ["evaluation.start=true"]).digest == recipe.load(tiny).digest
    summary = folder.train(recipe.load(tiny, ["evaluation.start=false"]), tmp_path / "run", quiet=True)
    assert summary["start"] is None
    assert not (tmp_path / "run" / beginning.FILE).exists()


def test_a_small_gain_is_said_to_be_perhaps_chance() -> None:
    began = Beginning("accuracy", "higher", {"accuracy": 0.5}, items([1, 0] * 20))
    said = began.verdict({"accuracy": 0.525}, items([1, 0] * 19 + [1, 1]))["said"]
    assert said == "better than its start by 2.5 points, which may be chance: 40 test items cannot tell (p 1)"
    clear = began.verdict({"accuracy": 1.0}, items([1] * 40))
    assert clear["said"] == "better than its start by 50.0 points"
    assert clear["interval"][0] > 0


@pytest.mark.parametrize(("end", "said"), [(10.0, "better than its start by 40.0 points"), (60.0, "worse"), (50, "no")])
def test_an_error_rate_is_better_where_it_is_lower(end: float, said: str) -> None:
    rates = dataclasses.replace(items([1, 0] * 20), metric="wer", better="lower", scale=100.0)
    began = Beginning("wer", "lower", {"wer": 50.0}, rates)
    assert began.said(end).startswith(said)
    assert (began.gain(end) or 0.0) == 50.0 - end


def test_nothing_is_said_where_nobody_knows_which_way_is_good() -> None:
    assert Beginning("distance", None, {"distance": 3.0}, None).said(1.0) == ""
    assert Beginning("wer", "lower", {"wer": None}, None).said(1.0) == ""


def test_a_damaged_start_is_named(tmp_path: Path) -> None:
    (tmp_path / beginning.FILE).write_text("{}")
    with pytest.raises(UserError, match=r"start\.json is damaged"):
        beginning.read(tmp_path)
