"""A budget of people is never under-counted: not by two runs at once, a kill, a full disk, an edit or a resume."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide.errors import UserError
from confide.privacy.accountant import epsilon, renyi_cost
from confide.privacy.budget import Budget, BudgetSpent, by_run, composed
from confide.privacy.events import Event
from confide.privacy.ledger import Entry, Ledger
from confide.privacy.profile import covering_mu, gaussian_delta
from confide.privacy.renyi_filter import ORDERS, RenyiFilter
from confide.recipe import load
from confide.runs import folder
from confide.runs.simulation import simulate


def gaussian(z: float, users: int = 12) -> Event:
    return Event("everyone", 1.0, users, users, z, 1.0)


def sampled(z: float, rate: float = 0.5, users: int = 12) -> Event:
    return Event("poisson", rate, rate * users, users, z, 1.0)


def make(path: Path, budget: float = 3.0) -> Budget:
    return Budget.create(path / "budget.jsonl", budget, 1e-5, "twelve people")


@given(st.lists(st.tuples(st.floats(0.5, 30), st.sampled_from([0.01, 0.2, 1.0])), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_the_filter_never_states_less_than_ordinary_composition(steps: list[tuple[float, float]]) -> None:
    """It holds for more, so what it takes is within the budget by PLD as well, and its loss is never below that."""
    life, taken = RenyiFilter(5.0, 1e-5), list[Event]()
    for z, rate in steps:
        event = gaussian(z, 100) if rate == 1 else sampled(z, rate, 100)
        if life.takes(event):
            life.take(event)
            taken.append(event)
    exact = epsilon(taken, 1e-5, "pld")
    assert exact <= life.loss + 1e-9
    assert exact <= 5.0
    assert 0 < life.used <= 1 or not taken


@pytest.mark.parametrize("event", [gaussian(2.0), Event("local", 1.0, 12, 12, 4.0, 1.0)])
def test_the_filter_of_gaussians_has_its_closed_form(event: Event) -> None:
    """A local message moves by twice what z is measured in."""
    share = 0.9e-5 / len(ORDERS)
    wanted = min(10 * a / 8 + math.log(1 - 1 / a) - math.log(share * a) / (a - 1) for a in ORDERS)
    assert RenyiFilter(wanted + 1e-9, 1e-5).takes(event, 10)
    assert not RenyiFilter(wanted - 1e-9, 1e-5).takes(event, 10)
    life = RenyiFilter(wanted, 1e-5)
    life.take(event, 10)
    assert life.used == pytest.approx(1)
    assert life.loss == pytest.approx(min(10 * a / 8 - math.log(1e-5 / len(ORDERS)) / (a - 1) for a in ORDERS))


def test_a_fixed_cohort_is_charged_for_data_that_are_replaced() -> None:
    """The sum moves by 2 C: without sampling that is a Gaussian of half the noise, and sampling never makes it more."""
    whole, half = Event("fixed", 1.0, 12, 12, 4.0, 1.0), gaussian(2.0)
    orders = (2.0, 4.0, 8.0, 16.0)
    for cost, gaussian_cost in zip(renyi_cost(whole, orders), renyi_cost(half, orders), strict=True):
        assert cost >= gaussian_cost * (1 - 1e-9)


def test_what_is_used_grows_with_every_release_and_is_one_where_the_budget_ends() -> None:
    life, step = RenyiFilter(3.0, 1e-5), sampled(4.0)
    used = [life.used]
    while life.takes(step):
        life.take(step)
        used.append(life.used)
    assert used[0] == 0
    assert sorted(set(used)) == used
    assert used[-1] <= 1 < used[-1] + used[1]
    cut = Event("poisson", 0.01, 100, 10_000, 50.0, 1.0, most=170)
    life = RenyiFilter(3.0, 1e-5)
    life.take(cut, life.room(cut, 10**9))
    assert life.used == pytest.approx(1, abs=0.01), "delta for cohorts that are cut down can be what ends it"
    assert math.isinf(life.loss), "their loss is not bounded by that of Poisson cohorts"


def test_the_loss_so_far_holds_whenever_somebody_looks() -> None:
    """Somebody who looks after each release, chooses the next noise by what was seen, and stops at the worst moment.

    The loss of a Gaussian release of multiplier z is normal with mean 1 / (2 z^2) and variance 1 / z^2.
    """
    draw, delta, paths, steps = np.random.default_rng(5), 0.05, 2000, 120
    lost, passed, passed_planned = np.zeros(paths), np.zeros(paths, bool), np.zeros(paths, bool)
    costs = np.zeros((len(ORDERS), paths))
    orders = np.array(ORDERS)[:, None]
    squares = np.zeros(paths)
    for _ in range(steps):
        z = np.where(lost > 0.5 * np.sqrt(squares), 4.0, 12.0)  # where it went badly, more is asked
        lost += draw.normal(1 / (2 * z**2), 1 / z)
        costs += orders / (2 * z**2)
        squares += 1 / z**2
        passed |= lost > (costs - np.log(delta / len(ORDERS)) / (orders - 1)).min(axis=0)
        planned = squares / 2 + np.sqrt(squares) * 1.645  # of a fixed plan a loss is above that in a twentieth
        passed_planned |= lost > planned
    life = RenyiFilter(100.0, delta)
    life.take(gaussian(4.0), 3)
    life.take(gaussian(12.0), 2)
    squares_of_it = 3 / 16 + 2 / 144
    stated = min(a * squares_of_it / 2 - math.log(delta / len(ORDERS)) / (a - 1) for a in ORDERS)
    assert life.loss == pytest.approx(stated), "that is what was held against the losses"
    assert passed.mean() <= delta
    assert passed_planned.mean() > 2 * delta, "a bound for a fixed plan does not hold for who looks meanwhile"


@pytest.mark.parametrize("budget", [0.5, 3.0, 8.0])
def test_cohorts_that_are_cut_down_cost_the_budget_what_the_coupling_says(budget: float) -> None:
    """Poisson sampling at delta' holds at delta' + (1 + e^epsilon) c, c being how likely any cohort is cut down."""
    event, life = Event("poisson", 0.01, 100, 10_000, 4.0, 1.0, most=175), RenyiFilter(budget, 1e-5)
    life.take(event, life.room(event, 1_000_000))
    assert life.taken > 0
    kept_for_the_orders = 0.9 * life.delta
    assert kept_for_the_orders + (1 + math.exp(budget)) * life.overflow <= life.delta
    assert epsilon([event] * life.taken, life.delta, "pld") <= budget


def test_a_release_that_would_pass_the_budget_is_refused_and_a_cheaper_one_taken(tmp_path: Path) -> None:
    people = make(tmp_path)
    with pytest.raises(BudgetSpent, match="would pass epsilon 3"):
        people.charge("a", gaussian(0.5))
    with pytest.raises(BudgetSpent):
        people.charge("a", Event("everyone", 1.0, 12, 12, 0.0, 1.0))  # no noise at all
    assert Budget.read(people.path).charges == []
    people.charge("a", gaussian(5.0))
    assert [charge.run for charge in Budget.read(people.path).charges] == ["a"]


def test_releases_of_several_adjacencies_are_added_up(tmp_path: Path) -> None:
    people = make(tmp_path, 20)
    other = Event("fixed", 0.5, 6, 12, 8.0, 1.0)
    people.charge("a", sampled(3.0), count=5)
    people.charge("b", other, count=2)
    apart = epsilon([sampled(3.0)] * 5, 5e-6, "pld") + epsilon([other] * 2, 5e-6, "rdp")
    assert people.summary()["planned"] == pytest.approx(apart)
    assert composed([sampled(3.0), gaussian(3.0)], 1e-5) == epsilon([sampled(3.0), gaussian(3.0)], 1e-5, "pld")
    assert [run["releases"] for run in by_run(people)] == [5, 2]


@pytest.mark.parametrize(("eps", "delta"), [(2.0, 1e-6), (8.0, 1e-5), (1.0, 1e-3)])
def test_two_data_sets_of_a_user_that_are_both_there_cost_twice_epsilon_and_more_than_delta(
    eps: float, delta: float
) -> None:
    """By way of the empty one. Of one Gaussian: twice epsilon alone is not enough, and with the larger delta it is."""
    mu = covering_mu(eps, delta)
    assert delta < gaussian_delta(2 * mu, 2 * eps) < (1 + math.exp(eps)) * delta
    page = " ".join((Path(__file__).parents[2] / "docs/guarantee.md").read_text().split())
    assert "a budget of (2, 1e-6) that is (4, 8.4e-6)" in page
    assert round((1 + math.exp(2)) * 1e-6, 7) == 8.4e-6


def test_a_run_over_other_people_is_refused(tmp_path: Path) -> None:
    people = make(tmp_path)
    people.charge("a", gaussian(5.0))
    with pytest.raises(UserError, match="belongs to one population"):
        people.charge("b", gaussian(5.0, users=13))
    with pytest.raises(UserError, match="budget of 12 users"):
        Budget.read(people.path).check_population(13)


def test_an_edited_budget_is_refused(tmp_path: Path) -> None:
    people = make(tmp_path)
    for _ in range(3):
        people.charge("a", gaussian(5.0))
    lines = people.path.read_bytes().splitlines(keepends=True)
    for wrong in (
        [lines[0].replace(b"3.0", b"9.0"), *lines[1:]],
        [lines[0], *lines[2:]],
        [lines[0], lines[2], lines[1], lines[3]],
        [lines[0], lines[1].replace(b'"noise_multiplier":5.0', b'"noise_multiplier":9.0'), *lines[2:]],
    ):
        people.path.write_bytes(b"".join(wrong))
        with pytest.raises(UserError, match="line"):
            Budget.read(people.path)
    people.path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(UserError, match="has become shorter"):
        people.charge("a", gaussian(5.0))


def test_a_torn_line_is_cut_off_and_a_full_disk_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people = make(tmp_path)
    people.charge("a", gaussian(5.0))
    whole = people.path.read_bytes()
    people.path.write_bytes(whole + b'{"run": "torn')
    assert len(Budget.read(people.path).charges) == 1

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        people.path.write_bytes(whole)
        with pytest.raises(OSError, match="No space"):
            people.charge("a", gaussian(5.0))
    assert people.path.read_bytes() == whole
    people.path.write_bytes(whole + b'{"run": "torn')
    people.charge("a", gaussian(5.0))
    assert len(Budget.read(people.path).charges) == 2


def _charge_all(path: Path, run: str) -> None:
    people = Budget.read(path)
    try:
        for _ in range(1000):
            people.charge(run, gaussian(8.0))
    except BudgetSpent:
        pass


def test_two_runs_at_once_never_pass_the_budget_together(tmp_path: Path) -> None:
    people = make(tmp_path)
    alone = people.filter.room(gaussian(8.0), 1000)
    racing = [multiprocessing.get_context("fork").Process(target=_charge_all, args=(people.path, n)) for n in "ab"]
    for process in racing:
        process.start()
    for process in racing:
        process.join(60)
    after = Budget.read(people.path)
    assert len(after.charges) == alone
    assert after.filter.used <= 1


def recipe_with(people: Budget, *sets: str, tiny: str) -> object:
    return load(tiny, [f"privacy.budget={people.path}", "privacy.noise_multiplier=4", *sets])


def test_runs_charge_step_by_step_and_the_last_stops_with_its_model(
    tiny: str, tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    room = RenyiFilter(3.0, 1e-5).room(sampled(4.0), 1000)
    people, runs = make(tmp_path), 0
    while True:
        wanted = recipe_with(people, f"run.seed={runs}", tiny=tiny)
        summary = folder.train(wanted, tmp_path / f"run-{runs}", quiet=True)  # type: ignore[arg-type]
        if summary["steps"] < 6:
            break
        runs += 1
    assert "stopped_by_budget" in summary
    assert "stopped after step" in capsys.readouterr().err
    assert (tmp_path / f"run-{runs}" / "model.safetensors").exists()
    spent = Budget.read(people.path)
    assert spent.filter.taken == 6 * runs + summary["steps"] == room
    assert folder.check_ledger(tmp_path / f"run-{runs}")["releases"] == summary["steps"]
    with pytest.raises(BudgetSpent, match="not enough left for one step"):
        folder.train(recipe_with(people, "run.seed=99", tiny=tiny), tmp_path / "none", quiet=True)  # type: ignore[arg-type]
    other = recipe_with(people, "task.users=13", tiny=tiny)
    with pytest.raises(UserError, match="belongs to one population"):
        folder.train(other, tmp_path / "other", quiet=True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="confide budget --init"):
        folder.train(load(tiny, ["privacy.budget=nowhere.jsonl"]), tmp_path / "nowhere", quiet=True)


def test_a_simulation_in_memory_charges_nothing(tiny: str, tmp_path: Path) -> None:
    people = make(tmp_path)
    loop, _ = simulate(recipe_with(people, tiny=tiny))  # type: ignore[arg-type]
    assert loop.ledger.count == 6
    assert Budget.read(people.path).charges == people.charges == []


@pytest.mark.parametrize("source", ["seeded", "system"])
def test_a_kill_between_line_and_release_never_under_counts_and_a_repeat_costs_nothing(
    source: str, tiny: str, tmp_path: Path
) -> None:
    people = make(tmp_path, 50)
    code = f"""
        import os, signal
        from pathlib import Path
        from confide.privacy.plan import Release
        from confide.recipe import load
        from confide.runs import folder
        noise = Release.add_noise
        def killed(self, *given):
            if self.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return noise(self, *given)
        Release.add_noise = killed
        sets = ["privacy.budget={people.path}", "privacy.source={source}", "run.checkpoint_every=2"]
        folder.train(load({tiny!r}, sets), Path({str(tmp_path / "run")!r}), quiet=True)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert Budget.read(people.path).filter.taken == 4, "the line is there before the release"
    folder.resume(tmp_path / "run", quiet=True)
    spent = Budget.read(people.path)
    assert spent.filter.taken == folder.check_ledger(tmp_path / "run")["releases"]
    assert spent.filter.taken == (6 if source == "seeded" else 7), "a repeat to the bit is one charge"


@pytest.mark.parametrize(("source", "charges"), [("seeded", 6), ("system", 7)])
def test_a_stop_between_charge_and_line_charges_a_step_that_is_repeated_to_the_bit_once(
    source: str, charges: int, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    people, write = make(tmp_path, 50), Ledger._write

    def stopped(self: Ledger, body: dict[str, object], entry: Entry | None = None) -> None:
        if entry is not None and entry.step == 3:
            raise RuntimeError("stopped")
        write(self, body, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            folder.train(recipe_with(people, f"privacy.source={source}", tiny=tiny), tmp_path / "run", quiet=True)  # type: ignore[arg-type]
    assert Budget.read(people.path).filter.taken == 4
    folder.resume(tmp_path / "run", quiet=True)
    assert folder.check_ledger(tmp_path / "run")["releases"] == 6
    assert Budget.read(people.path).filter.taken == charges


def test_another_budget_than_the_run_began_with_is_refused(tiny: str, tmp_path: Path, no_figures: None) -> None:
    people = make(tmp_path, 50)
    wanted = recipe_with(people, tiny=tiny)
    folder.train(wanted, tmp_path / "run", quiet=True)  # type: ignore[arg-type]
    (tmp_path / "run" / "summary.json").unlink()
    people.path.unlink()
    make(tmp_path, 60)
    with pytest.raises(UserError, match="not the budget that this run began with"):
        folder.resume(tmp_path / "run", quiet=True)


def test_the_command_begins_and_shows_a_budget(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    import json

    path = tmp_path / "people.jsonl"
    assert command("budget", path)[0] == 2
    assert command("budget", "--init", path, "--epsilon", 8)[0] == 2
    assert command("budget", "--init", path, "--epsilon", 8, "--delta", "1e-5", "--population", "patients")[0] == 0
    code, _, said = command("budget", "--init", path, "--epsilon", 9, "--delta", "1e-5", "--population", "patients")
    assert code == 2
    assert "never overwritten" in said
    Budget.read(path).charge("first", gaussian(5.0), what="digits", claimed=True)
    code, out, _ = command("budget", path)
    assert code == 0
    said = " ".join(out.split())
    assert "patients: epsilon 8 at delta 1e-05 is promised for their whole life" in said
    assert "% of it is used, by 1 release" in said
    assert "with probability 1 - 1e-05" in said
    assert "a user's data are there or are empty" in said
    assert "not against the server of distributed trust" in said
    assert "claimed, not enforced" in said
    assert "is spent" not in said
    found = json.loads(command("budget", path, "--json")[1])
    assert (found["epsilon"], found["delta"]) == (8, 1e-5)
    assert not {"spent", "left"} & found.keys(), "what a filter has taken is no epsilon"
    assert found["used"] == Budget.read(path).filter.used
    assert found["loss_so_far"] == Budget.read(path).filter.loss > found["epsilon_if_planned"]
    assert "empty" in found["adjacency"]
    assert found["runs"][0]["claimed"] is True


@pytest.mark.parametrize(
    "event",
    [gaussian(3.0), sampled(3.0), Event("fixed", 0.5, 6, 12, 3.0, 1.0), Event("local", 0.5, 6, 12, 3.0, 1.0),
     Event("cyclic", 0.25, 3, 12, 3.0, 1.0, separation=4, rounds=8, bands=2),
     Event("cyclic_poisson", 0.25, 3, 12, 3.0, 1.0, separation=2, rounds=8, bands=2)],
    ids=lambda event: event.sampler,
)  # fmt: skip
def test_every_charge_covers_a_user_whose_data_are_empty_whatever_the_runs_own_adjacency(event: Event) -> None:
    """So runs of several adjacencies can be added up: that neighbour is one of each of them."""
    rate, z = event.turn_rate, event.noise_multiplier
    if event.sampler in ("everyone", "cyclic", "local"):
        rate = 1.0
    grid = np.linspace(-30, 31, 200_001)
    empty = stats.norm.logpdf(grid, 0, z)
    there = np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + stats.norm.logpdf(grid, 1, z) - empty)
    for order, cost in zip(ORDERS, renyi_cost(event, ORDERS), strict=True):
        if order > 16 or math.isinf(cost):
            continue
        for sign in (order, 1 - order):
            moment = np.trapezoid(np.exp(sign * there + empty), grid)
            assert cost >= event.turns * math.log(moment) / (order - 1) - 1e-9
