"""Every promise of docs/guarantee.md has a test that would fail if it were false, and the list of them is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from confide.build import make_loop
from confide.privacy.accountant import shown
from confide.recipe import load

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<sentence>.+) \| `(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)` \|$")


def flat(text: str) -> str:
    return " ".join(line.removeprefix("> ").strip() for line in text.splitlines()).replace("**", "")


def rows() -> list[tuple[str, str, str]]:
    lines = (ROOT / "docs" / "guarantee-checks.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    found = [ROW.match(line) for line in table]
    assert all(found), [line for line, row in zip(table, found, strict=True) if row is None]
    return [(row["sentence"], row["file"], row["name"]) for row in found if row is not None]


@pytest.mark.parametrize(("sentence", "file", "name"), rows())
def test_the_sentence_stands_on_the_page_and_its_test_exists(sentence: str, file: str, name: str) -> None:
    assert " ".join(sentence.split()) in " ".join(flat((ROOT / "docs" / "guarantee.md").read_text()).split())
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_part_of_the_page_has_promises_in_the_list() -> None:
    """A new heading without a row is a part that nobody has checked."""
    page = (ROOT / "docs" / "guarantee.md").read_text()
    parts = re.split(r"^## ", page, flags=re.MULTILINE)
    sentences = [" ".join(sentence.split()) for sentence, _, _ in rows()]
    unchecked = [
        part.splitlines()[0]
        for part in parts
        if not any(sentence in " ".join(flat(part).split()) for sentence in sentences)
    ]
    assert unchecked == []


def test_the_sentence_at_the_top_has_the_numbers_of_the_shipped_recipe() -> None:
    loop = make_loop(load("convex/digits"))
    plan, steps = loop.plan, loop.recipe.run.steps
    spent = shown(plan.epsilon(plan.charges(steps)))
    expected = (
        f"The final model is ({spent}, {plan.delta:g})-differentially private for every {loop.recipe.unit.name} "
        f"({plan.event.adjacency}), by PLD accounting of {steps} releases with noise multiplier "
        f"{plan.event.noise_multiplier:.4g}; cohorts of {plan.cohort_size} of {plan.event.population} users (poisson)."
    ).replace("-05", "-5")
    assert expected in " ".join(flat((ROOT / "docs" / "guarantee.md").read_text()).split())
