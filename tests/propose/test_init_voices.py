"""Where people say few words, `confide init` lets simulated people say them first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide import recipe
from confide.propose.look import Columns, look
from confide.propose.proposal import propose
from confide.propose.voices import Sayings, sayings
from confide.runs.folder import train
from confide.settings import read_yaml
from confide.speech.corpus import Corpus, Utterance
from confide.speech.tokens import Tokens

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures")


def corpus(texts: dict[str, list[str]], language: str = "en") -> Corpus:
    speakers = {
        person: [Utterance(f"{person}-{n}", person, (), 1.0, text) for n, text in enumerate(own)]
        for person, own in texts.items()
    }
    return Corpus("made", language, speakers, [])


def found(texts: dict[str, list[str]]) -> Sayings | str:
    return sayings(corpus(texts), Tokens("en"))


def folder(root: Path, people: int, texts: tuple[str, ...]) -> Path:
    for person in range(people):
        for take, text in enumerate(texts):
            path = root / f"p{person}" / f"{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            tone = np.sin(np.arange(4_000) * (0.05 + 0.05 * take)).astype(np.float32)
            soundfile.write(path, 0.3 * tone, 16_000)
            path.with_suffix(".txt").write_text(text)
    return root


def test_whole_utterances_are_the_words_where_there_are_few_of_them() -> None:
    assert found({f"p{n}": ["Turn it on!", "turn it off"] for n in range(5)}) == Sayings(
        ("turn it off", "turn it on"), (1, 1)
    )


def test_words_are_said_in_a_row_where_utterances_are_many_and_words_few() -> None:
    draw, digits = np.random.default_rng(0), ("one", "two", "three", "four")
    texts = {f"p{n}": [" ".join(draw.choice(digits, size)) for size in (2, 3, 4)] for n in range(50)}
    assert found(texts) == Sayings(tuple(sorted(digits)), (2, 4))


def test_what_few_people_say_is_not_on_the_list() -> None:
    texts = {f"p{n}": ["yes", "no"] * 3 for n in range(8)}
    for person in list(texts)[:4]:  # one fewer than it takes
        texts[person].append("moreau")
    said = found({**texts, "p8": ["yes"] * 40})
    assert isinstance(said, Sayings)
    assert said.words == ("no", "yes")
    texts["p5"].append("moreau")
    assert found({**texts, "p8": ["yes"] * 40}) == Sayings(("moreau", "no", "yes"), (1, 1))


def test_free_speech_and_other_languages_have_no_list() -> None:
    draw = np.random.default_rng(0)
    free = {
        f"p{n}": [" ".join("abcdefghij"[d] * 3 for d in draw.integers(0, 10, 4)) for _ in range(3)] for n in range(9)
    }
    names = {person: [f"{text} n{'x' * n}" for text in own] for n, (person, own) in enumerate(free.items())}
    assert "at most 100 words or phrases, each said by 5 people or more" in str(found(names))
    assert "the voices speak en, fr, de" in str(sayings(corpus({"p": ["sí"]}, "es"), Tokens("es", "abcs")))


def test_two_recipes_are_written_and_the_second_begins_with_the_first(tmp_path: Path, command: Command) -> None:
    place, out = folder(tmp_path / "people", 8, ("yes", "no")), tmp_path / "mine.yaml"
    code, printed, err = command("init", place, "--out", out, "--voices")
    assert code == 0, err
    begin, then = (line.strip() for line in printed.splitlines() if line.startswith("  confide train"))
    assert begin == f"confide train {tmp_path / 'mine-start.yaml'} --out runs/mine-start"
    assert then == f"confide train {out} --out runs/mine"
    recipes: list[Any] = [recipe.load(str(path)) for path in (out, tmp_path / "mine-start.yaml")]
    wanted, first = recipes
    assert wanted.task.start == Path("runs/mine-start")
    assert first.task.corpus.words == ["no", "yes"]
    assert first.task.model == wanted.task.model
    assert "2 words first (no, yes): the list was read from the texts without noise" in err
    code, _, err = command("init", place, "--out", tmp_path / "b.yaml")
    assert code == 0
    assert not (tmp_path / "b-start.yaml").exists(), "nobody asked, and the model is not private"
    (tmp_path / "c-start.yaml").touch()
    code, _, err = command("init", place, "--out", tmp_path / "c.yaml", "--voices")
    assert code == 2
    assert "c-start.yaml is there already" in err
    assert not (tmp_path / "c.yaml").exists()


def test_a_private_recipe_of_few_words_has_a_start_unless_it_was_refused(tmp_path: Path) -> None:
    place = look(folder(tmp_path / "people", 140, ("yes",)), Columns(), "en")
    made = propose(place, "mine", None)
    assert made.epsilon == 8
    assert made.start is not None
    assert propose(place, "mine", None, voices=False).start is None
    assert propose(place, "mine", None, start=tmp_path).start is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["people"], "--voices: there is no list of words for them"),
        (["people", "--start", "people"], "--voices: expected recordings, and no --start beside it"),
    ],
)
def test_who_asks_for_voices_that_cannot_be_is_told_why(
    words: list[str], said: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("people"), 3, ("hello", "there"))
    code, _, err = command("init", *words, "--voices")
    assert code == 2
    assert said in err
    assert not list(Path().glob("*.yaml"))


def test_both_recipes_train_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_speech_model: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = look(folder(tmp_path / "people", 8, ("yes", "no")), Columns(), "en")
    made = propose(place, "mine", None, str(tiny_speech_model("whisper")), voices=True)
    assert made.start is not None
    first: dict[str, Any] = read_yaml(made.start)
    for part in ("corpus", "test"):
        first["task"][part] |= {"voices": 4, "people": 6, "cache": str(tmp_path / "voices")}
    small: dict[str, Any] = {"evaluation": {"every": 2}, "run": {"steps": 2, "checkpoint_every": 2}}
    train(
        recipe.parse({**first, **small, "sampling": {"kind": "fixed", "cohort": 6}}),
        Path("runs/mine-start"),
        quiet=True,
    )
    second = {**read_yaml(made.text), **small, "final": {"kind": "last"}}
    summary = train(recipe.parse(second), tmp_path / "run", quiet=True)
    assert summary["begins_elsewhere"]
    assert "gain" in summary["start"]
