"""What every section of a recipe is made of: its base class, its YAML, its marks, and words for what is wrong in it.

`Section` is the base class. `validate` checks a document against any pydantic type and explains all problems, with the
nearest valid name for a key that is not known and the allowed range for a value that is out of it. `LocalPath` and
`Local` mark, in a field's type, what names a file or folder of this machine; `local_paths` lists the marked fields that
are set. `imported` finds the function that a recipe names, once `allow_code` was called. `Unit` is what one user of a
task is.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from confide.errors import Stopped, UserError

CODE_ENV = "CONFIDE_ALLOW_CODE"
_MOST_ALIASES = 20
NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""The pattern of a function's name in a recipe: `module:function`."""


class Section(BaseModel):
    """The base of all sections: a key that is not known is an error, and nothing changes after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


UnitName = Annotated[str, Field(min_length=2, max_length=80, pattern=r"^[^\x00-\x1f\x7f<>]+$")]


class Unit(Section):
    """What one user is: the unit that a guarantee protects, and whether it is a person.

    Differential privacy protects whatever the accounting calls a user. Where data were dealt to made-up users at
    random, a person's data lie with many of them, and nothing is promised to that person. So every task says what its
    users are, the ledger's first line keeps it, and every statement of a guarantee names it.

    Examples:
        >>> from confide.recipe import load
        >>> load("convex/digits").unit
        Unit(name='simulated client with rows of a public data set', person=False, origin='made-up')
    """

    name: UnitName = Field(description="what one user is, in the singular: speaker, device, owner of documents")
    person: bool = Field(description="whether one user is one person")
    origin: Literal["found", "declared", "dealt", "made-up", "unsaid"] = Field(
        description="found: the data say whose they are; declared: the recipe says what a user is; dealt: people's "
        "data were dealt to users at random; made-up: nobody's data, or a public data set's; unsaid: the ledger is "
        "from before it named its unit"
    )

    @property
    def said(self) -> str:
        """Whether it is a person, in a sentence."""
        if self.person:
            said = "It is a person"
            return f"{said}, as the recipe declares." if self.origin == "declared" else f"{said}."
        return _NOT_A_PERSON[self.origin]


_NOTHING = "nothing here is promised to people"
_NOT_A_PERSON = {
    "found": f"It is not a person, or nobody has said that it is: {_NOTHING}.",
    "declared": f"The recipe does not say that it is a person: {_NOTHING}.",
    "dealt": f"It is not a person: data were dealt to users at random, so that one person's may lie with many. So "
    f"{_NOTHING}.",
    "made-up": f"It is not a person, but made up for an experiment: {_NOTHING}.",
    "unsaid": f"This ledger does not say what a user is: {_NOTHING}.",
}
MADE_UP = Unit(name="made-up client", person=False, origin="made-up")
UNSAID = Unit(name="user", person=False, origin="unsaid")
DEVICE = Unit(name="device: all data that a client holds for one user", person=False, origin="found")
"""Of a deployment, whose server cannot see whose data its clients hold."""


@dataclass(frozen=True)
class Local:
    """Marks a field that names a file or folder of this machine; `when` says for which values, if not for all."""

    when: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class Code:
    """Marks a field that names a function to run."""


LocalPath = Annotated[Path, Local()]
"""A file or folder of this machine."""

FunctionName = Annotated[str, Field(pattern=NAMED), Code()]
"""A function of one's own: `module:function`."""


def is_path(value: str) -> bool:
    """Whether a word leads elsewhere than to an entry of its folder: for fields that hold a bare name."""
    return value in (".", "..") or "/" in value or "\\" in value


def local_paths(model: BaseModel) -> list[str]:
    """The dotted names of the fields of a model, and of the models in it, that name a file or folder here."""
    return [
        name
        for name, marks, value in _marked(model)
        if any(isinstance(mark, Local) and mark.when(value) for mark in marks)
    ]


def named_code(model: BaseModel) -> dict[str, str]:
    """The functions that a model and the models in it name, by the dotted names of their fields."""
    return {name: value for name, marks, value in _marked(model) if Code() in marks}


def _marked(model: BaseModel) -> Iterator[tuple[str, list[Any], Any]]:
    """Dotted name, marks and value of every field that is set, down to those of the models in it."""
    for key, info in type(model).model_fields.items():
        value = getattr(model, key)
        if isinstance(value, BaseModel):
            yield from ((f"{key}.{name}", marks, inner) for name, marks, inner in _marked(value))
        elif value is not None:
            yield key, [*info.metadata, *_parts(info.annotation)], value


def _parts(kind: Any) -> Iterator[Any]:
    """Everything that a type is made of, as the mark of `LocalPath` in `LocalPath | None`."""
    for part in get_args(kind):
        yield part
        yield from _parts(part)


_TRUTH = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 for text; everybody means the number. A few aliases help; many are a bomb.

    It also takes yes, no, on and off for truth values, which are words that people say to a recogniser. Here they are
    text, as in YAML 1.2; a field that is true or false still takes them.
    """

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > _MOST_ALIASES:
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, f"more than {_MOST_ALIASES} aliases", mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise yaml.constructor.ConstructorError(
                None, None, "half of a surrogate pair, which is no text", node.start_mark
            )
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would take for a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != _TRUTH]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TRUTH, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml(text: str) -> Any:
    """What a document says; a YAMLError also for aliases without number, deep nesting and text that is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def to_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)


def read_override(override: str, form: str) -> tuple[list[str], Any]:
    """The keys and the value of `--set a.b=value`; `form` says what was expected, for the message."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {override!r} is not of the form {form}")
    try:
        return keys, read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML: {error}") from None


def validate(kind: TypeAdapter[Any], given: Any, where: str = "", whole: str = "") -> tuple[Any, list[str]]:
    """The value that a document describes, and what is wrong with it, a line each.

    `where` is the name that paths begin with; `whole` is what the document is called if it has no such name.
    """
    problems = list(_yes_for_a_number(kind, given, where))
    if problems:
        return None, problems
    try:
        return kind.validate_python(given), []
    except ValidationError as error:
        return None, [_explain(kind, given, where, whole, each) for each in error.errors()]


def _yes_for_a_number(kind: TypeAdapter[Any], given: Any, where: str) -> Iterator[str]:
    """True counts as 1 to Python; in a recipe it is a mistake wherever the schema has a number."""
    for path, value in _switches(given, ()):
        node = _schema_at(kind, given, path)
        if any(option.get("type") in ("integer", "number") for option in (node, *node.get("anyOf", []))):
            yield f"{_dotted(where, path)}={value}: expected a number {_limits(node)}".rstrip()


def _switches(given: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Where True and False stand in a document."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from _switches(value, (*path, key))
    elif isinstance(given, bool):
        yield path, given


def _dotted(where: str, path: Iterable[str]) -> str:
    return ".".join(filter(None, (where, *path)))


def _explain(kind: TypeAdapter[Any], given: Any, where: str, whole: str, error: Any) -> str:
    """One line for one pydantic error: where, what was given, what is expected."""
    # Tags of unions appear in pydantic's path but not in the document.
    path, value = [], given
    for part in error["loc"]:
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            path.append(str(part))
            value = value[part]
    name = _dotted(where, path) or whole
    match error["type"]:
        case "extra_forbidden":
            valid = _schema_at(kind, given, path[:-1]).get("properties", {})
            hint = nearest(path[-1], valid) or f"; expected one of {', '.join(valid)}"
            return f"{name}: there is no such key{hint}"
        case "missing":
            key = error["loc"][-1]
            about = _schema_at(kind, given, path).get("properties", {}).get(key, {}).get("description")
            return f"{_dotted(where, (*path, key))}: required" + (f" ({about})" if about else "")
        case "union_tag_not_found":
            return f"{_dotted(where, (*path, 'kind'))}: required"
        case "union_tag_invalid":
            tag, tags = error["ctx"]["tag"], error["ctx"]["expected_tags"]
            options = [t.strip().strip("'") for t in tags.split(",")]
            return f"{_dotted(where, (*path, 'kind'))}={tag}: {_one_of(options, tag)}"
        case "literal_error":
            options = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            return f"{name}={value}: {_one_of(options, str(value))}"
        case "model_type" | "model_attributes_type":
            return f"{name}={value!r}: expected a section of keys and values"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == NAMED:
            return f"{name}={value!r}: expected module:function, the name of a function"
        case "value_error":  # a section's own words about keys that do not go together
            return f"{name}: {error['ctx']['error']}"
    # A section's own words (PydanticCustomError), which come without a page of pydantic's, say more than the limits.
    limits = _limits(_schema_at(kind, given, path)) if "url" in error else ""
    message = error["msg"].removeprefix("Input should be ")
    expected = f"a number {limits}" if limits else message[:1].lower() + message[1:]
    shown = name if isinstance(value, dict) else f"{name}={value!r}"
    return f"{shown}: expected {expected}"


def _one_of(options: list[str], given: str) -> str:
    return f"expected one of {', '.join(options)}{nearest(given, options)}"


@cache
def _schema(kind: TypeAdapter[Any]) -> dict[str, Any]:
    return kind.json_schema()


def _schema_at(kind: TypeAdapter[Any], given: Any, path: Iterable[str]) -> Any:
    """The part of the schema that describes the value at `path`; the kind of a section decides what is in it."""
    document = _schema(kind)
    node: Any = _resolve(document, document, given)
    for key in path:
        given = given.get(key) if isinstance(given, dict) else None
        node = _resolve(node.get("properties", {}).get(key, {}), document, given)
    return node


def _resolve(node: Any, document: Any, given: Any) -> Any:
    """The node itself, or the section that it refers to."""
    sections = [option for option in node.get("anyOf", []) if "$ref" in option or "discriminator" in option]
    if len(sections) == 1:  # a section that may be left out
        node = sections[0]
    if "discriminator" in node:
        mapping = node["discriminator"]["mapping"]
        kind = given.get("kind") if isinstance(given, dict) else None
        node = {"$ref": mapping.get(kind, node["oneOf"][0]["$ref"])}  # without a kind: the first in the code
    if "$ref" in node:
        node = document["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


_LIMITS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


def _limits(node: Any) -> str:
    for option in (node, *node.get("anyOf", [])):
        found = [f"{word} {option[key]:g}" for key, word in _LIMITS.items() if key in option]
        if found:
            return " and ".join(found)
    return ""


def nearest(word: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` if one of the options is close to the word, else nothing."""
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def allow_code() -> None:
    """Let recipes run the functions that they name, in this process and in those that it starts.

    A recipe is a document that people pass on, and so is the folder of a run; a function that it names runs with all
    rights of whoever opens it. So none is run before somebody has said that it may: with this, with `--allow-code` on
    the command line, or with CONFIDE_ALLOW_CODE=1 in the environment.

    Returns:
        Nothing.

    Examples:
        >>> import confide
        >>> confide.allow_code()
    """
    os.environ[CODE_ENV] = "1"


def imported(name: str, field: str) -> Any:
    """What `module:function` names, installed or in a file of the current folder; a UserError says what is missing."""
    if os.environ.get(CODE_ENV) != "1":
        raise UserError(
            f"{field}={name}: this names code, which would run with all of your rights; it did not run. If you "
            f"know and trust {name.split(':')[0]}, add --allow-code (in Python: confide.allow_code())"
        )
    module, function = name.split(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed program does not look where it was called
        sys.path.append(here)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{field}={name}: {error}; run in the folder that has {module.split('.')[0]}.py, or install it"
        ) from error
    except Exception as error:
        raise _broken(field, name, error) from error
    _say_what_runs(field, name, getattr(found, "__file__", None))
    try:
        return getattr(found, function)
    except AttributeError as error:
        raise UserError(f"{field}={name}: {module} has no {function}") from error


@contextmanager
def running(field: str, name: str) -> Iterator[None]:
    """Say of what code of one's own raises which code it is, and in which line."""
    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as error:
        raise _broken(field, name, error) from error


def _broken(field: str, name: str, error: Exception) -> UserError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({Path(last.filename).name}, line {last.lineno})"
    return UserError(f"{field}={name} raised {type(error).__name__}: {error}{where}; mend that code, and start again")


@cache
def _say_what_runs(field: str, name: str, file: str | None) -> None:
    """Once for each name, and not again in every worker."""
    if parent_process() is None:
        print(f"running code that the recipe names: {field}={name} ({file or 'built in'})", file=sys.stderr)
