"""A recipe for other people: without what names files, folders and services of its owner.

Paths are marked in the types of a recipe's fields (`confide.settings.Local`). Options of an owner's own code can hold
anything and are left out whole, and so is every text that looks like a path or an address. What a recipe cannot do
without is replaced by `left-out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from confide.recipe import Recipe
from confide.settings import local_paths

PLACEHOLDER = "left-out"
_OPTIONS = "options"


def for_others(recipe: Recipe) -> Recipe:
    """The same recipe without the owner's paths, addresses and options.

    Examples:
        >>> from confide.recipe import load
        >>> from confide.runs.shared_recipe import for_others
        >>> own = load("convex/digits", ["task.folder=/home/ann/digits"])
        >>> for_others(own).task.folder is None, for_others(own).run == own.run
        (True, True)
    """
    document = recipe.model_dump(mode="json")
    places = [tuple(name.split(".")) for name in local_paths(recipe)]
    for place in dict.fromkeys([*places, *_suspects(document, ())]):
        kept = _put(document, place, None)
        # Nor may a default stand where something else was: `source` would name an encoder that was not there.
        if not _is_valid(document) or isinstance(_default(document, place), str):
            _put(document, place, PLACEHOLDER if isinstance(kept, str) else {})
    return Recipe.model_validate(document)


def _suspects(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Where options stand, and texts that look like a path or an address."""
    if place and place[-1] == _OPTIONS and value:
        yield place
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _suspects(inner, (*place, key))
    elif isinstance(value, str) and (value.startswith(("/", "~", ".")) or "\\" in value or "://" in value):
        yield place


def _put(document: dict[str, Any], place: tuple[str, ...], value: Any) -> Any:
    """Put a value in its place, or take away what is there; what was there."""
    *path, last = place
    for key in path:
        document = document[key]
    kept = document.pop(last, None)
    if value is not None:
        document[last] = value
    return kept


def _default(document: dict[str, Any], place: tuple[str, ...]) -> Any:
    """What a recipe has in a place that its document leaves out."""
    found: Any = Recipe.model_validate(document).model_dump(mode="json")
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _is_valid(document: dict[str, Any]) -> bool:
    try:
        Recipe.model_validate(document)
    except ValidationError:
        return False
    return True
