"""A start that fails or is stopped leaves nothing behind, and a run that has finished says so."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide.errors import UserError
from confide.recipe import load
from confide.run import Loop
from confide.runs import folder

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures")


def test_a_start_that_fails_late_does_not_block_its_folder(
    tiny: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe and the ledger's first line are on disk by then, and another recipe would find another run."""
    out = tmp_path / "run"

    def broken(loop: Loop) -> Any:
        assert (out / folder.RECIPE).exists()
        raise UserError("the starting model cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "start", broken)
        code, _, err = command("train", tiny, "--out", out)
    assert (code, err.strip()) == (2, "the starting model cannot be read")
    assert not out.exists()
    assert command("train", tiny, "--out", out, "--set", "run.seed=1")[0] == 0


def test_a_failed_start_leaves_a_folder_that_was_there(
    tiny: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "start", lambda loop: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command("train", tiny, "--out", out)
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert command("train", tiny, "--out", out)[0] == 0


def test_ctrl_c_while_starting_says_that_nothing_was_begun(
    tiny: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, start = tmp_path / "run", Loop.start

    def interrupted(loop: Loop) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # until it arrives: the signal may reach another thread first
        return start(loop)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "start", interrupted)
        code, _, err = command("train", tiny, "--out", out)
    assert code == 130
    assert "stopped before the first step; nothing was begun" in err
    assert "resume" not in err
    assert not out.exists()


@pytest.mark.parametrize("place", ["/proc/nowhere/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_is_one_sentence(place: str, tiny: str, command: Command) -> None:
    code, printed, err = command("train", tiny, "--out", place)
    assert (code, printed, len(err.splitlines())) == (2, "", 1)
    assert f"--out {place} cannot be written" in err
    assert "choose another folder" in err


def test_training_a_finished_run_again_says_that_it_has_finished(tiny: str, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    code, first, err = command("train", tiny, "--out", out, "--json")
    assert (code, "finished" in err) == (0, False)
    for words in (["train", tiny, "--out", out], ["resume", out]):
        code, again, err = command(*words, "--json")
        assert (code, again) == (0, first)
        assert "finished; nothing was trained" in err


def test_an_edited_recipe_of_a_finished_run_is_noticed(tiny: str, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    assert command("train", tiny, "--out", out)[0] == 0
    path = out / folder.RECIPE
    path.write_text(path.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    for words in (["train", tiny, "--out", out], ["resume", out]):
        code, _, err = command(*words)
        assert code == 2
        assert f"{path} was changed after the run finished" in err


SPEAKERS = """\
task: {kind: speech, corpus: {kind: folder, folder: people}, test: {kind: folder, folder: others}}
sampling: {kind: fixed, cohort: 2}
local: {steps: 1, learning_rate: 0.1}
bounding: {rule: none}
central: {kind: sgd, learning_rate: 1}
run: {steps: 1}
"""


@pytest.fixture
def speakers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe for three people, in the current folder; making features of what they say fails the test."""
    from confide.speech import task

    for place in ("people/a", "people/b", "people/c", "others/d"):
        (tmp_path / place).mkdir(parents=True)
        soundfile.write(tmp_path / place / "one.wav", np.zeros(4_800, dtype=np.float32), 16_000)
        (tmp_path / place / "one.txt").write_text("one")
    (tmp_path / "speakers.yaml").write_text(SPEAKERS)
    monkeypatch.chdir(tmp_path)

    def features(*_: object, **__: object) -> None:
        raise AssertionError("features were made")

    monkeypatch.setattr(task, "open_store", features)
    return "speakers.yaml"


def test_that_fixture_sees_features_being_made(speakers: str, command: Command) -> None:
    with pytest.raises(AssertionError, match="features were made"):
        command("train", speakers, "--out", "run")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("task.start=nowhere", "task.start=nowhere: no model could be read"),
        ("task.start=other/model.safetensors", "the starting model has to be of the kind and size"),
        ("sampling.cohort=4", "sampling.cohort=4 is larger than the population of 3 users"),
    ],
)
def test_what_does_not_fit_is_refused_before_features_are_made(
    change: str, said: str, speakers: str, tiny: str, command: Command
) -> None:
    folder.train(load(tiny), Path("other"), quiet=True)
    code, _, err = command("train", speakers, "--out", "run", "--set", change)
    assert code == 2
    assert said in err
    assert not Path("run").exists()


def test_test_speakers_who_trained_the_start_are_shown(speakers: str, command: Command) -> None:
    seed = Path("seed")
    seed.mkdir()
    (seed / folder.RECIPE).write_text(SPEAKERS.replace("folder: people", "folder: others"))
    _, _, err = command("train", speakers, "--out", "run", "--set", "task.start=seed")
    assert err.count("1 of the 1 test speakers trained task.start=seed (d)") == 1
    (seed / folder.RECIPE).write_text(SPEAKERS)
    assert "trained task.start" not in command("train", speakers, "--out", "run", "--set", "task.start=seed")[2]
    (seed / folder.RECIPE).write_text(SPEAKERS.replace("folder: people", "folder: gone"))
    assert "no model could be read" in command("train", speakers, "--out", "run", "--set", "task.start=seed")[2]


def test_a_finished_run_is_evaluated_and_diagnosed_where_its_start_is_gone(
    tiny: str, tmp_path: Path, tiny_model: Callable[[str], Path], command: Command
) -> None:
    """Only a run that begins needs it."""
    changes = [f"task.encoder.source={tiny_model('masked')}", f"task.cache={tmp_path / 'cache'}", "run.steps=2"]
    first = load("retrieval/embedded", changes)
    folder.train(first, tmp_path / "seed", quiet=True)
    words = ["train", "retrieval/embedded", "--out", tmp_path / "run"]
    for change in [*changes, f"task.start={tmp_path / 'seed'}"]:
        words += ["--set", change]
    assert command(*words)[0] == 0
    shutil.rmtree(tmp_path / "seed")
    for asked in (["evaluate", tmp_path / "run"], ["report", tmp_path / "run"], ["resume", tmp_path / "run"]):
        code, _, err = command(*asked)
        assert code == 0, err
