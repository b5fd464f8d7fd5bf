"""The frame of every page: one HTML file with style and script in it, which asks nothing of any server.

The content policy in its head makes the browser refuse any request that a mistake could let out.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

RELOAD = 10
"""Seconds after which the page of a run under way is loaded again."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@cache
def asset(name: str) -> str:
    """A file that comes with the package."""
    return (files("confide.report") / "assets" / name).read_text(encoding="utf-8")


def document(title: str, body: Iterable[str], home: str = "", refresh: bool = False) -> str:
    """A whole page. `home` is where its link back leads, and `refresh` has it loaded again while a run goes on."""
    again = f"<meta http-equiv=refresh content={RELOAD}>" if refresh else ""
    back = f"<p class=back><a href='{html.escape(home, True)}'>&#8592; All runs</a></p>" if home else ""
    return "\n".join(
        [
            f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>",
            '<meta name=viewport content="width=device-width,initial-scale=1">',
            f'<meta http-equiv=Content-Security-Policy content="{POLICY}">',
            f"{again}<style>{asset('page.css')}</style></head><body><main>{back}",
            *body,
            f"</main><script>{asset('page.js')}</script></body></html>\n",
        ]
    )


def card(label: str, big: str, *sentences: str, kind: str = "") -> str:
    """A headline; the sentences are HTML. `kind` is a word of the scale of epsilon, which has a colour."""
    said = "".join(f"<p>{sentence}</p>" for sentence in sentences if sentence)
    top = f"<div class=label>{html.escape(label)}</div><div class='big {kind}'>{html.escape(big)}</div>"
    return f"<div class=card>{top}{said}</div>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    body = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table class=facts><tbody>{body}</tbody></table>"


Cell = str | tuple[float, str] | tuple[float, str, str]
"""Text, or a number with how it is shown, and perhaps a word of the scale of epsilon: numbers sort as numbers."""


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], sortable: bool = True) -> str:
    """A table that a click on a head sorts."""
    rows = list(rows)
    numeric = [bool(rows) and all(isinstance(row[i], tuple) for row in rows) for i in range(len(heads))]
    top = "".join(
        f"<th scope=col{' class=n' if n else ''}>"
        + (f"<button type=button>{html.escape(head)}</button>" if sortable else html.escape(head))
        + "</th>"
        for head, n in zip(heads, numeric, strict=True)
    )
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table{' class=sortable' if sortable else ''}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, tuple):
        kind = f"'n {cell[2]}'" if len(cell) == 3 else "n"
        return f"<td class={kind} data-v={cell[0]!r}>{html.escape(cell[1])}</td>"
    return f"<td>{html.escape(cell)}</td>"
