"""The statement of a run's folder: made from its ledger, and held against what the rest of the folder says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.files import check_plain
from confide.privacy import ledger
from confide.privacy.guarantee import EXAMPLES, STARTING_MODEL, Statement, statement
from confide.privacy.ledger import Ledger
from confide.runs import checkpoint

SUMMARY, PUBLISHED = "summary.json", "guarantee.json"


def summary_of(folder: Path) -> dict[str, Any]:
    check_plain(folder)
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    return summary


def summary_if_finished(folder: Path) -> dict[str, Any] | None:
    return summary_of(folder) if (folder / SUMMARY).exists() else None


def stated(folder: Path, curve: bool = True) -> Statement:
    """Make the statement of a run from its ledger, which has to be as long as the checkpoint says."""
    check_plain(folder)
    book = Ledger.read(folder / ledger.FILE)
    if (folder / checkpoint.FILE).exists():
        check_tail(folder, book, checkpoint.load(folder))
    if (folder / PUBLISHED).exists():
        _check_published(folder, book)
    return statement(book, curve)


def _check_published(folder: Path, book: Ledger) -> None:
    """A published folder has no checkpoint: its statement remembers how the ledger ended."""
    try:
        head = json.loads((folder / PUBLISHED).read_text())["ledger_head"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / PUBLISHED} cannot be read; expected the statement that was published") from None
    if head != book.head:
        raise UserError(
            f"{folder / ledger.FILE} does not end as {PUBLISHED} says: lines are missing at its end, or it is another "
            "ledger. The privacy spent cannot be stated from this file; get the published folder again"
        )


def check_ledger(folder: Path) -> dict[str, Any]:
    """Recompute what was spent from the ledger alone, and hold it against what the rest of the folder says."""
    return spent(stated(folder, curve=False))


def spent(found: Statement) -> dict[str, Any]:
    """The parts of a statement that a summary lists by themselves."""
    listed: dict[str, Any] = {
        "epsilon": found.epsilon,
        "delta": found.delta,
        "accountant": found.accountant,
        "adjacency": found.adjacency,
        "noise_source": found.noise.source,
        "for_release": found.noise.for_release,
        "releases": found.releases,
        "steps": found.steps,
        "last_hash": found.ledger_head,
        "begins_elsewhere": STARTING_MODEL in found.not_covered,
        "unit": found.unit.model_dump(),
    }
    if EXAMPLES in found.public:
        listed["public_weights"] = True
    if found.releases_of_a_user is not None:
        listed["epsilon_server"] = found.against("server")
        listed["epsilon_server_and_client"] = found.against("server and clients", 1)
        listed["releases_of_a_user"] = found.releases_of_a_user
    return listed


def differences(folder: Path, found: Statement) -> list[str]:
    """Say where a run's summary states something else than the ledger does; a summary may be older, and say less."""
    summary = summary_if_finished(folder)
    if summary is None:
        return []
    held = dict(summary.get("statement") or {})
    computed = found.model_dump(mode="json")
    old = bool(held) and held.get("version") != computed["version"]
    if old:  # other words, and less of them: every number in it has to be the same
        held = {name: value for name, value in held.items() if name not in ("version", "public", "not_covered")}
        for each in (held, computed):
            each["adversaries"] = [[one["who"], one["colluding"], one["epsilon"]] for one in each["adversaries"]]
    wrong = [name for name in sorted(held) if name not in computed or not _same(held[name], computed[name])]
    listed = spent(found) | {"ledger_head": found.ledger_head, "recipe": found.recipe}
    if "statement" in summary and not old:
        listed["guarantee"] = found.said
    wrong += [name for name in sorted(listed) if name in summary and not _same(summary[name], listed[name])]
    return [f"{folder / SUMMARY}: {name} is not what the ledger says" for name in dict.fromkeys(wrong)]


def _same(held: Any, computed: Any) -> bool:
    """Compare what JSON can hold; another version of an accountant may differ in the last digits."""
    if isinstance(held, dict) and isinstance(computed, dict):
        return held.keys() == computed.keys() and all(_same(held[key], computed[key]) for key in held)
    if isinstance(held, list) and isinstance(computed, list):
        return len(held) == len(computed) and all(map(_same, held, computed))
    if isinstance(held, float) and isinstance(computed, float):
        return math.isclose(held, computed, rel_tol=1e-6)
    return bool(held == computed)


def check_tail(folder: Path, book: Ledger, saved: checkpoint.Saved) -> None:
    """The checkpoint remembers how long the ledger was: lines missing at the end would be an under-count."""
    if book.count < saved.ledger_count:
        raise UserError(
            f"{folder / ledger.FILE} has {book.count} releases but the checkpoint was written after "
            f"{saved.ledger_count}; lines are missing at its end. The privacy spent cannot be stated from this file"
        )
    if saved.ledger_head not in book.heads:
        raise UserError(f"{folder / ledger.FILE} is not the ledger that the checkpoint was written with")
    unpaid = [step for step in range(saved.state.step) if step not in book.latest]
    if unpaid or saved.state.step < 0:
        raise UserError(
            f"{folder / checkpoint.FILE} is of step {saved.state.step}, but {folder / ledger.FILE} has no line for "
            f"step {unpaid[0] if unpaid else 0}: a checkpoint is never ahead of its ledger. Put back the "
            "two that belong together"
        )
