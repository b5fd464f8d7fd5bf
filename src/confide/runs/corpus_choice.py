"""A speech corpus that a command names: its settings checked, and read with a bar on a terminal."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from confide.errors import UserError
from confide.speech.corpora import CorpusSettings, read_corpus
from confide.speech.corpus import Corpus


def corpus_kinds() -> dict[str, type[BaseModel]]:
    """The settings of each kind of corpus, by its name."""
    models = get_args(get_args(CorpusSettings)[0])
    return {model.model_fields["kind"].default: model for model in models}


def own_fields_first(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """The settings of a kind: its own first, those that all kinds have last."""
    own = model.__annotations__
    fields = [(key, field) for key, field in model.model_fields.items() if key != "kind"]
    return sorted(fields, key=lambda item: item[0] not in own)


def check_corpus(kind: str, document: dict[str, Any]) -> CorpusSettings:
    """The settings of a kind, with every mistake in one message."""
    kinds = corpus_kinds()
    if kind not in kinds:
        close = get_close_matches(kind, kinds, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"no kind of corpus is called {kind!r}; expected one of {', '.join(kinds)}{hint}")
    try:
        settings: Any = kinds[kind].model_validate(document)
    except ValidationError as error:
        problems = "\n".join(f"  - {_explain(kinds[kind], kind, problem)}" for problem in error.errors())
        raise UserError(f"these settings do not fit the corpus {kind}:\n{problems}") from None
    return settings  # type: ignore[no-any-return]


def parse_setting(word: str) -> tuple[str, Any]:
    """What --set KEY=VALUE says."""
    import yaml

    from confide.recipe import read_yaml

    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {word!r} is not of the form key=value")
    try:
        return key.strip(), read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {word!r}: the value is not valid YAML: {error}") from None


def read_with_bar(settings: CorpusSettings, thorough: bool = False) -> Corpus:
    """Read with a bar on a terminal; a large corpus has a million headers."""
    from rich.console import Console
    from rich.progress import Progress

    from confide.speech.corpora.listing import verified

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("headers", total=None)

        def advance(done: int, total: int) -> None:
            if done % 64 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        corpus = read_corpus(settings, advance)
        if thorough:
            bar.update(task, description="audio", completed=0)
            corpus = verified(corpus, advance)
    return corpus


def _explain(model: type[BaseModel], kind: str, problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or kind
    if problem["type"] == "extra_forbidden":
        return f"{where}: {kind} has no such setting; it has {', '.join(key for key, _ in own_fields_first(model))}"
    if problem["type"] == "missing":
        return f"{where}: required ({model.model_fields[where].description})"
    expected = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    given = f"{where}={problem['input']}" if problem["loc"] else where
    return f"{given}: expected {expected}"
