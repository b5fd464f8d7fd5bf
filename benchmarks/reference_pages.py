"""The pages of the site that list every command and every setting, made from the program while the site is built.

A hook of mkdocs: where docs/commands.md and docs/settings.md say `<!-- made: ... -->`, the lists stand on the site. So
they cannot fall behind the program, and nothing that is made lies in the tree.

    python benchmarks/reference_pages.py commands    # prints one of them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from confide import recipe
from confide.cli import app

Schema = dict[str, Any]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls with the text of every page."""
    for name, made in MADE.items():
        markdown = markdown.replace(f"<!-- made: {name} -->", "\n".join(made()))
    return markdown


def commands() -> Iterator[str]:
    """A heading for every command, with its help, arguments and options."""
    for words, command in _tree(get_command(app), ("confide",)):
        context = command.make_context(" ".join(words), [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"## {' '.join(words)}\n\n```text\n{' '.join(words)} {usage}\n```\n\n{_prose(command.help or '')}\n"
        rows = [row for each in command.params if (row := _row(each))]
        if rows:
            yield "\n".join(["| | |", "|---|---|", *rows, ""])


def _tree(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, in the order of the help."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, each in inner.items():
        if not each.hidden:
            yield from _tree(each, (*words, name))


def _prose(text: str) -> str:
    """A command's help; examples that it shows line by line are a block."""
    parts = []
    for part in re.split(r"\n\s*\n", text.strip()):
        if part.startswith("\b"):
            part = "```text\n" + part.lstrip("\b").strip("\n") + "\n```"
        parts.append(part.replace("\f", ""))
    return "\n\n".join(parts)


def _row(parameter: Any) -> str:
    about = getattr(parameter, "help", None) or ""
    if getattr(parameter, "hidden", False) or parameter.name in ("help", "install_completion", "show_completion"):
        return ""
    if parameter.param_type_name == "argument":
        name = f"`{parameter.human_readable_name.upper().strip('[]')}`"
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        taken = "" if parameter.is_flag else f" {_value(parameter)}"
        name = ", ".join(f"`{each}{taken}`" for each in names)
    more = ["required"] if parameter.required else []
    if (
        parameter.default not in (None, False, (), [], "")
        and not callable(parameter.default)
        and not parameter.required
    ):
        more.append(f"`{getattr(parameter.default, 'value', parameter.default)}` if left out")
    return f"| {_cell(name)} | {_cell('; '.join([about.rstrip('.'), *more] if about else more))} |"


def _value(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return "|".join(str(getattr(each, "value", each)) for each in choices)
    return str(parameter.metavar or parameter.type.name).upper()


def settings() -> Iterator[str]:
    """A table for each section of a recipe, and one for each kind of thing that can stand in it."""
    schema = recipe.schema()
    models: Schema = schema["$defs"]
    yield "## The sections\n\n| section | what stands in it |\n|---|---|"
    for name, field in schema["properties"].items():
        about = field.get("description", "")
        yield f"| `{name}` | {_cell(_type(field, models))}{f': {_cell(about)}' if about else ''} |"
    yield ""
    for name, model in _in_order(schema, models).items():
        yield f"## {_title(name, model)} {{#{_anchor(name)}}}\n\n{model.get('description', '')}\n"
        fields = {key: field for key, field in model.get("properties", {}).items() if "const" not in field}
        if fields:
            yield "| setting | value | if left out | what it does |\n|---|---|---|---|"
        for key, field in fields.items():
            default = "required" if key in model.get("required", ()) else _default(field)
            about = field.get("description", "")
            yield f"| `{key}` | {_cell(_type(field, models))} | {_cell(default)} | {_cell(about)} |"
        yield ""


def _in_order(field: Any, models: Schema, found: Schema | None = None) -> Schema:
    """Each thing after what it stands in."""
    found = {} if found is None else found
    for key, value in field.items() if isinstance(field, dict) else enumerate(field) if isinstance(field, list) else ():
        name = str(value).rpartition("/")[2] if key == "$ref" else ""
        if name and name not in found:
            found[name] = models[name]
            _in_order(models[name], models, found)
        elif key not in ("$defs", "discriminator"):
            _in_order(value, models, found)
    return found


def _title(name: str, model: Schema) -> str:
    """By what a recipe writes where that decides: `kind: speech`."""
    fixed = [f"{key}: {field['const']}" for key, field in model.get("properties", {}).items() if "const" in field]
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.removesuffix("Settings")).lower()
    return f"{plain} (`{fixed[0]}`)" if fixed else plain


def _anchor(name: str) -> str:
    return name.lower()


def _type(field: Schema, models: Schema) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{_title(name, models[name])}](#{_anchor(name)})"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    several = field.get("oneOf") or field.get("anyOf")
    if several:
        return " or ".join(dict.fromkeys(_type(each, models) for each in several))
    if field.get("type") == "array":
        return f"list of {_type(field['items'], models)}" if "items" in field else "list"
    limits = [f"{word} {field[key]:g}" for key, word in _LIMITS.items() if isinstance(field.get(key), int | float)]
    return " ".join([_WORDS.get(field.get("type", ""), "anything"), *limits])


_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
          "null": "none", "object": "mapping"}  # fmt: skip
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _default(field: Schema) -> str:
    if "default" not in field:
        return ""
    value = field["default"]
    if isinstance(value, dict):
        return "its defaults"
    if value is None or value in ("", []):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


MADE = {"commands": commands, "settings": settings}

if __name__ == "__main__":
    print("\n".join(MADE[sys.argv[1]]()))
