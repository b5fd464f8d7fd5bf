"""SIGKILL processes of a deployment at random instants, start them again, and see the run to its end.

python benchmarks/deploy_kills.py [--kills 100] [--each 4] [--steps 40] [--seed 0] [--fire server|client]

Every run is a deployment of its own, of processes over TLS: a server, a relay with two clients behind it and a client
beside it (central trust); three clients (local); or five (distributed), of whom four are asked: a client answers no
more often than a run has steps, so one that is in every cohort has no answer left for a round that was lost. One of
them gets up to `--each` SIGKILLs, at instants drawn uniformly from the time that an undisturbed run takes, and the
same command is given again after each.

A run passes if it ends by itself with all its steps; if no ledger, right after any kill and at the end, has fewer
lines than what anybody has seen; and, with central trust and a client or the relay killed, if the model is that of the
undisturbed run byte for byte. What was seen is noted by the clients and relays themselves, apart from the ledgers
(`support/sightings.py`): the server's has to have a line for each model that was sent to anybody and, where clients add
the noise, for each round in which one answered; a client's own has to have a line for each answer.

`--fire` shows that this can fail: a server, or a client, then forgets the line of one step in five, nobody is killed,
and the command is to say under-counts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from confide.runs import folder
from kills import releases, steps_done
from support import sightings
from support.loopback import Loopback

RECIPE = """\
task: {{kind: convex/quadratics, users: {users}, dimension: 6, rank: 3}}
sampling: {{kind: fixed, cohort: {cohort}}}
local: {{steps: 2, learning_rate: 0.1}}
bounding: {{rule: clip, bound: 1}}
privacy: {{mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: {trust}}}
central: {{kind: adam, learning_rate: 0.1}}
run: {{steps: {steps}}}
"""
ROLES = {
    "central": ("server", "relay", "client", "client of the relay"),
    "local": ("server", "client"),
    "distributed": ("server", "client"),
}
MINIMUM = {"central": 1, "local": 0, "distributed": 0}
"""With local noise an answer is given once, so one that was lost with its server is missing."""


@dataclass(frozen=True)
class Ending:
    """What became of a run."""

    model: bytes
    steps: int
    seconds: float
    kills: int
    under_counts: list[str]


def run(
    place: Path, trust: str, steps: int, role: str = "", instants: Sequence[float] = (), burning: str = ""
) -> Ending:
    """A whole run, in which whoever has this role is killed at the instants."""
    relayed, users = trust == "central", {"central": 3, "local": 3, "distributed": 5}[trust]
    place.mkdir()
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE.format(users=users, cohort=min(users, 4), trust=trust, steps=steps))
    terms = ("--wait-for", users, "--minimum", MINIMUM[trust], "--deadline", 60, "--tries", 9)
    with Loopback(place, 1 if relayed else users) as here:
        here.first = sightings.hooks(place, burning)
        starts: dict[str, Callable[[], ForkServerProcess]] = {
            "relay": lambda: here.relay(recipe, [1, 2], "--deadline", 60),
            "client of the relay": lambda: here.below(0, 1),
            "other": lambda: here.below(1, 2),
            "client": lambda: here.client(0, [0]),
            **{f"client {n}": lambda n=n: here.client(n, [n]) for n in range(1, users)},  # type: ignore[misc]
            "server": lambda: here.serve(recipe, *terms),
        }
        own = [name for name in starts if (name in (*ROLES["central"], "other")) == relayed or name in ROLES["local"]]
        began, under, kills = time.monotonic(), list[str](), 0
        begun = {name: starts[name]() for name in own}
        for instant in sorted(instants):
            begun["server"].join(max(began + instant - time.monotonic(), 0))
            if not begun["server"].is_alive():  # the run is over
                break
            begun[role].kill()
            begun[role].join()
            under += owed(here, trust)
            begun[role] = starts[role]()
            kills += 1
        if burning:  # it may find the fire itself, at its end
            here.wait(lambda: False, 240)
            return Ending(b"", 0, time.monotonic() - began, kills, owed(here, trust))
        here.finish(240)
        under += owed(here, trust)
    model = (here.run / folder.MODEL).read_bytes()
    return Ending(model, folder.summary_of(here.run)["steps"], time.monotonic() - began, kills, under)


def owed(here: Loopback, trust: str) -> list[str]:
    """What the ledgers have too little."""
    steps = steps_done(here.run)
    short = [f"{steps} steps, {releases(here.run)} lines"] if releases(here.run) < steps else []
    return short + sightings.under_counts(here.folder, here.run, trust)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("kills", 100), ("each", 4), ("steps", 40), ("seed", 0)):
        words.add_argument(f"--{name}", type=int, default=value)
    words.add_argument("--fire", choices=["server", "client"], default="")
    given = words.parse_args()
    if given.fire:
        sys.exit(burn(given.fire, given.steps))
    sys.exit(0 if measure(given.kills, given.each, given.steps, random.Random(given.seed)) else 1)


def burn(who: str, steps: int) -> int:
    """A run with a fire for each trust in which this process has a line of its own to forget; 1 if all were found."""
    with tempfile.TemporaryDirectory(prefix="confide-kills-") as place:
        found = {
            trust: run(Path(place) / trust, trust, steps, burning=who).under_counts
            for trust in ROLES
            if who == "server" or trust != "central"
        }
    for trust, said in found.items():
        print(f"{trust}, a {who} that forgets lines: {'; '.join(said) or 'NOTHING FOUND'}")
    return int(all(found.values()))


def measure(kills: int, each: int, steps: int, chance: random.Random) -> bool:
    """Kill so often; whether every run ended as it should."""
    began, counts, of = time.monotonic(), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="confide-kills-") as name:
        place = Path(name)
        run(place / "warm", "local", 1)  # the first process of all loads what the others are forked with
        straight = {trust: run(place / trust, trust, steps) for trust in ROLES}
        for trust, ending in straight.items():
            print(f"{trust}: an undisturbed run takes {ending.seconds:.1f} s", flush=True)
        counts["under-counts"] = sum(len(ending.under_counts) for ending in straight.values())
        turns = itertools.cycle([(trust, role) for trust, roles in ROLES.items() for role in roles])
        while counts["kills"] < kills:
            trust, role = next(turns)
            instants = [chance.uniform(0, straight[trust].seconds) for _ in range(min(each, kills - counts["kills"]))]
            ending = run(place / f"{counts['runs']}", trust, steps, role, instants)
            promised = trust == "central" and role != "server"
            counts.update(kills=ending.kills, runs=1, ended=ending.steps == steps)
            counts.update({"under-counts": len(ending.under_counts)})
            counts.update(promised=promised, same=promised and ending.model == straight[trust].model)
            of[f"{role} ({trust})"] += ending.kills
            when = ", ".join(f"{instant:.1f}" for instant in sorted(instants)[: ending.kills])
            print(f"{counts['kills']:4} {trust}, {role} at {when} s: ended after {ending.seconds:.1f} s", flush=True)
            for said in ending.under_counts:
                print(f"     UNDER-COUNT: {said}", flush=True)
    print(f"kills: {dict(of)}\n{dict(counts)}\n{time.monotonic() - began:.0f} s")
    return counts["ended"] == counts["runs"] and not counts["under-counts"] and counts["same"] == counts["promised"]


if __name__ == "__main__":
    main()
