"""The demo: from nothing to a table of error and epsilon, both as trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from confide import recipe
from confide.encoders import presets
from confide.errors import UserError
from confide.privacy.accountant import rated
from confide.recipe import Recipe
from confide.reproduce import demo, frontier

Command = Callable[..., tuple[int, str, str]]
FEW = (
    "task.corpus={kind: population, part: train, people: 30, utterances: 1, voices: 4, count: [1, 1]}",
    "task.test={kind: population, part: test, people: 3, utterances: 1, voices: 2, count: [1, 1]}",
    "sampling.cohort=10", "run.steps=2", "final.count=1", "evaluation.every=2",
)  # fmt: skip
SMALL = "task.model={preset: tiny, layers: 1, width: 32, mlp: 32}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tiny_speech_model: Callable[[str], Path]) -> None:
    """The demo's own recipes, with few people and little to train."""
    source = tiny_speech_model("whisper")

    def load(name: str, changes: Sequence[str]) -> Recipe:
        model = SMALL if name in demo.FEWER else f"task.model.encoder.source={source}"
        if name in (demo.SEED, demo.START):
            seed = ("task.corpus.part=seed", "sampling={kind: fixed, cohort: 2}", "final={kind: last}")
            return recipe.load(name, [*changes, *FEW[:2], *seed, "run.steps=2", "evaluation.every=2", model])
        kept = [change for change in changes if change not in demo.FEWER.get(name, ())]
        return recipe.load(name, [*kept, *FEW, model])

    monkeypatch.setattr(demo, "load", load)
    monkeypatch.setattr(frontier, "EPSILONS", (4.0,))


@pytest.mark.usefixtures("quick", "no_figures")
def test_the_demo_ends_with_error_and_epsilon_as_trained_and_makes_every_run_once(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    monkeypatch.setattr(presets, "install", lambda chosen: tmp_path)
    code, out, _ = command("demo", "--out", tmp_path / "demo", "--workers", 1)
    assert code == 0
    assert f"confide transcribe {tmp_path / 'demo' / 'epsilon-2'} recording.wav" in out
    page = (tmp_path / "demo" / "index.html").read_text()
    assert "30 users, trained" in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("model.safetensors")}
    assert len(before) == 5  # the start too
    code, again, _ = command("demo", "--out", tmp_path / "demo", "--workers", 1, "--json")
    rows = json.loads(again)["runs"]
    assert [row["epsilon"] is None for row in rows] == [True, False, False, False]
    for row, asked in zip(rows[1:], (8, 2, 1), strict=True):
        assert 0.9 * asked < row["epsilon"] <= asked  # of the run itself, with its own people
        assert row["people"] == 30
        assert f" {rated(row['epsilon'], row['delta'], 30)}  " in out
    assert all((Path(row["folder"]) / "report.html").exists() for row in rows)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("quick", "no_figures")
def test_without_the_encoder_the_demo_says_so_and_trains_the_small_model(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    def refuse(chosen: presets.Preset) -> Path:
        raise UserError("there is no network")

    monkeypatch.setattr(presets, "install", refuse)
    code, out, _ = command("demo", "--out", tmp_path / "demo", "--workers", 1)
    assert code == 0
    assert "there is no network" in out
    assert "whole" in out
    assert (tmp_path / "demo" / "seed" / "summary.json").exists()
    assert json.loads((tmp_path / "demo" / "epsilon-1" / "summary.json").read_text())["epsilon"] <= 1


def test_the_demos_recipes_are_what_its_help_says() -> None:
    found = recipe.load(demo.PRIVATE)
    assert found.model_dump()["task"]["corpus"]["people"] == 5000
    assert found.privacy.delta is not None
    assert found.privacy.delta < 1 / 5000
