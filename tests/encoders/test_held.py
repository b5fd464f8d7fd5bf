"""Claims about what is kept beside runs: it is listed, private, limited and removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from confide.encoders import held, kept
from confide.errors import UserError

Command = Callable[..., tuple[int, str, str]]
DAY = 86_400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with features of two makers, one of them old, and an encoder."""
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path))
    for place, name in enumerate(("old", "new")):
        made = kept.keep(
            kept.Maker(name, 2, lambda items: [kept.Item(np.ones((500, 2))) for _ in items], lambda m: [m], name),
            [f"{place:032x}"], None, quiet=True,
        )  # fmt: skip
        if name == "old":
            (block,) = made.folder.iterdir()
            os.utime(block, (time.time() - 40 * DAY,) * 2)
    (tmp_path / "encoders" / "some").mkdir(parents=True)
    (tmp_path / "encoders" / "some" / "model.safetensors").write_bytes(b"0" * 100)
    return tmp_path


def test_what_is_made_of_peoples_data_can_be_opened_by_its_owner_only(cache: Path) -> None:
    folders = list((cache / "kept").iterdir())
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    assert [file.stat().st_mode & 0o777 for folder in folders for file in folder.iterdir()] == [0o600, 0o600]


def test_everything_is_listed_with_its_size_and_whether_it_is_personal(cache: Path, command: Command) -> None:
    code, out, _ = command("cache", "list", "--json")
    assert code == 0
    rows = json.loads(out)["kept"]
    assert {(row["kind"], row["personal"]) for row in rows} == {("kept", True), ("encoders", False)}
    assert all(row["bytes"] > 4000 for row in rows if row["kind"] == "kept")
    code, out, _ = command("cache", "list")
    assert "personal data" in out
    assert str(cache) in out.replace("\n", "")


def test_only_what_was_chosen_is_removed(cache: Path, command: Command) -> None:
    code, out, _ = command("cache", "clear", "--kind", "kept", "--older-than", 30, "--yes", "--json")
    assert code == 0
    assert len(json.loads(out)["removed"]) == 1
    assert [one.kind for one in held.held()] == ["kept", "encoders"]
    assert command("cache", "clear", "--yes")[0] == 0
    assert held.held() == []
    code, _, said = command("cache", "clear", "--kind", "feature", "--yes")
    assert code == 2
    assert "kind='feature': expected one of kept, voices, encoders" in said
    with pytest.raises(UserError, match="expected one of"):
        held.chosen("feature", 0)


def test_a_limit_removes_what_was_not_used_for_longest_and_nothing_of_the_last_hour(cache: Path) -> None:
    assert held.limit(1.0) == 0
    assert held.limit(0.0) > 4000
    assert [one.kind for one in held.held()] == ["kept", "encoders"], "what was used within the hour stays"


def test_a_folder_that_somebody_else_filled_is_left_alone(cache: Path) -> None:
    (cache / "kept" / "photos").mkdir()
    (cache / "kept" / "photos" / "me.png").write_bytes(b"0")
    held.clear(held.chosen("kept", 0))
    assert (cache / "kept" / "photos" / "me.png").exists()
