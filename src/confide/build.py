"""From a recipe to a loop: task, plan, bounds, engine and ledger, all checked before anything is trained or written."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.engines.costs import expected_costs
from confide.engines.distributed import Distributed
from confide.engines.engine import Engine, InProcess, OnDevice
from confide.engines.environment import environment
from confide.engines.processes import Processes
from confide.engines.ranks import Place, asks_for_gpu, device
from confide.errors import UserError
from confide.federated.bounding import bounder
from confide.federated.bounds import bounds_for
from confide.federated.central import CentralStep
from confide.federated.cohort import PartTrainer, kernels, part_size
from confide.federated.final import FinalModel
from confide.federated.measures import Measures
from confide.federated.parameters import Layout, flatten
from confide.federated.probe import Probe
from confide.federated.task import Task, TaskSection
from confide.files import digest, new_secret, seal
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Plan, check_cohort, make_plan
from confide.privacy.trust.server_view import THRESHOLD
from confide.recipe import Recipe, Users
from confide.run import Loop
from confide.settings import DEVICE, named_code

RemoteEngine = Callable[[Recipe, Task, Plan], Engine]
"""Makes the engine of a deployment."""


def make_loop(
    recipe: Recipe,
    open_ledger: Callable[[dict[str, Any]], Ledger] | None = None,
    workers: int = 1,
    task: Task | None = None,
    here: Place | None = None,
    remote: RemoteEngine | None = None,
    secret: Callable[[], bytes] = new_secret,
    begins: bool = False,
) -> Loop:
    """Build everything that a run is made of, and check it.

    Args:
        recipe: what to run.
        open_ledger: opens the ledger, given its first line. Without it the ledger stays in memory, which is for a
            simulation that nobody else sees.
        workers: how many processes train clients.
        task: takes the place of the recipe's own task, for example one that is kept between runs.
        here: the place of this process, where torchrun started several.
        remote: makes the engine of a deployment.
        secret: gives the key of the digests in the ledger's first line; without it they get a key that nobody keeps.
        begins: whether the run begins with this loop: a starting model that does not fit is then refused at once, and
            not after features were made for minutes. A finished run is looked at also where its start is gone.

    Returns:
        A loop. `start()` gives the first state, and `step(state)` makes one central step, in place.

    Examples:
        >>> from confide.build import make_loop
        >>> from confide.recipe import load
        >>> loop = make_loop(load("convex/digits"))
        >>> state = loop.start()
        >>> step = loop.step(state)
        >>> state.step, loop.ledger.count
        (1, 1)
    """
    torch.set_num_threads(1)
    task = task or make_task(recipe.task, recipe.run.seed)
    if begins and task.begins_elsewhere:
        task.starting_parameters()
    check_cohort(recipe.sampling, getattr(task, "at_most", None))
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters)
    del parameters  # an engine may be made for hours, while clients come
    if recipe.bounding.balance and not task.scalings:
        raise UserError(
            f"bounding.balance: nothing in the model of the task {task.name} can be scaled without changing what it "
            "computes; leave it out"
        )
    weights = user_weights(recipe.users, task)
    bounds = bounds_for(recipe.bounding, layout)
    bounds.check(len(weights))
    measures = measures_of(recipe)
    measures.check(task)
    plan = make_plan(
        recipe.privacy, recipe.sampling, weights, bounds.bounder.sensitivity, recipe.run.steps, recipe.run.seed,
        follows=bounds.follows, counters=bounds.counters, count_noise=bounds.count_noise,
        names=layout.names, sizes=layout.sizes,
    )  # fmt: skip
    compiled = "none" if remote is not None else kernels(task, recipe.local, layout)
    engine = _engine(recipe, task, plan, layout, like, workers, here, remote, compiled)
    try:
        header = ledger_header(recipe, plan, task, secret(), deployed=remote is not None)
        ledger = Ledger.create(None, header) if open_ledger is None else open_ledger(header)
    except BaseException:
        engine.close()
        raise
    # A line of the ledger must never stand for two values: on a GPU, a step made anew is a release of its own.
    there = isinstance(engine, OnDevice) or (here is not None and device().type != "cpu")
    mark = f"/{secrets.token_hex(8)}" if there else ""
    return Loop(
        recipe, task, layout, plan, bounds, measures, engine, CentralStep(recipe.central, layout),
        FinalModel(recipe.final, recipe.run.steps, recipe.run.seed), Probe(layout, recipe.is_evaluated), ledger,
        environment(compiled) + mark, torch.empty_like(like), compiled,
    )  # fmt: skip


def make_task(settings: TaskSection, seed: int) -> Task:
    """The task of a recipe's task section."""
    return settings.make(seed)


def make_trainer(recipe: Recipe, where: torch.device | str = "cpu") -> PartTrainer:
    """What a worker process or another rank needs of a run, on the device where it trains."""
    task = make_task(recipe.task, recipe.run.seed)
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters).to(where)
    return _part_trainer(recipe, task, layout, user_weights(recipe.users, task), like)


def make_trainer_from(recipe_json: str, where: torch.device | str = "cpu") -> PartTrainer:
    """`make_trainer` for another process, which gets the recipe as text."""
    return make_trainer(Recipe.model_validate_json(recipe_json), where)


def user_weights(users: Users, task: Task) -> np.ndarray:
    """Compute w_k with sum 1.

    A guarantee takes them as public and fixed: adding or removing a user does not change the others'. Those by the
    number of examples are not, unless the recipe declares the numbers public.
    """
    held = task.examples
    if users.weights == "uniform":
        return np.full(len(held), 1.0 / len(held))
    raw = held.astype(np.float64) if users.weights == "examples" else np.array(users.weights, dtype=np.float64)
    if len(raw) != len(held):
        raise UserError(f"users.weights has {len(raw)} weights for {len(held)} users; give one each")
    return np.asarray(raw / raw.sum())


def measures_of(recipe: Recipe) -> Measures:
    """The figures that a step releases beside the update."""
    return Measures({} if recipe.privacy.metrics is None else recipe.privacy.metrics.bounds)


def ledger_header(recipe: Recipe, plan: Plan, task: Task, key: bytes, deployed: bool = False) -> dict[str, Any]:
    """Make the first line of the ledger: what the run is, and keyed digests of what it was made from."""
    # The server of a deployment cannot see whose data a client holds.
    unit = recipe.users.named(DEVICE if deployed and recipe.task.unit.origin == "found" else recipe.task.unit)
    words = plan.mechanism.words(recipe.privacy)
    return {
        "inputs": seal(dict(task.fingerprint) | code_digests(recipe), key),
        **({"inputs_keyed": True} if key else {}),
        **({"public_weights": True} if recipe.users.declared_public else {}),
        "recipe": recipe.digest,
        "population": len(plan.weights),
        "fresh_cohorts": True,
        **({"restarts": True} if plan.event.whole_run else {}),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": plan.event.adjacency,
        "noise_source": recipe.privacy.source,
        "for_release": not plan.source.repeatable,
        "trust": recipe.privacy.trust,
        **({"threshold": THRESHOLD} if recipe.privacy.trust == "distributed" else {}),
        **({"deployed": True} if deployed else {}),
        "unit": unit.model_dump(),
        "sampler": plan.sampler,
        **({"words": words} if words else {}),
        "begins_elsewhere": task.begins_elsewhere,
    }


def code_digests(recipe: Recipe) -> dict[str, str]:
    """Digests of the files with the code that a recipe names: other code under the same noise would give it away."""
    found = {}
    for field, name in named_code(recipe).items():
        path = getattr(sys.modules.get(name.split(":")[0]), "__file__", None)
        found[f"the code of {field}"] = digest([Path(path).read_bytes()]) if path else "unknown"
    return found


def _engine(
    recipe: Recipe, task: Task, plan: Plan, layout: Layout, like: Tensor, workers: int, here: Place | None,
    remote: RemoteEngine | None, compiled: str,
) -> Engine:  # fmt: skip
    if remote is not None:
        return remote(recipe, task, plan)
    text, where = recipe.model_dump_json(), device() if here is not None else _where(recipe, task, workers)
    if workers > 1:
        getattr(task, "states", None)  # made here, once: every worker finds them in the cache
        size, costs = part_size(task, recipe.local, layout), expected_costs(task, recipe.local)
        return Processes(partial(make_trainer_from, text), workers, like, size, costs, compiled)
    trainer = _part_trainer(recipe, task, layout, plan.weights, like.to(where))
    if here is not None:
        return Distributed(text, trainer, here)
    return InProcess(trainer) if where.type == "cpu" else OnDevice(trainer, like)


def _where(recipe: Recipe, task: Task, workers: int) -> torch.device:
    """Where one process trains: on the GPU if there is one, the task can, and no short cut on the processor is faster.

    Who asks for a GPU and cannot have it is told so.
    """
    wanted, processor = device(), torch.device("cpu")
    if wanted.type == "cpu":
        return processor
    why = ""
    if workers > 1:
        why = f"{workers} workers train on the processor; drop --workers"
    elif not getattr(task, "on_gpu", False):
        why = f"the task {task.name} computes its loss on the processor, as its model is used here; drop --device"
    elif recipe.local.plain and task.users_at_once(recipe.local):
        why = f"the task {task.name} has a short cut for these local steps, which is on the processor; drop --device"
    if why and asks_for_gpu():
        raise UserError(f"--device cuda (or CONFIDE_DEVICE in the environment): {why}")
    return processor if why else wanted


def _part_trainer(recipe: Recipe, task: Task, layout: Layout, weights: np.ndarray, like: Tensor) -> PartTrainer:
    rule = bounder(recipe.bounding, layout)
    return PartTrainer(task, layout, recipe.local, rule, weights, recipe.run.seed, like, measures_of(recipe))
