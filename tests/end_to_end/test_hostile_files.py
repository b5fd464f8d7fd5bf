"""Documents and folders that somebody else made: none runs code, hangs a command, or makes it write elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from confide import recipe
from confide.errors import UserError
from confide.runs import checkpoint, folder
from confide.settings import read_yaml

Command = Callable[..., tuple[int, str, str]]

SPY = """
from pathlib import Path
import torch
Path("it_ran").write_text("yes")


def soft(norms, bounds):
    return torch.ones_like(norms)
"""
RULE = "bounding={rule: python, function: 'spy_rules:soft', bound: 1}"


@pytest.fixture
def run(tiny: str, tmp_path: Path) -> Path:
    """The folder of a run that was stopped before its end."""
    whole = tmp_path / "run"
    folder.train(recipe.load(tiny), whole, quiet=True)
    for name in (folder.SUMMARY, "report.html"):
        (whole / name).unlink(missing_ok=True)
    return whole


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a trace as soon as it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "spy_rules", raising=False)
    (tmp_path / "spy_rules.py").write_text(SPY)
    return tmp_path / "it_ran"


def test_code_that_a_recipe_names_does_not_run_unasked(spy: Path, tiny: str, command: Command) -> None:
    code, _, err = command("train", tiny, "--out", "mine", "--set", RULE)
    assert code == 2
    assert "bounding.function=spy_rules:soft" in err
    assert "--allow-code" in err
    assert not spy.exists()
    code, _, err = command("train", tiny, "--out", "mine", "--set", RULE, "--allow-code")
    assert code == 0, err
    assert spy.exists()
    assert (
        f"running code that the recipe names: bounding.function=spy_rules:soft ({Path.cwd() / 'spy_rules.py'})" in err
    )


@pytest.mark.parametrize("asked", ["evaluate", "report", "resume", "compare"])
def test_code_that_the_folder_of_a_run_names_does_not_run_unasked(
    asked: str, spy: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the command needs the code or not, opening somebody's folder does not run it."""
    Path("tasks.py").write_text(
        "from pathlib import Path\nPath('it_ran').write_text('yes')\n"
        "from confide.workloads.tasks import *\ndef make(options, seed): raise SystemExit(3)\n"
    )
    Path("theirs").mkdir()
    Path("theirs/recipe.yaml").write_text(
        "description: theirs\ntask: {kind: python, factory: 'tasks:make'}\nsampling: {kind: poisson, cohort: 6}\n"
        "local: {steps: 2, learning_rate: 0.1}\nbounding: {rule: clip, bound: 1}\n"
        "privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}\n"
        "central: {kind: sgd, learning_rate: 0.1}\nrun: {steps: 6}\n"
    )
    monkeypatch.delitem(__import__("sys").modules, "tasks", raising=False)
    code, _, err = command(asked, "theirs", *(["theirs"] if asked == "compare" else []))
    assert code == 2, err
    assert not spy.exists()


def test_consent_reaches_worker_processes(spy: Path, tiny: str, command: Command) -> None:
    code, _, err = command("train", tiny, "--out", "mine", "--set", RULE, "--allow-code", "--workers", 2)
    assert code == 0, err
    assert err.count("running code") == 1


def test_a_bomb_of_aliases_is_refused_at_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    path = tmp_path / "bomb.yaml"
    path.write_text(bomb)
    with pytest.raises(UserError, match="more than 20 aliases"):
        recipe.load(str(path))
    assert read_yaml("a: &a 1\nb: [*a, *a]") == {"a": 1, "b": [1, 1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("description: " + "[" * 20000, "nested too deeply"),
        ('description: "\\ud800"', "half of a surrogate pair"),
        ("description: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    ],
)
def test_documents_that_are_none_are_refused(text: str, said: str, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    code, _, err = command("recipe", "show", path)
    assert code == 2
    assert said in err


@pytest.mark.parametrize("asked", ["resume", "ledger", "report", "evaluate", "guarantee"])
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "recipe.yaml", "summary.json", ".lock"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(name: str, asked: str, run: Path, command: Command) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    code, _, err = command(asked, run)
    assert code == 2
    assert f"{run / name} is a pipe or a device" in err


def test_a_device_behind_a_link_is_refused(run: Path, command: Command) -> None:
    (run / "summary.json").symlink_to("/dev/zero")
    code, _, err = command("ledger", run)
    assert code == 2
    assert "is a pipe or a device" in err


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "times.jsonl", "ledger.jsonl"])
def test_nothing_is_written_through_a_link(name: str, run: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "target"
    target.write_text("keep me")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    code, _, err = command("resume", run)
    assert code == 2
    assert f"{run / name} is a link" in err
    assert target.read_text() == "keep me"


def test_temporary_files_that_are_links_lead_nowhere(run: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "target"
    target.write_text("keep me")
    saved = checkpoint.load(run)
    for name in (checkpoint.FILE, "summary.json", "report.html", "metrics.jsonl"):
        (run / f"{name}.tmp").symlink_to(target)
    assert command("resume", run)[0] == 0
    assert target.read_text() == "keep me"
    assert (checkpoint.load(run).state.parameters == saved.state.parameters).all()


@pytest.mark.parametrize("step", [7, 399, -5])
def test_a_checkpoint_that_is_ahead_of_its_ledger_is_refused(step: int, run: Path, command: Command) -> None:
    """Else a run ends with steps that nobody has paid for."""
    saved = checkpoint.load(run)
    saved.state.step = step
    checkpoint.save(run, saved.state, saved.recipe_digest, saved.ledger_count, saved.ledger_head)
    for asked in ("resume", "ledger"):
        code, _, err = command(asked, run)
        assert code == 2
        assert f"is of step {step}" in err


@pytest.mark.parametrize("asked", ["resume", "ledger", "guarantee"])
@pytest.mark.parametrize("name", ["ledger.jsonl", "checkpoint.safetensors"])
def test_files_that_are_nested_without_end_are_refused(name: str, asked: str, run: Path, command: Command) -> None:
    nested = b'{"__metadata__":' + b"[" * 100_000 + b"}\n"
    size = len(nested).to_bytes(8, "little") if name == checkpoint.FILE else b""
    (run / name).write_bytes(size + nested)
    code, _, err = command(asked, run)
    assert code == 2
    assert str(run / name) in err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("parameters", torch.zeros(3, dtype=torch.float64), r"parameters \[3\], expected \[6\]"),
        ("optimiser", {}, "missing"),
        ("pending", torch.tensor([10**6]), "others than users 0 to 11"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(name: str, value: Any, said: str, tiny: str, tmp_path: Path) -> None:
    """Its digest is no secret, so anybody can write one that is whole."""
    whole = tmp_path / "run"
    folder.train(recipe.load(tiny, ["central={kind: adam, learning_rate: 0.1}"]), whole, quiet=True)
    (whole / folder.SUMMARY).unlink()
    saved = checkpoint.load(whole)
    setattr(saved.state, name, value)
    checkpoint.save(whole, saved.state, saved.recipe_digest, saved.ledger_count, saved.ledger_head)
    with pytest.raises(UserError, match=said):
        folder.resume(whole, quiet=True)


def test_a_model_that_brings_code_is_refused_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal whether to run it, and wait."""
    pytest.importorskip("transformers")
    from confide.encoders.weights import load

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    model = tmp_path / "model"
    model.mkdir()
    names = {"AutoConfig": "spy_model.Spy", "AutoModel": "spy_model.Spy", "AutoTokenizer": ["spy_model.Spy", None]}
    (model / "config.json").write_text(json.dumps({"model_type": "spy", "auto_map": names}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    (model / "spy_model.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'it_ran')!r}).touch()\n")
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(model / "config.json", model / name)
    with pytest.raises(UserError, match="read the encoder"):
        load(str(model))
    assert not (tmp_path / "it_ran").exists()
