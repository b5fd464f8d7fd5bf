"""Recipes: every problem is found before anything runs, all together, and what is loaded is what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from confide.errors import UserError
from confide.recipe import Recipe, load, parse, schema, shipped

Command = Callable[..., tuple[int, str, str]]


def problems(*overrides: str, name: str = "convex/digits") -> list[str]:
    """What is said about a shipped recipe with these changes, a line each."""
    with pytest.raises(UserError) as error:
        load(name, overrides)
    first, *lines = str(error.value).splitlines()
    assert first == f"{name}: " + ("one problem" if len(lines) == 1 else f"{len(lines)} problems")
    assert all(line.startswith("  - ") for line in lines)
    return [line.removeprefix("  - ") for line in lines]


ONE_MISTAKE = {
    "a section": ("privcy={mechanism: none}", ["privcy:", "no such section", "did you mean 'privacy'?"]),
    "a section like no other": ("zzz=1", ["zzz:", "no such section"]),
    "a key": ("bounding.bund=1", ["bounding.bund:", "no such key", "did you mean 'bound'?"]),
    "a key of a task": ("task.shards_per_usr=5", ["task.shards_per_usr:", "did you mean 'shards_per_user'?"]),
    "a key of an optimiser": ("central.momentm=0.5", ["central.momentm:", "did you mean 'momentum'?"]),
    "a nested key": ("local.schedule.warmpu=1", ["local.schedule.warmpu:", "did you mean 'warmup'?"]),
    "the kind of a task": ("task.kind=convex/logistc", ["task.kind=convex/logistc:", "did you mean 'convex/logistic'"]),
    "a nested kind": ("local.schedule.kind=per_roud", ["local.schedule.kind=per_roud:", "did you mean 'per_round'?"]),
    "an optimiser": ("central.kind=lam", ["central.kind=lam:", "sgd, adam, adagrad, lars, lamb", "'lamb'?"]),
    "a choice": (
        "bounding.rule=normalize",
        ["bounding.rule=normalize:", "per_layer_clip", "did you mean 'normalise'?"],
    ),
    "a data set": ("task.dataset=fashion_mnist", ["task.dataset=fashion_mnist:", "did you mean 'fashion-mnist'?"]),
    "a negative clip": ("bounding.bound=-1", ["bounding.bound=-1:", "a number above 0"]),
    "a clip of zero": ("bounding.bound=0", ["bounding.bound=0:", "a number above 0"]),
    "an infinite clip": ("bounding.bound=.inf", ["bounding.bound=inf:", "a number above 0"]),
    "a clip that is no number": ("bounding.bound=.nan", ["bounding.bound=nan:", "a number above 0"]),
    "a delta of one": ("privacy.delta=1", ["privacy.delta=1:", "a number above 0 and below 1"]),
    "a negative seed": ("run.seed=-1", ["run.seed=-1:", "a number at least 0"]),
    "a seed beyond 63 bits": (f"run.seed={2**63}", [f"run.seed={2**63}:", "below 9.22337e+18"]),
    "a momentum of one": ("central.momentum=1", ["central.momentum=1:", "a number at least 0 and below 1"]),
    "a nested range": ("local.schedule.factor=1.5", ["local.schedule.factor=1.5:", "above 0 and at most 1"]),
    "a range in a list": ("central={kind: adam, learning_rate: 1, betas: [0.9, 1]}", ["central.betas.1=1:", "1"]),
    "a word for a number": ("run.steps=many", ["run.steps='many':"]),
    "half a step": ("run.steps=6.5", ["run.steps=6.5:"]),
    "yes for a number": ("run.steps=yes", ["run.steps='yes':"]),
    "yes for a rate": ("local.learning_rate=yes", ["local.learning_rate='yes':"]),
    "a list for a number": ("local.learning_rate=[1]", ["local.learning_rate=[1]:"]),
    "a number for yes or no": ("local.divide_by_learning_rate=7", ["local.divide_by_learning_rate=7:"]),
    "a number for a section": ("sampling=5", ["sampling=5:"]),
    "nothing for a section": ("run=null", ["run=None:"]),
    "a number for a union": ("task=5", ["task=5:"]),
    "a missing kind": ("central={learning_rate: 1}", ["central.kind: required"]),
    "a missing key": ("sampling={kind: poisson}", ["sampling.cohort: required"]),
    "a cohort above the population": (
        "sampling.cohort=288",
        ["sampling.cohort=288", "larger than the population of 287 users", "lower it or raise task.users"],
    ),
    "noise without delta": ("privacy.delta=null", ["privacy.delta: required", "between 0 and 1"]),
    "noise without its size": ("privacy.target_epsilon=null", ["exactly one of target_epsilon", "none of them"]),
    "two sizes of noise": (
        "privacy.noise_multiplier=1",
        ["exactly one of", "given: target_epsilon and noise_multiplier"],
    ),
    "a bound that is missing": ("bounding={rule: clip}", ["bounding.bound: required with rule clip", "above 0"]),
    "noise on what is not bounded": ("bounding={rule: none}", ["bounding.rule=none:", "choose clip or normalise"]),
    "PLD for fixed cohorts": (
        "sampling.kind=fixed",
        ["privacy.accountant=pld:", "accountant: rdp", "sampling.kind: poisson"],
    ),
    "steps and epochs": ("local.epochs=1", ["local: give exactly one of steps and epochs"]),
    "neither steps nor epochs": ("local.steps=null", ["local: give exactly one of steps and epochs"]),
    "a mean of more iterates than steps": (
        "final={kind: mean, count: 101}",
        ["final.count=101: expected at most run.steps=100"],
    ),
    "a count without a mean": ("final.count=2", ["final.count=2: only used with final.kind: mean"]),
    "more last steps than steps": ("evaluation.last=101", ["evaluation.last=101: expected at most run.steps=100"]),
    "too few weights": ("users.weights=[1, 2, 3]", ["users.weights: 3 weights for 287 users"]),
    "weights that follow from data": (
        "users.weights=examples",
        ["users.weights=examples: removing a user would change everybody's weight", "users.public: true", "uniform"],
    ),
    "layer weights without a use": ("bounding.layer_weights={bias: 2}", ["bounding.layer_weights: only used"]),
}


@pytest.mark.parametrize("mistake", ONE_MISTAKE)
def test_a_mistake_is_one_problem_that_says_where_and_what_is_expected(mistake: str) -> None:
    override, fragments = ONE_MISTAKE[mistake]
    (said,) = problems(override)
    for fragment in fragments:
        assert fragment in said


@pytest.mark.parametrize(
    "noise",
    [
        ["privacy.mechanism=banded", "sampling.kind=cyclic"],
        ["privacy.trust=local"],
        ["privacy.trust=distributed"],
        ["sampling.kind=fixed", "privacy.accountant=rdp"],
        ["bounding={rule: clip, bound: 1, adaptive: {quantile: 0.5}}"],
    ],
)
def test_weights_that_follow_from_data_are_refused_with_every_guarantee_unless_they_are_public(
    noise: list[str],
) -> None:
    (said,) = problems("users.weights=examples", *noise)
    assert "removing a user would change everybody's weight" in said
    assert load("convex/digits", ["users={weights: examples, public: true}", *noise]).users.public


@pytest.mark.parametrize("weights", ["uniform", [1.0] * 200 + [2.0] * 87])
def test_equal_weights_and_a_list_of_them_may_have_a_guarantee(weights: object) -> None:
    assert load("convex/digits", [f"users.weights={weights}"]).privacy.mechanism == "gaussian"


def test_weights_that_follow_from_data_are_free_where_nothing_is_promised() -> None:
    plain = ["bounding.rule=none", "privacy={mechanism: none}"]
    partial = ["privacy={mechanism: partial, tensors: [weight], noise_multiplier: 1}"]
    for sets in (plain, partial):
        assert not load("convex/digits", ["users.weights=examples", *sets]).users.public


def test_weights_that_nobody_declared_public_leave_the_digest_of_a_recipe_as_it_was() -> None:
    assert "public" not in load("convex/digits").model_dump()["users"]
    assert load("convex/digits", ["users.public=false"]).digest == load("convex/digits").digest


def test_a_misspelt_weighting_is_answered_with_the_nearest_name() -> None:
    assert any(
        "users.weights=unifrom" in p and "did you mean 'uniform'?" in p for p in problems("users.weights=unifrom")
    )


def test_a_weight_that_is_not_positive_is_named_by_its_place_in_the_list() -> None:
    assert any(p.startswith("users.weights.1=0:") for p in problems("users.weights=[1, 0]"))


def test_settings_of_noise_without_noise_are_each_a_problem() -> None:
    said = problems("privacy={mechanism: none, target_epsilon: 1, noise_scale: 2}")
    assert [p.split(":")[0] for p in said] == ["privacy.target_epsilon", "privacy.noise_scale"]


def test_three_sizes_of_noise_are_named_together() -> None:
    (said,) = problems("privacy.noise_multiplier=1", "privacy.noise_scale=1")
    assert "target_epsilon and noise_multiplier and noise_scale" in said


def test_all_problems_are_reported_together_whatever_their_kind() -> None:
    said = problems(
        "privcy.delta=1",  # an unknown section
        "bounding.bund=1",  # an unknown key
        "central.learning_rate=-1",  # out of range
        "run.steps=many",  # of a wrong type
        "local.schedule.kind=perround",  # an unknown kind, nested
        "sampling.cohort=1000",  # impossible together with another section
        "privacy.delta=null",  # missing because of another key
    )
    starts = [
        "privcy:",
        "local.schedule.kind=",
        "bounding.bund:",
        "central.learning_rate=",
        "run.steps=",
        "sampling.cohort=1000",
    ]
    assert len(said) >= len(starts)
    for start in starts:
        assert sum(p.startswith(start) for p in said) == 1, start


def test_a_typo_in_one_section_does_not_hide_what_is_impossible_between_others() -> None:
    assert len(problems("run.sed=1", "sampling.cohort=288", "local.epochs=1")) == 3


def test_fixed_cohorts_are_accepted_with_rdp_and_with_everyone() -> None:
    some = load("convex/digits", ["sampling.kind=fixed", "privacy.accountant=rdp"])
    assert (some.sampling.kind, some.privacy.accountant) == ("fixed", "rdp")
    everyone = load("convex/digits", ["sampling.kind=fixed", "sampling.cohort=287"])
    assert (everyone.sampling.cohort, everyone.privacy.accountant) == (287, "pld")


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("privacy.delta=2e-5", "privacy.delta", 2e-5),
        ("privacy.delta=1.5E-7", "privacy.delta", 1.5e-7),
        ("run.steps=2e2", "run.steps", 200),
        ("run.seed=9007199254740993", "run.seed", 9007199254740993),
        ("local.schedule.factor=0.5", "local.schedule.factor", 0.5),
        ("local.schedule={kind: exponential, rate: 5e-1, start: 3, transition: 2}", "local.schedule.rate", 0.5),
        ("central={kind: lamb, learning_rate: 1, betas: [0.5, 9e-1]}", "central.betas", (0.5, 0.9)),
        ("task.folder=/somewhere/else", "task.folder", Path("/somewhere/else")),
        ("local.gradient_clip=null", "local.gradient_clip", None),
        ("local.divide_by_learning_rate=false", "local.divide_by_learning_rate", False),
        ("description=a=b", "description", "a=b"),
        (" run.seed =3", "run.seed", 3),
        ("users={weights: examples, public: true}", "users.weights", "examples"),
        (f"users.weights={[1.0] * 287}", "users.weights", (1.0,) * 287),
    ],
)
def test_an_override_changes_the_value_it_names(override: str, path: str, expected: Any) -> None:
    changed, as_shipped = load("convex/digits", [override]), load("convex/digits")
    value: Any = changed
    for part in path.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected) or isinstance(value, Path)
    if path != "local.gradient_clip":  # which is null as shipped
        assert changed.digest != as_shipped.digest


def test_an_override_leaves_everything_else_as_it_was() -> None:
    before, after = (load("convex/digits", sets).model_dump() for sets in ([], ["local.schedule.factor=0.5"]))
    after["local"]["schedule"]["factor"] = 0.99
    assert after == before


def test_of_two_overrides_of_a_key_the_later_counts() -> None:
    assert load("convex/digits", ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_override_can_replace_a_section_and_take_a_guarantee_away() -> None:
    recipe = load("convex/digits", ["privacy={mechanism: none}", "bounding.rule=none", "bounding.bound=null"])
    assert recipe.privacy.target_epsilon is None
    assert recipe.bounding.bound is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps", "section.key=value"),
        ("=3", "section.key=value"),
        ("run..steps=3", "section.key=value"),
        (".steps=3", "section.key=value"),
        ("run.steps=[1", "not valid YAML"),
        ("run.steps.deep=1", "steps is a value, not a section"),
        ("description.deep=1", "description is a value, not a section"),
    ],
)
def test_an_override_of_a_bad_form_is_refused_and_quoted(override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        load("convex/digits", [override])
    assert said in str(error.value)
    assert repr(override) in str(error.value)


# Files and names


def test_every_shipped_recipe_loads_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(shipped()) >= {"convex/digits", "convex/quadratics", "convex/fmnist", "convex/cifar10"}
    for name in shipped():
        assert load(name).description


def test_the_list_names_every_shipped_recipe_with_its_description(command: Command) -> None:
    code, out, _ = command("recipe", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(shipped())
    code, out, _ = command("recipe", "list", "--json")
    assert {entry["name"]: entry["description"] for entry in json.loads(out)} == {
        name: load(name).description for name in shipped()
    }


@pytest.mark.parametrize("name", shipped())
def test_what_is_shown_is_the_whole_recipe_and_loads_as_the_same_run(
    name: str, command: Command, tmp_path: Path
) -> None:
    code, out, _ = command("recipe", "show", name, "--set", "run.seed=7")
    assert code == 0
    assert set(yaml.safe_load(out)) == set(Recipe.model_fields)
    (tmp_path / "copy.yaml").write_text(out)
    assert load(str(tmp_path / "copy.yaml")).digest == load(name, ["run.seed=7"]).digest


def test_an_unknown_name_is_answered_with_the_nearest_one(command: Command) -> None:
    code, out, err = command("recipe", "show", "convex/digit")
    assert (code, out) == (2, "")
    assert "'convex/digit'" in err
    assert "did you mean 'convex/digits'?" in err
    assert "confide recipe list" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a\n- b\n", "must be a mapping"),
        (b"just words", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"task: {kind: [", "not valid YAML"),
        (b"task: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(str(path))
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; expected a YAML file"):
        load(str(tmp_path))


def test_a_path_below_a_file_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be read: .*Not a directory"):
        load(str(tmp_path / "file" / "recipe.yaml"))


def test_a_recipe_without_its_required_sections_names_all_of_them() -> None:
    with pytest.raises(UserError) as error:
        parse({})
    missing = [line.split(":")[0] for line in str(error.value).splitlines() if "this section is required" in line]
    assert missing == [f"  - {section}" for section in ("task", "sampling", "local", "central", "run")]


# What is written is what is read


positive = st.floats(min_value=1e-300, max_value=1e300)


PLAIN: dict[str, Any] = {
    "seed": 0, "bound": 1.0, "delta": 0.5, "weights": "uniform", "factor": 1.0, "betas": (0.5, 0.5), "layers": {},
}  # fmt: skip


@settings(max_examples=50, deadline=None)
@example(description="1e5", **PLAIN)
@example(description="2024", **PLAIN)
@example(description="~", **PLAIN)
@example(description="two\x85lines", **PLAIN)
@given(
    description=st.text(max_size=20),
    seed=st.integers(0, 2**63 - 1),
    bound=positive,
    delta=st.floats(min_value=1e-300, max_value=1, exclude_max=True),
    weights=st.one_of(st.sampled_from(["uniform", "examples"]), st.lists(positive, min_size=3, max_size=3)),
    factor=st.floats(min_value=1e-9, max_value=1),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    layers=st.dictionaries(st.text(min_size=1, max_size=5), positive, max_size=2),
)
def test_a_recipe_that_is_written_and_read_again_is_the_same_run(
    description: str,
    seed: int,
    bound: float,
    delta: float,
    weights: Any,
    factor: float,
    betas: tuple[float, float],
    layers: dict[str, float],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    recipe = Recipe.model_validate(
        {
            "description": description,
            "task": {"kind": "convex/quadratics", "users": 3},
            "users": {"weights": weights, "public": weights == "examples"},
            "sampling": {"cohort": 2},
            "local": {"steps": 1, "learning_rate": bound, "schedule": {"kind": "per_round", "factor": factor}},
            "bounding": {
                "rule": "per_layer_clip",
                "bound": bound,
                "split": "weighted" if layers else "uniform",
                "layer_weights": layers,
            },
            "privacy": {"mechanism": "gaussian", "noise_scale": bound, "delta": delta, "large_delta": True},
            "central": {"kind": "adam", "learning_rate": bound, "betas": betas},
            "run": {"steps": 5, "seed": seed},
        }
    )
    path = tmp_path_factory.getbasetemp() / "again.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load(str(path))
    assert again == recipe
    assert again.digest == recipe.digest


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1", "run.steps=99", "task.l2=0", "sampling.cohort=58", "local.steps=19", "bounding.bound=31.250001",
        "privacy.target_epsilon=4", "central.momentum=0.7", "final.kind=random",
        "users={weights: examples, public: true}",
    ],
)  # fmt: skip
def test_recipes_that_differ_in_one_value_are_different_runs(override: str) -> None:
    assert load("convex/digits", [override]).digest != load("convex/digits").digest


# Schema


def test_the_schema_is_json_and_says_what_every_key_is_for(command: Command) -> None:
    code, out, _ = command("recipe", "schema")
    assert code == 0
    document = json.loads(out)
    assert document == schema()
    assert document["additionalProperties"] is False
    silent = [
        f"{section}.{key}"
        for section, node in {"Recipe": document, **document["$defs"]}.items()
        for key, value in node["properties"].items()
        # A section is described by its own entry, and a kind with one value by its name.
        if "description" not in value and "$ref" not in value and "discriminator" not in value and "const" not in value
    ]
    assert silent == []
    assert all(node.get("description") for node in document["$defs"].values())
