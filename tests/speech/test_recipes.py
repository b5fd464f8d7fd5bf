"""What the recipes of the paper make: its model, its batches, its rates over the steps, and its epsilon."""

from __future__ import annotations

import math
import re

import pytest

from confide.federated.optimisers import Lamb, Lars
from confide.privacy.planner import Point
from confide.recipe import Recipe, load, shipped
from confide.speech.augment import SpecAugment
from confide.speech.features import FeatureSettings
from confide.speech.model import PRESETS, parameter_shapes
from confide.speech.settings import SpeechSettings

PAPER = sorted(name for name in shipped() if name.startswith("speech/paper/"))
SEEDS = [name for name in PAPER if "/seed-" in name]
PRIVATE = [name for name in PAPER if load(name).privacy.mechanism != "none"]
SIZES = "speech/paper/model-sizes"
PROMISED = sorted(name for name in shipped() if name.startswith("speech/") and load(name).privacy.target_epsilon)
PRINTED = {3e-6: 42, 1e-5: 4.5}  # epsilon by noise, for 200 times the speakers of CV-en-train


def task_of(recipe: Recipe) -> SpeechSettings:
    assert isinstance(recipe.task, SpeechSettings)
    return recipe.task


def rate(recipe: Recipe, step: int) -> float:
    """The central learning rate at a step."""
    return recipe.central.learning_rate * recipe.central.schedule(step)


def test_there_are_recipes_of_every_kind() -> None:
    assert (len(PAPER), len(SEEDS), len(PRIVATE)) == (23, 2, 6)


@pytest.mark.parametrize("name", PROMISED)
def test_recipes_with_an_epsilon_name_the_plan_that_makes_their_noise(name: str) -> None:
    recipe, text = load(name), shipped()[name].read_text()
    command = re.search(r"^# The noise: confide plan noise (.*)$", text, re.MULTILINE)
    assert command, "no comment says how the noise was planned"
    planned = {option: float(value) for option, value in re.findall(r"--(\S+) (\S+)", command[1])}
    people = (
        getattr(task_of(recipe).corpus, "people", None) or {"words": 1560, "an4": 74, "digits": 48}[name.split("/")[1]]
    )
    assert planned == {
        "target-epsilon": recipe.privacy.target_epsilon, "delta": recipe.privacy.delta, "rounds": recipe.run.steps,
        "cohort": recipe.sampling.cohort, "population": people,
    }  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_every_recipe_of_the_paper_has_its_model_features_and_masks(name: str) -> None:
    recipe = load(name)
    task = task_of(recipe)
    assert re.search(r"PFL-ASR (Table|Figure|appendix)", recipe.description)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(task.model).values())
    assert parameters == {SIZES: 113_910_816, "speech/paper/post-layernorm": 255_800_864 - 2 * 768}.get(
        name, 255_800_864
    )
    assert (task.model.dropout, task.model.layer_drop) == (0.3, 0.1 if name == SIZES else 0.3)
    assert task.model.norm == ("post" if name.endswith("post-layernorm") else "pre")
    assert (task.model.kernel, task.model.stride) == (7, 3)
    assert task.features == FeatureSettings()
    assert task.augment == SpecAugment(
        frequency_masks=2, frequency_width=30, time_masks=10, time_width=50, time_ratio=0.1
    )
    assert recipe.local.gradient_clip == 1


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_are_trained_centrally_on_240_seconds_for_each_of_eight_accelerators(name: str) -> None:
    recipe = load(name)
    assert task_of(recipe).pool == recipe.sampling.cohort == 8
    assert (recipe.local.steps, recipe.local.learning_rate, recipe.local.batch_seconds) == (1, 1.0, 240)
    assert isinstance(recipe.central, Lars)
    assert (rate(recipe, 0), recipe.central.coefficient, recipe.central.momentum) == (0.5, 0.001, 0.9)
    assert 300_000 <= recipe.run.steps <= 600_000


@pytest.mark.parametrize(("name", "first"), [(SEEDS[0], 330_000), (SEEDS[1], 40_000)])
def test_the_rate_of_a_seed_is_halved_in_the_papers_stairs(name: str, first: int) -> None:
    schedule = load(name).central.schedule
    assert schedule(first - 1) == 1.0
    for stair in range(3):
        begin = first + 50_000 * stair
        assert schedule(begin) == schedule(begin + 49_999) == pytest.approx(0.5 ** (stair + 1))


@pytest.mark.parametrize("name", [name for name in PAPER if name not in SEEDS])
def test_federated_batches_are_as_long_as_the_papers(name: str) -> None:
    recipe = load(name)
    assert recipe.local.batch_seconds == (360 if task_of(recipe).corpus.kind == "librispeech" else 120)
    assert recipe.run.steps == 64_000 if name.endswith("post-layernorm") else 2000 <= recipe.run.steps <= 2006


@pytest.mark.parametrize(
    ("name", "central", "local", "schedule"),
    [
        ("fl-librispeech-scratch", 0.006, 0.4, (0.6, 1000, 500)),
        ("fl-librispeech-seed", 0.003, 0.2, (0.6, 1000, 250)),
        ("fl-common-voice-scratch", 0.006, 0.4, (0.6, 1000, 500)),
        ("fl-common-voice-seed", 0.002, 0.2, (0.6, 750, 750)),
        ("fl-common-voice-cohorts", 0.002, 0.2, (0.6, 750, 750)),
        ("fedprox", 0.002, 0.2, (0.6, 750, 750)),
        ("iid", 0.002, 0.2, (0.6, 750, 750)),
        ("weak-seed", 0.006, 0.4, (0.6, 1000, 500)),
    ],
)
def test_rates_and_schedules_are_those_of_figures_2_and_3(
    name: str, central: float, local: float, schedule: tuple[float, int, float]
) -> None:
    recipe = load(f"speech/paper/{name}")
    assert isinstance(recipe.central, Lamb)
    assert recipe.central.bias_correction  # as in the released code
    assert recipe.local.learning_rate == local
    factor, start, transition = schedule
    assert rate(recipe, 0) == rate(recipe, start) == central
    for times in (1, 2, 3):
        assert rate(recipe, int(start + times * transition)) == pytest.approx(central * factor**times)
    assert recipe.local.steps == (10 if name.endswith("cohorts") else None)
    assert recipe.local.epochs == (None if name.endswith("cohorts") else 10)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_recipes_bound_at_a_hundredth_and_spend_what_the_paper_prints(name: str) -> None:
    """Tables 1 and 18 print epsilon for more users than there are: the same noise on the average of larger cohorts."""
    recipe = load(name)
    assert recipe.bounding.bound == 0.01
    assert (recipe.sampling.kind, recipe.sampling.cohort, recipe.privacy.placement) == ("poisson", 1024, "average")
    assert recipe.privacy.noise_scale is not None
    assert recipe.privacy.delta is not None
    times, users, printed = (250, 6171, {3e-6: 180}) if name.endswith("french-german") else (200, 34_753, PRINTED)
    cohort = recipe.sampling.cohort * times
    point = Point(recipe.privacy.noise_scale * cohort, cohort, users * times, recipe.run.steps, recipe.privacy.delta)
    stated = printed[recipe.privacy.noise_scale]
    assert 0.94 * stated < point.spent(recipe.privacy.accountant) <= stated
    assert (recipe.local.steps, recipe.local.epochs, recipe.local.learning_rate) == (10, None, 0.2)
    assert [rate(recipe, step) for step in (0, 750, 1500)] == pytest.approx([0.002, 0.002, 0.0012])
    assert task_of(recipe).start is not None


def test_the_private_recipes_differ_in_how_they_bound() -> None:
    rules = {name: load(f"speech/paper/dp-{name}").bounding for name in ("global", "uniform", "dim", "weighted")}
    assert {name: (rule.rule, rule.split) for name, rule in rules.items() if name != "global"} == {
        name: ("per_layer_clip", name) for name in ("uniform", "dim", "weighted")
    }
    assert rules["global"].rule == "clip"


@pytest.mark.parametrize("preset", ["narrow", "shallow", "baseline", "wide", "deep"])
def test_every_size_of_table_21_is_one_setting_away_with_a_layer_drop_of_a_tenth(preset: str) -> None:
    model = task_of(load(SIZES, [f"task.model.preset={preset}"])).model
    assert (model.layers, model.width, model.mlp) == tuple(PRESETS[preset][key] for key in ("layers", "width", "mlp"))
    assert model.layer_drop == 0.1


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("seed-librispeech", ["task.corpus.subset=LS-960", "run.steps=600000", "central.schedule.start=330000"]),
        ("seed-librispeech", ["run.steps=30"]),
        ("seed-librispeech", ["task.model.norm=post"]),
        ("seed-common-voice", ["task.corpus.share=5"]),
        ("seed-common-voice", ["task.corpus.share=null", "task.start=runs/seed", "central.learning_rate=0.2"]),
        ("seed-common-voice", ["task.corpus.language=fr", "task.test.language=fr"]),
        ("fl-librispeech-scratch", ["task.corpus.users=iid", "task.augment=null", "local.proximal=0.1"]),
        ("fl-common-voice-seed", ["task.corpus.share=95", "sampling.cohort=8"]),
        ("fl-common-voice-cohorts", ["sampling.cohort=5120", "task.start=runs/seed-ls-960"]),
        ("dp-global", ["privacy={mechanism: none}", "run.steps=2000", "bounding.bound=0.001"]),
        ("dp-uniform", ["privacy.noise_scale=0.625e-6"]),
        ("dp-weighted", ['bounding.layer_weights={"*.mlp.*": 1.5}']),
        ("dp-dim", ["sampling.cohort=256", "privacy.noise_scale=30e-6", "task.corpus.share=90"]),
        ("dp-french-german", ["bounding.rule=clip", "task.corpus.language=de", "task.test.language=de"]),
        ("weak-seed", ["task.start=null"]),
        ("post-layernorm", ["task.model.norm=pre", "central.schedule.warmup=0"]),
        ("table8-lars", ["task.start=runs/seed-cv-en", "central.schedule.transition=250"]),
    ],
)
def test_what_the_descriptions_tell_to_set_can_be_set(name: str, sets: list[str]) -> None:
    assert load(f"speech/paper/{name}", sets).digest != load(f"speech/paper/{name}").digest
