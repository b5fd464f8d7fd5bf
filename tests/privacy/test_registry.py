"""Claims about mechanisms as objects: a recipe means exactly one, each says what it refuses, one's own is a class."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch

from confide import recipe
from confide.build import make_loop
from confide.errors import UserError
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import MECHANISMS, Mechanism, Privacy, mechanism_of
from confide.privacy.mechanisms.banded import Banded
from confide.privacy.mechanisms.car import CarNoise
from confide.privacy.mechanisms.distributed import Distributed
from confide.privacy.mechanisms.gaussian import Gaussian
from confide.privacy.mechanisms.local import Local
from confide.privacy.mechanisms.none import Nothing
from confide.privacy.mechanisms.partial import Partial
from confide.privacy.plan import Release
from confide.runs import folder

pytestmark = pytest.mark.usefixtures("own_code")

OWN = '''\
from confide.privacy.mechanisms import Mechanism


class Halved(Mechanism):
    """Noise of z at even steps and of z / 2 at odd ones."""

    name, summary = "halved", "noise that is halved at every second step"

    @classmethod
    def refusals(cls, asked):
        odd = [] if asked.privacy.options.get("odd") else ["privacy.options.odd: required"]
        return [*super().refusals(asked), *odd]

    def multiplier_at(self, step):
        return self.multiplier / (2 if step % 2 else 1)


def nothing():
    pass
'''
SETS = [
    "run.steps=4", "evaluation={every: 10}", "privacy.target_epsilon=null", "privacy.noise_multiplier=2",
    "privacy.accountant=rdp", "privacy.mechanism=python", "privacy.factory=own_noise_for_tests:Halved",
    "privacy.options={odd: true}",
]  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_noise_for_tests.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_noise_for_tests", raising=False)  # of another test's folder
    return tmp_path


@pytest.mark.parametrize(
    ("given", "follows", "kind"),
    [
        ({}, None, Nothing),
        ({"mechanism": "gaussian"}, None, Gaussian),
        ({"mechanism": "gaussian"}, "quantile", Gaussian),
        ({"mechanism": "gaussian", "trust": "distributed"}, None, Distributed),
        ({"mechanism": "gaussian", "trust": "local"}, None, Local),
        ({"mechanism": "banded"}, None, Banded),
        ({"mechanism": "partial"}, None, Partial),
        ({}, "car", CarNoise),
        ({"mechanism": "gaussian"}, "car", CarNoise),  # which then refuses it
    ],
)
def test_a_recipe_means_one_mechanism(given: dict[str, Any], follows: str | None, kind: type[Mechanism]) -> None:
    assert mechanism_of(Privacy.model_validate(given), follows) is kind
    assert kind in MECHANISMS


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (["privacy.bands=4"], "privacy.bands: only used with privacy.mechanism: banded"),
        (["privacy.tensors=[weight]"], "privacy.tensors: only used with privacy.mechanism: partial"),
        (["privacy.factory=a:B"], "privacy.factory: required by mechanism python"),
        (["privacy.options={a: 1}"], "privacy.options: only used with privacy.mechanism: python"),
        (["privacy.mechanism=python"], "privacy.factory: required by mechanism python"),
        (["privacy.mechanism=gausian"], "did you mean 'gaussian'?"),
    ],
)
def test_a_key_of_another_mechanism_is_refused(sets: list[str], problem: str) -> None:
    with pytest.raises(UserError) as error:
        recipe.load("convex/digits", sets)
    assert problem in str(error.value)


def test_settings_that_are_not_used_leave_no_trace_in_a_dump() -> None:
    """Old folders name their recipe by a digest of the dump: a new key must not change it."""
    assert {"factory", "options"}.isdisjoint(Privacy(mechanism="gaussian").model_dump())


def test_noise_is_refused_before_the_ledger_has_the_release() -> None:
    loop = make_loop(recipe.load("convex/digits"))
    event = loop.plan.mechanism.event_at(0, 1.0)
    release = Release(loop.plan, event, np.arange(3), 0, loop.ledger, "here", True, from_users=False)
    total = torch.zeros(3)
    with pytest.raises(RuntimeError, match="before the ledger had the release"):
        release.add_noise(total, {})
    assert loop.ledger.count == 0
    assert not total.any()
    assert release.record().add_noise(total, {}) is not None
    assert (loop.ledger.count, release.record().attempt) == (1, 0)
    assert total.all()


def test_a_mechanism_of_ones_own_is_charged_step_by_step(own: Path) -> None:
    """Epsilon is that of an accountant which never saw this project, over the multipliers that really ran."""
    wanted = recipe.load("convex/digits", SETS)
    summary = folder.train(wanted, own / "run", quiet=True)
    entries = Ledger.read(own / "run" / "ledger.jsonl").entries
    assert [entry.event.noise_multiplier for entry in entries] == [2.0, 1.0, 2.0, 1.0]
    book = dp_accounting.rdp.RdpAccountant([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)))
    for entry in entries:
        noise = dp_accounting.GaussianDpEvent(entry.event.noise_multiplier)
        book.compose(dp_accounting.PoissonSampledDpEvent(entry.event.rate, noise))
    assert summary["epsilon"] == pytest.approx(book.get_epsilon(1e-5), rel=1e-4)  # ours tries more orders
    assert folder.check_ledger(own / "run")["epsilon"] == summary["epsilon"]
    assert summary["mechanism"] == "halved"


def test_a_mechanism_of_ones_own_adds_the_noise_that_it_charges_for(own: Path) -> None:
    plan = make_loop(recipe.load("convex/digits", SETS)).plan
    for step, share in ((0, 1.0), (1, 0.5)):
        total = torch.zeros(200_000, dtype=torch.float64)
        release = Release(
            plan, plan.mechanism.event_at(step, 0.5), plan.cohort(step), step, Ledger.create(None, {}), "", True, False
        ).record()
        release.add_noise(total, {})
        expected = share * 2.0 * (release.event.sensitivity or 0.0)
        assert float(total.std()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("privacy.options={}", "privacy.options.odd: required"),
        ("privacy.factory=own_noise_for_tests:nothing", "a subclass of confide.privacy.mechanisms.Mechanism"),
        ("privacy.factory=own_noise_for_tests:Missing", "has no Missing"),
        ("privacy.factory=no_such_module_here:Halved", "No module named 'no_such_module_here'"),
        ("privacy.trust=local", "privacy.trust=local: cannot be combined with privacy.mechanism: halved"),
        ("sampling.kind=cyclic", "independent noise gains nothing from a schedule"),
        ("bounding={rule: none}", "noise protects nobody unless every update is bounded"),
    ],
)
def test_what_a_mechanism_of_ones_own_refuses(own: Path, change: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        recipe.load("convex/digits", [*SETS, change])
    assert problem in str(error.value)


def test_a_run_does_not_go_on_with_another_mechanism_of_the_same_name(own: Path) -> None:
    """Other code under the same noise would give away the difference: the ledger's first line has a digest of it."""
    wanted = recipe.load("convex/digits", SETS)
    folder.train(wanted, own / "run", quiet=True)
    first = json.loads((own / "run" / "ledger.jsonl").read_text().splitlines()[0])["run"]["inputs"]
    assert "the code of privacy.factory" in first
    (own / "own_noise_for_tests.py").write_text(OWN.replace("/ (2", "/ (3"))
    (own / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"the code of privacy\.factory changed since the run began"):
        folder.resume(own / "run", quiet=True)
