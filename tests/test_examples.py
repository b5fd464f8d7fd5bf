"""Every public name says what it does, with an example that runs.

Public are the names in `confide.__all__` and those that docs/api.md lists.
"""

from __future__ import annotations

import doctest
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import confide
from confide import recipe as confide_recipe

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
LISTED = re.findall(r"^::: (confide[\w.]+)$", PAGE, flags=re.MULTILINE)
NEEDS = {"confide.retrieve": "minilm"}  # the fixture that brings what an example needs
pytestmark = pytest.mark.usefixtures("no_figures_here")


def public(name: str) -> Any:
    """The object of a dotted name: a module, or a member of one."""
    parent, _, last = name.rpartition(".")
    found = getattr(import_module(parent), last, None)
    return import_module(name) if found is None else found


NAMES = list({id(public(n)): n for n in (*LISTED, *(f"confide.{n}" for n in confide.__all__ if n[0] != "_"))}.values())


def examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(public(name)) or ""
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


def test_the_page_lists_some_thirty_names_beside_those_of_the_package() -> None:
    assert len(set(LISTED)) == len(LISTED)
    assert 12 <= len(LISTED) <= 40
    for name in ("confide.build.make_loop", "confide.privacy.mechanisms.Mechanism", "confide.federated.task.Task"):
        assert name in LISTED


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_and_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name in NEEDS:
        request.getfixturevalue(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    found = examples(name)
    assert found.examples, f"the docstring of {name} has no example"
    said: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert outcome.failed == 0, "".join(said)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(public(name))])
def test_the_docstring_of_a_public_function_names_every_argument_and_what_comes_back(name: str) -> None:
    text, function = inspect.getdoc(public(name)) or "", public(name)
    if "arguments are those of" in text:
        return
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"^ +{argument}: ", text, flags=re.MULTILINE), f"{name} does not say what {argument} is"
    assert "Returns:" in text


def test_the_examples_stay_out_of_the_schema_of_a_recipe() -> None:
    assert ">>>" in (confide_recipe.Recipe.__doc__ or "")
    assert ">>>" not in json.dumps(confide_recipe.schema())
