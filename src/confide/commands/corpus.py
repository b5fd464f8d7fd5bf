"""`confide corpus`: what there is to train on, and how much each speaker says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.commands.options import Json, OpensRecipes
from confide.commands.printing import counts, print_json, print_table
from confide.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

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
Folder = Annotated[Path | None, typer.Option(help="Its folder; without it, its usual name in the folder CONFIDE_DATA.")]
Subset = Annotated[str | None, typer.Option(help="Which part: LS-960, dev-clean, train, test, CV-en-train-10 ...")]
Lang = Annotated[str | None, typer.Option("--language", help="en, fr or de, where a corpus has more than one.")]
Share = Annotated[
    int | None, typer.Option(help="Percent of the speakers; shares N and 100 - N split them without overlap.")
]
Iid = Annotated[bool, typer.Option("--iid", help="The control: give each utterance to a user drawn uniformly.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of the kind, as often as you like."),
]
Picture = Annotated[Path | None, typer.Option("--figure", help="Write histograms over the speakers to this PNG file.")]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Decode every file: finds those that break off in the middle.")
]
Shown = Annotated[int, typer.Option("--skipped", min=0, help="How many skipped utterances to name; JSON has all.")]


@app.command("list")
def list_kinds(as_json: Json = False) -> None:
    """Which kinds of corpus there are, and what each of them can be given."""
    from confide.runs.corpus_choice import corpus_kinds, own_fields_first
    from confide.speech.corpora.settings import SpeakerSettings

    kinds = corpus_kinds()
    if as_json:
        settings = {kind: {key: own.description for key, own in own_fields_first(kinds[kind])} for kind in kinds}
        print_json({kind: {"about": _about(model), "settings": settings[kind]} for kind, model in kinds.items()})
        return
    for kind, model in kinds.items():
        shared = SpeakerSettings.model_fields if issubclass(model, SpeakerSettings) else {}
        typer.echo(f"{kind}: {_about(model)}")
        _show_settings([(key, field) for key, field in own_fields_first(model) if key not in shared])
        typer.echo("")
    also = [kind for kind, model in kinds.items() if issubclass(model, SpeakerSettings)]
    typer.echo(f"Also for {', '.join(also)}:")
    _show_settings(own_fields_first(SpeakerSettings))


@app.command(cls=OpensRecipes)
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
    from confide.runs.corpus_choice import check_corpus, parse_setting, read_with_bar
    from confide.speech.statistics import statistics

    given = {"folder": folder, "subset": subset, "language": language, "share": share, "users": "iid" if iid else None}
    document = {key: value for key, value in given.items() if value is not None}
    document.update(parse_setting(word) for word in settings or [])
    if figure is not None and figure.suffix.lower() != ".png":
        raise UserError(f"--figure {figure}: expected a file whose name ends in .png")
    corpus = read_with_bar(check_corpus(kind, document), thorough)
    measured = statistics(corpus)
    if figure is not None:
        from confide.report.figures.corpus import draw_corpora

        draw_corpora(figure, [measured])
    if as_json:
        left_out = [{"id": item.id, "reason": item.reason} for item in corpus.skipped]
        print_json({**measured.to_json(), "skipped_utterances": left_out})
        return
    _show(measured)
    for item in corpus.skipped[:skipped]:
        typer.echo(f"  skipped {item.id}: {item.reason}")
    if len(corpus.skipped) > skipped:
        typer.echo(f"  {len(corpus.skipped) - skipped} more were skipped; --json names all of them")
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _show_settings(fields: list[tuple[str, Any]]) -> None:
    for key, field in fields:
        value = "none" if field.default is None else field.default
        default = "required" if field.is_required() else f"default {value:{'g' if isinstance(value, float) else ''}}"
        typer.echo(f"    {key} ({default}): {field.description}")


def _show(measured: Statistics) -> None:
    from confide.speech.statistics import TABLE_2

    summaries = {"minutes": measured.minutes, "utterances": measured.samples, "words": measured.spoken}
    rows = []
    for name, own in summaries.items():
        values = (own.mean, own.deviation, own.minimum, own.median, own.maximum)
        rows.append((name, *(f"{value:,.2f}" for value in values)))
    paper = TABLE_2.get(measured.name)
    if paper is not None:
        minutes = (f"{paper.mean:g}", f"{paper.deviation:g}", f"{paper.minimum:g}", "", f"{paper.maximum:,g}")
        rows.append(("minutes, paper", *minutes))
    title = f"{measured.name}: {measured.speakers:,} speakers, {measured.hours:,.2f} h, {measured.words:,} words"
    print_table(("per speaker", "mean", "deviation", "min", "median", "max"), rows, title=title, width=80)
    if measured.damaged:
        typer.echo(
            f"normalising changes texts: {counts(measured.damaged)} (utterances each). Digits become words with "
            "task.numbers: spell; other letters need task.letters"
        )
    if measured.damaged is None:
        typer.echo(f"there is no token set for {measured.language}; a recipe needs its letters in task.letters")
    if paper is not None:
        typer.echo(f"the paper has {paper.speakers:,} speakers and {paper.hours:,g} h")
    left_out, reasons = sum(measured.skipped.values()), counts(measured.skipped)
    typer.echo(f"{measured.utterances:,} utterances used, {left_out:,} skipped{f' ({reasons})' if reasons else ''}")


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())
