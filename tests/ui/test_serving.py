"""`confide serve` answers programs with a run's model, and nobody else, whatever it is sent."""

from __future__ import annotations

import http.client
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import confide
from confide.commands import serve
from confide.errors import UserError
from confide.recipe import load
from confide.runs import answering, folder
from confide.ui import serving
from confide.ui.serving import MOST_SOUND, MOST_TEXT, ModelServer

TOKEN = "sixteen-letters-or-more"
LeftRun = Callable[[Path, dict[str, Any]], Path]


@contextmanager
def running(server: ModelServer) -> Iterator[ModelServer]:
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, left_run: LeftRun) -> Path:
    model = {"layers": 1, "width": 16, "mlp": 32, "heads": 2}
    return left_run(tmp_path_factory.mktemp("served") / "run", {"model": model})


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ModelServer]:
    with running(ModelServer(run)) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(run: Path) -> Iterator[ModelServer]:
    with running(ModelServer(run, token=TOKEN)) as made:
        yield made


@pytest.fixture(scope="module")
def sound() -> np.ndarray:
    return np.random.default_rng(0).normal(scale=0.1, size=24_000).astype(np.float32)


def ask(
    server: ModelServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def wave(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_a_recording_gets_the_transcript_that_python_gets(server: ModelServer, run: Path, sound: np.ndarray) -> None:
    wanted = confide.transcribe(run, sound).to_json()
    assert wanted["text"]  # random letters of a random model
    for path, kind in (("/transcribe", "audio/wav"), ("/transcribe?file=a.WAV", "application/octet-stream")):
        status, found = ask(server, path, "POST", wave(sound), Content_Type=kind)
        assert (status, found.pop("took") > 0, found) == (200, True, wanted)
    assert set(found["segments"][0]["words"][0]) == {"word", "start", "end", "confidence"}


@pytest.mark.parametrize("kind", ["audio/mp4", "audio/x-m4a", "audio/aac"])
def test_a_recording_of_a_telephone_is_heard(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, sound: np.ndarray, kind: str
) -> None:
    heard: list[str] = []

    def read(run: Path, content: bytes, name: str, encoder: str | None) -> dict[str, Any]:
        heard.append(name)
        return {}

    monkeypatch.setattr(answering, "heard", read)
    assert ask(server, "/transcribe", "POST", wave(sound), Content_Type=kind)[0] == 200
    assert [Path(name).suffix for name in heard] == [".m4a"]


def test_every_format_that_is_heard_can_be_chosen_on_the_page_and_is_named_by_serve() -> None:
    page = (files("confide.ui") / "assets" / "index.html").read_text()
    assert set(re.findall(r'accept="([^"]*)"', page)[0].split(",")) == answering.AUDIO
    assert set(serving._ENDINGS.values()) <= answering.AUDIO
    said = (serve.serve.__doc__ or "").upper()
    assert all(kind in said for kind in ("WAV", "FLAC", "MP3", "OGG", "OPUS", "M4A"))


def test_health_and_what_the_model_is(server: ModelServer) -> None:
    assert ask(server, "/health") == (200, {"status": "ok"})
    status, about = ask(server, "/about")
    assert (status, about["task"], about["notes"]["task"]) == (200, "speech", "speech")


@pytest.mark.parametrize(
    ("path", "method", "body", "headers", "status", "said"),
    [
        ("/transcribe", "POST", b"no sound", {"Content_Type": "audio/wav"}, 400, "cannot be read"),
        ("/transcribe", "POST", b"no sound", {}, 400, "expected one of .flac"),
        ("/transcribe", "POST", b"", {"Content_Length": str(MOST_SOUND + 1)}, 413, "expected at most"),
        ("/transcribe", "GET", None, {}, 405, "expected POST"),
        ("/retrieve", "POST", b"{}", {}, 404, "expected /transcribe, /about, /health"),
        ("/health", "GET", None, {"Host": "evil.example"}, 421, "the name of this machine"),
        ("/transcribe", "POST", b"", {"Origin": "http://evil.example"}, 403, "other pages"),
        ("/transcribe", "POST", b"", {"Sec_Fetch_Site": "cross-site"}, 403, "other pages"),
    ],
)
def test_what_is_wrong_is_said_in_json(
    server: ModelServer, path: str, method: str, body: bytes | None, headers: dict[str, str], status: int, said: str
) -> None:
    found, answer = ask(server, path, method, body, **headers)
    assert (found, said in answer["error"]) == (status, True), answer


def test_with_a_token_only_health_is_for_everybody(guarded: ModelServer, sound: np.ndarray) -> None:
    assert ask(guarded, "/health", Host="any.example")[0] == 200
    for header in ({}, {"Authorization": "Bearer something-else-that-is-long"}, {"Authorization": TOKEN}):
        status, answer = ask(guarded, "/transcribe?file=a.wav", "POST", wave(sound), **header)
        assert (status, "Authorization: Bearer" in answer["error"]) == (401, True)
    held = {"Authorization": f"Bearer {TOKEN}", "Host": "any.example"}
    assert ask(guarded, "/transcribe?file=a.wav", "POST", wave(sound), **held)[0] == 200


def test_beyond_this_machine_there_is_always_a_token(run: Path) -> None:
    server = ModelServer(run, host="0.0.0.0")
    server.socket.close()
    assert server.token is not None
    assert len(server.token) >= 16
    with pytest.raises(UserError, match="CONFIDE_SERVE_TOKEN needs 16 or more"):
        ModelServer(run, token="short")


def test_a_run_that_answers_nobody_is_refused_before_it_listens(tiny: str, tmp_path: Path, no_figures: None) -> None:
    folder.train(load(tiny), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="answers nobody"):
        ModelServer(tmp_path / "run")


def test_an_encoder_that_a_model_has_no_use_for_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="was trained whole and has no encoder"):
        ModelServer(run, encoder="whisper-tiny.en")


def test_a_query_gets_documents(left_run: LeftRun, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    task = {
        "kind": "retrieval", "encoder": {"source": str(tiny_model("masked")), "pooling": "mean"}, "method": "head",
        "data": {"kind": "embedded", "documents": 6, "queries_per_document": 6, "households": 3},
        "cache": str(tmp_path / "states"),
    }  # fmt: skip
    run = left_run(tmp_path / "run", task)
    (tmp_path / "listed.jsonl").write_text("".join(f'{{"id": "{number}"}}\n' for number in range(5)))
    with pytest.raises(UserError, match=r"has 5 documents, and the model of .* scores 6"):
        ModelServer(run, documents=tmp_path / "listed.jsonl")
    with running(ModelServer(run)) as server:
        status, found = ask(server, "/retrieve", "POST", json.dumps({"query": "the light", "k": 2}).encode())
        wanted = confide.retrieve(run, "the light", k=2)
        assert (status, found["documents"]) == (200, [each.to_json() for each in wanted])
        assert found["score"] == "probability"
        for body in (b"no json", b"[]", b'{"k": 3}', b'{"query": "a", "k": "many"}'):
            assert ask(server, "/retrieve", "POST", body)[1] == {
                "error": 'expected JSON: {"query": "some words", "k": 5}'
            }
        assert "4,000" in ask(server, "/retrieve", "POST", json.dumps({"query": "a" * 4001}).encode())[1]["error"]
        assert ask(server, "/retrieve", "POST", b"x" * (MOST_TEXT + 1))[0] == 413
        assert "empty" in ask(server, "/retrieve", "POST", b'{"query": " "}')[1]["error"]
