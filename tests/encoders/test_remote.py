"""Training against a shared encoder is training against one's own; strangers, damage and losses get clear answers."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from torch import Tensor
from typer.testing import CliRunner

from confide.commands.encoder import app
from confide.encoders.encoder import Encoder, EncoderSettings
from confide.encoders.remote import RemoteEncoder, open_encoder
from confide.encoders.server import EncoderServer, tls_context
from confide.encoders.service import Access
from confide.encoders.states import hidden_states
from confide.encoders.weights import is_url
from confide.encoders.wire import Limits, dump, load
from confide.errors import UserError
from confide.retrieval import head
from support import warm

TOKEN = "a-token-only-for-tests"
TEXTS = [
    "Ok",
    "Free entry in 2 a wkly comp to win FA Cup final tkts 21st May 2005. Text FA to 87121 now",
    "See you at six?",
    "WINNER!! You have been selected",
]
Answer = tuple[int, dict[str, Any], http.client.HTTPMessage]
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(scope="module")
def local() -> Encoder:
    from confide.encoders.presets import PRESETS

    if not PRESETS["minilm"].installed:
        pytest.skip(f"the real model minilm is not installed; run `{PRESETS['minilm'].command}`")
    encoder = Encoder(EncoderSettings(source="minilm"))
    assert encoder.identity  # once, for all the servers that share it
    return encoder


@contextmanager
def _serving(encoder: Encoder, **more: Any) -> Iterator[EncoderServer]:
    server = EncoderServer(encoder, [TOKEN, "another-token-for-tests"], **more)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def server(local: Encoder) -> Iterator[EncoderServer]:
    with _serving(local, limits=Limits(texts=8, tokens=300)) as made:
        yield made


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The client's token, and a cache of its own: what it needs really comes from the server."""
    monkeypatch.setenv("CONFIDE_ENCODER_TOKEN", TOKEN)
    monkeypatch.delenv("CONFIDE_ENCODER_CA", raising=False)
    monkeypatch.setattr(
        "confide.encoders.client.encoders_folder", lambda: tmp_path_factory.getbasetemp() / "fetched-encoders"
    )


def _remote(server: EncoderServer, **more: Any) -> RemoteEncoder:
    made = open_encoder(EncoderSettings(source=server.url, **more))
    assert isinstance(made, RemoteEncoder)
    return made


def _post(server: EncoderServer, path: str, body: bytes, **headers: str) -> Answer:
    """One request as any program could make it: status, JSON of the answer if it is an error, headers."""
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    sent = {"Authorization": f"Bearer {TOKEN}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if answer.status != 200 else {}, answer.headers


def _adapter(width: int = 384) -> Tensor:
    return torch.eye(width) + 0.02 * torch.randn(width, width, generator=torch.Generator().manual_seed(1))


def _answer_and_gradient(encoder: Encoder, texts: list[str], adapter: Tensor) -> tuple[Tensor, Tensor]:
    matrix = adapter.clone().requires_grad_()
    hidden = encoder.hidden(encoder.tokens(texts), matrix)
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad((hidden * target).sum(), matrix)
    return hidden.detach(), gradient


@pytest.mark.parametrize("windows", [{}, {"pooling": "mean", "max_tokens": 16, "max_windows": 2}])
def test_hidden_states_and_adapter_gradients_are_those_of_the_local_encoder(
    local: Encoder, server: EncoderServer, windows: dict[str, Any]
) -> None:
    own = Encoder(EncoderSettings(source="minilm", **windows)) if windows else local
    remote = _remote(server, **windows)
    assert remote.identity == own.identity
    assert (remote.width, remote.embedding_width, remote.context) == (own.width, own.embedding_width, own.context)
    np.testing.assert_array_equal(remote.lengths(TEXTS), own.lengths(TEXTS))
    ours, theirs = remote.tokens(TEXTS), own.tokens(TEXTS)
    assert ours.cut == theirs.cut == bool(windows)
    assert torch.equal(ours.ids, theirs.ids)
    with torch.no_grad():
        torch.testing.assert_close(remote.hidden(ours), own.hidden(theirs), **CLOSE)
    found, expected = _answer_and_gradient(remote, TEXTS, _adapter()), _answer_and_gradient(own, TEXTS, _adapter())
    torch.testing.assert_close(found, expected, **CLOSE)
    assert expected[1].abs().max() > 0.01


def test_a_batch_beyond_the_servers_limits_is_sent_in_parts(local: Encoder, server: EncoderServer) -> None:
    remote = _remote(server)
    texts = [f"{text} {number}" for number in range(6) for text in TEXTS]  # 24 texts, 8 to a request
    assert remote.lengths(texts).sum() > server.service.limits.tokens
    found, expected = _answer_and_gradient(remote, texts, _adapter()), _answer_and_gradient(local, texts, _adapter())
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)


def test_clients_that_ask_at_the_same_time_share_a_pass_and_get_their_own_answers(local: Encoder) -> None:
    texts = [["See you at six today?"], ["See him in the garden."]]
    tokens = [int(local.lengths(part)[0]) for part in texts]
    assert tokens[0] == tokens[1]
    with _serving(local) as server:
        batcher = server.service.batcher
        batcher.window, batcher.batch_tokens = 30.0, sum(tokens)  # a pass starts as soon as both are there
        remotes = [_remote(server), _remote(server)]
        for each in remotes:
            each.embeddings(each.tokens(["fetched before the race"]))
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(_answer_and_gradient, remotes, texts, [_adapter()] * 2))
        assert batcher.passes == 2  # one forward, one backward for both; apart it would be four
    for answers, part in zip(found, texts, strict=True):
        torch.testing.assert_close(answers, _answer_and_gradient(local, part, _adapter()), **CLOSE)


def _train(encoder: Encoder) -> dict[str, Tensor]:
    """A few steps on adapter and head, as a client takes them."""
    labels, chosen = torch.tensor([0, 1, 0, 1]), head.HeadSettings(scale="layer")
    parameters = head.initial_parameters(chosen, encoder.width, 2, np.random.default_rng(0))
    parameters["adapter"] = encoder.adapter()
    for tensor in parameters.values():
        tensor.requires_grad_()
    for _ in range(4):
        hidden = encoder.hidden(encoder.tokens(TEXTS), parameters["adapter"])
        loss = head.loss(head.forward(chosen, parameters, hidden), labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for tensor, gradient in zip(parameters.values(), gradients, strict=True):
                tensor -= 0.1 * gradient
    return {name: tensor.detach() for name, tensor in parameters.items()}


def test_training_gives_the_parameters_that_it_gives_with_the_local_encoder(
    local: Encoder, server: EncoderServer
) -> None:
    found, expected = _train(_remote(server)), _train(local)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE)
    assert (expected["adapter"] - local.adapter()).abs().max() > 1e-3  # it did train


def test_hidden_states_that_were_kept_serve_the_remote_encoder_too(
    local: Encoder, server: EncoderServer, tmp_path: Path
) -> None:
    remote = _remote(server)
    kept = hidden_states(remote, TEXTS, tmp_path, quiet=True).rows()
    passes = server.service.batcher.passes
    again = hidden_states(local, TEXTS, tmp_path, quiet=True).rows()
    assert torch.equal(kept, again)
    assert server.service.batcher.passes == passes
    assert len(list(tmp_path.glob("*/*.kept"))) == 1  # the local one found them


def test_texts_can_be_sent_as_they_are(local: Encoder, server: EncoderServer) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection.request("POST", "/hidden?pooling=last", json.dumps({"texts": TEXTS}), headers)
    found = load(connection.getresponse().read(), {"hidden": (torch.float32, 2)})["hidden"]
    connection.close()
    with torch.no_grad():
        torch.testing.assert_close(found, local.hidden(local.tokens(TEXTS)), **CLOSE)


def test_a_training_that_diverged_gives_nan_as_it_does_locally_and_spares_the_other_texts(
    server: EncoderServer, local: Encoder
) -> None:
    remote = _remote(server)
    batch = remote.tokens(TEXTS)
    embeddings = remote.embeddings(batch).detach()
    embeddings[1, 0, 0] = torch.nan
    embeddings.requires_grad_()
    hidden = remote.blocks(embeddings, batch.mask)
    assert torch.isnan(hidden[1]).all()
    with torch.no_grad():
        expected = local.hidden(local.tokens(TEXTS))
    torch.testing.assert_close(hidden[[0, 2, 3]].detach(), expected[[0, 2, 3]], **CLOSE)
    (gradient,) = torch.autograd.grad(hidden.sum(), embeddings)
    assert torch.isnan(gradient[1, : batch.lengths[1]]).all()
    assert torch.isfinite(gradient[[0, 2, 3]]).all()
    assert torch.isnan(remote.hidden(batch, torch.full((384, 384), torch.inf))).all()  # nothing at all to send


# Strangers


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong-token-for-tests", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x"]
)
def test_without_a_right_token_nothing_is_answered_but_401(server: EncoderServer, header: str | None) -> None:
    for method, path in (("GET", "/about"), ("GET", "/embeddings"), ("POST", "/hidden"), ("GET", "/nothing")):
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        connection.request(
            method, path, b"x" * 100 if method == "POST" else None, {"Authorization": header} if header else {}
        )
        answer = connection.getresponse()
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "Authorization: Bearer TOKEN" in json.loads(answer.read())["error"]
        connection.close()


def test_a_client_with_a_wrong_token_or_none_is_told_so(server: EncoderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_ENCODER_TOKEN", "not-the-right-token")
    with pytest.raises(UserError, match="does not know the access token in CONFIDE_ENCODER_TOKEN"):
        _remote(server)
    monkeypatch.delenv("CONFIDE_ENCODER_TOKEN")
    with pytest.raises(UserError, match="no access token for the encoder server"):
        _remote(server)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://encoder.example:8443", "over plain HTTP"),
        ("https://", "is not an address"),
        ("https://name:secret@host:1", "is not an address"),
        ("https://host:notaport", "is not an address"),
        ("http://127.0.0.1:1", "does not answer .*confide encoder serve"),
    ],
)
def test_an_address_that_is_none_or_not_safe_is_refused(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.setattr("confide.encoders.remote._OPENING", 0.2)
    with pytest.raises(UserError, match=said):
        open_encoder(EncoderSettings(source=url))


# Limits


def _bodies() -> dict[str, bytes]:
    embeddings, lengths = torch.zeros(5, 384), torch.tensor([2, 3])
    good = {"embeddings": embeddings, "lengths": lengths}
    nan = embeddings.clone()
    nan[4, 1] = torch.nan
    return {
        "nothing": b"",
        "a pickle": b"\x80\x04K\x01.",
        "a header beyond the end": (10**9).to_bytes(8, "little") + b"{}",
        "half": dump(good)[:-8],
        "a tensor too few": dump({"lengths": lengths}),
        "a tensor too many": dump({**good, "more": torch.zeros(1)}),
        "other numbers": dump({"embeddings": embeddings.double(), "lengths": lengths}),
        "another width": dump({"embeddings": torch.zeros(5, 383), "lengths": lengths}),
        "another rank": dump({"embeddings": torch.zeros(5, 1, 384), "lengths": lengths}),
        "lengths that lie": dump({"embeddings": embeddings, "lengths": torch.tensor([2, 2])}),
        "an empty text": dump({"embeddings": embeddings, "lengths": torch.tensor([5, 0])}),
        "a negative length": dump({"embeddings": embeddings, "lengths": torch.tensor([6, -1])}),
        "huge lengths": dump({"embeddings": embeddings, "lengths": torch.full((4,), 2**62)}),
        "no text": dump({"embeddings": torch.zeros(0, 384), "lengths": torch.zeros(0, dtype=torch.int64)}),
        "not finite": dump({"embeddings": nan, "lengths": lengths}),
    }


@pytest.mark.parametrize("name", list(_bodies()))
def test_a_damaged_body_is_refused_with_the_reason_and_the_server_goes_on(server: EncoderServer, name: str) -> None:
    status, said, _ = _post(server, "/forward", _bodies()[name])
    assert status == 400, said
    assert "expected" in said["error"]
    assert (
        _post(server, "/forward", dump({"embeddings": torch.zeros(5, 384), "lengths": torch.tensor([2, 3])}))[0] == 200
    )


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/backward", {"embeddings": (5, 384), "lengths": [2, 3], "gradient": (3, 384)}, "gradient of shape"),
        ("/backward", {"embeddings": (5, 384), "lengths": [2, 3], "gradient": (2, 383)}, "gradient of shape"),
        ("/hidden", {"ids": [5, 99999], "lengths": [2]}, "token 99999"),
        ("/hidden", {"ids": [5, -1], "lengths": [2]}, "the vocabulary"),
        ("/hidden", {"ids": [5] * 600, "lengths": [600]}, "each of 1 to 512 tokens"),
        ("/hidden?pooling=max", {"ids": [5, 6], "lengths": [2]}, "pooling='max'"),
    ],
)
def test_wrong_shapes_tokens_and_poolings_are_refused(
    server: EncoderServer, path: str, body: dict[str, Any], said: str
) -> None:
    made = {n: torch.tensor(v) if isinstance(v, list) else torch.zeros(v) for n, v in body.items()}
    status, answer, _ = _post(server, path, dump(made))
    assert (status, said in answer["error"]) == (400, True), answer


@pytest.mark.parametrize(
    "document", ["[", "[]", '{"texts": "one"}', '{"texts": [1]}', '{"texts": []}', '{"texts": [" "]}']
)
def test_texts_that_are_none_are_refused(server: EncoderServer, document: str) -> None:
    assert _post(server, "/hidden", document.encode(), Content_Type="application/json")[0] == 400


def test_too_many_texts_tokens_or_bytes_are_refused(server: EncoderServer) -> None:
    def json_texts(texts: list[str]) -> Answer:
        return _post(server, "/hidden", json.dumps({"texts": texts}).encode(), Content_Type="application/json")

    nine = dump({"ids": torch.full((9,), 5), "lengths": torch.ones(9, dtype=torch.int64)})
    for answer in (json_texts(["one"] * 9), _post(server, "/hidden", nine)):
        assert answer[0] == 413
        assert "9 texts in one request; expected at most 8" in answer[1]["error"]
    assert json_texts(["many words " * 60] * 4)[0] == 413
    status, said, headers = _post(server, "/forward", b"x" * (server.service.body + 1))
    assert (status, headers["Connection"]) == (413, "close")
    assert f"expected at most {server.service.body}" in said["error"]


def test_other_paths_methods_and_chunks_are_refused_in_json(server: EncoderServer) -> None:
    assert _post(server, "/nothing", b"")[0] == 404
    status, _, headers = _post(server, "/about", b"")
    assert (status, headers["Allow"]) == (405, "GET")
    assert _post(server, "/forward", b"", Transfer_Encoding="chunked")[0] == 411
    for request in (
        b"NONSENSE\r\n\r\n",
        b"DELETE /about HTTP/1.1\r\n\r\n",
        b"POST /hidden HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection(server.address, timeout=20) as raw:
            raw.sendall(request)
            answer = raw.makefile("rb").read()
        assert b'{"error": ' in answer, answer


def test_a_rate_beyond_the_allowance_gets_429_and_the_client_waits_as_told(
    local: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(local, limits=Limits(rate=5)) as server:
        body = dump({"ids": torch.full((500,), 5), "lengths": torch.tensor([500])})
        assert _post(server, "/hidden", body)[0] == 200  # ten at once, the rest is a debt of nearly 100 s
        status, said, headers = _post(server, "/hidden", body)
        assert (status, "more than 5 tokens a second" in said["error"]) == (429, True)
        assert 50 <= int(headers["Retry-After"]) <= 98
        assert _post(server, "/hidden", body, Authorization="Bearer another-token-for-tests")[0] == 200
        waited: list[float] = []

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            server.access = Access([TOKEN], 5)  # as if the time had passed

        monkeypatch.setattr("confide.encoders.client.time.sleep", sleep)
        assert RemoteEncoder(EncoderSettings(source=server.url), patience=0.1).width == 384
        assert waited[0] >= 50
        monkeypatch.undo()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500)), max_size=30), st.floats(1, 1000))
def test_nobody_gets_more_than_the_burst_the_rate_and_one_request(asked: list[tuple[float, int]], rate: float) -> None:
    clock, got = [0.0], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("confide.encoders.service.time.monotonic", lambda: clock[0])
        access = Access([TOKEN], rate)
        for pause, tokens in asked:
            clock[0] += pause
            with suppress(HTTPException):
                access.charge(0, tokens)
                got += tokens
    assert got <= 2 * rate + clock[0] * rate + 500 + 1e-3


@pytest.mark.parametrize("tokens", [[], ["short"], [TOKEN, "tiny"], ["schlüsselwörter-für-alle"]])
def test_a_server_without_a_proper_token_does_not_start(tokens: list[str]) -> None:
    with pytest.raises(UserError, match=r"secrets\.token_urlsafe"):
        Access(tokens, 0)


# TLS


def _certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, private


def test_over_tls_a_known_certificate_serves_and_others_are_refused(
    local: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = _certificate(tmp_path, "right")
    other, _ = _certificate(tmp_path, "other")
    with _serving(local, tls=tls_context(cert, key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with pytest.raises(UserError, match=r"not to be trusted .*CONFIDE_ENCODER_CA"):
            _remote(server)
        monkeypatch.setenv("CONFIDE_ENCODER_CA", str(other))
        with pytest.raises(UserError, match="not to be trusted"):
            _remote(server)
        monkeypatch.setenv("CONFIDE_ENCODER_CA", str(cert))
        silent = socket.create_connection(server.address)  # never says hello
        remote = _remote(server)
        with torch.no_grad():
            torch.testing.assert_close(remote.hidden(remote.tokens(TEXTS)), local.hidden(local.tokens(TEXTS)), **CLOSE)
        silent.close()
    monkeypatch.setenv("CONFIDE_ENCODER_CA", str(tmp_path / "none.pem"))
    with pytest.raises(UserError, match="cannot read the certificates"):
        open_encoder(EncoderSettings(source="https://127.0.0.1:1"))


def test_a_certificate_for_another_host_is_refused(
    local: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = _certificate(tmp_path, "elsewhere", "10.0.0.1")
    monkeypatch.setenv("CONFIDE_ENCODER_CA", str(cert))
    with _serving(local, tls=tls_context(cert, key)) as server, pytest.raises(UserError, match="not to be trusted"):
        _remote(server)


def test_https_to_a_server_without_tls_is_explained(server: EncoderServer) -> None:
    with pytest.raises(UserError, match="does not speak TLS"):
        open_encoder(EncoderSettings(source=server.url.replace("http:", "https:")))


def test_plain_http_beyond_this_machine_needs_to_be_said(local: Encoder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plain HTTP on 0\.0\.0\.0 .*--insecure"):
        EncoderServer(local, [TOKEN], host="0.0.0.0")
    with _serving(local, host="0.0.0.0", insecure=True):
        pass
    cert, _ = _certificate(tmp_path, "one")
    _, key = _certificate(tmp_path, "two")
    with pytest.raises(UserError, match="expected two PEM files that belong together"):
        tls_context(cert, key)


# Losses


def test_a_server_that_is_started_again_is_not_noticed_and_one_with_another_model_is(
    local: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(local) as first:
        remote = _remote(first)
        port = first.port
        expected = _answer_and_gradient(remote, TEXTS, _adapter())
    started = threading.Event()

    def later() -> None:
        time.sleep(0.3)
        with _serving(local, port=port):
            started.wait(20)

    thread = threading.Thread(target=later)
    thread.start()
    torch.testing.assert_close(_answer_and_gradient(remote, TEXTS, _adapter()), expected, **CLOSE)
    started.set()
    thread.join()
    with _serving(local, port=port) as other:
        other.service.model = "0" * 64
        with pytest.raises(UserError, match="has another model than the one this run was started with"):
            remote.hidden(remote.tokens(TEXTS))


def test_a_run_goes_on_only_with_the_encoder_that_it_was_started_with(server: EncoderServer, local: Encoder) -> None:
    source = EncoderSettings(source=server.url)
    assert open_encoder(source, identity=local.identity).identity == local.identity
    with pytest.raises(UserError, match="this run was started with"):
        open_encoder(source.model_copy(update={"pooling": "mean"}), identity=local.identity)


def test_what_is_fetched_is_checked_and_fetched_again_if_it_was_damaged(server: EncoderServer, local: Encoder) -> None:
    remote = _remote(server)
    path = remote.client.fetch("/tokeniser", remote.about.tokeniser, "tokenizer.json")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    again = _remote(server)
    assert path.read_bytes() == whole
    assert torch.equal(again.tokens(TEXTS).ids, local.tokens(TEXTS).ids)
    with pytest.raises(UserError, match="is not what it says in /about"):
        remote.client.fetch("/tokeniser", "0" * 64, "tokenizer.json")


def test_a_server_that_is_killed_in_the_middle_of_a_request_leaves_a_clear_error(
    local: Encoder, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who: this test\n\n{TOKEN}\n")
    words = ("--token-file", tokens, "--max-tokens", 60000, "--port", 0)
    with warm.encoder_server("minilm", tmp_path, *words) as (process, url):
        remote = RemoteEncoder(EncoderSettings(source=url), patience=0.5)
        assert remote.identity == local.identity  # made by another process
        batch = remote.tokens(["many words " * 120] * 200)  # many seconds of work

        def kill() -> None:
            time.sleep(0.5)
            process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(UserError, match=r"does not answer .*confide resume"):
            remote.hidden(batch)
        thread.join()


def test_sigterm_lets_the_request_under_way_finish(local: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.encoders.encoder.Encoder", lambda _: local)
    monkeypatch.setattr("confide.encoders.remote._OPENING", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    computing = threading.Event()
    blocks = type(local).blocks

    def slow_blocks(*given: Any) -> Tensor:
        computing.set()
        time.sleep(0.5)
        return blocks(*given)

    def stop() -> None:
        computing.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    def ask_and_stop() -> Tensor:
        remote = RemoteEncoder(EncoderSettings(source=f"http://127.0.0.1:{port}"), patience=1.0)
        monkeypatch.setattr(type(local), "blocks", slow_blocks)
        threading.Thread(target=stop).start()
        return remote.hidden(remote.tokens(TEXTS))

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_and_stop)
        result = CliRunner().invoke(app, ["serve", "minilm", "--port", str(port)])
        found = answer.result(timeout=60)
    assert result.exit_code == 0, result.output
    assert f"at http://127.0.0.1:{port}\n" in result.stdout
    assert result.stdout.endswith("stopped\n")
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(found, local.hidden(local.tokens(TEXTS)), **CLOSE)


# The command


def test_a_served_encoder_is_described_as_the_server_says(server: EncoderServer, local: Encoder) -> None:
    result = CliRunner().invoke(app, ["describe", server.url, "--json"])
    facts = json.loads(result.stdout)
    assert (facts["identity"], facts["width"], facts["limits"]["texts"]) == (local.identity, 384, 8)
    assert local.identity[:16] in CliRunner().invoke(app, ["describe", server.url]).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cert", "a.pem"], "only one of --cert and --key"),
        (["--host", "0.0.0.0"], "plain HTTP on 0.0.0.0"),
        (["--cert", "a.pem", "--key", "b.pem"], "cannot use the certificate a.pem"),
        (["--token-file", "no-such-file"], "cannot read access tokens"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no/such-model", *words])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)


# The wire


def test_what_is_fetched_is_the_table_of_token_embeddings(server: EncoderServer, local: Encoder) -> None:
    remote = _remote(server)
    path = remote.client.fetch("/embeddings", remote.about.embeddings, "embeddings.safetensors")
    table = load(path.read_bytes(), {"embeddings": (torch.float32, 2)})["embeddings"]
    assert torch.equal(table, local.model.get_input_embeddings().weight)


def test_what_is_a_server() -> None:
    assert all(map(is_url, ("https://a:1", "http://127.0.0.1:1")))
    assert not any(map(is_url, ("minilm", "owner/name", "/models/x", "https.gguf")))
