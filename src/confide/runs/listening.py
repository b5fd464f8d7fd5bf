"""Who hears the figures of a run while it goes: TensorBoard, and whoever is named with `--listener`.

A listener is a class. It is made with what it is told of the run (`Told`), hears the figures of each step, and is
closed at the end. The figures are those of the owner's own record: losses, norms and evaluations without noise. No
guarantee covers them. So nothing leaves this machine unless `--send` says so, and of a run for release (privacy.source:
system) nothing leaves at all: whoever saw its figures would know more than its guarantee states.

A run never waits for a listener and never ends because of one: each has a thread and a queue of its own, and one that
fails is left behind with a line that says why. The run's own files (`confide.runs.recording`) have everything.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from confide.errors import UserError, missing, require
from confide.recipe import Recipe
from confide.settings import imported, local_paths, named_code, nearest

Values = Mapping[str, float]
Settings = dict[str, str | int | float | bool]
_WAITING = 10_000  # steps that a slow listener may be behind
_PATIENCE = 30.0  # seconds that the end of a run waits for a listener
_ALWAYS = "tensorboard"


@dataclass(frozen=True)
class Told:
    """What a listener is told of its run."""

    folder: Path
    """The run's own, in which a listener may keep files."""
    step: int
    """The last step that was made before; later ones that it heard of already are made again."""
    settings: Settings
    """The recipe's, with dots; without lists and sentences, and without what names a file or a function here."""
    send: bool
    """Whether figures may leave this machine."""


class Listener(Protocol):
    """What a run asks of a listener. Its class is called with a `Told`.

    A class that sends nothing anywhere has `sends = False`; any other is refused without `--send`.
    """

    def hear(self, step: int, values: Values) -> None:
        """The figures of a step, by name; step 0 is the starting model."""

    def close(self) -> None:
        """The run has stopped, finished or not."""


Kind = Callable[[Told], Listener]


@dataclass(frozen=True)
class Listeners:
    """Who listens beside TensorBoard, and whether figures may leave this machine."""

    names: tuple[str, ...] = ()
    """wandb, mlflow, or a class of one's own as module:Class."""
    send: bool = False

    def check(self, wanted: Recipe) -> None:
        """Refuse, before anything is done, what cannot listen or may not."""
        if self.send and wanted.privacy.source == "system":
            raise UserError(
                "--send with privacy.source=system: figures without noise would leave this machine, and the guarantee "
                "of a run for release would not hold against whoever sees them. Leave --send out (listeners then keep "
                "their files here), or show a run with privacy.source=seeded"
            )
        for name in self.names:
            kind = kind_of(name)
            if ":" in name and getattr(kind, "sends", True) and not self.send:
                raise UserError(
                    f"--listener {name}: it does not say that it sends nothing (sends = False), and figures without "
                    "noise may not leave this machine unasked; add --send if they may"
                )


NOBODY = Listeners()


def kind_of(name: str) -> Kind:
    """The class of a listener."""
    from confide.runs import boards

    if ":" in name:
        found: Kind = imported(name, "--listener")
        return found
    if name not in boards.KINDS:
        raise UserError(
            f"--listener {name}: expected one of {', '.join(boards.KINDS)}, or a class of your own as module:Class"
            f"{nearest(name, boards.KINDS)}"
        )
    require(name, f"--listener {name}")
    return boards.KINDS[name]


def settings_of(recipe: Recipe) -> Settings:
    """The recipe's single values, without its sentences and those that name a file or a function of this machine."""
    hidden = {"description", "chosen", *local_paths(recipe), *named_code(recipe)}
    found: Settings = {}

    def collect(document: Mapping[str, Any], above: str) -> None:
        for key, value in document.items():
            name = f"{above}{key}"
            if name in hidden:
                continue
            if isinstance(value, Mapping):
                collect(value, f"{name}.")
            elif isinstance(value, str | int | float | bool):
                found[name] = value

    collect(recipe.model_dump(mode="json"), "")
    return found


class Audience:
    """The listeners of one run; use it in a `with`."""

    def __init__(self, folder: Path, recipe: Recipe, step: int, listeners: Listeners) -> None:
        self.told = Told(folder, step, settings_of(recipe), listeners.send)
        names = [*([] if missing(_ALWAYS) else [_ALWAYS]), *(n for n in listeners.names if n != _ALWAYS)]
        self.names = list(dict.fromkeys(names))
        self.seats: list[_Seat] = []

    def __enter__(self) -> Audience:
        for name in self.names:
            if name != _ALWAYS:
                _say(f"{name}: {_warning(self.told.send)}")
            self.seats.append(_Seat(name, kind_of(name), self.told))
        return self

    def __exit__(self, *problem: object) -> None:
        for seat in self.seats:
            seat.close()

    def hear(self, step: int, values: Mapping[str, object]) -> None:
        """Tell everybody the numbers among the figures of a step."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for seat in self.seats:
            seat.hear(step, numbers)


class _Seat:
    """One listener, in a thread of its own."""

    def __init__(self, name: str, kind: Kind, told: Told) -> None:
        self.name, self.kind, self.told = name, kind, told
        self.queue: Queue[tuple[int, Values] | None] = Queue(_WAITING)
        self.missed, self.gone = 0, False
        self.thread = threading.Thread(target=self._listen, name=f"listener {name}", daemon=True)
        self.thread.start()

    def hear(self, step: int, values: Values) -> None:
        if not self.gone:
            try:
                self.queue.put_nowait((step, values))
            except Full:
                self.missed += 1

    def close(self) -> None:
        if self.queue.full():
            try:
                self.queue.get_nowait()
                self.missed += 1
            except Empty:
                pass  # it has caught up just now
        self.queue.put(None)
        self.thread.join(_PATIENCE)
        if self.thread.is_alive():
            _say(f"{self.name} has not answered for {_PATIENCE:.0f} s and is left behind{self._kept}")
        elif self.missed:
            _say(f"{self.name} was too slow and missed {self.missed:,} steps{self._kept}")

    def _listen(self) -> None:
        try:
            listener = self.kind(self.told)
            try:
                while (item := self.queue.get()) is not None:
                    listener.hear(*item)
            finally:
                listener.close()
        except BaseException as problem:
            self.gone = True
            said = " ".join(str(problem).split()) or type(problem).__name__
            _say(f"{self.name} stopped listening ({said}){self._kept}")

    @property
    def _kept(self) -> str:
        return f"; the run goes on, and {self.told.folder} has every figure"


def _warning(send: bool) -> str:
    if send:
        return (
            "losses, norms and evaluations of this run leave this machine. They are computed from the users' data "
            "without noise, and no guarantee covers them"
        )
    return (
        "figures of this run stay on this machine (--send would send them). They are computed from the users' data "
        "without noise, and no guarantee covers them"
    )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def chosen(names: Sequence[str] | None, send: bool) -> Listeners:
    """What `--listener` and `--send` say."""
    if send and not names:
        raise UserError("--send without --listener: nobody listens; name who, for example --listener wandb")
    return Listeners(tuple(names or ()), send)
