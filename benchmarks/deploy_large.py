"""A large model over TLS between processes on this machine: time against plain gRPC, and memory.

python benchmarks/deploy_large.py [--parameters 255000000] [--repeat 2]

Three measurements, one after the other, all with the same certificates and messages of 1 MiB:

* plain gRPC: a handler of grpc.aio sends as many bytes as the model has, and reads as many back; nothing looks at them;
* the wire: a server's streams and a client that sends back what it gets, so gate, parcels and arrays, but no round;
* a round: `confide deploy server` and a client whose training hardly takes time; the server checks, bounds and adds.

Memory is the largest that a process was seen to have, in copies of the model, with what Python and PyTorch take. 255
million parameters need 8 GB of memory; 540 million are above what one message of gRPC can hold, and go the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from confide.bench.compare import peak_mib
from confide.deploy import keys
from confide.deploy.address import Access, Address
from confide.deploy.hub import Hub
from confide.deploy.link import Came, Reply
from confide.deploy.node import live
from confide.deploy.parcels import Parcel
from confide.deploy.wire import LARGEST, PART
from confide.runs import folder
from support.loopback import Loopback
from support.streams import Echo

RECIPE = """\
task: {{kind: bench/vector, parameters: {parameters}, users: 1}}
sampling: {{kind: fixed, cohort: 1}}
local: {{steps: 1, learning_rate: 0.1}}
bounding: {{rule: clip, bound: 0.5}}
privacy: {{mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}}
central: {{kind: sgd, learning_rate: 1}}
evaluation: {{every: 1000000}}
run: {{steps: 1}}
"""
OPTIONS = [("grpc.max_receive_message_length", LARGEST)]


def plain_server(place: Path, size: int, pipe: Connection) -> None:
    """Send so many bytes and read as many, and say how long that took."""

    async def serve() -> None:
        done = asyncio.get_running_loop().create_future()

        async def stream(_: object, context: Any) -> None:
            began, part = time.perf_counter(), bytes(PART)
            for _ in range(size // PART):
                await context.write(part)
            for _ in range(size // PART):
                await context.read()
            done.set_result(time.perf_counter() - began)

        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", {"Echo": handler}),))
        pair, root = keys.read_pair(place / keys.SERVER_KEY, place / keys.SERVER), (place / keys.CA).read_bytes()
        pipe.send(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], root, True)))
        await server.start()
        pipe.send(await done)
        await server.stop(5)

    asyncio.run(serve())


def plain_client(place: Path, size: int, port: int) -> None:
    async def ask() -> None:
        root, pair = (place / keys.CA).read_bytes(), keys.read_pair(place / "client-0")
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root, *pair), OPTIONS
        ) as channel:
            call, part = channel.stream_stream("/plain/Echo")(), bytes(PART)
            for _ in range(size // PART):
                await call.read()
            for _ in range(size // PART):
                await call.write(part)
            await call.done_writing()
            await call.code()

    asyncio.run(ask())


def wire_server(place: Path, size: int, pipe: Connection) -> None:
    """Ask a client for what it is sent, through the server's own streams."""
    listening = Address("127.0.0.1", 0).listen()
    hub = Hub(listening, place)
    hub.arrays = size
    pipe.send(listening.getsockname()[1])
    while not any(isinstance(event, Came) for event in hub.events(60)):
        pass
    began = time.perf_counter()
    hub.ask("echo", [("client-0", Parcel({}, {"model": np.zeros(size // 4, np.float32)}))], 3600)
    replies = list[Reply]()
    while not replies:
        replies += [event for event in hub.events(60) if isinstance(event, Reply)]
    took = time.perf_counter() - began
    if replies[0].parcel is None:
        raise SystemExit(replies[0].error)
    pipe.send(took)
    hub.close()


class Large(Echo):
    arrays = 1 << 33


def wire_client(place: Path, size: int, port: int) -> None:
    access = Access(Address("127.0.0.1", port), place / keys.CA, place / "client-0")
    asyncio.run(live(access, Large(), 5))


def pair(server: Callable[..., None], client: Callable[..., None], size: int) -> tuple[float, dict[str, float]]:
    """Run a server and a client as processes; seconds, and the most memory that each had."""
    context, peaks = get_context("spawn"), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="confide-large-") as name:
        place = Path(name) / "keys"
        keys.make(place, 1, ["127.0.0.1"])
        here, there = context.Pipe()
        begun: dict[str, BaseProcess] = {"server": context.Process(target=server, args=(place, size, there))}
        begun["server"].start()
        begun["client"] = context.Process(target=client, args=(place, size, here.recv()))
        begun["client"].start()
        while not here.poll(0.05):
            watch(peaks, begun)
        took = float(here.recv())
        watch(peaks, begun)
        for process in begun.values():
            process.kill()
            process.join()
    return took, peaks


def watch(peaks: dict[str, float], processes: dict[str, Any]) -> None:
    for name, process in processes.items():
        peaks[name] = max(peaks.get(name, 0.0), peak_mib(process.pid or 0) or 0.0)


def whole_round(parameters: int) -> tuple[float, dict[str, float]]:
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place, Loopback(Path(place), 1) as here:
        path = here.folder / "recipe.yaml"
        path.write_text(RECIPE.format(parameters=parameters))
        begun = {"client": here.client(0, [0], path)}
        begun["server"] = here.serve(path, "--wait-for", 1, "--minimum", 1, "--deadline", 36_000)

        def done() -> bool:
            watch(peaks, begun)
            return not begun["server"].is_alive()

        here.wait(done, 36_000)
        here.finish(600)
        times = json.loads((here.run / folder.TIMES).read_text().splitlines()[0])
    return float(times["train"]), peaks


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--parameters", type=int, default=255_000_000)
    words.add_argument("--repeat", type=int, default=2, help="of the first two, in turn; the shortest counts")
    given = words.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed memory is given back at once
    size = given.parameters * 4 // PART * PART
    print(f"a model of {size / 2**20:,.0f} MiB, down and up", flush=True)
    plain, wire = list[float](), list[tuple[float, dict[str, float]]]()
    for _ in range(given.repeat):
        plain.append(pair(plain_server, plain_client, size)[0])
        wire.append(pair(wire_server, wire_client, size))
        print(f"plain gRPC {plain[-1]:.1f} s, the wire {wire[-1][0]:.1f} s", flush=True)
    floor, (quickest, peaks) = min(plain), min(wire, key=lambda each: each[0])
    took, in_round = whole_round(given.parameters)
    print(f"plain gRPC: {floor:.1f} s, {2 * size / floor / 1e6:,.0f} MB/s")
    for name, seconds, most in (("the wire", quickest, peaks), ("a round", took, in_round)):
        copies = ", ".join(f"{who} {peak / (size / 2**20):.1f} copies" for who, peak in sorted(most.items()))
        print(f"{name}: {seconds:.1f} s, {seconds / floor:.2f} times plain gRPC; at most {copies}")


if __name__ == "__main__":
    main()
