"""Claims about long ledgers and budgets: a step's accounting does not grow with the lines that there are already.

Operations are counted, never time: calls of functions, resumptions of generators among them, and bytes that are read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from confide.errors import UserError
from confide.privacy import accountant, chain
from confide.privacy.accountant import epsilon
from confide.privacy.budget import Budget
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger

EVENT = Event("poisson", 0.1, 10, 100, 2.0, 0.5)
FRESH = {"fresh_cohorts": True}


def calls(work: Callable[[], object]) -> int:
    """How many functions `work` calls, in Python or in C."""
    count = 0

    def seen(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def with_lines(lines: int, event: Callable[[int], Event] = lambda _: EVENT) -> Ledger:
    book = Ledger.create(None, FRESH)
    for step in range(lines):
        book.record(step, event(step), "here")
    return book


@pytest.mark.parametrize("event", [lambda _: EVENT, lambda step: replace(EVENT, sensitivity=1 / (step + 2))])
def test_accounting_for_a_step_takes_no_more_calls_after_more_lines(
    event: Callable[[int], Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the bound, and with it every line's sensitivity, moves from step to step."""
    monkeypatch.setattr(accountant, "_epsilon", lambda *_: 1.0)  # whose own work is another's, and kept

    def one_step(book: Ledger) -> None:
        book.record(book.count, event(book.count), "here")
        assert epsilon(book.counted(), 1e-5, "pld") == 1.0

    few, many = (with_lines(lines, event) for lines in (20, 2000))
    one_step(few)  # what is made once
    assert calls(lambda: one_step(many)) == calls(lambda: one_step(few)) < 400


def test_a_step_that_is_made_again_looks_at_the_lines_after_it_alone() -> None:
    found = []
    for lines in (20, 2000):
        book = with_lines(lines)
        found.append(calls(partial(book.next_attempt, book.count - 3, EVENT, "here")))
        assert book.next_attempt(book.count - 3, EVENT, "here") == 0
    assert found[0] == found[1]


def test_counted_costs_are_those_of_all_lines(tmp_path: Path) -> None:
    """Bounds that moved, two noise multipliers, and lines that were read back."""
    book = Ledger.create(tmp_path / "ledger.jsonl", FRESH)
    for step in range(12):
        book.record(step, replace(EVENT, sensitivity=1 / (step + 1), noise_multiplier=2.0 + step % 2), "here")
    for held in (book, Ledger.read(tmp_path / "ledger.jsonl")):
        assert sorted(held.counted().values()) == [6, 6]
        for kind in ("pld", "rdp"):
            assert epsilon(held.counted(), 1e-5, kind) == epsilon(held.charged(), 1e-5, kind)
    assert epsilon(book.counted(), 1e-5, "rdp") > epsilon(Counter({EVENT: 6}), 1e-5, "rdp")


def test_a_release_without_a_bound_among_correlated_ones_leaves_no_guarantee() -> None:
    book = Ledger.create(None, {**FRESH, "restarts": True})
    turn = Event("cyclic", 0.25, 25, 100, 2.0, 0.5, separation=4, rounds=8, bands=2)
    book.record(0, turn, "here")
    assert book.charged() == [turn]
    book.record(1, replace(turn, sensitivity=None), "here")
    with pytest.raises(UserError, match="there is no guarantee"):
        book.charged()


class Watched:
    """An open file that counts the bytes read from it."""

    def __init__(self, file: Any) -> None:
        self.file, self.bytes = file, 0

    def read(self, size: int = -1) -> bytes:
        found: bytes = self.file.read(size)
        self.bytes += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("torn", [0, 10, 3 * chain._PIECE])
def test_a_torn_line_is_found_from_the_end_of_the_file(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "lines"
    whole = b"x" * 100 + b"\n"
    path.write_bytes(whole * 5000 + b"y" * torn)
    with path.open("r+b") as file:
        watched: Any = Watched(file)
        assert chain.drop_torn_end(watched) is (torn > 0)
    assert watched.bytes <= torn + 2 * chain._PIECE
    assert path.read_bytes() == whole * 5000


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"z" * (2 * chain._PIECE + 1))
    assert chain.drop_torn_line(path)
    assert path.read_bytes() == b""
    assert not chain.drop_torn_line(path)


def test_a_charge_takes_no_more_calls_after_more_charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    people = Budget.create(tmp_path / "budget.jsonl", 1e9, 1e-5, "a hundred people")

    def charge(step: int) -> None:
        people.charge("run", replace(EVENT, sensitivity=1 / (step + 2)), key=f"step {step}")

    found = {}
    for step in range(600):
        found[step] = calls(partial(charge, step))
    assert found[599] == found[20] < 500
    assert people.counts["run"] == 600
    assert Budget.read(tmp_path / "budget.jsonl").head == people.head
