"""`confide evaluate` and `confide transcribe`: what a trained model is worth, and its use. Heavy imports where used."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from confide.commands import retrieval as retrieval_commands
from confide.errors import UserError

if TYPE_CHECKING:
    from confide.runs.evaluation import SpeechEvaluation, TaskEvaluation
    from confide.speech.scores import SpeakerScore
    from confide.speech.transcribe import Transcript

_FEW = 4  # speakers shown at either end
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
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]


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
    from confide.runs import evaluation

    found = evaluation.evaluate(run, corpus, settings or [], language_model, quiet=as_json)
    if as_json:
        _print_json(found.to_json())
    elif isinstance(found, evaluation.SpeechEvaluation):
        _show(found)
    elif isinstance(found, evaluation.RetrievalEvaluation):
        retrieval_commands.show(found)
    else:
        _show_metrics(found)


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
    from confide.runs.recogniser import load_recogniser, silent_libraries
    from confide.speech.corpus import Undecodable, read_file

    as_json = as_json or (form == "json" and out is None)
    if form == "srt" and out is None and len(files) > 1 and not as_json:
        raise UserError("subtitles of several recordings do not belong in one file; name a folder for them with --out")
    targets = _targets(files, out, _ENDINGS[form]) if out is not None else {}
    recogniser = load_recogniser(run, language_model)
    done: list[tuple[Path, Transcript]] = []
    failed: list[dict[str, str]] = []
    began = time.perf_counter()
    for path in files:
        try:
            with silent_libraries():
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
        _print_json({
            "files": [_document(path, transcript) for path, transcript in done],
            "failed": failed,
            "decoder": recogniser.decoder,
            "audio_seconds": round(audio, 3),
            "seconds": round(seconds, 3),
        })  # fmt: skip
    elif done:
        print(f"{audio:.1f} s of audio in {seconds:.1f} s: {audio / seconds:.0f} times real time", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _show_metrics(found: TaskEvaluation) -> None:
    print(f"{found.task}, model of {found.run}")
    for name, value in found.metrics.items():
        print(f"  {name}: {value:.4g}")


def _show(found: SpeechEvaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.run} on {found.corpus}, {found.decoder}")
    for name in ("", "%", "95 % interval", "errors", "of"):
        table.add_column(name, justify="right" if name else "left")
    for name, unit, rate in (
        ("word error rate", "words", found.scores.wer),
        ("character error rate", "characters", found.scores.cer),
    ):
        interval = f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
        table.add_row(name, f"{100 * rate.value:.2f}", interval, f"{rate.errors:,}", f"{rate.total:,} {unit}")
    scores, console = found.scores, Console(width=max(Console().width, 80))
    console.print(table)
    console.print(_speaker_table(scores.speakers))
    skipped = sum(found.skipped_by_reason.values())
    reasons = ", ".join(f"{count:,} {kind}" for kind, count in found.skipped_by_reason.items())
    print(
        f"{len(scores.speakers):,} speakers, {scores.utterances:,} utterances, {scores.wer.total:,} words; "
        f"{skipped:,} utterances skipped{f' ({reasons}); --json names them' if reasons else ''}"
    )


def _speaker_table(speakers: tuple[SpeakerScore, ...]) -> Any:
    """The worst and the best few; all of them where they are few."""
    from rich.table import Table

    table = Table()
    for name in ("speaker", "WER %", "CER %", "utterances", "words"):
        table.add_column(name, justify="left" if name == "speaker" else "right")
    cut = len(speakers) > 2 * _FEW + 1
    for speaker in speakers[:_FEW] if cut else speakers:
        table.add_row(*_row(speaker))
    if cut:
        table.add_row(f"... {len(speakers) - 2 * _FEW:,} more ...", "", "", "", "")
        for speaker in speakers[-_FEW:]:
            table.add_row(*_row(speaker))
    return table


def _row(speaker: SpeakerScore) -> tuple[str, ...]:
    rates = (f"{100 * speaker.wer:.1f}", f"{100 * speaker.cer:.1f}")
    return (speaker.name, *rates, f"{speaker.utterances:,}", f"{speaker.words:,}")


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


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
