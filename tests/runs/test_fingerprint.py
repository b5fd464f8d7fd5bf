"""A run keeps digests of what it was started with, and goes on with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from confide.build import make_loop, make_task
from confide.errors import Stopped, UserError
from confide.files import digest, seal
from confide.privacy.ledger import Ledger
from confide.recipe import Recipe, TaskSettings, load
from confide.report.page import write_report
from confide.runs import fingerprint, folder

TABLE = """\
query,document
where is the cat,cat
the cat sat on a mat,cat
cat near water,cat
dogs ran far,dog
birds and dogs,dog
dogs ran home,dog
"""


def test_the_digest_tells_boundaries_shapes_and_types_apart() -> None:
    one = np.arange(4.0)
    found = [
        digest(["ab", "c"]), digest(["a", "bc"]), digest(["abc"]),
        digest([one]), digest([one.reshape(2, 2)]),
        digest([one.astype(np.float32)]),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert digest([torch.arange(4.0).double()]) == digest([one])


@pytest.mark.parametrize("name", ["convex/digits", "convex/quadratics", "speech/embedded/federated"])
def test_every_task_names_the_users_data(name: str) -> None:
    recipe = load(name)
    first, again = (make_task(recipe.task, 0).fingerprint for _ in range(2))
    assert first == again
    assert "the users' data" in first
    if name.startswith("convex"):  # who holds what depends on the seed
        assert make_task(recipe.task, 1).fingerprint != first


def one_number(task: Any) -> None:
    """Change one number of one user's data."""
    if hasattr(task, "centres"):
        task.centres[3, 0] += 1e-9
    else:
        features = task.data.train_features.clone()
        features[task.held[5, 0], 7] += 1e-3
        task.data = replace(task.data, train_features=features)


@pytest.mark.parametrize("name", ["convex/digits", "convex/quadratics"])
def test_one_changed_number_of_one_user_changes_the_digest(name: str) -> None:
    """For retrieval and speech a resume over changed texts and recordings is tried."""
    same, other = (make_task(load(name).task, 0) for _ in range(2))
    one_number(other)
    assert same.fingerprint != other.fingerprint


def test_workloads_without_a_digest_have_no_data_but_what_recipe_and_code_make() -> None:
    kinds = {each.model_fields["kind"].default: each for each in get_args(get_args(TaskSettings)[0])}
    made = {"bench/mlp", "bench/speech", "bench/vector", "bench/states", "bench/queries"}
    assert set(kinds) - made == {"convex/logistic", "convex/quadratics", "speech", "retrieval", "python"}
    draw = np.random.default_rng(0)
    for kind in sorted(made):
        small = {"parameters": 10, "tensors": 2} if kind == "bench/vector" else {}
        one, other = (kinds[kind].model_validate({"users": 3, **small}).make(seed) for seed in (0, 1))
        assert one.fingerprint == {}
        for user in range(3):
            for first, second in zip(one.batch(user, None, draw), other.batch(user, None, draw), strict=True):
                assert torch.equal(first, second), "not even the seed decides them"


@pytest.fixture
def over_a_table(tmp_path: Path, tiny_model: Callable[..., Path]) -> Recipe:
    (tmp_path / "table.csv").write_text(TABLE)
    from confide.recipe import parse

    return parse(
        {
            "task": {
                "kind": "retrieval",
                "encoder": {"source": str(tiny_model("masked")), "pooling": "mean"},
                "data": {"kind": "table", "queries": str(tmp_path / "table.csv"), "test_share": 0.34},
                "clients": {"kind": "even", "clients": 2},
                "cache": str(tmp_path / "states"),
            },
            "sampling": {"kind": "fixed", "cohort": 2},
            "local": {"epochs": 1, "learning_rate": 0.1},
            "bounding": {"rule": "none"},
            "central": {"kind": "sgd", "learning_rate": 1},
            "run": {"steps": 4, "checkpoint_every": 1},
        }
    )


def _stopped(recipe: Recipe, place: Path, signal_after: Callable[..., Any]) -> None:
    with signal_after(2), pytest.raises(Stopped):
        folder.train(recipe, place, quiet=True)


def test_a_resume_over_changed_data_is_refused_and_over_the_same_goes_on(
    over_a_table: Recipe, tmp_path: Path, signal_after: Callable[..., Any], no_figures: None
) -> None:
    place, table = tmp_path / "run", tmp_path / "table.csv"
    _stopped(over_a_table, place, signal_after)
    assert set(Ledger.read(place / "ledger.jsonl").header["inputs"]) == {
        "the users' data", "the test data", "the documents", "the encoder",
    }  # fmt: skip
    before = (place / "ledger.jsonl").read_bytes()
    table.write_text(TABLE.replace("far", "away"))
    with pytest.raises(UserError, match=r"data changed since the run began .*Put back"):
        folder.resume(place, quiet=True)
    assert (place / "ledger.jsonl").read_bytes() == before
    table.write_text(TABLE)
    assert folder.resume(place, quiet=True)["steps"] == 4


def test_a_resume_with_another_encoder_in_the_same_place_is_refused(
    over_a_table: Recipe, tmp_path: Path, signal_after: Callable[..., Any], no_figures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from confide.encoders.encoder import Encoder

    place = tmp_path / "run"
    _stopped(over_a_table, place, signal_after)
    original = Encoder.__init__

    def retrained(self: Encoder, settings: Any) -> None:
        original(self, settings)
        with torch.no_grad():
            self.model.get_input_embeddings().weight.add_(0.01)

    monkeypatch.setattr(Encoder, "__init__", retrained)
    with pytest.raises(UserError, match="the encoder changed since the run began"):
        folder.resume(place, quiet=True)


def test_a_run_does_not_go_on_with_other_code_of_a_recipes_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    """The same noise on what other code bounds would give the difference away."""
    from confide.build import code_digests

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = tmp_path / "a_rule_to_change.py"
    rule.write_text("def f(norms, bounds):\n    return bounds / norms\n")
    import_module("a_rule_to_change")
    recipe = load(tiny, ["bounding={rule: python, function: a_rule_to_change:f, bound: 1}"])
    before = code_digests(recipe)
    rule.write_text("def f(norms, bounds):\n    return norms\n")
    after = code_digests(recipe)
    assert list(before) == list(after) == ["the code of bounding.function"]
    assert before != after


# Digests of users' data are keyed: whoever knows all users but one could test a guess of that one on a plain digest.


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for release, with everything that it leaves behind."""
    place = tmp_path_factory.mktemp("released") / "run"
    folder.train(load("convex/digits", ["privacy.source=system", "run.steps=5"]), place, quiet=True, page=write_report)
    return place


def test_no_document_of_a_run_has_a_digest_that_follows_from_the_data_alone(released: Path) -> None:
    recipe = folder.held_recipe(released)
    guess = dict(make_task(recipe.task, recipe.run.seed).fingerprint)
    key = (released / "secret.key").read_bytes()
    told = [Ledger.read(released / "ledger.jsonl").header["inputs"], folder.summary_of(released)["inputs"]]
    assert told[0] == told[1] == seal(guess, key)
    assert seal(guess, bytes(32)) != told[0]
    for path in released.iterdir():
        content = path.read_bytes()
        assert not any(value.encode() in content for value in guess.values()), path
        if path.name != "secret.key":
            assert key not in content, path
            assert key.hex().encode() not in content, path


def test_the_secret_is_32_bytes_of_this_run_that_only_its_owner_reads(released: Path, tmp_path: Path) -> None:
    folder.train(folder.held_recipe(released), tmp_path / "again", quiet=True)
    secrets = [(place / "secret.key") for place in (released, tmp_path / "again")]
    assert [len(each.read_bytes()) for each in secrets] == [32, 32]
    assert [each.stat().st_mode & 0o777 for each in secrets] == [0o600, 0o600]
    assert secrets[0].read_bytes() != secrets[1].read_bytes()


def test_runs_in_memory_each_have_a_key_of_their_own() -> None:
    recipe = load("convex/digits")
    one, other = (make_loop(recipe).ledger.header["inputs"] for _ in range(2))
    assert one.keys() == other.keys() == {"the users' data"}
    assert one != other


def test_a_run_without_its_secret_is_read_but_not_resumed(
    tiny: str, tmp_path: Path, signal_after: Callable[..., Any], no_figures: None
) -> None:
    place = tmp_path / "run"
    _stopped(load(tiny), place, signal_after)
    key = (place / "secret.key").read_bytes()
    (place / "secret.key").unlink()
    assert folder.check_ledger(place)["releases"] == 2
    before = (place / "ledger.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"secret\.key is missing.*Put it back.*or start another run"):
        folder.resume(place, quiet=True)
    assert (place / "ledger.jsonl").read_bytes() == before
    assert not (place / "secret.key").exists()
    (place / "secret.key").write_bytes(key[:-1])
    with pytest.raises(UserError, match=r"secret\.key has 31 bytes; expected 32"):
        folder.resume(place, quiet=True)
    (place / "secret.key").write_bytes(key)
    assert folder.resume(place, quiet=True)["steps"] == 6


def test_a_folder_from_before_digests_were_keyed_is_checked_and_resumed_as_before(
    over_a_table: Recipe, tmp_path: Path, signal_after: Callable[..., Any], no_figures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place, table = tmp_path / "run", tmp_path / "table.csv"
    with monkeypatch.context() as older:
        older.setattr(fingerprint, "secret_of", lambda folder: b"")
        _stopped(over_a_table, place, signal_after)
    plain = dict(make_task(over_a_table.task, 0).fingerprint)
    header = Ledger.read(place / "ledger.jsonl").header
    assert header["inputs"] == plain, "as an older version wrote it"
    assert "inputs_keyed" not in header
    table.write_text(TABLE.replace("far", "away"))
    with pytest.raises(UserError, match=r"data changed since the run began"):
        folder.resume(place, quiet=True)
    table.write_text(TABLE)
    assert folder.resume(place, quiet=True)["inputs"] == plain
    assert not (place / "secret.key").exists()


def test_a_training_that_fails_before_it_begins_can_be_started_again(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fingerprint.secret_of(tmp_path / "run")  # killed after the secret and before the recipe
    assert folder.train(load(tiny), tmp_path / "run", quiet=True)["steps"] == 6
