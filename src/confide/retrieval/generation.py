"""GEN(x, top-K documents): the query with its documents goes to a frozen generator (CAR section 3.2).

The generator is a local causal model, or any server that speaks the chat completions of OpenAI's interface, named by
its URL. Both are given the same messages and hand on the answer piece by piece.

A server's token comes from an environment variable, goes nowhere but to that URL (redirects are refused), and not over
an unencrypted connection to another machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from confide.errors import UserError
from confide.retrieval.data import Document
from confide.web.address import is_loopback

TOKEN_VARIABLE = "CONFIDE_GENERATOR_TOKEN"
Message = dict[str, str]
Emit = Callable[[str], None]
# A document's share of the prompt, so that a few of them fit into a small model's context.
_DOCUMENT_CHARACTERS = 2000
_ERROR_CHARACTERS = 300
# Short, because small models follow little; the sources are named by the program, not by the model.
_INSTRUCTION = (
    "Answer the question in one or two sentences, using only the documents. If they do not hold the answer, say so."
)


class Generator(Protocol):
    """Something that answers."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: Sequence[Message], emit: Emit) -> str:
        """The whole answer; `emit` gets each piece of it as it comes."""
        ...


def prompt(query: str, documents: Sequence[Document]) -> list[Message]:
    """The query with its documents, numbered from 1, as messages of a chat."""
    listed = "\n".join(f"[{number}] {_shortened(document)}" for number, document in enumerate(documents, start=1))
    return [
        {"role": "system", "content": _INSTRUCTION},
        {"role": "user", "content": f"Documents:\n{listed}\n\nQuestion: {query.strip()}"},
    ]


def printable(text: str) -> str:
    """A model's words without the control characters that could change a terminal."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))


def _shortened(document: Document) -> str:
    text = " ".join(document.text.split())
    return text if len(text) <= _DOCUMENT_CHARACTERS else f"{text[:_DOCUMENT_CHARACTERS]} ..."


class LocalModel:
    """A causal language model on this machine; it decodes greedily, so an answer can be repeated."""

    def __init__(self, source: str, max_tokens: int = 256) -> None:
        self.name, self.max_tokens = source, max_tokens
        self.model, self.tokeniser = _load(source)

    def answer(self, messages: Sequence[Message], emit: Emit) -> str:
        import torch
        from transformers import TextStreamer

        pieces: list[str] = []

        class Pieces(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text:
                    pieces.append(printable(text))
                    emit(pieces[-1])

        tokens = self._tokens(messages)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and tokens["input_ids"].shape[1] + self.max_tokens > limit:
            raise UserError(
                f"question and documents are {tokens['input_ids'].shape[1]} tokens and the answer may have "
                f"{self.max_tokens}; {self.name} takes {limit} in all: retrieve fewer documents (-k)"
            )
        streamer: Any = Pieces
        with torch.no_grad():
            self.model.generate(
                **tokens, max_new_tokens=self.max_tokens, do_sample=False, repetition_penalty=1.1,
                pad_token_id=self.tokeniser.pad_token_id or self.tokeniser.eos_token_id,
                streamer=streamer(self.tokeniser, skip_prompt=True, skip_special_tokens=True),
            )  # fmt: skip
        return "".join(pieces).strip()

    def _tokens(self, messages: Sequence[Message]) -> Any:
        if getattr(self.tokeniser, "chat_template", None):
            return self.tokeniser.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        plain = "\n\n".join(message["content"] for message in messages) + "\n\nAnswer:"
        return self.tokeniser(plain, return_tensors="pt", return_token_type_ids=False)


def _load(source: str) -> tuple[Any, Any]:
    """A causal model with its language head, and its tokeniser."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from confide.encoders.weights import asking, explain_unreadable, find, is_causal

    folder = find(source)
    where = asking(folder is not None)
    place = str(folder or source)
    expected = "a causal language model: a preset (`confide encoder list`), a transformers folder or a GGUF file"
    with explain_unreadable(f"read the generator {source}", expected):
        config = AutoConfig.from_pretrained(place, **where)
        if not is_causal(config):
            raise UserError(
                f"{source} is a {config.model_type}, a masked model that cannot write; expected a causal language "
                "model: smollm2, tinyllama, a transformers folder or a GGUF file"
            )
        tokeniser = AutoTokenizer.from_pretrained(place, **where)
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, use_safetensors=True, **where)
    model.eval().requires_grad_(False)
    model.generation_config.max_length = None  # or it warns beside max_new_tokens
    return model, tokeniser


@dataclass(frozen=True)
class ChatServer:
    """A server with OpenAI's chat completions, for example https://host/v1."""

    url: str
    model: str
    token: str | None = None
    stream: bool = True
    max_tokens: int = 256
    seconds: float = 120.0

    @property
    def name(self) -> str:
        return f"{self.model} at {self.url}"

    def answer(self, messages: Sequence[Message], emit: Emit) -> str:
        body = {
            "model": self.model, "messages": list(messages), "stream": self.stream, "max_tokens": self.max_tokens,
            "temperature": 0,
        }  # fmt: skip
        headers = {"Accept": "text/event-stream, application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        pieces: list[str] = []
        try:
            # A redirect is not followed: it would carry the token, and the query, to another place.
            with httpx.stream("POST", _endpoint(self.url), json=body, headers=headers, timeout=self.seconds) as reply:
                if not reply.is_success:
                    raise UserError(self._explain_refusal(reply))
                for piece in _read_pieces(reply, self.url):
                    pieces.append(printable(piece))
                    emit(pieces[-1])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            begun = f" after {sum(map(len, pieces))} characters of the answer" if pieces else ""
            raise UserError(
                f"{self.url} could not be reached or broke off{begun} ({str(error) or type(error).__name__}); expected "
                "a server with OpenAI's chat completions: check the address, and that the server runs"
            ) from None
        whole = "".join(pieces).strip()
        if not whole:
            raise UserError(f"{self.url} gave an empty answer; expected text: try another --model")
        return whole

    def _explain_refusal(self, reply: httpx.Response) -> str:
        text = next(reply.iter_text(4096), "")
        with suppress(ValueError):  # what is no JSON is quoted as it is
            text = str(_error_of(json.loads(text)))
        said = " ".join(text.split())[:_ERROR_CHARACTERS]
        advice = {
            401: "set the environment variable with its token" if not self.token else "check the token",
            403: "check what the token is allowed to do",
            404: "check the URL (it usually ends in /v1) and --model",
            429: "wait, or ask less often",
        }.get(reply.status_code, "check the URL, --model and the server's own log")
        if reply.is_redirect:
            advice = f"it points to {reply.headers['Location']}; give that URL if you trust it"
        return f"{self.url} answered {reply.status_code} {reply.reason_phrase}{f': {said}' if said else ''}; {advice}"


def chat_server(url: str, model: str | None, token_variable: str = TOKEN_VARIABLE, **more: Any) -> ChatServer:
    """A server by its URL, with the token that the environment holds; checked before anything is sent."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--url {url!r} is not an address; expected http://... or https://..., usually ending in /v1")
    if parts.username or parts.password:
        raise UserError(
            f"--url names a user or a password, which others on this machine can read; put the token into the "
            f"environment variable {token_variable}"
        )
    if not model:
        raise UserError("--url needs --model: the name of the model that the server should use")
    token = os.environ.get(token_variable)
    if token and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UserError(
            f"the token of {token_variable} would go to {parts.hostname} unencrypted; use https://, or unset the "
            "variable if the server wants no token"
        )
    return ChatServer(url, model, token, **more)


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
    return parts._replace(path=path, fragment="").geturl()


def _read_pieces(reply: httpx.Response, url: str) -> Iterator[str]:
    """Read the answer's text from a stream of events or from one JSON document, whichever the server chose."""
    if not reply.headers.get("Content-Type", "").startswith("text/event-stream"):
        yield _text_of(_parse(reply.read(), url), "message", url)
        return
    for line in reply.iter_lines():
        field, _, value = line.strip().partition(":")
        if field != "data":  # comments that keep the connection alive, event names, blank lines
            continue
        if value.strip() == "[DONE]":
            return
        yield _text_of(_parse(value.encode(), url), "delta", url)
    raise UserError(f"{url} ended its stream before it was done; ask again")


def _parse(text: bytes, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        begin = text[:80].decode("utf-8", "replace")
        raise UserError(
            f"{url} answered {begin!r}, which is not JSON; expected OpenAI's chat completions: check the URL, which "
            "usually ends in /v1"
        ) from None


def _text_of(document: Any, key: str, url: str) -> str:
    """The text in a completion (key `message`) or in a piece of one (`delta`); a piece may have none."""
    try:
        if "error" in document:
            raise UserError(f"{url} failed: {str(_error_of(document))[:_ERROR_CHARACTERS]}")
        if not document["choices"] and key == "delta":  # the last piece of some servers counts tokens
            return ""
        text = document["choices"][0][key].get("content")
        return text if isinstance(text, str) else ""
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UserError(
            f"{url} answered {json.dumps(document)[:80]}, which is no chat completion; expected choices with a "
            f"{key}: check the URL, which usually ends in /v1"
        ) from None


def _error_of(document: Any) -> Any:
    said = document.get("error", document) if isinstance(document, dict) else document
    return said.get("message", said) if isinstance(said, dict) else said
