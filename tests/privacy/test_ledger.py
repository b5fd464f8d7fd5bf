"""Claims about the ledger: it is on disk before the noise, no edit of it goes unseen, and it never under-counts."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide import build, recipe
from confide.errors import UserError
from confide.privacy import ledger
from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.ledger import Entry, Ledger
from confide.privacy.mechanisms import Occasion, Privacy
from confide.privacy.plan import Release, make_plan
from confide.privacy.sampling import Sampling
from confide.recipe import Recipe
from confide.runs import checkpoint, folder
from support.keyless import ledger_without_key

# A property holds on a busy machine as well.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
pytestmark = pytest.mark.usefixtures("no_figures_here")

HEADER: dict[str, Any] = {
    "recipe": "ca07992500a4f362",
    "delta": 1e-05,
    "accountant": "pld",
    "adjacency": "add-or-remove one user",
    "noise_source": "seeded",
    "for_release": False,
}
# The digits of a real run: 57 of 287 users, bound 31.25, a calibrated multiplier.
EVENT = Event("poisson", 57 / 287, 57, 287, 2.4561767578125, 31.25 / 57)
HERE, ELSEWHERE = "9ba251a27e06fc0f", "0123456789abcdef"
STEPS = 4


def written(path: Path, steps: int = STEPS) -> Ledger:
    book = Ledger.create(path, HEADER)
    for step in range(steps):
        book.record(step, EVENT, HERE)
    return book


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound ledger."""
    path = tmp_path_factory.mktemp("whole") / ledger.FILE
    written(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / ledger.FILE


def read(scratch: Path, content: bytes) -> Ledger:
    scratch.write_bytes(content)
    return Ledger.read(scratch)


def refused(scratch: Path, content: bytes) -> bool:
    """Whether the content is refused, and in words: any other exception is a defect."""
    try:
        read(scratch, content)
    except UserError as error:
        return "line" in str(error)
    return False


# Writing and reading


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    book = written(tmp_path / ledger.FILE)
    again = Ledger.read(tmp_path / ledger.FILE)
    assert again.header == HEADER
    assert again.entries == [Entry(step, 0, HERE, EVENT) for step in range(STEPS)]
    assert (again.head, again.heads, again.latest) == (book.head, book.heads, book.latest)
    assert again.count == book.count == STEPS
    assert len(again.heads) == STEPS + 1


def test_a_ledger_that_was_read_goes_on_with_the_chain(tmp_path: Path) -> None:
    written(tmp_path / ledger.FILE)
    Ledger.read(tmp_path / ledger.FILE).record(STEPS, EVENT, HERE)
    assert [entry.step for entry in Ledger.read(tmp_path / ledger.FILE).entries] == list(range(STEPS + 1))


def test_a_ledger_in_memory_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = Ledger.create(None, HEADER)
    assert book.record(0, EVENT, HERE) == 0
    assert book.count == 1
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ledger.FILE
    seen: list[bytes] = []

    def sync(descriptor: int) -> None:
        assert os.fstat(descriptor).st_ino == path.stat().st_ino
        seen.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", sync)
    written(path, steps=2)
    assert [content.count(b"\n") for content in seen] == [1, 2, 3]
    assert all(content.endswith(b"}\n") for content in seen)


@pytest.mark.parametrize("content", [b"", b'{"run":{}'])
def test_a_ledger_without_a_complete_line_is_refused(scratch: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="no complete line"):
        read(scratch, content)


def test_a_missing_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Ledger.read(tmp_path / ledger.FILE)


# Attempts


def test_the_same_step_made_again_in_the_same_place_adds_no_line(tmp_path: Path) -> None:
    book = written(tmp_path / ledger.FILE)
    before = (tmp_path / ledger.FILE).read_bytes()
    for taken_up in (book, Ledger.read(tmp_path / ledger.FILE)):
        assert [taken_up.record(step, EVENT, HERE) for step in range(STEPS)] == [0] * STEPS
        assert taken_up.count == STEPS
    assert (tmp_path / ledger.FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("event", "environment"),
    [
        (EVENT, ELSEWHERE),
        (Event("poisson", 57 / 287, 57, 287, 3.0, 31.25 / 57), HERE),
        (Event("poisson", 57 / 287, 57, 287, 2.4561767578125, 1.0), HERE),
    ],
    ids=["environment", "noise", "sensitivity"],
)
def test_a_step_made_again_otherwise_is_a_new_attempt(tmp_path: Path, event: Event, environment: str) -> None:
    written(tmp_path / ledger.FILE)
    book = Ledger.read(tmp_path / ledger.FILE)
    assert book.record(2, event, environment) == 1
    assert book.record(2, event, environment) == 1, "the new attempt is on record and stands for itself"
    again = Ledger.read(tmp_path / ledger.FILE)
    assert again.count == STEPS + 1
    assert again.latest[2] == Entry(2, 1, environment, event)
    assert again.latest[1] == Entry(1, 0, HERE, EVENT)


def test_going_back_to_the_first_environment_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    book = written(tmp_path / ledger.FILE)
    assert [book.record(0, EVENT, place) for place in (ELSEWHERE, HERE, ELSEWHERE)] == [1, 2, 3]
    assert Ledger.read(tmp_path / ledger.FILE).count == STEPS + 3


def test_every_step_after_one_that_was_released_anew_is_counted_again(tmp_path: Path) -> None:
    """It begins from another model, so that its value is another one, though the place is the first one again."""
    book = written(tmp_path / ledger.FILE)
    assert book.record(2, EVENT, ELSEWHERE) == 1
    assert [book.record(step, EVENT, HERE) for step in range(3, STEPS)] == [1] * (STEPS - 3)
    assert Ledger.read(tmp_path / ledger.FILE).count == STEPS + 1 + STEPS - 3


def test_another_attempt_draws_other_noise() -> None:
    settings = Privacy(mechanism="gaussian", noise_multiplier=1.0, delta=1e-5)
    plan = make_plan(settings, Sampling(cohort=20), np.full(100, 0.01), 1.0, 10, 0)
    first, second, third, again = (torch.zeros(1000) for _ in range(4))
    for total, attempt in zip((first, second, third, again), (0, 1, 2, 0), strict=True):
        plan.mechanism.release(total, Occasion(plan.event, plan.cohort(3), 3, attempt, {}))
    assert torch.equal(first, again)
    for one, other in [(first, second), (first, third), (second, third)]:
        assert not bool((one == other).any())


def test_an_extra_attempt_is_counted(tmp_path: Path) -> None:
    book = written(tmp_path / ledger.FILE)
    once = epsilon([e.event for e in book.entries], 1e-5, "rdp")
    book.record(0, EVENT, ELSEWHERE)
    entries = Ledger.read(tmp_path / ledger.FILE).entries
    assert epsilon([e.event for e in entries], 1e-5, "rdp") > once
    assert epsilon([e.event for e in entries], 1e-5, "rdp") == epsilon([EVENT] * (STEPS + 1), 1e-5, "rdp")


# Edits


def test_every_line_that_goes_missing_before_the_last_is_found(scratch: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for gone in range(len(lines) - 1):
        assert refused(scratch, b"".join(lines[:gone] + lines[gone + 1 :])), f"line {gone + 1}"


def test_every_line_that_comes_twice_is_found(scratch: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for twice in range(len(lines)):
        assert refused(scratch, b"".join(lines[: twice + 1] + lines[twice:])), f"line {twice + 1}"
        assert refused(scratch, whole + lines[twice]), f"line {twice + 1} at the end"


def test_every_swap_of_neighbouring_lines_is_found(scratch: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    for first in range(len(lines) - 1):
        swapped = [*lines[:first], lines[first + 1], lines[first], *lines[first + 2 :]]
        assert refused(scratch, b"".join(swapped)), f"lines {first + 1} and {first + 2}"


def test_the_first_line_that_was_edited_removed_or_moved_is_named(scratch: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)

    def named(content: list[bytes]) -> int:
        scratch.write_bytes(b"".join(content))
        with pytest.raises(UserError, match=r"line \d+") as told:
            Ledger.read(scratch)
        return int(str(told.value).split("line ")[1].split(":")[0])

    for number, line in enumerate(lines, start=1):
        changed = line.replace(b"1e-05", b"2e-05") if number == 1 else line.replace(b"poisson", b"fixed")
        assert changed != line
        assert named([*lines[: number - 1], changed, *lines[number:]]) == number
    for number in range(1, len(lines)):
        before, line, following = lines[: number - 1], lines[number - 1], lines[number:]
        assert named([*before, *following]) == number, "whatever stands in its place"
        assert named([*before, following[0], line, *following[1:]]) == number


def test_a_line_of_another_run_is_found(scratch: Path, whole: bytes, tmp_path: Path) -> None:
    other = Ledger.create(tmp_path / ledger.FILE, {**HEADER, "recipe": "another"})
    other.record(0, EVENT, HERE)
    stranger = (tmp_path / ledger.FILE).read_bytes().splitlines(keepends=True)[1]
    lines = whole.splitlines(keepends=True)
    for place in range(len(lines) + 1):
        assert refused(scratch, b"".join([*lines[:place], stranger, *lines[place:]]))


def test_every_digit_that_is_changed_is_found(scratch: Path, whole: bytes) -> None:
    """All digits of all lines, the last one among them; each becomes the next digit."""
    places = [place for place, byte in enumerate(whole) if chr(byte).isdigit()]
    assert len(places) > 500
    unseen = [
        whole[max(0, place - 30) : place + 5]
        for place in places
        if not refused(scratch, _with(whole, place, b"%d" % ((int(chr(whole[place])) + 1) % 10)))
    ]
    assert unseen == []


@settings(CALM, max_examples=200)
@given(data=st.data())
def test_every_small_edit_is_found(scratch: Path, whole: bytes, data: st.DataObject) -> None:
    """A byte replaced, put in or taken out anywhere; only the last line's end may be torn off."""
    place = data.draw(st.integers(0, len(whole) - 2), label="place")
    byte = data.draw(st.binary(min_size=1, max_size=1).filter(lambda b: b[0] != whole[place]), label="byte")
    edit = data.draw(st.sampled_from(["replace", "insert", "delete"]), label="edit")
    rest = whole[place:] if edit == "insert" else whole[place + 1 :]
    assert refused(scratch, whole[:place] + (b"" if edit == "delete" else byte) + rest)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"noise_multiplier":2.4561767578125', b'"noise_multiplier":24.561767578125'),
        (b'"noise_multiplier":2.4561767578125', b'"noise_multiplier":NaN'),
        (b'"noise_multiplier":2.4561767578125', b'"noise_multiplier":1e999'),
        (b'"delta":1e-05', b'"delta":1e905'),
        (b'"delta":1e-05', b'"delta":0.1'),
        (b'"attempt":0', b'"attempt":7'),
        (b'"accountant":"pld"', b'"accountant":"rdp"'),
        (b'"attempt":0', b'"attempt":1,"attempt":0'),
        (b'"attempt":0', b'"attempt": 0'),
    ],
)
def test_a_careful_edit_is_found(scratch: Path, whole: bytes, before: bytes, after: bytes) -> None:
    assert before in whole
    assert refused(scratch, whole.replace(before, after, 1))


@pytest.mark.parametrize("line", [b"[]", b'["hash"]', b"3", b"null", b'"text"', b"{}", b"", b"\xff\xfe", b'{"hash":1}'])
def test_a_line_of_another_kind_is_refused(scratch: Path, whole: bytes, line: bytes) -> None:
    assert refused(scratch, whole + line + b"\n")
    assert refused(scratch, line + b"\n" + whole)


def test_a_line_with_a_sound_hash_must_still_be_a_release(tmp_path: Path) -> None:
    """Somebody who knows the chain can go on with it, but not with an event that the accountant does not know."""
    for body in ({"step": 0}, {"step": 0, "attempt": 0, "environment": HERE, "event": {"sampler": "shuffled"}}):
        path = tmp_path / f"{len(body)}.jsonl"
        book = Ledger.create(path, HEADER)
        book._write(body)
        with pytest.raises(UserError, match="line 2"):
            Ledger.read(path)


def _with(content: bytes, place: int, byte: bytes) -> bytes:
    return content[:place] + byte + content[place + 1 :]


# A torn end


def test_a_torn_last_line_is_left_out_wherever_it_was_torn(scratch: Path, whole: bytes) -> None:
    last = whole[:-1].rfind(b"\n") + 1
    for end in range(last + 1, len(whole)):
        assert read(scratch, whole[:end]).count == STEPS - 1
        assert Ledger.drop_torn_line(scratch)
        assert scratch.read_bytes() == whole[:last]


def test_a_whole_ledger_loses_nothing(scratch: Path, whole: bytes) -> None:
    scratch.write_bytes(whole)
    assert not Ledger.drop_torn_line(scratch)
    assert scratch.read_bytes() == whole


def test_a_torn_line_is_followed_by_a_sound_one(scratch: Path, whole: bytes) -> None:
    scratch.write_bytes(whole[:-20])
    Ledger.drop_torn_line(scratch)
    assert Ledger.read(scratch).record(STEPS - 1, EVENT, HERE) == 0
    assert scratch.read_bytes() == whole


# In real runs


def digits(*overrides: str) -> Recipe:
    given = ["run.steps=3", "evaluation.last=1", "privacy.target_epsilon=null", "privacy.noise_multiplier=1.0"]
    return recipe.load("convex/digits", [*given, "privacy.accountant=rdp", *overrides])


class Killed(Exception):
    """Stands for a crash."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "digits"
    folder.train(digits(), place, quiet=True)
    return place


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run of three central steps that a test may spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def lines_of(run: Path) -> list[bytes]:
    return (run / ledger.FILE).read_bytes().splitlines(keepends=True)


def killed_at(step: int, before_noise: bool, place: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Train in `place` and crash in the middle of a step, just before or just after its noise is drawn."""
    draw = Release.add_noise

    def release(self: Release, total: Tensor, *rest: Any) -> float | None:
        length = None if self.step == step and before_noise else draw(self, total, *rest)
        if self.step == step:
            raise Killed
        return length

    with monkeypatch.context() as patch:
        patch.setattr(Release, "add_noise", release)
        with pytest.raises(Killed):
            folder.train(digits(*overrides), place, quiet=True)


def test_a_finished_run_is_accounted_for_by_its_ledger_alone(run: Path) -> None:
    summary = folder.summary_of(run)
    weights = np.full(287, 1 / 287)
    wanted = digits()
    plan = make_plan(wanted.privacy, wanted.sampling, weights, 31.25, 3, 0)
    (run / checkpoint.FILE).unlink()
    (run / folder.SUMMARY).unlink()
    spent = folder.check_ledger(run)
    assert spent["epsilon"] == plan.epsilon(3) == summary["epsilon"]
    assert math.isfinite(spent["epsilon"])
    assert (spent["releases"], spent["steps"], spent["delta"], spent["accountant"]) == (3, 3, 1e-5, "rdp")
    assert spent["last_hash"] == summary["ledger_head"]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_lines_missing_at_the_end_are_found(run: Path, missing: int) -> None:
    (run / ledger.FILE).write_bytes(b"".join(lines_of(run)[:-missing]))
    assert Ledger.read(run / ledger.FILE).count == 3 - missing, "the chain alone cannot see this"
    with pytest.raises(UserError, match="lines are missing at its end"):
        folder.check_ledger(run)


def test_a_last_line_torn_after_its_release_is_found(run: Path) -> None:
    (run / ledger.FILE).write_bytes(b"".join(lines_of(run))[:-1])
    with pytest.raises(UserError, match="lines are missing at its end"):
        folder.check_ledger(run)


def test_a_last_line_that_was_rewritten_hash_and_all_is_found(run: Path) -> None:
    path = run / ledger.FILE
    path.write_bytes(b"".join(lines_of(run)[:-1]))
    cheaper = Event("poisson", 57 / 287, 57, 287, 100.0, 31.25 / 57)
    Ledger.read(path).record(2, cheaper, "forged")
    assert Ledger.read(path).count == 3, "the chain alone cannot see this"
    with pytest.raises(UserError, match="not the ledger that the checkpoint was written with"):
        folder.check_ledger(run)


def test_a_spoilt_ledger_stops_a_run_from_going_on(run: Path) -> None:
    (run / folder.SUMMARY).unlink()
    (run / ledger.FILE).write_bytes(b"".join(lines_of(run)[:-1]))
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with pytest.raises(UserError, match="lines are missing at its end"):
        folder.resume(run, quiet=True)
    (run / ledger.FILE).unlink()
    with pytest.raises(UserError, match="is missing"):
        folder.resume(run, quiet=True)
    after = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    assert after == {name: content for name, content in before.items() if name != ledger.FILE}


def test_more_lines_than_the_checkpoint_knows_are_counted(run: Path) -> None:
    """A crash after the line and before the checkpoint: the release may have happened."""
    known = folder.check_ledger(run)
    Ledger.read(run / ledger.FILE).record(3, Ledger.read(run / ledger.FILE).entries[0].event, HERE)
    assert folder.check_ledger(run)["epsilon"] > known["epsilon"]


def test_every_line_is_on_disk_before_its_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, seen = Release.add_noise, []

    def release(self: Release, total: Tensor, *rest: Any) -> float | None:
        last = json.loads((tmp_path / "run" / ledger.FILE).read_bytes().splitlines()[-1])
        same = Event.from_json(last["event"]) == self.event
        seen.append((last["step"], last["attempt"], same, self.step, self.attempt))
        return draw(self, total, *rest)

    monkeypatch.setattr(Release, "add_noise", release)
    folder.train(digits(), tmp_path / "run", quiet=True)
    assert seen == [(step, 0, True, step, 0) for step in range(3)]


@pytest.mark.parametrize("before_noise", [True, False])
def test_a_crash_between_line_and_release_over_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_noise: bool
) -> None:
    killed_at(1, before_noise, tmp_path / "run", monkeypatch)
    spent = folder.check_ledger(tmp_path / "run")
    assert spent["releases"] == 2, "one step was finished; the line of the other stays"
    assert checkpoint.load(tmp_path / "run").ledger_count <= 2


def test_going_on_in_the_same_place_repeats_the_run_and_costs_no_more(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(2, False, tmp_path / "run", monkeypatch)
    folder.resume(tmp_path / "run", quiet=True)
    assert ledger_without_key(tmp_path / "run") == ledger_without_key(finished)
    assert (tmp_path / "run" / folder.MODEL).read_bytes() == (finished / folder.MODEL).read_bytes()


def test_going_on_elsewhere_writes_new_lines_draws_new_noise_and_costs_more(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(2, False, tmp_path / "run", monkeypatch)
    began = lines_of(tmp_path / "run")
    monkeypatch.setattr("confide.build.environment", lambda _: ELSEWHERE)
    summary = folder.resume(tmp_path / "run", quiet=True)
    book = Ledger.read(tmp_path / "run" / ledger.FILE)
    assert lines_of(tmp_path / "run")[: len(began)] == began
    assert [(e.step, e.attempt) for e in book.entries] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    once = folder.check_ledger(finished)["epsilon"]
    assert summary["epsilon"] == folder.check_ledger(tmp_path / "run")["epsilon"] > once
    assert summary["releases"] == 6
    assert (tmp_path / "run" / folder.MODEL).read_bytes() != (finished / folder.MODEL).read_bytes()


def test_a_run_from_before_the_key_said_what_made_a_step_pays_for_steps_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines have a key that no machine has any more; what the checkpoint holds is not made again."""
    with monkeypatch.context() as older:
        older.setattr("confide.build.environment", lambda _: "the key of then")
        killed_at(2, False, tmp_path / "run", older, "run.checkpoint_every=1")
    assert checkpoint.load(tmp_path / "run").state.step == 2
    summary = folder.resume(tmp_path / "run", quiet=True)
    book = Ledger.read(tmp_path / "run" / ledger.FILE)
    assert [(e.step, e.attempt) for e in book.entries] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert [e.environment == "the key of then" for e in book.entries] == [True, True, True, False]
    assert summary["releases"] == 4


def test_a_torn_line_is_dropped_when_the_run_goes_on(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(2, True, tmp_path / "run", monkeypatch)
    path = tmp_path / "run" / ledger.FILE
    path.write_bytes(path.read_bytes()[:-30])
    folder.resume(tmp_path / "run", quiet=True)
    assert ledger_without_key(tmp_path / "run") == ledger_without_key(finished)


# Steps that are made again


def twice(*header: str) -> tuple[list[list[int]], list[list[int]], Ledger]:
    """The cohorts of a run, those of the same run on another machine, and the ledger that both wrote."""
    wanted = recipe.load(
        "convex/digits", ["sampling.cohort=3", "privacy={mechanism: gaussian, noise_multiplier: 0.7, delta: 1.0e-5}"]
    )
    book = Ledger.create(None, dict.fromkeys(header, True))
    loop = build.make_loop(wanted, lambda _: book)
    cohorts: list[list[list[int]]] = []
    for place in (HERE, ELSEWHERE):
        there, drawn = replace(loop, environment=place), list[list[int]]()
        train = loop.engine.train

        def watched(central: Tensor, cohort: np.ndarray, *rest: Any, drawn: Any = drawn, train: Any = train) -> Any:
            drawn.append(cohort.tolist())
            return train(central, cohort, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.engine, "train", watched)
            state = there.start()
            for _ in range(20):
                there.step(state)
        cohorts.append(drawn)
    return cohorts[0], cohorts[1], book


def test_a_step_that_is_made_again_elsewhere_draws_a_cohort_of_its_own() -> None:
    first, second, book = twice("fresh_cohorts")
    assert book.count == 40
    assert sum(one != other for one, other in zip(first, second, strict=True)) > 15
    assert len(book.charged()) == 40


def test_an_old_ledger_is_charged_for_one_cohort_that_was_released_twice() -> None:
    """Two releases over the same cohort are one of z / sqrt(2), which costs far more than two independent ones."""
    first, second, book = twice()
    assert first == second
    charged = book.charged()
    assert [event.noise_multiplier for event in charged] == pytest.approx([0.7 / math.sqrt(2)] * 20)
    independent = epsilon([entry.event for entry in book.entries], 1e-5, "pld")
    assert epsilon(charged, 1e-5, "pld") > 2 * independent


def test_a_run_does_not_go_on_over_another_population(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate, and with it the amplification, would be another from there on."""
    wanted = digits()
    with monkeypatch.context() as patch:
        killed_at(1, False, tmp_path / "run", patch)
    made = build.user_weights

    def fewer(*given: Any) -> np.ndarray:
        return made(*given)[:100] * 2.87

    with monkeypatch.context() as patch:
        patch.setattr(build, "user_weights", fewer)
        with pytest.raises(UserError, match=r"was begun with 287 users and there are 100 now"):
            folder.resume(tmp_path / "run", quiet=True)
    assert folder.resume(tmp_path / "run", quiet=True)["population"] == 287
    assert wanted.sampling.cohort < 100


def test_a_line_holds_the_noise_and_the_counters_of_its_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    released = Event("poisson", 0.1, 10, 100, 1.5, 1.0, counters=3, count_noise=20.0)
    Ledger.create(path, {"recipe": "r"}).record(0, released, "here")
    (event,) = [json.loads(line)["event"] for line in path.read_text().splitlines()[1:]]
    assert (event["noise_multiplier"], event["counters"], event["count_noise"]) == (1.5, 3, 20.0)
