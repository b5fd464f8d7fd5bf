"""`confide init`: looks at recordings or texts of one's own, and writes a recipe that fits them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json
from confide.errors import UserError

_EPSILON = "Epsilon (8 is moderate, 1 is strong, inf for none; Enter: 8, or none where people are too few)?"
_Column = "What this column of your table is called, if it has no usual name."


def init(
    data: Annotated[
        Path | None, typer.Argument(help="Folder or file with your recordings or texts; asked for on a terminal.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The recipe to write; a file that is there is refused.")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="What privacy to plan for; inf for none. Without it 8, or none where people are too few."),
    ] = None,
    language: Annotated[
        str, typer.Option(help="Of the recordings: en, fr or de, or another code with --letters.")
    ] = "en",
    letters: Annotated[
        str | None, typer.Option(help="Of that language, in lower case, each once: abcdefghijklmnñopqrstuvwxyzáéíóúü.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="The frozen encoder: a preset (`confide encoder list`), a folder, owner/name.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A run or model to begin with, such as a seed.")] = None,
    words: Annotated[
        str | None,
        typer.Option(
            help="Words or phrases that people say and everybody may know, with commas, or a file with one a line: "
            "simulated people say them first, by a second recipe. They are public with the model."
        ),
    ] = None,
    in_a_row: Annotated[int, typer.Option(min=1, max=50, help="How many of --words an utterance has at most.")] = 1,
    get: Annotated[bool, typer.Option("--get", help="Fetch the encoder now, if it is not there.")] = False,
    path_column: Annotated[str | None, typer.Option(help=_Column)] = None,
    speaker_column: Annotated[str | None, typer.Option(help=_Column)] = None,
    text_column: Annotated[str | None, typer.Option(help=_Column)] = None,
    label_column: Annotated[str | None, typer.Option(help=_Column)] = None,
    owner_column: Annotated[str | None, typer.Option(help=_Column)] = None,
    owners: Annotated[
        Literal["people", "others"] | None,
        typer.Option(help="Whether each owner of texts is one person: only then is a guarantee one for people."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at recordings or texts of your own, and write a recipe that fits them.

    It finds out the layout, counts people and hours, holds people out for the test, and chooses encoder, cohort, steps,
    batch, delta and noise, with a comment for each. It says so where people are too few, and how many would be enough.
    Where people say few words that are no secret, such as an application's commands, `--words` begins with simulated
    people who say them, which costs no privacy: a second recipe is for that.
    It opens headers of recordings and the first rows of tables, sends nothing anywhere, and overwrites nothing. With
    `--get` it fetches the encoder from its registry.

    Example: `confide init recordings --out mine.yaml --epsilon 8 --words yes,no,stop`
    """
    from confide.propose.look import Columns, look
    from confide.propose.proposal import propose
    from confide.propose.voices import Sayings, read_words

    asking = data is None
    if data is None:
        data = Path(_ask("Where are your recordings or texts (a folder or a file)?", "DATA"))
        if epsilon is None:
            answer = _ask(_EPSILON, "--epsilon", default="8 or none")
            epsilon = None if answer == "8 or none" else _read_epsilon(answer)
    out = out or Path(f"{data.expanduser().resolve().name.partition('.')[0] or 'mine'}.yaml")
    if epsilon is not None and not epsilon > 0:
        raise UserError(f"--epsilon {epsilon:g}: expected a number above 0, for example 8, or inf for no privacy")
    if out.exists():
        raise UserError(f"{out} is there already, and nothing is overwritten; give another --out")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it, or give another --out")
    said = None if words is None else Sayings(read_words(words), in_a_row)
    found = look(data, Columns(path_column, speaker_column, text_column, label_column, owner_column), language)
    if found.owner is not None and owners is None and asking:
        answer = _ask(f"Is each {found.owner} one person (y or n)?", "--owners", default="n")
        owners = "people" if answer.strip().lower() in ("y", "yes") else "others"
    made = propose(found, out.stem, epsilon, encoder, start, letters or "", said, owners)
    first = None if made.start is None else out.with_name(f"{out.stem}-start.yaml")
    if first is not None and first.exists():
        raise UserError(
            f"{first} is there already, and nothing is overwritten; give another --out, or leave --words out"
        )
    for warning in made.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _write(out, made.text)
    if first is not None:
        _write(first, made.start or "")
    if get:
        _fetch(made.encoder)
    commands = _next_commands(out, first, made.encoder, made.epsilon is not None)
    if as_json:
        print_json({
            "recipe": str(out), "start": None if first is None else str(first), "found": made.found,
            "people": made.people, "epsilon": made.epsilon, "encoder": made.encoder,
            "warnings": list(made.warnings), "next": commands,
        })  # fmt: skip
        return
    print(f"found: {made.found}")
    for line in made.said:
        print(f"  {line}")
    print(f"wrote {out}{'' if first is None else f' and {first}'}; next:")
    for command in commands:
        print(f"  {command}")


def _ask(question: str, option: str, default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise UserError(
            f"{option} was not given, and there is no terminal to ask on; `confide init --help` has the options"
        )
    return str(typer.prompt(question, default=default))


def _read_epsilon(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"epsilon {text!r}: expected a number above 0, for example 8, or inf for no privacy") from None


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{out} is there already, and nothing is overwritten; give another --out") from None
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose another place") from None


def _fetch(encoder: str) -> None:
    from confide.encoders.presets import PRESETS, install

    chosen = PRESETS.get(encoder)
    if chosen is not None and not chosen.installed:
        print(f"fetching {encoder} with {chosen.client} ({chosen.megabytes} MB)", file=sys.stderr, flush=True)
        install(chosen)


def _next_commands(out: Path, first: Path | None, encoder: str, private: bool) -> list[str]:
    """What leads from the recipe to a file for other programs; only a private model may leave."""
    from confide.encoders.presets import PRESETS
    from confide.propose.voices import run_of

    run = f"runs/{out.stem}"
    chosen = PRESETS.get(encoder)
    get = [chosen.command] if chosen is not None and not chosen.installed else []
    begin = [] if first is None else [f"confide train {first} --out {run_of(out.stem)}"]
    train, evaluate = f"confide train {out} --out {run}", f"confide evaluate {run}"
    if not private:
        return [*get, *begin, train, evaluate, f"confide export {run} --out {out.stem}.onnx"]
    published = f"published/{out.stem}"
    release = [f"confide publish {run} {published}", f"confide export {published} --out {out.stem}.onnx"]
    train += " --set privacy.source=system"  # at its end it says what evaluate would
    return [*get, *begin, train, *release] if begin else [*get, train, evaluate, *release]
