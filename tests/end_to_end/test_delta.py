"""Claims about a delta that is too small for PLD or too large for the population, as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy import stats  # type: ignore[import-untyped]

from confide.privacy.gaussian import SEEDED_END
from confide.privacy.mechanisms import Mechanism

Command = Callable[..., tuple[int, str, str]]
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
    train(command, tmp_path / "fine", 1e-9, *as_json)
    population = json.loads((tmp_path / "fine/summary.json").read_text())["population"]
    for name, delta, due in [("at", 1 / population, True), ("below", 0.99 / population, False)]:
        said, warned = train(command, tmp_path / name, delta, *as_json)
        assert ("is not below 1/population" in warned) == due
        assert "1/population" not in said


def test_the_epsilon_of_the_progress_line_is_rounded_up() -> None:
    assert [Mechanism.progress(value) for value in (1.994001, 0.0012, 5.0)] == [
        "epsilon 1.995", "epsilon 0.0012", "epsilon 5",
    ]  # fmt: skip
