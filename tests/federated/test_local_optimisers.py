"""Local optimisers: users' steps follow torch, and nothing that an optimiser remembers outlives a user's turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from confide import recipe
from confide.build import make_loop
from confide.deploy.told import shape
from confide.errors import UserError
from confide.federated.cohort import PartTrainer
from confide.federated.local import LocalTraining, PlainTrainer, batches
from confide.federated.optimisers import Optimiser, init, update
from confide.federated.parameters import Layout, flatten
from confide.federated.task import BasicTask
from confide.randomness import generator
from confide.theory.measure import measure

torch.set_num_threads(1)
SEED = 7
KINDS: list[dict[str, Any]] = [
    {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.01}, {"kind": "adam"}, {"kind": "adam", "weight_decay": 0.1},
    {"kind": "adagrad", "initial_accumulator": 0.1}, {"kind": "lars", "coefficient": 0.1, "weight_decay": 0.01},
    {"kind": "lamb", "weight_decay": 0.01}, {"kind": "lamb", "bias_correction": True},
]  # fmt: skip


class Regression(BasicTask):
    """Least squares through a hidden layer, so that gradients change from step to step; one tensor is not used."""

    name, metric = "regression", "loss"
    examples = np.array([6, 9, 4])

    def initial_parameters(self) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        shapes = {"in": (4, 3), "bias": (4,), "out": (1, 4), "idle": (2,)}
        return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        values = torch.from_numpy(np.random.default_rng(user).standard_normal((self.examples[user], 4)))
        return (values if examples is None else values[torch.from_numpy(examples)],)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        hidden = torch.tanh(batch[0][:, :3] @ parameters["in"].T + parameters["bias"])
        return ((hidden @ parameters["out"].T).squeeze(1) - batch[0][:, 3]).square().mean()

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": 0.0}


TASK = Regression()
LAYOUT = Layout.of(TASK.initial_parameters())
CENTRAL = flatten(TASK.initial_parameters())
COMMON: dict[str, Any] = {"epochs": 4, "batch_size": 2, "learning_rate": 0.05}


def local_of(optimiser: dict[str, Any] | None, **more: Any) -> LocalTraining:
    return LocalTraining.model_validate({**COMMON, **more, "optimiser": optimiser})


def delta_of(local: LocalTraining, user: int = 0, step: int = 0) -> Tensor:
    return PlainTrainer(TASK, LAYOUT, local, SEED, CENTRAL).update(CENTRAL, user, step).delta.clone()


Move = Callable[[dict[str, Tensor], dict[str, Tensor], int], None]


def by_hand(local: LocalTraining, make: Callable[[dict[str, Tensor]], Move], user: int = 0) -> Tensor:
    """The update of a user whose steps are written out, each taken by `make`'s answer."""
    weights = TASK.initial_parameters()
    start = {name: weight.clone() for name, weight in weights.items()}
    move, draw = make(weights), generator(SEED, "batches", 0, user)
    for taken, chosen in enumerate(batches(TASK, local, user, draw)):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        loss = TASK.loss(leaves, TASK.batch(user, chosen, draw))
        used = [name for name in leaves if name != "idle" or local.proximal]
        found = torch.autograd.grad(loss, [leaves[name] for name in used], allow_unused=True)
        gradients = {
            name: (torch.zeros_like(weights[name]) if g is None else g) + local.proximal * (weights[name] - start[name])
            for name, g in zip(used, found, strict=True)
        }
        if local.gradient_clip is not None:
            length = float(flatten(gradients).norm())
            gradients = {name: min(1.0, local.gradient_clip / length) * g for name, g in gradients.items()}
        move(weights, gradients, taken)
    return flatten(start) - flatten(weights)


def torch_optimiser(build: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[dict[str, Tensor]], Move]:
    def make(weights: dict[str, Tensor]) -> Move:
        optimiser = build(list(weights.values()))

        def move(weights: dict[str, Tensor], gradients: dict[str, Tensor], taken: int) -> None:
            for name, weight in weights.items():
                weight.grad = gradients.get(name)
            optimiser.step()

        return move

    return make


@pytest.mark.parametrize("more", [{}, {"gradient_clip": 0.3}, {"proximal": 0.5}, {"proximal": 0.5, "gradient_clip": 1}])
@pytest.mark.parametrize(
    ("optimiser", "build"),
    [
        ({"kind": "sgd"}, lambda w: torch.optim.SGD(w, lr=0.05)),
        ({"kind": "sgd", "momentum": 0.9, "weight_decay": 0.01},
         lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9, weight_decay=0.01)),
        ({"kind": "adam"}, lambda w: torch.optim.Adam(w, lr=0.05)),
        ({"kind": "adam", "weight_decay": 0.1}, lambda w: torch.optim.AdamW(w, lr=0.05, weight_decay=0.1)),
        ({"kind": "adagrad", "initial_accumulator": 0.1},
         lambda w: torch.optim.Adagrad(w, lr=0.05, initial_accumulator_value=0.1)),
    ],
)  # fmt: skip
def test_local_steps_follow_torch(
    optimiser: dict[str, Any], build: Callable[[list[Tensor]], torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    local = local_of(optimiser, **more)
    torch.testing.assert_close(delta_of(local), by_hand(local, torch_optimiser(build)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimiser", KINDS, ids=str)
def test_local_steps_are_those_of_the_central_optimiser_of_the_same_kind(optimiser: dict[str, Any]) -> None:
    """Which follows torch, or the written-out recurrences of LARS and LAMB."""
    central: Optimiser = TypeAdapter(Optimiser).validate_python({**optimiser, "learning_rate": 0.05})

    def make(weights: dict[str, Tensor]) -> Move:
        state = init(central, {name: weight for name, weight in weights.items() if name != "idle"})

        def move(weights: dict[str, Tensor], gradients: dict[str, Tensor], taken: int) -> None:
            update(central, {name: weights[name] for name in gradients}, gradients, state, taken)

        return move

    local = local_of(optimiser, gradient_clip=0.5)
    delta = delta_of(local)
    torch.testing.assert_close(delta, by_hand(local, make), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(delta, delta_of(local_of(None, gradient_clip=0.5)))


def test_sgd_without_momentum_is_the_plain_step() -> None:
    torch.testing.assert_close(delta_of(local_of({"kind": "sgd"})), delta_of(local_of(None)))


@pytest.mark.parametrize("optimiser", KINDS, ids=str)
def test_nothing_of_a_users_state_is_left_for_the_next_user_or_round(optimiser: dict[str, Any]) -> None:
    local = local_of(optimiser)
    trainer = PlainTrainer(TASK, LAYOUT, local, SEED, CENTRAL)
    for user, step in ((0, 0), (1, 0), (2, 0), (1, 3), (1, 3)):
        found = trainer.update(CENTRAL, user, step).delta.clone()
        assert torch.equal(found, delta_of(local, user, step))
    kept = PlainTrainer(TASK, LAYOUT, local, SEED, CENTRAL)
    kept.update(CENTRAL, 0, 0)
    kept._begins = {}  # a trainer that forgets to forget is told apart
    assert not torch.equal(kept.update(CENTRAL, 1, 0).delta, delta_of(local, 1))


def test_tensors_keep_their_own_rates() -> None:
    """One step of Adam moves every coordinate that has a gradient by about the rate."""
    local = local_of({"kind": "adam"}, rates={"out": 0.1}, epochs=None, steps=1)
    moved = LAYOUT.views(delta_of(local))
    assert float(moved["in"].abs().max()) == pytest.approx(0.05, rel=1e-3)
    assert float(moved["out"].abs().max()) == pytest.approx(0.005, rel=1e-3)
    assert not moved["idle"].any()


ADAM = "local.optimiser={kind: adam}"


@pytest.mark.parametrize(
    ("name", "sets", "way"),
    [
        ("convex/digits", (), "short cut"),
        ("speech/embedded/federated", ("task.start=null", "local={steps: 1, batch_size: 1, learning_rate: 0.5}"),
         "one pass"),
        ("convex/digits", ("task={kind: bench/mlp, users: 20, examples: 8, width: 200, hidden: 300, classes: 5}",
                           "sampling.cohort=10", "local={steps: 2, learning_rate: 0.1}"), "low rank"),
    ],
)  # fmt: skip
def test_a_short_cut_for_plain_steps_is_not_taken(name: str, sets: tuple[str, ...], way: str) -> None:
    for extra, expected in (((), way), ((ADAM,), "plain")):
        wanted = recipe.load(name, [*sets, "privacy={mechanism: none}", *extra])
        loop = make_loop(wanted)
        start = loop.start().parameters
        trainer = PartTrainer(loop.task, loop.layout, wanted.local, loop.bounds.bounder, loop.plan.weights, 0, start)
        trainer.add_part(start, np.arange(2), 0, torch.zeros_like(start))
        assert {kind for kind, users in trainer.taken.items() if users} == {expected}


def test_a_private_run_takes_it_and_bounds_what_comes_out() -> None:
    noise = "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-3, accountant: rdp}"
    wanted = recipe.load(
        "convex/digits",
        [
            "run={steps: 2}",
            "evaluation={every: 10}",
            "sampling.cohort=5",
            "bounding={rule: clip, bound: 0.01}",
            ADAM,
            noise,
        ],
    )
    loop = make_loop(wanted)
    tally = loop.step(loop.start()).tally
    assert loop.plan.event.private
    assert tally.bounded == tally.users > 0
    assert tally.bounded_norm <= 0.01 * tally.users * (1 + 1e-6) < tally.norm


def test_a_recipe_without_it_keeps_its_digest_and_a_server_may_tell_it() -> None:
    assert "optimiser" not in local_of(None).model_dump()
    told = shape(recipe.load("convex/digits", [ADAM]).model_dump(mode="json"))
    assert told["local"]["optimiser"] == {
        "kind": "adam", "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.0
    }  # fmt: skip


def test_a_rate_of_its_own_and_an_unknown_kind_are_refused() -> None:
    for text in ("{kind: adam, learning_rate: 0.1}", "{kind: adamw}"):
        with pytest.raises(UserError, match=r"local\.optimiser"):
            recipe.load("convex/digits", [f"local.optimiser={text}"])


def test_a_diagnosis_for_plain_steps_is_refused() -> None:
    with pytest.raises(UserError, match="for plain local steps"):
        measure(TASK, local_of({"kind": "adam"}), LAYOUT, np.full(3, 1 / 3), CENTRAL, 0, 2, 2, 0)
