"""Claims about a delta that is too small for PLD or too large for the population, as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from scipy import stats  # type: ignore[import-untyped]

from confide.privacy.gaussian import SEEDED_END
from confide.privacy.mechanisms import Mechanism
from confide.runs.watch import read_run

Command = Callable[..., tuple[int, str, str]]
Sender = Callable[..., AbstractContextManager[None]]
SHORT = ("--set", "run.steps=2", "--set", "evaluation.last=1")


def train(command: Command, out: Path, delta: float, *more: str) -> tuple[str, str]:
    noise = f"privacy={{mechanism: gaussian, noise_multiplier: 3, delta: {delta}}}"
    code, said, warned = command("train", "convex/digits", "--out", out, "--set", noise, *SHORT, *more)
    assert code == 0, warned
    return said, warned


def test_a_run_names_the_accountant_that_answered(command: Command, tmp_path: Path) -> None:
    said, _ = train(command, tmp_path / "small", 1e-12)
    assert "RDP, poisson" in said
    assert "PLD" not in said
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    _, checked, _ = command("ledger", tmp_path / "small", "--json")
    assert summary["accountant"] == json.loads(checked)["accountant"] == "rdp"
    page = (tmp_path / "small/report.html").read_text()
    assert "by RDP accounting of 2 releases" in page
    beyond = f"{stats.norm.sf(SEEDED_END - 1 / 3):.1e}"
    assert "ends at 6.56 deviations, which delta does not count" in page
    assert f"shows beyond that end with probability {beyond} in a step" in page


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_a_delta_of_one_in_the_population_is_warned_of(command: Command, tmp_path: Path, as_json: list[str]) -> None:
    for name, delta, due in [("at", 1 / 287, True), ("below", 0.99 / 287, False)]:
        said, warned = train(command, tmp_path / name, delta, *as_json)
        assert ("is not below 1/population" in warned) == due
        assert "1/population" not in said


def test_a_delta_above_one_in_the_population_is_refused_unless_it_is_asked_for(
    command: Command, tmp_path: Path
) -> None:
    large = ("train", "convex/digits", "--out", tmp_path / "run", "--set", "privacy.delta=0.1", *SHORT)
    code, _, said = command(*large)
    assert code == 2
    assert "privacy.delta=0.1 is above 1 / population = 0.00348 (287 users)" in said
    assert "privacy.large_delta=true" in said
    assert not (tmp_path / "run").exists()
    code, _, said = command(*large, "--set", "privacy.large_delta=true")
    assert code == 0
    assert "is not below 1/population" in said


def test_every_epsilon_on_the_way_is_the_ledgers(command: Command, tmp_path: Path, signal_after: Sender) -> None:
    """One number everywhere: a bound of a later step that is shown as today's is another number."""
    out = tmp_path / "run"
    with signal_after(13):
        code, _, _ = command("train", "convex/digits", "--out", out)
    assert code == 130
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    known = {r["step"]: r["epsilon"] for r in records if "epsilon" in r}
    spent = json.loads(command("ledger", out, "--json")[1])["epsilon"]
    watched = read_run(out).to_json()["epsilon"]
    assert list(known) == [10, 13]
    assert known[10] < known[13] == spent == watched


def test_the_epsilon_of_the_progress_line_is_rounded_up() -> None:
    assert [Mechanism.progress(value) for value in (1.994001, 0.0012, 5.0)] == [
        "epsilon 1.995", "epsilon 0.0012", "epsilon 5",
    ]  # fmt: skip
