"""Runs: making them, opening them, and what is in their folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import UserError
from confide.files import read_json_lines
from confide.recipe import Recipe
from confide.recipe import load as load_recipe
from confide.recipe import parse as parse_recipe
from confide.runs import folder as runs
from confide.runs.recording import RELEASED

if TYPE_CHECKING:
    from torch import Tensor

Sets = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: {"privacy.target_epsilon": 2}, or ["privacy.target_epsilon=2"] as on the command line."""


@dataclass(frozen=True)
class Run:
    """A run on disk, finished or not; `train`, `resume` and `load` return one.

    Args:
        folder: the run's folder. Everything else is read from it when it is asked for.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/digits", {"run.steps": 5})
        >>> run.finished, len(run.records), sorted(run.model)
        (True, 5, ['bias', 'weight'])
        >>> run.epsilon == run.ledger["epsilon"]
        True
    """

    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        return runs.held_recipe(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run has ended and written its summary."""
        return (self.folder / runs.SUMMARY).exists()

    @property
    def summary(self) -> dict[str, Any]:
        """What `confide train --json` prints."""
        if not self.finished:
            raise UserError(f"{self.folder} is not finished; go on with confide.resume({str(self.folder)!r})")
        return runs.summary_of(self.folder)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The evaluation of the final model, by name."""
        found: dict[str, float | None] = self.summary["metrics"]
        return found

    @property
    def epsilon(self) -> float | None:
        """The epsilon that the run spent; None if it gives no guarantee."""
        found: float | None = self.summary["epsilon"]
        return found

    @property
    def model(self) -> dict[str, Tensor]:
        """The trained tensors, by name."""
        from confide.runs.parameters import read_tensors

        if not (self.folder / runs.MODEL).is_file():
            raise UserError(f"{self.folder} holds no model yet; go on with confide.resume({str(self.folder)!r})")
        return read_tensors(self.folder)

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was recorded of every central step so far."""
        return read_json_lines(self.folder / runs.METRICS)

    @property
    def released(self) -> list[dict[str, float]]:
        """The figures of every central step that were released with noise (`privacy.metrics`); they may be shown."""
        return read_json_lines(self.folder / RELEASED)

    @property
    def ledger(self) -> dict[str, Any]:
        """The privacy spent, recomputed from the ledger: what `confide ledger --json` prints."""
        return runs.check_ledger(self.folder)

    @property
    def report(self) -> Path:
        """Write the run's page again, and say where it is."""
        from confide.report.page import write_report

        return write_report(self.folder, self.recipe, runs.summary_if_finished(self.folder))


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path,
    sets: Sets = (),
    workers: int = 1,
    quiet: bool = True,
    listeners: Sequence[str] = (),
    send: bool = False,
) -> Run:
    """Start a run and see it through, as `confide train RECIPE --out OUT --set ...` does.

    Call it from the main thread: it handles Ctrl-C as the command does.

    Args:
        recipe: the name of a shipped recipe, the path of a file, a document (a mapping), or a checked `Recipe`.
        out: the folder for the run. It must be new, or hold this very run, finished, which is then returned.
        sets: changes to a recipe given by name or path: `{"run.steps": 5}` or `["run.steps=5"]`.
        workers: how many processes train clients. The model is the same for any number.
        quiet: whether to leave out the progress bar.
        listeners: who hears the figures of every step: `"wandb"`, `"mlflow"`, or a class as `"module:Class"`.
        send: whether these may send figures off this machine. They have no noise, and no guarantee covers them.

    Returns:
        The run, finished.

    Raises:
        UserError: the recipe or the folder cannot be used; the message says what to change.
        Stopped: somebody pressed Ctrl-C; everything is saved, and `resume` goes on.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/train", {"run.steps": 5, "privacy.target_epsilon": 2})
        >>> run.finished, run.epsilon <= 2
        (True, True)
    """
    if isinstance(recipe, Recipe):
        if sets:
            raise UserError(
                "sets change a recipe's document, and a checked Recipe was given; give its name or document"
            )
        wanted = recipe
    elif isinstance(recipe, Mapping):
        if sets:
            raise UserError("sets change a recipe's document, and the document itself was given; change it there")
        wanted = parse_recipe(dict(recipe), "the recipe")
    else:
        wanted = load_recipe(str(recipe), words_of(sets))
    from confide.report.page import write_report
    from confide.runs.listening import chosen

    runs.train(wanted, Path(out), workers, quiet, page=write_report, listeners=chosen(listeners, send))
    return Run(Path(out))


def resume(run: str | Path, workers: int = 1, quiet: bool = True) -> Run:
    """Go on with a run that was stopped or killed, as `confide resume RUN` does.

    Args:
        run: the run's folder.
        workers: how many processes train clients. It need not be the number that the run began with.
        quiet: whether to leave out the progress bar.

    Returns:
        The run, finished, with the model that it would have had without the stop.

    Examples:
        >>> import confide
        >>> first = confide.train("convex/digits", "runs/resume", {"run.steps": 5})
        >>> confide.resume("runs/resume").metrics == first.metrics  # finished already: nothing is done
        True
    """
    from confide.report.page import write_report

    runs.resume(Path(run), workers, quiet, page=write_report)
    return Run(Path(run))


def load(run: str | Path) -> Run:
    """Open a run by its folder, finished or not.

    Args:
        run: the run's folder.

    Returns:
        The run. Nothing but its recipe is read yet.

    Examples:
        >>> import confide
        >>> _ = confide.train("convex/digits", "runs/load", {"run.steps": 5, "run.seed": 7})
        >>> confide.load("runs/load").recipe.run.seed
        7
    """
    runs.held_recipe(Path(run))
    return Run(Path(run))


def folder_of(run: str | Path | Run) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)


def words_of(sets: Sets) -> list[str]:
    """Write changes to a recipe as --set takes them. Values become JSON, which is YAML too."""
    if isinstance(sets, str):
        raise UserError(f"sets={sets!r}: expected a mapping, or a list of SECTION.KEY=VALUE")
    if isinstance(sets, Mapping):
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in sets.items()]
    return list(sets)
