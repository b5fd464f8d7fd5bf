"""`confide retrieve`, `confide answer`, and `confide evaluate` for retrieval. Heavy imports happen where used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from confide.retrieval.generation import Generator
    from confide.retrieval.metrics import ClassScore
    from confide.runs.evaluation import RetrievalEvaluation
    from confide.runs.library import RetrievedDocument

_FEW = 4  # classes shown at either end
_WIDTH = 200  # characters of a document on the terminal
_TOKEN_VARIABLE = "CONFIDE_GENERATOR_TOKEN"

Run = Annotated[
    Path, typer.Argument(help="The folder of a finished retrieval run; or a recipe, with --set task.method=search.")
]
Query = Annotated[str, typer.Argument(help="What is looked for.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="With a recipe: change one value; may be repeated."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]


def mount(app: typer.Typer) -> None:
    """Add both commands to the main one."""
    app.command()(retrieve)
    app.command()(answer)


def retrieve(
    run: Run,
    query: Query,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents.")] = 5,
    settings: Sets = None,
    as_json: Json = False,
) -> None:
    """Find documents for a query with the retriever of a finished run, best first, with their scores.

    A head's score is the probability that it gives the document; a search's is the inner product.

    Example: `confide retrieve runs/desk "my fridge rattles all night" -k 3`
    """
    from confide.runs.library import open_library

    library = open_library(run, settings or [], quiet=as_json)
    found = library.find(query, k)
    if as_json:
        _print_json(
            {
                "query": query,
                "run": str(run),
                "method": library.method,
                "score": library.scale,
                "documents": [each.to_json() for each in found],
            }
        )
        return
    for each in found:
        print(f"{each.rank}. {each.score:.4f}  {_named(each)}")


def answer(
    run: Run,
    query: Query,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents the generator is given.")] = 3,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server with OpenAI's chat completions, usually ending in /v1."),
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
    as_json: Json = False,
) -> None:
    """Answer a query from the documents that a finished run retrieves for it, and name them.

    The documents and the query go to a local model, which stays on this machine, or to the server at --url, which sees
    them. The token of a server is read from the environment, never from the command line.

    Example: `confide answer runs/desk "why is my fridge so loud?" --url http://localhost:8080/v1 --model llama`
    """
    from confide.retrieval.generation import prompt
    from confide.runs.library import open_library

    shown = stream and not as_json
    generator = None if url is None else _server(url, model, token_variable, shown, max_tokens, timeout)
    library = open_library(run, settings or [], quiet=as_json)
    found = library.find(query, k)
    generator = generator or _local(model, max_tokens)
    pieces = _show_piece if shown else _keep_silent
    text = generator.answer(prompt(query, [each.document for each in found]), pieces)
    if as_json:
        _print_json(
            {
                "query": query,
                "run": str(run),
                "generator": generator.name,
                "answer": text,
                "sources": [each.to_json() for each in found],
            }
        )
        return
    print("" if shown else text)
    print(f"\nsources ({library.method}; answer by {generator.name}):")
    for each in found:
        print(f"  [{each.rank}] {each.score:.4f}  {_named(each)}")


def _server(url: str, model: str | None, variable: str, stream: bool, tokens: int, seconds: float) -> Generator:
    from confide.retrieval.generation import chat_server

    return chat_server(url, model, variable, stream=stream, max_tokens=tokens, seconds=seconds)


def _local(model: str | None, tokens: int) -> Generator:
    from confide.retrieval.generation import LocalModel

    return LocalModel(model or "smollm2", tokens)


def _show_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _keep_silent(text: str) -> None:
    """Nothing is shown before the whole answer is there."""


def _named(found: RetrievedDocument) -> str:
    """A document's id, and its text where that is something else."""
    text = " ".join(found.document.text.split())
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
    return text if text.startswith(found.document.id) else f"{found.document.id}: {text}"


def show(found: RetrievalEvaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    scores = found.scores
    table = Table(title=f"{found.run} on {found.corpus}, {found.method}")
    for name in ("", "%", f"{100 * scores.level:g} % interval"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("top 1", f"{100 * scores.top_1:.2f}", f"{100 * scores.low:.2f} to {100 * scores.high:.2f}")
    if scores.k > 1:
        table.add_row(f"top {scores.k}", f"{100 * scores.top_k:.2f}", "")
    for name, value in (
        ("mean reciprocal rank", scores.mrr),
        ("nDCG@10", scores.ndcg_10),
        ("top 1, mean over classes", scores.macro_top_1),
    ):
        table.add_row(name, f"{100 * value:.2f}", "")
    console = Console(width=max(Console().width, 80))
    console.print(table)
    console.print(_class_table(scores.per_class, scores.k))
    left = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
    print(
        f"{scores.queries:,} test queries, {found.documents:,} documents, loss {found.loss:.4g}"
        + (f"; left out: {left}" if left else "")
    )


def _class_table(classes: tuple[ClassScore, ...], k: int) -> Any:
    """The worst and the best few; all of them where they are few."""
    from rich.table import Table

    table = Table()
    for name in ("document or class", "top 1 %", f"top {k} %", "queries"):
        table.add_column(name, justify="left" if name.startswith("document") else "right", overflow="ellipsis")
    ordered = sorted(classes, key=lambda own: (own.top_1, own.top_k, own.name))
    cut = len(ordered) > 2 * _FEW + 1
    for own in ordered[:_FEW] if cut else ordered:
        table.add_row(*_row(own))
    if cut:
        table.add_row(f"... {len(ordered) - 2 * _FEW:,} more ...", "", "", "")
        for own in ordered[-_FEW:]:
            table.add_row(*_row(own))
    return table


def _row(own: ClassScore) -> tuple[str, ...]:
    name = own.name if len(own.name) <= 60 else f"{own.name[:57]}..."
    return name, f"{100 * own.top_1:.1f}", f"{100 * own.top_k:.1f}", f"{own.queries:,}"


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
