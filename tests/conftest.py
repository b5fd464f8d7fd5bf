"""What the tests share: the command line in this process, a tiny recipe, a clean stop, and pictures of a folder."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

# Every part of a state is in use: an optimiser with moments, a mean of the last iterates, two evaluations to average.
TINY = """\
description: quadratics in six dimensions over twelve users
task: {kind: convex/quadratics, users: 12, dimension: 6, rank: 3}
sampling: {kind: poisson, cohort: 6}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: adam, learning_rate: 0.1}
final: {kind: mean, count: 3}
evaluation: {every: 2, last: 2}
run: {steps: 6, checkpoint_every: 2}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a recipe whose whole run takes a tenth of a second."""
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`confide ...` without the start of a process: exit code, standard output, standard error."""
    from confide import cli

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["confide", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return call


@pytest.fixture
def contents() -> Callable[[Path], dict[str, str]]:
    """Every file under a folder with a digest of its bytes; the lock, which is always empty, is left out."""

    def read(folder: Path) -> dict[str, str]:
        files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    return read


@contextmanager
def _without_figures() -> Iterator[None]:
    from confide.report import page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw_run", lambda *_: [])
        patch.setattr(page, "draw_layers", lambda *_: [])
        yield


@pytest.fixture
def no_figures() -> Iterator[None]:
    """Leave out what takes nine tenths of a short run's time."""
    with _without_figures():
        yield


@pytest.fixture(scope="module")
def no_figures_here() -> Iterator[None]:
    """`no_figures` for a whole module."""
    with _without_figures():
        yield


@pytest.fixture(scope="session")
def signal_after() -> Callable[..., AbstractContextManager[None]]:
    """`with signal_after(4): ...` sends this process a signal, Ctrl-C unless told otherwise, in central step 4."""

    @contextmanager
    def sending(steps: int, number: int = signal.SIGINT) -> Iterator[None]:
        from confide.run import Loop

        original = Loop.step

        def step(loop: Loop, state: Any) -> Any:
            record = original(loop, state)
            if state.step == steps:
                os.kill(os.getpid(), number)
            return record

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loop, "step", step)
            yield

    return sending
