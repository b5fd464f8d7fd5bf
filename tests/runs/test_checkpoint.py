"""Checkpoints: what is loaded is what was saved, or it is refused; an interrupted save leaves the old one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from confide.errors import UserError
from confide.federated.state import State
from confide.runs import checkpoint


def a_state(step: int = 4) -> State:
    return State(
        step,
        torch.linspace(-1, 1, 3, dtype=torch.float64) * step,
        {"first_moment/w": torch.full((2,), 0.5)},
        {"sum": torch.ones(2, dtype=torch.float64)},
        {"ring": torch.arange(6.0).view(2, 3), "step": torch.tensor(4)},
        torch.tensor([0.5, 0.25], dtype=torch.float64),
        12.25,
        [{"accuracy": 0.75}, {"accuracy": 0.8125}],
        {"bounds": torch.tensor([1.5, 2.5], dtype=torch.float64), "norms": torch.zeros(2, dtype=torch.float64)},
    )


def save(folder: Path, state: State) -> Path:
    checkpoint.save(folder, state, "0123456789abcdef", 5, "f" * 64)
    return folder / checkpoint.FILE


def _tensors(state: State) -> dict[str, torch.Tensor]:
    assert state.bounds is not None
    return {"parameters": state.parameters, "bounds": state.bounds}


def same(one: checkpoint.Saved, other: checkpoint.Saved) -> bool:
    a, b = one.state, other.state
    about = (one.recipe_digest, one.ledger_count, one.ledger_head, a.step, a.seconds, a.recent)
    return about == (other.recipe_digest, other.ledger_count, other.ledger_head, b.step, b.seconds, b.recent) and all(
        x.keys() == y.keys() and all(x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]) for n in x)
        for x, y in (
            (_tensors(a), _tensors(b)),
            (a.optimiser, b.optimiser),
            (a.final, b.final),
            (a.noise, b.noise),
            (a.clients, b.clients),
        )
    )


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    state = a_state()
    save(tmp_path, state)
    saved = checkpoint.load(tmp_path)
    assert same(saved, checkpoint.Saved(state, "0123456789abcdef", 5, "f" * 64))
    assert os.listdir(tmp_path) == [checkpoint.FILE]


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=5), step=st.integers(0, 2**53), seconds=st.floats(0, 1e9)
)
def test_any_float_survives_even_one_that_is_not_finite(
    values: list[float], step: int, seconds: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    parameters = torch.tensor(values, dtype=torch.float32)
    save(folder, State(step, parameters, {}, seconds=seconds))
    loaded = checkpoint.load(folder).state
    assert loaded.parameters.numpy().tobytes() == parameters.numpy().tobytes()
    assert (loaded.step, loaded.seconds) == (step, seconds)


def noticed(folder: Path, original: checkpoint.Saved) -> bool:
    """Is a damaged checkpoint refused, or the damage without any effect?"""
    try:
        return same(checkpoint.load(folder), original)
    except UserError as error:
        return str(folder / checkpoint.FILE) in str(error)


def test_a_flipped_bit_anywhere_in_the_file_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, a_state())
    original, whole = checkpoint.load(tmp_path), path.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if not noticed(tmp_path, original):
            unnoticed.append(whole[max(place - 12, 0) : place + 1])
    assert unnoticed == []


def test_a_checkpoint_cut_short_at_any_length_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = save(tmp_path, a_state())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="is damaged"):
            checkpoint.load(tmp_path)
        assert path.read_bytes() == whole[:length]


@pytest.mark.parametrize("content", [b"\xff" * 4096, b"{}" * 100, b"\x00" * 64], ids=["ones", "braces", "zeros"])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(tmp_path)


def test_tensors_without_a_header_of_ours_are_refused(tmp_path: Path) -> None:
    save_file({"parameters": torch.zeros(3)}, tmp_path / checkpoint.FILE)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(tmp_path)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_place_of_a_checkpoint_is_refused_and_never_run(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(tmp_path)
    torch.save({"parameters": Trap(tmp_path / "sprung")}, tmp_path / checkpoint.FILE)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=checkpoint.FILE):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_last_checkpoint(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, a_state(4)).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="no more"):
        save(tmp_path, a_state(5))
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert checkpoint.load(tmp_path).state.step == 4


def test_a_save_is_synced_before_it_takes_the_old_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path, a_state())
    assert done == ["file", "rename", "folder"]
