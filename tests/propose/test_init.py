"""`confide init` looks at recordings and texts of anybody's, and writes recipes that train as they are."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import typer

from confide import recipe
from confide.errors import UserError
from confide.propose.affordable import ENOUGH, afford, delta_for, people_needed
from confide.propose.look import Columns, look
from confide.propose.proposal import propose
from confide.runs.corpus_choice import check_corpus
from confide.runs.folder import train
from confide.settings import read_yaml
from confide.speech.corpora import read_corpus

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_figures")


def sound(path: Path, seconds: float = 0.3) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.zeros(int(seconds * 16_000), dtype=np.float32), 16_000)
    return path.name


def folder_of_speakers(root: Path, people: int = 6) -> Path:
    for person in range(people):
        for take in range(2):
            path = root / f"p{person}" / f"take{take}.wav"
            sound(path)
            path.with_suffix(".txt").write_text("one two")
    return root


def table(root: Path, name: str, header: str, people: range, between: str = "\t") -> Path:
    lines = [header]
    for person in people:
        sound(root / f"{person}.wav")
        lines.append(
            between.join([f"{person}.wav", "yes, please" if between == "\t" else '"yes, please"', f"s{person}"])
        )
    (root / name).write_text("\n".join(lines) + "\n")
    return root / name


def rows(path: Path, owners: int, each: int = 4, owner: bool = True) -> Path:
    """Texts whose label follows from a word."""
    lines = ["text,label,owner" if owner else "text,label"]
    for person in range(owners):
        for place in range(each):
            good = (person + place) % 2
            text = f"{'the cat sat on a mat' if good else 'dogs ran far away'} {person} {place}"
            lines.append(f"{text},{'cats' if good else 'dogs'}" + (f",o{person}" if owner else ""))
    path.write_text("\n".join(lines) + "\n")
    return path


def layouts(root: Path) -> dict[str, Path]:
    """A stranger's data, in every layout."""
    made = {"folder": folder_of_speakers(root / "folder")}
    (root / "csv").mkdir()
    made["csv"] = table(root / "csv", "mine.csv", "file,transcript,speaker_id", range(5), ",")
    (root / "tsv").mkdir()
    table(root / "tsv", "train.tsv", "path\ttext\tspeaker", range(6))
    table(root / "tsv", "test.tsv", "path\ttext\tspeaker", range(6, 8))
    made["tables"] = root / "tsv"
    for person in range(6):
        for word in ("yes", "no"):
            sound(root / "words" / word / f"{person:08x}_nohash_0.wav")
    made["words"] = root / "words"
    for person in range(5):
        chapter = root / "LibriSpeech" / "train-clean-5" / str(person) / "1"
        sound(chapter / f"{person}-1-0000.flac")
        (chapter / f"{person}-1.trans.txt").write_text(f"{person}-1-0000 HELLO THERE\n")
    made["librispeech"] = root / "LibriSpeech"
    for name in ("ann", "bob", "cy"):
        for take in range(4):
            sound(root / "digits" / f"{take}_{name}_{take}.wav")
    made["digits"] = root / "digits"
    lines = [
        {"audio_filepath": f"../tsv/{n}.wav", "text": "yes", "duration": 0.3, "speaker": f"s{n}"} for n in range(6)
    ]
    (root / "nemo").mkdir()
    (root / "nemo" / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made["nemo"] = root / "nemo" / "manifest.jsonl"
    return made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return layouts(tmp_path_factory.mktemp("strangers"))


@pytest.mark.parametrize(
    ("name", "kind", "train_people", "test_people"),
    [
        ("folder", "folder", 5, 1), ("csv", "tsv", 4, 1), ("tables", "tsv", 6, 2), ("words", "speech_commands", 5, 1),
        ("librispeech", "librispeech", 4, 1), ("digits", "fsdd", 2, 1), ("nemo", "manifest", 5, 1),
    ],
)  # fmt: skip
def test_a_recipe_is_written_for_every_layout_with_other_people_in_the_test(
    name: str, kind: str, train_people: int, test_people: int, strangers: dict[str, Path], tmp_path: Path,
    command: Command,
) -> None:  # fmt: skip
    out = tmp_path / "mine.yaml"
    code, printed, err = command("init", strangers[name], "--out", out)
    assert code == 0, err
    assert f"{train_people} people to train on, {test_people} other" in printed
    assert "too few" in err
    wanted: Any = recipe.load(str(out))
    assert wanted.task.corpus.kind == wanted.task.test.kind == kind
    people, tested = (set(read_corpus(part).speakers) for part in (wanted.task.corpus, wanted.task.test))
    assert len(people) == train_people
    assert len(tested) == test_people
    assert not people & tested
    assert wanted.privacy.mechanism == "none"
    assert f"confide train {out} --out runs/mine" in printed
    held = out.read_text()
    code, _, err = command("init", strangers[name], "--out", out)
    assert code == 2
    assert "nothing is overwritten" in err
    assert out.read_text() == held


def test_speakers_in_both_tables_are_held_out_by_a_share(tmp_path: Path) -> None:
    table(tmp_path, "train.tsv", "path\ttext\tspeaker", range(6))
    table(tmp_path, "test.tsv", "path\ttext\tspeaker", range(3))
    made = propose(look(tmp_path, Columns(), "en"), "mine", None, None, None)
    wanted: Any = recipe.parse(read_yaml(made.text))
    assert "3 speakers are in the data for training and in those for test" in made.text.replace("\n# ", " ")
    assert (wanted.task.corpus.file, wanted.task.corpus.share) == (tmp_path / "train.tsv", 80)
    assert (wanted.task.test.file, wanted.task.test.share) == (tmp_path / "train.tsv", 20)


def test_noise_delta_and_cohort_follow_from_the_people(tmp_path: Path) -> None:
    made = propose(look(rows(tmp_path / "rows.csv", 900, owner=False), Columns(), "en"), "rows", 2.0, None, None)
    wanted: Any = recipe.parse(read_yaml(made.text))
    people = wanted.task.clients.clients
    assert people == 2880  # four fifths of the 3,600 rows, each a user of its own
    assert wanted.privacy.target_epsilon == 2
    assert wanted.privacy.delta < 1 / people
    assert wanted.privacy.delta == delta_for(people) == 1e-4
    plan = afford(people, 2 * 385, 2.0, everyone=True)
    assert f"Noise multiplier {plan.noise_multiplier:.4g}" in made.text
    assert plan.command in made.text
    assert made.people == people


def test_owners_are_the_users_and_those_in_the_test_do_not_train(tmp_path: Path, command: Command) -> None:
    found = look(rows(tmp_path / "rows.csv", 40), Columns(), "en")
    made = propose(found, "rows", None, None, None)
    wanted: Any = recipe.parse(read_yaml(made.text))
    corpus = wanted.task.data.read(0)
    assert set(corpus.train.groups).isdisjoint(corpus.test.groups)
    assert len(set(corpus.test.groups)) == 8
    assert made.people == len(set(corpus.train.groups)) == 32


@pytest.mark.parametrize("people", [3, 60, 1560, 250_000])
def test_delta_is_a_power_of_ten_below_one_in_the_population(people: int) -> None:
    delta = delta_for(people)
    assert delta <= people**-1.1
    assert 10 * delta > people**-1.1
    assert math.log10(delta) == pytest.approx(round(math.log10(delta)))


def test_too_few_people_are_told_how_many_would_be_enough_and_they_would(tmp_path: Path, command: Command) -> None:
    needed = people_needed(40, 11_550, 8.0)
    assert needed is not None
    assert afford(needed, 11_550, 8.0).strength >= ENOUGH > afford(needed // 2, 11_550, 8.0).strength
    folder = folder_of_speakers(tmp_path / "people", 4)
    code, _, err = command("init", folder, "--out", tmp_path / "a.yaml", "--epsilon", "8")
    assert code == 2
    assert "--epsilon 8: 3 people are too few to train 11,550 numbers" in err
    assert f"About {people_needed(3, 11_550, 8.0)} would be enough" in err
    assert "confide plan noise" in err
    assert not (tmp_path / "a.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is nothing at nowhere; expected one of"),
        (["empty"], "is in no layout that is known (it is empty); expected one of"),
        (["people", "--epsilon", "0"], "--epsilon 0: expected a number above 0"),
        (["people", "--out", "no/such/mine.yaml"], "there is no folder no/such"),
        (["nobody.tsv"], "none says who speaks; expected a column such as speaker"),
        (["rows.csv", "--text-column", "txt"], "there is no column 'txt'; expected one of text, label, owner"),
        (["one"], "1 speaker; expected two or more"),
        (["flat"], "2 recordings such as take0.wav lie directly in it"),
        (["people", "--owners", "people"], "has no column that says whose a text is"),
        ([], "DATA was not given, and there is no terminal to ask on"),
        (["people", "--language", "xx"], "language"),
    ],
)
def test_mistakes_say_what_was_given_and_what_was_expected(
    words: list[str], said: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_speakers(Path("people"), 3)
    folder_of_speakers(Path("one"), 1)
    Path("empty").mkdir()
    folder_of_speakers(Path("flat"), 1)
    for path in sorted(Path("flat", "p0").iterdir()):
        path.rename(Path("flat", path.name))
    Path("nobody.tsv").write_text("path\ttext\na.wav\tyes\n")
    rows(Path("rows.csv"), 3)
    code, _, err = command("init", *words)
    assert code == 2
    assert said in err
    assert not list(Path().glob("*.yaml"))


def on_a_terminal(folder: Path, *answers: str) -> tuple[int, str]:
    """`confide init` on a terminal of its own, where somebody types: exit code, and everything that was shown."""
    main, end = pty.openpty()
    script = "import sys; from confide.cli import main; sys.argv = ['confide', 'init']; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, stdin=end, stdout=end, stderr=end, close_fds=True
    )
    os.close(end)
    os.write(main, "".join(f"{answer}\n" for answer in answers).encode())
    shown = b""
    with contextlib.suppress(OSError):  # the terminal ends with the process
        while piece := os.read(main, 65_536):
            shown += piece
    os.close(main)
    return process.wait(), " ".join(shown.decode().split())


def test_whoever_presses_enter_at_the_epsilon_gets_what_the_people_can_have(tmp_path: Path) -> None:
    folder_of_speakers(tmp_path / "people", 3)
    code, shown = on_a_terminal(tmp_path, "people", "")
    assert code == 0, shown
    assert "8 is moderate, 1 is strong" in shown
    assert "2 people are too few to train 11,550 numbers at epsilon 8" in shown
    assert "wrote people.yaml" in shown
    assert "2 people to train on, 1 other to test on" in shown
    assert "1 other person to test on" in " ".join((tmp_path / "people.yaml").read_text().replace("\n#", "").split())


def test_a_terminal_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    folder_of_speakers(tmp_path / "people", 3)
    rows(tmp_path / "rows.csv", 40)
    for answers, said, kept in (
        (["people", "inf"], "no privacy was asked for", "mechanism"),
        (["people", "8"], "--epsilon 8: 2 people are too few", None),  # who types it asks for it
        (["rows.csv", "inf", "y"], "no privacy was asked for", "person: true"),
    ):
        given = iter(answers)
        monkeypatch.setattr(typer, "prompt", lambda *_, given=given, **__: next(given))
        code, _, err = command("init")
        assert said in err
        recipes = list(tmp_path.glob("*.yaml"))
        assert code == (0 if kept else 2)
        assert bool(recipes) == bool(kept)
        if kept and kept != "mechanism":
            assert kept in recipes[0].read_text()
        for each in recipes:
            each.unlink()


@pytest.mark.parametrize(
    ("owners", "person"), [(["--owners", "people"], True), (["--owners", "others"], False), ([], False)]
)
def test_the_guarantee_is_for_people_where_somebody_says_that_owners_are(
    owners: list[str], person: bool, tmp_path: Path, command: Command
) -> None:
    table = rows(tmp_path / "rows.csv", 1200, each=1)
    code, _, err = command("init", table, "--out", tmp_path / "mine.yaml", *owners)
    assert code == 0, err
    assert ("nobody said whether each owner is one person" in err) == (not owners)
    wanted = recipe.load(str(tmp_path / "mine.yaml"))
    assert wanted.privacy.mechanism == "gaussian"
    assert bool(wanted.users.person) == person


def test_a_written_recipe_of_texts_trains_and_ends_better_than_it_began(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    found = look(rows(tmp_path / "rows.csv", 1500, each=1, owner=False), Columns(), "en")
    made = propose(found, "rows", 8.0, str(tiny_model("masked")), None)
    document = read_yaml(made.text)
    document["task"]["cache"] = str(tmp_path / "cache")
    summary = train(recipe.parse(document), tmp_path / "run", quiet=True)
    assert summary["epsilon"] <= 8
    assert summary["start"]["gain"] > 0.2
    assert summary["start"]["p"] < 0.01


# Manifests


def test_lhotse_writes_what_the_reader_reads(tmp_path: Path) -> None:
    from lhotse import CutSet, MonoCut, Recording, RecordingSet, SupervisionSegment, SupervisionSet

    recordings, said = [], []
    for number in range(3):
        sound(tmp_path / f"{number}.wav", 0.5)
        recordings.append(Recording.from_file(tmp_path / f"{number}.wav", recording_id=f"r{number}"))
        said.append(
            SupervisionSegment(f"u{number}", f"r{number}", 0.0, 0.5, text="bon  jour", speaker=f"s{number % 2}")
        )
    cuts = [
        MonoCut(f"c{n}", 0.0, 0.5, 0, supervisions=[s], recording=r)
        for n, (r, s) in enumerate(zip(recordings, said, strict=True))
    ]
    cuts.append(MonoCut("part", 0.1, 0.2, 0, supervisions=[said[0]], recording=recordings[0]))
    CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl.gz")
    RecordingSet.from_recordings(recordings).to_file(tmp_path / "recordings.jsonl.gz")
    SupervisionSet.from_segments(said).to_file(tmp_path / "supervisions.jsonl.gz")
    read = [
        read_corpus(check_corpus("manifest", {"file": str(tmp_path / name), **more}))
        for name, more in (
            ("cuts.jsonl.gz", {}),
            ("supervisions.jsonl.gz", {"recordings": str(tmp_path / "recordings.jsonl.gz")}),
        )
    ]
    for corpus in read:
        assert {name: len(own) for name, own in corpus.speakers.items()} == {"s0": 2, "s1": 1}
        assert {u.text for u in corpus.utterances()} == {"bon jour"}
        assert {u.seconds for u in corpus.utterances()} == {0.5}
    assert [item.kind for item in read[0].skipped] == ["part of a recording"]
    assert not read[1].skipped
    found = look(tmp_path / "supervisions.jsonl.gz", Columns(), "en")
    assert found.train["recordings"] == str(tmp_path / "recordings.jsonl.gz")


def test_lines_that_cannot_be_used_are_counted_and_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    lines: list[dict[str, Any]] = [
        {"audio_filepath": "a.wav", "text": "yes", "speaker": "s"},
        {"audio_filepath": "a.wav", "text": "yes"},
        {"audio_filepath": "a.wav", "text": "yes", "speaker": "s", "offset": 1.5},
        {"audio_filepath": "lost.wav", "text": "yes", "speaker": "s"},
    ]
    file = tmp_path / "m.json"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = read_corpus(check_corpus("manifest", {"file": str(file)}))
    assert sorted(item.kind for item in corpus.skipped) == ["missing", "no speaker", "part of a recording"]
    for content, said in (
        (b"[1]\n", "is damaged"),
        (b'{"id": 1}\n', "has the keys id"),
        (b"\x1f\x8b\x00", "is damaged"),
    ):
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_corpus(check_corpus("manifest", {"file": str(tmp_path / "bad.jsonl")}))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(file.read_bytes())[:-12])
    with pytest.raises(UserError, match="is damaged"):
        read_corpus(check_corpus("manifest", {"file": str(tmp_path / "cut.jsonl.gz")}))


def test_speakers_who_are_trained_on_and_tested_are_shown_before_features_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confide.speech import task

    corpus = {"kind": "folder", "folder": str(folder_of_speakers(tmp_path / "people", 3))}
    document: dict[str, Any] = {
        "task": {"kind": "speech", "corpus": corpus, "test": corpus},
        "sampling": {"kind": "fixed", "cohort": 1}, "local": {"steps": 1, "learning_rate": 0.1}, "run": {"steps": 1},
        "central": {"kind": "sgd", "learning_rate": 1}, "bounding": {"rule": "none"},
    }  # fmt: skip

    def features(*_: object, **__: object) -> None:
        raise AssertionError("features were made")

    monkeypatch.setattr(task, "open_store", features)
    assert "3 of the 3 test speakers are trained on too (p0, p1, p2)" in capture_of(monkeypatch, document)
    document["task"]["pool"] = 1  # one user, as every client of a deployment has it
    assert capture_of(monkeypatch, document) == ""
    document["task"]["test"] = {**corpus, "share": 40}
    assert "1 of the 1 test speakers are trained on too" in capture_of(monkeypatch, document)


def capture_of(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> str:
    import io
    import sys

    from confide.build import make_task

    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with pytest.raises(AssertionError, match="features were made"):
        _ = make_task(recipe.parse(document).task, 0).examples
    return told.getvalue()
