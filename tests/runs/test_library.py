"""Using a retriever: evaluate, retrieve, and answers from a local model or a server that really answers."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from confide.commands import retrieval as retrieval_commands
from confide.errors import UserError
from confide.recipe import parse
from confide.report.page import write_report
from confide.retrieval.data import Document
from confide.retrieval.generation import LocalModel, chat_server, printable, prompt
from confide.runs import folder
from confide.runs.evaluation import evaluate_retrieval
from confide.runs.library import Library, open_run

pytestmark = pytest.mark.usefixtures("no_figures_here")
DATA = {"kind": "embedded", "documents": 6, "queries_per_document": 6, "households": 3}
Call = Callable[..., tuple[int, str, str]]


def document(source: str, cache: Path, **task: Any) -> dict[str, Any]:
    return {
        "task": {
            "kind": "retrieval", "encoder": {"source": source, "pooling": "mean"}, "data": DATA,
            "clients": {"kind": "even", "clients": 2}, "head": {"scale": "layer"}, "k": 2, "cache": str(cache), **task,
        },
        "users": {"weights": "examples"},
        "sampling": {"kind": "fixed", "cohort": 2},
        "local": {"epochs": 4, "batch_size": 4, "learning_rate": 0.3},
        "bounding": {"rule": "none"},
        "central": {"kind": "sgd", "learning_rate": 1},
        "evaluation": {"every": 2},
        "run": {"steps": 2},
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("use")


@pytest.fixture(scope="module")
def finished(place: Path, minilm: str, no_figures_here: None) -> Path:
    folder.train(parse(document(minilm, place / "states")), place / "finished", quiet=True)
    return place / "finished"


@pytest.fixture(scope="module")
def library(finished: Path) -> Library:
    return open_run(finished, quiet=True)


@pytest.fixture
def tiny_run(tiny_model: Callable[..., Path], place: Path) -> Callable[..., Path]:
    """`tiny_run("name", method="adapter_head")`: a finished run on a random model, 16 wide."""

    def make(name: str, **task: Any) -> Path:
        if not (place / name).exists():
            wanted = document(str(tiny_model("masked")), place / "states", **task)
            wanted["local"] |= {"epochs": 1}
            folder.train(parse(wanted), place / name, quiet=True, page=write_report)
        return place / name

    return make


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """The two commands of this task, in this process: exit code, standard output, standard error."""
    app = typer.Typer()
    for command in (retrieval_commands.retrieve, retrieval_commands.answer):
        app.command()(command)

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = app([str(word) for word in words], standalone_mode=False) or 0
        except UserError as error:
            code, message = 2, str(error)
            return code, capsys.readouterr().out, message
        return (code, *capsys.readouterr())

    return run


# Evaluate


def test_evaluate_agrees_with_the_runs_own_evaluation(finished: Path, library: Library) -> None:
    own, found = folder.summary_of(finished)["metrics"], evaluate_retrieval(library)
    assert (found.scores.top_1, found.scores.top_k) == (own["accuracy"], own["top_k"])
    assert (found.scores.mrr, found.scores.ndcg_10) == pytest.approx((own["mrr"], own["ndcg10"]))
    assert found.loss == pytest.approx(own["test_loss"], rel=1e-5)
    assert found.scores.low <= found.scores.top_1 <= found.scores.high
    assert sum(own_class.queries for own_class in found.scores.per_class) == found.scores.queries


def test_the_page_states_the_interval_that_evaluate_prints(tiny_run: Callable[..., Path]) -> None:
    run = tiny_run("head", method="head")
    found = evaluate_retrieval(open_run(run, quiet=True)).scores
    assert found.low < found.top_1 < found.high
    assert f"95 % interval {found.low:.4g} to {found.high:.4g}, from drawing" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "task",
    [
        {"method": "head"},
        {"method": "adapter_head"},
        {"method": "adapter_search"},
        {"method": "head", "experts": {"clusters": 3, "active": 2}, "head": {}},
    ],
    ids=["head", "adapter_head", "adapter_search", "experts"],
)
def test_each_trained_combination_is_evaluated_as_its_run_was(tiny_run: Callable[..., Path], task: Any) -> None:
    run = tiny_run("-".join(task), **task) if "experts" in task else tiny_run(task["method"], **task)
    found = evaluate_retrieval(open_run(run, quiet=True))
    own = folder.summary_of(run)["metrics"]
    assert (found.scores.top_1, found.scores.top_k) == (own["accuracy"], own["top_k"])
    assert found.loss == pytest.approx(own["test_loss"], rel=1e-4)


def test_plain_search_is_evaluated_from_a_recipe_without_a_run(
    tiny_model: Callable[..., Path], place: Path, command: Call
) -> None:
    path = place / "search.yaml"
    path.write_text(json.dumps(document(str(tiny_model("masked")), place / "states")))
    code, out, err = command("evaluate", path, "--set", "task.method=search", "--set", "task.k=3", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["task"], found["method"], found["k"]) == ("retrieval", "search", 3)
    assert 0 <= found["low"] <= found["top_1"] <= found["high"] <= 1
    code, _, err = command("evaluate", path)
    assert code == 2
    assert "task.method=head has to be trained first" in err


def test_the_evaluation_is_shown_with_an_interval_and_per_class(finished: Path, command: Call) -> None:
    code, out, _ = command("evaluate", finished)
    assert code == 0
    for part in ("top 1", "top 2", "95 % interval", "mean reciprocal rank", "nDCG@10", "document or class"):
        assert part in out
    code, _, err = command("evaluate", finished, "--set", "task.k=1")
    assert code == 2
    assert "--set changes a recipe" in err
    code, _, err = command("evaluate", finished, "--corpus", "an4")
    assert code == 2
    assert "for speech; drop them" in err


# Retrieve


def test_a_training_query_finds_its_document(library: Library) -> None:
    assert library.corpus is not None
    train = library.corpus.train
    right = [library.find(text, 2)[0].document for text in train.texts]
    share = sum(d == library.retriever.documents[label] for d, label in zip(right, train.labels, strict=True)) / len(
        train
    )
    assert share > 0.8


def test_retrieve_gives_documents_in_falling_order_of_probability(finished: Path, call: Call) -> None:
    code, out, err = call("retrieve", finished, "the time is wrong", "-k", "4", "--json")
    assert code == 0, err
    found = json.loads(out)
    scores = [each["score"] for each in found["documents"]]
    assert [each["rank"] for each in found["documents"]] == [1, 2, 3, 4]
    assert scores == sorted(scores, reverse=True)
    assert found["score"] == "probability"
    assert 0 < sum(scores) <= 1 + 1e-6
    code, out, _ = call("retrieve", finished, "the time is wrong", "-k", "2")
    assert [line[:2] for line in out.splitlines()] == ["1.", "2."]
    assert found["documents"][0]["text"].split()[0] in out


def test_all_documents_are_given_where_more_are_asked_for(library: Library) -> None:
    assert len(library.find("anything at all", 100)) == 6


def test_experts_and_search_retrieve_too(tiny_run: Callable[..., Path]) -> None:
    mixture = open_run(tiny_run("method-experts-head", experts={"clusters": 3, "active": 2}, head={}), quiet=True)
    assert len(mixture.find("the cat sat", 100)) == 4  # two experts of two documents
    search = open_run(tiny_run("adapter_search", method="adapter_search"), quiet=True)
    found = search.find("the cat sat", 3)
    assert search.scale == "inner product"
    assert found[0].score >= found[1].score >= found[2].score


@pytest.mark.parametrize("query", ["", "  \n"])
def test_an_empty_query_is_refused(library: Library, query: str) -> None:
    with pytest.raises(UserError, match="the query is empty; expected some words"):
        library.find(query, 1)


def test_a_long_query_is_read_in_windows_and_said_to_be(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert library.find("the fridge rattles " * 400, 1)
    assert "longer than 256 tokens: read in windows; what goes beyond 4 windows is cut" in capsys.readouterr().err


def test_a_model_of_another_width_is_refused_by_name(tiny_run: Callable[..., Path], tmp_path: Path) -> None:
    run = tiny_run("head", method="head")
    for name in (folder.RECIPE, folder.MODEL):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    save_file({**load_file(run / folder.MODEL), "head.weight": torch.zeros(6, 17)}, tmp_path / folder.MODEL)
    with pytest.raises(UserError, match=r"head.weight should be \(6, 16\) but \(6, 17\) was found"):
        open_run(tmp_path, quiet=True)


def test_what_is_no_retriever_is_said_to_be_none(tiny: str, tmp_path: Path, command: Call, call: Call) -> None:
    command("train", tiny, "--out", tmp_path / "run")
    code, _, err = call("retrieve", tmp_path / "run", "a query")
    assert code == 2
    assert "is of task convex/quadratics, which retrieves nothing" in err
    code, _, err = call("retrieve", tmp_path / "nothing", "a query")
    assert code == 2
    assert "holds no run" in err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / folder.RECIPE).write_text(json.dumps(document("minilm", tmp_path)))
    code, _, err = call("retrieve", tmp_path / "begun", "a query")
    assert code == 2
    assert "its run is not finished" in err


# Answer


class Reply:
    """What the next request gets, and what the last one was."""

    status, kind, body, location = 200, "application/json", b"", ""
    seen: dict[str, Any]
    path = token = ""


def chunks(*texts: str) -> bytes:
    events = [{"choices": [{"delta": {"role": "assistant"}}]}]
    events += [{"choices": [{"delta": {"content": text}}]} for text in texts]
    lines = [": keep alive", *(f"data: {json.dumps(event)}" for event in events), 'data: {"choices": []}']
    return "\n\n".join([*lines, "data: [DONE]", ""]).encode()


def whole(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Reply]]:
    """A server on this machine; its reply is set by the test."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    reply = Reply()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reply.path, reply.token = self.path, self.headers.get("Authorization", "")
            reply.seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            if reply.location:
                self.send_header("Location", reply.location)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1", reply
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


@pytest.fixture
def answer(tiny_run: Callable[..., Path], call: Call) -> Call:
    """`answer(url, *options)` about the tiny run."""
    run = tiny_run("head", method="head")

    def ask(url: str, *words: object) -> tuple[int, str, str]:
        return call("answer", run, "why does it rattle?", "--url", url, "--model", "some-model", *words)

    return ask


def test_a_streamed_answer_is_put_together_and_its_sources_are_named(server: tuple[str, Reply], answer: Call) -> None:
    url, reply = server
    reply.kind, reply.body = "text/event-stream; charset=utf-8", chunks("Tighten ", "the screws", " [1].")
    code, out, err = answer(url, "-k", "2")
    assert code == 0, err
    assert out.startswith("Tighten the screws [1].\n\nsources (head; answer by some-model at ")
    assert [line[:5] for line in out.splitlines()[-2:]] == ["  [1]", "  [2]"]
    assert reply.path == "/v1/chat/completions"
    assert (reply.seen["stream"], reply.seen["model"]) == (True, "some-model")
    asked = reply.seen["messages"][1]["content"]
    assert "why does it rattle?" in asked
    assert "[2] " in asked
    assert "[3] " not in asked


def test_an_answer_in_one_piece_is_read_with_or_without_json(server: tuple[str, Reply], answer: Call) -> None:
    url, reply = server
    reply.body = whole("Use the rubber feet.")
    code, out, _ = answer(f"{url}/chat/completions", "--no-stream")
    assert (code, reply.seen["stream"], reply.path) == (0, False, "/v1/chat/completions")
    assert out.startswith("Use the rubber feet.\n")
    code, out, _ = answer(url, "--json")
    assert json.loads(out)["answer"] == "Use the rubber feet."
    assert len(json.loads(out)["sources"]) == 3
    # A server may ignore the wish for a stream.
    assert answer(url)[1].startswith("Use the rubber feet.\n")


def test_the_token_comes_from_the_environment_and_goes_only_to_the_url(
    server: tuple[str, Reply], answer: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, reply = server
    reply.body = whole("Yes.")
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    assert answer(url)[0] == 0
    assert reply.token == ""
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert answer(url, "--token-variable", "MY_TOKEN")[0] == 0
    assert reply.token == "Bearer secret"
    reply.status, reply.location = 307, "http://127.0.0.1:9/elsewhere"
    code, _, err = answer(url, "--token-variable", "MY_TOKEN")
    assert code == 2
    assert "it points to http://127.0.0.1:9/elsewhere; give that URL if you trust it" in err


def test_a_token_is_not_sent_unencrypted_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with pytest.raises(UserError, match="unencrypted; use https://") as error:
        chat_server("http://example.org/v1", "m", "MY_TOKEN")
    assert "secret" not in str(error.value)
    assert chat_server("https://example.org/v1", "m", "MY_TOKEN").token == "secret"
    assert chat_server("http://[::1]:80/v1", "m", "MY_TOKEN").token == "secret"


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (401, "application/json", b'{"error": {"message": "who?"}}', "answered 401 Unauthorized: who?; set the env"),
        (404, "text/plain", b"nothing here", "answered 404 Not Found: nothing here; check the URL"),
        (500, "text/html", b"", "answered 500 Internal Server Error; check"),
        (200, "text/html", b"<html>hello</html>", "answered '<html>hello</html>', which is not JSON"),
        (200, "application/json", b'{"answer": 42}', "which is no chat completion; expected choices with a message"),
        (200, "application/json", b"[]", "which is no chat completion"),
        (200, "application/json", b'{"error": "out of memory"}', "failed: out of memory"),
        (200, "application/json", whole(" "), "gave an empty answer"),
        (200, "text/event-stream", b"data: {broken\n\n", "which is not JSON"),
        (200, "text/event-stream", chunks("Half an ans").replace(b"data: [DONE]", b""), "ended its stream before"),
        (200, "text/event-stream", b'data: {"error": {"message": "overloaded"}}\n\n', "failed: overloaded"),
    ],
)  # fmt: skip
def test_a_server_that_fails_is_quoted(
    server: tuple[str, Reply], answer: Call, status: int, kind: str, body: bytes, message: str
) -> None:
    url, reply = server
    reply.status, reply.kind, reply.body = status, kind, body
    code, _, err = answer(url)
    assert code == 2
    assert message in err
    assert url in err


def test_a_server_that_is_not_there_is_said_to_be_missing(answer: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, _, err = answer(f"http://127.0.0.1:{port}/v1")
    assert code == 2
    assert "could not be reached or broke off ([Errno 111] Connection refused)" in err


@pytest.mark.parametrize(
    ("url", "model", "message"),
    [
        ("localhost:8080", "m", "is not an address; expected http://"),
        ("file:///etc/passwd", "m", "is not an address"),
        ("http://localhost/v1", None, "--url needs --model"),
        ("https://me:secret@host/v1", "m", "put the token into the environment variable"),
    ],
)
def test_an_address_that_cannot_work_is_refused_before_anything_is_sent(
    url: str, model: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        chat_server(url, model)
    assert "secret" not in str(error.value)


def test_the_prompt_numbers_the_documents_and_cuts_long_ones() -> None:
    system, user = prompt(" why? ", [Document("a", "short\n text"), Document("b", "x" * 5000)])
    assert system["role"] == "system"
    assert user["content"].startswith("Documents:\n[1] short text\n[2] xxx")
    assert user["content"].endswith("x ...\n\nQuestion: why?")
    assert len(user["content"]) < 2200


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\u009bc\n\td é") == "a[2Jbc\n\td é"


def test_a_local_model_answers_the_same_every_time_piece_by_piece(tiny_model: Callable[..., Path]) -> None:
    generator = LocalModel(str(tiny_model("causal")), max_tokens=8)
    messages = [{"role": "user", "content": "the cat sat on"}]
    pieces: list[str] = []
    first = generator.answer(messages, pieces.append)
    assert first
    assert "".join(pieces).strip() == first == generator.answer(messages, pieces.append)
    assert len(pieces) > 2
    with pytest.raises(UserError, match="takes 64 in all: retrieve fewer documents"):
        generator.answer([{"role": "user", "content": "the cat " * 60}], pieces.append)


def test_a_masked_model_cannot_answer(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="is a bert, a masked model that cannot write; expected a causal"):
        LocalModel(str(tiny_model("masked")))


def test_an_answer_by_a_local_model_names_its_sources(
    tiny_run: Callable[..., Path], tiny_model: Callable[..., Path], tmp_path: Path, call: Call
) -> None:
    run, writer = tiny_run("head", method="head"), tmp_path / "writer"
    shutil.copytree(tiny_model("causal"), writer)
    config = json.loads((writer / "config.json").read_text())
    (writer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    words = ("answer", run, "the cat sat", "--model", writer, "-k", "1", "--max-tokens", "4")
    code, out, err = call(*words)
    assert code == 0, err
    assert "sources (head; answer by " in out
    code, silent, _ = call(*words, "--no-stream")
    assert silent.split() == out.split()


def test_a_small_real_model_uses_its_document(real_encoder: Callable[..., Any]) -> None:
    real_encoder("smollm2")  # skips where it is not installed
    text = "The warranty of the dishwasher is seven years from the day of purchase."
    said = LocalModel("smollm2", max_tokens=40).answer(
        prompt("How long is the warranty of the dishwasher?", [Document("warranty", text)]), lambda piece: None
    )
    assert "seven" in said or "7" in said
