"""Claims about correlated system noise: never written down, begun anew after a stop, never charged for too little."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from confide import recipe
from confide.errors import UserError
from confide.privacy import factorisation, ledger
from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.gaussian import grid
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.mechanisms.banded import Banded
from confide.privacy.plan import Plan, make_plan
from confide.privacy.sampling import Sampling
from confide.run import Loop
from confide.runs import checkpoint, folder

torch.set_num_threads(1)
Array = NDArray[np.float64]
LONG = 50_000
SAMPLED = ("privacy.mechanism=banded", "sampling.kind=cyclic_poisson", "sampling.cohort=40", "privacy.bands=3")
TURNS = (*SAMPLED, "sampling.kind=cyclic", "sampling.cohort=90")


@pytest.fixture(autouse=True)
def no_figures_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.report.page.write_report", lambda *_: None)


def digits(*overrides: str) -> recipe.Recipe:
    quick = ("privacy.target_epsilon=null", "privacy.noise_multiplier=3", "evaluation.last=1", "run.steps=8")
    return recipe.load("convex/digits", [*quick, *overrides])


def plan_of(kind: str, source: str = "system", steps: int = 12, bands: int = 4) -> Plan:
    privacy = {"mechanism": "banded", "delta": 1e-5, "noise_multiplier": 2.0, "bands": bands, "source": source}
    sampling = Sampling.model_validate({"kind": kind, "cohort": 10})
    return make_plan(Privacy.model_validate(privacy), sampling, np.full(100, 0.01), 2.0, steps, 0)


def release(plan: Plan, step: int, line: int, memory: dict[str, Tensor], value: float = 0.0) -> Tensor:
    total = torch.full((LONG,), value, dtype=torch.float64)
    plan.mechanism.release(total, Occasion(plan.event, np.arange(0), step, 0, memory, line))
    return total


def deviation(plan: Plan) -> float:
    assert isinstance(plan.mechanism, Banded)
    assert plan.event.sensitivity is not None
    return plan.event.noise_multiplier * plan.event.sensitivity * plan.mechanism.column


def coefficients(plan: Plan) -> Array:
    assert isinstance(plan.mechanism, Banded)
    return np.array(plan.mechanism.coefficients)


def misfit(rows: list[Tensor], matrix: Array, scale: float) -> float:
    """How far C times these rows is from independent noise of this scale, in standard errors."""
    fresh = matrix @ torch.stack(rows).numpy() / scale
    found = fresh @ fresh.T / LONG
    error = np.where(np.eye(len(rows)) > 0, math.sqrt(2 / LONG), math.sqrt(1 / LONG))
    return float(np.abs((found - np.eye(len(rows))) / error).max())


def lower(c: Array, rounds: int) -> Array:
    return np.asarray(sum(value * np.eye(rounds, k=-lag) for lag, value in enumerate(c)))


@pytest.mark.parametrize("kind", ["cyclic", "cyclic_poisson"])
@pytest.mark.parametrize("source", ["seeded", "system"])
def test_the_released_noise_is_correlated_as_the_factorisation_says_and_has_its_scale(kind: str, source: str) -> None:
    plan = plan_of(kind, source)
    memory = plan.mechanism.start_memory(torch.zeros(LONG, dtype=torch.float64))
    rows = [release(plan, step, step, memory, value=3.7) - 3.7 for step in range(12)]
    c, scale = coefficients(plan), deviation(plan)
    column = float(np.linalg.norm(c)) if kind == "cyclic_poisson" else factorisation.sensitivity(c, 12, 10)
    assert scale == pytest.approx(2.0 * 2.0 / 10 * column)  # z, and the largest contribution: 2 C / S
    assert misfit(rows, lower(c, 12), scale) < 5
    assert misfit(rows, lower(c, 12), 1.03 * scale) > 5
    assert misfit(rows, np.eye(12), scale) > 50


def test_noise_of_the_system_is_released_on_a_grid_whatever_the_sum() -> None:
    plan = plan_of("cyclic_poisson")
    step = grid(deviation(plan))
    for number, value in enumerate((0.0, 0.123456789, 5.4321)):
        found = release(plan, number, number, {}, value) / step
        assert torch.equal(found, found.round())


def test_after_a_gap_in_the_ledger_the_noise_begins_anew() -> None:
    """Rows before and after are independent: C of each part alone makes both of them independent noise."""
    for source in ("seeded", "system"):
        plan = plan_of("cyclic_poisson", source)
        memory = plan.mechanism.start_memory(torch.zeros(LONG, dtype=torch.float64))
        lines = [0, 1, 2, 3, 7, 8, 9]  # after line 3, three releases that this memory does not know
        rows = [release(plan, step, line, memory) for step, line in enumerate(lines)]
        apart = lower(coefficients(plan), 7)
        apart[4:, :4] = 0
        assert misfit(rows, apart, deviation(plan)) < 5
        assert misfit(rows, lower(coefficients(plan), 7), deviation(plan)) > 50


def test_a_checkpoint_of_an_older_version_is_not_gone_on_with() -> None:
    plan = plan_of("cyclic", "seeded")
    with pytest.raises(UserError, match="older version"):
        release(plan, 0, 0, factorisation.init(4, torch.zeros(LONG, dtype=torch.float64)))


@pytest.mark.parametrize("settings", [SAMPLED, TURNS], ids=["sampled", "turns"])
def test_no_file_of_a_run_holds_the_noise_and_the_run_is_for_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    made: list[Tensor] = []
    original = factorisation.remember

    def spy(state: dict[str, Tensor], row: Tensor) -> None:
        made.append(row.clone())
        original(state, row)

    monkeypatch.setattr(factorisation, "remember", spy)
    saved: list[bytes] = []
    save = checkpoint.save

    def keep(where: Path, *rest: Any) -> None:
        save(where, *rest)
        saved.extend(path.read_bytes() for path in where.iterdir() if path.is_file())

    monkeypatch.setattr(checkpoint, "save", keep)
    summary = folder.train(digits(*settings, "privacy.source=system"), tmp_path / "run", quiet=True)
    assert summary["for_release"] is True
    assert len(made) == 8
    needles = [row[start : start + 3].numpy().tobytes() for row in made for start in (0, 100, 500)]
    files = [*saved, *(path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file())]
    assert not [needle for needle in needles for content in files if needle in content]
    content = safetensors.numpy.load((tmp_path / "run" / checkpoint.FILE).read_bytes())
    assert not [name for name in content if name.startswith("noise/")]
    seeded = folder.train(digits(*settings), tmp_path / "seeded", quiet=True)
    assert seeded["for_release"] is False
    held = safetensors.numpy.load((tmp_path / "seeded" / checkpoint.FILE).read_bytes())
    assert any(made[-1].numpy().tobytes() in row.tobytes() for row in held["noise/ring"]), "the search can find it"


@pytest.mark.parametrize("settings", [SAMPLED, TURNS], ids=["sampled", "turns"])
def test_a_killed_run_pays_for_the_step_that_it_makes_twice_and_a_stopped_one_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    wanted = digits(*settings, "privacy.source=system")
    straight = folder.train(wanted, tmp_path / "straight", quiet=True)["epsilon"]
    original = Loop.step

    class Killed(BaseException):
        pass

    def run(name: str, after: bool) -> dict[str, Any]:
        def step(self: Loop, state: Any) -> Any:
            found = original(self, state) if after or state.step != 5 else None
            if found is None or state.step == 6:
                raise Killed
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "step", step)
            with pytest.raises(Killed):
                folder.train(wanted, tmp_path / name, quiet=True)
        return folder.resume(tmp_path / name, quiet=True)

    assert run("stopped", after=False)["epsilon"] == straight
    killed = run("killed", after=True)
    book = Ledger.read(tmp_path / "killed" / ledger.FILE)
    assert [entry.step for entry in book.entries] == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    event = book.entries[0].event
    if event.sampler == "cyclic_poisson":  # groups 0, 1, 2 have 3, 3 and 2 turns, and group 2 made one of them twice
        assert killed["epsilon"] == straight
        assert [charged.turns for charged in book.charged()] == [3]
    else:  # two whole columns and a cut one were planned; three whole ones are charged for, not two runs
        assert straight < killed["epsilon"] < epsilon([event] * 2, 1e-5, "pld")


# What is charged, against the farthest that a user can move what was released.


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """Bands, separation, rounds, and the stretches of steps that were made without a stop."""
    bands, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    separation = draw(st.integers(bands, bands + 3))
    stretches, done, made = [], 0, 0
    while made < rounds:
        begin = draw(st.integers(0, done))
        end = draw(st.integers(begin + 1, rounds))
        stretches.append(list(range(begin, end)))
        done, made = end, max(made, end)
        if len(stretches) == 5:
            break
    return bands, separation, rounds, stretches


def moved_most(c: Array, separation: int, stretches: list[list[int]]) -> tuple[float, int]:
    """The largest squared shift of C G over all stretches together, and the most turns, of a user of any group."""
    shifts, turns = [], []
    for group in range(separation):
        columns = [
            float(np.square(c[: stretch[-1] - step + 1]).sum())
            for stretch in stretches
            for step in stretch
            if step % separation == group
        ]
        shifts.append(sum(columns))
        turns.append(len(columns))
    return max(shifts), max(turns)


@settings(max_examples=200, deadline=None)
@given(histories())
def test_a_ledger_never_charges_less_than_a_user_can_move_what_was_released(
    history: tuple[int, int, int, list[list[int]]],
) -> None:
    """Every stretch begins the noise anew, so its columns are cut at its own end and stand beside the others."""
    bands, separation, rounds, stretches = history
    c = factorisation.root_coefficients(bands)
    for sampler in ("cyclic", "cyclic_poisson"):
        event = Event(
            sampler, 1 / (2 * separation), 10, 100, 2.0, 1.0, separation=separation, rounds=rounds, bands=bands
        )
        book = Ledger.create(None, {"restarts": True, "fresh_cohorts": True})
        for stretch in stretches:
            for step in stretch:
                book.record(step, event, "here", repeatable=False)
        [charged] = book.charged()
        squared, turns = moved_most(c, separation, stretches)
        if sampler == "cyclic_poisson":
            assert charged.noise_multiplier == 2.0
            assert charged.turns >= turns
            assert charged.turns == max(turns, math.ceil(rounds / separation)), "and no turn too many"
        else:
            # Noise of this deviation for a shift of that length.
            z = 2.0 * factorisation.sensitivity(c, rounds, separation) / math.sqrt(squared)
            assert charged.noise_multiplier <= z * (1 + 1e-12)
            assert charged.noise_multiplier >= 2.0 / math.sqrt(len(stretches)) * (1 - 1e-12)


def test_a_ledger_without_restarts_still_charges_a_whole_run_for_every_repetition() -> None:
    event = replace(plan_of("cyclic").event, rounds=5)
    book = Ledger.create(None, {})
    for step in (0, 1, 2, 1, 2, 3):
        book.record(step, event, "here", repeatable=False)
    assert book.charged() == [event, event]
