"""The command line's commands as functions: `import confide; confide.train("convex/digits", "runs/a")`.

Every function does what the command of its name does, by the same calls, and returns what `--json` prints, or an object
that holds it. Mistakes raise `confide.UserError` with the message that the command line would have printed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confide.errors import UserError
from confide.files import read_json_lines
from confide.recipe import Recipe
from confide.recipe import load as load_recipe
from confide.recipe import parse as parse_recipe
from confide.runs import folder as runs
from confide.runs.recording import RELEASED
from confide.settings import allow_code as allow_code

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from confide.privacy.accountant import Accountant
    from confide.privacy.guarantee import Statement
    from confide.privacy.planner import Answer
    from confide.reproduce.sweep import Swept
    from confide.runs.audit import Audit
    from confide.runs.comparison import Comparison
    from confide.runs.library import RetrievedDocument
    from confide.speech.transcribe import Transcript
    from confide.theory.diagnose import Diagnosis

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
        wanted = load_recipe(str(recipe), _words(sets))
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


def evaluate(
    run: str | Path | Run,
    corpus: str | None = None,
    sets: Sets = (),
    language_model: str | Path | None = None,
    encoder: str | None = None,
) -> dict[str, Any]:
    """Evaluate a run's model again, as `confide evaluate RUN` does.

    Args:
        run: a run, or its folder.
        corpus: for speech, another corpus to test on, by its kind.
        sets: for speech, changes to that corpus: `{"share": 10}` or `["share=10"]`.
        language_model: for speech, the ARPA file of an n-gram model for beam search.
        encoder: for speech, where the run's frozen encoder is, if not where its recipe says.

    Returns:
        What `--json` prints: the metrics, with the interval of the one that sums the task up.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/evaluate", {"run.steps": 5})
        >>> confide.evaluate(run)["metrics"]["accuracy"] == run.metrics["accuracy"]
        True
    """
    from confide.runs import evaluation

    arpa = None if language_model is None else Path(language_model)
    return evaluation.evaluate(_folder_of(run), corpus, _words(sets), arpa, True, encoder).to_json()


def transcribe(
    run: str | Path | Run,
    recording: str | Path | np.ndarray,
    language_model: str | Path | None = None,
    encoder: str | None = None,
) -> Transcript:
    """Write down what a recording says, as `confide transcribe RUN FILE` does. The model stays open for the next one.

    Args:
        run: a finished speech run, its folder, or a published folder.
        recording: an audio file of any rate and length, or samples (n,) at 16 kHz, mono, from -1 to 1.
        language_model: the ARPA file of an n-gram model for beam search.
        encoder: where the run's frozen encoder is, if not where its recipe says.

    Returns:
        A transcript: `text`, `segments` with the times and confidences of their words, and `to_json()`.

    Examples:
        >>> import confide, numpy
        >>> few = "{kind: synthetic, population: seed, speakers: 2, utterances: 2, sentences: digits}"
        >>> sets = {"run.steps": 1, "task.corpus": few, "task.test": few, "evaluation.every": 1}
        >>> run = confide.train("speech/embedded/seed", "runs/heard", sets)
        >>> said = confide.transcribe(run, numpy.zeros(16_000, dtype="float32"))
        >>> said.text, said.seconds
        ('', 1.0)
    """
    from confide.runs import answering

    arpa = None if language_model is None else Path(language_model)
    given = Path(recording) if isinstance(recording, str) else recording
    return answering.transcribe(_folder_of(run), given, arpa, encoder)


def retrieve(
    run: str | Path | Run, query: str, k: int = 5, documents: str | Path | None = None, encoder: str | None = None
) -> list[RetrievedDocument]:
    """Find documents for a query, as `confide retrieve RUN QUERY` does. The model stays open for the next one.

    Args:
        run: a finished retrieval run, its folder, or a published folder.
        query: what is looked for.
        k: how many documents.
        documents: for a model that was published without them, the file `documents.jsonl` of its owner.
        encoder: where the run's frozen encoder is, if not where its recipe says.

    Returns:
        The documents, best first, each with its `rank`, `score` and `document` (`id` and `text`).

    Examples:
        >>> import confide
        >>> few = "{kind: embedded, documents: 4, queries_per_document: 4, households: 2}"
        >>> sets = {"run.steps": 1, "task.data": few, "sampling.cohort": 2}
        >>> run = confide.train("retrieval/embedded", "runs/desk", sets)
        >>> [each.rank for each in confide.retrieve(run, "my fridge is too loud", k=2)]
        [1, 2]
    """
    from confide.runs import answering

    listed = None if documents is None else Path(documents)
    return answering.retrieve(_folder_of(run), query, k, listed, encoder)


def compare(*folders: str | Path | Run) -> Comparison:
    """Compare finished runs, as `confide compare RUN RUN ...` does.

    Args:
        folders: two or more runs, or their folders.

    Returns:
        A comparison. Its `to_json()` is what `--json` prints: each run's metric with its interval, and for each pair
        on the same test set the difference, its interval and whether it is real.

    Examples:
        >>> import confide
        >>> runs = [confide.train("convex/digits", f"runs/{s}", {"run.steps": 5, "run.seed": s}) for s in (0, 1)]
        >>> len(confide.compare(*runs).to_json()["pairs"])
        1
    """
    from confide.runs import comparison

    return comparison.compare([_folder_of(each) for each in folders])


def publish(
    run: str | Path | Run,
    out: str | Path,
    *,
    name: str = "",
    data: str = "",
    use: str = "",
    license: str = "",
    with_test_metrics: bool = False,
    documents: Literal["names", "texts"] | None = None,
) -> dict[str, Any]:
    """Write what the guarantee of a finished run covers into a new folder, as `confide publish RUN OUT` does.

    Args:
        run: a run, or its folder. Its noise has to be the operating system's.
        out: the folder to write, new or empty. It may leave; the run's folder must not.
        name: for the model card, what the model is called.
        data: for the card, what the data are, in the owner's words.
        use: for the card, what the model is meant for.
        license: for the card, under which licence.
        with_test_metrics: whether to publish the metrics on the test data, which have no noise.
        documents: of a retrieval model, whether to publish its documents' names, or names and texts; None: neither.

    Returns:
        What `--json` prints: folder, files, and the guarantee.

    Raises:
        UserError: there is nothing that may leave; the message says why.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/public", {"run.steps": 5, "privacy.source": "system"})
        >>> written = confide.publish(run, "public", data="Digits, written by 287 people.")
        >>> "model.safetensors" in written["files"], written["epsilon"] == run.epsilon
        (True, True)
    """
    from confide.runs import publish as publishing
    from confide.runs.card import Words

    words = Words(name, data, use, license)
    return publishing.publish(_folder_of(run), Path(out), words, with_test_metrics, documents)


def guarantee(run: str | Path | Run) -> Statement:
    """What a run promises, to whom and against whom, as `confide guarantee RUN` states it from the ledger alone.

    Args:
        run: a run, its folder, or a published folder.

    Returns:
        The statement: `epsilon`, `delta`, `unit`, `adversaries`, `not_covered`; `model_dump(mode="json")` is `--json`.

    Raises:
        UserError: a line of the ledger was edited, or the folder says something else than its ledger.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/promise", {"run.steps": 5, "privacy.target_epsilon": 2})
        >>> found = confide.guarantee(run)
        >>> found.epsilon <= 2, found.delta, found.protection
        (True, 1e-05, 'moderate protection')
    """
    from confide.runs.stated import differences, stated

    found = stated(_folder_of(run))
    if wrong := differences(_folder_of(run), found):
        raise UserError(f"{'; '.join(wrong)}: this folder was edited: believe the ledger, or nothing")
    return found


def release(run: str | Path | Run, out: str | Path, workers: int = 1, quiet: bool = True) -> Run:
    """Train a research run again with noise of the operating system, as `confide release RUN --out OUT` does.

    Args:
        run: a finished run with seeded noise, or its folder.
        out: the folder for the new run.
        workers: how many processes train clients.
        quiet: whether to leave out the progress bar.

    Returns:
        The new run, which may be published.

    Raises:
        UserError: a point of the checklist (`confide release RUN --check`) speaks against it.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/seeded", {"run.steps": 5})
        >>> confide.release(run, "runs/for-others").summary["for_release"]
        True
    """
    from confide.report.page import write_report
    from confide.runs import release as releasing

    releasing.release(_folder_of(run), Path(out), workers, quiet, write_report)
    return Run(Path(out))


def export(
    run: str | Path | Run, out: str | Path, encoder: str | None = None, recordings: Sequence[str | Path] = ()
) -> dict[str, Any]:
    """Write the model of a run as one ONNX file, as `confide export RUN --out FILE` does.

    Args:
        run: a finished run, its folder, or a published folder.
        out: the file to write; it must be new.
        encoder: where the run's frozen encoder is, if not where its recipe says.
        recordings: for speech, audio files whose transcripts have to be the same.

    Returns:
        What `--json` prints: file, bytes, inputs, output, how far onnxruntime's answers were off, and the notes.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/for-programs", {"run.steps": 5})
        >>> confide.export(run, "for-programs.onnx")["inputs"]
        {'features': ['examples', 64]}
    """
    from confide.runs.export import export as write

    return write(_folder_of(run), Path(out), encoder, [Path(each) for each in recordings])


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

    return diagnose_run(_folder_of(run), users, draws, seed, rehearse)


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

    wanted = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), _words(sets))
    return auditing.audit(wanted, canaries, workers=workers)


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


def _folder_of(run: str | Path | Run) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)


def _words(sets: Sets) -> list[str]:
    """Write changes to a recipe as --set takes them. Values become JSON, which is YAML too."""
    if isinstance(sets, str):
        raise UserError(f"sets={sets!r}: expected a mapping, or a list of SECTION.KEY=VALUE")
    if isinstance(sets, Mapping):
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in sets.items()]
    return list(sets)
