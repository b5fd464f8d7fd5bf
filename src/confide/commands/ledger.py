"""`confide ledger`: what privacy a run spent."""

from __future__ import annotations

from confide.commands.options import Folder, Json
from confide.commands.printing import print_json


def ledger(run: Folder, as_json: Json = False) -> None:
    """Recompute the privacy spent from a run's ledger alone, and check every line of it."""
    from confide.privacy.accountant import shown
    from confide.privacy.mechanisms.base import AS_PUBLIC, NOT_COVERED
    from confide.privacy.trust.server_view import against_server
    from confide.runs import folder

    found = folder.check_ledger(run)
    if as_json:
        print_json(found)
        return
    if found["delta"] is None:
        print(f"{found['releases']} releases: no privacy guarantee")
        return
    print(
        f"every line is in order: {found['releases']} releases over {found['steps']} central steps\n"
        f"epsilon {shown(found['epsilon'])} at delta {found['delta']:g} ({found['accountant'].upper()}, "
        f"{found['adjacency']})"
    )
    if "epsilon_server" in found:
        print(f"that is against whoever sees the models alone; {against_server(found)}")
    if found["begins_elsewhere"]:
        print(f"it does not cover {NOT_COVERED}")
    if "public_weights" in found:
        print(f"it takes as public {AS_PUBLIC}")
    if not found["for_release"]:
        print("the noise was seeded: repeatable, for research; not for a release to others")
