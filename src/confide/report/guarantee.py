"""The statement of a run as a section of its page: the promise, every adversary, and the whole curve."""

from __future__ import annotations

import html
from collections.abc import Iterator

from confide.privacy import wording
from confide.privacy.accountant import shown
from confide.privacy.guarantee import Statement
from confide.report.charts import Chart, Line
from confide.report.shell import Cell, facts, table


def section(stated: Statement | str) -> list[str]:
    """What a run promises, to whom, against whom and what not; nothing where it promises nothing."""
    if isinstance(stated, str) or stated.epsilon is None:
        return []
    rows: list[list[Cell]] = [
        [
            each.said,
            "nothing is stated" if each.epsilon is None else shown(each.epsilon),
            f"{each.adjacency}{wording.other_data(each)}",
            each.because,
        ]
        for each in stated.adversaries
    ]
    return [
        "<h2 id=guarantee>Guarantee</h2>",
        "<p class=soft>From the ledger alone. <code>confide guarantee</code> prints it, and checks this folder "
        "against it.</p>",
        facts(_facts(stated)),
        "<h3 style='margin-top:1.2rem'>Against whom</h3>",
        f"<div class=scroll>{table(['who', 'epsilon', 'neighbours', 'because'], rows, sortable=False)}</div>",
        f"<div class=charts style='margin-top:1rem'>{curve(stated).svg()}<div>",
        *(_listed(title, lines) for title, lines in wording.sections(stated) if title.startswith("What is ")),
        "</div></div>",
    ]


def curve(stated: Statement) -> Chart:
    """Epsilon over delta; the delta of the run is marked."""
    deltas = [point.delta for point in stated.profile]
    return Chart(
        "the privacy profile",
        "Epsilon over delta, against whoever sees the models; every point is an upper bound. "
        f"{wording.gaussian(stated)} Dotted: the delta that is stated.",
        [Line("epsilon", deltas, [point.epsilon for point in stated.profile])],
        x="delta", log_x=True, from_zero=True, marks=() if stated.delta is None else (stated.delta,),
    )  # fmt: skip


def _facts(stated: Statement) -> Iterator[tuple[str, str]]:
    both = {"PLD": stated.epsilon_pld, "RDP": stated.epsilon_rdp}
    yield "a user is", f"{stated.unit.name}. {stated.unit.said}"
    yield "neighbours", f"{stated.adjacency or 'this ledger does not say'}: {stated.neighbours}"
    yield "epsilon", ", ".join(f"{shown(value)} by {name}" for name, value in both.items() if value is not None)
    yield "delta", f"{stated.delta:g}"
    if stated.mu is not None:
        yield "Gaussian-DP", f"mu {shown(stated.mu.value)}{'' if stated.mu.exact else ', of the points of the curve'}"
    yield "sampling", wording.sampling(stated)
    yield "releases", f"{stated.releases:,} over {stated.steps:,} central steps"


def _listed(title: str, lines: list[str]) -> str:
    if title == "What is promised":
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h3>{html.escape(title)}</h3><ul>{items}</ul>"
