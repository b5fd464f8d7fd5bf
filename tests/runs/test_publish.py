"""Claims about `confide publish`: only what the guarantee covers leaves, to the byte, and the rest is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from confide import recipe
from confide.errors import UserError
from confide.files import SECRET
from confide.privacy import ledger
from confide.privacy.budget import Budget
from confide.privacy.guarantee import statement
from confide.privacy.ledger import Ledger
from confide.recipe import parse
from confide.runs import answering, card, checkpoint, folder, publish
from confide.runs.card import Words
from confide.runs.export import export
from confide.runs.notes import read_notes
from confide.runs.recording import LAYERS, METRICS, RELEASED, TIMES
from confide.runs.shared_recipe import for_others

pytestmark = pytest.mark.usefixtures("no_figures_here")
Command = Callable[..., tuple[int, str, str]]
FIGURES = "privacy.metrics={loss: 5, norm: 60, bounded: true, accuracy: true}"
FILES = [
    "README.md", "guarantee.json", "guarantee.txt", "ledger.jsonl", "model.safetensors", "recipe.yaml", RELEASED,
]  # fmt: skip


def digits(*overrides: str) -> recipe.Recipe:
    return recipe.load("convex/digits", ["run.steps=5", "evaluation.every=1", "privacy.source=system", *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, no_figures_here: None) -> Path:
    """A finished run with figures."""
    place = tmp_path_factory.mktemp("owners-own-place") / "run"
    folder.train(digits(FIGURES), place, quiet=True)
    return place


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be spoilt."""
    return Path(shutil.copytree(run, tmp_path / "owners-own-place" / "copy"))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_long(value: float) -> bool:
    """Whether a number has so many digits that it does not stand in a text by chance."""
    return len(repr(value)) >= 12


def must_not_leave(run: Path) -> dict[str, bytes]:
    """Everything in the folder of a run that a published folder must not have in any of its bytes."""
    book, key = Ledger.read(run / ledger.FILE), (run / SECRET).read_bytes()
    found = {"the key": key, "the key in hex": key.hex().encode(), "the run's place": str(run).encode()}
    found |= {"the place above": run.parent.name.encode(), "home": str(Path.home()).encode() + b"/"}
    found |= {f"digest of {name}": digest.encode() for name, digest in book.header["inputs"].items()}
    found |= {f"environment {entry.environment}": entry.environment.encode() for entry in book.entries}
    for name in (METRICS, LAYERS, TIMES):
        for line in lines_of(run / name):
            allowed = {line.pop(key, None) for key in ("epsilon", "bound", "local_learning_rate")}
            raw = {value for value in numbers(line) if is_long(value) and value not in allowed}
            found |= {f"{name}: {value}": repr(value).encode() for value in raw}
    summary = folder.summary_of(run)
    found |= {f"summary: {name}": repr(value).encode() for name, value in summary["metrics"].items() if is_long(value)}
    found |= {
        f"environment: {name}": value.encode() for name, value in summary["environment"].items() if len(value) > 8
    }
    return found


def assert_nothing_leaks(run: Path, out: Path, *more: bytes) -> None:
    forbidden = must_not_leave(run) | {repr(word): word for word in more}
    assert len(forbidden) > 30
    for path in sorted(out.rglob("*")):
        content = path.read_bytes()
        assert [what for what, wrong in forbidden.items() if wrong in content] == [], path.name


# What is written


def test_no_byte_of_what_must_not_leave_is_published(run: Path, tmp_path: Path) -> None:
    written = publish.publish(run, tmp_path / "out", Words(data="Written digits.", use="To try things out."))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES) == sorted(written["files"])
    assert_nothing_leaks(run, tmp_path / "out")


def test_the_search_for_leaks_finds_one_of_each_kind(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for what, wrong in must_not_leave(run).items():
        (tmp_path / "out" / "file").write_bytes(b"before " + wrong + b" after")
        with pytest.raises(AssertionError):
            assert_nothing_leaks(run, tmp_path / "out")
        assert what


def test_what_somebody_puts_into_the_files_of_a_run_stays_there(copy: Path, tmp_path: Path) -> None:
    """Everything is written from a list of what may go: a stranger's key is on none."""
    (copy / "notes.txt").write_text("ann took part")
    lines = [{**line, "users": ["ann"], "cohort": 61} for line in lines_of(copy / RELEASED)]
    (copy / RELEASED).write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_file(load_file(copy / folder.MODEL), copy / folder.MODEL, {"owner": "ann's mother"})
    summary = folder.summary_of(copy) | {"users": ["ann"]}
    (copy / folder.SUMMARY).write_text(json.dumps(summary))
    publish.publish(copy, tmp_path / "out")
    assert_nothing_leaks(copy, tmp_path / "out", b"ann took", b'"ann"', b"ann's mother")
    assert set(lines_of(tmp_path / "out" / RELEASED)[0]) == {"step", "loss", "norm", "bounded", "accuracy"}


def test_the_model_is_the_runs_and_its_header_states_the_guarantee(run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    before, after = load_file(run / folder.MODEL), load_file(tmp_path / "out" / folder.MODEL)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(tmp_path / "out" / folder.MODEL, "pt") as file:
        about = file.metadata()
    spent = folder.check_ledger(run)
    assert json.loads(about["epsilon"]) == spent["epsilon"]
    assert set(about) == {
        "format", "task", "architecture", "epsilon", "delta", "accountant", "adjacency", "releases", "unit",
        "for_release", "recipe",
    }  # fmt: skip
    assert (about["for_release"], about["task"]) == ("true", "convex/logistic")
    assert about == read_notes(run / folder.MODEL)  # the run's own file says the same


def test_the_ledgers_copy_says_that_it_is_one_and_states_the_same(run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    own, copied = Ledger.read(run / ledger.FILE), Ledger.read(tmp_path / "out" / ledger.FILE)
    assert [entry.event for entry in copied.entries] == [entry.event for entry in own.entries]
    assert copied.header["published"]["last_hash_of_the_original"] == own.head
    assert copied.header["published"]["left_out"] == ["inputs", "inputs_keyed"]
    differing = {"ledger_head", "recipe"}
    assert statement(copied).model_dump(exclude=differing) == statement(own).model_dump(exclude=differing)
    assert folder.check_ledger(tmp_path / "out")["epsilon"] == folder.check_ledger(run)["epsilon"]
    stated = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert stated == json.loads(statement(copied).model_dump_json())
    assert {entry.event.cohort for entry in copied.entries} == {57}, "the expected cohort, never the drawn one"


def test_a_step_that_was_made_twice_is_in_the_copy_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = checkpoint.save, []

    def die(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(*given)

    monkeypatch.setattr(checkpoint, "save", die)
    with pytest.raises(KeyboardInterrupt):
        folder.train(digits(), tmp_path / "run", quiet=True)
    folder.resume(tmp_path / "run", quiet=True)
    publish.publish(tmp_path / "run", tmp_path / "out")
    copied = Ledger.read(tmp_path / "out" / ledger.FILE)
    assert copied.count == 6
    again = [entry.step for entry in Ledger.read(tmp_path / "run" / ledger.FILE).entries if entry.attempt]
    assert again == [1]
    assert [(entry.step, entry.attempt) for entry in copied.entries] == [*((step, 0) for step in range(5)), (4, 1)], (
        "how often a step was made again is part of epsilon; which one it was is nobody's business"
    )
    assert folder.check_ledger(tmp_path / "out")["epsilon"] == folder.check_ledger(tmp_path / "run")["epsilon"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["privacy.mechanism=banded", "sampling.kind=cyclic", "sampling.cohort=40"],
        ["sampling.kind=fixed", "privacy.accountant=rdp"],
        ["bounding={rule: clip, bound: 10, adaptive: {quantile: 0.5}}"],
        ["users={weights: examples, public: true}"],
        ["privacy.trust=local"],
    ],
    ids=["banded", "fixed", "adaptive", "public weights", "local"],
)
def test_every_kind_of_guarantee_is_published_as_it_is(overrides: list[str], tmp_path: Path) -> None:
    folder.train(digits(*overrides), tmp_path / "run", quiet=True)
    written = publish.publish(tmp_path / "run", tmp_path / "out")
    assert written["epsilon"] == folder.check_ledger(tmp_path / "run")["epsilon"]
    assert_nothing_leaks(tmp_path / "run", tmp_path / "out")


def test_a_run_that_its_budget_ended_is_published_with_the_steps_that_it_made(tmp_path: Path) -> None:
    people = Budget.create(tmp_path / "people.jsonl", 2.7, 1e-5, "people who wrote digits")
    noise = ("privacy.target_epsilon=null", "privacy.noise_multiplier=1.5")
    short = digits(FIGURES, f"privacy.budget={people.path}", *noise)
    summary = folder.train(short, tmp_path / "run", quiet=True)
    assert 0 < summary["steps"] < 5
    written = publish.publish(tmp_path / "run", tmp_path / "out")
    assert written["epsilon"] == folder.check_ledger(tmp_path / "run")["epsilon"]
    assert Ledger.read(tmp_path / "out" / ledger.FILE).count == summary["steps"]
    assert len((tmp_path / "out" / RELEASED).read_text().splitlines()) == summary["steps"]
    assert_nothing_leaks(tmp_path / "run", tmp_path / "out")
    assert str(people.path).encode() not in b"".join(file.read_bytes() for file in (tmp_path / "out").iterdir())
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    del told["stopped_by_budget"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="not of one finished run"):
        publish.publish(tmp_path / "run", tmp_path / "again")


def test_a_first_line_that_the_copy_would_change_the_promise_of_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_KEPT", tuple(name for name in publish._KEPT if name != "unit"))
    refused(run, tmp_path, "its first line says something that the promise depends on")


def test_without_a_key_not_even_the_last_hash_is_published(copy: Path, tmp_path: Path) -> None:
    """A hash over plain digests would let whoever knows the other users test a guess of one."""
    own = Ledger.read(copy / ledger.FILE)
    (copy / ledger.FILE).unlink()
    book = Ledger.create(copy / ledger.FILE, {key: v for key, v in own.header.items() if key != "inputs_keyed"})
    for entry in own.entries:
        book.record(entry.step, entry.event, entry.environment)
    saved = checkpoint.load(copy)
    checkpoint.save(copy, saved.state, saved.recipe_digest, book.count, book.head)
    older = {name: value for name, value in folder.summary_of(copy).items() if name != "statement"}
    (copy / folder.SUMMARY).write_text(json.dumps(older | {"ledger_head": book.head}))
    publish.publish(copy, tmp_path / "out")
    assert "last_hash_of_the_original" not in Ledger.read(tmp_path / "out" / ledger.FILE).header["published"]
    assert_nothing_leaks(copy, tmp_path / "out", book.head.encode())


@pytest.mark.parametrize("asked", ["guarantee", "ledger", "evaluate"])
def test_a_published_folder_is_read(asked: str, command: Command, run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    code, said, problem = command(asked, tmp_path / "out", "--json")
    assert code == 0, problem
    assert json.loads(said)


def test_a_published_ledger_that_lost_its_last_line_is_refused(command: Command, run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    path = tmp_path / "out" / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    for asked in ("guarantee", "ledger"):
        code, said, problem = command(asked, tmp_path / "out")
        assert (code, said) == (2, "")
        assert "lines are missing at its end" in problem
    (tmp_path / "out" / "guarantee.json").write_text("{")
    assert "expected the statement that was published" in command("guarantee", tmp_path / "out")[2]


def test_a_published_folder_is_not_gone_on_with(run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(UserError, match="was published from a run; go on with the run itself"):
        folder.resume(tmp_path / "out", quiet=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock") == before


# The card


def front_of(out: Path) -> Any:
    _, front, body = (out / "README.md").read_text().split("---\n", 2)
    assert body.strip()
    return yaml.safe_load(front)


def test_the_card_has_the_owners_words_and_the_statements(run: Path, tmp_path: Path) -> None:
    words = Words("Digits\n---\nevil: true", "Digits of 287 writers.", "Nothing: an example.", "apache-2.0")
    publish.publish(run, tmp_path / "out", words)
    front, text = front_of(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text()
    assert front == {
        "library_name": "confide", "tags": ["federated-learning", "differential-privacy"], "license": "apache-2.0",
        "pipeline_tag": "tabular-classification", "metrics": ["accuracy"],
    }  # fmt: skip
    read: Any = ModelCard(text).data  # by the hub's own reader
    assert read.to_dict() == front
    stated = statement(Ledger.read(tmp_path / "out" / ledger.FILE))
    for said in (
        "Digits of 287 writers.",
        "Nothing: an example.",
        f"| delta | {stated.delta:g} |",
        *stated.not_covered,
    ):
        assert said in text
    assert f"protected unit | {stated.unit.name}" in text


@pytest.mark.parametrize(
    ("name", "front"),
    [
        ("speech/words/private", {"language": ["en"], "metrics": ["wer"], "base_model": "openai/whisper-tiny.en"}),
        ("retrieval/sms-head", {"metrics": ["accuracy"], "base_model": "sentence-transformers/all-MiniLM-L6-v2"}),
    ],
)
def test_the_card_names_language_and_frozen_encoder_as_the_hub_does(name: str, front: dict[str, Any]) -> None:
    found = card._front(for_others(recipe.load(name)), Words(), "a model", {})
    assert found.items() >= front.items()
    secret = recipe.load(name, [f"task.{'model.encoder' if 'speech' in name else 'encoder'}.source=/home/ann/own"])
    assert "base_model" not in card._front(for_others(secret), Words(), "a model", {})


def test_what_the_owner_does_not_say_is_said_to_be_unsaid(run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.count("The owner has not said.") == 2
    assert "license" not in front_of(tmp_path / "out")


def test_test_metrics_are_published_only_on_request(run: Path, tmp_path: Path) -> None:
    publish.publish(run, tmp_path / "without")
    assert "model-index" not in front_of(tmp_path / "without")
    assert "test data" not in (tmp_path / "without" / "README.md").read_text()
    publish.publish(run, tmp_path / "with", with_test_metrics=True)
    result = front_of(tmp_path / "with")["model-index"][0]["results"][0]
    assert {m["type"]: m["value"] for m in result["metrics"]} == folder.summary_of(run)["metrics"]
    text = (tmp_path / "with" / "README.md").read_text()
    assert "does not cover the people of the test data" in text


def test_metrics_that_may_come_from_the_users_themselves_are_refused(tiny: str, tmp_path: Path) -> None:
    """The evaluation of the quadratics is their users' own objective."""
    folder.train(recipe.load(tiny, ["privacy.source=system"]), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="convex/quadratics has no test items of its own"):
        publish.publish(tmp_path / "run", tmp_path / "out", with_test_metrics=True)
    publish.publish(tmp_path / "run", tmp_path / "out")
    assert RELEASED not in {path.name for path in (tmp_path / "out").iterdir()}


# The recipe


def test_a_published_recipe_names_nothing_of_its_owner() -> None:
    owned: dict[str, Any] = {
        "kind": "speech", "start": "/srv/seed", "cache": "/var/cache/ann",
        "corpus": {"kind": "folder", "folder": "/data/ann/recordings", "share": 90},
        "test": {"kind": "python", "factory": "calls:listed", "options": {"agents": ["ann"], "folder": "calls"}},
    }  # fmt: skip
    rest = recipe.load("convex/digits").model_dump(mode="json")
    wanted = parse({**rest, "description": "~ann's", "task": owned, "local": {"steps": 1, "learning_rate": 1}})
    text = for_others(wanted).to_yaml()
    for wrong in ("ann", "/srv", "/var", "/data", "calls'", "seed:"):
        assert wrong not in text.replace("seed: 0", "")
    task: Any = for_others(wanted).task
    assert (task.start, task.cache, str(task.corpus.folder), task.corpus.share) == (None, None, "left-out", 90)


def test_an_address_of_an_encoder_is_left_out() -> None:
    own = recipe.load("retrieval/sms-head" if "retrieval/sms-head" in recipe.shipped() else "retrieval/sms-local-dp")
    document = own.model_dump(mode="json")
    document["task"]["encoder"]["source"] = "https://encoder.internal:8443"
    assert "internal" not in for_others(parse(document, made=True)).to_yaml()


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_a_shipped_recipe_keeps_all_but_its_paths(name: str) -> None:
    own = recipe.load(name)
    shared = for_others(own)
    assert for_others(shared).digest == shared.digest
    assert (shared.privacy, shared.sampling, shared.run) == (own.privacy, own.sampling, own.run)


# What is refused


def refused(run: Path, tmp_path: Path, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        publish.publish(run, tmp_path / "refused" / "out")
    assert list((tmp_path / "refused").glob("*") if (tmp_path / "refused").exists() else []) == []


def test_seeded_noise_is_refused(tmp_path: Path) -> None:
    folder.train(digits("privacy.source=seeded"), tmp_path / "run", quiet=True)
    refused(tmp_path / "run", tmp_path, "was made with seeded noise, which whoever knows the seed can subtract")


def test_a_run_without_a_guarantee_is_refused(tmp_path: Path) -> None:
    none = ("privacy.mechanism=none", "privacy.target_epsilon=null")
    folder.train(digits(*none), tmp_path / "run", quiet=True)
    refused(tmp_path / "run", tmp_path, "gives no privacy guarantee, so there is nothing in it that one covers")


def test_an_unfinished_run_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / folder.SUMMARY).unlink()
    refused(copy, tmp_path, r"is not finished; nothing was written\. Go on with `confide resume")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path, "holds no run")


def spoil_line(run: Path) -> None:
    text = (run / ledger.FILE).read_text()
    (run / ledger.FILE).write_text(text.replace('"noise_multiplier":0', '"noise_multiplier":1', 1))


def drop_last_line(run: Path) -> None:
    lines = (run / ledger.FILE).read_text().splitlines(keepends=True)
    (run / ledger.FILE).write_text("".join(lines[:-1]))
    (run / checkpoint.FILE).unlink()


def other_recipe(run: Path) -> None:
    text = (run / folder.RECIPE).read_text()
    (run / folder.RECIPE).write_text(text.replace("target_epsilon: 5.0", "target_epsilon: 4.0"))


def other_model(run: Path) -> None:
    tensors = load_file(run / folder.MODEL)
    tensors["bias"][0] += 1
    save_file(tensors, run / folder.MODEL)


def short_figures(run: Path) -> None:
    (run / RELEASED).write_text("".join((run / RELEASED).read_text().splitlines(keepends=True)[:-1]))


def wrong_figures(run: Path) -> None:
    lines = [{**line, "loss": "ann"} for line in lines_of(run / RELEASED)]
    (run / RELEASED).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (spoil_line, "was edited after it was written"),
        (drop_last_line, "are not of one finished run"),
        (other_recipe, "are not of one finished run"),
        (other_model, "is not the model that the run's checkpoint gives"),
        (short_figures, "should have step, loss, norm, bounded, accuracy for each of 5 steps"),
        (wrong_figures, "should have step, loss, norm, bounded, accuracy for each of 5 steps"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    spoil: Callable[[Path], None], problem: str, copy: Path, tmp_path: Path
) -> None:
    spoil(copy)
    refused(copy, tmp_path, problem)


def test_a_folder_that_holds_anything_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty, and what is published must hold nothing else"):
        publish.publish(run, tmp_path / "out")
    with pytest.raises(UserError, match="is a file; choose a new folder"):
        publish.publish(run, tmp_path / "out" / "mine")
    with pytest.raises(UserError, match="the folder that must not leave; choose one outside of it"):
        publish.publish(run, run / "public")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_an_empty_folder_is_filled(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert len(publish.publish(run, tmp_path / "out")["files"]) == len(FILES)


def test_words_with_a_path_of_this_machine_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"README\.md would hold a path of this machine"):
        publish.publish(run, tmp_path / "out", Words(data=f"The files in {run}/recordings."))
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_half_of_a_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.runs.publish._sync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        publish.publish(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# The other tasks, and the command


def test_a_speech_run_is_published_without_its_speakers(tmp_path: Path) -> None:
    def voices(population: str, speakers: int) -> dict[str, Any]:
        return {
            "kind": "synthetic", "population": population, "speakers": speakers, "utterances": 3,
            "sentences": "digits", "digits": [1, 2], "cache": str(tmp_path / "voices"),
        }  # fmt: skip

    wanted = {
        "task": {
            "kind": "speech", "corpus": voices("federated", 4), "test": voices("test", 2),
            "model": {"layers": 1, "width": 16, "mlp": 32, "heads": 2}, "cache": str(tmp_path / "features"),
        },
        "sampling": {"kind": "poisson", "cohort": 3},
        "local": {"steps": 2, "batch_seconds": 3, "learning_rate": 0.1, "gradient_clip": 1},
        "bounding": {"rule": "clip", "bound": 0.01},
        "privacy": {
            "mechanism": "gaussian", "noise_multiplier": 2, "delta": 1e-3, "source": "system",
            "metrics": {"loss": 50, "accuracy": True},
        },
        "central": {"kind": "lamb", "learning_rate": 0.01},
        "run": {"steps": 2},
    }  # fmt: skip
    folder.train(parse(wanted), tmp_path / "run", quiet=True)
    publish.publish(tmp_path / "run", tmp_path / "out", with_test_metrics=True)
    names = json.loads((tmp_path / "run" / "scores.json").read_text())["names"]
    assert len(names) == 2
    for path in (tmp_path / "out").iterdir():
        assert not any(name.encode() in path.read_bytes() for name in [*names, str(tmp_path)])
    assert front_of(tmp_path / "out")["pipeline_tag"] == "automatic-speech-recognition"
    assert {m["type"] for m in front_of(tmp_path / "out")["model-index"][0]["results"][0]["metrics"]} >= {"wer", "cer"}


def retriever(tmp_path: Path, source: str, **task: Any) -> Path:
    """A finished run over somebody's table."""
    rows = [f"how do I {verb} a {thing}?" for verb in ("sell", "buy", "mend") for thing in ("house", "car", "boat")]
    table = "query,document\n" + "".join(f"{row},about {row.split()[5]}\n" for row in rows * 4)
    (tmp_path / "queries.csv").write_text(table)
    wanted = {
        "task": {
            "kind": "retrieval", "encoder": {"source": source, "pooling": "mean"},
            "data": {"kind": "table", "queries": str(tmp_path / "queries.csv")},
            "clients": {"kind": "even", "clients": 6}, "cache": str(tmp_path / "states"), **task,
        },
        "users": {"unit": "random share of the queries"},
        "sampling": {"kind": "poisson", "cohort": 3},
        "local": {"epochs": 1, "batch_size": 4, "learning_rate": 0.3},
        "bounding": {"rule": "clip", "bound": 1},
        "privacy": {
            "mechanism": "gaussian", "noise_multiplier": 2, "delta": 1e-3, "source": "system",
            "metrics": {"loss": 5, "accuracy": True},
        },
        "central": {"kind": "sgd", "learning_rate": 1},
        "run": {"steps": 3},
    }  # fmt: skip
    folder.train(parse(wanted), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_a_retrieval_run_is_published_without_its_texts(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    publish.publish(retriever(tmp_path, str(tiny_model("masked"))), tmp_path / "out", with_test_metrics=True)
    assert len(lines_of(tmp_path / "out" / RELEASED)) == 3
    for path in (tmp_path / "out").iterdir():
        assert not any(word in path.read_bytes() for word in (b"how do I", b"house", str(tmp_path).encode()))


def test_a_published_retriever_is_used_with_the_names_that_its_owner_published_or_gives(
    tmp_path: Path, tiny_model: Callable[..., Path], command: Command
) -> None:
    encoder = str(tiny_model("masked"))
    run = retriever(tmp_path, encoder)
    code, said, err = command("publish", run, tmp_path / "named", "--documents", "names")
    assert (code, err) == (0, "")
    assert "documents.jsonl has names of 3 documents (about house?, about car?, about boat?)" in said
    listed = tmp_path / "named" / "documents.jsonl"
    assert lines_of(listed) == [{"id": f"about {thing}?"} for thing in ("house", "car", "boat")]
    assert "no guarantee covers them" in (tmp_path / "named" / "README.md").read_text()
    wanted = [each.document.id for each in answering.retrieve(run, "the cat sat", 3)]
    asked = ["--encoder", encoder, "--json"]
    code, out, err = command("retrieve", tmp_path / "named", "the cat sat", *asked)
    assert code == 0, err
    assert [each["id"] for each in json.loads(out)["documents"]] == wanted
    publish.publish(run, tmp_path / "bare")
    code, _, err = command("retrieve", tmp_path / "bare", "the cat sat", *asked)
    assert code == 2
    for said in (
        "bare was published without its documents",
        "Expected --documents documents.jsonl",
        "--documents names",
    ):
        assert said in err
    code, out, err = command("retrieve", tmp_path / "bare", "the cat sat", "--documents", listed, *asked)
    assert code == 0, err
    assert [each["id"] for each in json.loads(out)["documents"]] == wanted
    assert answering.open_model(tmp_path / "bare", encoder, listed) == "retrieval"  # what `confide serve` opens
    found = answering.found(tmp_path / "bare", "the cat sat", 3, listed, encoder)["documents"]
    assert [each["id"] for each in found] == wanted
    code, _, err = command("evaluate", tmp_path / "named")
    assert code == 2
    assert "--encoder" in err or "without its test queries" in err
    made = export(tmp_path / "named", tmp_path / "named.onnx", encoder)
    assert json.loads(made["notes"]["documents"]) == ["about house?", "about car?", "about boat?"]
    assert "documents" not in export(run, tmp_path / "run.onnx")["notes"]  # nobody has said that they may leave


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"id": "a"}\n{"id": "b"}\n', "has 2 documents, and the model of"),
        ('{"id": "a"}\nb\n', "line 2 is 'b'; expected a document as JSON"),
        ('{"name": "a"}\n', "line 1 is"),
    ],
)
def test_a_list_of_documents_that_does_not_fit_is_refused(
    content: str, said: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    encoder = str(tiny_model("masked"))
    publish.publish(retriever(tmp_path, encoder), tmp_path / "out")
    (tmp_path / "listed.jsonl").write_text(content)
    with pytest.raises(UserError, match=said):
        answering.retrieve(tmp_path / "out", "the cat", 1, tmp_path / "listed.jsonl", encoder)


def test_a_model_that_searches_is_published_with_texts_or_without_documents(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    encoder = str(tiny_model("masked"))
    run = retriever(tmp_path, encoder, method="adapter_search")
    with pytest.raises(UserError, match=r"--documents names: .* expected --documents texts"):
        publish.publish(run, tmp_path / "out", documents="names")
    publish.publish(run, tmp_path / "out", documents="texts")
    found = answering.retrieve(tmp_path / "out", "the cat sat", 3, encoder=encoder)
    assert found == answering.retrieve(run, "the cat sat", 3)


def test_documents_that_have_changed_since_the_run_are_not_published(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = retriever(tmp_path, str(tiny_model("masked")))
    table = tmp_path / "queries.csv"
    table.write_text(table.read_text().replace("about boat", "about ship"))
    with pytest.raises(UserError, match=r"are not those that .* was trained on; nothing was written"):
        publish.publish(run, tmp_path / "out", documents="names")
    assert not (tmp_path / "out").exists()


def test_documents_of_a_run_that_has_none_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--documents names: is for retrieval, and .* is of task convex/logistic"):
        publish.publish(run, tmp_path / "out", documents="names")


def test_the_command_writes_and_says_what_stays_behind(command: Command, run: Path, tmp_path: Path) -> None:
    code, said, _ = command("publish", run, tmp_path / "out", "--data", "Digits.", "--use", "To learn.")
    assert code == 0
    assert "README.md" in said
    assert SECRET in said
    assert "Digits." in (tmp_path / "out" / "README.md").read_text()
    code, said, _ = command("publish", run, tmp_path / "json", "--json")
    assert json.loads(said)["files"] == sorted(FILES)
    code, _, problem = command("publish", run, tmp_path / "json")
    assert code == 2
    assert "is not empty" in problem
    assert "Traceback" not in problem
