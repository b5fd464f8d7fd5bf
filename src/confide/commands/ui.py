"""`confide ui`: the page to explore. Heavy imports happen only where they are used."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from confide.errors import UserError

_TOKEN = "CONFIDE_UI_TOKEN"


def ui(
    folder: Annotated[
        Path | None, typer.Argument(help="Runs under this folder are shown.", show_default="runs")
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond this machine: 0.0.0.0; then a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """A page on this machine: plan privacy with sliders, look at runs while they go, try models.

    It listens on this machine only, and needs no network. With --host it can be reached from others: the address that
    is printed then holds a token (or set CONFIDE_UI_TOKEN), and what passes is not encrypted: use a tunnel (ssh -L).

    Example: `confide ui runs`
    """
    from confide.ui import planning
    from confide.ui.server import make_server
    from confide.ui.shelf import Shelf

    if folder is None:  # who has no run yet can plan
        folder = Path("runs")
    elif not folder.exists():
        raise UserError(
            f"there is no folder {folder}; expected one with runs in it. Train one there first, such as `confide train "
            f"convex/digits --out {folder / 'first'}`, or leave the folder out to plan without any"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; expected a folder with runs in it")
    server = make_server(Shelf(folder), host, port, os.environ.get(_TOKEN))
    print(f"open {server.url} (Ctrl-C ends it)", flush=True)
    threading.Thread(target=planning.warm, daemon=True).start()
    if browser and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(server.url)
    server.run()
    print("ended", file=sys.stderr)
