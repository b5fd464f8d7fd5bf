"""A program that starts at once: what each command imports, counted in a process of its own. None measures time."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from confide.bench import recipes
from confide.workloads import data

LIGHT = {"click", "rich", "typer", "typing_extensions", "shellingham", "markdown_it", "mdurl", "pygments", "attr"}
ACCOUNTING = LIGHT | {"absl", "charset_normalizer", "dp_accounting", "numpy", "scipy"}
"""attr comes with absl, and charset_normalizer with scipy's f2py."""
TRAINING = {
    "annotated_types", "cryptography", "numpy", "opt_einsum", "pydantic", "pydantic_core", "safetensors", "torch",
    "torchgen", "tqdm", "typing_extensions", "typing_inspection", "yaml",
}  # fmt: skip
"""torch brings opt_einsum, torchgen and tqdm."""
PLAN = ["plan", "epsilon", "--cohort=9", "--population=99", "--rounds=9", "--delta=1e-3", "--noise-multiplier=1"]
COMMAND = """
import sys
sys.argv = ["confide", *sys.argv[1:]]
from confide import cli
try: cli.main()
finally:
"""
STEP = """
from confide.bench import recipes
from confide.build import make_loop
loop = make_loop(recipes.mlp(10, cohort=2, users=4, distinct=4))
loop.step(loop.start())
if True:
"""
REPORT = """
    import sys
    found = {name.split(".")[0] for name in sys.modules }
    print("beyond:", *sorted(n for n in found if n not in sys.stdlib_module_names and not n.startswith("_")))
"""


@pytest.mark.parametrize(
    ("program", "arguments", "allowed", "needed"),
    [
        (COMMAND, ["--help"], LIGHT, "typer"),
        (COMMAND, ["--version"], LIGHT, "typer"),
        (COMMAND, PLAN, ACCOUNTING, "dp_accounting"),
        (STEP, [], TRAINING, "torch"),
    ],
    ids=["--help", "--version", "plan epsilon", "the first step of A"],
)
def test_nothing_is_imported_that_is_not_needed(
    program: str, arguments: list[str], allowed: set[str], needed: str
) -> None:
    """torch at `--help` would be noticed, and so would scipy or dp-accounting where a run makes its first step."""
    ended = subprocess.run(
        [sys.executable, "-c", program + REPORT, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    said = ended.stdout.splitlines()[-1].split()
    assert said[0] == "beyond:"
    assert needed in said
    own = {"confide", "cython_runtime", "sitecustomize", "usercustomize"}
    assert set(said[1:]) - own <= allowed


def test_the_parent_of_workers_makes_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers make what they train on, and the parent, which trains nobody, makes nothing a third time."""
    monkeypatch.setattr(data, "small_clients", lambda *_: pytest.fail("data were made in the parent"))
    monkeypatch.setattr(data, "speech_clients", lambda *_: pytest.fail("data were made in the parent"))
    for recipe in (recipes.mlp(1, cohort=2, users=4), recipes.speech(1, cohort=2, users=4)):
        task = recipe.task.make(0)
        assert len(task.examples) == 4
        assert task.initial_parameters()


def test_data_are_made_once_however_many_users_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    make = data.small_clients

    def counted(*sizes: int) -> tuple[np.ndarray, np.ndarray]:
        made.append(sizes)
        return make(*sizes)

    monkeypatch.setattr(data, "small_clients", counted)
    task = recipes.mlp(1, cohort=2, users=4, distinct=4).task.make(0)
    for user in range(4):
        task.inputs(task.rows(user))  # type: ignore[attr-defined]
    assert made == [(4, 20, 784, 10)]
