"""The shipped recipes of retrieval parse, say what they do, and have the paper's values where they name the paper."""

from __future__ import annotations

import re

import pytest

from confide.recipe import Recipe, load, shipped
from confide.retrieval.settings import RetrievalSettings

NAMES = sorted(name for name in shipped() if name.startswith("retrieval/"))


def task_of(recipe: Recipe) -> RetrievalSettings:
    assert isinstance(recipe.task, RetrievalSettings)
    return recipe.task


def test_there_is_a_recipe_for_each_part_of_the_paper() -> None:
    short = {name.removeprefix("retrieval/") for name in NAMES}
    assert short >= {
        "embedded", "sms-head", "sms-both", "sms-federated", "sms-local-dp", "sms-private-quantile",
        "agnews-federated", "arxiv",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_on_minilm_and_says_how_to_change_that(name: str) -> None:
    recipe = load(name)
    assert recipe.description
    assert task_of(recipe).encoder.source == "minilm"
    assert re.search(r"--set task\.encoder\.source=(smollm2|tinyllama)", shipped()[name].read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_that_a_recipe_advises_is_one(name: str) -> None:
    """The lines of comments name values for --set; those of one sentence belong together."""
    text = " ".join(line[1:] for line in shipped()[name].read_text().splitlines() if line.startswith("#"))
    advised = 0
    for sentence in re.split(r"[.;:,] (?=[A-Z`])|; ", text):
        pairs = re.findall(r"--set (?:'([^']+)'|(\S+?)[,.;`)]?(?= |$))", sentence)
        words = [quoted or plain for quoted, plain in pairs]
        if words:
            assert load(name, words).digest != load(name).digest, words
        advised += len(words)
    assert advised == text.count("--set ") > 0


@pytest.mark.parametrize("name", ["retrieval/sms-federated", "retrieval/sms-local-dp"])
def test_federated_sms_has_the_papers_two_clients_and_five_rounds_of_two_epochs(name: str) -> None:
    recipe = load(name)
    assert task_of(recipe).population == recipe.sampling.cohort == 2
    assert (recipe.run.steps, recipe.local.epochs) == (5, 2)
    assert recipe.users.weights == "examples"
    assert (recipe.central.kind, recipe.central.learning_rate) == ("sgd", 1)


def test_local_noise_has_the_papers_bound_and_scale() -> None:
    recipe = load("retrieval/sms-local-dp")
    assert (recipe.bounding.rule, recipe.bounding.bound) == ("clip", 1)
    privacy = recipe.privacy
    assert (privacy.mechanism, privacy.trust, privacy.noise_multiplier) == ("gaussian", "local", 0.1)


def test_ag_news_has_the_papers_three_clients_and_25_rounds_of_two_epochs() -> None:
    recipe = load("retrieval/agnews-federated")
    task = task_of(recipe)
    assert (task.population, task.encoder.pooling, task.method) == (3, "mean", "head")
    assert (recipe.run.steps, recipe.local.epochs) == (25, 2)
