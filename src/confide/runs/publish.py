"""What may leave the folder of a run: a new folder with only what the guarantee covers.

| file              | what it is                                                                                   |
|-------------------|----------------------------------------------------------------------------------------------|
| model.safetensors | the final model; its header has the notes of `runs/notes.py`: architecture, tokens, epsilon  |
| guarantee.txt     | the statement, and guarantee.json the same for programs                                      |
| ledger.jsonl      | the releases, which epsilon can be recomputed from: a copy, in a chain of its own            |
| released.jsonl    | the figures with noise (`privacy.metrics`), where the recipe asks for them                   |
| recipe.yaml       | the recipe without what names files, folders and services of its owner                       |
| README.md         | a model card in the form of the hub                                                          |
| documents.jsonl   | of a retrieval model, where its owner asks for it: the documents' names, or their texts too  |

Everything is written anew from a list of what may go, and nothing is copied: what a later version adds to a run's
folder stays there until somebody adds it here. The ledger's first line has keyed digests of the users' data. Without
them its chain of hashes would break, so the copy is chained anew. Its first line says so, and names the last hash of
the run's own ledger, with which the owner can show that the copy is one; where the digests have no key, that hash is
left out as well.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confide.errors import UserError
from confide.federated.final import FinalModel
from confide.federated.start import ENCODER, held_encoder
from confide.files import SECRET, read_json_lines, read_secret, seal
from confide.privacy import ledger, wording
from confide.privacy.guarantee import Statement, statement
from confide.privacy.ledger import Ledger
from confide.recipe import Recipe
from confide.retrieval import listing
from confide.retrieval.data import Document, digest_documents
from confide.retrieval.listing import Listed
from confide.retrieval.settings import RetrievalSettings
from confide.runs import card, checkpoint, folder
from confide.runs.card import Words
from confide.runs.notes import notes_of, serialise
from confide.runs.parameters import read_tensors
from confide.runs.recording import LAYERS, RELEASED
from confide.runs.shared_recipe import for_others
from confide.runs.stated import PUBLISHED, differences, stated, summary_if_finished

CARD, TEXT = "README.md", "guarantee.txt"
_KEPT = (
    "population", "fresh_cohorts", "delta", "accountant", "adjacency", "noise_source", "for_release", "trust", "unit",
    "sampler", "words", "public_weights", "begins_elsewhere", "restarts",
    "deployed", "threshold",
)  # fmt: skip
"""What of the ledger's first line goes into the copy."""
_LEFT_OUT = "left out"
_LEAST = 6  # letters of a text that is looked for: a shorter one may stand there by chance


@dataclass(frozen=True)
class Finished:
    """A run that may be published."""

    folder: Path
    recipe: Recipe
    summary: dict[str, Any]
    book: Ledger
    promised: Statement


def publish(
    run: Path, out: Path, words: Words | None = None, with_test_metrics: bool = False, documents: Listed | None = None
) -> dict[str, Any]:
    """Write what the guarantee of a run covers into a new folder, and nothing else.

    Args:
        run: the folder of a finished run with noise of the operating system.
        out: the folder to write; it must be new or empty.
        words: what only the owner can say of data and use, for the card.
        with_test_metrics: whether to publish the final model's metrics on the test data, which have no noise.
        documents: of a retrieval model, whether to publish its documents' names, or their texts too; None: neither.

    Returns:
        What was written: folder, files, and the guarantee.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.folder import train
        >>> from confide.runs.publish import publish
        >>> recipe = load("convex/digits", ["run.steps=5", "privacy.source=system"])
        >>> _ = train(recipe, Path("runs/to-publish"), quiet=True)
        >>> publish(Path("runs/to-publish"), Path("published"))["files"]
        ['README.md', 'guarantee.json', 'guarantee.txt', 'ledger.jsonl', 'model.safetensors', 'recipe.yaml']
    """
    _check_out(run, out)
    found = finished(run)
    recipe = for_others(found.recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        new = Path(beside) / "new"
        new.mkdir()
        book = _copy_ledger(found, recipe, new / ledger.FILE)
        promised = _same_promise(found, statement(book))
        figures = _released(found)
        tests = _test_metrics(found) if with_test_metrics else {}
        tensors = _model(found)
        encoder = held_encoder(run / folder.MODEL)
        listed = None if documents is None else _documents(found, documents)
        texts = {
            folder.RECIPE: recipe.to_yaml(),
            PUBLISHED: promised.model_dump_json(indent=2) + "\n",
            TEXT: wording.text(promised) + "\n",
            CARD: card.write(
                recipe, tensors, promised, words or Words(), figures, _spread(book), tests, encoder, documents
            ),
            **({} if listed is None else {listing.FILE: listing.listing(listed, documents or "names")}),
            **({RELEASED: "".join(json.dumps(line) + "\n" for line in figures)} if figures else {}),
        }
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        (new / folder.MODEL).write_bytes(serialise(tensors, notes_of(recipe, promised, encoder)))
        _check_nothing_leaks(found, new)
        _sync(new)
        new.replace(out)
    about = promised.model_dump(include={"epsilon", "delta", "accountant", "adjacency", "releases"})
    about |= {"unit": promised.unit.name} | ({} if encoder is None else {ENCODER: encoder})
    about |= {} if listed is None else {"documents": [one.id for one in listed]}
    return {"folder": str(out), "files": sorted(path.name for path in out.iterdir()), **about}


def finished(run: Path) -> Finished:
    """The run, if it is finished, its ledger is whole, and it has a guarantee with noise for a release."""
    recipe, summary = folder.held_recipe(run), summary_if_finished(run)
    if summary is None:
        raise UserError(f"{run} is not finished; nothing was written. Go on with `confide resume {run}`")
    found, book = stated(run), Ledger.read(run / ledger.FILE)
    ended = found.steps == recipe.run.steps or "stopped_by_budget" in summary
    whole = ended and found.steps == summary["steps"] and found.recipe == recipe.digest
    if not whole or differences(run, found):
        raise UserError(
            f"{run}: recipe.yaml, ledger.jsonl and summary.json are not of one finished run; nothing was written. Put "
            "back the run's own files"
        )
    if found.epsilon is None:
        raise UserError(
            f"{run} gives no privacy guarantee, so there is nothing in it that one covers; nothing was written. Train "
            "with privacy.mechanism: gaussian"
        )
    if not found.noise.for_release:
        raise UserError(
            f"{run} was made with seeded noise, which whoever knows the seed can subtract; nothing was written. "
            f"`confide release {run} --out NEW` trains the same recipe with noise that may leave; then publish NEW"
        )
    return Finished(run, recipe, summary, book, found)


def _check_out(run: Path, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose a new folder")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and what is published must hold nothing else; choose a new folder")
    if out.resolve().is_relative_to(run.resolve()):
        raise UserError(f"{out} is inside of {run}, the folder that must not leave; choose one outside of it")


def _copy_ledger(found: Finished, recipe: Recipe, path: Path) -> Ledger:
    """Write the releases in a chain of their own, without what tells of data or machine.

    A step that was made again is in epsilon, however often. Which step it was follows from stops, and in a deployment
    from who answered: where all releases are alike, every further one stands at the end, as if the last step were made
    again. (Correlated noise is charged by whose turn it was, and adaptive bounds differ from step to step: these are
    copied as they are. Both need central trust, where no step is made again because of who answered.)
    """
    own = found.book.header
    keyed = own.get("inputs_keyed") or not own.get("inputs")
    copy: dict[str, Any] = {"copy": True, "left_out": sorted({*own} - {*_KEPT, "recipe"})}
    if keyed:  # a hash over digests without a key would let a guess of the data be tested
        copy["last_hash_of_the_original"] = found.book.head
    header = {key: own[key] for key in _KEPT if key in own}
    book = Ledger.create(path, {**header, "recipe": recipe.digest, "published": copy})
    tries, entries = Counter[int](), found.book.entries
    for entry in entries:
        if entry.attempt != tries[entry.step]:
            raise UserError(f"{found.folder / ledger.FILE}: the attempts at step {entry.step} are not in order")
        tries[entry.step] += 1
    steps = [entry.step for entry in entries]
    if len({entry.event for entry in entries}) == 1 and not entries[0].event.whole_run:
        steps = sorted(tries) + [max(tries)] * (len(entries) - len(tries))
    for step, entry in zip(steps, entries, strict=True):
        book.record(step, entry.event, _LEFT_OUT, repeatable=False)
    return book


def _same_promise(found: Finished, copied: Statement) -> Statement:
    """The statement of the ledger's copy, which has to promise what the run's own does."""
    names = {"recipe", "ledger_head"}
    if copied.model_dump(exclude=names) != found.promised.model_dump(exclude=names):
        raise UserError(
            f"{found.folder / ledger.FILE}: its first line says something that the promise depends on and that this "
            "version does not publish; nothing was written. Publish with the version that made the run"
        )
    return copied


def _model(found: Finished) -> dict[str, Tensor]:
    """The tensors, which have to be those that the last checkpoint gives: another model has no ledger."""
    tensors, names = read_tensors(found.folder), read_json_lines(found.folder / LAYERS)[:1]
    if not names or not (found.folder / checkpoint.FILE).exists():
        return tensors
    state, run = checkpoint.load(found.folder).state, found.recipe.run
    wanted = FinalModel(found.recipe.final, run.steps, run.seed).model(state)
    order = names[0]["names"]
    same = sorted(order) == sorted(tensors) and torch.equal(torch.cat([tensors[n].flatten() for n in order]), wanted)
    if not same:
        raise UserError(
            f"{found.folder / folder.MODEL} is not the model that the run's checkpoint gives, so its ledger does not "
            "stand for it; nothing was written. Put back the run's own model"
        )
    return tensors


def _released(found: Finished) -> list[dict[str, float]]:
    """The figures of every step, read one by one; nothing else that stands in the file."""
    asked = found.recipe.privacy.metrics
    if asked is None:
        return []
    names, lines = ["step", *asked.bounds], read_json_lines(found.folder / RELEASED)
    whole = [line.get("step") for line in lines] == list(range(1, found.promised.steps + 1))
    if not whole or not all(_is_finite(line.get(name)) for line in lines for name in names):
        raise UserError(
            f"{found.folder / RELEASED} should have {', '.join(names)} for each of {found.promised.steps} steps; "
            "nothing was written. Put back the run's own file"
        )
    return [{name: line[name] for name in names} for line in lines]


def _spread(book: Ledger) -> float:
    """The deviation of the noise on a figure of the last step, in units of its bound."""
    event = book.entries[-1].event
    return event.count_noise / (event.rate * event.population)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _test_metrics(found: Finished) -> dict[str, float]:
    from confide.federated import items

    if not (found.folder / items.FILE).exists():
        raise UserError(
            f"--with-test-metrics: the task {found.summary['task']} has no test items of its own, so its metrics may "
            "come from the users' own data; leave the option out"
        )
    return {name: value for name, value in found.summary["metrics"].items() if _is_finite(value)}


def _documents(found: Finished, listed: Listed) -> list[Document]:
    """The documents in the order of the model, read from the data again; they have to be those of the run."""
    task = found.recipe.task
    if not isinstance(task, RetrievalSettings):
        raise UserError(f"--documents {listed}: is for retrieval, and {found.folder} is of task {task.kind}; drop it")
    if listed == "names" and listing.needs_texts(task):
        raise UserError(
            "--documents names: this model compares a query with the documents' texts, so names alone are of no use; "
            "expected --documents texts, which publishes the texts too, or neither"
        )
    documents = task.data.read(found.recipe.run.seed).documents
    held = (found.book.header.get("inputs") or {}).get("the documents")
    key = (read_secret(found.folder) or b"") if found.book.header.get("inputs_keyed") else b""
    if held is not None and held != seal({"the documents": digest_documents(documents)}, key)["the documents"]:
        raise UserError(
            f"--documents {listed}: the documents are not those that {found.folder} was trained on; nothing was "
            "written. Put the data of the run back"
        )
    return documents


def _check_nothing_leaks(found: Finished, new: Path) -> None:
    """Look through all texts for what must not leave, however it came there: nothing else checks the owner's words."""
    inputs, key = found.book.header.get("inputs") or {}, read_secret(found.folder)
    # That of the encoder is published by name: without it nobody could tell which one the model belongs to.
    forbidden = {digest: f"the digest of {name}" for name, digest in inputs.items() if name != "the encoder"}
    forbidden |= {} if key is None else {key.hex(): f"the key in {SECRET}"}
    for place in (str(found.folder.resolve()), f"{Path.home()}/", str(Path.cwd())):
        forbidden[place] = "a path of this machine"
    for path in sorted(new.iterdir()):
        text = _text_of(path)
        for wrong, what in forbidden.items():
            if len(wrong) >= _LEAST and wrong in text:
                raise UserError(f"{path.name} would hold {what} ({wrong[:24]}); nothing was written. Take it out")


def _text_of(path: Path) -> str:
    """A file's text; of a file of tensors, its header."""
    content = path.read_bytes()
    if path.name == folder.MODEL:
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return content.decode("utf-8")


def _sync(new: Path) -> None:
    for path in (*new.iterdir(), new):
        place = os.open(path, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
