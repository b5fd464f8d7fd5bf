"""A speech corpus that a command names: its settings checked, and read with a bar on a terminal."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from confide.errors import UserError
from confide.settings import nearest, read_override, validate
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
        raise UserError(
            f"no kind of corpus is called {kind!r}; expected one of {', '.join(kinds)}{nearest(kind, kinds)}"
        )
    settings, problems = validate(TypeAdapter(kinds[kind]), document, whole=kind)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"these settings do not fit the corpus {kind}:\n{listed}")
    return settings  # type: ignore[no-any-return]


def parse_setting(word: str) -> tuple[str, Any]:
    """What --set KEY=VALUE says."""
    keys, value = read_override(word, "key=value, such as share=90")
    return ".".join(keys), value


def read_with_bar(settings: CorpusSettings, thorough: bool = False) -> Corpus:
    """Read with a bar on a terminal; a large corpus has a million headers."""
    from rich.console import Console
    from rich.progress import Progress

    from confide.speech.corpora.listing import decode_all

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("headers", total=None)

        def advance(done: int, total: int) -> None:
            if done % 64 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        corpus = read_corpus(settings, advance)
        if thorough:
            bar.update(task, description="audio", completed=0)
            corpus = decode_all(corpus, advance)
    return corpus
