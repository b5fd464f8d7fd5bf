"""Claims about figures that are released with noise: they share the update's budget, line and ledger, and no more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide import recipe
from confide.build import make_loop
from confide.deploy.deployment import check_deployable
from confide.errors import UserError
from confide.federated.measures import Measures
from confide.privacy import ledger
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Release
from confide.run import Loop, Step
from confide.runs import folder
from confide.runs.recording import RELEASED, Recording
from confide.runs.simulation import simulate

torch.set_num_threads(1)

ALL = "privacy.metrics={loss: 5, norm: 60, bounded: true, accuracy: true}"
FREE = ("privacy.target_epsilon=null", "privacy.noise_multiplier=1.5", "evaluation.last=1")
ADAPTIVE = "bounding={rule: clip, bound: 10, adaptive: {quantile: 0.5}}"


def digits(*overrides: str) -> recipe.Recipe:
    return recipe.load("convex/digits", ["run.steps=5", *FREE, *overrides])


def steps_of(loop: Loop, count: int) -> list[Step]:
    state = loop.start()
    return [loop.step(state) for _ in range(count)]


# What one user adds


@given(
    rows=st.lists(st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 4, st.booleans()), min_size=1),
    bounds=st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)),
)
def test_no_user_moves_a_figure_by_more_than_a_half(rows: list[Any], bounds: tuple[float, float]) -> None:
    asked = Measures({"loss": bounds[0], "norm": bounds[1], "bounded": 1.0, "accuracy": 1.0})
    columns = torch.tensor(rows, dtype=torch.float64).T
    known = dict(zip(asked.bounds, columns[:4], strict=True))
    values = asked.values(known, columns[4] > 0)
    assert values.shape == (len(rows), 4)
    assert bool((values.abs() <= 0.5).all())
    assert bool((values[columns[4] == 0] == 0).all()), "whoever sends nothing is not counted as a zero either"


@pytest.mark.parametrize(
    "overrides", [(ALL,), (ALL, ADAPTIVE), ("privacy.metrics={bounded: true, noise: 9}",)], ids=str
)
def test_no_user_moves_update_and_figures_together_by_more_than_one_over_z(overrides: tuple[str, ...]) -> None:
    """Scaled by the noise that is really added, one user's whole contribution has norm at most 1 / z."""
    loop = make_loop(digits(*overrides))
    state = loop.start()
    rule, event, longest = loop.bounds.rule(state), loop.plan.event, 0.0
    assert event.noise_multiplier == 1.5
    assert event.sensitivity is not None
    for user in range(30):
        tally = loop.engine.train(state.parameters, np.array([user]), 0, loop.total, rule.told)
        moved = float(loop.total.double().norm()) / loop.plan.rate / (event.update_multiplier * event.sensitivity)
        counted = math.hypot(*tally.votes, *tally.measures) / event.count_noise
        longest = max(longest, math.hypot(moved, counted))
    assert longest <= 1 / event.noise_multiplier
    assert longest > 0.85 / event.noise_multiplier, "the claim is about something: some user comes near it"
    without = math.hypot(moved * event.update_multiplier / event.noise_multiplier, counted)
    assert without > 1 / event.noise_multiplier, "with the noise of a run without figures it would be false"


def test_the_figures_are_the_means_over_the_users() -> None:
    """Without noise, and divided by the users that there were, they are what the research records say."""
    loop = make_loop(digits(ALL, "sampling.kind=fixed", "privacy.accountant=rdp"))
    for step in steps_of(loop, 3):
        users = step.tally.users
        found = loop.measures.in_units(torch.tensor(step.tally.measures, dtype=torch.float64) / users + 0.5)
        assert found["loss"] == pytest.approx(step.tally.loss / users, rel=1e-9)
        assert found["norm"] == pytest.approx(step.tally.norm / users, rel=1e-9)
        assert found["bounded"] == pytest.approx(step.tally.bounded / users)
        assert 0 <= found["accuracy"] <= 1


def test_a_value_above_its_bound_counts_as_the_bound() -> None:
    step = steps_of(make_loop(digits("privacy.metrics={norm: 0.5, noise: 30}")), 1)[0]
    assert step.tally.measures == [0.5 * step.tally.users]
    assert step.tally.norm > step.tally.users


# What is charged, and what is added


def test_figures_cost_no_epsilon_but_noise_on_the_update() -> None:
    plain, joint = make_loop(digits()), make_loop(digits(ALL))
    assert joint.plan.epsilon(5) == plain.plan.epsilon(5)
    assert joint.plan.event.counters == 4
    z, events = 1.5, joint.plan.event
    assert events.update_multiplier == pytest.approx((z**-2 - 4 / (2 * events.count_noise) ** 2) ** -0.5)
    for loop in (plain, joint):
        event = loop.plan.event
        assert event.sensitivity is not None
        seen = np.array([step.noise for step in steps_of(loop, 40)]) / math.sqrt(loop.layout.size)
        wanted = event.update_multiplier * event.sensitivity
        assert float(seen.mean()) == pytest.approx(wanted, rel=0.015)  # five deviations of 40 times 650 draws
    assert joint.plan.event.update_multiplier > 1.04 * plain.plan.event.update_multiplier


def residuals(loop: Loop, steps: int) -> np.ndarray:
    """The noise on every figure of every step, in units of the deviation that is charged for."""
    found = []
    for step in steps_of(loop, steps):
        shares = [value / loop.measures.bounds[name] for name, value in step.released.items()]
        sums = (np.array(shares) - 0.5) * loop.plan.rate * len(loop.plan.weights)
        found.append((sums - step.tally.measures) / loop.plan.event.count_noise)
    return np.array(found)


def has_unit_scale(values: np.ndarray) -> bool:
    """The sum of n squares is chi-squared; of 1,200 values this sees a scale that is off by a tenth."""
    tail = float(stats.chi2(values.size).cdf(float(np.square(values).sum())))
    return 1e-4 < tail < 1 - 1e-4


def test_the_noise_of_the_figures_has_the_scale_that_is_accounted_for() -> None:
    noise = residuals(make_loop(digits(ALL, "run.steps=300")), 300)
    assert noise.shape == (300, 4)
    assert has_unit_scale(noise)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise.T) - np.eye(4)).max() < 5 / math.sqrt(300), "each has noise of its own"
    for wrong in (0.9, 1.1):
        assert not has_unit_scale(wrong * noise)


def test_noise_of_the_operating_system_has_the_same_scale() -> None:
    noise = residuals(make_loop(digits(ALL, "privacy.source=system", "run.steps=300")), 300)
    tail = stats.chi2(noise.size).cdf(float(np.square(noise).sum()))
    assert 1e-9 < tail < 1 - 1e-9


def test_figures_are_divided_by_the_expected_cohort() -> None:
    """The realised one is a secret: with 300 users for 57, a share can be above 1."""
    loop = make_loop(digits("privacy.metrics={bounded: true, noise: 1.0e-3}", "privacy.noise_multiplier=0.001"))
    event = loop.plan.event
    shares = loop.plan.noisy_shares(torch.tensor([100.0], dtype=torch.float64), event, 0, 0)
    assert float(shares) == pytest.approx(0.5 + 100 / loop.plan.cohort_size, abs=1e-3)


def test_the_line_is_in_the_ledger_before_any_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(digits(ALL))
    with pytest.raises(RuntimeError, match="before the ledger had the release"):
        Release(loop.plan, loop.plan.event, np.arange(3), 0, loop.ledger, "here", True, from_users=False).noisy_shares(
            torch.zeros(4, dtype=torch.float64)
        )
    seen, draw = [], Release.noisy_shares

    def watched(self: Release, counts: torch.Tensor) -> torch.Tensor:
        seen.append(self.ledger.count)
        return draw(self, counts)

    monkeypatch.setattr(Release, "noisy_shares", watched)
    steps_of(loop, 3)
    assert seen == [1, 2, 3], "one vector a line"


# Files, engines and stops


def released(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / RELEASED).read_text().splitlines()]


@pytest.mark.usefixtures("warm_processes", "no_figures")
def test_the_figures_are_the_same_with_workers_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = digits(ALL, ADAPTIVE, "run.checkpoint_every=3")
    folder.train(wanted, tmp_path / "one", quiet=True)
    folder.train(wanted, tmp_path / "two", workers=2, quiet=True)
    write, calls = Recording.write, []

    def die(self: Recording, record: dict[str, Any], seconds: dict[str, float]) -> None:
        write(self, record, seconds)
        calls.append(record["step"])
        if calls == [1, 2, 3, 4]:  # after the checkpoint of step 3, with the figures of step 4 on disk
            raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "write", die)
    with pytest.raises(KeyboardInterrupt):
        folder.train(wanted, tmp_path / "killed", quiet=True)
    folder.resume(tmp_path / "killed", quiet=True)
    texts = {(tmp_path / name / RELEASED).read_text() for name in ("one", "two", "killed")}
    assert len(texts) == 1
    assert [line["step"] for line in released(tmp_path / "one")] == [1, 2, 3, 4, 5]
    assert list(released(tmp_path / "one")[0]) == ["step", "loss", "norm", "bounded", "accuracy"]
    book = Ledger.read(tmp_path / "killed" / ledger.FILE)
    assert book.count == 5, "the step that was made again gave the same bytes, and one line stands for them"


@pytest.mark.usefixtures("no_figures")
def test_system_noise_is_drawn_anew_after_a_kill_and_charged_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = digits(ALL, "privacy.source=system")
    draw, seen = Release.noisy_shares, []

    def die(self: Release, counts: torch.Tensor) -> torch.Tensor:
        seen.append((self.step, self.attempt, draw(self, counts)))
        if len(seen) == 3:
            raise KeyboardInterrupt
        shares: torch.Tensor = seen[-1][2]
        return shares

    monkeypatch.setattr(Release, "noisy_shares", die)
    with pytest.raises(KeyboardInterrupt):
        folder.train(wanted, tmp_path / "run", quiet=True)
    folder.resume(tmp_path / "run", quiet=True)
    assert [(step, attempt) for step, attempt, _ in seen] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]
    assert not torch.equal(seen[2][2], seen[3][2])
    assert Ledger.read(tmp_path / "run" / ledger.FILE).count == 6
    assert len(released(tmp_path / "run")) == 5


@pytest.mark.usefixtures("no_figures")
def test_metrics_without_noise_and_figures_are_in_different_files(tmp_path: Path) -> None:
    folder.train(digits(ALL), tmp_path / "run", quiet=True)
    raw = [json.loads(line) for line in (tmp_path / "run" / folder.METRICS).read_text().splitlines()]
    assert all("released" not in line and "accuracy" not in line for line in raw)
    assert [a["loss"] for a in raw] != [b["loss"] for b in released(tmp_path / "run")]
    folder.train(digits(), tmp_path / "plain", quiet=True)
    assert not (tmp_path / "plain" / RELEASED).exists()


def test_a_recipe_without_figures_keeps_its_digest() -> None:
    assert "metrics" not in digits().model_dump()["privacy"]
    assert digits().digest != digits(ALL).digest


def test_a_simulation_hands_out_the_figures() -> None:
    seen: list[dict[str, float]] = []
    simulate(digits(ALL), watch=lambda loop, state, record: seen.append(record["released"]))
    assert [figures["step"] for figures in seen] == [1, 2, 3, 4, 5]


# What is refused


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["privacy.trust=local"], r"privacy\.metrics: their noise is added by the server; .* privacy\.trust: local"),
        (["privacy.trust=distributed"], r"privacy\.metrics: .* privacy\.trust: distributed"),
        (["privacy.mechanism=none", "privacy.noise_multiplier=null"], r"privacy\.metrics: .* need noise with one"),
        (
            ["privacy.mechanism=partial", "privacy.tensors=['*']", "privacy.delta=null"],
            r"privacy\.metrics: .* need noise with one",
        ),
        (
            ["privacy.mechanism=banded", "sampling.kind=cyclic", "sampling.cohort=40"],
            r"privacy\.metrics: banded noise is made for the update alone",
        ),
        (["privacy.metrics={noise: 3}"], r"privacy\.metrics: names no figure"),
        (["privacy.metrics.loss=0"], r"privacy\.metrics\.loss=0: expected a number above 0"),
        (["privacy.metrics.los=1"], r"privacy\.metrics\.los: there is no such key; did you mean 'loss'\?"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_released_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        digits(ALL, *overrides)


def test_noise_that_is_not_given_is_a_twentieth_of_the_cohort_or_leaves_four_fifths_of_the_budget() -> None:
    weak = make_loop(digits("privacy.metrics={bounded: true}", "privacy.noise_multiplier=1")).plan
    assert weak.event.count_noise == pytest.approx(weak.cohort_size / 20)
    strong = make_loop(digits(ALL, "privacy.noise_multiplier=20")).plan.event
    assert 4 / (2 * strong.count_noise) ** 2 == pytest.approx(20**-2 / 5)


def test_figures_that_leave_nothing_for_the_update_are_refused() -> None:
    with pytest.raises(UserError, match=r"4 counters with noise 1 spend more .* privacy\.metrics\.noise above 1\.5"):
        make_loop(digits("privacy.metrics={loss: 5, norm: 60, bounded: true, accuracy: true, noise: 1}"))


def test_two_noises_for_one_vector_are_refused() -> None:
    both = "bounding={rule: clip, bound: 30, adaptive: {count_noise: 9}}"
    with pytest.raises(UserError, match="one noise is on all counts; give one of them"):
        make_loop(digits("privacy.metrics={loss: 5, noise: 9}", both))


def test_an_accuracy_that_the_task_cannot_give_is_refused(tiny: str) -> None:
    with pytest.raises(UserError, match=r"privacy\.metrics\.accuracy: the task convex/quadratics cannot tell"):
        make_loop(recipe.load(tiny, ["privacy.metrics={accuracy: true}"]))


def test_a_deployment_refuses_figures() -> None:
    with pytest.raises(UserError, match=r"privacy\.metrics: clients on other machines are not asked"):
        check_deployable(digits(ALL))
