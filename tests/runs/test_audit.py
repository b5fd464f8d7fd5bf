"""Claims about the audit: honest runs stay below what they claim, and broken mechanisms are caught.

`benchmarks/audit.py` does the same over twenty seeds each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide import recipe
from confide.build import make_loop, make_task
from confide.commands.audit import BreakName
from confide.errors import UserError
from confide.federated.bounding import Bounding, bounder
from confide.federated.parameters import Layout
from confide.privacy import one_run
from confide.privacy.budget import Budget
from confide.runs.audit import USUAL, audit, measure_power
from confide.runs.broken import BREAKS, Break
from confide.runs.canaries import Canaries, CanaryTask

torch.set_num_threads(1)
Command = Callable[..., tuple[int, str, str]]
QUICK = ("task.users=60", "sampling.cohort=12", "run.steps=30", "evaluation.last=1", "privacy.target_epsilon=2.5")
DELTAS = (1e-5, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85, 0.95, 0.99)


def wanted(*overrides: str, seed: int = 0) -> recipe.Recipe:
    return recipe.load("convex/digits", [*QUICK, f"run.seed={seed}", *overrides])


def gaussian_curve(mu: float) -> one_run.Curve:
    return tuple((get_epsilon_gaussian(1 / mu, delta), delta) for delta in DELTAS)


def gaussian_scores(mu: float, canaries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and coins of a Gaussian mechanism that tells of each canary by itself."""
    draw = np.random.default_rng(seed)
    included = draw.random(canaries) < 0.5
    return mu * (included - 0.5) + draw.standard_normal(canaries), included


# The statistics


def test_perfect_guesses_prove_what_the_binomial_says() -> None:
    """All of n right has probability p^n: p = error^(1/n), epsilon = log(p / (1 - p))."""
    p = 0.05 ** (1 / 1000)
    assert one_run.lower_bound(1000, 1000, 1000, 0.0, 0.05) == pytest.approx(math.log(p / (1 - p)), abs=1e-3)


def test_blind_guesses_prove_nothing() -> None:
    assert one_run.lower_bound(1000, 1000, 510, 1e-5, 0.05) == 0.0


@settings(deadline=None, max_examples=60)
@given(guesses=st.integers(2, 400), share=st.floats(0.5, 1), delta=st.sampled_from([0.0, 1e-6, 1e-4]))
def test_the_bound_grows_with_right_guesses_and_shrinks_with_delta(guesses: int, share: float, delta: float) -> None:
    right = round(guesses * share)
    bound = one_run.lower_bound(400, guesses, right, delta, 0.05)
    assert bound <= one_run.lower_bound(400, guesses, min(guesses, right + 1), delta, 0.05) + 1e-3
    assert one_run.lower_bound(400, guesses, right, 10 * delta, 0.05) <= bound + 1e-3


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_bounded_below_its_epsilon_as_often_as_promised(epsilon: float) -> None:
    """The tightest mechanism there is: each coin is told with probability e^eps / (1 + e^eps)."""
    draw = np.random.default_rng(0)
    right = draw.binomial(500, 1 / (1 + math.exp(-epsilon)), size=400)
    bounds = {int(count): one_run.lower_bound(500, 500, int(count), 0.0, 0.05) for count in set(right.tolist())}
    above = sum(bounds[int(count)] > epsilon for count in right)
    assert stats.binomtest(above, 400, 0.05, alternative="greater").pvalue > 1e-3
    assert np.mean([bounds[int(count)] for count in right]) > 0.6 * epsilon, "and not far below"


def test_perfect_scores_prove_the_most_that_is_possible_however_the_coins_fell() -> None:
    """The number of included canaries is not half of them; guesses that are forced to be could not all be right."""
    curve = gaussian_curve(1.07)
    for seed in range(20):
        included = np.random.default_rng(seed).random(1000) < 0.5
        found = one_run.audit_guesses(np.where(included, 0.5, -0.5), included, curve, 0.05, False)
        assert found[0].right == found[0].guesses
        assert found[0].epsilon == one_run.best_possible(1000, curve, 0.05, False) > 1.5 * curve[0][0]


@pytest.mark.parametrize("independent", [False, True])
def test_a_gaussian_mechanism_is_above_its_own_curve_as_seldom_as_promised(independent: bool) -> None:
    curve, above = gaussian_curve(1.0), 0
    for seed in range(50):
        found = one_run.audit_guesses(*gaussian_scores(1.0, 300, seed), curve, 0.05, independent)
        above += found[0].epsilon > curve[0][0]
    assert stats.binomtest(above, 50, 0.05, alternative="greater").pvalue > 1e-2


@pytest.mark.parametrize(("independent", "mu"), [(False, 8.0), (True, 2.0)])
def test_less_noise_than_the_curve_says_is_found(independent: bool, mu: float) -> None:
    curve = gaussian_curve(1.0)
    for seed in range(5):
        found = one_run.audit_guesses(*gaussian_scores(mu, 650, seed), curve, 0.05, independent)
        assert found[0].epsilon > curve[0][0]


def test_a_bound_below_the_claim_proves_nothing() -> None:
    """Too little noise can stay below the claim: few canaries cannot tell it."""
    assert get_epsilon_gaussian(1 / 1.3, DELTAS[0]) > gaussian_curve(1.0)[0][0], "the claim is false"
    for seed in range(5):
        found = one_run.audit_guesses(*gaussian_scores(1.3, 100, seed), gaussian_curve(1.0), 0.05, True)
        assert found[0].epsilon < gaussian_curve(1.0)[0][0]


@pytest.mark.parametrize(
    ("independent", "ways"), [(False, {"pure", "curve"}), (True, {"pure", "curve", "independent"})]
)
def test_the_best_bound_is_taken_and_all_together_err_as_seldom_as_one(
    independent: bool, ways: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = list[float]()
    for name in ("lower_bound", "curve_bound", "independent_bound"):
        bound = getattr(one_run, name)

        def watched(*given: object, bound: Callable[..., float] = bound) -> float:
            errors.append(float(given[-1]))  # type: ignore[arg-type]
            return bound(*given)

        monkeypatch.setattr(one_run, name, watched)
    found = one_run.audit_guesses(*gaussian_scores(2.0, 100, 0), gaussian_curve(1.0), 0.05, independent)
    assert len(errors) == len(found)
    assert sum(errors) == pytest.approx(0.05)
    assert {finding.method for finding in found} == ways
    assert found[0].epsilon == max(finding.epsilon for finding in found)


def test_guesses_do_not_depend_on_the_coins() -> None:
    """With every coin turned over, what was right is wrong: the threshold was fixed before."""
    score, included = gaussian_scores(1.0, 100, 0)
    curve = gaussian_curve(1.0)
    one, other = (
        {(each.method, each.guesses): each.right for each in one_run.audit_guesses(score, coins, curve, 0.05, True)}
        for coins in (included, ~included)
    )
    assert all(one[way] + other[way] == way[1] for way in one)


def test_the_reported_epsilon_is_below_the_true_one_also_when_the_claim_is_wrong() -> None:
    true = get_epsilon_gaussian(1 / 2.0, 1e-5)
    for seed in range(10):
        found = one_run.audit_guesses(*gaussian_scores(2.0, 650, seed), gaussian_curve(1.0), 0.05, True)
        assert gaussian_curve(1.0)[0][0] < found[0].epsilon < true


def test_the_exact_binomial_test_is_the_sharpest() -> None:
    for seed in range(10):
        found = one_run.audit_guesses(*gaussian_scores(2.0, 300, seed), gaussian_curve(1.0), 0.05, True)
        best = {way: max(each.epsilon for each in found if each.method == way) for way in ("pure", "curve")}
        assert found[0].method == "independent"
        assert found[0].epsilon > max(best.values())


@pytest.mark.parametrize(
    ("overrides", "canaries", "used"),
    [
        ([], None, True),
        ([], 1000, False),
        (["privacy.accountant=rdp", "sampling.kind=fixed"], None, False),
        (["bounding={rule: clip, bound: 5, adaptive: {quantile: 0.5}}"], None, False),
        (["privacy.trust=local"], None, False),
        (["privacy.mechanism=banded", "sampling.kind=cyclic"], None, True),
        (["privacy.trust=distributed"], None, True),
    ],
    ids=["central", "shared coordinates", "fixed", "adaptive", "local", "banded", "distributed"],
)
def test_the_exact_test_is_used_only_where_canaries_cannot_influence_each_other(
    overrides: list[str], canaries: int | None, used: bool
) -> None:
    found = audit(wanted("run.steps=8", *overrides), canaries, alone=True)
    assert ("independent" in {finding.method for finding in found.findings}) is used


def test_up_to_a_thousand_canaries_are_planted_unless_more_are_needed_or_asked_for() -> None:
    assert USUAL == 1000
    few, many = audit(wanted("run.steps=2"), alone=True), audit(wanted("run.steps=2"), 1200, alone=True)
    assert few.canaries == 650, "one for each coordinate, of which there are fewer"
    assert many.canaries == 1200


def test_the_family_of_curves_contains_the_claim_and_grows() -> None:
    curve = gaussian_curve(1.3)
    assert np.array(one_run.curve_for(curve, curve[0][0])) == pytest.approx(np.array(curve))
    for smaller, larger in ((0.5, 1.0), (4.0, 6.0), (10.0, 60.0)):
        pairs = zip(one_run.curve_for(curve, smaller), one_run.curve_for(curve, larger), strict=True)
        assert all(low[0] <= high[0] for low, high in pairs)


@pytest.mark.parametrize("independent", [False, True])
def test_as_many_canaries_as_needed_are_enough_and_fewer_are_not(independent: bool) -> None:
    curve = gaussian_curve(1.3)
    count = one_run.canaries_needed(7.0, curve, 0.05, 10_000, independent)
    assert count is not None
    assert one_run.best_possible(count, curve, 0.05, independent) >= 7.0
    assert one_run.best_possible(round(0.9 * count), curve, 0.05, independent) < 7.0
    assert one_run.canaries_needed(7.0, curve, 0.05, count - 1, independent) is None


# The canaries


def test_canaries_exceed_the_bound_and_are_bounded_to_it() -> None:
    layout = Layout(("a", "b"), ((50, 40), (7,)))
    planted = Canaries.plant(layout, 30, 6, 2.0, 0)
    rule = bounder(Bounding(rule="clip", bound=2.0), layout)
    assert planted.norms.norm(dim=1).tolist() == pytest.approx([20.0] * 30)
    assert planted.bounded(rule).norm(dim=1).tolist() == pytest.approx([2.0] * 30, rel=1e-5)
    assert bool((planted.signs.sum(dim=1) == 0).all())


def test_canaries_come_on_top_of_however_many_users_a_corpus_has() -> None:
    wanted = recipe.load("convex/digits", ["sampling.cohort=20"])
    known = make_task(wanted.task, 0)
    known.at_most = 10  # type: ignore[attr-defined]
    planted: Any = CanaryTask(known, 30, only=True)
    assert make_loop(wanted, task=planted).plan.event.population == 30


@pytest.mark.parametrize("count", [2, 30, 650, 2007])
def test_no_two_canaries_share_a_coordinate_while_there_are_enough(count: int) -> None:
    planted = Canaries.plant(Layout(("a", "b"), ((50, 40), (7,))), count, 6, 2.0, 0)
    assert planted.apart
    assert len(np.unique(planted.places.numpy())) == planted.places.numel()
    assert 0 <= int(planted.places.min()) <= int(planted.places.max()) < 2007


def test_more_canaries_than_coordinates_use_each_coordinate_once() -> None:
    planted = Canaries.plant(Layout(("a",), ((50,),)), 80, 6, 2.0, 0)
    assert not planted.apart
    assert all(len(set(row.tolist())) == 50 for row in planted.places)


# Whole audits


@pytest.mark.parametrize("seed", [0, 1])
def test_an_honest_run_stays_below_its_claim(seed: int) -> None:
    found = audit(wanted(seed=seed))
    assert found.passed
    assert 0 < found.lower_bound < found.claimed < found.best_possible
    assert found.claimed == pytest.approx(2.5, rel=0.02)


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_mechanism_is_caught_where_the_help_sends_people(kind: Break) -> None:
    """The whole recipe, with its claim of 5."""
    found = audit(recipe.load("convex/digits", ["run.seed=3"]), broken=kind, alone=True)
    assert found.claimed == pytest.approx(5, rel=0.01)
    assert not found.passed
    # More noise than stated hides a canary better: what rings is that the noise tells how large the cohort was.
    assert (found.lower_bound > found.claimed) == (kind != "cohort-variance")
    assert found.follows_cohort == (kind == "cohort-variance")
    assert found.to_json()["broken"] == kind


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], True),
        (["privacy.trust=distributed"], True),
        (["bounding={rule: clip, bound: 5, adaptive: {quantile: 0.5}}"], True),
        (["privacy.accountant=rdp", "sampling.kind=fixed"], False),
        (["privacy.trust=local"], False),
        (["privacy.mechanism=banded", "sampling.kind=cyclic"], False),
    ],
    ids=["central", "distributed", "adaptive", "fixed", "local", "banded"],
)
def test_noise_is_held_against_the_cohorts_where_the_claim_needs_these_secret(
    overrides: list[str], asked: bool
) -> None:
    found = audit(wanted(*overrides), alone=True)
    assert (found.cohort_chance is not None) == asked
    assert not found.follows_cohort
    assert audit(wanted(*overrides), alone=True, broken="cohort-variance").follows_cohort == asked


def test_an_audit_through_worker_processes_finds_what_one_process_finds() -> None:
    """Bit for bit: canaries are planted alike everywhere, and parts are added in one order."""
    assert audit(wanted("run.steps=10"), workers=2) == audit(wanted("run.steps=10"))


def test_an_audit_charges_no_budget(tmp_path: Path) -> None:
    people = Budget.create(tmp_path / "people.jsonl", 8.0, 1e-5, "sixty writers")
    audit(wanted("run.steps=10", f"privacy.budget={people.path}"), alone=True)
    assert Budget.read(people.path).charges == []


def test_canaries_alone_find_what_they_find_among_users() -> None:
    among, alone = (audit(wanted(), broken="half-noise", alone=alone) for alone in (False, True))
    assert alone.findings == among.findings


@pytest.mark.parametrize(
    "overrides",
    [
        ["privacy.mechanism=banded", "sampling.kind=cyclic"],
        ["privacy.mechanism=banded", "sampling.kind=cyclic_poisson", "privacy.bands=2"],
        ["privacy.accountant=rdp", "sampling.kind=fixed"],
        ["bounding={rule: per_layer_clip, bound: 5, split: dim, adaptive: {quantile: 0.5}}"],
        ["privacy.placement=client", "users={weights: examples, public: true}"],
        ["privacy.trust=local"],
        ["privacy.source=system"],
        ["privacy.metrics={loss: 5, accuracy: true}"],
        ["privacy.metrics={norm: 50, noise: 4}", "bounding={rule: clip, bound: 5, adaptive: {quantile: 0.5}}"],
    ],
    ids=["banded", "amplified", "fixed", "adaptive", "client", "local", "system", "figures", "figures and adaptive"],
)
def test_every_mechanism_can_be_audited(overrides: list[str]) -> None:
    assert audit(wanted(*overrides)).passed
    assert not audit(wanted(*overrides), broken="no-noise").passed


def test_more_canaries_than_coordinates_catch_missing_noise_too() -> None:
    assert audit(wanted(), 1000).passed
    assert not audit(wanted(), 1000, broken="no-noise").passed


def test_power_is_measured() -> None:
    large = recipe.load("convex/digits", [])
    assert measure_power(large, 650, make_task(large.task, 0)) == {
        "tenth-noise": True,
        "half-noise": True,
        "cohort-variance": True,
    }
    assert measure_power(large, 40, make_task(large.task, 0))["half-noise"] is False


# The command


def test_the_command_reports_the_claim_and_the_power(command: Command) -> None:
    small = [part for setting in QUICK for part in ("--set", setting)]
    code, out, _ = command("audit", "convex/digits", *small, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["passed"] is True
    assert found["broken"] is None
    assert found["lower_bound"] <= found["claimed"]
    assert found["would_catch"]["tenth-noise"] is True
    code, out, _ = command("audit", "convex/digits", *small)
    assert code == 0
    assert "would have caught a tenth of the noise: yes" in out
    assert "would have caught noise that grows with the cohort: yes" in out
    assert "the noise's variance does not follow the cohort's size (p-value" in out
    code, out, _ = command("audit", "convex/digits", *small, "--no-power")
    assert code == 0
    assert "would have caught" not in out


def test_the_command_fails_loudly_and_says_that_it_was_broken_on_purpose(command: Command) -> None:
    small = [part for setting in QUICK for part in ("--set", setting)]
    code, out, err = command("audit", "convex/digits", *small, "--break", "no-noise")
    assert code == 1
    assert "THE AUDIT FAILED" in err
    assert "broken on purpose (no-noise)" in err
    assert "BROKEN ON PURPOSE" in out
    code, out, _ = command("audit", "convex/digits", *small, "--break", "unbounded", "--json")
    assert code == 1
    assert json.loads(out)["broken"] == "unbounded"


def test_the_command_says_why_noise_that_follows_the_cohort_fails(command: Command) -> None:
    small = [part for setting in QUICK for part in ("--set", setting)]
    code, out, err = command("audit", "convex/digits", *small, "--break", "cohort-variance")
    assert code == 1
    assert "FOLLOWS the cohort's size (p-value 0.0001)" in out
    assert "what amplification by sampling needs secret" in err


def test_claims_are_rounded_up_and_lower_bounds_down(command: Command) -> None:
    setting = ("audit", "convex/digits", *(part for each in QUICK for part in ("--set", each)), "--no-power")
    found = json.loads(command(*setting, "--json")[1])
    words = command(*setting)[1].split()
    claimed, proven = (float(words[place + 3]) for place, word in enumerate(words) if word == "epsilon")
    assert found["claimed"] <= claimed <= found["claimed"] * 1.001
    assert found["lower_bound"] - 0.001 <= proven <= found["lower_bound"]


def test_the_command_breaks_what_the_audit_can_break() -> None:
    assert [name.value for name in BreakName] == list(BREAKS)


def test_a_recipe_without_a_claim_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to audit"):
        audit(recipe.load("convex/digits", ["privacy.mechanism=none", "privacy.target_epsilon=null"]))


def test_too_few_canaries_are_refused_with_the_number_that_is_enough() -> None:
    with pytest.raises(UserError, match=r"canaries=10: expected \d+ to 100,000") as refused:
        audit(recipe.load("convex/digits", []), 10)
    with pytest.raises(UserError, match="canaries=0: expected"):
        audit(recipe.load("convex/digits", []), 0)
    enough = int(str(refused.value).split("expected ")[1].split()[0])
    assert audit(recipe.load("convex/digits", []), enough, alone=True).best_possible > 6


def test_a_claim_that_no_audit_can_disprove_is_refused() -> None:
    with pytest.raises(UserError, match="100,000 canaries"):
        audit(recipe.load("convex/digits", ["privacy.target_epsilon=80"]))
