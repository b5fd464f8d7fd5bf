"""Following a run from outside: `confide watch`. It reads what the run writes and touches nothing.

The folder's lock says whether a process works in it. To look at the lock we take it for some microseconds; a run that
starts in that very moment tries again.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confide.errors import UserError
from confide.federated.items import in_words, measured
from confide.privacy import ledger
from confide.privacy.accountant import COLOURS, protection, shown, strength
from confide.recipe import Recipe
from confide.runs import beginning
from confide.runs import folder as runs
from confide.runs.beginning import Beginning

Record = dict[str, Any]
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Watched:
    """A run and the records read of it so far; `look` reads those that were added since."""

    folder: Path
    recipe: Recipe
    records: list[Record] = field(default_factory=list)
    _read: int = 0
    _beginning: Beginning | None = None

    def look(self) -> None:
        path = self.folder / runs.METRICS
        size = path.stat().st_size if path.exists() else 0
        if size < self._read:  # taken up again from a checkpoint: the lines behind it are gone
            self.records, self._read = [], 0
        if size == self._read:
            return
        with path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self.records += _parse_records(whole)

    @property
    def step(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def state(self) -> str:
        """finished, running or stopped."""
        if (self.folder / runs.SUMMARY).exists():
            return "finished"
        return "running" if busy(self.folder) else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """What the steps that are left will take, at the pace of the last ones."""
        recent = self.records[-20:]
        if len(recent) < 2:
            return None
        pace = (recent[-1]["seconds"] - recent[0]["seconds"]) / (recent[-1]["step"] - recent[0]["step"])
        return float(max(pace, 0.0) * (self.recipe.run.steps - self.step))

    def metric(self) -> tuple[str, list[float]]:
        """The first measure of the evaluations, over the run."""
        scored = [r["evaluation"] for r in self.records if r.get("evaluation")]
        if not scored:
            return "", []
        name = next(iter(scored[0]))
        return name, [e[name] for e in scored if e.get(name) is not None]

    @property
    def epsilon(self) -> float | None:
        """What the ledger had spent when that was last computed."""
        return next((r["epsilon"] for r in reversed(self.records) if "epsilon" in r), None)

    def beginning(self) -> Beginning | None:
        """Where the run began, read once it is there."""
        if self._beginning is None:
            self._beginning = beginning.read(self.folder)
        return self._beginning

    def to_json(self) -> dict[str, Any]:
        name, values = self.metric()
        last = self.records[-1] if self.records else {}
        value, epsilon = values[-1] if values else None, self.epsilon
        state, terms = self.state, _terms(self.folder)
        if state == "stopped" and epsilon is not None:  # perhaps in the middle of a step, which is paid for
            with suppress(UserError):  # a list of runs shows what it can; `confide ledger` says what is wrong
                epsilon = runs.check_ledger(self.folder)["epsilon"]
        if state == "finished":  # the final model need not be the last iterate
            summary = runs.summary_of(self.folder)
            name = summary.get("metric", name)
            value, epsilon = summary["metrics"].get(name), summary["epsilon"]
        began = self.beginning()
        return {
            "state": state, "changed": _changed(self.folder), "recipe": self.recipe.description,
            "rule": self.recipe.bounding.rule, "task": self.recipe.task.kind, "step": self.step,
            "steps": self.recipe.run.steps,
            "metric": name, "metric_said": in_words(name), "value": value, "epsilon": epsilon,
            "epsilon_shown": shown(epsilon), **terms, "strength": strength(epsilon, **terms),
            "protection": protection(epsilon, **terms),
            "start": None if began is None else began.metrics.get(name or began.metric),
            "against_start": "" if began is None else began.said(value),
            "seconds": last.get("seconds"), "seconds_left": self.seconds_left,
            **{name: last.get(name) for name in ("loss", "cohort", "snr", "share_bounded")},
        }  # fmt: skip


def _terms(folder: Path) -> dict[str, Any]:
    """Delta and how many users there are, from the first line of the ledger."""
    try:
        with (folder / ledger.FILE).open() as lines:
            header = json.loads(next(lines))["run"]
        return {name: header.get(name) for name in ("delta", "population")}
    except (OSError, StopIteration, ValueError, KeyError, TypeError):
        return {"delta": None, "population": None}


def _changed(folder: Path) -> float | None:
    """When the run last wrote something, in seconds since 1970."""
    for name in (runs.SUMMARY, runs.METRICS, runs.RECIPE):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return None


def read_run(folder: Path) -> Watched:
    """A run with the records that it has now."""
    found = Watched(folder, runs.held_recipe(folder))
    found.look()
    return found


def busy(folder: Path) -> bool:
    """Whether a process works in the folder."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def follow(folder: Path, every: float = 0.5) -> str:
    """Show a run until it ends, and return how: finished or stopped. Ctrl-C ends the watching, not the run.

    Without a terminal, print a line whenever there is a new step, at most one each time we look.
    """
    from rich.console import Console
    from rich.live import Live

    found, console = read_run(folder), Console()
    if not console.is_terminal:
        printed = -1

        def show() -> None:
            nonlocal printed
            if found.step != printed:
                printed = found.step
                print(_line(found), flush=True)

        return _look_until_it_ends(found, every, show)
    with Live(_panel(found), console=console, refresh_per_second=4) as live:
        return _look_until_it_ends(found, every, lambda: live.update(_panel(found)))


def _look_until_it_ends(found: Watched, every: float, show: Callable[[], None]) -> str:
    while True:
        state = found.state
        found.look()
        show()
        if state != "running":
            return state
        time.sleep(every)


def spark(values: list[float], width: int = 40) -> str:
    """A curve in one line of text."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(7, int(8 * (v - low) / span))] for v in means)


def _line(found: Watched) -> str:
    now = found.to_json()
    parts = [f"step {now['step']}/{now['steps']}"]
    parts += [f"loss {now['loss']:.4g}"] if now["loss"] is not None else []
    parts += [measured(now["metric"], now["value"])] if now["value"] is not None else []
    if now["epsilon"] is not None:
        parts.append(f"epsilon {shown(now['epsilon'])} ({now['protection']})")
    return ", ".join(parts)


def _panel(found: Watched) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    now = found.to_json()
    table = Table.grid(padding=(0, 2))
    losses = [float(r["loss"]) for r in found.records if r.get("loss") is not None]
    name, scores = found.metric()
    left = now["seconds_left"]
    rows = [
        ("step", f"{now['step']:,} of {now['steps']:,}", "" if left is None else f"about {duration(left)} left"),
        ("loss", "" if not losses else f"{losses[-1]:.4g}", spark(losses)),
        (in_words(name), "" if not scores else f"{scores[-1]:.4g}", f"{spark(scores)} {now['against_start']}".strip()),
        ("epsilon", "no guarantee" if now["epsilon"] is None else shown(now["epsilon"]), _so_far(now)),
        ("signal / noise", "" if now["snr"] is None else f"{now['snr']:.3g}", ""),
        ("share bounded", "" if now["share_bounded"] is None else f"{now['share_bounded']:.0%}", ""),
        ("cohort", "" if now["cohort"] is None else f"{now['cohort']:,} users", ""),
    ]
    for row in rows:
        if row[0] and row[1]:
            table.add_row(*row)
    bar = ProgressBar(total=now["steps"], completed=now["step"])
    title = f"{found.recipe.task.kind}, {now['state']}: {found.folder}"  # a long path is cut at its end
    return Panel(Group(bar, table), title=title, expand=False)


def _so_far(now: dict[str, Any]) -> str:
    said = "so far" if now["state"] != "finished" else ""
    if now["epsilon"] is None or now["delta"] is None:
        return said
    return f"{said} at delta {now['delta']:g}: [{COLOURS[now['strength']]}]{now['protection']}[/]".strip()


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _parse_records(lines: bytes) -> list[Record]:
    try:
        return [json.loads(line) for line in lines.splitlines()]
    except ValueError as error:
        raise UserError(f"the run's {runs.METRICS} is damaged ({error}); nothing can be shown of it") from None
