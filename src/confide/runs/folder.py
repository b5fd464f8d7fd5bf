"""The folder of a run: what is in it, and how a run is started, stopped and taken up again.

recipe.yaml (resolved), checkpoint.safetensors, ledger.jsonl, metrics.jsonl, layers.jsonl (norms of each tensor, where
the model was evaluated), times.jsonl (seconds of each part of a step), start.json (what the starting model is worth),
released.jsonl (the figures of `privacy.metrics`, which alone of these have noise), events.* (TensorBoard) and what
other listeners keep, and at the end model.safetensors, scores.json (how each test item was answered), summary.json and
report.html. secret.key has the key of the digests of users' data, and must not leave the folder. Nothing that is there
is ever overwritten by another run, and one process at a time works in it.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from confide import recipe
from confide.build import RemoteEngine, make_loop
from confide.engines.engine import Abandoned
from confide.engines.ranks import LostRank, Place
from confide.errors import Stopped, UserError
from confide.federated import items
from confide.federated.state import State
from confide.federated.task import Task
from confide.files import check_plain, write_atomically
from confide.privacy import ledger
from confide.privacy.budget import Budget, BudgetSpent
from confide.privacy.ledger import Ledger
from confide.privacy.mechanisms import Mechanism, mechanism_of
from confide.progress import Reporter, stop_on_signal
from confide.recipe import Recipe
from confide.run import Loop
from confide.runs import beginning, checkpoint, fingerprint
from confide.runs.beginning import score_model
from confide.runs.fingerprint import describe_environment
from confide.runs.listening import NOBODY, Listeners
from confide.runs.notes import notes_of, serialise
from confide.runs.paying import check_budget, paying
from confide.runs.recording import LAYERS, METRICS, TIMES, Recording
from confide.runs.records import Recorded, evaluate, finite, json_safe, mean_of_recent
from confide.runs.starting import DEPLOYED, make_folder, undone_if_it_fails
from confide.runs.stated import SUMMARY, check_ledger, check_tail, spent, stated, summary_if_finished, summary_of
from confide.settings import read_yaml

__all__ = ["LAYERS", "METRICS", "SUMMARY", "TIMES", "check_ledger", "finite", "summary_if_finished", "summary_of"]
_CHANGED = "{} was changed after the run began; nothing was done. Put it back, or start another run"
_INPUTS = (fingerprint.KEY, "inputs_keyed")
_SPENT = ("epsilon", "delta", "accountant", "adjacency", "noise_source", "for_release", "releases")
RECIPE, MODEL = "recipe.yaml", "model.safetensors"


WritePage = Callable[[Path, Recipe, dict[str, Any]], object]
"""From folder, recipe and summary to a page in the folder (`confide.report.page.write_report`)."""


@dataclass(frozen=True)
class Deployed:
    """A run whose users are on other machines."""

    task: Task
    engine: RemoteEngine


def train(
    wanted: Recipe,
    folder: Path,
    workers: int = 1,
    quiet: bool = False,
    here: Place | None = None,
    deployed: Deployed | None = None,
    page: WritePage | None = None,
    listeners: Listeners = NOBODY,
) -> dict[str, Any]:
    """Start a run in a new folder and see it through. A folder that holds this run, finished, answers at once.

    Args:
        wanted: what to run.
        folder: where to keep it.
        workers: how many processes train clients.
        quiet: whether to leave out the progress bar.
        here: the place of this process, where torchrun started several.
        deployed: the task and the engine of a run whose users are on other machines.
        page: writes the page that the run leaves behind (`confide.report.page.write_report`).
        listeners: who hears the figures of its steps, beside TensorBoard.

    Returns:
        The summary, which is also in `summary.json`.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.folder import train
        >>> train(load("convex/digits", ["run.steps=5"]), Path("runs/folder-train"), quiet=True)["steps"]
        5
    """
    listeners.check(wanted)
    if (folder / RECIPE).exists():
        held = held_recipe(folder)
        check_unedited(folder, held)
        if held.digest != wanted.digest:
            raise UserError(
                f"{folder} already holds another run (recipe {held.digest}, not {wanted.digest}); nothing was "
                "changed. Choose another --out folder"
            )
        if here is not None and here.restarted:
            return resume(folder, workers, quiet, here, page=page, listeners=listeners)
        if not (folder / SUMMARY).exists():
            _check_deployed(folder, deployed)
            raise UserError(f"{folder} holds this run, unfinished; go on with `confide resume {folder}`")
        print(f"{folder} holds this run, finished; nothing was trained", file=sys.stderr, flush=True)
        return summary_of(folder)
    new = make_folder(folder)
    with _hold_lock(folder):
        if deployed is not None:
            (folder / DEPLOYED).touch()
            loop, state = _begin(folder, wanted, workers, here, deployed)  # clients may know of it already
        else:
            with undone_if_it_fails(folder, new):
                loop, state = _begin(folder, wanted, workers, here, deployed)
        return _finish_run(folder, loop, state, quiet, page, listeners)


def _begin(
    folder: Path, wanted: Recipe, workers: int, here: Place | None, deployed: Deployed | None,
    saved: State | None = None,
) -> tuple[Loop, State]:  # fmt: skip
    """Make the loop and the state to go on from; nothing is released yet."""
    loop = _loop(folder, wanted, workers, here, deployed, begins=saved is None)
    try:
        check_budget(loop)
        if saved is not None:
            _check_fits(folder, saved, loop)
        state = saved or loop.start()
        if state.step == 0 and wanted.evaluation.start:
            beginning.measure(folder, loop.task, loop.layout.views(state.parameters))
        return loop, state
    except BaseException:
        loop.engine.close()
        raise


def _loop(
    folder: Path, wanted: Recipe, workers: int, here: Place | None, deployed: Deployed | None, begins: bool
) -> Loop:
    task, engine = (None, None) if deployed is None else (deployed.task, deployed.engine)
    return make_loop(
        wanted, lambda header: _open_ledger(folder, wanted, header), workers, task, here, engine,
        secret=lambda: fingerprint.secret_of(folder), begins=begins,
    )  # fmt: skip


def _check_fits(folder: Path, saved: State, loop: Loop) -> None:
    """Refuse a checkpoint whose numbers are not of this model, or whose cohort is not of these users."""
    like = loop.total.to("meta")  # shapes alone
    own = {"parameters": like, **loop.central.start(like)}
    held = {"parameters": saved.parameters, **saved.optimiser}
    wrong = [
        f"{name} {list(held[name].shape) if name in held else 'missing'}, expected {list(tensor.shape)}"
        for name, tensor in own.items()
        if name not in held or (held[name].shape, held[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if saved.pending is not None and not {*saved.pending.flatten().tolist()} <= set(range(len(loop.plan.weights))):
        wrong.append(f"a cohort with others than users 0 to {len(loop.plan.weights) - 1}")
    if wrong:
        raise UserError(
            f"{folder / checkpoint.FILE} does not fit the model of this run ({'; '.join(wrong[:3])}); put back a "
            "copy of it, or start the run again in another folder"
        )


def resume(
    folder: Path,
    workers: int = 1,
    quiet: bool = False,
    here: Place | None = None,
    deployed: Deployed | None = None,
    page: WritePage | None = None,
    listeners: Listeners = NOBODY,
) -> dict[str, Any]:
    """Go on with a run that was stopped or killed; it ends with the model that it would have had without the stop.

    The arguments are those of `train`, and so is what comes back. A run that has finished answers at once.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.folder import resume, train
        >>> summary = train(load("convex/digits", ["run.steps=5"]), Path("runs/folder-resume"), quiet=True)
        >>> resume(Path("runs/folder-resume")) == summary
        True
    """
    if (folder / SUMMARY).exists() and (folder / RECIPE).exists():
        check_unedited(folder, held_recipe(folder))
        print(f"{folder} has finished; nothing was trained", file=sys.stderr, flush=True)
        return summary_of(folder)
    wanted = held_recipe(folder, to_go_on=True)
    listeners.check(wanted)
    _check_deployed(folder, deployed)
    with _hold_lock(folder):
        saved = checkpoint.load(folder) if (folder / checkpoint.FILE).exists() else None
        if saved is not None:
            _check_saved(folder, saved, wanted)
        loop, state = _begin(folder, wanted, workers, here, deployed, saved.state if saved else None)
        return _finish_run(folder, loop, state, quiet, page, listeners)


def check_unedited(folder: Path, held: Recipe) -> None:
    """Refuse the recipe of a finished run that is not the one its model was made with."""
    summary = summary_if_finished(folder)
    if summary is not None and summary.get("recipe") not in (None, held.digest):
        raise UserError(
            f"{folder / RECIPE} was changed after the run finished (recipe {held.digest}, not {summary['recipe']}); "
            "its model is that of the recipe before. Put it back, or train the changed one into another --out folder"
        )


def _check_deployed(folder: Path, deployed: Deployed | None) -> None:
    """Refuse to go on here with a run whose users are on other machines: the recipe's own corpus is a stand-in."""
    if deployed is None and (folder / DEPLOYED).exists():
        raise UserError(
            f"{folder} is a run over clients on other machines, and cannot go on without them; use `confide deploy "
            f"server --resume {folder} --keys KEYS`"
        )


def held_recipe(folder: Path, to_go_on: bool = False) -> Recipe:
    """Read the recipe of a run. One that this version would refuse can be looked at, but not gone on with."""
    check_plain(folder)
    try:
        document = read_yaml((folder / RECIPE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no run: there is no {RECIPE} in it; start one with `confide train`") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / RECIPE} is not valid YAML: {error}") from None
    return recipe.parse(document if isinstance(document, dict) else {}, str(folder / RECIPE), made=not to_go_on)


def mechanism_for(recipe: Recipe) -> type[Mechanism]:
    """Find the mechanism of a recipe: it says what a run of it promises."""
    return mechanism_of(recipe.privacy, recipe.bounding.follows)


def _check_saved(folder: Path, saved: checkpoint.Saved, wanted: Recipe) -> None:
    if saved.recipe_digest != wanted.digest:
        raise UserError(_CHANGED.format(folder / RECIPE))
    if not (folder / ledger.FILE).exists():
        raise UserError(f"{folder / ledger.FILE} is missing; without it the privacy spent cannot be stated")
    check_tail(folder, Ledger.read(folder / ledger.FILE), saved)


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and name the folder in errors of writing."""
    check_plain(folder)
    with (folder / ".lock").open("w") as lock:
        if not any(_take_lock(lock, wait) for wait in (0, 0.05, 0.2)):
            raise UserError(f"another process is working in {folder}; wait for it or stop it first")
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(folder)
            raise


def _take_lock(lock: TextIO, wait: float) -> bool:
    """Wait and try to take the lock; false if another has it. `confide watch` takes it for microseconds only."""
    time.sleep(wait)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_ledger(folder: Path, wanted: Recipe, header: dict[str, Any]) -> Ledger:
    """Open the ledger, or begin it. The recipe is written first, so that a run that is killed here can be resumed."""
    path = folder / ledger.FILE
    if not (folder / RECIPE).exists():
        write_atomically(folder / RECIPE, wanted.to_yaml().encode())
    if path.exists() and path.stat().st_size > 0:
        Ledger.drop_torn_line(path)
    people = None if wanted.privacy.budget is None else Budget.read(wanted.privacy.budget)
    if people is not None:
        people.check_population(header["population"])
    if not path.exists() or path.stat().st_size == 0:
        own = {} if people is None else {"budget": {"id": people.header["id"], "run": secrets.token_hex(8)}}
        return paying(Ledger.create(path, {**header, **own}), people)
    book = paying(Ledger.read(path), people)
    if "published" in book.header:
        raise UserError(f"{folder} was published from a run; go on with the run itself, in its own folder")
    if book.header.get("recipe") != wanted.digest:
        raise UserError(_CHANGED.format(folder / RECIPE))
    fingerprint.check(folder, book.header, header)
    before = book.header.get("population") or (book.entries[0].event.population if book.entries else None)
    if before not in (None, header["population"]):
        raise UserError(
            f"{folder} was begun with {before} users and there are {header['population']} now; one guarantee cannot "
            "stand for two populations, so nothing was done. Put back the users, or start another run"
        )
    return book


def _finish_run(
    folder: Path, loop: Loop, state: State, quiet: bool, page: WritePage | None, listeners: Listeners
) -> dict[str, Any]:
    try:
        _make_steps(folder, loop, state, quiet, listeners)
        return _finish(folder, loop, state, page)
    except LostRank as lost:
        # Rank 0 wrote nothing of the step that was under way.
        raise LostRank(
            f"{lost}; what was saved before is kept. Go on with `confide resume {folder}`, with any number of ranks "
            "or workers"
        ) from None
    finally:
        loop.engine.close()


def _make_steps(folder: Path, loop: Loop, state: State, quiet: bool, listeners: Listeners) -> None:
    """Make the central steps that are left, and record each."""
    steps, recorded, kind = loop.recipe.run.steps, Recorded(loop), mechanism_for(loop.recipe)
    # A step that cannot be made again bit for bit costs anew when it is repeated, so none should have to be.
    repeats = loop.plan.source.repeatable and loop.engine.traits.repeatable
    every = loop.recipe.run.checkpoint_every if repeats else 1
    _save(folder, loop, state)
    with (
        Recording(folder, loop, state.step, listeners) as files,
        Reporter(loop.task.name, steps, state.step, quiet) as reporter,
        stop_on_signal() as stop,
    ):
        note = privacy = ""
        began_with = beginning.read(folder)
        if began_with is not None and state.step == 0:
            files.begin(began_with.metrics)
        while state.step < steps:
            try:
                record = recorded.step(state)
            except BudgetSpent as spent:  # nothing of the step was released: the model is that of the step before
                print(f"stopped after step {state.step} of {steps}: {spent}", file=sys.stderr, flush=True)
                break
            except Abandoned:  # the run goes on with the same cohort
                files.sync()
                _save(folder, loop, state)
                raise
            if loop.plan.accounted(state.step) or stop.asked:
                record["epsilon"] = finite(loop.epsilon_so_far)
                when = "" if record["epsilon"] is None or state.step == steps else f" after step {state.step}"
                privacy = kind.progress(record["epsilon"]) + when
            seconds = dict(recorded.seconds)
            if loop.recipe.is_evaluated(state.step):
                began = time.perf_counter()
                record["evaluation"] = evaluate(loop, state)
                seconds["evaluate"] = time.perf_counter() - began
                note = items.measured(loop.task.metric, record["evaluation"][loop.task.metric])
            files.write(record, seconds)
            reporter.advance(f"{note} {privacy}".strip())
            if state.step % every == 0 or stop.asked:
                files.sync()
                _save(folder, loop, state)
            if stop.asked and state.step < steps:
                raise Stopped(f"stopped after step {state.step} of {steps}; go on with `confide resume {folder}`")
        files.sync()
    _save(folder, loop, state)


def _save(folder: Path, loop: Loop, state: State) -> None:
    checkpoint.save(folder, state, loop.recipe.digest, loop.ledger.count, loop.ledger.head)


def _finish(folder: Path, loop: Loop, state: State, page: WritePage | None) -> dict[str, Any]:
    model, found = loop.layout.views(loop.final.model(state)), stated(folder)
    notes = notes_of(loop.recipe, found, loop.task.fingerprint.get("the encoder"))
    write_atomically(folder / MODEL, serialise(model, notes))
    listed = spent(found)
    metrics, scores = score_model(loop.task, model)
    if scores is not None:
        items.write(folder, scores)
    kind, began_with = mechanism_for(loop.recipe), beginning.read(folder)
    summary: dict[str, Any] = {
        "task": loop.task.name,
        "metric": loop.task.metric,
        "metrics": json_safe(metrics),
        "start": None if began_with is None else began_with.verdict(json_safe(metrics), scores),
        "metrics_mean_of_last": json_safe(mean_of_recent(state)),
        **{name: listed[name] for name in _SPENT},
        "mechanism": kind.label(),
        "guarantee": found.said,
        "trust": kind.trust,
        "sampler": loop.plan.sampler,
        "noise_multiplier": loop.plan.event.noise_multiplier,
        "cohort": loop.plan.cohort_size,
        "population": len(loop.plan.weights),
        "steps": state.step,
        "seconds": round(state.seconds, 3),
        "skipped": loop.task.left_out,
        "seed": loop.recipe.run.seed,
        "recipe": loop.recipe.digest,
        **{name: loop.ledger.header[name] for name in _INPUTS if name in loop.ledger.header},
        "ledger_head": found.ledger_head,
        "begins_elsewhere": listed["begins_elsewhere"],
        "unit": listed["unit"],
        "environment": describe_environment(loop.kernels),
    }
    if state.step < loop.recipe.run.steps:
        summary["stopped_by_budget"] = str(loop.recipe.privacy.budget)
    more = ("epsilon_server", "epsilon_server_and_client", "releases_of_a_user", "public_weights")
    summary |= {name: listed[name] for name in more if name in listed}
    summary["statement"] = found.model_dump(mode="json")
    if page is not None:
        page(folder, loop.recipe, summary)
    write_atomically(folder / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    return summary
