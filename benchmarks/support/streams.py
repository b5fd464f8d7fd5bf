"""A hub and clients over TLS in this process, without rounds: what the streams themselves do, for tests and attacks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.gate import Limits
from confide.deploy.hub import Hub
from confide.deploy.link import Reply
from confide.deploy.node import live
from confide.deploy.parcels import Parcel


class Echo:
    """A client that sends back what it gets."""

    arrays = 1 << 26

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        return parcel


class Streams:
    """`with Streams(folder, clients=3) as here`: keys in `folder/keys`, a hub, and a loop in which clients live."""

    def __init__(self, folder: Path, clients: int, limits: Limits | None = None) -> None:
        self.keys = folder / "keys"
        keys.make(self.keys, clients, ["127.0.0.1"])
        self.listening = Address("127.0.0.1", 0).listen()
        self.address = Address("127.0.0.1", self.listening.getsockname()[1])
        self.hub = Hub(self.listening, self.keys, limits)
        self.hub.arrays = Echo.arrays
        self.said: list[str] = []
        self.lives: dict[str, Future[None]] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Streams:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in self.lives.values():
            each.cancel()
        self.hub.close()
        self.listening.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def access(self, name: str = "client-0") -> Access:
        return Access(self.address, self.keys / keys.CA, self.keys / name)

    def start(self, name: str) -> None:
        """Have a client connect, and wait until it is there."""
        self.lives[name] = self.run(live(self.access(name), Echo(), 30, self.said.append))
        self.until(lambda: name in self.hub._sessions)

    def run(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self.loop)

    def ask(self, *names: str, seconds: float = 10.0, parcel: Parcel | None = None) -> list[Reply]:
        """Ask clients, and wait for all their replies."""
        return self.replies(
            *self.hub.ask("echo", [(name, parcel or Parcel()) for name in names], seconds), seconds=seconds
        )

    def replies(self, *tickets: int, seconds: float = 60.0) -> list[Reply]:
        """Wait for the replies to some questions."""
        left, found, ends = set(tickets), [], time.monotonic() + seconds
        while left and time.monotonic() < ends:
            for event in self.hub.events(ends - time.monotonic()):
                if isinstance(event, Reply) and event.ticket in left:
                    left.discard(event.ticket)
                    found.append(event)
        return found

    def until(self, so: Callable[[], bool], seconds: float = 20.0) -> None:
        ends = time.monotonic() + seconds
        while not so():
            assert time.monotonic() < ends, f"not so after {seconds:g} s; said {self.said[-5:]}"
            time.sleep(0.01)
