"""Algorithm 1: sample, train, bound, add noise, aggregate, step, record (PFL-ASR Algorithm 1; NORM Algorithms 1-3).

`Loop.step` is the algorithm, line by line. A run is a pure function of its recipe: the state after t steps does not
depend on stops in between, on the number of workers, or on what was recorded on the way.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide import __version__
from confide.build import make_task
from confide.engines.costs import expected_costs
from confide.engines.distributed import Distributed
from confide.engines.engine import Abandoned, Engine, InProcess, traits
from confide.engines.processes import Processes
from confide.engines.ranks import Place, device
from confide.errors import UserError
from confide.federated import car_adaptive, optimisers
from confide.federated.bounding import Adaptive, Bounder, bounder, moved
from confide.federated.car_adaptive import CarAdaptive, Clients
from confide.federated.cohort import PartTrainer, Tally, part_size
from confide.federated.parameters import Layout, all_finite, flatten
from confide.federated.start import begins_elsewhere
from confide.federated.task import Task
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.plan import Plan, make_plan, spans_of
from confide.randomness import generator
from confide.recipe import Final, Recipe, Users
from confide.runs import fingerprint
from confide.runs.checkpoint import State

Record = dict[str, Any]


class Diverged(UserError):
    """The central model is no longer finite."""


@dataclass
class Loop:
    """What a run is made of. Nothing here changes from step to step but buffers and the ledger."""

    recipe: Recipe
    task: Task
    layout: Layout
    plan: Plan
    bounder: Bounder
    engine: Engine
    ledger: Ledger
    total: Tensor  # (parameters,) the cohort's sum, and then the pseudo-gradient, made once
    mark: str = ""
    """Where training does not repeat itself to the last bit: what tells this process from every other."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the last step."""

    def start(self) -> State:
        parameters = flatten(getattr(self.task, "starting_parameters", self.task.initial_parameters)())
        state = State(0, parameters, optimisers.init(self.recipe.central, self.layout.views(parameters)))
        state.noise = self.plan.noise_memory(parameters)
        if isinstance(self.recipe.bounding.adaptive, Adaptive):
            state.bounds = self.bounder.bounds
        if isinstance(self.recipe.bounding.adaptive, CarAdaptive):
            state.clients = car_adaptive.start(self.bounder.sensitivity, len(self.plan.weights)).to_state()
        return state

    @property
    def charges(self) -> int:
        """How many charges the ledger holds."""
        return len(self.ledger.charged()) if self.plan.event.whole_run else self.ledger.count

    def step(self, state: State) -> Record:
        """One central step, in place."""
        began, t = time.perf_counter(), state.step
        cohort = self.plan.cohort(t) if state.pending is None else state.pending.numpy()
        bound = self.bounder.at(state.bounds).sensitivity
        event = self.plan.event_at(bound)
        tally, attempt = self._train(state, cohort, event)
        trained = time.perf_counter()
        self.total.div_(self.plan.rate)  # the expected cohort's share, never the realised one's
        signal = float(self.total.norm())
        layers = self._layers(state, tally) if self._is_evaluated(t + 1) else None
        noise = None  # where users added their own
        if not traits(self.engine).noisy:
            own = self._own_noise(state, tally, cohort)
            noise = self.plan.release(self.total, event, cohort, t, attempt, state.noise, own)
        self._adapt(state, tally, event, attempt, cohort)
        released = time.perf_counter()
        self._keep_iterate(state)
        if not self._move(state) or not all_finite(state.parameters):
            raise Diverged(
                f"the central model is no longer finite after step {t + 1}; the last checkpoint was kept. "
                "Lower central.learning_rate or local.learning_rate, or bound the updates"
            )
        state.step, state.pending = state.step + 1, None
        moved_at = time.perf_counter()
        state.seconds += moved_at - began
        record = _record(state, tally, signal, noise, self.recipe.local.rate(t)) | {"bound": bound}
        self.times = {"train": trained - began, "release": released - trained, "move": moved_at - released}
        if state.clients:
            record["bound"] = float(state.clients["bounds"].mean())
        if layers is not None:
            record["layers"] = layers | ({} if noise is None else {"noise": self._layer_noise(noise)})
        return record

    def _train(self, state: State, cohort: np.ndarray, event: Event) -> tuple[Tally, int]:
        """Train the cohort and have the release in the ledger, before any of it is seen: which attempt it is.

        The server's noise comes after the sum, so the line is written in between, and a round that was abandoned
        cost nothing. Noise of the users is in what they send, so the line comes first, for every time that they are
        asked. The cohort stays the same: to draw until enough users answer would not be the sampler accounted for.
        """
        kind, t = traits(self.engine), state.step
        repeatable = self.plan.source.repeatable and kind.repeatable
        for left in reversed(range(kind.tries)):
            attempt = self.ledger.record(t, event, environment() + self.mark, repeatable) if kind.noisy else -1
            try:
                tally = self.engine.train(state.parameters, cohort, t, self.total, self._bounds(state))
            except Abandoned as too_few:
                if left == 0:
                    state.pending = torch.from_numpy(cohort)
                    raise
                print(f"{too_few}; asking again, {left} more times at most", file=sys.stderr, flush=True)
            else:
                return tally, attempt if kind.noisy else self.ledger.record(
                    t, event, environment() + self.mark, repeatable
                )
        raise AssertionError("unreachable: the last try returns or raises")

    def _layers(self, state: State, tally: Tally) -> Record:
        """Norms of each tensor (PFL-ASR Figures 5, 10, 13, 14) while noise and move have not yet changed them.

        Mean and deviation over users of the update's norm, mean once bounded, share of users whose was shortened; norm
        of the aggregate; norm of the model that the users started from.
        """
        users = tally.users - tally.not_finite
        nothing = [0.0] * len(self.layout.names)
        mean, square, bounded, clipped = (
            torch.tensor(sums or nothing, dtype=torch.float64) / max(users, 1)  # (layers,)
            for sums in (tally.layer_norms, tally.layer_norms_squared, tally.layer_bounded, tally.layer_clipped)
        )
        return {
            "step": state.step + 1,
            "users": users,
            "delta": _six_digits(mean),
            "delta_deviation": _six_digits((square - mean.square()).clamp(min=0).sqrt()),
            "bounded": _six_digits(bounded),
            "clipped": _six_digits(clipped),
            "signal": _six_digits(self.layout.norms(self.total)),
            "weights": _six_digits(self.layout.norms(state.parameters)),
        }

    def _layer_noise(self, noise: float) -> list[float]:
        """The expected norm of the noise on each tensor: it is spread evenly over the coordinates that have any."""
        sizes = torch.tensor(self.plan.noisy_sizes(self.layout.sizes), dtype=torch.float64)
        return _six_digits(noise * (sizes / sizes.sum()).sqrt())

    def _bounds(self, state: State) -> Tensor | None:
        """What the users bound their updates to, where that changes from step to step: one for all, or one for each."""
        adaptive = self.recipe.bounding.adaptive
        if isinstance(adaptive, CarAdaptive):
            return car_adaptive.bounds_at(adaptive, Clients(**state.clients), state.step)
        return state.bounds

    def _own_noise(self, state: State, tally: Tally, cohort: np.ndarray) -> np.ndarray | None:
        """Of CAR's adaptive rule: the deviation of the noise on each user's message."""  # (cohort,)
        adaptive = self.recipe.bounding.adaptive
        if not isinstance(adaptive, CarAdaptive):
            return None
        norms = torch.tensor(tally.raw_norms, dtype=torch.float64)
        users = torch.from_numpy(cohort)
        return car_adaptive.noise_scales(adaptive, Clients(**state.clients), users, norms, state.step).numpy()

    def _adapt(self, state: State, tally: Tally, event: Event, attempt: int, cohort: np.ndarray) -> None:
        """Move the bounds: after a private count of the users within them, or after each user's own raw norm."""
        adaptive = self.recipe.bounding.adaptive
        if isinstance(adaptive, CarAdaptive):
            norms = torch.tensor(tally.raw_norms, dtype=torch.float64)
            after = car_adaptive.moved(adaptive, Clients(**state.clients), torch.from_numpy(cohort), norms, state.step)
            state.clients = after.to_state()
        if isinstance(adaptive, Adaptive) and state.bounds is not None:
            votes = torch.tensor(tally.votes or [0.0] * len(state.bounds), dtype=torch.float64)
            shares = self.plan.noisy_shares(votes, event, state.step, attempt)
            state.bounds = moved(state.bounds, shares, adaptive, self.bounder.bounds)

    def _move(self, state: State) -> bool:
        """Step the central optimiser; False if the numbers are beyond what the model's type can hold."""
        central, gradient = self.layout.views(state.parameters), self.layout.views(self.total)
        try:
            optimisers.update(self.recipe.central, central, gradient, state.optimiser, state.step)
        except (RuntimeError, OverflowError) as error:
            if "overflow" in str(error):
                return False
            raise
        return True

    def evaluate(self, state: State) -> dict[str, float]:
        with torch.no_grad():
            scores = self.task.evaluate(self.layout.views(state.parameters))
        if state.step > self.recipe.run.steps - self.recipe.evaluation.last:
            state.recent.append(scores)
        return scores

    def wants_evaluation(self, state: State) -> bool:
        return self._is_evaluated(state.step)

    def _is_evaluated(self, step: int) -> bool:
        steps, when = self.recipe.run.steps, self.recipe.evaluation
        return step % when.every == 0 or step > steps - when.last

    def final_model(self, state: State) -> Tensor:
        kind = self.recipe.final.kind
        if kind == "mean":
            # The last iterate is not yet in the sum: it is kept when the next step begins.
            return (state.final["sum"] + state.parameters) / self.recipe.final.count
        return state.final["chosen"] if kind == "random" else state.parameters

    def _keep_iterate(self, state: State) -> None:
        """Keep what the final model needs of iterate w_t, before the step that leaves it."""
        final, steps = self.recipe.final, self.recipe.run.steps
        if final.kind == "random" and state.step == _chosen_iterate(final, steps, self.recipe.run.seed):
            state.final["chosen"] = state.parameters.clone()
        if final.kind == "mean":
            if "sum" not in state.final:
                state.final["sum"] = torch.zeros_like(state.parameters)
            if state.step > steps - final.count:
                state.final["sum"].add_(state.parameters)


def make_loop(
    recipe: Recipe,
    open_ledger: Callable[[dict[str, Any]], Ledger],
    workers: int = 1,
    task: Task | None = None,
    here: Place | None = None,
    remote: Callable[[Recipe, Task, Plan], Engine] | None = None,
) -> Loop:
    """Build everything and check it, before anything is trained or written.

    `here` is rank 0 of several, if any; `remote` makes the engine of a deployment.
    """
    torch.set_num_threads(1)
    task = task or make_task(recipe.task, recipe.run.seed)
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters)
    del parameters  # an engine may be made for hours, while clients come
    weights = user_weights(recipe.users, task)
    rule = bounder(recipe.bounding, layout)
    plan = make_plan(
        recipe.privacy, recipe.sampling, weights, rule.sensitivity, recipe.run.steps, recipe.run.seed,
        recipe.bounding.adaptive, len(rule.bounds), spans_of(recipe.privacy, layout),
    )  # fmt: skip
    if remote is not None:
        engine: Engine = remote(recipe, task, plan)
    elif workers > 1:
        size, costs = part_size(task, recipe.local, layout), expected_costs(task, recipe.local)
        engine = Processes(recipe.model_dump_json(), workers, like, size, costs)
    else:
        trainer = _part_trainer(recipe, task, layout, weights, like if here is None else like.to(device()))
        engine = InProcess(trainer) if here is None else Distributed(recipe.model_dump_json(), trainer, here)
    try:
        ledger = open_ledger(ledger_header(recipe, plan, task))
    except BaseException:
        engine.close()
        raise
    # A line of the ledger must never stand for two values: on a GPU, a step made anew is a release of its own.
    mark = f"/{secrets.token_hex(8)}" if here is not None and device().type != "cpu" else ""
    return Loop(recipe, task, layout, plan, rule, engine, ledger, torch.empty_like(like), mark)


def simulate(
    recipe: Recipe, task: Task | None = None, watch: Callable[[Loop, State, Record], None] | None = None
) -> tuple[Loop, State]:
    """A whole run in memory, for grids: nothing is written and nothing is released to anybody."""
    loop = make_loop(recipe, lambda header: Ledger.create(None, header), task=task)
    state = loop.start()
    while state.step < recipe.run.steps:
        record = loop.step(state)
        if loop.wants_evaluation(state):
            record["evaluation"] = loop.evaluate(state)
        if watch is not None:
            watch(loop, state, record)
    return loop, state


def make_trainer(recipe: Recipe, where: torch.device | str = "cpu") -> PartTrainer:
    """What a worker process or another rank needs of a run, on the device where it trains."""
    task = make_task(recipe.task, recipe.run.seed)
    parameters = task.initial_parameters()
    layout, like = Layout.of(parameters), flatten(parameters).to(where)
    return _part_trainer(recipe, task, layout, user_weights(recipe.users, task), like)


def user_weights(users: Users, task: Task) -> np.ndarray:
    """w_k with sum 1. They are taken as public and fixed: adding or removing a user does not change the others'."""
    held = task.examples
    if users.weights == "uniform":
        return np.full(len(held), 1.0 / len(held))
    raw = held.astype(np.float64) if users.weights == "examples" else np.array(users.weights, dtype=np.float64)
    if len(raw) != len(held):
        raise UserError(f"users.weights has {len(raw)} weights for {len(held)} users; give one each")
    return np.asarray(raw / raw.sum())


def mean_of_recent(state: State) -> dict[str, float]:
    """The mean of the evaluations after each of the last steps."""
    if not state.recent:
        return {}
    return {name: sum(r[name] for r in state.recent) / len(state.recent) for name in state.recent[0]}


def surroundings() -> dict[str, str]:
    """Versions and machine, for people who want to run it again."""
    from importlib.metadata import version

    return {
        "confide": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dp-accounting": version("dp-accounting"),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "key": environment(),
    }


def environment() -> str:
    """Names what bit-for-bit repetition depends on, besides recipe and seed."""
    facts = (
        __version__,
        torch.__version__,
        np.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
    )
    return hashlib.sha256("/".join(map(str, facts)).encode()).hexdigest()[:16]


def ledger_header(recipe: Recipe, plan: Plan, task: Task) -> dict[str, Any]:
    own = {"task.factory": getattr(recipe.task, "factory", None), "bounding.function": recipe.bounding.function}
    return {
        fingerprint.KEY: fingerprint.of_task(task) | fingerprint.of_code(own),
        "recipe": recipe.digest,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": plan.event.adjacency,
        "noise_source": recipe.privacy.source,
        "for_release": not plan.source.repeatable,
        "trust": recipe.privacy.trust,
        "begins_elsewhere": begins_elsewhere(recipe),
    }


def _part_trainer(recipe: Recipe, task: Task, layout: Layout, weights: np.ndarray, like: Tensor) -> PartTrainer:
    rule = bounder(recipe.bounding, layout)
    return PartTrainer(task, layout, recipe.local, rule, weights, recipe.run.seed, like)


def _chosen_iterate(final: Final, steps: int, seed: int) -> int:
    return int(generator(seed, "final").integers(steps))


def _six_digits(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _record(state: State, tally: Tally, signal: float, noise: float | None, local_rate: float) -> Record:
    users = max(tally.users - tally.not_finite, 1)
    mean = tally.norm / users
    record: Record = {
        "step": state.step,
        "seconds": round(state.seconds, 4),
        "cohort": tally.users,
        "loss": tally.loss / users,
        "update_norm": mean,
        "update_norm_deviation": math.sqrt(max(tally.norm_squared / users - mean * mean, 0.0)),
        "bounded_norm": tally.bounded_norm / users,
        "share_bounded": tally.bounded / users,
        "not_finite": tally.not_finite,
        "signal": signal,
        "local_learning_rate": local_rate,
    }
    if noise is not None:
        record |= {"noise": noise, "snr": signal / noise}
    return record
