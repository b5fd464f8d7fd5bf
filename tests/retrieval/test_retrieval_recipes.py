"""The shipped recipes of retrieval parse, say what they do, and have the paper's values where they name the paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from confide.build import make_loop
from confide.recipe import Recipe, load, shipped
from confide.retrieval.settings import RetrievalSettings
from confide.runs.simulation import simulate

PRIVATE = ("retrieval/sms-private", "retrieval/agnews-private")
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


@pytest.mark.parametrize("name", PRIVATE)
def test_private_recipes_have_one_row_for_a_user_and_an_epsilon_of_two(name: str) -> None:
    recipe = load(name)
    assert task_of(recipe).population == recipe.sampling.cohort  # everybody in every step: no cohort has to be secret
    privacy = recipe.privacy
    assert (privacy.trust, privacy.target_epsilon, privacy.delta) == ("central", 2, 1e-5)
    assert (recipe.bounding.rule, recipe.users.weights) == ("clip", "uniform")


@pytest.mark.parametrize("name", PRIVATE)
def test_private_recipes_name_the_plan_that_made_their_noise(name: str) -> None:
    recipe, text = load(name), shipped()[name].read_text()
    cohort = recipe.sampling.cohort
    plan = f"plan noise --target-epsilon 2 --delta 1e-5 --cohort {cohort} --population {cohort}"
    assert f"confide {plan} --rounds {recipe.run.steps}" in text


def test_a_private_run_on_real_messages_ends_with_the_epsilon_that_it_states(minilm: str, data: Path) -> None:
    """A small one: 200 messages, each with an owner of its own."""
    small = ["task.data.limit=200", "task.clients.clients=160", "sampling.cohort=160", "run.steps=5"]
    file = data / "sms_spam" / "SMSSpamCollection"
    recipe = load(PRIVATE[0], [*small, f"task.data.file={file}", f"task.encoder.source={minilm}"])
    assert make_loop(recipe).task.examples.tolist() == [1] * 160
    loop, _ = simulate(recipe)
    assert loop.ledger.count == 5
    assert 1.99 < loop.plan.epsilon(loop.charges) <= 2
