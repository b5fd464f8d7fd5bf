"""`confide evaluate` and `confide transcribe`: what a trained model is worth, and its use. Heavy imports where used."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from confide.commands import retrieval as retrieval_commands
from confide.commands.options import Json
from confide.commands.printing import counts, ends, percent, print_json, print_table
from confide.errors import UserError

if TYPE_CHECKING:
    from confide.recipe import Recipe
    from confide.runs.recogniser import Evaluation
    from confide.speech.corpora import CorpusSettings
    from confide.speech.settings import SpeechSettings
    from confide.speech.transcribe import Transcript

_ENDINGS = {"text": ".txt", "json": ".json", "srt": ".srt"}

Folder = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Files = Annotated[list[Path], typer.Argument(help="Recordings: WAV, FLAC, MP3, Ogg; any rate, channels and length.")]
Kind = Annotated[
    str | None,
    typer.Option(
        "--corpus", metavar="KIND", help="A kind from `confide corpus list`; default: the recipe's task.test."
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the corpus, as often as you like."),
]
Arpa = Annotated[
    Path | None,
    typer.Option("--language-model", metavar="ARPA", help="Decode with this n-gram model instead of greedily."),
]
Format = Annotated[Literal["text", "json", "srt"], typer.Option("--format", help="How a transcript is written.")]
Out = Annotated[Path | None, typer.Option(help="Write each transcript to a file in this folder; never over another.")]


def mount(app: typer.Typer) -> None:
    """Add both commands to the main one."""
    app.command()(evaluate)
    app.command()(transcribe)


def evaluate(
    run: Folder, corpus: Kind = None, settings: Sets = None, language_model: Arpa = None, as_json: Json = False
) -> None:
    """Score the model of a finished run: for speech, word and character error rates with 95 % intervals.

    Without --corpus it is the recipe's own test corpus, which --set can change: another subset, or its folder on
    this machine. The corpus that the model was trained on is not needed.

    For retrieval: top-1, top-K, mean reciprocal rank and nDCG@10 on the test queries, also per document. Plain
    inner-product search needs no run: `confide evaluate retrieval/sms-head --set task.method=search`

    Example: `confide evaluate runs/a --corpus librispeech --set subset=test-other`
    """
    found = evaluation(run, corpus, settings or [], language_model, quiet=as_json)
    if as_json:
        print_json(found.document, escape=False)
    else:
        found.show()


def transcribe(
    run: Folder,
    files: Files,
    form: Format = "text",
    out: Out = None,
    language_model: Arpa = None,
    as_json: Json = False,
) -> None:
    """Write down what recordings say, with the model of a finished speech run.

    A file that cannot be read is named on standard error with the reason, the others are transcribed all the same,
    and the exit code is 2.

    Example: `confide transcribe runs/a talk.mp3 --format srt --out subtitles`
    """
    from confide.runs.recogniser import load_recogniser
    from confide.speech.corpus import Undecodable, read_file

    as_json = as_json or (form == "json" and out is None)
    if form == "srt" and out is None and len(files) > 1 and not as_json:
        raise UserError("subtitles of several recordings do not belong in one file; name a folder for them with --out")
    targets = _targets(files, out, _ENDINGS[form]) if out is not None else {}
    with _no_notes():
        recogniser = load_recogniser(run, language_model)
    done: list[tuple[Path, Transcript]] = []
    failed: list[dict[str, str]] = []
    began = time.perf_counter()
    for path in files:
        try:
            with _no_notes():
                samples = read_file(path)
        except Undecodable as error:
            failed.append({"file": str(path), "reason": str(error)})
            print(f"{path}: {error}", file=sys.stderr)
            continue
        transcript = recogniser.transcribe(samples)
        done.append((path, transcript))
        if path in targets:
            _write(targets[path], transcript, form)
            if not as_json:
                print(targets[path])
        elif not as_json:
            _print(path, transcript, form, len(files) > 1)
    seconds, audio = time.perf_counter() - began, sum(transcript.seconds for _, transcript in done)
    if as_json:
        written = [_document(path, transcript) for path, transcript in done]
        took = {"audio_seconds": round(audio, 3), "seconds": round(seconds, 3)}
        print_json({"files": written, "failed": failed, "decoder": recogniser.decoder, **took}, escape=False)
    elif done:
        print(f"{audio:.1f} s of audio in {seconds:.1f} s: {audio / seconds:.0f} times real time", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of any task: as JSON, and for people."""

    document: dict[str, Any]
    show: Callable[[], None]


def evaluation(
    run: Path, corpus: str | None, settings: list[str], language_model: Path | None, quiet: bool
) -> Evaluated:
    """What the model of a finished run is worth."""
    from confide.runs import folder

    if retrieval_commands.is_retrieval(run):
        if corpus is not None or language_model is not None:
            raise UserError(f"{run} is of task retrieval: --corpus and --language-model are for speech; drop them")
        found = retrieval_commands.evaluation(run, settings, quiet)
        document = {"task": "retrieval", "run": str(run), **found.to_json()}
        return Evaluated(document, lambda: retrieval_commands.show(run, found))
    recipe = folder.held_recipe(run)
    if recipe.task.kind == "speech":
        return _evaluated_speech(run, recipe, corpus, settings, language_model, quiet)
    if corpus is not None or settings or language_model is not None:
        raise UserError(
            f"{run} holds a run of {recipe.task.kind}: --corpus, --set and --language-model are for speech; drop them"
        )
    return _evaluated_task(run, recipe)


def _evaluated_speech(
    run: Path, recipe: Recipe, kind: str | None, words: list[str], language_model: Path | None, quiet: bool
) -> Evaluated:
    from confide.runs import recogniser as use
    from confide.runs.corpus_choice import read_with_bar

    task = use.speech_of(run, recipe)
    settings = _corpus_settings(task, kind, words)
    with _no_notes():
        recogniser = use.load_recogniser(run, language_model)
    recogniser.check_language(use.language_of(settings), settings.kind)
    found = use.evaluate(recogniser, read_with_bar(settings), recipe.run.seed, task.cache, quiet=quiet)
    return Evaluated({"task": "speech", "run": str(run), **found.to_json()}, lambda: _show(run, found))


def _evaluated_task(run: Path, recipe: Recipe) -> Evaluated:
    """Any other task says itself what its model is worth."""
    import torch

    from confide.build import make_task
    from confide.runs import folder
    from confide.runs.recogniser import held_parameters

    task = make_task(recipe.task, recipe.run.seed)
    shapes = {name: tuple(tensor.shape) for name, tensor in task.initial_parameters().items()}
    with torch.no_grad():
        metrics = task.evaluate(held_parameters(run, shapes))

    def show() -> None:
        print(f"{task.name}, model of {run}")
        for name, value in metrics.items():
            print(f"  {name}: {value:.4g}")

    safe = {name: folder.finite(value) for name, value in metrics.items()}
    return Evaluated({"task": task.name, "run": str(run), "metrics": safe}, show)


def _corpus_settings(task: SpeechSettings, kind: str | None, words: list[str]) -> CorpusSettings:
    """The recipe's test corpus or one of another kind, with what --set says, checked as `confide corpus` does."""
    from confide.runs.corpus_choice import check_corpus, parse_setting

    document: dict[str, Any] = {} if kind is not None else task.test.model_dump(exclude={"kind"})
    document.update(parse_setting(word) for word in words)
    return check_corpus(kind or task.test.kind, document)


def _show(run: Path, found: Evaluation) -> None:
    rows = []
    for name, unit, rate in (
        ("word error rate", "words", found.scores.wer),
        ("character error rate", "characters", found.scores.cer),
    ):
        interval = f"{percent(rate.low, 1)} to {percent(rate.high, 1)}"
        rows.append((name, percent(rate.value, 2), interval, f"{rate.errors:,}", f"{rate.total:,} {unit}"))
    title = f"{run} on {found.corpus}, {found.decoder}"
    print_table(("", "%", "95 % interval", "errors", "of"), rows, title=title, width=80)
    speakers = [
        (each.name, percent(each.wer, 1), percent(each.cer, 1), f"{each.utterances:,}", f"{each.words:,}")
        for each in found.speakers
    ]
    print_table(("speaker", "WER %", "CER %", "utterances", "words"), ends(speakers), width=80)
    skipped, reasons = sum(found.skipped_by_reason.values()), counts(found.skipped_by_reason)
    print(
        f"{len(found.speakers):,} speakers, {found.scores.utterances:,} utterances, {found.scores.wer.total:,} words; "
        f"{skipped:,} utterances skipped{f' ({reasons}); --json names them' if reasons else ''}"
    )


@contextmanager
def _no_notes() -> Iterator[None]:
    """The MP3 and n-gram libraries write notes to standard error, past Python; what matters of them is an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _targets(files: list[Path], out: Path, ending: str) -> dict[Path, Path]:
    """Where each recording's transcript goes, checked before anything is done."""
    targets: dict[Path, Path] = {}
    for path in dict.fromkeys(files):
        target = out / f"{path.stem}{ending}"
        if target in targets.values():
            other = next(p for p, t in targets.items() if t == target)
            raise UserError(f"{other} and {path} would both be written to {target}; transcribe them one by one")
        if target.exists():
            raise UserError(f"{target} is there already and was not touched; choose another --out folder")
        targets[path] = target
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made ({error.strerror}); name a folder that can be written to"
        ) from None
    return targets


def _write(target: Path, transcript: Transcript, form: str) -> None:
    from confide.files import write_atomically

    write_atomically(target, _formatted(transcript, form).encode())


def _formatted(transcript: Transcript, form: str) -> str:
    from confide.speech.transcribe import as_json, as_srt, as_text

    return {"text": as_text, "json": as_json, "srt": as_srt}[form](transcript)


def _print(path: Path, transcript: Transcript, form: str, several: bool) -> None:
    if several:
        print(f"==> {path} <==")
    print(_formatted(transcript, form), end="", flush=True)


def _document(path: Path, transcript: Transcript) -> dict[str, Any]:
    from confide.speech.transcribe import as_json

    return {"file": str(path), **json.loads(as_json(transcript))}
