"""Speech on a frozen encoder: kept states, a head on them, many users at once, and whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from confide.encoders.frames import FrameEncoder
from confide.errors import UserError
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.one_pass import OnePassTrainer, users_at_once
from confide.federated.parameters import Layout, flatten
from confide.recipe import parse
from confide.runs import folder
from confide.runs.evaluation import SpeechEvaluation, evaluate
from confide.runs.recogniser import load_recogniser
from confide.speech.corpus import read_audio
from confide.speech.network import Pretrained
from confide.speech.settings import SpeechSettings
from confide.speech.task import Speech
from confide.speech.tokens import BOUNDARY

pytestmark = pytest.mark.usefixtures("no_figures_here")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrained")


def voices(place: Path, population: str, speakers: int) -> dict[str, Any]:
    return {
        "kind": "synthetic", "population": population, "speakers": speakers, "utterances": 3, "sentences": "digits",
        "digits": [1, 2], "cache": str(place / "voices"),
    }  # fmt: skip


def document(place: Path, source: Path, **encoder: Any) -> dict[str, Any]:
    return {
        "task": {
            "kind": "speech", "corpus": voices(place, "federated", 4), "test": voices(place, "test", 2),
            "model": {"encoder": {"source": str(source), **encoder}}, "cache": str(place / "states"),
        },
        "sampling": {"kind": "fixed", "cohort": 3},
        "local": {"steps": 1, "learning_rate": 1.0},
        "bounding": {"rule": "normalise", "bound": 1},
        "central": {"kind": "sgd", "learning_rate": 5.0, "schedule": {"kind": "linear", "steps": 4}},
        "evaluation": {"every": 2},
        "run": {"steps": 4, "checkpoint_every": 2},
    }  # fmt: skip


def speech(place: Path, source: Path, **encoder: Any) -> Speech:
    settings = SpeechSettings.model_validate(document(place, source, **encoder)["task"])
    return Speech(settings, 0, quiet=True)


def test_kept_states_are_the_encoders_with_silence_around_the_utterance(
    place: Path, tiny_speech_model: Callable[[str], Path]
) -> None:
    source = tiny_speech_model("whisper")
    task, encoder = speech(place, source, before=0.1, after=0.3), FrameEncoder(str(source))
    samples = read_audio(task.store.utterances(1)[2])
    (kept,) = task.store.features(1, [2])
    (wanted,) = encoder.states([np.pad(samples, (1_600, 4_800))])
    assert len(kept) == len(wanted) == (len(samples) + 6_400) // 160 // 2 + (len(samples) + 6_400) // 160 % 2
    np.testing.assert_allclose(kept, wanted.numpy(), atol=2e-2)  # kept in 16 bits, in a batch


def test_another_encoder_has_other_states_in_the_same_cache(
    place: Path, tiny_speech_model: Callable[[str], Path]
) -> None:
    names = ("whisper", "moonshine", "wavlm")
    tasks = [speech(place, tiny_speech_model(name)) for name in names]
    again = [speech(place, tiny_speech_model(name)) for name in names]
    for one, other in zip(tasks, again, strict=True):
        np.testing.assert_array_equal(one.store.features(0, [0])[0], other.store.features(0, [0])[0])
    first = [task.store.features(0, [0])[0] for task in tasks]
    assert len({each.tobytes() for each in first}) == 3


def test_opened_again_the_encoder_is_not_even_loaded(
    place: Path, tiny_speech_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    speech(place, tiny_speech_model("whisper"))
    monkeypatch.setattr(FrameEncoder, "states", None)
    task = speech(place, tiny_speech_model("whisper"))
    assert isinstance(task.network, Pretrained)
    assert "model" not in vars(task.network.front.encoder)


def test_states_of_computed_sound_are_kept_like_those_of_recordings(
    place: Path, tiny_speech_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    people = {"kind": "population", "people": 3, "voices": 10, "words": ["one"], "cache": str(place / "people")}
    given = document(place, tiny_speech_model("whisper"))["task"]
    given |= {"corpus": {**people, "part": "train"}, "test": {**people, "part": "test"}}
    task = Speech(SpeechSettings.model_validate(given), 0, quiet=True)
    (made,) = task.store.features(2, [0])
    monkeypatch.setattr(FrameEncoder, "states", None)
    again = Speech(SpeechSettings.model_validate(given), 0, quiet=True)
    np.testing.assert_array_equal(made, again.store.features(2, [0])[0])
    assert len(set(task.store.audio)) == 3
    assert task.fingerprint == again.fingerprint


@pytest.mark.parametrize("hidden", [None, 24])
@pytest.mark.parametrize("local", [{}, {"gradient_clip": 0.1}, {"divide_by_learning_rate": True, "batch_size": 3}])
def test_users_at_once_agree_with_one_after_the_other(
    place: Path, tiny_speech_model: Callable[[str], Path], hidden: int | None, local: dict[str, Any]
) -> None:
    task = speech(place, tiny_speech_model("whisper"), hidden=hidden)
    training = LocalTraining(steps=1, learning_rate=0.7, **local)
    parameters = task.initial_parameters()
    draw = torch.Generator().manual_seed(1)
    parameters = {name: p + 0.3 * torch.randn(p.shape, generator=draw) for name, p in parameters.items()}
    layout, central = Layout.of(parameters), flatten(parameters)
    plain = PlainTrainer(task, layout, training, 0, central)
    users = np.array([2, 0, 3])
    assert task.users_at_once(training) >= len(users)
    fast = task.fast_updates(layout.views(central), users, training, training.rate(0))
    assert fast is not None
    factors = torch.rand(3, len(layout.names), generator=draw, dtype=torch.float64)
    wanted, found = torch.zeros_like(central), torch.zeros_like(central)
    fast.weighted_sum(factors, found)
    for place_in, user in enumerate(users):
        update = plain.update(central, int(user), 0)
        torch.testing.assert_close(fast.norms[place_in], update.norms[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fast.losses[place_in], update.losses[0], rtol=1e-5, atol=1e-5)
        update.weighted_sum(factors[place_in : place_in + 1], wanted)
    # Torch's CTC takes logarithms of single precision, and is off by that much; see tests/speech/test_ctc.py.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_mini_batches_and_more_steps_go_the_plain_way(place: Path, tiny_speech_model: Callable[[str], Path]) -> None:
    task = speech(place, tiny_speech_model("whisper"))
    for local in ({"steps": 2}, {"steps": 1, "batch_size": 2}, {"steps": 1, "batch_seconds": 3.0}):
        training = LocalTraining(learning_rate=1.0, **local)
        assert task.users_at_once(training) == 0
        assert task.fast_updates(task.initial_parameters(), np.array([0]), training, 1.0) is None


def test_a_run_holds_only_the_head_and_names_its_encoder(
    place: Path, tiny_speech_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_speech_model("whisper"), tmp_path / "encoder")
    summary = folder.train(parse(document(place, source)), tmp_path / "run", quiet=True)
    model = tmp_path / "run" / folder.MODEL
    assert {name: tuple(t.shape) for name, t in load_file(model).items()} == {
        "head.weight": (30, 16), "head.bias": (30,),
    }  # fmt: skip
    with safe_open(model, framework="pt") as file:
        assert FrameEncoder(str(source)).identity.startswith(file.metadata()["encoder"])
    again = evaluate(tmp_path / "run", quiet=True)
    assert isinstance(again, SpeechEvaluation)
    assert 100 * again.scores.wer.value == pytest.approx(summary["metrics"]["wer"])
    transcript = load_recogniser(tmp_path / "run").transcribe(np.random.default_rng(0).normal(size=9_000) * 0.1)
    assert transcript.seconds == pytest.approx(9_000 / 16_000)

    tensors = load_file(source / "model.safetensors")
    tensors["encoder.conv1.bias"] += 1e-3
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match="was trained on an encoder with the digest"):
        load_recogniser(tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"model": {"encoder": {}, "layers": 5}}, "layers: of the model that is trained whole"),
        ({"model": {"encoder": {}}, "augment": {}}, "augment: masks log-mel features"),
        ({"model": {"encoder": {}}, "features": {"mels": 40}}, "features: model.encoder brings its own"),
        ({"model": {"encoder": {"source": "https://example.org"}}}, "encoders of speech are not served"),
        ({"model": {"encoder": {"train": []}}}, "at least 1 item"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(place: Path, task: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse({**document(place, Path("x")), "task": {**document(place, Path("x"))["task"], **task}})


def test_a_recipe_without_an_encoder_keeps_its_digest() -> None:
    task = SpeechSettings.model_validate({"corpus": {"kind": "an4"}, "test": {"kind": "an4"}})
    assert "encoder" not in task.model.model_dump()
    again = SpeechSettings.model_validate_json(task.model_dump_json())
    assert again == task
    assert again.augment is not None


FAMILIES = ["wav2vec2", "wav2vec2-stable", "hubert", "wavlm", "moonshine", "whisper"]
PARTS = [("lora",), ("adapter",), ("norms",), ("lora", "adapter", "norms"), ("all",), ("all", "adapter")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", PARTS)
def test_every_part_begins_with_the_encoder_as_it_is_and_has_a_gradient(
    place: Path, tiny_speech_model: Callable[[str], Path], family: str, parts: tuple[str, ...]
) -> None:
    source = tiny_speech_model(family)
    plain, task = speech(place, source), speech(place, source, train=["head", *parts], first=1, rank=2)
    parameters = task.initial_parameters()
    draw = torch.Generator().manual_seed(0)
    for name in parameters:
        if name.startswith("head.") or name.endswith("lora_b"):  # at zero, nothing below them has a gradient
            parameters[name] = 0.5 * torch.randn(parameters[name].shape, generator=draw)
    head = {name: parameters[name] for name in plain.initial_parameters()}
    begun = {name: torch.zeros_like(p) if name.endswith("lora_b") else p for name, p in parameters.items()}
    batches = [each.batch(1, None, np.random.default_rng(0)) for each in (plain, task)]
    torch.testing.assert_close(task.loss(begun, batches[1]), plain.loss(head, batches[0]), rtol=1e-2, atol=1e-2)
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    gradients = torch.autograd.grad(task.loss(leaves, batches[1]), list(leaves.values()))
    # A bias on all keys alike changes no attention.
    small = [name for name, g in zip(leaves, gradients, strict=True) if g.norm() < 1e-7 and "k_proj.bias" not in name]
    assert small == []


@pytest.mark.parametrize("family", ["whisper", "wavlm", "moonshine"])
@pytest.mark.parametrize("parts", [("lora", "adapter"), ("norms",), ("all",)])
def test_parts_of_many_users_in_one_pass_agree_with_one_after_the_other(
    place: Path, tiny_speech_model: Callable[[str], Path], family: str, parts: tuple[str, ...]
) -> None:
    task = speech(place, tiny_speech_model(family), train=["head", *parts], first=1, rank=2)
    local = LocalTraining(steps=1, learning_rate=0.3, gradient_clip=2.0, rates={"head.*": 0.5})
    draw = torch.Generator().manual_seed(0)
    parameters = {n: p + 0.3 * torch.randn(p.shape, generator=draw) for n, p in task.initial_parameters().items()}
    layout, central = Layout.of(parameters), flatten(parameters)
    users = np.array([3, 0, 1])
    if family == "moonshine" and parts != ("lora", "adapter"):  # its norms have no bias
        assert users_at_once(task, local, layout) == 0
        return
    assert users_at_once(task, local, layout) > 1
    found = OnePassTrainer(task, layout, local, 0).updates(central, users, 2)
    plain = PlainTrainer(task, layout, local, 0, central)
    for row, user in enumerate(users):
        wanted, one, other = plain.update(central, int(user), 2), torch.zeros_like(central), torch.zeros_like(central)
        torch.testing.assert_close(found.norms[row], wanted.norms[0], rtol=1e-3, atol=1e-6)
        factors = torch.zeros(3, len(layout.names), dtype=torch.float64)
        factors[row] = 1
        found.weighted_sum(factors, one)
        wanted.weighted_sum(torch.ones(1, len(layout.names), dtype=torch.float64), other)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_run_of_parts_begins_where_frozen_layers_end(
    place: Path, tiny_speech_model: Callable[[str], Path], tmp_path: Path
) -> None:
    given = document(place, tiny_speech_model("whisper"), train=["head", "lora"], first=1, rank=2)
    given["local"]["rates"] = {"*.lora_?": 0.1}
    summary = folder.train(parse(given), tmp_path / "run", quiet=True)
    names = set(load_file(tmp_path / "run" / folder.MODEL))
    assert "blocks.01.fc1.lora_a" in names
    assert not any(name.startswith("blocks.00") or name.endswith("fc1.weight") for name in names)
    again = evaluate(tmp_path / "run", quiet=True)
    assert isinstance(again, SpeechEvaluation)
    assert 100 * again.scores.wer.value == pytest.approx(summary["metrics"]["wer"])


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        ({"train": ["lora"]}, "expected head among the parts"),
        ({"train": ["head", "all", "lora"]}, "drop lora and norms"),
        ({"train": ["head"], "first": 1}, "only used where more than the head is trained"),
        ({"train": ["head", "lora"], "first": 2}, "has 2 blocks, which count from 0"),
    ],
)
def test_parts_that_make_no_sense_are_refused(
    place: Path, tiny_speech_model: Callable[[str], Path], encoder: dict[str, Any], said: str
) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        speech(place, tiny_speech_model("whisper"), **encoder).initial_parameters()


def test_parts_can_begin_with_a_head_that_was_trained_on_kept_states(
    place: Path, tiny_speech_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_speech_model("whisper")
    folder.train(parse(document(place, source)), tmp_path / "head", quiet=True)
    given = document(place, source, train=["head", "lora"], first=1)["task"]
    task = Speech(SpeechSettings.model_validate({**given, "start": tmp_path / "head"}), 0, quiet=True)
    begun, head = task.starting_parameters(), load_file(tmp_path / "head" / folder.MODEL)
    assert all(torch.equal(begun[name], head[name]) for name in head)
    assert begun.keys() == task.initial_parameters().keys()
    assert task.begins_elsewhere


def test_without_edges_a_target_has_no_boundary_at_its_ends(
    place: Path, tiny_speech_model: Callable[[str], Path]
) -> None:
    source = tiny_speech_model("whisper")
    framed, bare = (speech(place, source, edges=edges).store for edges in (True, False))
    for user in range(len(framed.speakers)):
        for whole, inner in zip(framed.targets(user, [0, 1]), bare.targets(user, [0, 1]), strict=True):
            assert whole[0] == whole[-1] == BOUNDARY
            assert inner.tolist() == whole[1:-1].tolist()
            assert len(inner) > 0
