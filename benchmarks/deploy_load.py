"""How many clients one server holds, what they cost it while nothing happens, and how long a round over some takes.

python benchmarks/deploy_load.py [--clients 2000] [--cohort 200] [--rounds 5] [--trust central] [--idle 20] [--json]
    [--hostile 5] [--lost 0.01]

The server is a process with its own streams, rounds and TLS. Clients are what `confide deploy client` runs, each with a
key and a connection of its own, many of them in each of a few processes; they train 50 parameters, and keep no ledgers.
`idle_cpu` is the share of one core that the server uses while all are connected and none is asked.

With distributed trust `--hostile` users deal or give bad shares, and `--lost` (a share of the others) fail in every
round when they should send what they have masked. It is an error if a round does not end, or if others than the hostile
users are excluded, or not all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from confide.build import make_loop, make_task
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.audit import CanaryClient
from confide.deploy.deployment import remote_engine
from confide.deploy.gate import Limits
from confide.deploy.hub import Hub
from confide.deploy.node import live
from confide.deploy.parcels import Parcel
from confide.deploy.policy import accepting
from confide.deploy.remote import JOIN, Terms
from confide.privacy.trust.roster import Roster
from confide.privacy.trust.secure import MASKED, SHARES, UNMASK
from confide.recipe import Recipe, load


def recipe(clients: int, cohort: int, rounds: int, trust: str) -> Recipe:
    return load(
        "convex/quadratics",
        [f"task={{kind: convex/quadratics, users: {clients}, dimension: 50, rank: 3}}",
         f"sampling={{kind: fixed, cohort: {cohort}}}", "bounding={rule: clip, bound: 1}",
         f"privacy={{mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: {trust}}}",
         f"run.steps={rounds}"],
    )  # fmt: skip


def damaged(kind: str, said: dict[str, Any]) -> None:
    if kind == SHARES:
        said["boxes"] = [bytes(len(box)) for box in said["boxes"]]


def false_commitment(kind: str, said: dict[str, Any]) -> None:
    if kind == SHARES:
        said["commitment"] = bytes(32)


def false_shares(kind: str, said: dict[str, Any]) -> None:
    if kind == UNMASK:
        said["shares"] = [bytes(len(share)) for share in said["shares"]]


def lost(kind: str, said: dict[str, Any]) -> None:
    if kind == MASKED:
        raise ConnectionError("it is lost")


BAD = damaged, false_commitment, false_shares
Way = Callable[[str, dict[str, Any]], None]


def ways_of(clients: int, hostile: int, share: float) -> dict[int, Way]:
    """How each user who does not answer as it should behaves instead."""
    ways: dict[int, Way] = {user: BAD[user % len(BAD)] for user in range(hostile)}
    return ways | {clients - 1 - number: lost for number in range(round(share * clients))}


class One:
    """A client for one user; those of a process share the memory that they train in."""

    def __init__(
        self, member: CanaryClient, user: int, lock: threading.Lock, roster: Roster, way: Way | None = None
    ) -> None:
        self.member, self.user, self.lock, self.arrays, self.roster = member, user, lock, member.arrays, roster
        self.way = way

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        with self.lock:
            self.member.roster = lambda: self.roster
            made = self.member.answer(kind, parcel)
            arrays = {name: array.copy() for name, array in made.arrays.items()}
        facts = {**made.facts, "users": [self.user]} if kind == JOIN else dict(made.facts)
        if self.way is not None:
            self.way(kind, facts)
        return Parcel(facts, arrays)


def simulate(wanted: Recipe, users: list[int], address: Address, folder: Path, ways: dict[int, Way]) -> None:
    torch.set_num_threads(1)
    task = make_task(wanted.task, wanted.run.seed)
    member = CanaryClient(wanted, task, users, accepting(folder / "state"), lambda text: None)
    lock, known = threading.Lock(), keys.read(folder).roster().keys

    async def all_of_them() -> None:
        lives = []
        for user in users:
            access = Access(address, folder / keys.CA, folder / f"client-{user}")
            roster = Roster(known, keys.read_private(folder / f"client-{user}"))
            lives.append(asyncio.create_task(live(access, One(member, user, lock, roster, ways.get(user)), 600)))
            await asyncio.sleep(0.005)
        await asyncio.gather(*lives)

    asyncio.run(all_of_them())


def serve(wanted: Recipe, folder: Path, clients: int, idle: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    listening = Address("127.0.0.1", 0).listen()
    pipe.send(listening.getsockname()[1])
    began = time.monotonic()

    def engine(wanted: Recipe, task: Any, plan: Any) -> Any:
        hub = Hub(listening, folder, Limits(from_address=clients, in_all=clients))
        made = remote_engine(wanted, task, plan, hub, hub.registry, Terms(deadline=60), 1)
        made.say = lambda text: None
        made.wait_for(clients)
        return made

    loop = make_loop(wanted, remote=engine)
    joined = time.monotonic() - began
    time.sleep(2)
    used, since = time.process_time(), time.monotonic()
    time.sleep(idle)
    share = (time.process_time() - used) / (time.monotonic() - since)
    state, seconds, answered = loop.start(), list[float](), list[int]()
    while state.step < wanted.run.steps:
        at = time.monotonic()
        answered.append(loop.step(state).tally.users)
        seconds.append(round(time.monotonic() - at, 3))
    pipe.send({"joined_seconds": round(joined, 1), "idle_cpu": round(share, 4), "round_seconds": seconds,
               "answered": answered, "excluded": sorted(getattr(loop.engine, "excluded", {}))})  # fmt: skip
    loop.engine.close()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("clients", 2000), ("cohort", 200), ("rounds", 5), ("processes", 2)):
        words.add_argument(f"--{name}", type=int, default=value)
    words.add_argument("--trust", default="central", choices=["central", "distributed"])
    words.add_argument("--idle", type=float, default=20.0)
    words.add_argument("--hostile", type=int, default=0)
    words.add_argument("--lost", type=float, default=0.0)
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    if (given.hostile or given.lost) and given.trust != "distributed":
        words.error("--hostile and --lost are for --trust distributed")
    ways = ways_of(given.clients, given.hostile, given.lost)
    wanted = recipe(given.clients, given.cohort, given.rounds, given.trust)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="confide-load-") as place:
        folder = Path(place) / "keys"
        keys.make(folder, given.clients, ["127.0.0.1"])
        here, there = context.Pipe()
        begun = [context.Process(target=serve, args=(wanted, folder, given.clients, given.idle, there), daemon=True)]
        begun[0].start()
        address = Address("127.0.0.1", here.recv())
        for number in range(given.processes):
            users = list(range(number, given.clients, given.processes))
            begun.append(context.Process(target=simulate, args=(wanted, users, address, folder, ways), daemon=True))
            begun[-1].start()
        try:
            if not here.poll(900):
                raise SystemExit("the server did not finish within 900 s")
            found = {"clients": given.clients, "cohort": given.cohort, "trust": given.trust, **here.recv()}
        finally:
            for process in begun:
                process.kill()
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    if found["excluded"] != list(range(given.hostile)):
        raise SystemExit(f"users {found['excluded']} were excluded, and users 0 to {given.hostile - 1} are hostile")


if __name__ == "__main__":
    main()
