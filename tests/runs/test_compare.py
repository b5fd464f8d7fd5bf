"""Comparing runs: what is real, what is alike, and what cannot be compared; as a user would see it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide import recipe
from confide.errors import UserError
from confide.federated import items
from confide.runs import comparison, folder

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> dict[str, Path]:
    """A good model, the same recipe with another seed, one that has hardly begun, and one of another task."""
    place = tmp_path_factory.mktemp("runs")
    wanted = {"good": ["run={steps: 40}"], "twin": ["run={steps: 40, seed: 1}"], "young": ["run={steps: 1}"]}
    quick = ["privacy={mechanism: none}", "evaluation={every: 20}"]
    for name, sets in wanted.items():
        folder.train(recipe.load("convex/digits", [*quick, *sets]), place / name, quiet=True)
    quadratic = ["run={steps: 2}", "evaluation={every: 2}"]
    folder.train(recipe.load("convex/quadratics", quadratic), place / "other", quiet=True)
    return {name: place / name for name in (*wanted, "other")}


def document(command: Command, *words: object) -> dict[str, Any]:
    code, out, err = command("compare", *words, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_model_that_has_hardly_begun_is_really_worse(runs: dict[str, Path], command: Command) -> None:
    found = document(command, runs["good"], runs["young"])
    (pair,) = found["pairs"]
    assert pair["real"]
    assert pair["verdict"] == "good is better than young"
    assert pair["interval"][0] < pair["difference"] < pair["interval"][1] < 0
    values = [run["value"] for run in found["runs"]]
    assert pair["difference"] == pytest.approx(values[1] - values[0])
    assert all(run["interval"][0] <= run["value"] <= run["interval"][1] for run in found["runs"])


def test_another_seed_is_not_called_better(runs: dict[str, Path], command: Command) -> None:
    found = document(command, runs["good"], runs["twin"])
    (pair,) = found["pairs"]
    assert not pair["real"]
    assert pair["verdict"] == "no difference is shown between good and twin"
    assert found["recipes"] == {"run.seed": ["0", "1"]}
    assert any("several seeds" in note for note in found["notes"])


def test_the_order_of_the_runs_does_not_change_a_verdict(runs: dict[str, Path], command: Command) -> None:
    (one,), (two,) = (
        document(command, *(runs[n] for n in names))["pairs"] for names in (("good", "young"), ("young", "good"))
    )
    assert one["verdict"] == two["verdict"]
    assert one["difference"] == pytest.approx(-two["difference"])
    assert one["p"] == pytest.approx(two["p"])


def test_runs_with_other_test_sets_are_said_to_be_not_comparable(
    runs: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(runs["good"], strange)
    held = json.loads((strange / items.FILE).read_text())
    (strange / items.FILE).write_text(json.dumps(held | {"test": "another"}))
    found = document(command, runs["good"], strange)
    assert found["pairs"] == []
    assert any(note.startswith("not comparable") and "another" in note for note in found["notes"])
    code, out, _ = command("compare", runs["good"], strange)
    assert code == 0
    assert "not comparable" in out


def test_a_task_without_test_items_is_shown_and_not_judged(runs: dict[str, Path], command: Command) -> None:
    found = document(command, runs["good"], runs["other"])
    assert found["pairs"] == []
    assert found["runs"][1]["interval"] is None
    assert any("no test items" in note for note in found["notes"])


def test_items_that_an_older_run_did_not_record_are_scored_again_and_kept(
    runs: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    old = tmp_path / "old"
    shutil.copytree(runs["young"], old)
    recorded = (old / items.FILE).read_bytes()
    (old / items.FILE).unlink()
    document(command, runs["good"], old)
    assert (old / items.FILE).read_bytes() == recorded


def test_the_page_is_whole_and_the_table_names_every_run(
    runs: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "page.html"
    code, out, _ = command("compare", runs["good"], runs["twin"], runs["young"], "--out", path)
    assert code == 0
    assert out.count("is better than young") == 2
    page = path.read_text()
    assert page.endswith("</html>\n")
    assert page.count("<td class=n data-v=") > 10
    for said in ("good is better than young", "Where the recipes differ", "By class", "<figure class=chart>"):
        assert said in page


def test_p_values_are_raised_for_the_number_of_pairs(runs: dict[str, Path]) -> None:
    found = comparison.compare([runs["good"], runs["twin"], runs["young"]])
    assert len(found.pairs) == 3
    assert all(pair.p >= pair.difference.p for pair in found.pairs)
    assert any(pair.p > pair.difference.p for pair in found.pairs)


@pytest.mark.parametrize("names", [["good"], ["good", "good"]])
def test_one_run_alone_is_refused(names: list[str], runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="two or more different ones"):
        comparison.compare([runs[name] for name in names])


def test_an_unfinished_run_is_refused_with_what_to_do(runs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    shutil.copytree(runs["good"], tmp_path / "half")
    (tmp_path / "half" / folder.SUMMARY).unlink()
    code, _, err = command("compare", runs["young"], tmp_path / "half")
    assert code == 2
    assert "is not finished" in err
    assert "confide resume" in err


def test_damaged_scores_are_said_to_be_damaged(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["good"], tmp_path / "bad")
    (tmp_path / "bad" / items.FILE).write_text('{"metric": 3')
    with pytest.raises(UserError, match="damaged"):
        items.read(tmp_path / "bad")


def test_epsilons_of_unlike_units_are_told_apart(runs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    """A figure for pooled shares beside one for speakers would be read as the same promise."""
    places: list[Path] = []
    for name in ("speaker", "share of pooled utterances", "speaker"):
        places.append(Path(shutil.copytree(runs["good"], tmp_path / f"run{len(places)}")))
        summary = json.loads((places[-1] / "summary.json").read_text())
        unit = {"name": name, "person": False, "origin": "dealt"}
        (places[-1] / "summary.json").write_text(json.dumps(summary | {"epsilon": 1.0, "delta": 1e-5, "unit": unit}))
    unlike = document(command, *places[:2])
    assert any("unlike units and cannot be compared" in note for note in unlike["notes"])
    assert "epsilon is for every speaker" in document(command, places[0], places[2])["notes"]
