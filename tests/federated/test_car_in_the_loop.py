"""CAR's adaptive rule inside the loop: whose bound is whose, what is released, and that nothing claims a guarantee."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.errors import UserError
from confide.federated import car_adaptive
from confide.federated.car_adaptive import CarAdaptive, Clients
from confide.privacy.ledger import Ledger
from confide.recipe import Recipe, load
from confide.runs import checkpoint, folder
from confide.runs.simulation import simulate

CAR = "bounding.adaptive={kind: car, noise_multiplier: 0.1, warm_up: 2}"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def adaptive(tiny: str) -> Callable[..., Recipe]:
    def make(*changes: str) -> Recipe:
        return load(tiny, ["privacy={}", "bounding.bound=0.5", CAR, *changes])

    return make


def test_each_step_is_the_papers_arithmetic_on_every_clients_own_norm(adaptive: Callable[..., Recipe]) -> None:
    """The loop's bounds after each step are those of the equations, from norms that a run without any rule shows."""
    recipe = adaptive("run.steps=4")
    rule = recipe.bounding.adaptive
    assert isinstance(rule, CarAdaptive)
    clients = car_adaptive.start(0.5, 12)
    from confide.federated.bounds import CarBounds
    from confide.federated.cohort import Tally

    seen: list[tuple[np.ndarray, list[float]]] = []
    original = CarBounds.follow

    def watched(bounds: CarBounds, state: Any, tally: Tally, cohort: np.ndarray, release: Any) -> None:
        seen.append((cohort, list(tally.raw_norms)))
        original(bounds, state, tally, cohort, release)

    kept: list[dict[str, torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CarBounds, "follow", watched)
        simulate(recipe, watch=lambda loop, state, record: kept.append(state.clients))
    for step, (cohort, norms) in enumerate(seen):
        assert len(cohort) == len(norms)
        clients = car_adaptive.next_clients(rule, clients, torch.from_numpy(cohort), torch.tensor(norms).double(), step)
        torch.testing.assert_close(kept[step]["bounds"], clients.bounds)
        torch.testing.assert_close(kept[step]["norms"], clients.norms)
    assert (clients.bounds != 0.5).any()
    assert len(set(clients.bounds.tolist())) > 2


def test_warm_up_is_a_run_without_bound_and_noise(adaptive: Callable[..., Recipe]) -> None:
    warm = simulate(adaptive("run.steps=2", "final={}", "evaluation={}"))[1]
    free = simulate(adaptive("run.steps=2", "final={}", "evaluation={}", "bounding={rule: none}"))[1]
    torch.testing.assert_close(warm.parameters, free.parameters, atol=1e-6, rtol=1e-5)
    cold = simulate(adaptive("run.steps=2", "final={}", "evaluation={}", "bounding.adaptive={kind: car, warm_up: 0}"))[
        1
    ]
    assert (cold.parameters - free.parameters).abs().max() > 1e-3


def test_the_noise_on_the_sum_has_the_scale_of_the_clients_own_bounds(adaptive: Callable[..., Recipe]) -> None:
    """Two runs that differ only in z differ by noise alone at the first step: its deviation is that of eq. 40."""
    changes = (
        "task.dimension=600", "task.rank=1", "task.users=2", "sampling={kind: fixed, cohort: 2}", "run.steps=1",
        "final={}", "evaluation={}", "central={kind: sgd, learning_rate: 1}",
    )  # fmt: skip
    runs = {}
    for z in (0.1, 1e-9):
        one = adaptive(*changes, f"bounding.adaptive={{kind: car, noise_multiplier: {z}, decay: 0}}")
        runs[z] = simulate(one, watch=lambda loop, state, record: None)[1]
    noise = (runs[0.1].parameters - runs[1e-9].parameters).double()
    rule, norms = CarAdaptive(decay=0), runs[0.1].clients["norms"]
    scales = car_adaptive.noise_scales(rule, car_adaptive.start(0.5, 2), torch.arange(2), norms, 0)
    expected = float(torch.linalg.vector_norm(scales / 2))  # the mean of two messages
    assert float(noise.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * 600))


@pytest.mark.usefixtures("warm_processes")
def test_workers_change_nothing(adaptive: Callable[..., Recipe], tmp_path: Path, no_figures: None) -> None:
    ends = []
    for workers in (1, 2):
        folder.train(adaptive(), tmp_path / str(workers), workers=workers, quiet=True)
        ends.append(checkpoint.load(tmp_path / str(workers)).state)
    assert torch.equal(ends[0].parameters, ends[1].parameters)
    assert torch.equal(ends[0].clients["bounds"], ends[1].clients["bounds"])


def test_a_stopped_run_ends_as_if_it_had_not_been(
    adaptive: Callable[..., Recipe], tmp_path: Path, no_figures: None, signal_after: Callable[..., Any]
) -> None:
    from confide.errors import Stopped

    folder.train(adaptive(), tmp_path / "whole", quiet=True)
    with signal_after(4), pytest.raises(Stopped):
        folder.train(adaptive(), tmp_path / "parts", quiet=True)
    assert set(checkpoint.load(tmp_path / "parts").state.clients) == {"bounds", "norms"}
    folder.resume(tmp_path / "parts", quiet=True)
    whole, parts = (checkpoint.load(tmp_path / name).state for name in ("whole", "parts"))
    assert torch.equal(whole.parameters, parts.parameters)
    assert torch.equal(whole.clients["bounds"], parts.clients["bounds"])


def test_nothing_claims_a_guarantee(command: Command, tiny: str, tmp_path: Path, no_figures: None) -> None:
    out = tmp_path / "run"
    code, text, _ = command("train", tiny, "--out", out, "--set", "privacy={}", "--set", CAR)
    assert code == 0
    assert "no formal guarantee" in " ".join(text.split())
    assert "epsilon" not in text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["epsilon"] is None
    assert summary["delta"] is None
    assert "no formal guarantee" in summary["guarantee"]
    assert (summary["mechanism"], summary["trust"], summary["noise_multiplier"]) == ("car adaptive", "local", 0)
    page = (out / "report.html").read_text()
    assert "no formal guarantee" in page
    assert "differentially private for" not in page
    assert "No noise" not in page
    code, text, _ = command("ledger", out)
    assert code == 0
    assert "no privacy guarantee" in text
    events = [entry.event for entry in Ledger.read(out / "ledger.jsonl").entries]
    assert {(event.noise_multiplier, event.sensitivity, event.private) for event in events} == {(0, None, False)}
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(record.get("epsilon") is None for record in records)
    assert "noise" not in records[0]
    assert records[-1]["noise"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1e-5}",
            "privacy.mechanism: bounding.adaptive.kind",
        ),
        ("privacy={delta: 1e-5}", "no formal guarantee"),
        ("privacy={trust: local}", "one problem"),
        ("bounding.rule=per_layer_clip", "a client has one bound"),
        ("bounding.adaptive={kind: cat}", "bounding.adaptive.kind=cat: expected one of quantile, car"),
        ("bounding.adaptive={kind: car, quantil: 1}", "did you mean 'quantile'"),
        ("bounding.adaptive={kind: car, update_rate: 2}", "bounding.adaptive.update_rate=2: expected a number above 0"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(adaptive: Callable[..., Recipe], change: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        adaptive(change)


def test_a_noise_that_leaves_nothing_is_refused_before_training(adaptive: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match="2 sigma_b = 12/10"):
        simulate(adaptive("bounding.adaptive={kind: car, noise_multiplier: 1.2}"))


def test_without_a_kind_the_rule_is_the_private_quantile(tiny: str) -> None:
    plain = load(tiny, ["bounding.adaptive={quantile: 0.4}"])
    named = load(tiny, ["bounding.adaptive={kind: quantile, quantile: 0.4}"])
    assert plain == named
    assert plain.digest == named.digest


def test_a_client_whose_update_is_not_finite_keeps_its_bound() -> None:
    clients = Clients(torch.ones(2).double(), torch.tensor([0.0, 3.0]).double())
    norms = torch.tensor([math.nan, math.nan]).double()
    scales = car_adaptive.noise_scales(CarAdaptive(), clients, torch.arange(2), norms, 0)
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
