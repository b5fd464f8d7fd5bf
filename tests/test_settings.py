"""Sections of a recipe: paths of this machine are found by their types, and digests stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter

from confide import recipe
from confide.encoders.encoder import EncoderSettings
from confide.settings import Local, LocalPath, Section, is_path, local_paths, read_yaml, to_yaml, validate

DIGESTS = {
    "convex/cifar10": "fae30171cc8a849b",
    "convex/digits": "54de3e0dde695a41",
    "convex/fmnist": "8492695d4e165d25",
    "convex/quadratics": "4e1cf3911f54194c",
    "retrieval/agnews-federated": "d4d333cc884182f9",
    "retrieval/agnews-private": "038a55b5e13f91d4",
    "retrieval/arxiv": "10bc0536d403fb39",
    "retrieval/embedded": "6eb2a9900e1677f4",
    "retrieval/sms-adaptive-dp": "968e8d1e63b84043",
    "retrieval/sms-both": "cb97135fe47c7b4e",
    "retrieval/sms-federated": "d14935356d07aed4",
    "retrieval/sms-head": "b99c3b85aa62f201",
    "retrieval/sms-local-dp": "94433f7e34345907",
    "retrieval/sms-private": "c39d45ab87b8ce83",
    "retrieval/sms-private-quantile": "123e233aafa72c46",
    "speech/an4/central": "1d101a28b3d0fad1",
    "speech/an4/federated": "4596c52a4dc69be4",
    "speech/an4/head": "fbcf39c9a6aacc7e",
    "speech/an4/pretrained": "d70263d03db68e48",
    "speech/an4/private": "6b6c2bd2bd473dcb",
    "speech/an4/seed": "08747c679a699408",
    "speech/an4/voices": "b80e5943be012798",
    "speech/digits/federated": "293ea9496ea6e0ca",
    "speech/digits/pretrained": "6dc77f41a52aa842",
    "speech/digits/private": "445e4b8b62776ab1",
    "speech/digits/seed": "2b1724bcd736ffba",
    "speech/embedded/federated": "1e275d8bd00c2d7a",
    "speech/embedded/seed": "88b9aaf38b4b50bb",
    "speech/paper/dp-dim": "e12b41071dfb54f5",
    "speech/paper/dp-french-german": "882c403eaf91ffbc",
    "speech/paper/dp-global": "43092bab56900622",
    "speech/paper/dp-uniform": "9ea89f2bf7247ccf",
    "speech/paper/dp-weighted": "fa79b976e032ecb3",
    "speech/paper/fedprox": "efa06e772f2cc988",
    "speech/paper/fl-common-voice-cohorts": "189387f5508dc887",
    "speech/paper/fl-common-voice-scratch": "6870f9d6404bc68a",
    "speech/paper/fl-common-voice-seed": "261419e06e67aa0f",
    "speech/paper/fl-librispeech-scratch": "8860b77a83f41785",
    "speech/paper/fl-librispeech-seed": "f978938fd256b48f",
    "speech/paper/iid": "acff1de9560c2be2",
    "speech/paper/model-sizes": "881cb2d67bdb22ec",
    "speech/paper/post-layernorm": "3f865287cc458709",
    "speech/paper/seed-common-voice": "08a674096c7286be",
    "speech/paper/seed-librispeech": "d59e105f00a7fed6",
    "speech/paper/table8-adam": "18790a4a7acc6788",
    "speech/paper/table8-lars": "470485ac9b62bfdf",
    "speech/paper/table9-adagrad": "8e6ddaca48f1525c",
    "speech/paper/table9-adam": "4a3a6e59a61b6213",
    "speech/paper/table9-lars": "eb0e077b89940c53",
    "speech/paper/table9-sgd": "1ba55ebf6ae79e87",
    "speech/paper/weak-seed": "8462e5910cce4e2a",
    "speech/population/private": "3fb84349f47a59e5",
    "speech/population/seed": "0a483c8fb6ab1119",
    "speech/voices/private": "c82892a589eb0cf1",
    "speech/voices/seed": "b2bff7c5fe4ac6a0",
    "speech/words/seed": "aba9ec0783822f94",
    "speech/words/plain": "3028369c18eb0d4d",
    "speech/words/private": "809265cebf218d3c",
    "speech/words/private-adapter": "60f339a39c6f9536",
    "speech/words/private-block": "0474bdb364547b4f",
    "speech/words/private-lora": "885e3a6ec28e6374",
    "speech/words/private-whole": "c4f7aaaef6e44fe1",
    "speech/words/whole-seed": "df680d994348a6e4",
}


def test_the_digests_of_shipped_recipes_stay_so_that_old_runs_resume() -> None:
    assert {name: recipe.load(name).digest for name in recipe.shipped()} == DIGESTS


class Inner(Section):
    place: LocalPath | None = None
    word: str = "x"


class Outer(Section):
    file: LocalPath
    start: str = "random"
    name: Annotated[str, Local(is_path)] = "train.csv"
    inner: Inner = Inner()


def test_paths_are_found_by_type_and_not_by_name() -> None:
    assert local_paths(Outer(file=Path("a"))) == ["file"]
    whole = Outer(file=Path("a"), name="../b", inner=Inner(place=Path("c")))
    assert local_paths(whole) == ["file", "name", "inner.place"]


def models(kind: Any) -> set[type[BaseModel]]:
    """A model and every model in its fields."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {kind}.union(*(models(field.annotation) for field in kind.model_fields.values()))
    return set().union(*map(models, get_args(kind)))


def test_every_path_in_a_recipe_is_marked() -> None:
    found = {model.__name__: model for model in models(recipe.Recipe)}
    assert {"FsddSettings", "TableSettings", "SpeechSettings"} <= set(found)
    for model in found.values():
        for key, field in model.model_fields.items():
            plain = field.annotation is Path and not any(isinstance(mark, Local) for mark in field.metadata)
            assert not plain, f"{model.__name__}.{key}"
            assert Path not in get_args(field.annotation), f"{model.__name__}.{key}"


@pytest.mark.parametrize(
    ("source", "local"),
    [
        ("minilm", False),
        ("owner/name", False),
        (f"owner/{'n' * 5000}", False),
        ("https://host:8443", False),
        ("/models/llama", True),
        ("./llama", True),
        ("~/llama", True),
        ("models/llama.gguf", True),
        ("a/b/c", True),
        ("no-such-preset", True),
    ],
)
def test_an_encoder_is_local_unless_it_is_a_preset_a_name_on_the_hub_or_a_server(source: str, local: bool) -> None:
    assert local_paths(EncoderSettings(source=source)) == (["source"] if local else [])


def test_a_folder_that_is_called_like_a_name_on_the_hub_is_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_paths(EncoderSettings(source="owner/name")) == ["source"]


def test_a_sections_own_words_are_not_hidden_behind_the_limits_of_a_field() -> None:
    from confide.speech.corpora.tables import An4Settings

    value, problems = validate(TypeAdapter(An4Settings), {"share": 50}, "task.corpus")
    assert value is None
    assert problems == ["task.corpus.share=50: expected other than 50, whose complement would be itself; use 49 and 51"]
    _, problems = validate(TypeAdapter(An4Settings), {"share": 0, "seed": True, "sub": 1})
    assert problems == ["seed=True: expected a number at least 0 and below 9.22337e+18"]
    _, problems = validate(TypeAdapter(An4Settings), {"share": 0, "sub": 1})
    assert problems == [
        "share=0: expected a number at least 1 and at most 99",
        "sub: there is no such key; did you mean 'subset'?",
    ]


def test_yes_and_no_are_words_and_only_a_field_of_truth_takes_them_for_more() -> None:
    said = read_yaml("words: [yes, no, on, off, y, Yes]\nkept: true\nlost: False")
    assert said == {"words": ["yes", "no", "on", "off", "y", "Yes"], "kept": True, "lost": False}
    assert read_yaml(to_yaml(said)) == said
    words = recipe.load("speech/words/seed", ["task.corpus.words=[yes, no]", "task.test.words=[yes, no]"])
    assert recipe.parse(read_yaml(words.to_yaml())).digest == words.digest
    assert recipe.load("convex/digits", ["local.divide_by_learning_rate=yes"]).local.divide_by_learning_rate is True
