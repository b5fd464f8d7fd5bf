"""Hostile messages at a server's port, with and without a key, while rounds go on: none may count, none may cost one.

python benchmarks/deploy_hostile.py [--messages 500] [--json]

The server is a process with its own streams, rounds and TLS. Three honest clients take part; a fourth and a fifth, with
keys of the federation, answer every question by something that is no answer, one as a client and one as a relay; and
others knock without a key. `support.attacks` has the kinds. Nothing was accepted if the model is, byte for byte, that
of a run of the three alone; a round is lost if any of the three is missing in it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from confide.build import make_loop, make_task
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.audit import CanaryClient
from confide.deploy.deployment import remote_engine
from confide.deploy.gate import Limits
from confide.deploy.hub import Hub
from confide.deploy.node import live
from confide.deploy.policy import accepting
from confide.deploy.remote import Remote, Terms
from confide.recipe import Recipe, load
from support.attacks import AS_CLIENT, AS_RELAY, WITHOUT_KEY, Hostile, knock

HONEST, CLIENT, RELAY = 3, 3, 4
KNOCKS = 7
"""Messages without a key in each round, beside one of each hostile key."""


def recipe(rounds: int) -> Recipe:
    return load(
        "convex/quadratics",
        ["task={kind: convex/quadratics, users: 5, dimension: 50, rank: 3}", "sampling={kind: fixed, cohort: 5}",
         "bounding={rule: clip, bound: 1}", f"run.steps={rounds}",
         "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}"],
    )  # fmt: skip


def serve(wanted: Recipe, folder: Path, pipe: Connection) -> None:
    """Make a step for each word on the pipe, and say what became of it."""
    torch.set_num_threads(1)
    listening = Address("127.0.0.1", 0).listen()
    pipe.send(listening.getsockname()[1])

    def engine(wanted: Recipe, task: Any, plan: Any) -> Any:
        hub = Hub(listening, folder, Limits(seconds=3))
        return remote_engine(wanted, task, plan, hub, hub.registry, Terms(deadline=60, minimum=0.6, tries=1), HONEST)

    loop = make_loop(wanted, remote=engine)
    state, held = loop.start(), cast(Remote, loop.engine)
    held.say = lambda text: None
    while asked(held, pipe):
        tally = loop.step(state).tally
        answered = tally.users - tally.not_finite
        digest = hashlib.sha256(state.parameters.numpy().tobytes()).hexdigest()
        pipe.send((answered, digest, resident(), dict(held.link.meter.turned_away)))
    loop.engine.close()
    listening.close()


def asked(held: Remote, pipe: Connection) -> bool:
    """Meet whoever comes, until a word is on the pipe."""
    while not pipe.poll():
        held.look(0.02)
    return bool(pipe.recv())


def resident() -> float:
    """MiB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


async def honest(wanted: Recipe, address: Address, folder: Path) -> list[asyncio.Task[None]]:
    task, lives = make_task(wanted.task, wanted.run.seed), []
    for user in range(HONEST):
        member = CanaryClient(wanted, task, [user], accepting(folder / "state"), lambda text: None)
        access = Access(address, folder / keys.CA, folder / f"client-{user}")
        lives.append(asyncio.create_task(live(access, member, 600)))
    return lives


async def attack(wanted: Recipe, address: Address, folder: Path, pipe: Connection, rounds: int, kinds: bool) -> Any:
    """Rounds with hostile messages, or without any; the last digest, lost rounds, memory, and messages by kind."""
    lives, sent, lost, memory, digest = await honest(wanted, address, folder), Counter[str](), 0, list[float](), ""
    hostile, knocks = list[Hostile](), list[asyncio.Task[None]]()
    if kinds:
        task = make_task(wanted.task, wanted.run.seed)
        for user, ways in ((CLIENT, AS_CLIENT), (RELAY, AS_RELAY)):
            member = CanaryClient(wanted, task, [user], accepting(folder / "state"), lambda text: None)
            access = Access(address, folder / keys.CA, folder / f"client-{user}")
            hostile.append(Hostile(access, member, ways, sent, relay=user == RELAY))
            lives.append(asyncio.create_task(hostile[-1].live()))
    names, turned = itertools.cycle(WITHOUT_KEY), dict[str, int]()
    for number in range(rounds):
        for each in hostile:
            await each.ready()
        for _ in range(KNOCKS if kinds else 0):
            knocks.append(asyncio.create_task(knock(next(names), address, folder, sent)))
        await asyncio.gather(*knocks[:-20])  # the others are still there while the round goes on
        pipe.send(True)
        while not await asyncio.to_thread(pipe.poll, 1.0):
            pass
        answered, digest, used, turned = pipe.recv()
        lost += answered != HONEST
        memory.append(used)
        if kinds and number % 20 == 0:
            print(f"round {number + 1}: {sent.total()} messages, {used:.1f} MiB", flush=True)
    pipe.send(False)
    for life in lives:
        life.cancel()
    await asyncio.gather(*lives, return_exceptions=True)
    return digest, lost, memory, sent, turned


def measure(rounds: int, start: Callable[..., Any], place: Path, kinds: bool = True) -> Any:
    """A federation of its own. `start` makes a process or a thread of the server."""
    wanted, folder = recipe(rounds), place / ("hostile" if kinds else "alone")
    keys.make(folder, 5, ["127.0.0.1"])
    if kinds:  # a key of another authority, one that no list has, and the server's own as if it were a client's
        keys.make(place / "strange", 1, ["127.0.0.1"])
        keys._give(folder, keys._Authority.read(folder), "unknown", None, 1)
        (folder / "both.pem").write_bytes((folder / keys.SERVER_KEY).read_bytes() + (folder / keys.SERVER).read_bytes())
    here, there = multiprocessing.Pipe()
    server = start(target=serve, args=(wanted, folder, there), daemon=True)
    server.start()
    address = Address("127.0.0.1", here.recv())
    found = asyncio.run(attack(wanted, address, folder, here, rounds, kinds))
    server.join(20)
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--messages", type=int, default=500)
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    rounds, start = -(-given.messages // (KNOCKS + 2)), multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory(prefix="confide-hostile-") as place:
        alone, *_ = measure(rounds, start, Path(place), kinds=False)
        digest, lost, memory, sent, turned = measure(rounds, start, Path(place))
    third = max(rounds // 3, 1)
    found = {
        "messages": sent.total(), "kinds": len(sent), "accepted": int(digest != alone), "rounds": rounds, "lost": lost,
        "memory_mib": [round(max(memory[:third]), 1), round(max(memory[-third:]), 1)], "turned_away": turned,
    }  # fmt: skip
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
