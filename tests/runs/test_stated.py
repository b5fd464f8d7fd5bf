"""Claims about the statement of a run's folder: one object for every sentence, and edits of the folder are seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide import recipe
from confide.privacy.accountant import shown
from confide.privacy.guarantee import Statement
from confide.privacy.ledger import Ledger
from confide.privacy.wording import NOT_FOR_RELEASE
from confide.report.page import write_report
from confide.runs import folder
from confide.runs.stated import differences, stated

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with distributed trust, whose statement has every kind of adversary."""
    place = tmp_path_factory.mktemp("stated") / "run"
    wanted = recipe.load("convex/digits", ["run.steps=4", "privacy.trust=distributed", "evaluation.last=1"])
    folder.train(wanted, place, quiet=True, page=write_report)
    return place


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def edit(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    summary = json.loads((place / "summary.json").read_text())
    change(summary)
    (place / "summary.json").write_text(json.dumps(summary))


def test_every_output_says_what_the_statement_says(run: Path, command: Command) -> None:
    found = stated(run)
    summary = folder.summary_of(run)
    assert summary["guarantee"] == found.said
    assert summary["unit"] == found.unit.model_dump()
    assert Statement.model_validate(summary["statement"]) == found
    code, out, _ = command("ledger", run)
    assert code == 0
    assert found.said in out
    page = (run / "report.html").read_text()
    assert found.adjacency is not None
    for words in (("ledger",), ("ledger", "--json"), ("guarantee",), ("guarantee", "--json"), ("summary",)):
        told = json.dumps(summary) if words == ("summary",) else command(words[0], run, *words[1:])[1]
        assert found.adjacency in " ".join(told.split()), words
        assert found.unit.name in " ".join(told.split()), words
    promised = f"differentially private for every {found.unit.name} ({found.adjacency}: {found.neighbours})"
    assert promised in " ".join(command("guarantee", run)[1].split())
    assert f"for every {found.unit.name}" in found.said
    assert found.adjacency in page
    assert f"for every {found.unit.name}" in page
    for each in found.adversaries:
        assert each.said in page
        assert each.adjacency in page
        assert shown(each.epsilon) in page
        assert each.epsilon_replaced is None or shown(each.epsilon_replaced) in page
    assert found.neighbours in page
    assert any("seed" in what for what in found.not_covered), "the page has to say it"
    for what in (*found.public, *found.not_covered, found.unit.name):
        assert what.replace("'", "&#x27;") in page
    assert "id=guarantee>" in page
    assert "the privacy profile" in page


@pytest.mark.parametrize("source", ["seeded", "system"])
def test_the_ledger_the_summary_and_the_page_mark_seeded_noise_as_not_for_release(
    source: str, tmp_path: Path, command: Command
) -> None:
    wanted = recipe.load("convex/digits", ["run.steps=1", "evaluation.last=1", f"privacy.source={source}"])
    summary = folder.train(wanted, tmp_path / "run", quiet=True, page=write_report)
    header = Ledger.read(tmp_path / "run" / "ledger.jsonl").header
    assert header["for_release"] is summary["for_release"] is (source == "system")
    assert header["noise_source"] == summary["noise_source"] == source
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count(f"<b>{NOT_FOR_RELEASE}</b>") == (source == "seeded")
    for name in ("guarantee", "ledger"):
        said = " ".join(command(name, tmp_path / "run")[1].split())
        assert (NOT_FOR_RELEASE in said) == (source == "seeded")


def test_the_command_prints_text_json_and_its_schema(run: Path, command: Command) -> None:
    code, out, _ = command("guarantee", run)
    assert code == 0
    assert shown(stated(run).epsilon) in out
    code, out, _ = command("guarantee", run, "--json")
    assert code == 0
    document = json.loads(out)
    assert Statement.model_validate(document) == stated(run)
    code, out, _ = command("guarantee", "--schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == set(document)
    assert set(schema["required"]) <= set(document)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(epsilon=s["epsilon"] / 2),
        lambda s: s["statement"].update(epsilon=s["epsilon"] / 2),
        lambda s: s["statement"]["unit"].update(person=True),
        lambda s: s["statement"]["adversaries"][1].update(epsilon=0.1),
        lambda s: s.update(for_release=True),
        lambda s: s.update(guarantee="epsilon 1 at delta 1e-05 for everybody"),
        lambda s: s.update(epsilon_server=0.1),
        lambda s: s.update(ledger_head="0" * 64),
    ],
)
def test_an_edited_summary_is_told_and_fails(copy: Path, command: Command, change: Any) -> None:
    edit(copy, change)
    assert differences(copy, stated(copy))
    code, _, told = command("guarantee", copy)
    assert code == 1
    assert "is not what the ledger says" in told


def test_an_edited_ledger_is_told_and_fails(copy: Path, command: Command) -> None:
    path = copy / "ledger.jsonl"
    path.write_text(path.read_text().replace('"person":false', '"person":true'))
    code, _, told = command("guarantee", copy)
    assert code != 0
    assert "line 1: was edited" in told


def test_a_summary_from_before_there_were_statements_is_read(copy: Path, command: Command) -> None:
    def age(summary: dict[str, Any]) -> None:
        for name in ("statement", "unit"):
            summary.pop(name)
        summary["guarantee"] = "as it was said then"

    edit(copy, age)
    assert differences(copy, stated(copy)) == []
    assert command("guarantee", copy)[0] == 0
    page = write_report(copy, folder.held_recipe(copy), folder.summary_of(copy)).read_text()
    assert f"for every {stated(copy).unit.name}" in page


def test_a_summary_with_a_statement_of_an_older_version_is_held_against_what_it_says(
    copy: Path, command: Command
) -> None:
    def age(summary: dict[str, Any]) -> None:
        summary["guarantee"] = "as it was said then"
        summary["statement"] |= {"version": 1, "public": ["as it was said then"], "not_covered": []}
        summary["statement"].pop("neighbours")
        for each in summary["statement"]["adversaries"]:
            del each["adjacency"], each["epsilon_replaced"]

    edit(copy, age)
    assert differences(copy, stated(copy)) == []
    edit(copy, lambda summary: summary["statement"]["adversaries"][1].update(epsilon=0.1))
    assert command("guarantee", copy)[0] == 1


def test_the_statement_does_not_depend_on_who_took_part(tmp_path: Path) -> None:
    """Two runs with other cohorts differ in nothing but what names the run."""
    found = []
    for seed in (0, 1):
        wanted = recipe.load("convex/digits", ["run.steps=3", "evaluation.last=1", f"run.seed={seed}"])
        folder.train(wanted, tmp_path / str(seed), quiet=True)
        found.append(stated(tmp_path / str(seed)).model_dump(exclude={"recipe", "ledger_head"}))
    assert found[0] == found[1]


@pytest.mark.parametrize("words", [("guarantee",), ("ledger",), ("guarantee", "--json")])
def test_no_output_promises_anything_to_people_where_a_user_is_none(
    run: Path, command: Command, words: tuple[str, ...]
) -> None:
    """The digits are dealt to made-up clients: every output says what a user is, and none says "you"."""
    said = " ".join(command(words[0], run, *words[1:])[1].split())
    page = (run / "report.html").read_text()
    for output in (said, page, json.dumps(folder.summary_of(run))):
        assert "simulated client with rows of a public data set" in output
        assert "you took part" not in output
        assert "for every user" not in output
        assert "for every person" not in output
    for output in (page, said) if words != ("guarantee", "--json") else (page,):
        assert "nothing here is promised to people" in output
