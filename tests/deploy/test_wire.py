"""What arrives is a parcel of the announced size, or is refused before memory is given for it."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.deploy.parcels import Parcel
from confide.deploy.wire import HEAD, PART, Incoming, Malformed, frames


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


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_anything_but_be_refused_or_read(content: bytes) -> None:
    try:
        made = Incoming.begin(content, 1000)
    except Malformed:
        return
    assert made.size <= 1000
