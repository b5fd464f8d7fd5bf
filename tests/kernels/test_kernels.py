"""Claims about compiled kernels: made once, only for their owner, and never the reason that something fails."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from confide import kernels
from confide.federated import low_rank
from confide.speech import head_updates

SOURCE = 'extern "C" int answer() { return 42; }\n'
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A source of its own, an empty cache, and a process that has decided nothing yet; the folder of libraries."""
    if kernels.kernel("head") is None:
        pytest.skip("this machine cannot have kernels")
    (tmp_path / "small.cpp").write_text(SOURCE)
    monkeypatch.setattr(kernels, "_SOURCES", tmp_path)
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def fresh() -> kernels.Kernel | None:
    """What another process would find."""
    return kernels.kernel.__wrapped__("small")


def test_a_kernel_is_compiled_once_and_then_read(monkeypatch: Patch, place: Path) -> None:
    first = fresh()
    assert first is not None
    assert first.functions.answer() == 42
    assert len(list(place.iterdir())) == 1
    monkeypatch.setattr(kernels, "_compile", lambda *_: pytest.fail("it was compiled again"))
    again = fresh()
    assert again is not None
    assert again.key == first.key


def test_only_its_owner_may_write_where_kernels_lie(place: Path) -> None:
    fresh()
    (library,) = place.iterdir()
    assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(library.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_read(place: Path, mode: int) -> None:
    fresh()
    place.chmod(mode)
    assert fresh() is None


def test_a_folder_behind_a_link_is_not_read(place: Path) -> None:
    fresh()
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")
    assert fresh() is None


@pytest.mark.parametrize("spoil", ["half", "others can write it", "a link"])
def test_a_library_that_is_not_whole_or_not_safe_is_made_again(place: Path, spoil: str) -> None:
    fresh()
    (library,) = place.iterdir()
    whole = library.read_bytes()
    library.unlink()  # the process still has the old one open
    if spoil == "a link":
        (place.parent / "other.so").write_bytes(whole)
        library.symlink_to(place.parent / "other.so")
    else:
        library.write_bytes(whole[: len(whole) // 2] if spoil == "half" else whole)
    if spoil == "others can write it":
        library.chmod(0o666)
    found = fresh()
    assert found is not None
    assert found.functions.answer() == 42
    assert not library.is_symlink()
    assert stat.S_IMODE(library.stat().st_mode) & 0o022 == 0


def no_compiler(patch: Patch) -> None:
    patch.setattr(shutil, "which", lambda _: None)


def other_processor(patch: Patch) -> None:
    patch.setattr(kernels, "processor", lambda: ["flags : sse2"])


def compiler_hangs(patch: Patch) -> None:
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("g++", 1)

    patch.setattr(subprocess, "run", run)


WITHOUT: dict[str, Callable[[Patch], None]] = {
    "no compiler": no_compiler,
    "a build that fails": lambda patch: patch.setattr(kernels, "_FLAGS", ("-no-such-flag",)),
    "a compiler that hangs": compiler_hangs,
    "switched off": lambda patch: patch.setenv(kernels.ENV, "off"),
    "another system": lambda patch: patch.setattr("sys.platform", "darwin"),
    "a processor without AVX-512": other_processor,
}


@pytest.mark.parametrize("change", WITHOUT.values(), ids=WITHOUT)
def test_where_there_can_be_no_kernel_there_is_none_and_nothing_fails(
    change: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    change(monkeypatch)
    assert fresh() is None


def test_what_a_kernel_is_made_from_changes_its_key(monkeypatch: Patch, tmp_path: Path) -> None:
    keys, said = [], subprocess.run
    for change in ("nothing", "source", "flags", "compiler"):
        if change == "source":
            (tmp_path / "small.cpp").write_text(SOURCE + "// more\n")
        elif change == "flags":
            monkeypatch.setattr(kernels, "_FLAGS", (*kernels._FLAGS, "-g"))
        elif change == "compiler":

            def another(words: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
                done: subprocess.CompletedProcess[bytes] = said(words, **more)  # type: ignore[call-overload]
                return subprocess.CompletedProcess(words, 0, b"g++ 99") if "--version" in words else done

            monkeypatch.setattr(subprocess, "run", another)
        found = fresh()
        assert found is not None
        keys.append(found.key)
    assert len(set(keys)) == 4


def test_the_shipped_kernels_are_files_beside_the_loader() -> None:
    names = {*head_updates.KERNELS, *low_rank.KERNELS}
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == names


def test_what_is_in_use_is_said_by_name(monkeypatch: Patch) -> None:
    assert kernels.described(()) == "none"
    monkeypatch.setattr(kernels, "kernel", lambda name: kernels.Kernel("0123", None) if name == "head" else None)  # type: ignore[arg-type]
    assert kernels.described(["head", "other"]) == "head 0123, other plain"
