"""CAR's tables: which rows there are, how their rates are chosen, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from confide.build import make_task
from confide.errors import UserError
from confide.recipe import Recipe, load
from confide.reproduce import car, car_claims, car_tables, grid
from confide.reproduce.car_tables import BOTH, HEAD, METHODS, Cell

RECIPE = """\
task:
  kind: retrieval
  encoder: {{source: {model}, pooling: mean}}
  data: {{kind: embedded, documents: 6, queries_per_document: 10, households: 3}}
  clients: {{kind: even, clients: 1}}
  cache: {cache}
sampling: {{kind: fixed, cohort: 1}}
local: {{epochs: 1, batch_size: 8, learning_rate: 0.1}}
bounding: {{rule: none}}
central: {{kind: sgd, learning_rate: 1}}
evaluation: {{every: 1}}
run: {{steps: 2}}
"""
TWO = ("task.clients.clients=2", "sampling.cohort=2")


@pytest.fixture
def base(tmp_path: Path, tiny_model: Callable[..., Path]) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(RECIPE.format(model=tiny_model("masked"), cache=tmp_path / "states"))
    return str(path)


@pytest.fixture
def cells_here(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Cells run in this process; every recipe that was run."""
    ran: list[Recipe] = []

    def run(folder: Path, cells: list[Recipe], measure: Any, *_: Any) -> list[dict[str, Any]]:
        ran.extend(cells)
        return [measure(cell) for cell in cells]

    monkeypatch.setattr(grid, "run_cells", run)
    return ran


def test_the_tables_have_the_papers_rows_and_every_recipe_is_valid() -> None:
    assert [cell.paper for cell in car_tables.figure2()] == [12.36, 96.79, 97.02, 99.95]
    assert [cell.paper for cell in car_tables.table1()] == [97.02, 97.24, None, 91.96, 99.95, 99.50, 99.64]
    assert len(car_tables.table2()) == 10
    assert [cell.paper for cell in car_tables.table3()] == [94.18, None, 93.39, 92.92, None]
    for table in car_tables.TABLES.values():
        for cell in table():
            rate = cell.rates[0] if cell.rates else None
            recipe = car._recipe(cell, [], rate, 1, "task.data.held_out=0.2")
            assert (recipe.run.seed, recipe.task.data.fold) == ((0, 1) if cell.folds else (1, None))  # type: ignore[union-attr]
            if rate is not None:
                assert recipe.local.learning_rate == rate


def test_a_run_that_two_tables_have_is_one_cell() -> None:
    def recipe(cell: Cell) -> str:
        return car._recipe(cell, [], cell.rates[0] if cell.rates else None, 0).digest

    first = {recipe(cell) for cell in car_tables.figure2()}
    assert len(first & {recipe(cell) for cell in car_tables.table1()}) == 2  # both that are central
    assert len({recipe(cell) for cell in car_tables.table1()} & {recipe(cell) for cell in car_tables.table2()}) == 6


def test_rates_are_chosen_without_the_test_rows_and_kept_for_all_seeds(
    base: str, tmp_path: Path, cells_here: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Cell({"method": HEAD, "clients": 1, "noise": "none"}, base, (), (0.01, 0.5), 97.0),
        Cell({"method": HEAD, "clients": 2, "noise": "none"}, base, TWO, (0.01, 0.5), None),
    ]
    monkeypatch.setattr(car, "TABLES", {"table2": lambda: rows})
    source = load(base).task.encoder.source  # type: ignore[union-attr]
    result = car.reproduce("table2", tmp_path / "out", source, None, 2, 1, quiet=True)
    chosen, tested = cells_here[:8], cells_here[8:]
    assert all(cell.task.data.held_out == 0.2 for cell in chosen)  # type: ignore[union-attr]
    assert all(cell.task.data.held_out is None for cell in tested)  # type: ignore[union-attr]
    assert [cell.run.seed for cell in tested] == [0, 1, 0, 1]
    assert {cell.local.learning_rate for cell in tested} <= {0.01, 0.5}
    assert result.rows[0]["speed_up"] == ""
    assert result.rows[1]["speed_up"] > 0, "of a run of milliseconds: how large it is tells nothing"
    assert "97.0" in result.text
    for name in ("rows.csv", "accuracy.png", "curves.png"):
        assert (tmp_path / "out" / name).stat().st_size > 100


def test_clients_at_once_take_the_time_of_the_slowest(base: str) -> None:
    found = car.measure(car._recipe(Cell({}, base, TWO), [], 0.1, 0))
    assert 0.3 * found["seconds"] < found["at_once"] < found["seconds"]
    assert len(found["curve"]) == 2
    assert found["epsilon"] is None


def test_the_speed_up_is_the_time_of_one_client_over_that_of_several_at_once() -> None:
    rows: list[dict[str, Any]] = [{"method": HEAD, "clients": clients, "noise": "none"} for clients in (1, 2)]
    car._add_speed_ups(rows, [[{"seconds": 6.0, "at_once": 6.0}], [{"seconds": 6.5, "at_once": 3.0}]])
    assert [row["speed_up"] for row in rows] == ["", 2.0]
    assert [row["speed_up_paper"] for row in rows] == ["", "1.11"]


def test_search_is_scored_without_training(base: str) -> None:
    found = car.measure(car._recipe(Cell({}, base, ("task.method=search",)), [], None, 0))
    assert found["curve"] == []
    assert 0 <= found["accuracy"] <= 100


def test_table_2_claims_that_clients_at_once_are_faster_and_lose_little() -> None:
    def row(clients: int, accuracy: float, speed_up: float | str, noise: str = "none") -> dict[str, Any]:
        return {"method": HEAD, "clients": clients, "noise": noise, "accuracy": accuracy, "speed_up": speed_up}

    found = car_claims.claims_of(
        "table2", [row(1, 98.6, ""), row(2, 98.7, 1.9), row(3, 98.0, 0.9), row(2, 90.0, "", "fixed")]
    )
    assert [(one["value"], one["holds"]) for one in found] == [(1.9, True), (-0.1, True), (0.9, False), (0.6, False)]


def test_claims_are_those_of_the_numbers() -> None:
    rows = [
        {"method": method, "accuracy": value} for method, value in zip(METHODS, (60.0, 96.0, 97.5, 98.6), strict=True)
    ]
    assert all(one["holds"] for one in car_claims.claims_of("figure2", rows))
    assert car_claims.claims_of("figure2", rows[:3]) == []
    rows[2]["accuracy"] = 98.7
    assert [one["claim"] for one in car_claims.claims_of("figure2", rows) if not one["holds"]] == [
        "adapter + head is the best of the four"
    ]
    rows = [
        {"method": method, "scenario": scenario, "accuracy": value}
        for method in (HEAD, BOTH)
        for scenario, value in (("central", 98.0), ("FL", 97.6), ("FL + DP, fixed", 96.0))
    ]
    assert [one["holds"] for one in car_claims.claims_of("table1", rows)] == [True, False, True, False]
    assert [one["holds"] for one in car_claims.claims_of("table1", rows[:3])] == [True, False]


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot reproduce car/table9; expected one of figure2"):
        car.reproduce("table9", tmp_path, "minilm", None, 1, 1)
    with pytest.raises(UserError, match="car/table3 has no row with method 'head'"):
        car.reproduce("table3", tmp_path, "minilm", None, 1, 1, method="head")


def test_folds_share_a_seed_and_choose_their_rate_on_the_first(
    base: str, tmp_path: Path, cells_here: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = tmp_path / "messages"
    messages.write_text("".join(f"{'spam' if n % 4 == 0 else 'ham'}\tmessage {n}\n" for n in range(24)))
    data = f"task.data={{kind: sms_spam, file: {messages}}}"
    rows = [
        Cell({"method": method}, base, (f"task.method={METHODS[method]}", data), rates, folds=True)
        for method, rates in zip(METHODS, ((), (), (0.01, 0.5), ()), strict=True)
    ]
    monkeypatch.setattr(car, "TABLES", {"folds": lambda: rows})
    source = load(base).task.encoder.source  # type: ignore[union-attr]
    result = car.reproduce("folds", tmp_path / "out", source, None, 2, 1, quiet=True)
    chosen, tested = cells_here[:2], cells_here[2:]
    assert {(cell.task.data.fold, cell.task.data.held_out) for cell in chosen} == {(0, 0.2)}  # type: ignore[union-attr]
    assert [(cell.run.seed, cell.task.data.fold) for cell in tested] == [(0, 0), (0, 1)] * 4  # type: ignore[union-attr]
    assert len(result.claims) == 5


def test_ways_are_compared_fold_by_fold() -> None:
    """Folds differ much more than ways here, and yet the difference is clear."""
    scores = dict(zip(METHODS, ("50 60 70", "80 90 99", "81 90 99", "82 92 100"), strict=True))
    found = car_claims.claims_of("folds", [{"method": method, "each": own} for method, own in scores.items()])
    ahead, level = found[0], car_claims.paired("", [81.0, 90.0, 99.0], [80.0, 90.0, 99.0])
    assert (ahead["value"], ahead["threshold"], ahead["holds"]) == (1.67, 0.67, True)
    assert (level["value"], level["holds"]) == (0.33, False)


def test_table_3_compares_clients_with_the_first_row_alone_and_a_warm_up_with_none() -> None:
    rows: list[dict[str, Any]] = [
        {"clients": clients, "noise": noise, "scenario": name, "accuracy": 87.0, "each": each}
        for name, clients, noise, each in (
            ("central", 1, "none", "87"), ("deeper", 1, "none", "87"), ("FL", 3, "none", "87"),
            ("warm", 3, "adaptive", "84 85 86"), ("cold", 3, "adaptive", "80 82 82"),
        )
    ]  # fmt: skip
    seconds = ((6.0, 6.0), (60.0, 60.0), (6.0, 2.5), (6.0, 3.0), (6.0, 3.0))
    car._add_speed_ups(rows, [[{"seconds": whole, "at_once": at_once}] for whole, at_once in seconds])
    assert [row["speed_up"] for row in rows] == ["", "", 2.4, 2.0, 2.0]
    found = car_claims.claims_of("table3", rows)
    assert [(one["value"], one["holds"]) for one in found[2:]] == [(2.4, True), (3.67, True)]
    rows[3]["each"] = "84 81 83"
    assert not car_claims.claims_of("table3", rows)[-1]["holds"]


def test_encoders_and_poolings_are_compared_seed_by_seed() -> None:
    """SmolLM2 is ahead with the mean alone; the mean is ahead for SmolLM2 alone."""
    scores = {("minilm", "mean"): "80 81 82", ("minilm", "last"): "80 81 83",
              ("smollm2", "mean"): "84 86 86", ("smollm2", "last"): "79 83 81"}  # fmt: skip
    rows = [
        {
            "encoder": encoder,
            "pooling": pooling,
            "each": each,
            "accuracy": 40.0,
            "top_k": 92.0 if pooling == "mean" else 80.0,
        }
        for (encoder, pooling), each in scores.items()
    ]
    found = car_claims.claims_of("figure6", rows)
    assert [(one["value"], one["holds"]) for one in found] == [
        (4.33, True),
        (-0.33, False),
        (-0.33, False),
        (4.33, True),
    ]
    of_arxiv = car_claims.claims_of("figure7", rows)
    assert [one["holds"] for one in of_arxiv[:4]] == [True, False, True, False], (
        "ten that have twice as much are too few"
    )
    assert of_arxiv[4:] == found


def test_only_the_adapter_of_a_random_start_is_another(base: str, tmp_path: Path) -> None:
    plain = load(base, ["task.method=adapter_head"])
    begun = make_task(car._begin_at_random(plain, tmp_path).task, 0).starting_parameters()
    fresh = make_task(plain.task, 0).starting_parameters()
    assert [name for name in fresh if not torch.equal(fresh[name], begun[name])] == ["adapter"]
    lengths = begun["adapter"].norm(dim=0)
    assert 0.7 < float(lengths.mean()) < 1.3, "a column of the identity has the length 1"


def test_steps_are_counted_to_the_first_that_reaches_the_goal() -> None:
    assert car._steps_to([(1, 90.0), (2, 95.0), (3, 94.0)], 95.0) == 2
    assert car._steps_to([(1, 90.0), (2, 94.9)], 95.0) == 3
    rows = [{"adapter": name, "steps": steps} for name, steps in (("identity", "2 3 2"), ("random", "5 6 6"))]
    assert [(one["value"], one["holds"]) for one in car_claims.claims_of("start", rows)] == [(3.33, True)]
    assert not car_claims.claims_of("start", rows[::-1])[0]["holds"]
