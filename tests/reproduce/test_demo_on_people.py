"""The demo's model is made from simulated voices alone, and the line that it prints has to work on real people."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from confide import recipe
from confide.encoders import presets
from confide.reproduce import demo
from confide.runs import folder
from confide.speech.grammar import DIGITS

_FEW = (
    "task.corpus.people=300", "task.corpus.utterances=2", "sampling.cohort=300", "task.test.people=10", "run.steps=200",
    "central.schedule.steps=200", "evaluation.every=200",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_the_line_at_the_end_of_the_demo_hears_real_people(
    data: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """By the demo's start with fewer people, from which all of its runs go on, and with the option that it prints."""
    if not presets.preset(demo.ENCODER).installed or not (data / "audiomnist").is_dir():
        pytest.skip(f"needs the encoder {demo.ENCODER} and {data / 'audiomnist'}")
    pytest.importorskip("flashlight")
    folder.train(recipe.load(demo.START, _FEW), tmp_path / "run", quiet=True)
    option = demo.only_digits(tmp_path).split()
    for corpus, least in (("audiomnist", 0.95), ("fsdd", 0.85)):
        people = sorted((data / corpus).rglob("*.flac"))
        chosen = people[:: max(1, len(people) // 40)]
        code, out, err = command("transcribe", tmp_path / "run", *chosen, *option)
        assert code == 0, err
        said = dict(re.findall(r"==> (.+) <==\n(?!==>)(.*)", out))  # a recording in which nothing is heard has no line
        right = [DIGITS["en"][int(path.name[0])] == said.get(str(path)) for path in chosen]
        assert sum(right) >= least * len(right), f"{corpus}: {sum(right)} of {len(right)}: {said}"
