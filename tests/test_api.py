"""The Python API does what the command line does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import confide
from confide.cli import app
from confide.errors import UserError
from support.keyless import summary_without_key

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: str, no_figures_here: None) -> confide.Run:
    return confide.train(tiny, tmp_path_factory.mktemp("api") / "run", {"run.steps": 4, "run.seed": 3})


def test_training_does_what_the_command_does(run: confide.Run, tiny: str, tmp_path: Path, command: Command) -> None:
    words = ("--set", "run.steps=4", "--set", "run.seed=3")
    code, out, _ = command("train", tiny, "--out", tmp_path / "run", *words, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "run/summary.json").read_text())
    assert summary_without_key(tmp_path / "run") == summary_without_key(run.folder)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()


def test_a_run_says_what_is_in_its_folder(run: confide.Run) -> None:
    assert run.finished
    assert run.recipe.run.seed == 3
    assert run.metrics == run.summary["metrics"]
    assert run.epsilon == run.summary["epsilon"] == run.ledger["epsilon"]
    assert list(run.model) == ["w"]
    assert [record["step"] for record in run.records] == [1, 2, 3, 4]
    assert run.report.read_text().endswith("</html>\n")
    assert confide.load(run.folder) == run


def test_evaluating_returns_what_the_command_prints(run: confide.Run, command: Command) -> None:
    code, out, _ = command("evaluate", run.folder, "--json")
    assert code == 0
    assert confide.evaluate(run) == json.loads(out)


def test_comparing_returns_what_the_command_prints(tmp_path: Path, command: Command) -> None:
    quick = {"run.steps": 2, "evaluation": {"every": 2}}
    runs = [confide.train("convex/digits", tmp_path / str(seed), {**quick, "run.seed": seed}) for seed in (0, 1)]
    code, out, _ = command("compare", *(each.folder for each in runs), "--json")
    assert code == 0
    assert confide.compare(*runs).to_json() == json.loads(out)


def test_a_stopped_run_is_taken_up(tmp_path: Path, tiny: str, run: confide.Run) -> None:
    place = tmp_path / "half"
    place.mkdir()
    (place / "recipe.yaml").write_text((run.folder / "recipe.yaml").read_text())
    half = confide.load(place)
    assert not half.finished
    with pytest.raises(UserError, match=r"confide\.resume"):
        _ = half.summary
    with pytest.raises(UserError, match=r"confide\.resume"):
        _ = half.model
    assert confide.resume(place).metrics == run.metrics


def test_a_recipe_can_be_a_document_or_checked_already(tmp_path: Path, tiny: str, run: confide.Run) -> None:
    document = yaml.safe_load(Path(tiny).read_text())
    document["run"] |= {"steps": 4, "seed": 3}
    assert confide.train(document, tmp_path / "a").metrics == run.metrics
    assert confide.train(run.recipe, tmp_path / "b").metrics == run.metrics
    for given in (document, run.recipe):
        with pytest.raises(UserError, match="sets change a recipe's document"):
            confide.train(given, tmp_path / "c", {"run.seed": 1})
    with pytest.raises(UserError, match="expected a mapping"):
        confide.train(tiny, tmp_path / "c", "run.seed=1")


NUMBERS: dict[str, Any] = {"cohort": 100, "population": 10_000, "rounds": 200, "noise_multiplier": 1.0}


def test_a_plan_finds_whatever_is_left_out(command: Command) -> None:
    found = confide.plan(**NUMBERS, delta=1e-6)
    words = ("--cohort", 100, "--population", 10_000, "--rounds", 200, "--noise-multiplier", 1, "--delta", 1e-6)
    code, out, _ = command("plan", "epsilon", *words, "--json")
    assert code == 0
    assert found.to_json() == json.loads(out)
    for left in ("cohort", "rounds", "noise_multiplier"):
        given = {name: value for name, value in NUMBERS.items() if name != left}
        answer = confide.plan(**given, target_epsilon=found.epsilon["pld"] * 1.001, delta=1e-6)
        assert answer.asked == left.partition("_")[0]
        assert getattr(answer.point, left) == pytest.approx(NUMBERS[left], rel=0.02)


@pytest.mark.parametrize("given", [{}, {**NUMBERS, "target_epsilon": 2.0}, {"cohort": 3, "rounds": 2}])
def test_a_plan_with_none_or_several_left_out_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leave out exactly one"):
        confide.plan(**given, delta=1e-6)


def test_only_public_names_are_offered() -> None:
    assert set(dir(confide)) == set(confide.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = confide.nothing


def test_the_snippet_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    snippet = text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in snippet.splitlines() if line and line != "import confide"]
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["run"].epsilon <= 2
    assert set(names["weights"]) == {"weight", "bias"}


def test_the_page_says_of_every_command_whether_python_has_it() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    alone = page[page.index("What else there is are commands alone") :].partition("* A `Run`")[0]
    group: Any = get_command(app)
    for name in group.commands:
        assert f"`confide {name}" in page or f"`{name}`" in alone, name
        assert (name in confide.__all__) == (f"| `confide.{name}(" in page), name


def test_a_promise_of_an_edited_folder_is_refused(tmp_path: Path, tiny: str) -> None:
    run = confide.train(tiny, tmp_path / "run", {"run.steps": 4})
    assert confide.guarantee(run).epsilon == run.epsilon
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps({**run.summary, "epsilon": 0.1}))
    with pytest.raises(UserError, match=r"epsilon is not what the ledger says: this folder was edited"):
        confide.guarantee(run)
