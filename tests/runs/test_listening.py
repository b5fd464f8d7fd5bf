"""Listeners hear what is on record, never hold a run up or end it, and nothing leaves this machine unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from confide import errors, recipe
from confide.errors import UserError
from confide.runs import boards, folder, listening
from confide.runs.listening import Listeners, Told, Values

Command = Callable[..., tuple[int, str, str]]


class Recording:
    """Remembers everything."""

    sends = False
    told: ClassVar[list[Told]] = []
    heard: ClassVar[list[tuple[int, Values]]] = []
    closed: ClassVar[list[bool]] = []

    def __init__(self, told: Told) -> None:
        self.told.append(told)

    def hear(self, step: int, values: Values) -> None:
        self.heard.append((step, values))

    def close(self) -> None:
        self.closed.append(True)


class Unwilling(Recording):
    def __init__(self, told: Told) -> None:
        raise RuntimeError("no server at that address")


class Failing(Recording):
    def hear(self, step: int, values: Values) -> None:
        super().hear(step, values)
        if step == 3:
            raise ConnectionError("the line is cut")


class Silent(Recording):
    def hear(self, step: int, values: Values) -> None:
        time.sleep(60)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners of this file by name, as if they were shipped."""
    own = {kind.__name__.lower(): kind for kind in (Recording, Unwilling, Failing, Silent)}
    monkeypatch.setattr(boards, "KINDS", {**boards.KINDS, **own})
    for name in own:
        monkeypatch.setitem(errors.MODULES, name, ())
    for listed in (Recording.told, Recording.heard, Recording.closed):
        listed.clear()


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained(tiny: str, out: Path, *names: str) -> list[dict[str, Any]]:
    folder.train(recipe.load(tiny), out, quiet=True, listeners=Listeners(names))
    return records(out)


def test_a_listener_hears_every_number_of_the_record_and_of_the_start(tiny: str, tmp_path: Path) -> None:
    made = trained(tiny, tmp_path / "run", "recording")
    start = json.loads((tmp_path / "run" / "start.json").read_text())["metrics"]
    assert Recording.heard[0] == (0, {f"evaluation/{name}": value for name, value in start.items()})
    assert [step for step, _ in Recording.heard[1:]] == [record["step"] for record in made]
    for (_, values), record in zip(Recording.heard[1:], made, strict=True):
        flat = {f"evaluation/{name}": value for name, value in record.pop("evaluation", {}).items()}
        record.pop("step")
        assert values == {name: value for name, value in {**record, **flat}.items() if value is not None}
    assert Recording.closed == [True]


def test_it_is_told_the_settings_without_paths_code_and_sentences(tiny: str, tmp_path: Path) -> None:
    trained(tiny, tmp_path / "run", "recording")
    (told,) = Recording.told
    assert (told.folder, told.step, told.send) == (tmp_path / "run", 0, False)
    assert told.settings["sampling.cohort"] == 6
    assert "description" not in told.settings
    found = listening.settings_of(recipe.load("speech/words/private", ["task.start=/home/me/seed"]))
    assert not [name for name, value in found.items() if "/home/me" in str(value)]
    assert "task.start" not in found


def test_a_resumed_run_says_where_it_goes_on(
    tiny: str, tmp_path: Path, command: Command, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    with signal_after(4):
        assert command("train", tiny, "--out", tmp_path / "run", "--listener", "recording")[0] == 130
    assert command("resume", tmp_path / "run", "--listener", "recording")[0] == 0
    assert [told.step for told in Recording.told] == [0, 4]
    assert [step for step, _ in Recording.heard] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("name", "said"), [("unwilling", "no server at that address"), ("failing", "the line is cut")])
def test_one_that_fails_is_named_once_and_the_run_and_its_record_are_whole(
    name: str, said: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trained(tiny, tmp_path / "run", name, "recording")
    assert [record["step"] for record in made] == [1, 2, 3, 4, 5, 6]
    assert folder.summary_of(tmp_path / "run")["steps"] == 6
    err = capsys.readouterr().err
    assert err.count(f"{name} stopped listening ({said})") == 1
    assert len([step for step, _ in Recording.heard if step == 6]) == 1  # the other one heard it all


def test_one_that_does_not_answer_holds_the_run_up_only_at_its_end_and_not_for_long(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_PATIENCE", 0.1)
    monkeypatch.setattr(listening, "_WAITING", 2)
    assert len(trained(tiny, tmp_path / "run", "silent")) == 6
    assert "silent has not answered" in capsys.readouterr().err


def test_the_first_line_says_that_no_guarantee_covers_the_figures_and_where_they_go(
    tiny: str, tmp_path: Path, command: Command
) -> None:
    _, _, err = command("train", tiny, "--out", tmp_path / "here", "--listener", "recording")
    assert err.startswith("recording: figures of this run stay on this machine")
    assert "no guarantee covers them" in err
    _, _, err = command("train", tiny, "--out", tmp_path / "away", "--listener", "recording", "--send")
    assert err.startswith("recording: losses, norms and evaluations of this run leave this machine")
    assert "no guarantee covers them" in err


def test_of_a_run_for_release_nothing_leaves(tiny: str, tmp_path: Path, command: Command) -> None:
    words = ("train", tiny, "--out", tmp_path / "run", "--set", "privacy.source=system", "--listener", "recording")
    code, _, err = command(*words, "--send")
    assert code == 2
    assert "--send with privacy.source=system" in err
    assert not (tmp_path / "run").exists()
    assert command(*words)[0] == 0


BOARD = """
class Board:
    def __init__(self, told):
        self.file = (told.folder / "board.txt").open("w")

    def hear(self, step, values):
        print(step, sorted(values)[0], file=self.file)

    def close(self):
        self.file.close()


class Quiet(Board):
    sends = False
"""


def test_a_class_of_ones_own_listens_if_code_is_allowed_and_sending_too_or_it_sends_nothing(
    tiny: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_board.py").write_text(BOARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("train", tiny, "--out", tmp_path / "run", "--listener")
    code, _, err = command(*words, "own_board:Quiet")
    assert code == 2
    assert "--allow-code" in err
    code, _, err = command(*words, "own_board:Board", "--allow-code")
    assert code == 2
    assert "add --send" in err
    assert not (tmp_path / "run").exists()
    assert command(*words, "own_board:Quiet", "--allow-code")[0] == 0
    lines = (tmp_path / "run" / "board.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    ("words", "said"), [(["--listener", "wanb"], "did you mean 'wandb'"), (["--send"], "--send without --listener")]
)
def test_mistakes_are_refused_before_anything_begins(
    words: list[str], said: str, tiny: str, tmp_path: Path, command: Command
) -> None:
    code, _, err = command("train", tiny, "--out", tmp_path / "run", *words)
    assert code == 2
    assert said in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_that_is_missing_is_named_with_its_extra(
    name: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(errors.MODULES, name, ("no_such_module",))
    with pytest.raises(UserError, match=rf"pip install 'confide\[{name}\]'"):
        folder.train(recipe.load(tiny), tmp_path / "run", quiet=True, listeners=Listeners((name,)))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_without_them_imports_neither_library(tiny: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from confide import recipe; from confide.runs import folder;"
        f"folder.train(recipe.load({tiny!r}), Path({str(tmp_path / 'run')!r}), quiet=True);"
        "print([name for name in ('wandb', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ("", "run/mlruns"), ("http://boards.example", "run/mlruns"), ("databricks", "databricks"), ("uc", "uc"),
        ("databricks://profile", "run/mlruns"), ("own/place", "own/place"),
    ],
)  # fmt: skip
def test_mlflow_takes_no_word_for_a_server_unless_figures_may_leave(
    wanted: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", wanted)
    assert boards.MLflow._place(Told(tmp_path / "run", 0, {}, send=False)) == (tmp_path / kept).as_uri()
    if wanted:
        assert boards.MLflow._place(Told(tmp_path / "run", 0, {}, send=True)) == wanted


# The real libraries, on this machine alone


def test_mlflow_holds_the_record_in_the_folder_of_the_run(tiny: str, tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed: pip install 'confide[mlflow]'")
    made = trained(tiny, tmp_path / "run", "mlflow")
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    kept = client.get_run((tmp_path / "run" / "mlflow.id").read_text())
    assert kept.info.status == "FINISHED"
    assert kept.data.params["sampling.cohort"] == "6"
    assert set(kept.data.tags) == {"mlflow.runName"}
    losses = client.get_metric_history(kept.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(record["step"], record["loss"]) for record in made]


def test_wandb_keeps_the_record_offline_and_nothing_of_this_machine(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed: pip install 'confide[wandb]'")
    trained(tiny, tmp_path / "run", "wandb")
    assert "stopped listening" not in capsys.readouterr().err
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert (tmp_path / "run" / "wandb.id").read_text() in kept.name
    content = kept.read_bytes()
    assert b"update_norm" in content
    assert b"evaluation/" in content
    for private in (str(tmp_path), os.uname().nodename + ".", str(Path.home()), "pytest"):
        assert private.encode() not in content
