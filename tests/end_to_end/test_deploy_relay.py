"""A relay between processes, over TLS: two clients behind it and one beside it give the model of three beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import deploy_kills
from support.loopback import Loopback

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
        here.relay(recipe, [1, 2])
        here.client(0, [0])
        for number in range(2):
            here.below(number, number + 1)
        here.serve(recipe, "--wait-for", 3, "--minimum", 1)
        here.finish()
        said = here.log("server").read_text()
        assert "node relay joined for users 1, 2" in said
    assert model(flat.run) == model(here.run)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["relay", "client of the relay"])
def test_a_relay_or_its_client_that_is_killed_and_started_again_leaves_the_model_as_it_is(
    role: str, tmp_path: Path
) -> None:
    straight = deploy_kills.run(tmp_path / "straight", "central", 10)
    ending = deploy_kills.run(tmp_path / "killed", "central", 10, role, [1.0, straight.seconds / 2])
    assert ending.kills >= 1  # the first of all runs loads what the others are forked with, and takes longer
    assert ending.steps == 10
    assert ending.under_counts == []
    assert ending.model == straight.model
