"""`confide serve`: a run's model for programs, over HTTP. Heavy imports happen only where they are used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import DocumentsFile, EncoderPlace, FinishedRun
from confide.errors import UserError


def serve(
    run: FinishedRun,
    host: Annotated[str, typer.Option(help="Beyond this machine: 0.0.0.0; then a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8790,
    cert: Annotated[
        Path | None, typer.Option(help="Certificate (and chain) as PEM, for TLS.", show_default=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key as PEM.", show_default=False)] = None,
    encoder: EncoderPlace = None,
    documents: DocumentsFile = None,
) -> None:
    """Answer programs over HTTP with the model of a finished run: recordings to transcripts, queries to documents.

    POST /transcribe takes a recording (WAV, FLAC, MP3, Ogg, Opus, M4A; at most 50 MB and ten minutes) and gives its
    text, with the times and confidences of its words. POST /retrieve takes {"query": ..., "k": ...} and gives
    documents. GET /about says what the model is and promises, GET /health that it is there. Errors are JSON.

    It listens on this machine only. With --host it can be reached from others: then every request needs the header
    Authorization: Bearer TOKEN, with the token in CONFIDE_SERVE_TOKEN or, if that is not set, the one that is printed.
    Give --cert and --key, or put a proxy in front: without TLS others in the network can read what passes.

    Example: `confide serve runs/words --port 8790`
    """
    from confide.ui.serving import TOKEN, ModelServer

    if (cert is None) != (key is None):
        raise UserError("only one of --cert and --key was given; expected both, or neither for plain HTTP")
    tls = None
    if cert is not None and key is not None:
        from confide.encoders.server import tls_context

        tls = tls_context(cert, key)
    given = os.environ.get(TOKEN)
    server = ModelServer(run, host, port, given, tls, encoder, documents)
    path = "/transcribe" if server.kind == "speech" else "/retrieve"
    print(f"POST {server.url}{path} (Ctrl-C ends it)", flush=True)
    if server.token is not None and given is None:
        print(f"every request needs the header Authorization: Bearer {server.token}", flush=True)
    if server.token is not None and tls is None:
        print("without TLS: others in the network can read what passes", file=sys.stderr)
    server.run()
    print("ended", file=sys.stderr)
