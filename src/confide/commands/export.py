"""`confide export`: a run's model for programs that know nothing of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import EncoderPlace, FinishedRun, Json
from confide.commands.printing import print_json


def export(
    run: FinishedRun,
    out: Annotated[Path, typer.Option(help="The ONNX file to write; it must be new.")],
    encoder: EncoderPlace = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="For speech: a recording whose transcript has to be the same; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the model of a finished run, or of a published folder, as one ONNX file.

    Everything between input and answer is inside: for speech the features and the frozen encoder, so that samples at
    16 kHz go in and log-probabilities of tokens come out; for retrieval the encoder, from the tokens of a text to
    scores of documents, or to its vector. Lengths are free. The file is written only if onnxruntime answers as the
    model does here. Its metadata say which tokens it writes, epsilon, delta, the unit, and whether it is for release.

    Example: `confide export runs/digits --out digits.onnx`
    """
    from confide.runs.export import export as write

    made = write(run, out, encoder, check or [])
    if as_json:
        print_json(made)
        return
    sizes = ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in made["inputs"].items())
    print(f"{out}: {made['bytes'] / 1e6:.1f} MB, from {sizes} to {made['output']}")
    also = f"; the transcripts of {made['same_transcripts']} recordings are the same" if check else ""
    print(f"onnxruntime answers as the model does here, within {made['difference']:.1g}{also}")
    if made["notes"]["for_release"] != "true":
        print("its noise can be computed again, or there is none: this file is for research, and must not leave")
