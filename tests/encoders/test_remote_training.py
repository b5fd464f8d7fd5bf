"""A whole run against `confide encoder serve` leaves the model of one's own encoder, whatever happens to the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from confide.build import make_task
from confide.encoders.remote import RemoteEncoder
from confide.errors import UserError
from confide.files import read_secret, seal
from confide.recipe import Recipe, parse
from confide.run import Loop
from confide.runs import checkpoint, folder
from support import warm
from support.loopback import free_port

TOKEN = "a-token-only-for-tests"
ROWS = [
    ("where is the cat", "cat"), ("the cat sat on a mat", "cat"), ("cat near water", "cat"), ("a cat ran home", "cat"),
    ("dogs ran far away", "dogs"), ("birds and dogs", "dogs"), ("dogs ran home", "dogs"), ("dogs near trees", "dogs"),
    ("birds sang in old trees", "birds"), ("birds on a mat", "birds"), ("birds sang far away", "birds"),
    ("old birds near water", "birds"),
]  # fmt: skip


@contextmanager
def _server(model: Path, port: int, place: Path) -> Iterator[ForkServerProcess]:
    """A real server process that is ready when this is entered."""
    with warm.encoder_server(model, place, "--port", port, CONFIDE_ENCODER_TOKEN=TOKEN) as (process, _):
        yield process


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONFIDE_ENCODER_TOKEN", TOKEN)
    monkeypatch.setattr("confide.encoders.client.encoders_folder", lambda: tmp_path / "fetched")


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    queries = tmp_path / "table.csv"
    queries.write_text("query,document\n" + "\n".join(f"{query},{document}" for query, document in ROWS))

    def make(source: object, method: str = "adapter_head") -> Recipe:
        return parse(
            {
                "task": {
                    "kind": "retrieval",
                    "encoder": {"source": str(source), "pooling": "mean"},
                    "data": {"kind": "table", "queries": str(queries), "test_share": 0.25},
                    "clients": {"kind": "even", "clients": 2},
                    "method": method,
                    "cache": str(tmp_path / "states"),
                },
                "users": {"weights": "examples"},
                "sampling": {"kind": "fixed", "cohort": 2},
                "local": {"epochs": 2, "batch_size": 2, "learning_rate": 0.3},
                "bounding": {"rule": "none"},
                "central": {"kind": "sgd", "learning_rate": 1},
                "evaluation": {"every": 1},
                "run": {"steps": 4, "checkpoint_every": 1},
            }
        )

    return make


def _end(server: ForkServerProcess) -> None:
    server.kill()
    server.join()


@contextmanager
def _in_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Do something in the middle of a central step: at its first request."""
    original, done = Loop.step, threading.Event()

    def step(loop: Loop, state: Any) -> Any:
        if state.step == number and not done.is_set():
            done.set()
            trained = loop.task.loss

            def loss(*given: Any) -> Any:
                act()
                loop.task.loss = trained  # type: ignore[method-assign]
                return trained(*given)

            loop.task.loss = loss  # type: ignore[assignment,method-assign]
        return original(loop, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", step)
        yield


def _model(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "model.safetensors")


def _close(one: Path, other: Path) -> None:
    ours, theirs = _model(one), _model(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["head", "adapter_head", "adapter_search"])
def test_a_run_against_a_server_leaves_the_model_of_the_local_encoder(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path, port: int, method: str,
    no_figures: None,
) -> None:  # fmt: skip
    local = recipe(tiny_model("masked"), method)
    # Another cache, or the server would never be asked for the vectors of texts.
    served = local.task.model_copy(update={"cache": tmp_path / "others"})
    folder.train(local, tmp_path / "local", quiet=True)
    with _server(tiny_model("masked"), port, tmp_path):
        encoder = served.encoder.model_copy(update={"source": f"http://127.0.0.1:{port}"})  # type: ignore[union-attr]
        remote = local.model_copy(update={"task": served.model_copy(update={"encoder": encoder})})
        summary = folder.train(remote, tmp_path / "remote", quiet=True)
    _close(tmp_path / "local", tmp_path / "remote")
    assert summary["inputs"] == seal(make_task(local.task, 0).fingerprint, read_secret(tmp_path / "remote") or b"")


def test_a_server_that_dies_in_a_round_and_comes_back_is_waited_for(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path, port: int, no_figures: None
) -> None:
    model = tiny_model("masked")
    folder.train(recipe(model), tmp_path / "local", quiet=True)
    with _server(model, port, tmp_path) as first:
        again: list[Any] = []

        def replace() -> None:
            _end(first)
            again.append(_server(model, port, tmp_path))
            starting = threading.Thread(target=again[0].__enter__)
            starting.start()
            again.append(starting)

        with _in_step(2, replace):
            folder.train(recipe(f"http://127.0.0.1:{port}"), tmp_path / "remote", quiet=True)
        again[1].join()
        again[0].__exit__(None, None, None)
    _close(tmp_path / "local", tmp_path / "remote")


def test_a_server_that_dies_for_good_ends_the_run_with_a_clear_error_and_the_run_goes_on_later(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path, port: int, no_figures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(RemoteEncoder.__init__, "__defaults__", (0.5,))  # seconds of patience
    model, place = tiny_model("masked"), tmp_path / "remote"
    folder.train(recipe(model), tmp_path / "local", quiet=True)
    with (
        _server(model, port, tmp_path) as server,
        _in_step(2, lambda: _end(server)),
        pytest.raises(UserError, match=r"does not answer .* after 0.5 s of trying again; .*`confide resume`"),
    ):
        folder.train(recipe(f"http://127.0.0.1:{port}"), place, quiet=True)
    assert checkpoint.load(place).state.step == 2
    changed = pytest.raises(UserError, match="the encoder changed since the run began")
    with _server(tiny_model("causal"), port, tmp_path), changed:
        folder.resume(place, quiet=True)
    with _server(model, port, tmp_path):
        assert folder.resume(place, quiet=True)["steps"] == 4
    _close(tmp_path / "local", place)
