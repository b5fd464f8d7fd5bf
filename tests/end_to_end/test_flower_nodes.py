"""A stock SuperLink and stock SuperNodes over TLS run Confide, with the commands of docs/deploy.md.

These tests need Flower, in an environment of its own: `pip install pytest 'confide[flower]'` there, and run this file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower app needs Flower: pip install 'confide[flower]'")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load_file

from confide.deploy import keys
from confide.privacy.budget import Budget
from confide.privacy.ledger import FILE, Ledger
from confide.recipe import load
from confide.runs import folder
from confide.runs.simulation import simulate
from support.loopback import free_port, listens

pytestmark = pytest.mark.slow
RECIPE = """\
task: {kind: convex/quadratics, users: 2, dimension: 6, rank: 3}
sampling: {kind: fixed, cohort: 2}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: TRUST}
central: {kind: adam, learning_rate: 0.1}
run: {steps: STEPS}
"""
APP = """\
[project]
name = "confide-app"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "confide.deploy.flower:server"
clientapp = "confide.deploy.flower:client"

[tool.flwr.app.config]
recipe = "PLACE/recipe.yaml"
out = "PLACE/run"
users = 2
wait-for = 2
minimum = 1.0
deadline = 300.0
"""


class Flower:
    """`with Flower(folder) as here`: a SuperLink, and SuperNodes of which those with a registered key are admitted."""

    def __init__(self, place: Path) -> None:
        self.place, self.port, self.begun = place, free_port(), list[subprocess.Popen[bytes]]()
        keys.make(place / "keys", 1, ["127.0.0.1"])
        (place / "home").mkdir()
        found = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{place}/keys/ca.pem"\n'
        (place / "home" / "config.toml").write_text('[superlink]\ndefault = "here"\n\n' + found)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"FLWR_HOME": str(place / "home"), "PATH": path, "FLWR_TELEMETRY_ENABLED": "0"}

    def __enter__(self) -> Flower:
        own = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        tls = [word for name, file in own.items() for word in (f"--ssl-{name}", f"keys/{file}")]
        self.start("superlink", "flower-superlink", *tls, "--host", "127.0.0.1", "--port", str(self.port),
                   "--enable-supernode-auth", "--disable-runtime-dependency-installation")  # fmt: skip
        self.until(lambda: listens(self.port), 120)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.begun:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            time.sleep(3 * (number == signal.SIGTERM))

    def start(self, name: str, *words: str) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            self.begun.append(subprocess.Popen(words, stdout=log, stderr=log, env=self.environment, cwd=self.place,
                                               start_new_session=True))  # fmt: skip

    def flwr(self, *words: str) -> str:
        done = subprocess.run(["flwr", *words], env=self.environment, cwd=self.place, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, number: int, known: bool = True) -> None:
        """A SuperNode with a key of its own, in the form that `ssh-keygen -t ecdsa` writes."""
        key, file = ec.generate_private_key(ec.SECP384R1()), self.place / f"node-{number}"
        form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        file.write_bytes(key.private_bytes(*form))
        open_half = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        file.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*open_half))
        if known:
            self.flwr("supernode", "register", f"node-{number}.pub", "here")
        self.start(
            f"node-{number}", "flower-supernode", "--root-certificates", "keys/ca.pem", "--superlink",
            f"127.0.0.1:{self.port}", "--port", str(free_port()), "--auth-supernode-private-key", f"node-{number}",
            "--node-config", f'policy="{self.place}/policy-{number}.yaml" users="{number}"',
        )  # fmt: skip

    def run(self, name: str, trust: str, steps: int) -> Path:
        """Submit a run, or go on with it; the folder that it leaves."""
        place = self.place / name
        place.mkdir(exist_ok=True)
        (place / "recipe.yaml").write_text(RECIPE.replace("TRUST", trust).replace("STEPS", str(steps)))
        (place / "pyproject.toml").write_text(APP.replace("PLACE", str(place)))
        self.flwr("run", name, "here")
        return place / "run"

    def until(self, so: Callable[[], bool], seconds: float = 600) -> None:
        ends = time.monotonic() + seconds
        while not so():
            logs = "".join(path.read_text()[-2000:] for path in self.place.glob("*.log"))
            assert time.monotonic() < ends, f"not so after {seconds:g} s:\n{logs}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    place = tmp_path_factory.mktemp("flower")
    for user in range(3):
        policy = {
            "servers": [{"address": "flower"}], "state": f"state-{user}", "trust": "central", "noise_multiplier": 0.1,
            "epsilon": 1000, "delta": 1e-5, "population": {"least": 2, "most": 2}, "rehearsal": True,
        }  # fmt: skip
        (place / f"policy-{user}.yaml").write_text(json.dumps(policy))
    with Flower(place) as here:
        here.node(0)
        here.node(1)
        yield here


def test_stock_nodes_over_tls_give_the_model_of_one_process(flower: Flower) -> None:
    out = flower.run("straight", "local", 2)
    flower.until(lambda: (out / folder.SUMMARY).exists())
    alone, state = simulate(load(str(out.parent / "recipe.yaml")))
    found = load_file(out / folder.MODEL)
    whole = np.concatenate([found[name].numpy().reshape(-1) for name in alone.layout.names])
    assert np.allclose(whole, state.parameters.numpy(), rtol=1e-6)
    assert Ledger.read(out / FILE).count == 2
    for user in range(2):  # its own noise, and a line of its own for each answer
        assert len(Budget.read(flower.place / f"state-{user}" / "budget.jsonl").charges) == 2


def test_a_run_that_was_stopped_goes_on_with_the_same_command(flower: Flower) -> None:
    out = flower.run("stopped", "central", 3)
    flower.until(lambda: (out / folder.METRICS).exists())
    listed = json.loads(flower.flwr("list", "--format", "json"))["runs"]
    begun = next(run["run-id"] for run in listed if run["status"].startswith("running"))
    flower.flwr("stop", str(begun), "here")
    assert not (out / folder.SUMMARY).exists()
    flower.run("stopped", "central", 3)
    flower.until(lambda: (out / folder.SUMMARY).exists())
    assert folder.summary_of(out)["steps"] == 3
    assert folder.summary_of(out)["releases"] >= 3


def test_neither_a_node_without_a_registered_key_nor_plain_bytes_come_in(flower: Flower) -> None:
    log = flower.place / "superlink.log"
    before = log.read_text().count("Activated node_id")
    flower.node(2, known=False)
    flower.until(lambda: "No SuperNode found with the given public key" in log.read_text(), 60)
    assert log.read_text().count("Activated node_id") == before
    with socket.create_connection(("127.0.0.1", flower.port), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
