"""A corpus as a user asks for it: a kind and settings in, checked settings and the corpus itself out.

`confide corpus` and `confide evaluate --corpus` both come through here, so that they refuse the same mistakes.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from confide.errors import UserError
from confide.speech.corpora import CorpusSettings, read_corpus
from confide.speech.corpora.listing import verified
from confide.speech.corpus import Corpus


def corpus_kinds() -> dict[str, type[BaseModel]]:
    """The settings of each kind of corpus, by the kind's name."""
    models = get_args(get_args(CorpusSettings)[0])
    return {model.model_fields["kind"].default: model for model in models}


def kind_settings(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """A kind's own settings first, what all kinds have last."""
    own = model.__annotations__
    fields = [(key, field) for key, field in model.model_fields.items() if key != "kind"]
    return sorted(fields, key=lambda item: item[0] not in own)


def check_settings(kind: str, document: dict[str, Any]) -> CorpusSettings:
    """The settings of a kind, or every mistake in them in one message."""
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
    """Key and value of `--set key=value`."""
    from confide.recipe import read_yaml

    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {word!r} is not of the form key=value")
    try:
        return key.strip(), read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {word!r}: the value is not valid YAML: {error}") from None


def read_with_bar(settings: CorpusSettings, thorough: bool = False) -> Corpus:
    """Read a corpus, with a bar on a terminal since a large one has a million headers; `thorough` decodes all audio."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("headers", total=None)

        def show(done: int, total: int) -> None:
            if done % 64 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        corpus = read_corpus(settings, show)
        if thorough:
            bar.update(task, description="audio", completed=0)
            corpus = verified(corpus, show)
    return corpus


def _explain(model: type[BaseModel], kind: str, problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or kind
    if problem["type"] == "extra_forbidden":
        return f"{where}: {kind} has no such setting; it has {', '.join(key for key, _ in kind_settings(model))}"
    if problem["type"] == "missing":
        return f"{where}: required ({model.model_fields[where].description})"
    expected = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    given = f"{where}={problem['input']}" if problem["loc"] else where
    return f"{given}: expected {expected}"
