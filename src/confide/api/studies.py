"""What is asked before a run, or of many: plans, sweeps, audits, diagnoses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confide.api.runs import Run, Sets, folder_of, words_of
from confide.errors import UserError
from confide.recipe import Recipe
from confide.recipe import load as load_recipe

if TYPE_CHECKING:
    from confide.privacy.accountant import Accountant
    from confide.privacy.planner import Answer
    from confide.reproduce.sweep import Swept
    from confide.runs.audit import Audit
    from confide.theory.diagnose import Diagnosis


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
    """Find the one number that is left out, as `confide plan` does.

    Leave out exactly one of `target_epsilon`, the noise, `cohort`, `population` and `rounds`.

    Args:
        delta: delta of the guarantee.
        cohort: how many users a central step expects.
        population: how many users there are.
        rounds: how many central steps are released.
        noise_multiplier: z, the noise on the sum in units of one user's largest contribution.
        noise_per_user: the noise in the other way: s = z / cohort, on the average. Give at most one of the two.
        target_epsilon: the epsilon to stay within.
        accountant: which accountant searches, `"pld"` or `"rdp"`. The answer states epsilon by both.

    Returns:
        An answer: `point` has all numbers, `epsilon` the epsilon by each accountant, `to_json()` what `--json` prints.

    Raises:
        UserError: none or several were left out, or no value stays within the target.

    Examples:
        >>> import confide
        >>> answer = confide.plan(target_epsilon=2, cohort=100, population=10_000, rounds=50, delta=1e-6)
        >>> answer.asked, round(answer.point.noise_multiplier, 2)
        ('noise', 0.77)
    """
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


def sweep(
    recipe: str,
    out: str | Path,
    sets: Sequence[str] = (),
    seeds: int = 3,
    held_out: int = 20,
    workers: int = 1,
    quiet: bool = True,
) -> Swept:
    """Train a recipe at every combination of settings with every seed, as `confide sweep RECIPE --out OUT` does.

    Args:
        recipe: the name of a shipped recipe, or the path of a file.
        out: the folder for the runs. With the runs of an earlier call in it, the sweep goes on.
        sets: words of `--set`; `"central.learning_rate=1,3"` tries two values.
        seeds: how many runs each setting gets.
        held_out: the percent of the training people to choose by; 0 evaluates as the recipe does.
        workers: how many runs train at a time.
        quiet: whether to leave out bars and warnings; the result has the warnings.

    Returns:
        What was found: `best`, `not_worse`, `command`, `warnings`, `page`, and `to_json()`, which is `--json`.

    Examples:
        >>> import confide
        >>> rates = ["central.learning_rate=0.008,0.016", "run.steps=5"]
        >>> found = confide.sweep("convex/digits", "rates", rates, seeds=2, held_out=0)
        >>> len(found.to_json()["settings"])
        2
    """
    from confide.reproduce import sweep as sweeping

    return sweeping.sweep(recipe, list(sets), seeds, Path(out), workers, held_out, quiet)


def audit(recipe: str | Path | Recipe, sets: Sets = (), canaries: int | None = None, workers: int = 1) -> Audit:
    """Try to disprove a recipe's guarantee, as `confide audit RECIPE --no-power` does.

    Args:
        recipe: the name of a shipped recipe, the path of a file, or a checked `Recipe`.
        sets: changes to a recipe given by name or path.
        canaries: how many users are planted; None: as many as the claim needs.
        workers: how many processes train clients.

    Returns:
        An audit: `passed`, `claimed`, `lower_bound`, `delta`, and `to_json()`.

    Examples:
        >>> import confide
        >>> found = confide.audit("convex/digits", {"run.steps": 5}, canaries=200)
        >>> found.passed, found.lower_bound <= found.claimed
        (True, True)
    """
    from confide.runs import audit as auditing

    wanted = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), words_of(sets))
    return auditing.audit(wanted, canaries, workers=workers)


def diagnose(run: str | Path | Run, users: int = 16, draws: int = 2, seed: int = 0, rehearse: int = 200) -> Diagnosis:
    """What holds a run back and what to change, as `confide diagnose RUN` finds it.

    Args:
        run: a run that has reached a checkpoint, or its folder.
        users: how many users to probe.
        draws: how often each of them trains, on other batches.
        seed: draws the users and the batches.
        rehearse: steps of the rehearsals that advice is taken from; 0 takes it from theory alone, at once.

    Returns:
        A diagnosis: `advice`, each with `settings` to follow it by, `to_text()`, and `to_json()`.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/held-back", {"run.steps": 5})
        >>> len(confide.diagnose(run, rehearse=0).advice) > 0
        True
    """
    from confide.theory.diagnose import diagnose_run

    return diagnose_run(folder_of(run), users, draws, seed, rehearse)
