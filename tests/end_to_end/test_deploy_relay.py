"""A relay between processes, over TLS: two clients behind it and one beside it give the model of three beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from confide.deploy import keys
from support.loopback import Loopback, free_port

RECIPE = """\
task: {kind: convex/quadratics, users: 3, dimension: 6, rank: 3}
sampling: {kind: fixed, cohort: 3}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp}
central: {kind: adam, learning_rate: 0.1}
run: {steps: 10}
"""


def model(run: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(run / "model.safetensors").items()}


@pytest.mark.slow
def test_a_relay_over_tls_gives_the_model_of_none_byte_for_byte(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    (tmp_path / "flat").mkdir()
    (tmp_path / "tree").mkdir()
    with Loopback(tmp_path / "flat", 3) as flat:
        for number in range(3):
            flat.client(number, [number])
        flat.serve(recipe, "--wait-for", 3, "--minimum", 1)
        flat.finish()
    with Loopback(tmp_path / "tree", 1) as here:
        keys.add(here.folder / "keys", "relay", [1, 2])
        below, port = here.folder / "below", free_port()
        keys.make(below, 2, ["127.0.0.1"], first=1)
        up = ("--server", f"127.0.0.1:{here.port}", "--ca", here.folder / "keys" / keys.CA)
        own = ("--key", here.folder / "keys" / "relay", "--keys", below, "--listen", f"127.0.0.1:{port}")
        here.confide("deploy", "relay", recipe, *up, *own, "--wait-for", 2, log="relay")
        here.client(0, [0])
        server = {"address": f"127.0.0.1:{port}", "authority": keys.fingerprint(below / keys.CA)}
        for number in range(2):
            to = ("--server", f"127.0.0.1:{port}", "--ca", below / keys.CA, "--key", below / f"client-{number}")
            policy = here.policy(number + 1, servers=[server])
            user = ("--policy", policy, "--user", number + 1)
            here.confide("deploy", "client", *to, *user, log=f"client-{number + 1}")
        here.serve(recipe, "--wait-for", 3, "--minimum", 1)
        here.finish()
        said = here.log("server").read_text()
        assert "node relay joined for users 1, 2" in said
    assert model(flat.run) == model(here.run)
