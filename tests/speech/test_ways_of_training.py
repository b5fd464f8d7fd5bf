"""Every part of a model with every bounding rule: many users in one pass give what one after the other gives.

What the code claims to take in one pass is listed here, and the code is asked which way it took: where it falls back to
the plain path, or where the list is not complete, a test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout, flatten
from confide.federated.rules import PYTHON, RULES
from confide.speech.pretrained import Part
from confide.speech.settings import SpeechSettings
from confide.speech.task import Speech

_BLOCKS: dict[str, Any] = {"first": 1, "rank": 2}
MODELS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "whole": (None, {"layers": 1, "width": 16, "mlp": 24, "heads": 2, "dropout": 0, "layer_drop": 0}),
    "head": ("whisper", {}),
    "hidden": ("whisper", {"hidden": 6}),
    "lora": ("whisper", {"train": ["head", "lora"], **_BLOCKS}),
    "adapter": ("hubert", {"train": ["head", "adapter"], "first": 1}),
    "norms": ("wav2vec2", {"train": ["head", "norms"], "first": 1}),
    "all": ("wavlm", {"train": ["head", "all", "adapter"], "first": 1}),
    "union": ("wav2vec2-stable", {"train": ["head", "lora", "adapter", "norms"], **_BLOCKS}),
}
LOCALS: dict[str, dict[str, Any]] = {
    "everything": {},
    "one utterance": {"batch_size": 1, "gradient_clip": 0.5},
    "two utterances": {"batch_size": 2, "rates": {"*bias": 0.5}},
}
RULE_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"rule": "none"},
    "clip": {"rule": "clip"},
    "clip at a quantile": {"rule": "clip", "adaptive": {"quantile": 0.5}},
    "clip as CAR does": {"rule": "clip", "adaptive": {"kind": "car"}},
    "normalise": {"rule": "normalise"},
    "python": {"rule": "python", "function": f"{__name__}:a_half"},
    "learned": {"rule": "per_layer_clip", "split": "learned", "adaptive": {"quantile": 0.8}},
    **{
        f"{rule} {split}": {"rule": rule, "split": split, **more}
        for rule in ("per_layer_clip", "per_layer_normalise")
        for split, more in {
            "uniform": {}, "dim": {}, "root": {}, "weighted": {"layer_weights": {"head.*": 3.0}},
        }.items()
    },
}  # fmt: skip
"""Every rule with every split, and every way in which a bound may follow something."""
USERS = np.array([3, 0, 2, 1])
pytestmark = pytest.mark.usefixtures("own_code")


def a_half(norms: Tensor, bounds: Tensor) -> Tensor:
    """A rule of somebody's own."""
    return torch.full_like(norms, 0.5)


def test_the_lists_name_every_rule_and_every_part() -> None:
    assert {each["rule"] for each in RULE_SETTINGS.values()} == set(RULES)
    assert {each["function"] for each in RULE_SETTINGS.values() if each["rule"] == PYTHON} == {f"{__name__}:a_half"}
    splits = {each.get("split") for each in RULE_SETTINGS.values()} - {None}
    assert splits == set(get_args(Bounding.model_fields["split"].annotation))
    assert {part for _, more in MODELS.values() for part in more.get("train", ["head"])} == set(get_args(Part))


@pytest.fixture(scope="module")
def task(
    tmp_path_factory: pytest.TempPathFactory, tiny_speech_model: Callable[[str], Path]
) -> Callable[[str | None, dict[str, Any]], Speech]:
    place = tmp_path_factory.mktemp("ways")

    def voices(population: str, speakers: int) -> dict[str, Any]:
        """Utterances of one to three words: of unequal length."""
        return {
            "kind": "synthetic", "population": population, "speakers": speakers, "utterances": 3,
            "sentences": "digits", "digits": [1, 3], "cache": str(place / "voices"),
        }  # fmt: skip

    def make(family: str | None, model: dict[str, Any]) -> Speech:
        given: dict[str, Any] = {"kind": "speech", "corpus": voices("federated", 4), "test": voices("test", 1)}
        chosen = model if family is None else {"encoder": {"source": str(tiny_speech_model(family)), **model}}
        more = {"augment": None} if family is None else {}
        return Speech(
            SpeechSettings.model_validate({**given, "model": chosen, "cache": str(place / "kept"), **more}), 0, True
        )

    return make


@dataclass(frozen=True)
class Ready:
    """A trainer as it is, the same with nothing but the plain path, a model, and a little less than the mean norm."""

    fast: PartTrainer
    plain: PartTrainer
    central: Tensor
    norm: float


@pytest.fixture(scope="module")
def trainers(task: Callable[..., Speech]) -> Callable[[str, str], Ready]:
    @cache
    def make(model: str, local: str) -> Ready:
        found = task(*MODELS[model])
        draw = torch.Generator().manual_seed(0)
        begun = {n: p + 0.3 * torch.randn(p.shape, generator=draw) for n, p in found.initial_parameters().items()}
        layout, central = Layout.of(begun), flatten(begun)
        training = LocalTraining.model_validate({"steps": 1, "learning_rate": 30.0, **LOCALS[local]})
        rule, weights = bounder(Bounding(rule="none"), layout), np.array([1.0, 2.0, 0.5, 3.0])
        fast, plain = (PartTrainer(found, layout, training, rule, weights, 1, central) for _ in range(2))
        plain.one_pass = plain.low_rank = None
        plain.task = _NoShortCut(found)
        tally = plain.add_part(central, USERS, 2, torch.zeros_like(central))
        return Ready(fast, plain, central, 0.97 * tally.norm / len(USERS))  # gradients that are clipped have one norm

    return make


class _NoShortCut:
    def __init__(self, task: Speech) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def fast_updates(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("rule", RULE_SETTINGS)
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("model", MODELS)
def test_many_users_at_once_give_what_one_after_the_other_gives(
    trainers: Callable[[str, str], Ready], model: str, local: str, rule: str
) -> None:
    made = trainers(model, local)
    fast, plain, central = made.fast, made.plain, made.central
    chosen = Bounding.model_validate({"bound": None if rule == "none" else made.norm, **RULE_SETTINGS[rule]})
    assert chosen.problems() == []
    ready = bounder(chosen, fast.layout)
    bounds = None
    if chosen.follows is not None:
        bounds = made.norm * torch.tensor([0.1, 0.9, 1.5, 3.0]).double() if ready.per_user else ready.bounds * 0.7
    sums, tallies, ways = [], [], []
    for trainer in (fast, plain):
        trainer.bounder = replace(ready)
        trainer.taken.clear()
        total = torch.zeros_like(central)
        tallies.append(trainer.add_part(central, USERS, 2, total, bounds))
        sums.append(total)
        ways.append(dict(trainer.taken))
    wanted = "short cut" if model in ("head", "hidden") and local == "everything" else "one pass"
    assert ways == [{wanted: 4}, {"plain": 4}]
    whole = float(sums[1].norm())
    assert whole > 0
    assert 0 < tallies[1].bounded < 4 or rule != "clip" or local == "one utterance", "some are bounded, others not"
    for one, other in zip(fast.layout.pieces(sums[0]), fast.layout.pieces(sums[1]), strict=True):
        assert float((one - other).norm()) <= 5e-4 * float(other.norm()) + 2e-5 * whole
    for name, value in vars(tallies[1]).items():
        assert getattr(tallies[0], name) == pytest.approx(value, rel=1e-3, abs=1e-3), name


@pytest.mark.parametrize(
    ("family", "model", "local", "why"),
    [
        ("moonshine", {"train": ["head", "norms"]}, {}, "its norms have no bias"),
        ("whisper", {"train": ["head", "lora"], "rank": 2}, {"steps": 2}, "the second step begins elsewhere"),
        ("whisper", {}, {"steps": 2}, "the second step begins elsewhere"),
        (None, {**MODELS["whole"][1], "dropout": 0.1}, {}, "masks are drawn batch by batch"),
    ],
)
def test_what_cannot_be_told_apart_goes_the_plain_way(
    task: Callable[..., Speech], family: str | None, model: dict[str, Any], local: dict[str, Any], why: str
) -> None:
    found = task(family, model)
    begun = found.initial_parameters()
    layout, central = Layout.of(begun), flatten(begun)
    training = LocalTraining.model_validate({"steps": 1, "learning_rate": 1.0, **local})
    trainer = PartTrainer(found, layout, training, bounder(Bounding(rule="none"), layout), np.ones(4), 1, central)
    trainer.add_part(central, USERS[:2], 0, torch.zeros_like(central))
    assert dict(trainer.taken) == {"plain": 2}, why
