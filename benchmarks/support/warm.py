"""`confide` commands as processes that begin at once, for tests and measurements.

Each is a process with its own memory, which gets signals and can be killed like any other. It is forked from one that
has the modules loaded, which spares it the seconds of its imports.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# Once for all: the process that forks the others is started with the first of them. What is not installed is left out.
CONTEXT.set_forkserver_preload(
    ["confide.cli", "confide.runs.folder", "confide.report.page", "dp_accounting", "confide.deploy.deployment",
     "confide.deploy.node", "confide.deploy.hub", "confide.encoders.server", "confide.retrieval.task",
     "confide.speech.task", "confide.engines.processes", "transformers.models.bert.modeling_bert",
     "transformers.models.llama.modeling_llama"]
)  # fmt: skip


def start(
    *words: object,
    folder: Path,
    out: Path,
    err: Path | None = None,
    more: Mapping[str, str] | None = None,
    first: Sequence[Callable[[], None]] = (),
) -> ForkServerProcess:
    """Start `confide ...` in a folder, with `more` in its environment; what it says goes to the end of files.

    `first` is done in the process before the command.
    """
    given = (list(map(str, words)), folder, out, err or out, dict(more or {}), first)
    process = CONTEXT.Process(target=_command, args=given)
    process.start()
    return process


@contextmanager
def encoder_server(source: object, place: Path, *words: object, **more: str) -> Iterator[tuple[ForkServerProcess, str]]:
    """`confide encoder serve`, with a log of its own in a folder: the process, which is ready, and its address."""
    log = Path(tempfile.mkdtemp(dir=place)) / "log"
    log.touch()
    process = start("encoder", "serve", source, *words, folder=place, out=log, more=more)
    try:
        while (address := re.search(r"^serving .* at (\S+)\n", log.read_text(), re.MULTILINE)) is None:
            if not process.is_alive():
                raise RuntimeError(f"the encoder server ended: {log.read_text()}")
            time.sleep(0.01)
        yield process, address[1]
    finally:
        process.kill()
        process.join()


def _command(
    words: list[str], folder: Path, out: Path, err: Path, more: dict[str, str], first: Sequence[Callable[[], None]]
) -> None:
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the tests; they end what they have started
    for stream, path in ((1, out), (2, err)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream)
    os.environ |= more
    os.chdir(folder)
    for each in first:
        each()
    sys.argv = ["confide", *words]
    runpy.run_module("confide", run_name="__main__")  # as `python -m confide` does
