"""What travels between server and client, whatever carries it: facts and arrays.

A parcel holds no code and no pickle: numbers, text and lists of them, and flat arrays. Everything that a client says is
a claim until the server has checked it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from confide import __version__
from confide.deploy.refusals import ENCODER, MODEL, OTHER_RECIPE, VERSION
from confide.deploy.told import shape_digest
from confide.errors import one_line
from confide.federated.parameters import Layout
from confide.federated.task import Task
from confide.recipe import Recipe


@dataclass
class Parcel:
    """One message, either way."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """What both sides must agree on before anything is trained."""

    version: str
    recipe: str
    layout: str
    encoder: str = ""
    """The digest of the frozen encoder whose states are trained on; empty where there is none."""

    def differs(self, facts: Mapping[str, Any]) -> tuple[str, str] | None:
        """What of it the other side has otherwise: its code, and a reason that a person can act on."""
        for name, code, what in (
            ("version", VERSION, "another version of confide"),
            ("recipe", OTHER_RECIPE, "another recipe"),
            ("layout", MODEL, "another model"),
            ("encoder", ENCODER, "another frozen encoder than the client's policy names"),
        ):
            own, theirs = getattr(self, name), facts.get(name, "")
            if theirs != own:
                return code, f"{what}: {_short(theirs)} there, {own} here"
        return None

    def facts(self) -> dict[str, str]:
        return dict(vars(self))


def identity(recipe: Recipe, task: Task, layout: Layout, like: Tensor) -> Identity:
    shape = [str(like.dtype), list(layout.names), [list(s) for s in layout.shapes]]
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return Identity(__version__, shape_digest(recipe), digest, task.fingerprint.get("the encoder", ""))


def _short(value: object) -> str:
    """A text or a number, fit to be printed; else the type: lists in lists can be deeper than Python's stack."""
    if isinstance(value, str):
        return one_line(value, 40)
    return repr(value)[:40] if isinstance(value, int | float) else f"a {type(value).__name__}"
