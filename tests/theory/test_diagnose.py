"""Claims about the diagnosis: it measures what is there, names the cause that is known, and its advice helps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.build import make_loop, make_task
from confide.errors import UserError
from confide.federated.bounding import Bounding, bounder
from confide.federated.local import LocalTraining
from confide.federated.optimisers import Lamb, Lars, Sgd, init
from confide.federated.parameters import Layout, flatten
from confide.federated.state import State
from confide.privacy.mechanisms import Privacy
from confide.privacy.plan import make_plan
from confide.privacy.sampling import Sampling
from confide.recipe import changed_by, load, parse
from confide.runs import checkpoint, folder
from confide.runs.simulation import simulate
from confide.theory import measure as measuring
from confide.theory.diagnose import diagnose, diagnose_run
from confide.theory.measure import Measured, measure
from confide.theory.rehearse import Stage, changes, rehearse
from confide.theory.terms import CAUSES, Centre, central_step, split_error
from support.problems import Layered, Shape
from support.trials import trial

torch.set_num_threads(1)

SHAPE = Shape({"a": 3, "b": 5}, users=12, examples=4, between=0.5, within=0.3, uneven=0.4)
TASK = Layered(SHAPE, 1)
UNIFORM = np.full(12, 1 / 12)


def probe(task: Layered = TASK, users: int = 12, draws: int = 1, **local: Any) -> Measured:
    training = LocalTraining.model_validate({"steps": 1, "learning_rate": 0.1, **local})
    return measure(task, training, task.layout, UNIFORM, task.begin, 0, users, draws, 0)


def rates(*values: float) -> Centre:
    ones = torch.ones(len(values), dtype=torch.float64)
    return Centre(torch.tensor(values, dtype=torch.float64), ones, ones, 1.0)


def plan_of(cohort: int, noise: float, bound: float, kind: str = "poisson") -> Any:
    privacy = Privacy(mechanism="gaussian", noise_multiplier=noise, delta=1e-5) if noise else Privacy()
    if kind == "cyclic_poisson":  # which is for correlated noise alone
        privacy = Privacy(mechanism="banded", noise_multiplier=1.0, delta=1e-5, bands=2)
    sampling = Sampling.model_validate({"kind": kind, "cohort": cohort})
    return make_plan(privacy, sampling, UNIFORM, bound, 10, 0)


# What is measured


def test_gradients_variances_and_curvature_are_those_of_the_problem() -> None:
    found = probe(batch_size=1, steps=8, draws=4)
    gradients = TASK.curvature * (TASK.begin - TASK.means)
    torch.testing.assert_close(found.gradients, gradients)
    spread = (gradients - gradients.mean(dim=0)).square().mean(dim=0)
    assert found.user_variance().tolist() == pytest.approx([float(spread[:3].sum()), float(spread[3:].sum())])
    assert found.loss == pytest.approx(
        0.5 * float((TASK.curvature[:, None] * (TASK.begin - TASK.centres).square()).sum(dim=2).mean())
    )
    mean_curve = float(TASK.curvature.mean(dim=0)[0])
    assert found.noise_curvature.tolist() == pytest.approx([mean_curve] * 2, rel=1e-6)
    assert found.user_curvature.tolist() == pytest.approx([mean_curve] * 2, rel=1e-6)
    assert found.smoothness == pytest.approx(mean_curve, rel=1e-6)
    # Two passes over four examples see each of them twice, so the variance within users is exact too.
    within = (TASK.curvature[:, None] * (TASK.centres - TASK.means[:, None])).square().mean(dim=1)
    assert found.batch_variance.sum().item() == pytest.approx(float(within.sum(dim=1).mean()), rel=1e-6)
    each = TASK.curvature[:, None] * (TASK.begin - TASK.centres)
    assert found.largest.tolist() == pytest.approx(
        [float(each[..., p].norm(dim=2).max()) for p in (slice(3), slice(3, 8))]
    )


def test_a_user_that_takes_one_step_does_not_drift_and_many_steps_do() -> None:
    one, many = probe(steps=1, learning_rate=0.3), probe(steps=6, learning_rate=0.3)
    torch.testing.assert_close(one.moving, one.still)
    torch.testing.assert_close(many.still, 6 * one.still)
    assert (one.reach, many.reach, many.local_steps) == pytest.approx((0.3, 1.8, 6))
    curves, gaps = TASK.curvature, TASK.begin - TASK.means
    torch.testing.assert_close(many.moving[:, 0], gaps * (1 - (1 - 0.3 * curves) ** 6))
    clipped = probe(steps=1, learning_rate=0.3, gradient_clip=0.1)
    assert clipped.moving[:, 0].norm(dim=1).tolist() == pytest.approx([0.03] * 12)
    torch.testing.assert_close(clipped.moving, clipped.still)
    divided = probe(steps=6, learning_rate=0.3, divide_by_learning_rate=True)
    assert divided.reach == pytest.approx(6)


def test_a_probe_that_would_not_fit_says_how_many_users_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEMORY", 600)
    with pytest.raises(UserError, match="enough for --users 3"):
        probe()


# The terms


def test_the_noise_and_cohort_terms_are_the_variances_that_a_step_has() -> None:
    found = probe(steps=2, learning_rate=0.3)
    rule = bounder(Bounding(rule="clip", bound=0.8), TASK.layout)
    for kind in ("poisson", "fixed", "cyclic_poisson"):
        plan = plan_of(4, 0.0, 0.8, kind)
        parts = split_error(found, rule, plan, rates(1.0, 1.0))
        norms = torch.stack([p.norm(dim=1) for p in torch.split(found.moving[:, 0], [3, 5], dim=1)], dim=1)
        sent = found.moving[:, 0] * rule.factors(norms)[:, :1]
        drawn = (replace(plan, seed=seed).cohort(0) for seed in range(4000))  # with groups of its own each
        sums = torch.stack([sent[cohort].sum(dim=0) / 4 for cohort in drawn])
        variances = (sums - sums.mean(dim=0)).square().mean(dim=0)
        s, x = parts.shortened, parts.shortened * found.reach * found.user_curvature
        weight = x / (2 - x) / (s * found.reach) ** 2
        wanted = weight * torch.stack([variances[:3].sum(), variances[3:].sum()])
        assert parts.terms[:, CAUSES.index("users")].tolist() == pytest.approx(wanted.tolist(), rel=0.12)
        assert (float(parts.terms[:, CAUSES.index("noise")].sum()) == 0) == (kind != "cyclic_poisson")
    plan = plan_of(12, 2.0, 0.8)
    parts = split_error(found, rule, plan, rates(1.0, 1.0))
    x = parts.shortened * found.reach * found.noise_curvature
    weight = x / (2 - x) / (parts.shortened * found.reach) ** 2
    spread = (2.0 * 0.8 / 12) ** 2
    assert parts.terms[:, CAUSES.index("noise")].tolist() == pytest.approx(
        (weight * torch.tensor([3 * spread, 5 * spread])).tolist()
    )
    assert float(parts.terms[:, CAUSES.index("users")].sum()) == 0, "everybody takes part"


def test_what_shortens_all_users_alike_is_no_error() -> None:
    same = Layered(Shape({"a": 4}, users=12, between=0.0, uneven=0.0), 0)
    found = probe(same, steps=5, learning_rate=0.2)
    parts = split_error(
        found, bounder(Bounding(rule="clip", bound=0.01), same.layout), plan_of(12, 0.0, 0.01), rates(1)
    )
    assert float(parts.shortened[0]) < 0.01
    assert float(parts.terms[:, 1:].sum()) < 1e-12
    assert parts.terms[0, 0] == pytest.approx(float(parts.signal[0]))


def test_the_central_step_knows_momentum_and_trust_ratios() -> None:
    layout = Layout(("a", "b"), ((3,), (5,)))
    weights, g = torch.linspace(1, 2, 8).double(), torch.linspace(-1, 3, 8).double()
    plain = central_step(Sgd(learning_rate=0.1, momentum=0.8), layout, weights, {}, g, 0)
    assert plain.rates.tolist() == pytest.approx([0.5, 0.5])
    assert plain.scaling.tolist() == pytest.approx([0, 0], abs=1e-12)
    own = [(weights[s], g[s]) for s in (slice(3), slice(3, 8))]
    lars = central_step(Lars(learning_rate=2.0, coefficient=0.01, momentum=0.0), layout, weights, {}, g, 0)
    assert lars.rates.tolist() == pytest.approx([0.02 * float(w.norm() / u.norm()) for w, u in own])
    lamb = Lamb(learning_rate=0.1, epsilon=0.5)
    memory = init(lamb, layout.views(weights))
    found = central_step(lamb, layout, weights, memory, g, 0)
    directions = [u / (math.sqrt(0.001) * u.abs() + 0.5) for _, u in own]
    ratios = [float(w.norm() / u.norm()) for (w, _), u in zip(own, directions, strict=True)]
    assert found.trust.tolist() == pytest.approx(ratios)
    assert found.rates.tolist() == pytest.approx([0.1 * float(w.norm() / u.norm()) for w, u in own])
    assert not memory["second_moment/a"].any(), "the run's own state is left alone"


# Naming and advice, where the truth is known (benchmarks/diagnose.py has twenty)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_that_was_made_large_is_named_and_following_the_advice_helps(cause: str) -> None:
    given = trial(cause, 1)
    found = given.diagnose(users=16)
    assert found.cause == cause
    before, after = (sum(each.run(s)[0] for s in range(2)) for each in (given, given.changed(found.advice[0].settings)))
    assert after < 0.8 * before, found.advice[0]


def test_each_tensor_has_its_own_cause() -> None:
    """Equal bounds: a tensor of small updates and many coordinates drowns, one of large updates is bent."""
    shape = Shape(
        {"bent": 20, "drowned": 400}, users=40, between=1.0, uneven=0.8, distance=0.0, scales={"drowned": 0.002}
    )
    document = {
        "task": {"kind": "convex/quadratics", "users": 40, "dimension": 1, "rank": 1},
        "sampling": {"kind": "poisson", "cohort": 39},
        "local": {"steps": 1, "learning_rate": 0.3},
        "bounding": {"rule": "per_layer_clip", "bound": 0.2},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": 0.5, "delta": 1e-5},
        "central": {"kind": "sgd", "learning_rate": 0.5},
        "run": {"steps": 50},
    }
    task = Layered(shape, 0)
    state = State(10, task.begin, {})
    found = diagnose(parse(document), state, 30, 1, 0, task)
    named = {layer["name"]: layer["dominant"] for layer in found.to_json()["layers"]}
    assert named == {"bent": "clipping", "drowned": "noise"}


# As a user


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Path:
    place = tmp_path_factory.mktemp("runs") / "tiny"
    folder.train(load(tiny), place, quiet=True)
    return place


def test_a_diagnosis_says_what_dominates_what_to_change_and_that_it_is_not_private(
    run: Path, command: Callable[..., tuple[int, str, str]], contents: Callable[[Path], dict[str, str]]
) -> None:
    before = contents(run)
    code, out, err = command("diagnose", run, "--rehearse", 0, "--users", 8)
    assert (code, err) == (0, "")
    assert "not covered by the run's epsilon" in out
    assert "dominates" in out
    assert "--set '" in out
    assert "cost in privacy" in out
    code, out, _ = command("diagnose", run, "--rehearse", 0, "--users", 8, "--json")
    found = json.loads(out)
    assert found["dominant"] in CAUSES
    assert set(found["terms"]) == set(CAUSES)
    assert found["layers"][0]["name"] == "w"
    assert found["bound"]["kappa"] < 0
    assert found["bound"]["bound"] is None
    assert contents(run) == before, "nothing is written into the run"
    again = json.loads(command("diagnose", run, "--rehearse", 0, "--users", 8, "--json")[1])
    assert again == found
    other = json.loads(command("diagnose", run, "--rehearse", 0, "--users", 8, "--seed", 1, "--json")[1])
    assert other["terms"] != found["terms"]


def test_settings_that_are_advised_are_accepted_by_a_recipe(run: Path, tiny: str) -> None:
    for each in diagnose_run(run, 8, steps=0).advice:
        assert load(tiny, each.settings).digest != load(tiny).digest or not each.settings


def test_a_folder_without_a_run_or_without_a_checkpoint_is_refused(
    run: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = command("diagnose", tmp_path)
    assert code == 2
    assert "holds no run" in err
    (tmp_path / folder.RECIPE).write_text((run / folder.RECIPE).read_text())
    code, _, err = command("diagnose", tmp_path)
    assert code == 2
    assert f"has no {checkpoint.FILE}" in err
    assert "confide resume" in err


def test_a_model_of_several_tensors_with_moments_is_diagnosed() -> None:
    """Logistic regression on digits under LAMB with a learned split, from its first step."""
    changes = [
        "bounding={rule: per_layer_clip, bound: 5, split: learned, adaptive: {quantile: 0.8}}",
        "task.users=20", "sampling.cohort=8", "central={kind: lamb, learning_rate: 0.01}", "local.batch_size=8",
        "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}",
    ]  # fmt: skip
    recipe = load("convex/digits", changes)
    task = make_task(recipe.task, 0)
    start = task.initial_parameters()
    bounds = bounder(recipe.bounding, Layout.of(start)).bounds
    generator = torch.Generator().manual_seed(0)
    flat = flatten(start)
    moved = flat + 0.1 * torch.randn(flat.shape, generator=generator, dtype=flat.dtype)
    found = diagnose(recipe, State(0, moved, init(recipe.central, start), bounds=bounds), 6, 2, 0, task)
    document = found.to_json()
    assert [layer["trust_ratio"] > 0 for layer in document["layers"]] == [True] * len(document["layers"])
    assert document["terms"]["batches"] > 0
    assert "whole model" in found.to_text()


# Rehearsals

SLOW = ["run={steps: 8}", "task.users=40", "sampling.cohort=20", "evaluation={every: 8}"]


def test_what_is_rehearsed_is_advised_with_its_gain_at_the_same_epsilon_and_following_it_helps() -> None:
    recipe = load("convex/digits", [*SLOW, "privacy.target_epsilon=8", "central.learning_rate=0.001"])
    task = make_task(recipe.task, 0)
    found = rehearse(recipe, task, [], steps=8)
    assert found[0].what == "raise the central learning rate 4 times"
    assert found[0].settings == ("central.learning_rate=0.004",)
    assert "users who took no part fell from" in found[0].why
    assert [bool(each.settings) for each in found] == sorted((bool(each.settings) for each in found), reverse=True)
    before, after = (
        simulate(changed_by(each, ["run.seed=7"]), task) for each in (recipe, changed_by(recipe, found[0].settings))
    )
    scores = [task.evaluate(loop.layout.views(state.parameters))["test_loss"] for loop, state in (before, after)]
    assert scores[1] < scores[0]


def test_more_steps_are_rehearsed_to_their_end_with_a_schedule_that_ends_there() -> None:
    changed = ["privacy={mechanism: none}", "central.schedule={kind: linear, steps: 8}", "central.learning_rate=0.05"]
    recipe = load("convex/digits", [*SLOW, *changed])
    task = make_task(recipe.task, 0)
    advised = {each.what: each for each in rehearse(recipe, task, [], steps=16)}
    more = advised["more central steps: 16 instead of 8"]
    assert more.settings == ("run.steps=16", "central.schedule.steps=16")
    assert not any("steps" in each.what for each in rehearse(recipe, task, [], steps=15)), "16 cannot be rehearsed"


def test_one_user_whose_data_fit_nothing_hides_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("convex/digits", [*SLOW, "privacy={mechanism: none}", "central.learning_rate=0.01"])
    task = make_task(recipe.task, 0)
    plain, turns = Stage._loss, iter(range(10**6))

    def loss(stage: Stage, model: Any, changed: Any, user: int) -> float:
        return 1e3 + next(turns) if user == stage.apart[0] else plain(stage, model, changed, user)

    monkeypatch.setattr(Stage, "_loss", loss)
    assert rehearse(recipe, task, [], steps=8)[0].what == "raise the central learning rate 4 times"


def test_users_who_are_held_apart_send_nothing() -> None:
    recipe = load("convex/digits", [*SLOW, "privacy={mechanism: none}"])
    task = make_task(recipe.task, 0)
    untrained, trained = (
        float(Stage(recipe, task, apart, 8).losses(recipe, 0)[0]) for apart in (np.arange(40), np.arange(2))
    )
    assert untrained == pytest.approx(np.log(10), rel=1e-3), "a model that nobody trained knows nothing"
    assert trained < untrained


def test_a_change_of_cohort_or_steps_is_tried_with_the_noise_that_keeps_epsilon() -> None:
    recipe = load("convex/digits", [*SLOW, "privacy.target_epsilon=null", "privacy.noise_multiplier=2"])
    plan = make_loop(recipe).plan
    spent = plan.epsilon(8)
    kinds = {each.what.split(":")[0]: (each, ease) for each, ease in changes(recipe, plan)}
    for what in ("a larger cohort", "more central steps", "fewer central steps"):
        changed = changed_by(recipe, kinds[what][0].settings)
        assert make_loop(changed).plan.epsilon(changed.run.steps) == pytest.approx(spent, rel=1e-3), what
    people, ease = kinds["more people"]
    assert not people.settings
    assert ease > 2, "four times as many people have far less noise on their average"


def test_no_advice_sets_the_central_rate_to_nothing_where_no_gradient_is_left(tmp_path: Path, no_figures: None) -> None:
    folder.train(load("convex/digits"), tmp_path / "run", quiet=True)
    settings = [word for each in diagnose_run(tmp_path / "run", 32, steps=0).advice for word in each.settings]
    rates = [float(word.partition("=")[2]) for word in settings if word.startswith("central.learning_rate=")]
    assert all(1e-4 < rate < 1 for rate in rates)
    assert settings
