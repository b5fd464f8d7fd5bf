"""`confide cache`: what is kept on this machine beside runs, and how to be rid of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json
from confide.commands.printing import print_json, print_table

app = typer.Typer(
    no_args_is_help=True,
    help="What is kept beside runs: features and states (personal data, if the recordings are), voices, encoders.",
)
Place = Annotated[
    Path | None, typer.Option(help="A folder of features and states that a recipe names (task.cache), not the cache.")
]


@app.command("list")
def list_(place: Place = None, as_json: Json = False) -> None:
    """List what is kept, where, how large it is, and when it was last used.

    Example: `confide cache list`
    """
    from datetime import UTC, datetime

    from confide.encoders.held import KINDS, held
    from confide.files import cache_folder

    found, folder = held(place), place or cache_folder()
    if as_json:
        print_json({"folder": str(folder), "kept": [one.to_json() for one in found]})
        return
    rows = [
        (one.kind, f"{one.bytes / 1e6:,.1f}", datetime.fromtimestamp(one.used, UTC).strftime("%Y-%m-%d"), one.path.name)
        for one in found
    ]
    print_table(("kind", "MB", "last used", "name"), rows, width=90, overflow="fold")
    print(f"{sum(one.bytes for one in found) / 1e6:,.1f} MB in {folder}")
    for kind in sorted({one.kind for one in found}):
        print(f"{kind}: {KINDS[kind]}")


@app.command()
def clear(
    kind: Annotated[str | None, typer.Option(help="Only this kind: kept, voices, encoders or kernels.")] = None,
    older_than: Annotated[float, typer.Option(min=0, help="Only what was not used for so many days.")] = 0.0,
    place: Place = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what is kept. Features, states and voices are made again when a run wants them, encoders fetched again.

    Example: `confide cache clear --kind kept --older-than 30 --yes`
    """
    from confide.encoders import held

    things = held.chosen(kind, older_than, place)
    size = sum(one.bytes for one in things)
    if things and not yes:
        typer.confirm(f"remove {len(things)} things with {size / 1e6:,.1f} MB?", abort=True)
    freed = held.clear(things)
    if as_json:
        print_json({"removed": [one.to_json() for one in things], "bytes": freed})
    else:
        print(f"removed {len(things)} things with {freed / 1e6:,.1f} MB")


@app.command()
def limit(
    gigabytes: Annotated[float, typer.Argument(min=0, help="How much may stay.")],
    place: Place = None,
    as_json: Json = False,
) -> None:
    """Remove features and states, those not used for longest first, until so much is left.

    What was used within the hour stays. Runs keep to CONFIDE_CACHE_GB (64) by themselves.

    Example: `confide cache limit 20`
    """
    from confide.encoders import held

    freed = held.limit(gigabytes, place)
    if as_json:
        print_json({"bytes": freed})
    else:
        print(f"removed {freed / 1e6:,.1f} MB")
