"""Flower's SuperLink as a process beside the server, and this process as the ServerApp that it serves.

The SuperLink listens for clients over gRPC with TLS and node authentication (the Fleet API), and for this process alone
over HTTPS on the loopback address. With `--isolation process` it starts no program of its own: this process registers
the clients' keys, submits a run, claims its ServerApp task with a secret that only it has, and talks through Flower's
`Grid`. The SuperLink holds nothing that has to survive: after a restart clients connect again and the run goes on from
its own folder. It ends when this process does, however that ends.

Differs from `flwr run`: the program is the one installed here, not one that travels in a bundle, so a client never runs
code that came over the network. The bundle that Flower wants for a run only names the application.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from confide.deploy import keys
from confide.deploy.keys import Federation
from confide.deploy.link import GridLink
from confide.deploy.parcels import Parcel
from confide.deploy.remote import Reply
from confide.errors import UserError

_START_SECONDS = 60.0
_CLAIMS = ("/flwr.proto.Runtime/AcquireTask",)
_APP = """\
[project]
name = "confide-deploy"
version = "1.0.0"
[tool.flwr.app]
publisher = "confide"
[tool.flwr.app.components]
serverapp = "confide.deploy.app:server"
clientapp = "confide.deploy.app:client"
"""


@dataclass(frozen=True)
class Address:
    """Where clients connect."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(f"address {text!r} is not of the form HOST:PORT, for example 0.0.0.0:9092")
        return Address(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class SuperLink:
    """The process and this one's connection to it, as a `Link` of parcels."""

    def __init__(self, address: Address, credentials: Path | None, federation: Federation | None, log: Path) -> None:
        """Without credentials everything is plain and anybody may join: for a closed test network only."""
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.credentials, self.log = credentials, log
        check_free(address)
        if credentials is not None:
            for name in (keys.SERVER, keys.CA):
                keys.check_certificate(credentials / name)
        self.here = f"127.0.0.1:{free_port()}"
        self.secret = secrets.token_bytes(32)
        self.process = _start(address, self.here, credentials, self.secret, log)
        try:
            self._wait()
            self.registry = self._register(federation) if federation is not None and credentials is not None else None
            self.grid, self.heart = self._run()
            self.link = GridLink(self.grid)
        except BaseException:
            self.process.terminate()
            raise

    def _connection(self) -> dict[str, Any]:
        root = None if self.credentials is None else (self.credentials / keys.CA).read_bytes()
        return {"server_address": self.here, "insecure": root is None, "root_certificates": root}

    def _wait(self) -> None:
        ends = time.monotonic() + _START_SECONDS
        host, _, port = self.here.rpartition(":")
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.05)
        tail = " / ".join(self.log.read_text(errors="replace").splitlines()[-5:])
        raise UserError(f"Flower's SuperLink did not start; the end of {self.log}: {tail}")

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(**self._connection(), interceptors=[version])

    def _register(self, federation: Federation) -> dict[int, tuple[int, ...]]:
        """Have the SuperLink know the clients' keys, and nobody else's: the users of each node."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        control, registry = self._control(), {}
        try:
            for node in federation.nodes:
                try:
                    public: Any = load_ssh_public_key(node.public_key.encode())
                    content = public_key_to_bytes(public)
                except (ValueError, TypeError) as error:
                    raise UserError(f"the public key of {node.name} cannot be read ({error})") from None
                registry[control.RegisterNode(RegisterNodeRequest(public_key=content)).node_id] = node.users
        finally:
            control.close()
        return registry

    def _run(self) -> tuple[HttpGrid, HeartbeatSender]:
        """Submit a run and become its ServerApp."""
        import hashlib

        content, _ = build_fab_from_files({"pyproject.toml": _APP.encode()})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        control = self._control()
        try:
            control.StartRun(StartRunRequest(fab=fab_to_proto(fab), federation=NOOP_FEDERATION_ID))
        finally:
            control.close()
        claims = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=_CLAIMS)
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        runtime = RuntimeHttpClient.from_server_address(**self._connection(), interceptors=[version, claims])
        try:
            task = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        finally:
            runtime.close()
        connection = self._connection()
        grid = HttpGrid(
            connection["server_address"], connection["insecure"], connection["root_certificates"], token=task.token
        )
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        heart = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
        heart.start()
        return grid, heart

    def nodes(self) -> set[int]:
        return self.link.nodes()

    def ask(self, kind: str, parcels: Sequence[tuple[int, Parcel]], seconds: float) -> list[str | None]:
        return self.link.ask(kind, parcels, seconds)

    def replies(self, tickets: Iterable[str]) -> list[Reply]:
        return self.link.replies(tickets)

    def close(self) -> None:
        for end in (self.heart.stop, self.grid.close):
            try:
                end()
            except Exception as error:  # nothing here has to survive
                logging.getLogger(__name__).debug("closing: %s", error)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _start(address: Address, here: str, credentials: Path | None, secret: bytes, log: Path) -> subprocess.Popen[bytes]:
    host, _, port = here.rpartition(":")
    words = ["--isolation", "process", "--host", host, "--port", port, "--fleet-api-address", str(address)]
    if credentials is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(credentials / keys.CA), "--ssl-certfile", str(credentials / keys.SERVER)]
        words += ["--ssl-keyfile", str(credentials / keys.SERVER_KEY), "--enable-supernode-auth"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "confide.deploy.beside", *words],
            stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},  # objects that were passed on are given back
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(secret)
    process.stdin.flush()  # it stays open: when it closes, this process has ended
    return process


def check_free(address: Address) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise UserError(
            f"cannot listen on {address}: {error.strerror}; choose another --listen address, or end what uses it"
        ) from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
