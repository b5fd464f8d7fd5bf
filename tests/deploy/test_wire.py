"""What arrives is a parcel of the announced size, or is refused before memory is given for it."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.deploy.parcels import Parcel
from confide.deploy.remote import JOIN, SUM, TRAIN
from confide.deploy.wire import HEAD, PART, Incoming, Malformed, frames, largest_head, ticket_of
from confide.privacy.trust.neighbours import neighbourhood
from confide.privacy.trust.secure import BOX, CONFIRM, KEYS, MASKED, SHARES, UNMASK
from confide.privacy.trust.shamir import SHARE


def through(parcel: Parcel, limit: int = 1 << 30) -> Incoming:
    sent = list(frames(7, "train", parcel))
    made = Incoming.begin(sent[0], limit)
    for part in sent[1:]:
        made.add(part)
    assert made.complete
    return made


@pytest.mark.parametrize("length", [0, 1, PART // 8, PART // 8 + 1, 3 * PART // 8 - 5])
def test_a_parcel_arrives_as_it_was(length: int) -> None:
    arrays = {"a": np.arange(length, dtype=np.float64), "b": np.arange(5, dtype=np.uint64), "c": np.empty(0, "<f4")}
    facts = {"n": 1, "x": float("inf"), "text": "ü", "keys": [b"\x00\xff", b""], "list": [1.5, 2.5], "yes": True}
    made = through(Parcel(facts, arrays))
    assert (made.ticket, made.kind, made.facts) == (7, "train", facts)
    assert {name: array.tolist() for name, array in made.parcel.arrays.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


BAD: list[Any] = [
    [], [1, "k", {}], [1, "k", {}, [], 5], {"a": 1, "b": 2, "c": 3, "d": 4}, 5, None, "text", ["1", "k", {}, []],
    [1, 5, {}, []], [1, "k", [], []], [1, "k", {b"x": 1}, []], [True, "k", {}, []], [1, "k", {}, 5],
    [1, "k", {}, [["a", "<f4", -1]]], [1, "k", {}, [["a", "<f4", 2**62]]], [1, "k", {}, [["a", "O", 1]]],
    [1, "k", {}, [["a", "<f4"]]], [1, "k", {}, [["a", "<f4", 1.0]]], [1, "k", {}, [[5, "<f4", 1]]],
    [1, "k", {}, [["a", "<f4", 1], ["a", "<f4", 1]]], [1, "k", {}, [["a", ["<f4"], 1]]],
    [1, "k", {}, [[f"a{n}", "<f4", 1] for n in range(9)]], [1, "k", {}, [["a", "<f4", True]]],
]  # fmt: skip


@pytest.mark.parametrize("head", BAD, ids=lambda head: repr(head)[:30])
def test_a_head_of_another_form_is_refused(head: Any) -> None:
    with pytest.raises(Malformed):
        Incoming.begin(msgpack.packb(head), 1 << 20)


def test_what_is_larger_than_announced_or_allowed_is_refused() -> None:
    parcel = Parcel({}, {"a": np.zeros(10)})
    head = next(iter(frames(1, "", parcel)))
    with pytest.raises(Malformed, match="at most 79"):
        Incoming.begin(head, 79)
    for part in (b"", b"x" * 79, b"x" * 81, "x" * 80, None):
        with pytest.raises(Malformed, match="another length"):
            Incoming.begin(head, 80).add(part)
    with pytest.raises(Malformed, match="too long"):
        Incoming.begin(b"\xc0" * (HEAD + 1), 0)


def head(facts: dict[str, Any]) -> bytes:
    return next(iter(frames(1 << 40, "", Parcel(CALL | facts, {"update": np.zeros(0)}))))


CALL = {"run": "0" * 32, "step": 1 << 20, "nonce": "0" * 32, "version": "0.1.0", "recipe": "0" * 64, "layout": "0" * 16,
        "encoder": "0" * 64, "user": 1 << 20}  # fmt: skip
LISTS = ("layer_norms", "layer_norms_squared", "layer_bounded", "votes")


@pytest.mark.parametrize("users", [1, 64, 1000, 10_000, 30_000])
def test_what_an_honest_client_says_fits_into_the_head_that_its_question_allows(users: int) -> None:
    many, neighbours = list(range(1 << 20, (1 << 20) + users)), neighbourhood(users)
    said: dict[str, dict[str, Any]] = {
        JOIN: {"users": many, "relay": True},
        TRAIN: {"loss": 0.1, "votes": [0.5] * 500, "norms": [0.1] * 1000},
        SUM: {"users": many, "tally": {name: [0.1] * 1000 for name in LISTS}},
        KEYS: {"public": [bytes(32), bytes(32), bytes(72)], "picks": many[:neighbours]},
        SHARES: {"holders": many[:neighbours], "boxes": [bytes(BOX)] * neighbours, "hashes": [bytes(32)] * neighbours,
                 "commitment": bytes(32)},
        MASKED: {"damaged": many},
        CONFIRM: {"signature": bytes(72)},
        UNMASK: {"of": many, "shares": [bytes(SHARE)] * users},
    }  # fmt: skip
    for kind, facts in said.items():
        assert len(head(facts)) <= largest_head(kind, users) <= HEAD, kind
        assert len(head(facts)) <= largest_head("", users), "late, so that nobody knows to what it is an answer"


def test_only_answers_that_name_many_users_may_have_a_long_head() -> None:
    assert {kind: largest_head(kind, 10**6) for kind in (TRAIN, KEYS, SHARES, CONFIRM)} == dict.fromkeys(
        (TRAIN, KEYS, SHARES, CONFIRM), 64 << 10
    )
    with pytest.raises(Malformed, match="at most 65536"):
        Incoming.begin(b"\x94\x01\xa0\x81\xa1x\xdd" + bytes(1 << 16), 0, largest_head(TRAIN, 100))
    assert largest_head(UNMASK, 100) < 80_000


def test_a_ticket_is_read_before_the_rest() -> None:
    assert ticket_of(head({})) == 1 << 40
    assert ticket_of(msgpack.packb([7, "", {}, []])[:2]) == 7
    for frame in (b"", b"\x94", b"\x94" + b"\x91" * 1000, b"\xc0", b"\x94\xa1x", b"\x94\xc3", "text", None):
        with pytest.raises(Malformed):
            ticket_of(frame)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_anything_but_be_refused_or_read(content: bytes) -> None:
    try:
        made = Incoming.begin(content, 1000)
    except Malformed:
        return
    assert ticket_of(content) == made.ticket
    assert made.size <= 1000
