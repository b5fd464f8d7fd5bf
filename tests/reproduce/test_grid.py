"""Grids go on after a stop without repeating a finished cell, and `reproduce` says what was measured, as promised."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from confide.errors import Stopped, UserError
from confide.recipe import Recipe, load
from confide.reproduce import grid, norm

Command = Callable[..., tuple[int, str, str]]


class InThisProcess(ThreadPoolExecutor):
    """The pool without the start of processes, which take seconds each."""

    def __init__(self, workers: int, **_: Any) -> None:
        super().__init__(workers)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ProcessPoolExecutor", InThisProcess)


def cells(tiny: str, count: int) -> list[Recipe]:
    return [load(tiny, [f"run.seed={seed}"]) for seed in range(count)]


class Measured:
    """A measurement that remembers the cells it was asked for."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, recipe: Recipe) -> dict[str, Any]:
        self.seeds.append(recipe.run.seed)
        return {"seed": recipe.run.seed, "rate": recipe.central.learning_rate}


def run(folder: Path, wanted: list[Recipe], measure: grid.Measure, workers: int = 1) -> list[dict[str, Any]]:
    return grid.run_cells(folder, wanted, measure, workers, "grid", quiet=True)


@pytest.mark.usefixtures("no_processes")
class TestCells:
    def test_a_cell_that_is_asked_for_twice_is_run_once(self, tiny: str, tmp_path: Path) -> None:
        one, other = cells(tiny, 2)
        measured = Measured()
        found = run(tmp_path, [one, other, one], measured)
        assert sorted(measured.seeds) == [0, 1]
        assert [value["seed"] for value in found] == [0, 1, 0]

    def test_answers_come_in_the_order_of_the_cells_however_many_run_at_a_time(self, tiny: str, tmp_path: Path) -> None:
        wanted = cells(tiny, 6)[::-1]

        def slow_when_first(recipe: Recipe) -> dict[str, Any]:
            time.sleep(0.02 * recipe.run.seed)
            return {"seed": recipe.run.seed}

        assert [v["seed"] for v in run(tmp_path, wanted, slow_when_first, workers=3)] == [5, 4, 3, 2, 1, 0]

    def test_a_finished_cell_is_never_measured_again(self, tiny: str, tmp_path: Path) -> None:
        measure = Measured()
        first = run(tmp_path, cells(tiny, 3), measure)
        assert measure.seeds == [0, 1, 2]
        second = run(tmp_path, cells(tiny, 5), measure)
        assert measure.seeds == [0, 1, 2, 3, 4]
        assert second[:3] == first
        lines = (tmp_path / "cells.jsonl").read_bytes()
        assert run(tmp_path, cells(tiny, 5), measure) == second
        assert len(measure.seeds) == 5
        assert (tmp_path / "cells.jsonl").read_bytes() == lines

    @pytest.mark.parametrize("left", [0, 1, 20, -1], ids=["none of it", "a byte", "twenty bytes", "all but its end"])
    def test_a_torn_last_line_is_a_cell_to_be_measured_again(self, left: int, tiny: str, tmp_path: Path) -> None:
        measure = Measured()
        first = run(tmp_path, cells(tiny, 3), measure)
        path = tmp_path / "cells.jsonl"
        whole = path.read_bytes()
        *kept, last = whole.splitlines(keepends=True)
        path.write_bytes(b"".join(kept) + last[:left])
        assert run(tmp_path, cells(tiny, 3), measure) == first
        assert measure.seeds == [0, 1, 2, 2]
        assert path.read_bytes() == whole

    def test_a_file_that_is_nothing_but_a_torn_line_starts_over(self, tiny: str, tmp_path: Path) -> None:
        measure = Measured()
        (tmp_path / "cells.jsonl").write_bytes(b'{"cell": "0')
        run(tmp_path, cells(tiny, 2), measure)
        assert measure.seeds == [0, 1]
        assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2

    def test_a_changed_recipe_is_measured_again_and_the_old_value_is_kept_beside_it(
        self, tiny: str, tmp_path: Path
    ) -> None:
        measure = Measured()
        run(tmp_path, cells(tiny, 2), measure)
        changed = [load(tiny, ["run.seed=1", "central.learning_rate=0.5"])]
        assert run(tmp_path, changed, measure) == [{"seed": 1, "rate": 0.5}]
        assert measure.seeds == [0, 1, 1]
        assert run(tmp_path, cells(tiny, 2), measure)[1] == {"seed": 1, "rate": 0.1}
        assert len(measure.seeds) == 3

    def test_another_version_of_the_program_measures_again(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure = Measured()
        run(tmp_path, cells(tiny, 2), measure)
        monkeypatch.setattr(grid, "__version__", "99")
        run(tmp_path, cells(tiny, 2), measure)
        assert measure.seeds == [0, 1, 0, 1]

    def test_a_cell_is_on_disk_before_the_next_one_of_its_worker_begins(self, tiny: str, tmp_path: Path) -> None:
        seen: list[int] = []

        def look(recipe: Recipe) -> dict[str, Any]:
            path = tmp_path / "cells.jsonl"
            seen.append(path.read_bytes().count(b"\n"))
            return {"seed": recipe.run.seed}

        run(tmp_path, cells(tiny, 4), look)
        assert seen == [0, 1, 2, 3]

    def test_ctrl_c_finishes_the_cells_in_work_keeps_them_and_says_how_to_go_on(
        self, tiny: str, tmp_path: Path
    ) -> None:
        measure = Measured()

        def interrupted(recipe: Recipe) -> dict[str, Any]:
            if recipe.run.seed == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            return measure(recipe)

        with pytest.raises(Stopped, match="The same command goes on from there"):
            run(tmp_path, cells(tiny, 6), interrupted)
        assert measure.seeds == [0, 1, 2]
        run(tmp_path, cells(tiny, 6), measure)
        assert measure.seeds == [0, 1, 2, 3, 4, 5]

    def test_a_cell_that_fails_loses_none_of_the_others(self, tiny: str, tmp_path: Path) -> None:
        measure = Measured()

        def failing(recipe: Recipe) -> dict[str, Any]:
            if recipe.run.seed == 2:
                raise UserError("the third one fails")
            return measure(recipe)

        with pytest.raises(UserError, match="the third one fails"):
            run(tmp_path, cells(tiny, 4), failing)
        assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2
        run(tmp_path, cells(tiny, 4), measure)
        assert measure.seeds == [0, 1, 2, 3]


TOUCHING = """
import os
from pathlib import Path

def measure(recipe):
    place = Path(os.environ["MEASURED_CELLS"])
    (place / f"{recipe.run.seed} in {os.getpid()}").touch()
    return {"seed": recipe.run.seed}
"""


def test_cells_run_in_processes_of_their_own_and_not_twice(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "touching.py").write_text(TOUCHING)
    (tmp_path / "touched").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEASURED_CELLS", str(tmp_path / "touched"))
    from touching import measure  # type: ignore[import-not-found]

    for _ in range(2):
        assert run(tmp_path / "grid", cells(tiny, 4), measure, workers=2) == [{"seed": seed} for seed in range(4)]
    touched = sorted(path.name.split(" in ") for path in (tmp_path / "touched").iterdir())
    assert [seed for seed, _ in touched] == ["0", "1", "2", "3"]
    assert str(os.getpid()) not in {process for _, process in touched}


# The reproduce command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["norm/table2"], "expected norm/quadratics, norm/table1, pfl-asr/TABLE or car/TABLE"),
        (["norm/table1", "--dataset", "mnist"], "expected one of digits, fashion-mnist, cifar10"),
        (["norm/table1", "--epsilons", "five"], "expected numbers above 0"),
        (["norm/table1", "--epsilons", "5,-1"], "expected numbers above 0"),
        (["norm/table1", "--epsilons", "5,inf"], "expected numbers above 0"),
        (["norm/table1", "--epsilons", "nan"], "expected numbers above 0"),
        (["norm/table1", "--epsilons", ""], "expected numbers above 0"),
        (["norm/table1", "--rates", "fast"], "expected numbers above 0"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_before_a_folder_is_made(
    words: list[str], said: str, tmp_path: Path, command: Command
) -> None:
    code, out, err = command("reproduce", *words, "--out", tmp_path / "results")
    assert (code, out) == (2, "")
    assert said in err
    assert repr(words[-1]) in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def check_result(document: dict[str, Any]) -> None:
    assert set(document) == {"command", "rows", "claims"}
    assert document["command"].startswith("confide reproduce norm/")
    assert document["rows"]
    for claim in document["claims"]:
        assert set(claim) == {"claim", "value", "threshold", "holds"}
        assert isinstance(claim["claim"], str)
        assert isinstance(claim["holds"], bool)
        assert all(isinstance(claim[key], int | float) for key in ("value", "threshold"))


def check_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [set(row) for row in read] == [set(row) for row in rows]
    for text, row in zip(read, rows, strict=True):
        assert text == {key: "" if value is None else str(value) for key, value in row.items()}


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def smaller(monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    """Let the grids be made of recipes that run in no time."""
    monkeypatch.setattr(norm, "load", lambda name, overrides: load(name, [*changes, *overrides]))


@pytest.mark.usefixtures("warm_processes")
def test_the_quadratics_are_reproduced_with_rows_claims_and_figures_and_quickly_the_second_time(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller(
        monkeypatch,
        "task={kind: convex/quadratics, users: 8, dimension: 5, rank: 3}",
        "sampling.cohort=8",
        "run.steps=30",
    )
    monkeypatch.setattr(norm, "QUADRATIC_BOUNDS", (40.0, 100.0))
    monkeypatch.setattr(norm, "QUADRATIC_RATES", (0.001, 0.002))
    words = ["reproduce", "norm/quadratics", "--seeds", "1", "--out", tmp_path, "--workers", "1", "--json"]
    code, out, _ = command(*words)
    assert code == 0
    document = json.loads(out)
    check_result(document)
    rows = document["rows"]
    assert [(r["start"], r["C"], r["eta"]) for r in rows] == [
        (start, bound, rate) for start in ("I1", "I2") for bound in (40, 100) for rate in (0.001, 0.002)
    ]
    assert all(r["epsilon"] <= 5 and r["seeds"] == 1 for r in rows)
    assert all(r["ratio"] == pytest.approx(r["normalise"] / r["clip"]) for r in rows)
    assert len(document["claims"]) == 3
    far = max(r["ratio"] for r in rows if r["C"] == 100)
    assert document["claims"][0]["value"] == far
    assert document["claims"][0]["holds"] == (far < 1)
    check_csv(tmp_path / "rows.csv", rows)
    assert all(is_png(tmp_path / f"figure{number}.png") for number in (1, 2, 3))
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2 * 2 * 2 * 2

    kept = (tmp_path / "cells.jsonl").read_bytes(), (tmp_path / "rows.csv").read_bytes()
    monkeypatch.setattr(grid, "ProcessPoolExecutor", None)  # nothing is left to run
    assert command(*words)[:2] == (0, out)
    assert ((tmp_path / "cells.jsonl").read_bytes(), (tmp_path / "rows.csv").read_bytes()) == kept


@pytest.mark.usefixtures("no_processes")
def test_table_1_is_reproduced_with_the_best_of_the_grid_and_the_whole_of_it(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller(monkeypatch, "run.steps=5")
    part = "--epsilons 5 --bounds 62.5,31.25 --rates 0.008,0.016"
    words = ["reproduce", "norm/table1", "--seeds", "2", *part.split(), "--out", tmp_path, "--workers", "1", "--json"]
    code, out, _ = command(*words)
    assert code == 0
    document = json.loads(out)
    check_result(document)
    assert part in document["command"]
    rows = document["rows"]
    assert [(r["rule"], r["epsilon"]) for r in rows] == [("clip", 5), ("normalise", 5), ("none", None)]
    assert all(r["lowest"] <= r["accuracy"] <= r["highest"] for r in rows)
    check_csv(tmp_path / "rows.csv", rows)
    assert is_png(tmp_path / "heatmap.png")
    with (tmp_path / "grid.csv").open(newline="") as file:
        whole = list(csv.DictReader(file))
    assert len(whole) == 2 * 2 * 2 + 2
    for row in rows:
        level = "" if row["epsilon"] is None else str(row["epsilon"])
        scores = [float(c["accuracy"]) for c in whole if (c["rule"], c["epsilon"]) == (row["rule"], level)]
        assert row["accuracy"] == pytest.approx(max(scores))
    best = {r["rule"]: r["accuracy"] for r in rows}
    ordering, share = document["claims"]
    assert (ordering["value"], ordering["threshold"]) == (best["normalise"], best["clip"])
    assert ordering["holds"] == (best["normalise"] >= best["clip"])
    assert 0 <= share["value"] <= 1
    assert share["holds"] == (share["value"] >= 0.9)

    monkeypatch.setattr(grid, "ProcessPoolExecutor", None)
    assert command(*words)[:2] == (0, out)
    text = command(*words[:-1])[1]
    for one in document["claims"]:
        assert f"{'holds' if one['holds'] else 'DOES NOT HOLD'}: {one['claim']}" in " ".join(text.split())
    assert str(tmp_path / "rows.csv") in text
