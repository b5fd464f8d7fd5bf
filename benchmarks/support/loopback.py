"""A federation of real processes on this machine: server and clients, over TLS, for tests and measurements.

Every process runs a `confide` command with its own memory and its own connection (`support.warm`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType

from confide.deploy import keys
from confide.errors import UserError
from support import warm


class Loopback:
    """`with Loopback(folder, clients=3) as here`: keys in `folder/keys`, the run in `folder/run`, logs beside them."""

    def __init__(self, folder: Path, clients: int, users: int | None = None) -> None:
        self.folder, self.run = folder.resolve(), folder.resolve() / "run"
        keys.make(folder / "keys", clients, ["127.0.0.1"], users)
        self.port = free_port()
        self.server: ForkServerProcess | None = None
        self.clients: dict[int, ForkServerProcess] = {}
        self.first: Callable[[str], Sequence[Callable[[], None]]] = lambda name: ()
        """What a process does before its command, by its name."""
        self._begun: list[ForkServerProcess] = []

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._begun:
            process.kill()
            process.join()

    def confide(self, *words: object, log: str) -> ForkServerProcess:
        """Start `confide ...`; what it says goes to the end of a file."""
        process = warm.start(*words, folder=self.folder, out=self.log(log), first=self.first(log))
        self._begun.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def serve(self, recipe: object, *words: object) -> ForkServerProcess:
        """Start the server, or go on with its run."""
        place = ("--out", self.run, "--keys", self.folder / "keys", "--listen", f"127.0.0.1:{self.port}")
        self.server = self.confide("deploy", "server", recipe, *place, *words, log="server")
        return self.server

    def relay(self, recipe: object, users: Sequence[int], *words: object) -> ForkServerProcess:
        """Start a relay for the last users, with keys in `folder/below`, or start it again; `below` starts clients."""
        place = self.folder / "below"
        if not place.exists():
            keys.add(self.folder / "keys", "relay", users)
            keys.make(place, len(users), ["127.0.0.1"], first=users[0])
            self.below_port = free_port()
        up = ("--server", f"127.0.0.1:{self.port}", "--ca", self.folder / "keys" / keys.CA)
        own = ("--key", self.folder / "keys" / "relay", "--keys", place, "--listen", f"127.0.0.1:{self.below_port}")
        return self.confide("deploy", "relay", recipe, *up, *own, "--wait-for", len(users), *words, log="relay")

    def below(self, number: int, user: int) -> ForkServerProcess:
        """Start a client of the relay."""
        place, address = self.folder / "below", f"127.0.0.1:{self.below_port}"
        policy = self.policy(user, servers=[{"address": address, "authority": keys.fingerprint(place / keys.CA)}])
        own = ("--ca", place / keys.CA, "--key", place / f"client-{number}", "--policy", policy, "--user", user)
        self.clients[user] = self.confide("deploy", "client", "--server", address, *own, log=f"client-{user}")
        return self.clients[user]

    def policy(self, number: int, **decided: object) -> Path:
        """Write a client's policy: it takes part in everything, but for what is given."""
        path = self.folder / f"policy-{number}.yaml"
        authority = keys.fingerprint(self.folder / "keys" / keys.CA)
        made = {
            "servers": [{"address": f"127.0.0.1:{self.port}", "authority": authority}],
            "state": f"state-{number}", "trust": "central", "noise_multiplier": 1e-9, "epsilon": 1e9, "delta": 1e-5,
            "population": {"least": 1, "most": 1_000_000}, "rehearsal": True, "roster": f"keys/{keys.FEDERATION}",
        }  # fmt: skip
        path.write_text(json.dumps(made | decided))
        return path

    def client(self, number: int, users: Sequence[int], *words: object, **decided: object) -> ForkServerProcess:
        """Start a client with its own key and policy; `words` are its recipe and further options."""
        words = (*words, "--policy", self.policy(number, **decided))
        place = ("--server", f"127.0.0.1:{self.port}", "--ca", self.folder / "keys" / keys.CA)
        own = ("--key", self.folder / "keys" / f"client-{number}", "--users", ",".join(map(str, users)))
        self.clients[number] = self.confide("deploy", "client", *words, *place, *own, log=f"client-{number}")
        return self.clients[number]

    def steps(self) -> int:
        """Steps that the run has recorded."""
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self, done: Callable[[], bool], seconds: float = 400.0) -> None:
        """Until something is so, or the server has ended."""
        ends = time.monotonic() + seconds
        while not done() and self.server is not None and self.server.is_alive():
            for number, client in self.clients.items():
                if client.exitcode is not None and client.exitcode > 0:
                    raise UserError(f"client {number} failed:\n{self.log(f'client-{number}').read_text()}")
            if time.monotonic() > ends:
                raise UserError(f"the federation took more than {seconds:g} s:\n{self.log('server').read_text()}")
            time.sleep(0.02)

    def finish(self, seconds: float = 400.0) -> None:
        """Wait for the end of the run."""
        self.wait(lambda: False, seconds)
        if self.server is None or self.server.exitcode != 0:
            raise UserError(f"the server failed:\n{self.log('server').read_text()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
