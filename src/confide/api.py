"""The command line's commands as functions: `import confide; confide.train("convex/digits", "runs/a")`.

Every function does what the command of its name does, by the same calls, and returns what `--json` prints, or an object
that holds it. Mistakes raise `confide.UserError` with the message that the command line would have printed.
"""

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

if TYPE_CHECKING:
    from torch import Tensor

    from confide.privacy.accountant import Accountant
    from confide.privacy.planner import Answer
    from confide.runs.comparison import Comparison

Sets = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: {"privacy.target_epsilon": 2}, or ["privacy.target_epsilon=2"] as on the command line."""


@dataclass(frozen=True)
class Run:
    """The folder of a run."""

    folder: Path

    @property
    def recipe(self) -> Recipe:
        return runs.held_recipe(self.folder)

    @property
    def finished(self) -> bool:
        return (self.folder / runs.SUMMARY).exists()

    @property
    def summary(self) -> dict[str, Any]:
        """What `confide train --json` prints."""
        if not self.finished:
            raise UserError(f"{self.folder} is not finished; go on with confide.resume({str(self.folder)!r})")
        return runs.summary_of(self.folder)

    @property
    def metrics(self) -> dict[str, float | None]:
        found: dict[str, float | None] = self.summary["metrics"]
        return found

    @property
    def epsilon(self) -> float | None:
        """None where there is no guarantee."""
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
        """One for every central step so far."""
        return read_json_lines(self.folder / runs.METRICS)

    @property
    def ledger(self) -> dict[str, Any]:
        """The privacy spent, recomputed from the ledger: what `confide ledger --json` prints."""
        return runs.check_ledger(self.folder)

    @property
    def report(self) -> Path:
        """The run's page, written again."""
        from confide.report.page import write_report

        return write_report(self.folder, self.recipe, runs.summary_if_finished(self.folder))


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path,
    sets: Sets = (),
    workers: int = 1,
    quiet: bool = True,
) -> Run:
    """`confide train RECIPE --out OUT --set ...`: a recipe by name, by file, as a document, or already checked."""
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
        wanted = load_recipe(str(recipe), _words(sets))
    from confide.report.page import write_report

    runs.train(wanted, Path(out), workers, quiet, page=write_report)
    return Run(Path(out))


def resume(run: str | Path, workers: int = 1, quiet: bool = True) -> Run:
    """`confide resume RUN`."""
    from confide.report.page import write_report

    runs.resume(Path(run), workers, quiet, page=write_report)
    return Run(Path(run))


def load(run: str | Path) -> Run:
    """A run by its folder, finished or not."""
    runs.held_recipe(Path(run))
    return Run(Path(run))


def evaluate(
    run: str | Path | Run, corpus: str | None = None, sets: Sets = (), language_model: str | Path | None = None
) -> dict[str, Any]:
    """`confide evaluate RUN --json`."""
    from confide.runs import evaluation

    arpa = None if language_model is None else Path(language_model)
    return evaluation.evaluate(_folder_of(run), corpus, _words(sets), arpa, quiet=True).to_json()


def compare(*folders: str | Path | Run) -> Comparison:
    """`confide compare RUN...`."""
    from confide.runs import comparison

    return comparison.compare([_folder_of(each) for each in folders])


def plan(
    *,
    delta: float,
    cohort: int | None = None,
    population: int | None = None,
    rounds: int | None = None,
    noise_multiplier: float | None = None,
    noise_per_user: float | None = None,
    target_epsilon: float | None = None,
    accountant: Accountant = "pld",
) -> Answer:
    """`confide plan ...`: leave out one of noise, cohort, population, rounds and target_epsilon, and get it."""
    from confide.privacy import planner

    noisy = noise_multiplier is not None or noise_per_user is not None
    noise = planner.Noise(noise_multiplier, noise_per_user) if noisy else None
    match (target_epsilon, noise, cohort, population, rounds):
        case (None, planner.Noise(), int(), int(), int()):
            return planner.epsilon(noise, cohort, population, rounds, delta, accountant)
        case (float() | int(), None, int(), int(), int()):
            return planner.noise(target_epsilon, cohort, population, rounds, delta, accountant)
        case (float() | int(), planner.Noise(), None, int(), int()):
            return planner.cohort(target_epsilon, noise, population, rounds, delta, accountant)
        case (float() | int(), planner.Noise(), int(), None, int()):
            return planner.population(target_epsilon, noise, cohort, rounds, delta, accountant)
        case (float() | int(), planner.Noise(), int(), int(), None):
            return planner.rounds(target_epsilon, noise, cohort, population, delta, accountant)
    named = (target_epsilon, noise, cohort, population, rounds)
    left = [
        n
        for n, v in zip(("target_epsilon", "noise", "cohort", "population", "rounds"), named, strict=True)
        if v is None
    ]
    raise UserError(
        f"left out: {', '.join(left) or 'nothing'}; leave out exactly one of target_epsilon, noise (noise_multiplier "
        "or noise_per_user), cohort, population and rounds, the last three as whole numbers: that one is the answer"
    )


def _folder_of(run: str | Path | Run) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)


def _words(sets: Sets) -> list[str]:
    """As --set has them; JSON is YAML too."""
    if isinstance(sets, str):
        raise UserError(f"sets={sets!r}: expected a mapping, or a list of SECTION.KEY=VALUE")
    if isinstance(sets, Mapping):
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in sets.items()]
    return list(sets)
