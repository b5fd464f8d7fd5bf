"""`confide retrieve` and `confide answer`: the use of a trained retriever."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.options import DocumentsFile, EncoderPlace, Json
from confide.commands.printing import print_json

if TYPE_CHECKING:
    from confide.runs.library import RetrievedDocument

_WIDTH = 200  # characters of a document on the terminal
_TOKEN_VARIABLE = "CONFIDE_GENERATOR_TOKEN"

Run = Annotated[
    Path,
    typer.Argument(
        help="The folder of a finished retrieval run, or a published one; or a recipe, with --set task.method=search."
    ),
]
Query = Annotated[str, typer.Argument(help="What is looked for.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="With a recipe: change one value; may be repeated."),
]


def retrieve(
    run: Run,
    query: Query,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents.")] = 5,
    settings: Sets = None,
    documents: DocumentsFile = None,
    encoder: EncoderPlace = None,
    as_json: Json = False,
) -> None:
    """Find documents for a query with the retriever of a finished run, best first, with their scores.

    A head's score is the probability that it gives the document; a search's is the inner product.

    Example: `confide retrieve runs/desk "my fridge rattles all night" -k 3`
    """
    from confide.runs.library import open_library

    library = open_library(run, settings or [], as_json, documents, encoder)
    found = library.find(query, k)
    if as_json:
        best = [each.to_json() for each in found]
        about = {"query": query, "run": str(run), "method": library.method, "score": library.scale}
        print_json({**about, "documents": best}, escape=False)
        return
    for each in found:
        print(f"{each.rank}. {each.score:.4f}  {_named(each)}")


def answer(
    run: Run,
    query: Query,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents the generator is given.")] = 3,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server with OpenAI's chat completions, usually ending in /v1.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --url: the server's model. Without: a causal model here, as for `confide encoder`; "
            "default smollm2.",
        ),
    ] = None,
    token_variable: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the server's token, if any.")
    ] = _TOKEN_VARIABLE,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 256,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server may be silent.")] = 120.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show the answer while it is written.")] = True,
    settings: Sets = None,
    documents: DocumentsFile = None,
    encoder: EncoderPlace = None,
    as_json: Json = False,
) -> None:
    """Answer a query from the documents that a finished run retrieves for it, and name them.

    The documents and the query go to a local model, which stays on this machine, or to the server at --url, which sees
    them. The token of a server is read from the environment, never from the command line.

    Example: `confide answer runs/desk "why is my fridge so loud?" --url http://localhost:8080/v1 --model llama`
    """
    from confide.retrieval.generation import Generator, LocalModel, chat_server, prompt
    from confide.runs.library import open_library

    shown = stream and not as_json
    generator: Generator | None = None
    if url is not None:  # refused, if it is wrong, before the run is opened
        generator = chat_server(url, model, token_variable, stream=shown, max_tokens=max_tokens, seconds=timeout)
    library = open_library(run, settings or [], as_json, documents, encoder)
    found = library.find(query, k)
    generator = generator or LocalModel(model or "smollm2", max_tokens)
    emit = _show_piece if shown else _keep_silent
    text = generator.answer(prompt(query, [each.document for each in found]), emit)
    if as_json:
        sources = [each.to_json() for each in found]
        about = {"query": query, "run": str(run), "generator": generator.name, "answer": text}
        print_json({**about, "sources": sources}, escape=False)
        return
    print("" if shown else text)
    print(f"\nsources ({library.method}; answer by {generator.name}):")
    for each in found:
        print(f"  [{each.rank}] {each.score:.4f}  {_named(each)}")


def _show_piece(text: str) -> None:
    print(text, end="", flush=True)


def _keep_silent(text: str) -> None:
    """Nothing is shown before the whole answer is there."""


def _named(found: RetrievedDocument) -> str:
    """A document's id, and its text where that is something else."""
    text = " ".join(found.document.text.split())
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
    return text if text.startswith(found.document.id) else f"{found.document.id}: {text}"
