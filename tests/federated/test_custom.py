"""Claims about tasks that a user brings. That one trains, is in the documents, which are run (test_docs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from confide import recipe
from confide.errors import UserError
from confide.federated.custom import PythonTaskSettings, make_python_task

MODULE = """
class Half:
    name = "half"

    def loss(self, parameters, batch): ...

def make(options, seed):
    return Half()
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nowhere_to_be_found:make", "No module named 'nowhere_to_be_found'; run in the folder"),
        ("half_a_task:other", "half_a_task has no other"),
        ("half_a_task:make", "Half that it made has no metric, examples, initial_parameters, batch, evaluate"),
    ],
)
def test_what_is_missing_is_named(factory: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with pytest.raises(UserError, match=said):
        make_python_task(PythonTaskSettings(factory=factory), 0)


@pytest.mark.parametrize("factory", ["mine", "mine:", ":make", "mine:make()", "os.path:join:x", "../mine:make"])
def test_a_factory_is_a_module_and_a_name(factory: str) -> None:
    with pytest.raises(UserError, match=r"task\.factory"):
        recipe.load("convex/digits", [f"task={{kind: python, factory: '{factory}'}}"])
