"""Arguments and options that several commands share, and how a list of numbers in one of them is read."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import typer.main
from typer.core import TyperArgument, TyperCommand, TyperOption

from confide.errors import UserError


class _Argument(TyperArgument):
    """Keeps its help, which click 8.5 overwrites: it has a field of that name, and typer 0.20 leaves it empty."""

    def __init__(self, *, help: str | None = None, **rest: Any) -> None:
        super().__init__(help=help, **rest)
        self.help = help


vars(typer.main)["TyperArgument"] = _Argument

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
Folder = Annotated[Path, typer.Argument(help="The folder of a run.")]
FinishedRun = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Arpa = Annotated[
    Path | None,
    typer.Option("--language-model", metavar="ARPA", help="Decode with this n-gram model instead of greedily."),
]
DocumentsFile = Annotated[
    Path | None,
    typer.Option(
        "--documents",
        metavar="FILE",
        help="For a retrieval model that was published without them: documents.jsonl, which its owner has.",
    ),
]
EncoderPlace = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        metavar="SOURCE",
        help="Where the frozen encoder is that the run was trained on, if not where its recipe says: a preset, a "
        "folder, or owner/name on the hub.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that train users. The result does not depend on it.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"] | None,
    typer.Option(
        help="Where users are trained. auto, the default: a GPU if there is one that the task can use. Cohorts and "
        "noise are drawn on the processor in any case. Else CONFIDE_DEVICE says it.",
        show_default=False,
    ),
]
Listening = Annotated[
    list[str] | None,
    typer.Option(
        "--listener",
        metavar="WHO",
        help="Who hears the figures of every step, beside TensorBoard: wandb, mlflow, or a class of yours as "
        "module:Class. They keep their files in the run's folder, unless --send. May be repeated.",
    ),
]
Send = Annotated[
    bool,
    typer.Option(
        "--send",
        help="Let listeners send figures off this machine. These have no noise, and no guarantee covers them; refused "
        "with privacy.source=system.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the recipe; may be repeated."),
]
N = TypeVar("N", int, float)


class OpensRecipes(TyperCommand):
    """A command that opens recipes or folders of runs; code that these name runs only with `--allow-code`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        about = "Run the functions that the recipe names (module:function). They run with all of your rights."
        self.params.append(
            TyperOption(param_decls=["--allow-code"], is_flag=True, expose_value=False, callback=_allow, help=about)
        )


def _allow(context: Any, parameter: Any, wanted: bool) -> None:
    if wanted:
        from confide.settings import allow_code

        allow_code()


def recipe_names(incomplete: str) -> list[str]:
    """Shipped recipes whose names begin so, for the Tab key. A shell waits for it, so it imports nothing heavy."""
    root = Path(str(files("confide") / "recipes"))
    names = sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))
    return [name for name in names if name.startswith(incomplete)]


def recipe_argument(help: str) -> Any:
    """An argument that names a recipe; the Tab key offers the shipped ones."""
    return typer.Argument(help=help, autocompletion=recipe_names)


RecipeName = Annotated[str, recipe_argument("Name of a shipped recipe (`confide recipe list`) or path of a YAML file.")]


def parse_numbers(option: str, text: str, kind: type[N], fits: Callable[[list[N]], bool], expected: str) -> list[N]:
    """The numbers in an option such as `--epsilons 5,1.5`, refused unless they fit."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not fits(numbers):
        raise UserError(f"--{option} {text!r}: expected {expected}")
    return numbers
