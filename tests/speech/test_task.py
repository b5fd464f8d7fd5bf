"""The speech task: batches, pools, starts, and whole runs over good and bad recordings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from confide.errors import Stopped, UserError
from confide.federated import items
from confide.federated.custom import BasicTask
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.parameters import Layout, flatten
from confide.randomness import generator
from confide.recipe import Recipe, parse
from confide.report.page import write_report
from confide.runs import folder
from confide.runs.evaluation import evaluate
from confide.runs.simulation import simulate
from confide.speech.corpus import count_by_reason
from confide.speech.settings import SpeechSettings
from confide.speech.task import Speech

pytestmark = pytest.mark.usefixtures("no_figures_here")
RATE = 16_000
MODEL = {"layers": 1, "width": 16, "mlp": 32, "heads": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


def voices(place: Path, population: str, speakers: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "synthetic", "population": population, "speakers": speakers, "utterances": 3, "sentences": "digits",
        "digits": [1, 2], "cache": str(place / "voices"), **more,
    }  # fmt: skip


def document(place: Path, **task: Any) -> dict[str, Any]:
    """Four speakers, three central steps of two local steps."""
    return {
        "task": {
            "kind": "speech", "corpus": voices(place, "federated", 4), "test": voices(place, "test", 2),
            "model": MODEL, "cache": str(place / "features"), **task,
        },
        "sampling": {"kind": "fixed", "cohort": 3},
        "local": {"steps": 2, "batch_seconds": 3, "learning_rate": 0.1, "gradient_clip": 1},
        "bounding": {"rule": "clip", "bound": 0.01},
        "central": {"kind": "lamb", "learning_rate": 0.01},
        "evaluation": {"every": 2},
        "run": {"steps": 3, "checkpoint_every": 1},
    }  # fmt: skip


def speech(place: Path, seed: int = 0, **task: Any) -> Speech:
    return Speech(SpeechSettings.model_validate(document(place, **task)["task"]), seed, quiet=True)


@pytest.fixture(scope="module")
def finished(place: Path, no_figures_here: None) -> Path:
    """A whole run in one process."""
    folder.train(parse(document(place)), place / "finished", quiet=True)
    return place / "finished"


# Batches


class Clock(BasicTask):
    """A task of which nothing is known but how long its examples last; it writes down every batch."""

    name, metric = "clock", "none"

    def __init__(self, lengths: list[float]) -> None:
        self.lengths, self.batches = np.array(lengths), list[np.ndarray]()

    @property
    def examples(self) -> np.ndarray:
        return np.array([len(self.lengths)])

    def initial_parameters(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(1)}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        self.batches.append(np.arange(len(self.lengths)) if examples is None else examples)
        return ()

    def seconds(self, user: int) -> np.ndarray:
        return self.lengths

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return parameters["w"].sum()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def packed(lengths: list[float], **local: Any) -> list[np.ndarray]:
    task = Clock(lengths)
    start = task.initial_parameters()
    trainer = PlainTrainer(task, Layout.of(start), LocalTraining(learning_rate=1.0, **local), 0, flatten(start))
    trainer.update(flatten(start), 0, 0)
    return task.batches


LENGTHS = st.lists(st.floats(0.1, 30), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, limit=st.floats(0.1, 120), epochs=st.integers(1, 3))
def test_batches_stay_below_the_padded_limit_and_cover_every_utterance_once_an_epoch(
    lengths: list[float], limit: float, epochs: int
) -> None:
    batches = packed(lengths, epochs=epochs, batch_seconds=limit)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit * (1 + 1e-9)
    order = np.concatenate(batches)
    assert len(order) == epochs * len(lengths)
    for epoch in range(epochs):
        assert sorted(order[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, limit=st.floats(0.1, 120), steps=st.integers(1, 12))
def test_so_many_local_steps_are_taken_whatever_there_is_to_hear(
    lengths: list[float], limit: float, steps: int
) -> None:
    batches = packed(lengths, steps=steps, batch_seconds=limit)
    assert len(batches) == steps
    assert all(len(batch) for batch in batches)


# The task


def test_pooled_users_hold_every_utterance_exactly_once(place: Path) -> None:
    plain = speech(place)
    for users in (1, 5, 12):
        pooled = speech(place, pool=users)
        held = np.concatenate(pooled.held).tolist()
        everything = [[owner, i] for owner, count in enumerate(plain.examples) for i in range(count)]
        assert sorted(held) == everything
        assert len(pooled.examples) == users
        assert max(pooled.examples) - min(pooled.examples) <= 1
        total = sum(float(pooled.seconds(user).sum()) for user in range(users))
        assert total == pytest.approx(sum(float(plain.seconds(user).sum()) for user in range(4)))
    assert not np.array_equal(speech(place, seed=1, pool=1).held[0], speech(place, pool=1).held[0])


def test_a_pooled_batch_is_made_of_its_owners_utterances(place: Path) -> None:
    plain, pooled = speech(place, augment=None), speech(place, augment=None, pool=2)
    chosen = np.array([4, 0, 2])
    features, lengths, targets, sizes, _ = pooled.batch(1, chosen, generator(0, "draw"))
    for row, which in enumerate(chosen):
        owner, where = pooled.held[1][which].tolist()
        (wanted,) = plain.store.features(owner, [where])
        assert np.array_equal(features[row, : lengths[row]].numpy(), wanted)
        assert not features[row, lengths[row] :].any()
        assert targets[row, : sizes[row]].tolist() == plain.store.targets(owner, [where])[0].tolist()
        assert float(pooled.seconds(1)[which]) == pytest.approx(plain.seconds(owner)[where])


def test_more_pooled_users_than_utterances_are_refused(place: Path) -> None:
    with pytest.raises(UserError, match=r"task.pool=13: there are only 12 utterances"):
        _ = speech(place, pool=13).held


def test_a_loss_depends_on_its_draw_and_on_nothing_else(place: Path) -> None:
    task = speech(place, model={**MODEL, "dropout": 0.2, "layer_drop": 0.1})
    parameters = task.initial_parameters()

    def loss(*address: int) -> float:
        return float(task.loss(parameters, task.batch(1, None, generator(0, "draw", *address))))

    first = loss(0)
    assert loss(1) != first
    assert loss(0) == first
    assert loss(0, 1) != first


def test_dropout_alone_follows_the_draw_too(place: Path) -> None:
    task = speech(place, augment=None, model={**MODEL, "dropout": 0.2, "cape_shift": 0})
    parameters = task.initial_parameters()
    losses = {float(task.loss(parameters, task.batch(0, None, generator(0, "draw", step)))) for step in range(3)}
    assert len(losses) == 3


def test_fresh_weights_depend_on_the_seed_alone(place: Path) -> None:
    a, b, c = (flatten(speech(place, seed).initial_parameters()) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# Starts


def test_a_run_may_start_from_another_runs_folder_or_file(place: Path, finished: Path) -> None:
    model = load_file(finished / folder.MODEL)
    for start in (finished, finished / folder.MODEL):
        found = speech(place, start=str(start)).starting_parameters()
        assert found.keys() == model.keys()
        assert all(torch.equal(found[name], model[name]) for name in model)
    fresh = speech(place).initial_parameters()
    assert any(not torch.equal(fresh[name], model[name]) for name in model)


def test_a_start_that_does_not_fit_is_refused(place: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"conv.weight should be \(64, 7, 80\) but \(32, 7, 80\) was found"):
        speech(place, start=str(finished), model={**MODEL, "width": 32}).starting_parameters()
    with pytest.raises(UserError, match=r"blocks.01.ln1.scale should be \(16,\) but nothing was found"):
        speech(place, start=str(finished), model={**MODEL, "layers": 2}).starting_parameters()
    (tmp_path / "broken.safetensors").write_bytes((finished / folder.MODEL).read_bytes()[:-9])
    for missing in (tmp_path, tmp_path / "nothing.safetensors", tmp_path / "broken.safetensors"):
        with pytest.raises(UserError, match="no model could be read from"):
            speech(place, start=str(missing)).starting_parameters()
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="but nothing was found"):
        speech(place, start=str(tmp_path / "other.safetensors")).starting_parameters()


def test_corpora_in_two_languages_are_refused(place: Path) -> None:
    french = voices(place, "test", 1, language="fr")
    with pytest.raises(UserError, match=r"task.corpus is in 'en' and task.test in 'fr'; one model has one token set"):
        speech(place, test=french)


def test_the_model_has_the_tokens_of_its_language(place: Path) -> None:
    french = voices(place, "test", 1, language="fr")
    task = speech(place, corpus=french, test=french)
    assert task.initial_parameters()["head.weight"].shape == (task.tokens.size, 16)
    assert task.tokens.size > 30


# Whole runs


@pytest.mark.parametrize(
    "features", [{"mels": 40}, {"sample_rate": 8_000, "highest": 4_000.0, "fft": 256}, {"fft": 1024, "window": 0.05}]
)
def test_a_run_trains_on_the_features_that_it_asks_for(place: Path, features: dict[str, Any]) -> None:
    wanted = parse(document(place, features=features))
    assert isinstance(wanted.task, SpeechSettings)
    weights = Speech(wanted.task, 0, quiet=True).initial_parameters()["conv.weight"]
    assert weights.shape[-1] == wanted.task.features.mels
    loop, state = simulate(wanted)
    assert state.step == 3
    assert np.isfinite(loop.task.evaluate(loop.layout.views(state.parameters))["test_loss"])


@pytest.mark.usefixtures("warm_processes")
def test_two_workers_train_the_same_model_as_one(place: Path, finished: Path, tmp_path: Path) -> None:
    folder.train(parse(document(place)), tmp_path / "two", workers=2, quiet=True)
    assert (tmp_path / "two" / folder.MODEL).read_bytes() == (finished / folder.MODEL).read_bytes()


def test_a_stopped_run_ends_as_if_it_had_not_been(
    place: Path, finished: Path, tmp_path: Path, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    with signal_after(2), pytest.raises(Stopped):
        folder.train(parse(document(place)), tmp_path / "run", quiet=True)
    summary = folder.resume(tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / folder.MODEL).read_bytes() == (finished / folder.MODEL).read_bytes()
    assert summary["metrics"] == folder.summary_of(finished)["metrics"]


def test_a_run_is_scored_in_percent_on_the_test_speakers(place: Path, finished: Path) -> None:
    metrics = folder.summary_of(finished)["metrics"]
    task = speech(place)
    assert set(task.test.speakers).isdisjoint(task.store.speakers)
    assert metrics == task.evaluate(load_file(finished / folder.MODEL))
    found = evaluate(finished, quiet=True).to_json()
    assert (metrics["wer"], metrics["cer"]) == (found["wer"]["percent"], found["cer"]["percent"])


@pytest.fixture(scope="module")
def half(place: Path, no_figures_here: None) -> Path:
    """A run whose speakers are understood differently well, or there would be nothing to compare."""
    half_trained = document(place, corpus=voices(place, "seed", 4), test=voices(place, "seed", 6), pool=1, augment=None)
    half_trained |= {"sampling": {"kind": "fixed", "cohort": 1}, "local": {"steps": 1, "learning_rate": 1.0}}
    half_trained |= {"bounding": {"rule": "none"}, "central": {"kind": "adam", "learning_rate": 0.01}}
    half_trained["run"] = {"steps": 150, "checkpoint_every": 1000}
    half_trained["evaluation"] = {"every": 1000}
    folder.train(parse(half_trained), place / "half", quiet=True, page=write_report)
    return place / "half"


def test_the_page_states_the_interval_that_evaluate_prints(half: Path) -> None:
    found = evaluate(half, quiet=True).to_json()["wer"]
    assert found["low"] < found["percent"] < found["high"]
    stated = f"95 % interval {found['low']:.4g} to {found['high']:.4g}, from drawing the 6 speakers"
    assert stated in (half / "report.html").read_text()


def test_a_users_own_accuracy_is_what_its_error_rate_leaves(place: Path, half: Path) -> None:
    """Of one user with all test utterances it is the run's own evaluation; of a speaker, that speaker's."""
    model, six = load_file(half / folder.MODEL), voices(place, "seed", 6)
    found = evaluate(half, quiet=True).to_json()
    whole = speech(place, corpus=six, pool=1).own_accuracy(model, np.array([0]))
    assert float(whole) == pytest.approx(1 - found["wer"]["percent"] / 100)
    task = speech(place, corpus=six)
    each = dict(zip(task.store.speakers, task.own_accuracy(model, np.arange(6)).tolist(), strict=True))
    assert each == pytest.approx({s["name"]: max(1 - s["wer"] / 100, 0) for s in found["speakers"]})
    assert 0 < float(whole) < 1


def with_local(place: Path, **local: Any) -> Recipe:
    given = document(place)
    given["local"] = {"batch_seconds": 1.5, "learning_rate": 0.1, "gradient_clip": 1, **local}
    given["run"]["steps"] = 1
    return parse(given)


def test_local_epochs_and_fedprox_run_and_fedprox_holds_users_back(place: Path) -> None:
    norms: dict[float, float] = {}
    for proximal in (0.0, 5.0):
        recipe = with_local(place, epochs=3, proximal=proximal)
        seen: list[dict[str, Any]] = []
        simulate(recipe, speech(place), watch=lambda loop, state, record, seen=seen: seen.append(record))  # type: ignore[misc]
        norms[proximal] = seen[0]["update_norm"]
        assert seen[0]["not_finite"] == 0
    assert 0 < norms[5.0] < norms[0.0]


def test_a_pool_of_one_step_follows_the_gradient_of_all_utterances(place: Path) -> None:
    """Central training: the mean of the pool's updates is the gradient of one batch of everything."""
    fixed = {**MODEL, "cape_shift": 0}
    whole, parts = (speech(place, pool=users, augment=None, model=fixed) for users in (1, 4))
    start = whole.initial_parameters()
    local = LocalTraining(steps=1, learning_rate=1.0)
    central = flatten(start)

    def deltas(task: Speech, users: int) -> Tensor:
        trainer = PlainTrainer(task, Layout.of(start), local, 0, central)
        return torch.stack([trainer.update(central, user, 0).delta.clone() for user in range(users)]).mean(dim=0)

    assert torch.allclose(deltas(whole, 1), deltas(parts, 4), rtol=1e-3, atol=1e-4)


# Bad input


def test_the_scores_of_each_utterance_add_up_to_the_error_rate(place: Path, finished: Path) -> None:
    found, task = items.read(finished), speech(place)
    assert found is not None
    assert found.value == pytest.approx(folder.summary_of(finished)["metrics"]["wer"])
    assert found.names == tuple(sorted(task.test.speakers))
    assert len(found.counts) == task.test.examples.sum()
    speakers = {speaker["name"]: speaker["wer"] for speaker in evaluate(finished, quiet=True).to_json()["speakers"]}
    assert {name: value for name, value, _, _ in found.table()} == pytest.approx(speakers)


def test_another_test_corpus_has_another_name(place: Path, finished: Path) -> None:
    found, start = items.read(finished), speech(place).initial_parameters()
    assert found is not None
    assert speech(place).scored(start)[1].test == found.test
    other = speech(place, test=voices(place, "test", 3)).scored(start)[1]
    assert other.test != found.test


@pytest.fixture(scope="module")
def recordings(place: Path) -> Path:
    """A folder as people have them: every rate and number of channels, and much that is broken."""
    root, noise = place / "recordings", np.random.default_rng(0).uniform(-0.1, 0.1, (RATE * 3, 2))

    def say(name: str, samples: np.ndarray, rate: int, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, samples, rate)
        path.with_suffix(".txt").write_text(text)

    say("ann/stereo.wav", noise, RATE, "one two")
    say("ann/slow.wav", noise[:12_000, 0], 8000, "three")
    say("ann/fast.flac", noise, 44_100, "four")
    say("ann/silent.wav", np.zeros(RATE), RATE, "five")
    say("ann/strange.wav", noise, RATE, "Ça coûte 5 € — ÆØ Привет!")
    say("ann/zero.wav", np.zeros(0), RATE, "six")
    say("bob/short.wav", noise[:6000, 0], RATE, "a")  # his only one
    say("eve/good.wav", noise, RATE, "seven")
    say("eve/long.wav", noise[: RATE // 2, 0], RATE, "a label that is longer than its frames")
    say("eve/digits.wav", noise, RATE, "123 456")
    say("mute/nothing.wav", noise, RATE, "...")
    (root / "eve" / "story.wav").write_text("this is not audio")
    (root / "eve" / "story.txt").write_text("eight")
    (root / "eve" / "cut.flac").write_bytes((root / "ann" / "fast.flac").read_bytes()[:5000])
    (root / "eve" / "cut.txt").write_text("nine")
    return root


def test_bad_recordings_are_counted_and_named_and_the_rest_is_trained_on(place: Path, recordings: Path) -> None:
    own = {"kind": "folder", "folder": str(recordings)}
    task = speech(place, corpus=own, test=own)
    assert dict(zip(task.store.speakers, task.examples.tolist(), strict=True)) == {"ann": 5, "bob": 1, "eve": 1}
    assert {item.id: item.kind for item in task.skipped} == {
        "ann/zero": "no samples",
        "eve/long": "label too long",
        "eve/digits": "no text",
        "mute/nothing": "no text",
        "eve/story": "undecodable",
        "eve/cut": "truncated",
    }
    assert sum(count_by_reason(task.skipped).values()) == 6
    ann = dict(zip((u.id for u in task.store.utterances(0)), task.store.texts(0), strict=True))
    assert ann["ann/strange"] == "ca coute eur aeo privet"
    given = document(place, corpus=own, test=own)
    summary = folder.train(parse(given), place / "recorded", quiet=True)
    records = [json.loads(line) for line in (place / "recorded" / folder.METRICS).read_text().splitlines()]
    assert [record["cohort"] for record in records] == [3, 3, 3]
    assert all(record["not_finite"] == 0 and np.isfinite(record["loss"]) for record in records)
    assert all(np.isfinite(value) for value in summary["metrics"].values())


def test_a_speaker_with_one_short_utterance_trains_on_it_in_every_step(place: Path, recordings: Path) -> None:
    own = {"kind": "folder", "folder": str(recordings)}
    task = speech(place, corpus=own, test=own)
    bob = task.store.speakers.index("bob")
    start = task.initial_parameters()
    central = flatten(start)
    local = LocalTraining(steps=4, batch_seconds=60, learning_rate=0.1)
    update = PlainTrainer(task, Layout.of(start), local, 0, central).update(central, bob, 0)
    assert torch.isfinite(update.delta).all()
    assert float(update.norms.norm()) > 0


def test_a_resume_over_other_audio_of_the_same_length_is_refused(
    place: Path, tmp_path: Path, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    sound = np.random.default_rng(1).uniform(-0.1, 0.1, (4, RATE))
    for number, samples in enumerate(sound):
        path = tmp_path / "said" / f"speaker{number}" / "a.wav"
        path.parent.mkdir(parents=True)
        soundfile.write(path, samples, RATE)
        path.with_suffix(".txt").write_text("one")
    wanted = parse(document(place, corpus={"kind": "folder", "folder": str(tmp_path / "said")}))
    with signal_after(1), pytest.raises(Stopped):
        folder.train(wanted, tmp_path / "run", quiet=True)
    held, changed = path.read_bytes(), np.flip(sound[-1])
    soundfile.write(path, changed, RATE)
    with pytest.raises(UserError, match="the users' audio changed since the run began"):
        folder.resume(tmp_path / "run", quiet=True)
    path.write_bytes(held)
    assert folder.resume(tmp_path / "run", quiet=True)["steps"] == 3


def test_a_run_from_before_audio_was_digested_is_checked_by_who_said_what_for_how_long(
    place: Path, tmp_path: Path, signal_after: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sound, made = np.random.default_rng(1).uniform(-0.1, 0.1, (4, RATE)), vars(Speech)["fingerprint"].func
    for number, samples in enumerate(sound):
        path = tmp_path / "said" / f"speaker{number}" / "a.wav"
        path.parent.mkdir(parents=True)
        soundfile.write(path, samples, RATE)
        path.with_suffix(".txt").write_text("one")
    wanted = parse(document(place, corpus={"kind": "folder", "folder": str(tmp_path / "said")}))
    with monkeypatch.context() as older:
        plain = property(lambda self: {name: value for name, value in made(self).items() if "audio" not in name})
        older.setattr(Speech, "fingerprint", plain)
        with signal_after(1), pytest.raises(Stopped):
            folder.train(wanted, tmp_path / "run", quiet=True)
    path.with_suffix(".txt").write_text("two")
    with pytest.raises(UserError, match="the users' data changed since the run began"):
        folder.resume(tmp_path / "run", quiet=True)
    path.with_suffix(".txt").write_text("one")
    soundfile.write(path, sound[-1][: RATE // 2], RATE)
    with pytest.raises(UserError, match="the users' data changed since the run began"):
        folder.resume(tmp_path / "run", quiet=True)
    soundfile.write(path, np.flip(sound[-1]), RATE)
    assert folder.resume(tmp_path / "run", quiet=True)["steps"] == 3, "what such a run cannot tell"


def test_a_corpus_without_a_usable_speaker_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "mute").mkdir()
    soundfile.write(tmp_path / "mute" / "a.wav", np.zeros(RATE // 10), RATE)
    (tmp_path / "mute" / "a.txt").write_text("far too long for a tenth of a second")
    with pytest.raises(UserError, match="has no usable utterance among 1"):
        _ = speech(place, corpus={"kind": "folder", "folder": str(tmp_path)}).examples
