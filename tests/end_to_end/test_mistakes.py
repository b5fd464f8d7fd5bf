"""What people get wrong: each mistake gets a text with what was given, what was expected and what to do.

One row for each. Its three texts have to be in the answer, in which no traceback is, and nothing may have been written.
Mistakes with machinery of their own are elsewhere: damaged runs and full disks in `test_bad_input.py`, hostile files in
`test_hostile_files.py`, encoders in `test_encoder_mistakes.py`, stops while starting in `tests/runs/test_starting.py`.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

from confide import errors, recipe
from confide.runs import folder, publish

Command = Callable[..., tuple[int, str, str]]
Contents = Callable[[Path], dict[str, str]]
pytestmark = pytest.mark.usefixtures("no_figures_here")


@dataclass(frozen=True)
class Mistake:
    words: tuple[str, ...]
    given: str
    expected: str
    to_do: str


def init(*words: str) -> tuple[str, ...]:
    return ("init", *words)


def train(*changes: str, out: str = "new") -> tuple[str, ...]:
    return ("train", "tiny.yaml", "--out", out, *(word for change in changes for word in ("--set", change)))


def speech(**corpus: str) -> str:
    inside = ", ".join(f"{key}: {value}" for key, value in corpus.items())
    return f"task={{kind: speech, corpus: {{{inside}}}, test: {{kind: folder, folder: people}}}}"


LAYOUT, BESIDE = "expected one of\n  - a folder for each speaker", "a .txt of the same name beside each"
USABLE = "expected at least one utterance with audio that decodes, some text"
AT_LEAST = "expected a number above 0"
BELOW_1 = "expected a number above 0 and below 1"
MISTAKES: dict[str, Mistake] = {
    # Where the data are, and what they hold.
    "a folder that is misspelt": Mistake(init("recodings"), "there is nothing at recodings", LAYOUT, BESIDE),
    "an empty folder": Mistake(init("empty"), "the folder empty is in no layout", LAYOUT, BESIDE),
    "recordings without texts": Mistake(
        init("mute"), "it holds 6 recordings such as a.wav, and no .txt beside any", LAYOUT, BESIDE
    ),
    "recordings in no speaker's folder": Mistake(
        init("flat"), "6 recordings such as a0.wav lie directly in it", LAYOUT, "make a folder in it for each speaker"
    ),
    "owners of no texts": Mistake(
        init("people", "--owners", "people"), "--owners people", "has no column that says whose a text is",
        "leave --owners out",
    ),
    "texts that are empty": Mistake(init("blank"), "6 empty text; first: p0/a", USABLE, "check the folder"),
    "recordings that are none": Mistake(init("noise"), "6 undecodable; first: p0/a", USABLE, "check the folder"),
    "recordings of no length": Mistake(init("short"), "6 no samples; first: p0/a", USABLE, "check the folder"),
    "a sample rate of 0": Mistake(init("rate"), "6 undecodable; first: p0/a", USABLE, "check the folder"),
    "samples that are not numbers": Mistake(
        ("corpus", "stats", "folder", "--folder", "nan", "--thorough"), "holds samples that are not numbers", USABLE,
        "check the folder",
    ),
    "texts in Latin-1": Mistake(init("latin"), "it is not UTF-8", USABLE, "check the folder"),
    "one speaker": Mistake(init("one"), "has 1 speaker", "expected two or more", "Check that the layout says who"),
    "an archive": Mistake(init("recordings.zip"), "the file recordings.zip is in no layout", LAYOUT, BESIDE),
    "a table of other columns": Mistake(
        init("cols.tsv"), "(its columns are name, value)", "columns for path, text and speaker", LAYOUT
    ),
    "a table that does not say who speaks": Mistake(
        init("nobody.tsv"), "has the columns path, text", "expected a column such as speaker", "--speaker-column"
    ),
    "a table of texts without labels": Mistake(
        init("unlabelled.csv"), "(its columns are text, owner)", "with columns for text, label", LAYOUT
    ),
    "a table in Latin-1": Mistake(init("latin.tsv"), "latin.tsv is not UTF-8", "expected", "text in UTF-8"),
    "a table of files that are not there": Mistake(
        init("lost.tsv"), "x.wav (missing: there is no such file)", USABLE, "check the folder"
    ),
    "a row that is too short": Mistake(
        init("ragged.csv"), "row 1 has fewer cells than the 3 columns", "expected one for each", "ragged.csv"
    ),
    "a table of a header": Mistake(init("header.csv"), "0 usable queries", "expected at least two", "header.csv"),
    "a column that is not there": Mistake(
        init("lost.tsv", "--speaker-column", "spk"), "'spk'", "expected one of path, text, speaker", "column"
    ),
    "no data at all": Mistake(init(), "DATA was not given", "no terminal to ask on", "`confide init --help`"),
    # What init is asked for.
    "epsilon 0": Mistake(init("people", "--epsilon", "0"), "--epsilon 0", AT_LEAST, "or inf for no privacy"),
    "epsilon that is no number": Mistake(
        init("people", "--epsilon", "eight"), "'eight'", "is not a valid float", "confide init --help"
    ),
    "more privacy than so few people can have": Mistake(
        init("people", "--epsilon", "8"), "5 people are too few", "About 110 would be enough", "Leave --epsilon out"
    ),
    "a recipe that is there": Mistake(
        init("people", "--out", "tiny.yaml"), "tiny.yaml is there already", "nothing is overwritten", "another --out"
    ),
    "a recipe in a folder that is not there": Mistake(
        init("people", "--out", "no/a.yaml"), "--out no/a.yaml", "there is no folder no", "make it"
    ),
    "a language without letters": Mistake(
        init("people", "--language", "xx"), "'xx'", "expected one of en, fr, de", "give its letters"
    ),
    "an encoder that is misspelt": Mistake(
        init("people", "--encoder", "whisper-tinny"), "no encoder 'whisper-tinny'", "expected a transformers folder",
        "whisper-tiny.en",
    ),
    "an encoder of texts for speech": Mistake(
        init("people", "--encoder", "minilm"), "minilm is one of text", "expected one of speech", "whisper-tiny.en"
    ),
    "a start that is not there": Mistake(
        init("people", "--start", "nowhere"), "--start nowhere", "expected the folder of a finished run",
        "model.safetensors",
    ),
    # Recipes.
    "no folder for the run": Mistake(("train", "tiny.yaml"), "'--out'", "Missing option", "confide train --help"),
    "a shipped recipe that is misspelt": Mistake(
        ("train", "convex/digit", "--out", "new"), "'convex/digit'", "did you mean 'convex/digits'?", "recipe list"
    ),
    "a recipe file that is misspelt": Mistake(
        ("train", "tinny.yaml", "--out", "new"), "'tinny.yaml'", "did you mean 'tiny.yaml'?", "recipe list"
    ),
    "a folder for a recipe": Mistake(
        ("train", "done", "--out", "new"), "'done' is a folder", "expected a YAML file", "`confide resume`"
    ),
    "a recipe that is no YAML": Mistake(
        ("train", "broken.yaml", "--out", "new"), "'broken.yaml'", "is not valid YAML", "line 2, column 1"
    ),
    "a recipe that is empty": Mistake(
        ("train", "nothing.yaml", "--out", "new"), "'nothing.yaml'", "must be a mapping of sections", "recipe show"
    ),
    "a key that is misspelt": Mistake(
        train("bounding.bund=1"), "bounding.bund", "there is no such key", "did you mean 'bound'?"
    ),
    "a key without its section": Mistake(
        train("steps=3"), "steps: there is no such section", "did you mean", "run.steps"
    ),
    "a change without =": Mistake(
        train("bounding"), "--set 'bounding'", "not of the form section.key=value", "such as run.steps=100"
    ),
    "a word for a number": Mistake(train("bounding.bound=big"), "bounding.bound='big'", AT_LEAST, "one problem"),
    "a value of no kind": Mistake(
        train("central.kind=adamm"), "central.kind=adamm", "expected one of sgd, adam", "did you mean 'adam'?"
    ),
    "a cohort above the population": Mistake(
        train("sampling.cohort=13"), "sampling.cohort=13", "larger than the population of 12", "lower it or raise"
    ),
    "epsilon below 0": Mistake(
        train("privacy={mechanism: gaussian, target_epsilon: -3, delta: 1.0e-5}"), "privacy.target_epsilon=-3",
        AT_LEAST, "one problem",
    ),
    "delta 1": Mistake(train("privacy.delta=1"), "privacy.delta=1", BELOW_1, "one problem"),
    "delta above one in the population": Mistake(
        train("privacy.delta=0.1"), "privacy.delta=0.1", "above 1 / population = 0.0833", "lower it, or ask for it"
    ),
    "epsilon and noise": Mistake(
        train("privacy.target_epsilon=3"), "(given: target_epsilon and noise_multiplier)", "exactly one of", "give"
    ),
    "noise without a bound": Mistake(
        train("bounding={rule: none}"), "bounding.rule=none", "protects nobody unless every update is bounded",
        "choose clip or normalise",
    ),
    "a rate that is not a number": Mistake(train("local.learning_rate=.nan"), "=nan", AT_LEAST, "one problem"),
    "no steps": Mistake(train("run.steps=0"), "run.steps=0", AT_LEAST, "one problem"),
    "a rule of one's own without consent": Mistake(
        train("bounding={rule: python, function: 'own_rules:broken', bound: 1}"), "own_rules:broken", "code",
        "--allow-code"
    ),
    "a rule of one's own that breaks": Mistake(
        (*train("bounding={rule: python, function: 'own_rules:broken', bound: 1}"), "--allow-code"), "own_rules:broken",
        "RuntimeError: not today (own_rules.py, line 2)", "mend that code",
    ),
    "a module of one's own that is not there": Mistake(
        (*train("bounding={rule: python, function: 'ruls:broken', bound: 1}"), "--allow-code"), "'ruls'", "No module",
        "run in the folder that has ruls.py",
    ),
    "recordings that are not there": Mistake(
        train(speech(kind="folder", folder="nowhere")), "folder=nowhere is no folder", "expected one whose subfolders",
        BESIDE,
    ),
    # The command line.
    "a command that is misspelt": Mistake(("trian",), "'trian'", "Did you mean 'train'?", "confide --help"),
    "an option that is misspelt": Mistake((*train(), "--workerz", "1"), "--workerz", "'--workers'", "train --help"),
    "no workers": Mistake((*train(), "--workers", "0"), "0 is not in the range", "x>=1", "confide train --help"),
    "a device that is misspelt": Mistake((*train(), "--device", "gpu"), "'gpu'", "'cuda'", "confide train --help"),
    # Folders.
    "a file for a folder": Mistake(train(out="file"), "file is a file", "--out folder", "choose another"),
    "somebody's folder": Mistake(
        train(out="thesis"), "thesis is not empty", "holds no run (chapter1.tex", "choose another"
    ),
    "the folder of another run": Mistake(
        train("run.seed=1", out="done"), "done already holds another run", "nothing was changed", "another --out"
    ),
    "a run that is not finished": Mistake(train(out="half"), "half holds this run, unfinished", "go on", "resume half"),
    "a folder that cannot be written": Mistake(
        train(out="/proc/nowhere/run"), "--out /proc/nowhere/run", "cannot be written", "choose another folder"
    ),
    "a recipe that was edited after the run": Mistake(
        ("resume", "edited"), "edited/recipe.yaml was changed after the run finished", "its model is that of the recipe"
        " before", "Put it back",
    ),
    "no run to go on with": Mistake(
        ("resume", "thesis"), "thesis holds no run", "there is no recipe.yaml", "start one with `confide train`"
    ),
    "a checkpoint of another version": Mistake(
        ("resume", "older"), "older/checkpoint.safetensors", "of another version",
        "go on with the version that wrote it"
    ),
    # What is done with runs.
    "an evaluation too early": Mistake(("evaluate", "half"), "half holds no model yet", "not finished", "resume half"),
    "a run that hears nothing": Mistake(
        ("transcribe", "done", "people/p0/a.wav"), "convex/quadratics", "which hears nothing", "whose task is speech"
    ),
    "a run that retrieves nothing": Mistake(
        ("retrieve", "done", "hello"), "convex/quadratics", "which retrieves nothing", "whose task is retrieval"
    ),
    "an export too early": Mistake(
        ("export", "half-digits", "--out", "m.onnx"), "half-digits holds no model yet", "not finished", "resume half-"
    ),
    "an export of an edited recipe": Mistake(
        ("export", "edited", "--out", "m.onnx"), "edited/recipe.yaml was changed", "its model is that", "Put it back"
    ),
    "an export over a file": Mistake(
        ("export", "digits", "--out", "file"), "file is there already", "not touched", "choose another --out"
    ),
    "a research run for publication": Mistake(
        ("publish", "done", "public"), "seeded noise", "nothing was written", "`confide release done --out NEW`"
    ),
    "documents of a model without any": Mistake(
        ("publish", "released", "public", "--documents", "names"), "--documents names", "is for retrieval", "drop it"
    ),
    "a published retriever without its documents": Mistake(
        ("retrieve", "shared", "my query"), "shared was published without its documents", "Expected --documents "
        "documents.jsonl", "--documents names",
    ),
    "a service of a published retriever without its documents": Mistake(
        ("serve", "shared"), "shared was published without its documents", "Expected --documents documents.jsonl",
        "--documents names",
    ),
    "a list of documents that is not there": Mistake(
        ("retrieve", "shared", "my query", "--documents", "docs.jsonl"), "--documents docs.jsonl",
        "there is no such file; expected documents.jsonl", "as `confide publish` writes it",
    ),
    "a list of documents that is something else": Mistake(
        ("retrieve", "shared", "my query", "--documents", "header.csv"), "header.csv, line 1", "expected a document as "
        "JSON", "get the file from its owner",
    ),
    "a list of documents of another model": Mistake(
        ("retrieve", "shared", "my query", "--documents", "three.jsonl"), "three.jsonl has 3 documents",
        "the model of shared scores 2; expected those that it was trained on", "in its order",
    ),
    "a publication into somebody's folder": Mistake(
        ("publish", "done", "thesis"), "thesis is not empty", "must hold nothing else", "choose a new folder"
    ),
    "a release of an edited recipe": Mistake(
        ("release", "edited", "--out", "new"), "edited/recipe.yaml was changed", "its model is that", "Put it back"
    ),
    "a service of a run that answers nobody": Mistake(
        ("serve", "done"), "convex/quadratics", "answers nobody", "give one of speech or retrieval"
    ),
    "a page on a port that is taken": Mistake(
        ("ui", "thesis", "--no-browser", "--port", "TAKEN"), "port TAKEN (", "expected an address of this machine and a"
        " free port", "choose another --port",
    ),
    "a page of runs that are nowhere": Mistake(
        ("ui", "nowhere", "--no-browser"), "there is no folder nowhere", "expected one with runs in it",
        "--out nowhere/first",
    ),
    "a port that is none": Mistake(
        ("ui", "thesis", "--no-browser", "--port", "99999"), "port 99999", "a free port from 0 to 65535",
        "another --port"
    ),
    "a comparison of one run": Mistake(("compare", "done"), "1 run", "two or more", "give"),
    "a comparison with nothing": Mistake(
        ("compare", "done", "nowhere"), "nowhere holds no run", "there is no recipe.yaml", "start one"
    ),
    # Planning and corpora.
    "a plan for a cohort above the population": Mistake(
        ("plan", "noise", "--target-epsilon", "1", "--cohort", "20", "--population", "10", "--rounds", "5", "--delta",
         "1e-5"), "cohort=20", "larger than the population of 10", "lower the cohort or raise the population",
    ),
    "a plan at delta 1": Mistake(
        ("plan", "epsilon", "--noise-multiplier", "1", "--cohort", "2", "--population", "10", "--rounds", "5",
        "--delta",
         "1"), "delta=1", "expected", "below 1",
    ),
    "a corpus of no kind": Mistake(
        ("corpus", "stats", "foldr"), "'foldr'", "expected one of librispeech", "did you mean 'folder'?"
    ),
    "an encoder that nobody has": Mistake(
        ("encoder", "get", "whisper-tinny"), "'whisper-tinny'", "expected one of minilm",
        "did you mean 'whisper-tiny.en'?"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, tiny: str, tiny_model: Callable[..., Path], no_figures_here: None
) -> Path:
    """A folder with everything that the mistakes are made with, and a port that is taken."""
    root = tmp_path_factory.mktemp("mistakes")
    spoken = {
        name: people(root / name) for name in ("people", "mute", "blank", "noise", "short", "rate", "nan", "latin")
    }
    people(root / "one", 1)
    (root / "flat").mkdir()
    for number, audio in enumerate(people(root / "some")):
        for path in (audio, audio.with_suffix(".txt")):
            path.rename(root / "flat" / f"a{number}{path.suffix}")
    for audio in spoken["mute"]:
        audio.with_suffix(".txt").unlink()
    for audio in spoken["blank"]:
        audio.with_suffix(".txt").write_text("")
    for audio in spoken["noise"]:
        audio.write_bytes(b"hello" * 30)
    for audio in spoken["short"]:
        soundfile.write(audio, np.zeros(0, dtype=np.float32), 16_000)
    for audio in spoken["rate"]:
        audio.write_bytes(audio.read_bytes()[:24] + struct.pack("<I", 0) + audio.read_bytes()[28:])
    for audio in spoken["nan"]:
        soundfile.write(audio, np.full(4_000, np.nan, dtype=np.float32), 16_000, subtype="FLOAT")
    for audio in spoken["latin"]:
        audio.with_suffix(".txt").write_bytes("café".encode("latin-1"))
    for name, text in {
        "cols.tsv": "name\tvalue\na\tb\n", "nobody.tsv": "path\ttext\na.wav\tyes\n",
        "unlabelled.csv": "text,owner\na,b\n", "lost.tsv": "path\ttext\tspeaker\nx.wav\tyes\ts1\ny.wav\tno\ts2\n",
        "ragged.csv": "text,label,owner\na,b\n", "header.csv": "text,label,owner\n", "file": "once",
        "own_rules.py": "def broken(norms, bound):\n    raise RuntimeError('not today')\n",
        "broken.yaml": "task: [\n", "nothing.yaml": "", "tiny.yaml": Path(tiny).read_text(),
    }.items():  # fmt: skip
        (root / name).write_text(text)
    (root / "latin.tsv").write_bytes("path\ttext\tspeaker\na.wav\tcafé\ts1\n".encode("latin-1"))
    (root / "recordings.zip").write_bytes(b"PK\x03\x04" + bytes(40))
    (root / "empty").mkdir()
    (root / "thesis").mkdir()
    (root / "thesis" / "chapter1.tex").write_text("Once")
    runs(root, tiny)
    shared(root, str(tiny_model("masked")))
    return root


def people(root: Path, count: int = 6) -> list[Path]:
    """Folders of people who say something."""
    made = []
    for person in range(count):
        made.append(root / f"p{person}" / "a.wav")
        made[-1].parent.mkdir(parents=True)
        soundfile.write(made[-1], np.zeros(4_800, dtype=np.float32), 16_000)
        made[-1].with_suffix(".txt").write_text("one two")
    return made


def runs(root: Path, tiny: str) -> None:
    """A finished run, and what became of copies of it."""
    folder.train(recipe.load(tiny), root / "done", quiet=True)
    digits = recipe.load("convex/digits", ["run.steps=20", "evaluation.every=20", "final={kind: last}"])
    folder.train(digits, root / "digits", quiet=True)
    released = recipe.load(tiny, ["privacy.source=system"])
    folder.train(released, root / "released", quiet=True)
    for name, source in (("half", "done"), ("edited", "done"), ("older", "done"), ("half-digits", "digits")):
        shutil.copytree(root / source, root / name)
    for name in ("half", "half-digits", "older"):
        for file in (folder.SUMMARY, folder.MODEL):
            (root / name / file).unlink()
    path = root / "edited" / folder.RECIPE
    path.write_text(path.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    path = root / "older" / "checkpoint.safetensors"
    content = path.read_bytes().replace(b'\\"ledger_head\\"', b'\\"ledger_tail\\"')
    held = content[content.index(b'"digest":"') + 10 :][:64]
    path.write_bytes(
        content.replace(
            held, hashlib.blake2b(content.replace(held, b"0" * 64, 1), digest_size=32).hexdigest().encode(), 1
        )
    )


def shared(root: Path, encoder: str) -> None:
    """A retriever over somebody's table, as it was published: without the table."""
    rows = [f"the {animal} sat near water,{animal}" for animal in ("cat", "dogs") for _ in range(12)]
    (root / "table.csv").write_text("\n".join(["query,document", *rows]) + "\n")
    data = f"data: {{kind: table, queries: '{root / 'table.csv'}'}}, clients: {{kind: even, clients: 4}}"
    task = f"task={{kind: retrieval, encoder: {{source: '{encoder}'}}, {data}, cache: '{root / 'states'}'}}"
    changes = [task, "sampling.cohort=2", "privacy.source=system", "users={unit: text}"]
    folder.train(recipe.load(str(root / "tiny.yaml"), changes), root / "searched", quiet=True)
    publish.publish(root / "searched", root / "shared")
    path = root / "shared" / folder.RECIPE  # as if its encoder were one that everybody can get
    path.write_text(path.read_text().replace("source: left-out", "source: minilm"))
    (root / "three.jsonl").write_text('{"id": "cat"}\n{"id": "dogs"}\n{"id": "birds"}\n')


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield str(held.getsockname()[1])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_what_was_given_what_was_expected_and_what_to_do(
    name: str, places: Path, taken: str, command: Command, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(places)
    monkeypatch.syspath_prepend(places)
    monkeypatch.delenv("CONFIDE_DEVICE", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what Python keeps of a rule is not what a run writes
    before = contents(places)
    code, out, err = command(*(word.replace("TAKEN", taken) for word in mistake.words))
    print(err)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for said in (mistake.given, mistake.expected, mistake.to_do):
        assert said.replace("TAKEN", taken) in err
    assert contents(places) == before
    assert not list(places.glob("new*"))


def test_forty_mistakes_are_listed() -> None:
    assert len({mistake.words for mistake in MISTAKES.values()}) == len(MISTAKES) >= 40


def test_an_extra_that_is_missing_is_named_before_anything_is_done(
    places: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    for words, extra in (
        (("export", "digits", "--out", "m.onnx"), "export"),
        (init("people", "--out", "m.yaml"), "speech"),
    ):
        code, _, err = command(*words)
        assert code == 2
        assert "not installed; run `pip install 'confide[" + extra + "]'`" in err
        assert not (places / words[-1]).exists()
