"""Noise on some tensors only: it is where it was asked for, of the right size, and promises nothing.

PFL-ASR Figures 15 and 16 add noise to a group of parameters, or to all but a group, "for the sake of analysis".
"""

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
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from confide import recipe
from confide.errors import UserError
from confide.federated.parameters import Layout
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.mechanisms.partial import Spans, spans_of
from confide.privacy.plan import Plan, make_plan
from confide.privacy.sampling import Sampling
from confide.recipe import Recipe
from confide.report.page import write_report
from confide.runs import folder
from confide.runs.simulation import simulate

torch.set_num_threads(1)
Command = Callable[..., tuple[int, str, str]]

LONG = 100_000
CLOSE = 0.009  # four deviations of the standard deviation of LONG draws
LAYOUT = Layout(
    ("conv.weight", "blocks.00.ln1.scale", "blocks.00.mlp.w1", "blocks.01.ln1.scale"), ((7,), (3,), (5,), (3,))
)
NOISE = {"mechanism": "partial", "noise_multiplier": 1.5}
PARTIAL = "privacy={mechanism: partial, tensors: [weight], noise_multiplier: 1}"


def partial(**given: Any) -> Privacy:
    return Privacy.model_validate({**NOISE, "tensors": ["*"], **given})


def plan_of(spans: Spans = ((0, LONG),), bound: float = 2.0, sampling: str = "poisson", **given: Any) -> Plan:
    """A plan with noise on these stretches of the flat vector: one tensor for each, and one for what lies between."""
    weights = np.random.default_rng(1).uniform(0.5, 1.0, 50)
    kind = Sampling.model_validate({"kind": sampling, "cohort": 10})
    names, sizes, end = [], [], 0
    for start, stop in spans:
        names += [f"quiet {end}", f"noisy {start}"]
        sizes += [start - end, stop - start]
        end = stop
    return make_plan(
        partial(**{"tensors": ["noisy *"] if spans else [], **given}), kind, weights / weights.sum(), bound, 10, 0,
        names=names, sizes=sizes,
    )  # fmt: skip


def released(plan: Plan, size: int, step: int = 0) -> tuple[Tensor, float]:
    total = torch.ones(size, dtype=torch.float64)
    length = plan.mechanism.release(total, Occasion(plan.event, np.arange(4), step, 0, {}))
    assert length is not None
    return total - 1, length


def digits(*sets: str) -> Recipe:
    return recipe.load("convex/digits", ["evaluation={every: 2}", "run={steps: 3}", *sets])


def problems(*sets: str) -> str:
    with pytest.raises(UserError) as error:
        digits(*sets)
    return str(error.value)


# Where


@pytest.mark.parametrize(
    ("patterns", "all_but", "spans"),
    [
        (["*.ln1.*"], False, ((7, 10), (15, 18))),
        (["*.ln1.*"], True, ((0, 7), (10, 15))),
        (["conv.*", "*.w1"], False, ((0, 7), (10, 15))),
        (["blocks.00.*"], False, ((7, 10), (10, 15))),
        (["*"], False, ((0, 7), (7, 10), (10, 15), (15, 18))),
    ],
)
def test_patterns_name_the_tensors_that_get_noise_or_the_others(
    patterns: list[str], all_but: bool, spans: Spans
) -> None:
    assert spans_of(partial(tensors=patterns, all_but=all_but), LAYOUT.names, LAYOUT.sizes) == spans


@given(st.sets(st.sampled_from(LAYOUT.names), min_size=1, max_size=3))
def test_some_tensors_and_all_but_these_are_the_whole_model_once(chosen: set[str]) -> None:
    both = [
        s
        for flag in (False, True)
        for s in spans_of(partial(tensors=sorted(chosen), all_but=flag), LAYOUT.names, LAYOUT.sizes)
    ]
    assert sorted(i for start, end in both for i in range(start, end)) == list(range(LAYOUT.size))


@pytest.mark.parametrize("all_but", [False, True])
def test_a_pattern_that_matches_no_tensor_is_an_error_that_names_some(all_but: bool) -> None:
    with pytest.raises(UserError, match=r"no tensor of the model matches '\*\.mpl\.\*'; there are 4, for example conv"):
        spans_of(partial(tensors=["*.ln1.*", "*.mpl.*"], all_but=all_but), LAYOUT.names, LAYOUT.sizes)


def test_all_but_everything_is_an_error() -> None:
    with pytest.raises(UserError, match="none is left for noise"):
        spans_of(partial(all_but=True), LAYOUT.names, LAYOUT.sizes)


def test_the_noisy_coordinates_of_each_tensor_are_counted() -> None:
    plan = plan_of(spans_of(partial(tensors=["*.ln1.*"]), LAYOUT.names, LAYOUT.sizes))
    assert plan.mechanism.noisy_sizes(LAYOUT.sizes) == [0, 3, 0, 3]
    whole = make_plan(Privacy(), Sampling(cohort=5), np.full(10, 0.1), 1.0, 3, 0)
    assert whole.mechanism.noisy_sizes(LAYOUT.sizes) == LAYOUT.sizes


# How much


@pytest.mark.parametrize("placement", ["sum", "client"])
def test_noise_has_the_scale_asked_for_in_the_spans_and_is_exactly_zero_elsewhere(placement: str) -> None:
    spans = ((1000, 1000 + LONG), (2 * LONG, 3 * LONG))
    plan = plan_of(spans, placement=placement)
    noise, length = released(plan, 3 * LONG + 500)
    inside = torch.zeros_like(noise, dtype=torch.bool)
    for start, end in spans:
        inside[start:end] = True
        expected = 1.5 * 2.0 * plan.mechanism.reach
        assert float(noise[start:end].std()) == pytest.approx(expected, rel=CLOSE)
        assert abs(float(noise[start:end].mean())) < 4 * expected / math.sqrt(LONG)
    assert not bool(noise[~inside].any())
    assert length == pytest.approx(float(noise.norm()), rel=1e-6)
    first, second = (noise[start:end] for start, end in spans)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / math.sqrt(LONG)


def test_a_scale_on_the_average_is_in_units_of_the_bound() -> None:
    plan = plan_of(bound=0.01, noise_multiplier=None, noise_scale=1e-3, placement="average")
    noise, _ = released(plan, LONG)
    assert float(noise.std()) == pytest.approx(1e-5, rel=CLOSE)


def test_it_is_the_noise_of_the_gaussian_mechanism_value_for_value() -> None:
    """So runs with noise on different tensors differ by nothing but where the noise is."""
    size, spans = 1000, ((100, 300), (900, 1000))
    plan = plan_of(spans)
    weights, sampling = plan.weights, Sampling(cohort=10)
    full = make_plan(Privacy(mechanism="gaussian", noise_multiplier=1.5, delta=1e-5), sampling, weights, 2.0, 10, 0)
    some, _ = released(plan, size, step=3)
    everything, _ = released(full, size, step=3)
    for start, end in spans:
        assert torch.equal(some[start:end], everything[start:end])
    assert not torch.equal(released(plan, size, step=4)[0], some)


def test_the_other_tensors_get_their_share_of_the_same_noise() -> None:
    """PFL-ASR Figure 16, right: half of the deviation on one group."""
    spans = ((100, 300), (900, 1000))
    plan = plan_of(spans, elsewhere=0.5)
    everything, _ = released(plan_of(((0, 1000),)), 1000)
    some, length = released(plan, 1000)
    for start, end in spans:
        assert torch.equal(some[start:end], everything[start:end])
    for start, end in ((0, 100), (300, 900)):
        assert torch.allclose(some[start:end], everything[start:end] / 2, rtol=1e-6, atol=0)
    assert length == pytest.approx(float(some.norm()), rel=1e-6)
    assert plan.mechanism.noisy_sizes([100, 200, 700]) == [25.0, 200.0, 250.0]


# What it promises: nothing


def test_the_event_has_no_noise_in_it_and_epsilon_is_infinite() -> None:
    plan = plan_of()
    assert plan.event.noise_multiplier == plan.mechanism.event_at(0, 3.0).noise_multiplier == 0
    assert not plan.event.private
    assert plan.epsilon(1) == math.inf
    with_delta = replace(plan, delta=1e-5)
    assert with_delta.epsilon(1) == math.inf


def test_a_run_says_everywhere_that_there_is_no_guarantee(tmp_path: Path, command: Command, no_figures: None) -> None:
    out = tmp_path / "run"
    summary = folder.train(digits(PARTIAL), out, quiet=True, page=write_report)
    assert (summary["epsilon"], summary["delta"], summary["mechanism"]) == (None, None, "partial")
    records = [json.loads(line) for line in (out / folder.METRICS).read_text().splitlines()]
    assert [record["epsilon"] for record in records] == [None] * 3
    assert all(record["noise"] > 0 for record in records)
    assert folder.check_ledger(out)["epsilon"] is None
    assert "no privacy guarantee" in command("ledger", out)[1]
    page = (out / "report.html").read_text()
    assert "Noise was added only to weight" in page
    assert "<b>no privacy guarantee</b>" in page
    assert "differentially private" not in page


def test_the_norms_of_a_run_have_noise_on_its_tensors_and_none_on_the_others() -> None:
    records: list[dict[str, Any]] = []
    simulate(digits(PARTIAL), watch=lambda loop, state, record: records.append(record))
    layers = [record["layers"] for record in records if "layers" in record]
    assert [record["step"] for record in layers] == [2, 3]
    assert all(record["noise"][0] > 0 == record["noise"][1] for record in layers)  # weight, bias


def test_noise_on_every_tensor_trains_the_model_of_the_gaussian_mechanism() -> None:
    everywhere = PARTIAL.replace("weight", "'*'")
    _, one = simulate(digits(everywhere))
    _, other = simulate(digits("privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}"))
    assert torch.equal(one.parameters, other.parameters)


def test_a_pattern_without_a_tensor_stops_a_run_before_it_trains(tmp_path: Path, command: Command) -> None:
    words = ("--set", PARTIAL.replace("weight", "wieght"))
    code, _, said = command("train", "convex/digits", "--out", tmp_path / "run", *words)
    assert code == 2
    assert "no tensor of the model matches 'wieght'" in said
    assert not (tmp_path / "run" / folder.METRICS).exists()


# What does not go with it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "privacy.target_epsilon=3",
            ["privacy.target_epsilon: noise on a part", "give noise_multiplier or noise_scale"],
        ),
        (
            "privacy.noise_multiplier=null",
            ["give exactly one of noise_multiplier and noise_scale (given: none of them)"],
        ),
        ("privacy.noise_scale=1", ["give exactly one of noise_multiplier and noise_scale"]),
        ("privacy.delta=1e-5", ["privacy.delta: noise on a part"]),
        ("privacy.tensors=[]", ["privacy.tensors: required", "'*.mlp.*'"]),
        ("privacy.trust=local", ["privacy.trust=local: cannot be combined"]),
        ("privacy.source=system", ["privacy.source=system: cannot be combined"]),
        ("privacy.bands=3", ["privacy.bands: only used with privacy.mechanism: banded"]),
        ("sampling.kind=cyclic", ["sampling.kind=cyclic: cannot be combined", "poisson or fixed"]),
        ("bounding={rule: clip, bound: 1, adaptive: {}}", ["bounding.adaptive: cannot be combined"]),
        ("bounding={rule: none}", ["bounding.rule=none"]),
    ],
)
def test_what_cannot_be_combined_is_refused_with_its_reason(change: str, said: list[str]) -> None:
    told = problems(PARTIAL, change)
    for words in said:
        assert words in told


@pytest.mark.parametrize("change", ["privacy.tensors=[weight]", "privacy.all_but=true"])
def test_tensors_have_no_meaning_for_other_mechanisms(change: str) -> None:
    assert "only used with privacy.mechanism: partial" in problems(change)


def test_fixed_cohorts_need_no_accountant_here() -> None:
    digits(PARTIAL, "sampling.kind=fixed")
    assert plan_of(sampling="fixed").sampler == "fixed"


def test_a_plan_refuses_what_a_recipe_would() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"spans": ()}, {"trust": "local"}, {"source": "system"}, {"noise_multiplier": None}, {"bound": math.inf},
    )  # fmt: skip
    for change in wrong:
        with pytest.raises(UserError, match=r"partial|system|bound|exactly one of noise_multiplier"):
            plan_of(**change)
    with pytest.raises(UserError, match="cyclic"):
        plan_of(sampling="cyclic")
    with pytest.raises(UserError, match="adaptive"):
        make_plan(partial(), Sampling(cohort=5), np.full(10, 0.1), 1.0, 3, 0, follows="quantile", counters=1)
