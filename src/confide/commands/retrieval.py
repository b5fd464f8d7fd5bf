"""`confide retrieve`, `confide answer`, and `confide evaluate` for retrieval. Heavy imports happen where used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.options import Json
from confide.commands.printing import counts, ends, percent, print_json, print_table
from confide.errors import UserError

if TYPE_CHECKING:
    from confide.retrieval.metrics import ClassScore
    from confide.runs.library import Evaluation, Found, Library

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
    library = _open(run, settings or [], quiet=as_json)
    found = library.find(query, k)
    if as_json:
        documents = [each.to_json() for each in found]
        about = {"query": query, "run": str(run), "method": library.method, "score": library.scale}
        print_json({**about, "documents": documents}, escape=False)
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
    from confide.retrieval.generation import Generator, LocalModel, chat_server, prompt

    shown = stream and not as_json
    generator: Generator | None = None
    if url is not None:  # refused, if it is wrong, before the run is opened
        generator = chat_server(url, model, token_variable, stream=shown, max_tokens=max_tokens, seconds=timeout)
    library = _open(run, settings or [], quiet=as_json)
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


def evaluation(run: Path, settings: list[str], quiet: bool) -> Evaluation:
    """`confide evaluate` for retrieval: a finished run, or a recipe of plain search."""
    return _open(run, settings, quiet).evaluate()


def is_retrieval(run: Path) -> bool:
    """Whether this is a run of retrieval, or a recipe of it."""
    from confide import recipe
    from confide.runs import folder

    found = recipe.load(str(run)) if names_recipe(run) else folder.held_recipe(run)
    return found.task.kind == "retrieval"


def names_recipe(place: Path) -> bool:
    """Whether a place is a recipe, by its shipped name or its file, and not a run."""
    from confide import recipe

    named = str(place) in recipe.shipped() or (place.suffix in (".yaml", ".yml") and place.is_file())
    return named and not place.is_dir()


def _open(place: Path, overrides: list[str], quiet: bool) -> Library:
    """A finished run by its folder, or a recipe of plain search by its name or file."""
    from confide import recipe
    from confide.runs.library import open_run, open_search

    if names_recipe(place):
        return open_search(recipe.load(str(place), overrides), str(place), quiet)
    if overrides:
        raise UserError(f"--set changes a recipe, and {place} is a run; drop it, or name the recipe")
    return open_run(place, quiet)


def _show_piece(text: str) -> None:
    print(text, end="", flush=True)


def _keep_silent(text: str) -> None:
    """Nothing is shown before the whole answer is there."""


def _named(found: Found) -> str:
    """A document's id, and its text where that is something else."""
    text = " ".join(found.document.text.split())
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."
    return text if text.startswith(found.document.id) else f"{found.document.id}: {text}"


def show(run: Path, found: Evaluation) -> None:
    """Print how well a retriever finds documents, and the classes that it finds least and most often."""
    scores = found.scores
    rows = [("top 1", percent(scores.top_1, 2), f"{percent(scores.low, 2)} to {percent(scores.high, 2)}")]
    if scores.k > 1:
        rows.append((f"top {scores.k}", percent(scores.top_k, 2), ""))
    means = {
        "mean reciprocal rank": scores.mrr,
        "nDCG@10": scores.ndcg_10,
        "top 1, mean over classes": scores.macro_top_1,
    }
    rows += [(name, percent(value, 2), "") for name, value in means.items()]
    title = f"{run} on {found.corpus}, {found.method}"
    print_table(("", "%", f"{100 * scores.level:g} % interval"), rows, title=title, width=80)
    ordered = sorted(scores.per_class, key=lambda own: (own.top_1, own.top_k, own.name))
    columns = ("document or class", "top 1 %", f"top {scores.k} %", "queries")
    print_table(columns, ends([_row(own) for own in ordered]), width=80)
    left = counts(found.left_out)
    print(
        f"{scores.queries:,} test queries, {found.documents:,} documents, loss {found.loss:.4g}"
        + (f"; left out: {left}" if left else "")
    )


def _row(own: ClassScore) -> tuple[str, ...]:
    name = own.name if len(own.name) <= 60 else f"{own.name[:57]}..."
    return name, percent(own.top_1, 1), percent(own.top_k, 1), f"{own.queries:,}"
