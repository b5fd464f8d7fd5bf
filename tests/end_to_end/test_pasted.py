"""Whoever pastes the commands of a page into a fresh shell, in their order, sees them work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
EXPORT = 'export PATH="$PWD/.venv/bin:$PATH"'
LONG = ("plan frontier", "audit", "init recordings", "ui runs")  # minutes, or never ends; tests/test_docs.py has them


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as `make setup` leaves it."""
    program = tmp_path / ".venv" / "bin" / "confide"
    program.parent.mkdir(parents=True)
    paths = ":".join(path for path in sys.path if path)
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(paths)} exec {shlex.quote(sys.executable)} -m confide "$@"\n'
    )
    program.chmod(0o755)
    return tmp_path


def pasted(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a real shell that knows of nothing but the system's programs."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["/bin/bash", "-e"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_page_says_the_line_that_lets_a_shell_find_the_program() -> None:
    first = BLOCK.findall((ROOT / "docs" / "index.md").read_text())[0]
    assert first.strip() == EXPORT
    assert 'export PATH="$(CURDIR)/$(BIN):$$PATH"' in (ROOT / "Makefile").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        listed = re.search(rf"^  - (?:Start|How to):\n(?:      - .*\n)*?      - .*: {page.name}$", menu(), re.MULTILINE)
        if listed and page.name not in ("index.md", "deploy.md") and "```bash" in text:
            assert "(index.md#install)" in text or EXPORT in text, page.name


def menu() -> str:
    return (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow
def test_the_first_page_works_when_it_is_pasted_into_a_shell(clone: Path) -> None:
    found = BLOCK.findall((ROOT / "docs" / "index.md").read_text())
    lines = [line for block in found for line in block.splitlines() if not any(long in line for long in LONG)]
    assert sum(line.startswith("confide ") for line in lines) >= 5
    without = pasted("\n".join(line for line in lines if line != EXPORT), clone)
    assert without.returncode == 127
    assert "confide: command not found" in without.stderr
    done = pasted("\n".join(lines), clone)
    assert done.returncode == 0, done.stderr
    assert (clone / "runs" / "clipped" / "summary.json").exists()
    assert "(2, 1e-05)-differentially private" in done.stdout


@pytest.mark.slow
def test_setup_prints_the_line(clone: Path) -> None:
    (clone / ".venv" / ".installed").touch()
    given = ["-f", str(ROOT / "Makefile"), "-o", "pyproject.toml", "-o", "constraints.txt"]
    words = ["make", "-C", str(clone), *given, "setup"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert f'export PATH="{clone}/.venv/bin:$PATH"' in done.stdout, done.stderr
