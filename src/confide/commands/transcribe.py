"""`confide transcribe`: what recordings say, by the model of a finished speech run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from confide.commands.options import Arpa, EncoderPlace, FinishedRun, Json
from confide.commands.printing import print_json
from confide.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from confide.speech.recogniser import Recogniser
    from confide.speech.transcribe import Transcript

Files = Annotated[
    list[Path],
    typer.Argument(
        help="Recordings: WAV, FLAC, MP3, Ogg; any rate, channels and length. With --stream also -: samples of 16 bits "
        "at 16 kHz, mono, from standard input."
    ),
]
Format = Annotated[
    Literal["text", "words", "json", "srt"],
    typer.Option(
        "--format",
        help="How a transcript is written; words: one a line, with start, end, and the model's confidence from 0 to 1.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Write each transcript to a file in this folder; never over another.")]


def transcribe(
    run: FinishedRun,
    files: Files,
    form: Format = "text",
    out: Out = None,
    language_model: Arpa = None,
    encoder: EncoderPlace = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Hear a recording chunk by chunk, and show what is known after each.")
    ] = False,
    window: Annotated[
        float,
        typer.Option(
            min=1,
            max=25,
            help="With --stream: seconds of a window. Shorter ones settle words sooner, with less context.",
        ),
    ] = 25.0,
    as_json: Json = False,
) -> None:
    """Write down what recordings say, with the model of a finished speech run.

    A file that cannot be read is named on standard error with the reason, the others are transcribed all the same,
    and the exit code is 2.

    Example: `confide transcribe runs/a talk.mp3 --format srt --out subtitles`
    """
    import numpy as np

    from confide.files import write_atomically
    from confide.runs.recogniser import load_recogniser, silent_libraries
    from confide.speech.corpus import SAMPLE_RATE, Undecodable, read_file
    from confide.speech.transcribe import as_json as to_json
    from confide.speech.transcribe import as_srt, as_text, as_words

    if stream:
        if form != "text" or out is not None:
            raise UserError("--stream shows what it hears on the screen; drop --format and --out")
        _show_stream(load_recogniser(run, language_model, encoder), files, window, as_json)
        return
    forms = {
        "text": (".txt", as_text),
        "words": (".tsv", as_words),
        "json": (".json", to_json),
        "srt": (".srt", as_srt),
    }
    ending, write = forms[form]
    as_json = as_json or (form == "json" and out is None)
    if form == "srt" and out is None and len(files) > 1 and not as_json:
        raise UserError("subtitles of several recordings do not belong in one file; name a folder for them with --out")
    targets = _targets(files, out, ending) if out is not None else {}
    recogniser = load_recogniser(run, language_model, encoder)
    recogniser.transcribe(
        np.full(SAMPLE_RATE // 10, 0.1, dtype=np.float32)
    )  # reads an encoder's weights before the clock
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
            write_atomically(targets[path], write(transcript).encode())
            said = f"{targets[path]}\n"
        else:
            said = (f"==> {path} <==\n" if len(files) > 1 else "") + write(transcript)
        if not as_json:
            print(said, end="", flush=True)
    seconds, audio = time.perf_counter() - began, sum(transcript.seconds for _, transcript in done)
    if as_json:
        written = [{"file": str(path), **transcript.to_json()} for path, transcript in done]
        took = {"audio_seconds": round(audio, 3), "seconds": round(seconds, 3)}
        print_json({"files": written, "failed": failed, "decoder": recogniser.decoder, **took}, escape=False)
    elif done:
        print(f"{audio:.1f} s of audio in {seconds:.1f} s: {audio / seconds:.0f} times real time", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _show_stream(recogniser: Recogniser, files: list[Path], window: float, as_json: bool) -> None:
    """Show what is known after each chunk: what is final, then in brackets what may still change."""
    from dataclasses import asdict

    from confide.speech.stream import Partial, Stream

    heard = []
    for path in files:
        hearing, partials = Stream(recogniser.hearing(), window), list[Partial]()
        for samples in _chunks(path):
            partial = hearing.feed(samples)
            if not partials or partial.text != partials[-1].text or partial.final != partials[-1].final:
                partials.append(partial)
                if not as_json:
                    still = " ".join(part for part in (partial.agreed, partial.rest) if part)
                    print(f"{partial.seconds:7.1f} s  {partial.final} [{still}]", flush=True)
        transcript = hearing.finish()
        heard.append({"file": str(path), **transcript.to_json(), "partials": [asdict(each) for each in partials]})
        if not as_json:
            print(transcript.text, flush=True)
    if as_json:
        print_json({"files": heard, "decoder": recogniser.decoder, "window": window}, escape=False)


def _chunks(path: Path) -> Iterator[np.ndarray]:
    """A recording in pieces of half a second; - is standard input, whose pieces come as they are spoken."""
    import numpy as np

    from confide.runs.recogniser import silent_libraries
    from confide.speech.corpus import SAMPLE_RATE, Undecodable, read_file

    size = SAMPLE_RATE // 2
    if str(path) == "-":
        while piece := sys.stdin.buffer.read(2 * size):
            yield np.frombuffer(piece[: len(piece) // 2 * 2], dtype="<i2").astype(np.float32) / 32768
        return
    try:
        with silent_libraries():
            samples = read_file(path)
    except Undecodable as error:
        raise UserError(f"{path}: {error}; expected a recording that can be read") from None
    yield from (samples[begin : begin + size] for begin in range(0, len(samples), size))


def _targets(files: list[Path], out: Path, ending: str) -> dict[Path, Path]:
    """Where each recording's transcript goes, checked before anything is done."""
    owners: dict[Path, Path] = {}
    for path in dict.fromkeys(files):
        target = out / f"{path.stem}{ending}"
        if target in owners:
            raise UserError(
                f"{owners[target]} and {path} would both be written to {target}; transcribe them one by one"
            )
        if target.exists():
            raise UserError(f"{target} is there already and was not touched; choose another --out folder")
        owners[target] = path
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made ({error.strerror}); name a folder that can be written to"
        ) from None
    return {path: target for target, path in owners.items()}
