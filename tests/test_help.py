"""What `--help` says: nothing that a command's text holds is lost on the way to the terminal."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import typer.main
from typer.models import ArgumentInfo
from typer.testing import CliRunner

from confide.cli import app


def commands(group: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def helped(*words: str, width: int = 80) -> str:
    found = CliRunner().invoke(app, [*words, "--help"], terminal_width=width, env={"COLUMNS": str(width)})
    assert found.exit_code == 0, found.output
    return found.output


def in_one_line(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_that_of_every_argument_and_every_bracket(words: tuple[str, ...]) -> None:
    function = inspect.unwrap(COMMANDS[words].callback)
    hints = get_type_hints(function, include_extras=True)
    said = in_one_line(helped(*words))
    for name, hint in hints.items():
        for about in getattr(hint, "__metadata__", ()):
            if isinstance(about, ArgumentInfo):
                assert about.help, f"{name} says nothing"
                assert in_one_line(about.help) in said
    for bracket in re.findall(r"\[[^\]]*\]", (function.__doc__ or "").replace("\\", "")):
        assert bracket in said


def test_the_first_help_fits_a_narrow_terminal_and_begins_with_what_people_do_first() -> None:
    said = helped()
    start = [line for line in (app.info.help or "").splitlines() if line.startswith("  confide ")]
    assert len(start) == 10
    for line in start:
        assert line in said, "it is not broken"
    listed = re.findall(r"^│ (\w+)  ", said, re.MULTILINE)
    assert listed[:4] == ["demo", "init", "train", "resume"]
    assert listed.index("guarantee") < listed.index("reproduce") < listed.index("bench")


def test_a_recipe_is_described_by_a_whole_sentence() -> None:
    said = CliRunner().invoke(app, ["recipe", "list"]).output
    assert "noise their own messages (CAR eq. 3" in said
    assert all(line.count("(") == line.count(")") for line in said.splitlines())
