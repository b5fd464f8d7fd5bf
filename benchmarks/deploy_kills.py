"""SIGKILL a process of a deployment at a random instant, start it again, and see the run to its end.

python benchmarks/deploy_kills.py [--kills 100] [--steps 40] [--seed 0]

Every kill is a deployment of its own, of processes over TLS: a server, a relay with two clients behind it and a client
beside it (central trust); three clients (local); or five (distributed), of whom four are asked: a client answers no
more often than a run has steps, so one that is in every cohort has no answer left for a round that was lost. One of
them gets SIGKILL at an instant drawn uniformly from the time that an undisturbed run takes, and the same command is
given again. A run passes if it ends by itself with all its steps; if its ledger never, right after the kill and at the
end, has fewer releases than there are steps; if, with local trust, every client's own budget has a line for each answer
in the model; and, with central trust and a client or the relay killed, if the model is that of the undisturbed run
byte for byte.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from confide.privacy.budget import Budget
from confide.runs import folder
from kills import releases, steps_done
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
    killed: bool
    under_counts: int


def run(place: Path, trust: str, steps: int, role: str = "", instant: float = 0.0) -> Ending:
    """A whole run, in which whoever has this role is killed at the instant."""
    relayed, users = trust == "central", {"central": 3, "local": 3, "distributed": 5}[trust]
    place.mkdir()
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE.format(users=users, cohort=min(users, 4), trust=trust, steps=steps))
    terms = ("--wait-for", users, "--minimum", MINIMUM[trust], "--deadline", 60, "--tries", 9)
    with Loopback(place, 1 if relayed else users) as here:
        starts: dict[str, Callable[[], ForkServerProcess]] = {
            "relay": lambda: here.relay(recipe, [1, 2], "--deadline", 60),
            "client of the relay": lambda: here.below(0, 1),
            "other": lambda: here.below(1, 2),
            "client": lambda: here.client(0, [0]),
            **{f"client {n}": lambda n=n: here.client(n, [n]) for n in range(1, users)},  # type: ignore[misc]
            "server": lambda: here.serve(recipe, *terms),
        }
        own = [name for name in starts if (name in (*ROLES["central"], "other")) == relayed or name in ROLES["local"]]
        began, under = time.monotonic(), 0
        begun = {name: starts[name]() for name in own}
        killed = bool(role) and waits(begun["server"], began + instant)
        if killed:
            begun[role].kill()
            begun[role].join()
            under += releases(here.run) < steps_done(here.run)
            starts[role]()
        here.finish(120)
        under += releases(here.run) < steps_done(here.run)
        if trust == "local" and role != "server":  # each answer in the model is in its client's own budget
            for path in place.glob("state-*/budget.jsonl"):
                under += len(Budget.read(path).charges) < steps - (role == "client")
    model = (here.run / folder.MODEL).read_bytes()
    return Ending(model, folder.summary_of(here.run)["steps"], time.monotonic() - began, killed, under)


def waits(server: ForkServerProcess, until: float) -> bool:
    """Wait for an instant; whether the run was still going on then."""
    server.join(max(until - time.monotonic(), 0))
    return server.is_alive()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--kills", type=int, default=100)
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    sys.exit(0 if measure(given.kills, given.steps, random.Random(given.seed)) else 1)


def measure(kills: int, steps: int, chance: random.Random) -> bool:
    """Kill so often; whether every run ended as it should."""
    began, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="confide-kills-") as name:
        place = Path(name)
        straight = {trust: run(place / trust, trust, steps) for trust in ROLES}
        for trust, ending in straight.items():
            print(f"{trust}: an undisturbed run takes {ending.seconds:.1f} s", flush=True)
        turns = itertools.cycle([(trust, role) for trust, roles in ROLES.items() for role in roles])
        while counts["kills"] < kills:
            trust, role = next(turns)
            instant = chance.uniform(0, straight[trust].seconds)
            ending = run(place / str(counts.total()), trust, steps, role, instant)
            if not ending.killed:  # the run was over before
                counts["too late"] += 1
                continue
            promised = trust == "central" and role != "server"
            counts += Counter(kills=1, ended=ending.steps == steps)
            counts += Counter({"under-counts": ending.under_counts, f"{role} ({trust})": 1})
            counts += Counter(promised=promised, same=promised and ending.model == straight[trust].model)
            print(f"{counts['kills']:4} {trust}, {role} after {instant:.1f} s: {ending.seconds:.1f} s", flush=True)
    print(f"{dict(counts)}\n{time.monotonic() - began:.0f} s")
    return counts["ended"] == kills and not counts["under-counts"] and counts["same"] == counts["promised"]


if __name__ == "__main__":
    main()
