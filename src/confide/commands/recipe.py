"""`confide recipe`: looking at the documents that describe runs."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from confide.commands.options import Json, OpensRecipes, Sets, recipe_argument
from confide.commands.printing import print_json

app = typer.Typer(no_args_is_help=True, help="Look at recipes: the documents that describe runs.")


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """The recipes that come with the package."""
    import yaml

    from confide.recipe import shipped

    found = {name: yaml.safe_load(place.read_text()).get("description", "") for name, place in shipped().items()}
    if as_json:
        print_json([{"name": name, "description": text} for name, text in found.items()])
        return
    width = max(map(len, found))
    for name, description in found.items():
        print(f"{name:<{width}}  {_first_sentence(description)}")


def _first_sentence(text: str) -> str:
    return re.split(r"\. (?=[A-Z])", text, maxsplit=1)[0]  # and not after `eq.`


@app.command(cls=OpensRecipes)
def show(name: Annotated[str, recipe_argument("A shipped recipe or a file.")], set_: Sets = None) -> None:
    """A recipe with every default written out, checked."""
    from confide.recipe import load

    print(load(name, set_ or []).to_yaml(), end="")


@app.command()
def schema() -> None:
    """The JSON Schema of a recipe, for editors and for reading."""
    from confide import recipe

    print_json(recipe.schema())
