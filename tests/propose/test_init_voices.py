"""Where people say few words, `confide init` lets simulated people say them first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from confide import recipe
from confide.errors import UserError
from confide.propose.look import Columns, look
from confide.propose.proposal import propose
from confide.propose.voices import Sayings, read_words, share_said, spelled
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


def folder(root: Path, people: int, texts: tuple[str, ...]) -> Path:
    for person in range(people):
        for take, text in enumerate(texts):
            path = root / f"p{person}" / f"{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            tone = np.sin(np.arange(4_000) * (0.05 + 0.05 * take)).astype(np.float32)
            soundfile.write(path, 0.3 * tone, 16_000)
            path.with_suffix(".txt").write_text(text)
    return root


def test_words_stand_between_commas_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("Turn it on!\n\nturn it off\nTurn it on!\n")
    assert read_words(str(tmp_path / "words.txt")) == ("Turn it on!", "turn it off")
    assert read_words(" yes,no, ,yes") == ("yes", "no")
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_words(str(tmp_path / "words.txt"))


def test_words_are_written_as_the_model_writes_them() -> None:
    made, tokens = corpus({"p": ["turn it on"]}), Tokens("en")
    assert spelled(Sayings(("Turn it ON!", "turn it on"), 2), made, tokens) == Sayings(("turn it on",), 2)
    for words, said in (((), "there are 0"), (("yes", "??"), "'??' has no letters"), (tuple(map(str, range(101))), "")):
        with pytest.raises(UserError, match=rf"--words: .*{re.escape(said)}"):
            spelled(Sayings(words), made, tokens)
    with pytest.raises(UserError, match="the voices speak en, fr, de"):
        spelled(Sayings(("sí",)), corpus({"p": ["sí"]}, "es"), Tokens("es", "abcsí"))


def test_how_much_of_what_is_said_the_words_are() -> None:
    made = corpus({"p": ["yes", "Yes no", "maybe"], "q": ["no!"]})
    assert share_said(Sayings(("yes", "no")), made, Tokens("en")) == 0.75


def test_the_start_depends_on_no_recording(tmp_path: Path) -> None:
    """A list of words from people's texts would change with one of them, and no guarantee would cover it."""
    words = Sayings(("yes", "no"))
    made = [
        propose(look(folder(tmp_path / name, 140, texts), Columns(), "en"), "mine", None, words=words).start
        for name, texts in (("one", ("yes", "no")), ("other", ("moreau",)))
    ]
    assert made[0] == made[1]
    assert made[0] is not None
    assert "moreau" not in made[0]
    place = look(tmp_path / "other", Columns(), "en")
    assert propose(place, "mine", None).start is None
    assert "moreau" not in propose(place, "mine", None).text


def test_two_recipes_are_written_and_the_second_begins_with_the_first(tmp_path: Path, command: Command) -> None:
    place, out = folder(tmp_path / "people", 8, ("yes", "no")), tmp_path / "mine.yaml"
    code, printed, err = command("init", place, "--out", out, "--words", "yes,no")
    assert code == 0, err
    begin, then = (line.strip() for line in printed.splitlines() if line.startswith("  confide train"))
    assert begin == f"confide train {tmp_path / 'mine-start.yaml'} --out runs/mine-start"
    assert then == f"confide train {out} --out runs/mine"
    recipes: list[Any] = [recipe.load(str(path)) for path in (out, tmp_path / "mine-start.yaml")]
    wanted, first = recipes
    assert wanted.task.start == Path("runs/mine-start")
    assert first.task.corpus.words == ["yes", "no"]
    assert first.task.model == wanted.task.model
    code, _, err = command("init", place, "--out", tmp_path / "b.yaml")
    assert code == 0
    assert not (tmp_path / "b-start.yaml").exists()
    (tmp_path / "c-start.yaml").touch()
    code, _, err = command("init", place, "--out", tmp_path / "c.yaml", "--words", "yes")
    assert code == 2
    assert "c-start.yaml is there already" in err
    assert not (tmp_path / "c.yaml").exists()


def test_a_private_recipe_of_few_words_is_told_of_them(tmp_path: Path) -> None:
    place = look(folder(tmp_path / "people", 140, ("yes",)), Columns(), "en")
    made = propose(place, "mine", None)
    assert made.epsilon == 8
    assert any("people say 1 different things" in line and "--words" in line for line in made.said)
    assert not any("--words" in line for line in propose(place, "mine", None, words=Sayings(("yes",))).said)
    wrong = propose(place, "mine", None, words=Sayings(("no", "stop")))
    assert "--words: only 0% of the utterances consist of these 2 words" in wrong.warnings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--words", "?!"], "--words: '?!' has no letters"),
        (["--words", "yes", "--start", "people"], "--words: expected recordings, and no --start beside it"),
    ],
)
def test_words_that_cannot_be_are_refused(
    words: list[str], said: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("people"), 3, ("hello", "there"))
    code, _, err = command("init", "people", *words)
    assert code == 2
    assert said in err
    assert not list(Path().glob("*.yaml"))


def test_both_recipes_train_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_speech_model: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = look(folder(tmp_path / "people", 8, ("yes", "no")), Columns(), "en")
    made = propose(place, "mine", None, str(tiny_speech_model("whisper")), words=Sayings(("yes", "no")))
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
