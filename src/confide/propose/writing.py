"""A recipe as text, with a comment for every choice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from confide.recipe import Recipe, parse
from confide.settings import read_yaml

_WIDTH = 118


@dataclass
class Draft:
    """Lines of a recipe, written from the top down."""

    lines: list[str] = field(default_factory=list)

    def comment(self, *sentences: str, indent: int = 0) -> None:
        for sentence in sentences:
            lead = " " * indent + "# "
            self.lines += textwrap.wrap(
                sentence, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip

    def section(self, name: str, **fields: Any) -> None:
        """A section in one line."""
        self.lines.append(f"{name}: {in_line(fields)}")

    def block(self, name: str, fields: Iterable[tuple[str, Any, str]]) -> None:
        """A section with a line for each field: its name, its value and a comment, which may be empty."""
        self.lines.append(f"{name}:")
        for key, value, why in fields:
            if why:
                self.comment(why, indent=2)
            self.lines.append(f"  {key}: {in_line(value)}")

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def check(self, name: str) -> Recipe:
        """The recipe that the text is, with every problem in one message."""
        return parse(read_yaml(self.text), name)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def in_line(value: Any) -> str:
    """A value as YAML writes it in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
