"""Workloads go through the real loop, candidates take turns, and what is missing is said and not fatal."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.bench import compare, recipes, scaling
from confide.bench.compare import Candidate, Measured
from confide.bench.figures import draw_ratios, draw_scaling
from confide.build import make_task, make_trainer
from confide.errors import UserError
from confide.federated.cohort import Way, part_size
from confide.federated.parameters import Layout
from confide.runs.simulation import simulate

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"users": 40, "distinct": 20, "width": 60, "hidden": 30, "examples": 12, "cohort": 7},
    "speech": {"users": 4, "utterances": 1, "frames": 60, "labels": 3, "layers": 1, "width": 16, "cohort": 2},
    "vector": {"users": 9, "parameters": 3001, "tensors": 7, "cohort": 3},
    "states": {"users": 9, "distinct": 4, "utterances": 2, "frames": 20, "width": 16, "labels": 3, "cohort": 5},
    "queries": {"users": 9, "width": 16, "documents": 3, "cohort": 9},
}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_workload_is_a_task_like_any_other(name: str) -> None:
    recipe = getattr(recipes, name)(2, **SMALL[name])
    records: list[dict[str, Any]] = []
    loop, state = simulate(recipe, watch=lambda _, __, record: records.append(record))
    assert state.step == 2
    assert [record["cohort"] for record in records] == [SMALL[name]["cohort"]] * 2
    assert all(record["not_finite"] == 0 and record["noise"] > 0 for record in records)
    assert loop.ledger.count == 2


def test_the_workloads_have_the_sizes_that_the_comparison_names() -> None:
    sizes = {}
    for name in (make.__name__ for make in recipes.MAKE.values()):
        recipe = getattr(recipes, name)(1)
        if name == "vector":
            assert (recipe.task.parameters, recipe.task.tensors) == (255_000_000, 300)
            continue
        task = make_task(recipe.task, 0)
        layout = Layout.of(task.initial_parameters())
        sizes[name] = (len(task.examples), recipe.sampling.cohort, int(task.examples[0]), layout.size)
        if name == "mlp":
            assert part_size(task, recipe.local, layout) > 1  # the engine chose factors by itself
    assert sizes == {
        "mlp": (1000, 100, 20, 784 * 128 + 128 + 128 * 10 + 10), "speech": (100, 16, 4, 1_163_695),
        "states": (1560, 312, 3, 29 * 384 + 29), "queries": (4459, 4459, 1, 2 * 384 + 2),
    }  # fmt: skip
    assert list(recipes.MAKE) == list(compare.WORKLOADS)


@pytest.mark.parametrize(
    ("name", "way", "off"), [("mlp", "low rank", 1e-4), ("states", "short cut", 2e-6), ("queries", "low rank", 1e-4)]
)
def test_the_fast_way_of_a_workload_is_the_plain_one(name: str, way: Way, off: float) -> None:
    """Bounded by the same rule, all users' updates add up to what training one after the other gives, in float32.

    Norms of factors are rounded up, so that what low rank sends is a little shorter.
    """
    recipe = getattr(recipes, name)(1, **SMALL[name])
    task = make_task(recipe.task, 0)
    trainer = make_trainer(recipe)
    draw, layout = np.random.default_rng(1), Layout.of(task.initial_parameters())
    central = torch.from_numpy(draw.normal(size=layout.size).astype(np.float32)) / 4
    users = np.arange(SMALL[name]["users"])
    found, wanted = torch.zeros_like(central), torch.zeros_like(central)
    tally = trainer.add_part(central, users, 0, found)
    assert trainer.taken[way] == len(users)
    loss = 0.0
    for user in users:
        one = trainer.plain.update(central, int(user), 0)
        one.weighted_sum(trainer.bounder.factors(one.norms) / len(users), wanted)
        loss += float(one.losses)
    assert tally.loss == pytest.approx(loss, rel=1e-5)
    assert wanted.norm() > 1e-3
    assert float((found - wanted).norm() / wanted.norm()) < off


def test_users_beyond_the_distinct_ones_repeat_their_data() -> None:
    task = make_task(recipes.mlp(1, **SMALL["mlp"]).task, 0)
    draw = np.random.default_rng(0)
    first, again, other = (task.batch(user, None, draw)[0] for user in (3, 23, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def _script(tmp_path: Path, body: str) -> Candidate:
    """A candidate that is a little program; the name of its module is all that a runner knows."""
    (tmp_path / "toy.py").write_text(body)
    return Candidate("toy", "", ("toy",))


def _runner(tmp_path: Path, body: str) -> compare.Runner:
    return compare.Runner(_script(tmp_path, body), Path(sys.executable), tmp_path, tmp_path / "log")


def test_a_runner_makes_a_round_when_told_and_keeps_what_the_system_prints_apart(tmp_path: Path) -> None:
    (tmp_path / "confide").symlink_to(Path(compare.__file__).parent.parent)
    body = "from confide.bench.protocol import serve\ndef one():\n    print('more of it')\n    return {'client': 2.0}\n"
    runner = _runner(tmp_path, f"{body}serve(one)")
    try:
        assert runner.next_answer() == {"ready": True}
        answers = [runner.round() for _ in range(3)]
        assert all(answer["client"] == 2.0 and 0 <= answer["seconds"] < 60 for answer in answers)
        peak = compare.peak_mib(runner.process.pid)
        assert peak is None or 1 < peak < 1000
    finally:
        runner.end()
    assert runner.log.read_text().count("more of it") == 3


def test_a_candidate_that_dies_is_named_with_its_last_words_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = Candidate("dies", "", ("confide.bench.ours", "Z"))
    ours = Candidate("confide", "", ("confide.bench.ours", "C", "--parameters", "2000", "--users", "9"))
    missing = Candidate("pfl", "1 process", ("x",), "pfl")
    results = compare.compare([dies, ours, missing], tmp_path / "peers", rounds=2, warm_up=1)
    assert "invalid choice" in results[0].problem
    assert results[1].problem == ""
    assert [len(times) for times in results[1].times.values()] == [2, 2, 2]
    assert "setup_peers.sh" in results[2].problem
    rows = compare.table("C", results)
    assert [row["ratio"] for row in rows if row["candidate"] == "confide"] == [1.0, 1.0]
    assert "setup_peers.sh" in compare.as_text(rows)


def test_silence_is_not_waited_for_without_end(tmp_path: Path) -> None:
    runner = _runner(tmp_path, "import time\ntime.sleep(60)\n")
    try:
        with pytest.raises(UserError, match=r"no answer in 0\.2 s"):
            runner.next_answer(0.2)
    finally:
        runner.process.kill()
        runner.end()


def _measured(system: str, setting: str, seconds: list[float]) -> Measured:
    return Measured(Candidate(system, setting, ()), {"seconds": seconds}, 100.0)


def test_ratios_are_to_the_best_setting_of_this_project() -> None:
    results = [_measured("confide", "1 workers", [4.0, 4.0, 9.0]), _measured("confide", "2 workers", [2.0, 2.0, 0.1]),
               _measured("pfl", "1 process", [16.0, 16.0, 1.0])]  # fmt: skip
    assert [row["ratio"] for row in compare.table("A", results)] == [2.0, 1.0, 8.0]


def test_figures_are_drawn_also_where_memory_is_unknown(tmp_path: Path) -> None:
    points = [scaling.Point("cohort, workload A", x, x / 1e4, None if x > 100 else 300.0) for x in scaling.COHORTS]
    points += [scaling.Point("processes, workload B", x, 2.0 / x, 300.0 * x) for x in (1, 2)]
    assert draw_scaling(tmp_path / "scaling.png", points).stat().st_size > 10_000
    rows = compare.table("A", [_measured("confide", "", [1.0]), _measured("pfl", "", [8.0])])
    assert draw_ratios(tmp_path / "ratios.png", rows).stat().st_size > 5_000
    assert scaling.growth(points, "processes, workload B") == {
        "curve": "processes, workload B", "from": 1, "to": 2, "time": 0.5, "memory": 2.0,
    }  # fmt: skip


def test_the_command_writes_rows_raw_times_and_a_figure(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = command(
        "bench",
        "C",
        "--out",
        tmp_path / "out",
        "--peers",
        tmp_path / "none",
        "--rounds",
        1,
        "--warm-up",
        0,
        "--parameters",
        3000,
        "--json",
    )
    assert code == 0
    rows = json.loads(out)["rows"]
    measured = {row["candidate"] for row in rows if not row["problem"]}
    assert measured == {"confide", "one subtraction, norm and addition; normal_"}
    assert {row["candidate"] for row in rows if row["problem"]} == {"pfl", "flower"}, "left out, and named"
    with (tmp_path / "out" / "ratios.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "out" / "C.json").exists()
    assert (tmp_path / "out" / "ratios.png").exists()


def test_an_unknown_workload_or_system_is_refused(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = command("bench", "Z", "--out", tmp_path)
    assert (code != 0, "expected any of A, B, C, D, E and scaling" in err) == (True, True)
    code, _, err = command("bench", "A", "--only", "tff", "--out", tmp_path)
    assert (code != 0, "expected pfl, flower, fedjax" in err) == (True, True)
