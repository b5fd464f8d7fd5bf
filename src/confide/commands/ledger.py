"""`confide ledger`: what privacy a run spent."""

from __future__ import annotations

from confide.commands.options import Folder, Json
from confide.commands.printing import print_json


def ledger(run: Folder, as_json: Json = False) -> None:
    """Recompute the privacy spent from a run's ledger alone, and check every line of it."""
    from confide.privacy import wording
    from confide.runs.stated import spent, stated

    found = stated(run, curve=False)
    if as_json:
        print_json(spent(found))
        return
    if found.epsilon is None:
        print(f"{found.releases} releases: no privacy guarantee")
        return
    print(f"every line is in order: {found.releases} releases over {found.steps} central steps")
    print(f"{found.said} ({found.accountant.upper()}, {found.adjacency})")
    print(found.unit.said)
    if not found.noise.for_release:
        print(wording.SEEDED)
