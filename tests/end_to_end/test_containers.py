"""The containers' files: their very commands run as processes here, with a folder for each volume."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

from support.loopback import Loopback, free_port

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((PLACE / "compose.yaml").read_text())
DOCKERFILE = (PLACE / "Dockerfile").read_text()
SERVICES = {"server", "relay", "client-0", "client-1", "client-2"}


def mounts(service: str) -> dict[str, str]:
    """Volume by the folder that it is mounted on."""
    split = (text.split(":") for text in COMPOSE["services"][service]["volumes"])
    return {folder: volume for volume, folder in split}


@pytest.mark.slow
def test_the_commands_of_the_compose_file_make_keys_and_a_run_from_nothing(tmp_path: Path) -> None:
    volumes = tmp_path / "volumes"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "confide").write_text(f'#!/bin/sh\nexec {sys.executable} -m confide "$@"\n')
    (tmp_path / "bin" / "confide").chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    made = tmp_path / "keys"  # where the job sees its volumes
    for folder, volume in mounts("keys").items():
        (volumes / volume).mkdir(parents=True)
        (tmp_path / folder.strip("/")).parent.mkdir(exist_ok=True)
        (tmp_path / folder.strip("/")).symlink_to(volumes / volume)
    job = COMPOSE["services"]["keys"]
    words = [*job["entrypoint"], str(made), *("127.0.0.1" for _ in job["command"][1:])]
    for _ in range(2):  # the second time it finds that all is there
        subprocess.run(words, cwd=PLACE, env=path, check=True, capture_output=True, timeout=300)
    ports = {port: str(free_port()) for port in ("9092", "9093")}
    watches = {name: str(free_port()) for name in SERVICES}

    def here_and_now(service: str, word: str) -> str:
        """A word of a command with this machine's ports, and the folders of the service's own volumes."""
        word = re.sub(r"^(?:server|relay|0\.0\.0\.0):(\d+)$", lambda found: f"127.0.0.1:{ports[found[1]]}", word)
        for folder, volume in mounts(service).items():
            word = re.sub(rf"^{folder}(?=/|$)", str(volumes / volume), word)
        assert not word.startswith("/") or word.startswith(str(tmp_path)), f"{service} has no volume for {word}"
        if word.endswith(".yaml"):
            text = (PLACE / word).read_text().replace("server:9092", f"127.0.0.1:{ports['9092']}")
            text = text.replace("relay:9093", f"127.0.0.1:{ports['9093']}")
            own = mounts(service).get("/state")
            (tmp_path / f"{service}-{word}").write_text(text.replace("/state", str(volumes / own)) if own else text)
            return str(tmp_path / f"{service}-{word}")
        return watches[service] if word == "9094" else word

    (tmp_path / "unused").mkdir()
    with Loopback(tmp_path / "unused", 1) as here:
        begun = {}
        for name in sorted(SERVICES):
            words = [here_and_now(name, str(word)) for word in COMPOSE["services"][name]["command"]]
            begun[name] = here.confide(*words, log=name)
        here.server = begun["server"]
        here.finish(120)
        assert "node relay joined for users 1, 2" in here.log("server").read_text()
    assert (volumes / "runs" / "first" / "summary.json").exists()
    assert all((volumes / f"state-{number}" / "budget.jsonl").exists() for number in range(3))


def test_the_walk_to_five_machines_has_the_commands_of_the_compose_file() -> None:
    section = (ROOT / "docs" / "deploy.md").read_text().split("## Five machines")[1].split("\n## ")[0]
    written = [shlex.split(line)[1:] for line in section.splitlines() if line.startswith("confide deploy")]
    assert f"sh containers/{COMPOSE['services']['keys']['entrypoint'][1]} keys " in section
    for name in SERVICES:
        words = [re.sub(r"^/(?:keys|runs)/", "", str(word)) for word in COMPOSE["services"][name]["command"]]
        assert [re.sub(r"^(server|relay):", r"\1.example:", word) for word in words] in written, name


def test_only_the_job_that_makes_keys_sees_the_authorities() -> None:
    assert set(COMPOSE["services"]) == {*SERVICES, "keys"}
    for name in SERVICES:
        assert "authority" not in mounts(name).values()
        assert COMPOSE["services"][name]["depends_on"] == {"keys": {"condition": "service_completed_successfully"}}
        own = [volume for folder, volume in mounts(name).items() if folder.startswith("/keys")]
        assert own == [name]
    given = {volume for service in COMPOSE["services"] for volume in mounts(service).values()}
    assert given == set(COMPOSE["volumes"])


def test_the_image_is_made_of_files_and_extras_that_are_there() -> None:
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[([^\]]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= declared["optional-dependencies"].keys()
    assert 'ENTRYPOINT ["confide"]' in DOCKERFILE
    assert "confide" in declared["scripts"]
    assert re.search(r"^USER (?!root)", DOCKERFILE, re.MULTILINE)
    folders = {folder for service in COMPOSE["services"] for folder in mounts(service)}
    made = " ".join(re.findall(r"mkdir -p ([^\\]+)\\", DOCKERFILE)).split()
    assert folders <= set(made)
