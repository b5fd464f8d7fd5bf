"""Comparing runs: what is real, what is alike, and what cannot be compared; as a user would see it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confide import recipe
from confide.errors import UserError
from confide.federated import items
from confide.report.comparison import render
from confide.runs import comparison, folder

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")


QUICK = ["privacy={mechanism: none}", "evaluation={every: 20}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> dict[str, Path]:
    """A good model, the same recipe with another seed, one that has hardly begun, and one of another task."""
    place = tmp_path_factory.mktemp("runs")
    wanted = {"good": ["run={steps: 40}"], "twin": ["run={steps: 40, seed: 1}"], "young": ["run={steps: 1}"]}
    for name, sets in wanted.items():
        folder.train(recipe.load("convex/digits", [*QUICK, *sets]), place / name, quiet=True)
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
    code, out, _ = command("compare", runs["good"], runs["young"], "--out", path)
    assert code == 0
    assert out.count("good is better than young") == 1
    page = path.read_text()
    assert page.endswith("</html>\n")
    assert page.count("<td class=n data-v=") > 6
    for said in ("good is better than young", "Where the recipes differ", "By class", "<figure class=chart>"):
        assert said in page


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> dict[str, list[Path]]:
    """Three recipes with three seeds each: one that has hardly begun, and two that end alike."""
    place = tmp_path_factory.mktemp("seeds")
    wanted = {"short": (1, 0.016), "long": (30, 0.016), "like": (30, 0.0161)}
    found: dict[str, list[Path]] = {name: [] for name in wanted}
    for name, (steps, rate) in wanted.items():
        for seed in range(3):
            sets = [f"run={{steps: {steps}, seed: {seed}}}", f"central.learning_rate={rate}"]
            found[name].append(place / f"{name}-seed{seed}")
            folder.train(recipe.load("convex/digits", [*QUICK, *sets]), found[name][-1], quiet=True)
    return found


def test_p_values_are_raised_for_the_number_of_pairs(seeds: dict[str, list[Path]]) -> None:
    found = comparison.compare([own[0] for own in seeds.values()])
    assert len(found.pairs) == 3
    assert all(pair.p >= pair.difference.p for pair in found.pairs)
    assert any(pair.p > pair.difference.p for pair in found.pairs)


def test_runs_that_differ_in_their_seed_alone_are_one_recipe_and_recipes_are_compared(
    seeds: dict[str, list[Path]], command: Command
) -> None:
    found = document(command, *(run for own in seeds.values() for run in own))
    short, long, like = found["groups"]
    assert [group["group"] for group in found["groups"]] == [
        "learning_rate=0.016, steps=1", "learning_rate=0.016, steps=30", "learning_rate=0.0161, steps=30",
    ]  # fmt: skip
    assert short["seeds"] == long["seeds"] == like["seeds"] == [0, 1, 2]
    assert short["runs"] == [str(run) for run in seeds["short"]]
    assert long["mean"] == pytest.approx(sum(long["values"]) / 3)
    assert set(found["recipes"]) == {"central.learning_rate", "run.steps"}
    pairs = {(pair["first"], pair["second"]): pair for pair in found["pairs"]}
    assert len(pairs) == 3
    gap = pairs[short["group"], long["group"]]
    assert gap["verdict"] == f"{long['group']} is better than {short['group']}"
    assert gap["difference"] == pytest.approx(long["mean"] - short["mean"])
    assert gap["interval"][0] > 0
    assert gap["p_adjusted"] > gap["p"]
    assert gap["units"] == 3
    alike = pairs[long["group"], like["group"]]
    assert not alike["real"]
    assert alike["verdict"].startswith("no difference is shown")


def test_a_matrix_of_recipes_stands_in_the_terminal_and_on_the_page(
    seeds: dict[str, list[Path]], tmp_path: Path, command: Command
) -> None:
    page = tmp_path / "page.html"
    code, out, _ = command("compare", *(run for own in seeds.values() for run in own), "--out", page)
    assert code == 0
    assert "the row beside the column" in out
    assert "better by" in out
    assert "worse by" in out
    cells = re.findall("<td class='(better|worse|soft|)'>([^<]*)</td>", page.read_text().partition("id=verdicts")[2])
    assert len(cells) == 9
    assert [words for _, words in cells][::4] == ["", "", ""]
    assert [words for _, words in cells].count("not shown") == 2
    assert sum(kind == "better" for kind, _ in cells) == sum(kind == "worse" for kind, _ in cells) == 2
    assert "All 9 runs" in page.read_text()


def test_one_seed_alone_is_shown_and_not_judged(seeds: dict[str, list[Path]], command: Command) -> None:
    found = document(command, *seeds["long"], seeds["short"][0])
    assert found["pairs"] == []
    assert found["groups"][1]["interval"] is None
    assert any(note.startswith("one seed alone says nothing") for note in found["notes"])


def test_a_run_that_is_given_as_a_copy_too_does_not_count_twice(
    seeds: dict[str, list[Path]], tmp_path: Path, command: Command
) -> None:
    copy = Path(shutil.copytree(seeds["long"][0], tmp_path / "copy"))
    found = document(command, *seeds["long"], copy, *seeds["short"])
    assert [len(group["runs"]) for group in found["groups"]] == [3, 3]
    assert any("the first counts" in note and "copy" in note for note in found["notes"])


def test_recipes_of_unlike_epsilon_are_warned_of(
    seeds: dict[str, list[Path]], tmp_path: Path, command: Command
) -> None:
    places = []
    for name, epsilon in (("short", 1.0), ("long", 8.0)):
        for run in seeds[name][:2]:
            places.append(Path(shutil.copytree(run, tmp_path / run.name)))
            summary = json.loads((places[-1] / "summary.json").read_text())
            (places[-1] / "summary.json").write_text(json.dumps(summary | {"epsilon": epsilon, "delta": 1e-5}))
    found = document(command, *places)
    warning, *others = found["notes"]
    assert warning.startswith("warning: these spent unlike epsilons (")
    assert "steps=1: 1; " in warning
    assert "steps=30: 8)" in warning
    assert not any(note.startswith("warning") for note in others)
    page = tmp_path / "page.html"
    out = " ".join(command("compare", *places, "--out", page)[1].replace("│", " ").split())
    assert f" {warning} note: " in out, "no 'note:' before it, and before every note"
    said = page.read_text()
    assert said.index("Warning: these spent unlike") < said.index("<table"), "nobody misses it"
    # Each epsilon stands beside its delta and its word, in its colour.
    for epsilon, word in ((1, "strong"), (8, "moderate")):
        assert f"{epsilon} at 1e-05: {word}" in out
        assert f"<td class='n {word}' data-v={epsilon:.1f}>{epsilon} {word}</td><td>1e-05</td>" in said


def test_each_epsilon_of_a_comparison_has_its_word_and_its_delta(runs: dict[str, Path], tmp_path: Path) -> None:
    places: list[Path] = []
    for epsilon, delta in ((0.5, 1e-5), (30.0, 1e-5), (2.0, 0.5), (None, None)):
        places.append(Path(shutil.copytree(runs["good"], tmp_path / f"run{len(places)}")))
        summary = json.loads((places[-1] / "summary.json").read_text())
        (places[-1] / "summary.json").write_text(json.dumps(summary | {"epsilon": epsilon, "delta": delta}))
    page = render(comparison.compare(places))
    for cell in (
        "<td class=strong>0.5 strong</td><td>1e-05</td>", "<td class=weak>30 weak</td><td>1e-05</td>",
        "<td class=none>2 none</td><td>0.5</td>", "<td class=none>no guarantee</td><td></td>",
    ):  # fmt: skip
        assert cell in page


def test_intervals_are_drawn_on_one_scale_only_where_they_are_of_one_metric(runs: dict[str, Path]) -> None:
    assert render(comparison.compare([runs["good"], runs["young"]])).count("class=whisker") == 2
    assert "class=whisker" not in render(comparison.compare([runs["good"], runs["other"]]))


def test_what_is_not_comparable_is_named_in_words(runs: dict[str, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs["good"], tmp_path / "other"))
    held = items.read(other)
    assert held is not None
    items.write(other, replace(held, test="another", metric="wer"))
    (note,) = [note for note in comparison.compare([runs["good"], other]).notes if "not comparable" in note]
    assert "other (word error rate, %, test set another)" in note


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


def test_a_copy_with_another_seed_written_into_its_recipe_is_no_second_seed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "seed9"
    shutil.copytree(runs["good"], copy)
    written = copy / "recipe.yaml"
    assert "seed: 0" in written.read_text()
    written.write_text(written.read_text().replace("seed: 0", "seed: 9"))
    with pytest.raises(UserError, match="was changed after the run finished"):
        comparison.compare([runs["good"], copy, runs["young"]])


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
