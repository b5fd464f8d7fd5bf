"""`confide release`: the same recipe with noise that may leave, after a checklist that can stop it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.errors import UserError
from confide.recipe import Recipe, load
from confide.runs import folder, publish, release

pytestmark = pytest.mark.usefixtures("no_figures_here")
Command = Callable[..., tuple[int, str, str]]


def digits(*more: str) -> Recipe:
    return load("convex/digits", ["run.steps=5", *more])


@pytest.fixture(scope="module")
def research(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Path:
    place = tmp_path_factory.mktemp("release") / "research"
    folder.train(digits(), place, quiet=True)
    return place


def verdicts(run: Path) -> dict[str, str]:
    return {point.name: point.verdict for point in release.checklist(run)}


def test_one_command_leads_from_a_research_run_to_one_that_can_be_published(
    research: Path, tmp_path: Path, command: Command
) -> None:
    with pytest.raises(UserError, match="seeded noise"):
        publish.publish(research, tmp_path / "too-early")
    code, out, err = command("release", research, "--out", tmp_path / "run")
    assert code == 0, err
    assert "[x] delta" in out
    assert "[?] unit" in out  # rows of a public data set are no people
    assert f"confide publish {tmp_path / 'run'} PUBLIC" in out
    before, after = folder.held_recipe(research), folder.held_recipe(tmp_path / "run")
    assert after.privacy.source == "system"
    assert after.model_copy(update={"privacy": before.privacy}) == before
    assert folder.summary_of(tmp_path / "run")["epsilon"] == folder.summary_of(research)["epsilon"]
    assert publish.publish(tmp_path / "run", tmp_path / "public")["epsilon"] > 0


def test_the_list_alone_trains_nothing(research: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command("release", research, "--check", "--json")
    assert code == 0
    assert {point["name"] for point in json.loads(out)["checklist"]} >= {
        "epsilon", "delta", "noise", "unit", "population", "start", "budget", "settings", "trust",
    }  # fmt: skip
    code, _, err = command("release", research)
    assert (code, "no --out was given" in err) == (2, True)


def test_a_run_for_release_already_is_stopped(tmp_path: Path, command: Command) -> None:
    folder.train(digits("privacy.source=system"), tmp_path / "run", quiet=True)
    assert verdicts(tmp_path / "run")["noise"] == "stop"
    with pytest.raises(UserError, match=r"nothing was trained\. noise: it is the operating system's already"):
        release.release(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert command("release", tmp_path / "run", "--check")[0] == 1


def test_a_run_without_a_guarantee_or_with_too_large_a_delta_is_stopped(tmp_path: Path) -> None:
    folder.train(digits("privacy={mechanism: none}", "bounding={rule: none}"), tmp_path / "bare", quiet=True)
    assert verdicts(tmp_path / "bare")["guarantee"] == "stop"
    folder.train(digits("privacy.delta=0.1", "privacy.large_delta=true"), tmp_path / "large", quiet=True)
    assert verdicts(tmp_path / "large")["delta"] == "stop"


def test_a_start_from_elsewhere_is_for_the_owner_to_judge(research: Path, tmp_path: Path) -> None:
    from confide.privacy.guarantee import STARTING_MODEL
    from confide.runs.stated import stated

    found = stated(research, curve=False)
    moved = found.model_copy(update={"not_covered": [*found.not_covered, STARTING_MODEL]})
    points = {p.name: p.verdict for p in release._people(digits(), moved, folder.summary_of(research))}
    assert (points["start"], verdicts(research)["start"]) == ("look", "ok")


def test_an_edited_or_unfinished_run_is_no_ground_for_a_release(research: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(research, tmp_path / "copy"))
    text = (copy / folder.SUMMARY).read_text()
    (copy / folder.SUMMARY).write_text(text.replace('"releases": 5', '"releases": 4'))
    with pytest.raises(UserError, match="this folder was edited"):
        release.checklist(copy)
    (copy / folder.SUMMARY).unlink()
    with pytest.raises(UserError, match="is not finished"):
        release.checklist(copy)
