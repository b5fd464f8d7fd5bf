"""What is kept: the same bytes on any number of cores, safe for two processes and for a kill, bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from confide.encoders import kept as module
from confide.encoders.kept import Item, Kept, Maker, keep
from confide.errors import UserError
from confide.files import digest

KEYS = [digest([f"item {i}"]) for i in range(24)]


def _rows(item: int) -> np.ndarray:
    draw = np.random.default_rng(item)
    # A product large enough that torch would share it among its threads, and then round otherwise.
    factor = torch.from_numpy(draw.standard_normal((64, 2000)).astype(np.float32))
    return (factor @ factor.T)[: item % 3, :5].numpy()


def _keep(place: Path, items: int = 24, made: list[int] | None = None, key: str = "maker") -> Kept:
    def make(numbers: list[int]) -> list[Item]:
        if made is not None:
            made.extend(numbers)
        return [Item(_rows(number), {"number": number}) for number in numbers]

    def deal(missing: list[int]) -> list[list[int]]:
        return [missing[start : start + 3] for start in range(0, len(missing), 3)]

    return keep(Maker(key, 5, make, deal, "test"), KEYS[:items], place, quiet=True)


def _contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def _check(kept: Kept) -> None:
    for item in range(len(kept)):
        assert kept.notes[item] == {"number": item}
        np.testing.assert_array_equal(kept.rows(item), _rows(item))


def test_items_come_back_as_they_were_made_and_are_made_once(tmp_path: Path) -> None:
    made: list[int] = []
    _check(_keep(tmp_path, 10, made))
    _check(_keep(tmp_path, 24, made))
    assert sorted(made) == list(range(24))
    _check(_keep(tmp_path, 24, made, key="another maker"))
    assert len(made) == 48


def test_rows_are_memory_mapped(tmp_path: Path) -> None:
    rows = _keep(tmp_path).rows(2)
    while isinstance(rows.base, np.ndarray) and not isinstance(rows, np.memmap):
        rows = rows.base
    assert isinstance(rows, np.memmap)


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_the_bytes_do_not_depend_on_the_cores(tmp_path: Path, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    _keep(tmp_path / "reference")
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    torch.set_num_threads(cores)
    try:
        _keep(tmp_path / "cores")
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
    assert _contents(tmp_path / "cores") == _contents(tmp_path / "reference")


def test_a_mistake_in_one_block_stops_all_and_keeps_what_is_done(tmp_path: Path) -> None:
    def make(numbers: list[int]) -> list[Item]:
        if 4 in numbers:
            raise UserError("this one is broken")
        return [Item(_rows(number)) for number in numbers]

    maker = Maker("maker", 5, make, lambda missing: [[number] for number in missing], "test")
    with pytest.raises(UserError, match="this one is broken"):
        keep(maker, KEYS, tmp_path, quiet=True)
    assert 0 < len(list(tmp_path.rglob("*.kept"))) < 24


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    bad = Maker("maker", 2, lambda _: [Item(np.full((1, 2), np.nan))], lambda missing: [missing], "states")
    with pytest.raises(UserError, match=r"states: a number that is not finite.*install it again"):
        keep(bad, KEYS[:1], tmp_path, quiet=True)
    assert not list(tmp_path.rglob("*.kept"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_head(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"number", b"mumber"))


def _nonsense(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("damage", [_cut, _flip_head, _nonsense, lambda path: path.write_bytes(b""), os.unlink])
def test_damage_of_any_kind_is_mended(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _keep(tmp_path)
    expected = _contents(tmp_path)
    for path in sorted(tmp_path.rglob("*.kept"))[::2]:
        damage(path)
    made: list[int] = []
    _check(_keep(tmp_path, made=made))
    assert len(made) == 12
    assert _contents(tmp_path).keys() >= expected.keys() or damage is not os.unlink


def test_rows_that_changed_on_disk_are_noticed_before_their_first_use(tmp_path: Path) -> None:
    _keep(tmp_path)
    for path in tmp_path.rglob("*.kept"):
        content, numbers = path.read_bytes(), _rows(2)[0].tobytes()
        path.write_bytes(content.replace(numbers, bytes(20)))
    made: list[int] = []
    _check(_keep(tmp_path, made=made))
    assert made == [0, 1, 2]


def test_blocks_that_vanish_under_an_open_store_do_not_matter(tmp_path: Path) -> None:
    kept = _keep(tmp_path)
    for path in tmp_path.rglob("*.kept"):
        path.unlink()
    _check(kept)


def test_the_oldest_blocks_make_room_but_never_those_of_the_last_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.LIMIT_ENV, "1e-9")
    _keep(tmp_path, key="old")
    _keep(tmp_path, key="recent")
    assert len(list(tmp_path.rglob("*.kept"))) == 16
    (old,) = {path.parent for path in tmp_path.rglob("*.kept")} - {_keep(tmp_path, key="recent").folder}
    stranger = tmp_path / "model.safetensors"
    stranger.write_bytes(b"mine")
    for path in [*old.iterdir(), stranger]:
        os.utime(path, (time.time() - 9999,) * 2)
    _keep(tmp_path, 3, key="new")
    assert not list(old.iterdir())
    assert len(list(tmp_path.rglob("*.kept"))) == 9
    assert stranger.exists()
    for given in ("much", "-1", "nan"):
        monkeypatch.setenv(module.LIMIT_ENV, given)
        with pytest.raises(UserError, match=f"CONFIDE_CACHE_GB='{given}' is no number"):
            _keep(tmp_path)


def test_what_is_in_use_counts_once_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _keep(tmp_path, key="old").folder
    for path in old.iterdir():
        os.utime(path, (time.time() - 9999,) * 2)
    size = sum(path.stat().st_size for path in old.iterdir())
    monkeypatch.setenv(module.LIMIT_ENV, str(2.2 * size / 1e9))
    _keep(tmp_path, key="new!")
    assert len(list(old.iterdir())) == 8


def test_blocks_that_were_removed_while_others_were_made_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, removed = Kept._make, list[Path]()

    def make(kept: Kept, missing: list[int], total: int) -> None:
        plain(kept, missing, total)
        if not removed:  # another process made room
            removed.extend(sorted(kept.folder.iterdir())[:2])
            for path in removed:
                path.unlink()

    monkeypatch.setattr(Kept, "_make", make)
    made: list[int] = []
    _check(_keep(tmp_path, made=made))
    assert len(made) == 24 + 6
    monkeypatch.setattr(Kept, "_make", lambda *_: None)
    with pytest.raises(UserError, match=r"24 items that were written to .* check the disk"):
        _keep(tmp_path, key="another")


def test_two_writers_with_one_process_number_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "write_atomically", lambda path, content, suffix, mode: seen.append(suffix))
    for _ in range(2):
        with pytest.raises(UserError, match="are not there"):
            _keep(tmp_path, 3)
    assert len(seen) == len(set(seen)) == 2 * module._TRIES


def test_a_damaged_block_that_cannot_be_removed_is_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = _keep(tmp_path)
    for path in tmp_path.rglob("*.kept"):
        path.write_bytes(b"")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"damaged and cannot be removed \(Permission denied\)"):
        kept.rows(2)


_KILLED = """
import sys, time
from pathlib import Path
from tests.encoders import test_kept as t
from confide.encoders import kept
if sys.argv[2] == "kill":
    plain = kept.os.fsync
    count = [0]
    def die(number):
        count[0] += 1
        if count[0] > 4:
            kept.os.kill(kept.os.getpid(), 9)
        plain(number)
    kept.os.fsync = die
t._check(t._keep(Path(sys.argv[1])))
"""


def _process(place: Path, how: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", _KILLED, str(place), how], cwd=root)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_loses_only_what_was_not_written(tmp_path: Path) -> None:
    assert _process(tmp_path, "kill").wait() == -signal.SIGKILL
    left = list(tmp_path.rglob("*.tmp"))
    assert left, "killed between writing and renaming"
    done = len(list(tmp_path.rglob("*.kept")))
    assert 0 < done < 8
    for path in left:
        os.utime(path, (time.time() - 9999,) * 2)
    made: list[int] = []
    _check(_keep(tmp_path, made=made))
    assert len(made) == 24 - 3 * done
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_two_processes_at_once_leave_what_one_would(tmp_path: Path) -> None:
    _keep(tmp_path / "reference")
    both = [_process(tmp_path / "both", "") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert set(_contents(tmp_path / "reference").values()) <= set(_contents(tmp_path / "both").values())
