"""`confide corpus`: what there is to train on, and how much each speaker says. Heavy imports only where used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from confide.speech.corpora import CorpusSettings
    from confide.speech.corpus import Corpus
    from confide.speech.statistics import Statistics

app = typer.Typer(
    no_args_is_help=True,
    help="""Speech corpora: which kinds there are, and how much each speaker says. A user is a speaker.

\b
  confide corpus list
  confide corpus stats librispeech --folder /data/LibriSpeech --subset LS-100 --figure ls100.png
  confide corpus stats common_voice --folder /data/cv-corpus-13.0-2023-03-09 --subset CV-fr-train-10
  confide corpus stats folder --folder recordings --thorough
""",
)

Kind = Annotated[str, typer.Argument(help="One of those that `confide corpus list` shows.", show_default=False)]
Folder = Annotated[Path | None, typer.Option(help="Where it lies; else its usual name in the folder CONFIDE_DATA.")]
Subset = Annotated[str | None, typer.Option(help="Which part: LS-960, dev-clean, train, test, CV-en-train-10 ...")]
Lang = Annotated[str | None, typer.Option("--language", help="en, fr or de, where a corpus has more than one.")]
Share = Annotated[
    int | None, typer.Option(help="Percent of the speakers; N and 100 - N have no speaker in common, and miss none.")
]
Iid = Annotated[bool, typer.Option("--iid", help="The control: give each utterance to a user drawn uniformly.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of the kind, as often as you like."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
Picture = Annotated[Path | None, typer.Option("--figure", help="Write histograms over the speakers to this PNG file.")]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Decode every file: finds those that break off in the middle.")
]
Shown = Annotated[int, typer.Option("--skipped", min=0, help="How many skipped utterances to name; JSON has all.")]


@app.command("list")
def list_kinds(as_json: Json = False) -> None:
    """Which kinds of corpus there are, and what each of them can be given."""
    kinds = _kinds()
    if as_json:
        described = {
            kind: {"about": _about(model), "settings": {key: field.description for key, field in _fields(model)}}
            for kind, model in kinds.items()
        }
        _print_json(described)
        return
    from confide.speech.corpora.settings import SpeakerSettings

    for kind, model in kinds.items():
        shared = SpeakerSettings.model_fields if issubclass(model, SpeakerSettings) else {}
        typer.echo(f"{kind}: {_about(model)}")
        _show_settings([(key, field) for key, field in _fields(model) if key not in shared])
        typer.echo("")
    also = [kind for kind, model in kinds.items() if issubclass(model, SpeakerSettings)]
    typer.echo(f"Also for {', '.join(also)}:")
    _show_settings(_fields(SpeakerSettings))


@app.command()
def stats(
    kind: Kind,
    folder: Folder = None,
    subset: Subset = None,
    language: Lang = None,
    share: Share = None,
    iid: Iid = False,
    settings: Sets = None,
    as_json: Json = False,
    figure: Picture = None,
    thorough: Thorough = False,
    skipped: Shown = 10,
) -> None:
    """Speakers, hours, minutes and utterances per speaker, as in PFL-ASR's Table 2 and Figure 1.

    Reads only the headers of the files, unless --thorough is given. Whatever cannot be used is counted and named:
    audio longer than 30 s (max_seconds), empty text, files that are missing, truncated or no audio.
    """
    given = {"folder": folder, "subset": subset, "language": language, "share": share, "users": "iid" if iid else None}
    document = {key: value for key, value in given.items() if value is not None}
    for word in settings or []:
        key, value = _setting(word)
        document[key] = value
    if figure is not None and figure.suffix.lower() != ".png":
        raise UserError(f"--figure {figure}: expected a file whose name ends in .png")
    corpus = _read(_checked(kind, document), thorough)

    from confide.speech.statistics import statistics

    counts = statistics(corpus)
    if figure is not None:
        from confide.report.figures.corpus import draw_corpora

        draw_corpora(figure, [counts])
    if as_json:
        left_out = [{"id": item.id, "reason": item.reason} for item in corpus.skipped]
        _print_json({**counts.to_json(), "skipped_utterances": left_out})
        return
    _show(counts)
    for item in corpus.skipped[:skipped]:
        typer.echo(f"  skipped {item.id}: {item.reason}")
    if len(corpus.skipped) > skipped:
        typer.echo(f"  {len(corpus.skipped) - skipped} more were skipped; --json names all of them")
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _show_settings(fields: list[tuple[str, Any]]) -> None:
    for key, field in fields:
        default = "required" if field.is_required() else f"default {_plain(field.default)}"
        typer.echo(f"    {key} ({default}): {field.description}")


def _kinds() -> dict[str, type[BaseModel]]:
    from typing import get_args

    from confide.speech.corpora import CorpusSettings

    models = get_args(get_args(CorpusSettings)[0])
    return {model.model_fields["kind"].default: model for model in models}


def _checked(kind: str, document: dict[str, Any]) -> CorpusSettings:
    """The settings of a kind, with every mistake in one message."""
    from pydantic import TypeAdapter

    from confide.settings import nearest, validate

    kinds = _kinds()
    if kind not in kinds:
        raise UserError(
            f"no kind of corpus is called {kind!r}; expected one of {', '.join(kinds)}{nearest(kind, kinds)}"
        )
    settings, problems = validate(TypeAdapter(kinds[kind]), document, whole=kind)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"these settings do not fit the corpus {kind}:\n{listed}")
    return settings  # type: ignore[no-any-return]


def _setting(word: str) -> tuple[str, Any]:
    from confide.settings import read_override

    keys, value = read_override(word, "key=value")
    return ".".join(keys), value


def _read(settings: CorpusSettings, thorough: bool) -> Corpus:
    """Read with a bar on a terminal; a large corpus has a million headers."""
    from rich.console import Console
    from rich.progress import Progress

    from confide.speech.corpora import read_corpus
    from confide.speech.corpora.listing import verified

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("headers", total=None)

        def said(done: int, total: int) -> None:
            if done % 64 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        corpus = read_corpus(settings, said)
        if thorough:
            bar.update(task, description="audio", completed=0)
            corpus = verified(corpus, said)
    return corpus


def _show(counts: Statistics) -> None:
    from rich.console import Console
    from rich.table import Table

    from confide.speech.statistics import TABLE_2

    title = f"{counts.name}: {counts.speakers:,} speakers, {counts.hours:,.2f} h, {counts.words:,} words"
    table = Table(title=title)
    for name in ("per speaker", "mean", "deviation", "min", "median", "max"):
        table.add_column(name, justify="left" if name == "per speaker" else "right")
    summaries = {"minutes": counts.minutes, "utterances": counts.samples, "words": counts.spoken}
    for name, own in summaries.items():
        values = (own.mean, own.deviation, own.minimum, own.median, own.maximum)
        table.add_row(name, *(f"{value:,.2f}" for value in values))
    paper = TABLE_2.get(counts.name)
    if paper is not None:
        minutes = (f"{paper.mean:g}", f"{paper.deviation:g}", f"{paper.minimum:g}", "", f"{paper.maximum:,g}")
        table.add_row("minutes, paper", *minutes)
    Console(width=max(Console().width, 80)).print(table)
    if paper is not None:
        typer.echo(f"the paper has {paper.speakers:,} speakers and {paper.hours:,g} h")
    reasons = ", ".join(f"{count:,} {kind}" for kind, count in counts.skipped.items())
    left_out = sum(counts.skipped.values())
    typer.echo(f"{counts.utterances:,} utterances used, {left_out:,} skipped{f' ({reasons})' if reasons else ''}")


def _fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """A kind's own settings first, what all kinds have last."""
    own = model.__annotations__
    fields = [(key, field) for key, field in model.model_fields.items() if key != "kind"]
    return sorted(fields, key=lambda item: item[0] not in own)


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    print()
