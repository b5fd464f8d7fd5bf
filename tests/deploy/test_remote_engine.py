"""The engine of a deployment gives the result of one process, and survives what clients and machines do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.build import make_loop, make_task
from confide.deploy.client import OwnData, Population, TrainingClient
from confide.deploy.deployment import Client
from confide.deploy.parcels import Parcel
from confide.deploy.refusals import RefusedByClient
from confide.deploy.remote import JOIN, TRAIN, Door, Remote, Terms
from confide.engines.engine import Abandoned
from confide.federated.parameters import flatten
from confide.privacy.accountant import epsilon
from confide.privacy.budget import Budget, composed
from confide.privacy.ledger import Ledger
from confide.recipe import Recipe, load
from confide.runs import folder
from confide.runs.simulation import simulate
from support.rehearsal import Local, engine, lenient, loop_over, run_over


@pytest.mark.parametrize(
    "changed",
    [
        [],
        ["bounding.rule=per_layer_normalise"],
        ["bounding.rule=normalise", "bounding.bound=0.3"],
        ["bounding.adaptive={quantile: 0.4}"],
        ["users={weights: examples, public: true}", "sampling={kind: fixed, cohort: 4}", "privacy.accountant=rdp"],
        ["privacy.mechanism=banded", "sampling={kind: cyclic_poisson, cohort: 3}", "privacy.bands=2"],
    ],
)
def test_clients_elsewhere_give_the_model_and_the_ledger_of_one_process(tiny: str, changed: list[str]) -> None:
    recipe = load(tiny, ["run.steps=20", *changed])
    alone, expected = simulate(recipe)
    loop, state = run_over(recipe, engine())
    assert float((state.parameters - expected.parameters).norm()) <= 1e-6 * float(expected.parameters.norm())
    assert loop.ledger.entries == alone.ledger.entries


def test_sampled_turns_are_answered_by_the_users_of_the_group_and_cost_a_client_the_whole_run(
    tiny: str, tmp_path: Path
) -> None:
    """Correlated noise is one release of the whole run, so a client's life pays for it with its first answer."""
    sampled = ["privacy.mechanism=banded", "sampling={kind: cyclic_poisson, cohort: 3}", "privacy.bands=2"]
    recipe, asked = load(tiny, ["run.steps=20", *sampled]), dict[int, set[int]]()

    def watched(kind: str, node: int, parcel: Parcel) -> str:
        if kind == TRAIN:
            asked.setdefault(parcel.facts["step"] % 2, set()).add(parcel.facts["user"])
        return ""

    loop, _ = run_over(recipe, engine(12, fate=watched, state=tmp_path))
    assert not asked[0] & asked[1], "two groups that take turns"
    assert len(asked[0]) == len(asked[1]) == 6
    assert loop.plan.event.turns == 10
    for path in tmp_path.glob("*/budget.jsonl"):
        book = Budget.read(path)
        assert [charge.event for charge in book.charges] == [loop.plan.event]
        assert book.summary()["planned"] == pytest.approx(loop.plan.epsilon(1), rel=1e-3)
    # A server that starts anew is charged for anew: too much where it goes on, but never too little.
    run_over(recipe, engine(12, state=tmp_path))
    assert {len(Budget.read(path).charges) for path in tmp_path.glob("*/budget.jsonl")} == {2}


def test_a_clients_life_pays_for_every_step_that_the_run_claims_whether_it_was_asked_or_not(
    tiny: str, tmp_path: Path
) -> None:
    """What a secret cohort buys is bought for all steps together: the run states it for users who were never drawn."""
    recipe, asked = load(tiny, ["run.steps=4", "sampling.cohort=2"]), set[int]()

    def watched(kind: str, node: int, parcel: Parcel) -> str:
        if kind == TRAIN:
            asked.add(parcel.facts["user"])
        return ""

    loop, _ = run_over(recipe, engine(12, fate=watched, state=tmp_path))
    assert 0 < len(asked) < 12
    books = [Budget.read(path) for path in sorted(tmp_path.glob("*/budget.jsonl"))]
    assert len(books) == 12, "also those who were never asked"
    for book in books:
        assert composed([each.event for each in book.charges for _ in range(each.count)], 1e-5) == pytest.approx(
            epsilon(loop.ledger.charged(), 1e-5, "pld")
        )
    run_over(recipe, engine(12, state=tmp_path))  # a server that starts anew may begin anew
    assert {sum(each.count for each in Budget.read(book.path).charges) for book in books} == {8}


def test_a_short_cut_of_the_task_makes_no_difference() -> None:
    recipe = load(
        "convex/digits",
        [
            "run.steps=5",
            "task.users=20",
            "sampling.cohort=10",
            "privacy.target_epsilon=null",
            "privacy.noise_multiplier=1",
        ],
    )
    alone, expected = simulate(recipe)
    loop, state = run_over(recipe, engine())
    assert float((state.parameters - expected.parameters).norm()) <= 1e-6 * float(expected.parameters.norm())
    assert loop.ledger.entries == alone.ledger.entries


def test_missing_clients_leave_divisor_noise_and_ledger_as_they_are(tiny: str) -> None:
    recipe = load(tiny, ["run.steps=20", "privacy.source=seeded"])

    def third_is_silent(kind: str, node: int, parcel: Parcel) -> str:
        return "lost" if kind == TRAIN and node == 102 else ""

    alone, _ = simulate(recipe)
    loop, state = run_over(recipe, engine(fate=third_is_silent, terms=Terms(deadline=0.05, minimum=0.0)))
    assert loop.ledger.entries == alone.ledger.entries
    assert state.step == 20


def test_a_third_of_the_clients_dies_in_every_round_and_no_round_is_lost(tiny: str) -> None:
    recipe = load(tiny, ["run.steps=20"])
    draw, ends = np.random.default_rng(0), Counter[str]()

    def dies(kind: str, node: int, parcel: Parcel) -> str:
        if kind != TRAIN or draw.random() > 0.3:
            return ""
        ends["killed"] += 1
        return "the client was killed"

    loop, state = run_over(recipe, engine(6, dies, Terms(deadline=60.0, minimum=0.2)))
    assert state.step == 20
    assert ends["killed"] > 20
    assert [entry.step for entry in loop.ledger.entries] == list(range(20))
    assert loop.plan.epsilon(loop.charges) == pytest.approx(simulate(recipe)[0].plan.epsilon(20))


def test_a_round_with_too_few_answers_is_tried_again_with_the_same_cohort_and_costs_nothing(tiny: str) -> None:
    recipe = load(tiny, ["run.steps=3"])
    asked: list[set[int]] = []
    seen: dict[str, set[int]] = {}

    def first_attempts_fail(kind: str, node: int, parcel: Parcel) -> str:
        if kind != TRAIN:
            return ""
        if parcel.facts["nonce"] not in seen:
            seen[parcel.facts["nonce"]] = set()
            asked.append(seen[parcel.facts["nonce"]])
        seen[parcel.facts["nonce"]].add(parcel.facts["user"])
        return "no power" if len(asked) % 2 else ""

    loop, _ = run_over(recipe, engine(fate=first_attempts_fail))
    assert len(asked) == 6
    assert asked[0] == asked[1]
    assert [(entry.step, entry.attempt) for entry in loop.ledger.entries] == [(0, 0), (1, 0), (2, 0)]


def test_a_run_stops_when_too_few_answer_and_goes_on_later(tiny: str, tmp_path: Path, no_figures: None) -> None:
    recipe = load(tiny, [])
    task = make_task(recipe.task, 0)
    broken = folder.Deployed(task, engine(fate=lambda kind, node, parcel: "away" if kind == TRAIN else ""))
    with pytest.raises(Abandoned, match="nothing was released"):
        folder.train(recipe, tmp_path / "run", quiet=True, deployed=broken)
    assert folder.check_ledger(tmp_path / "run")["releases"] == 0
    folder.resume(tmp_path / "run", quiet=True, deployed=folder.Deployed(task, engine()))
    assert folder.check_ledger(tmp_path / "run")["releases"] == recipe.run.steps


NAN: dict[str, Callable[[Parcel], Parcel]] = {
    "update": lambda p: Parcel(p.facts, {"update": p.arrays["update"] * np.nan}),
    "loss": lambda p: Parcel({**p.facts, "loss": float("nan")}, p.arrays),
}


@pytest.mark.parametrize("lies", [7, 12])
@pytest.mark.parametrize("kind", NAN)
def test_most_of_a_cohort_without_a_finite_update_costs_no_round(kind: str, lies: int, tiny: str) -> None:
    """Whether a round is released must not depend on what is in the updates: noise hides only what is in the sum."""
    recipe = load(tiny, ["run.steps=3", "sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, engine(12, terms=Terms(deadline=60, tries=1)))
    held, said, honest = cast(Remote, loop.engine), list[str](), list[Tensor]()
    held.say = said.append
    members = held.link.members  # type: ignore[attr-defined]

    class Liar(TrainingClient):
        def answer(self, asked: str, parcel: Parcel) -> Parcel:
            made = super().answer(asked, parcel)
            return NAN[kind](made) if asked == TRAIN else made

    for node in range(100, 100 + lies):
        members[node].__class__ = Liar
    for node in range(100 + lies, 112):
        inner = members[node].answer

        def kept(asked: str, parcel: Parcel, inner: Any = inner) -> Parcel:
            made: Parcel = inner(asked, parcel)
            if asked == TRAIN:
                honest.append(torch.from_numpy(made.arrays["update"]).clone())
            return made

        members[node].answer = kept
    state = loop.start()
    tally = held.train(state.parameters, np.arange(12), 0, loop.total)
    assert (tally.users, tally.not_finite) == (12, lies)
    assert torch.allclose(loop.total, sum(honest, torch.zeros_like(loop.total)), atol=1e-12), "weights stay 1 / 12"
    assert sum("not finite: user" in text for text in said) == 5, "the first of them are named"
    for _ in range(3):
        loop.step(state)
    assert [(entry.step, entry.attempt) for entry in loop.ledger.entries] == [(0, 0), (1, 0), (2, 0)]
    assert bool(torch.isfinite(state.parameters).all())


@pytest.mark.parametrize("way", ["refuses", "lost", "another size"])
def test_a_half_that_does_not_answer_stops_a_run_unless_the_operator_asks_for_fewer(way: str, tiny: str) -> None:
    """It can always be silent. Nothing is released of what stopped; noise and divisor cover any number of answers."""
    recipe = load(tiny, ["run.steps=3", "sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])

    def half(kind: str, node: int, parcel: Parcel) -> str:
        return "" if kind != TRAIN or node > 106 or way == "another size" else way

    for minimum, steps in ((0.5, 0), (0.0, 3)):
        loop = loop_over(recipe, engine(12, half, Terms(deadline=0.5, minimum=minimum, tries=2)))
        held, state, said = cast(Remote, loop.engine), loop.start(), list[str]()
        held.say = said.append
        for node, member in held.link.members.items():  # type: ignore[attr-defined]
            if way == "another size" and node <= 106:
                member.answer = lambda kind, parcel, inner=member.answer: (
                    inner(kind, parcel) if kind == JOIN else Parcel(inner(kind, parcel).facts, {"update": np.zeros(1)})
                )
        if steps == 0:
            with pytest.raises(Abandoned, match="5 of 12 users answered and at least 6 are needed"):
                loop.step(state)
        for _ in range(steps):
            assert loop.step(state).tally.users == 5
        assert loop.ledger.count == steps
        assert way == "lost" or sum("node 100: " in text for text in said) == max(steps, 2), "named, at every try"


class Killed(BaseException):
    """The machine went away."""


@pytest.mark.parametrize("phase", ["cohort", "ask", "reply", "close", "record", "release", "optimiser", "save"])
def test_a_server_killed_in_any_phase_goes_on_and_never_counts_too_little(
    phase: str, tiny: str, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confide.deploy.rounds import Round
    from confide.federated import optimisers
    from confide.privacy.plan import Plan, Release
    from confide.runs import checkpoint

    places: dict[str, tuple[Any, str]] = {
        "cohort": (Plan, "cohort"), "ask": (Local, "ask"), "reply": (Local, "events"), "close": (Round, "close"),
        "record": (Ledger, "record"), "release": (Release, "add_noise"), "optimiser": (optimisers, "update"),
        "save": (checkpoint, "save"),
    }  # fmt: skip
    releases = Counter[int]()
    original = Release.add_noise

    def counted(made: Release, *given: Any) -> Any:
        noise = original(made, *given)
        releases[made.step] += 1
        return noise

    monkeypatch.setattr(Release, "add_noise", counted)
    recipe, out = load(tiny, ["run.steps=4"]), tmp_path / "run"
    deployed = folder.Deployed(make_task(recipe.task, 0), engine())
    with monkeypatch.context() as patch:
        owner, name = places[phase]
        inner, calls = getattr(owner, name), Counter[str]()

        def killed_after(*given: Any, **named: Any) -> Any:
            done = inner(*given, **named)
            calls["all"] += 1
            if calls["all"] == {"reply": 8, "ask": 5}.get(phase, 3):  # the first three are for clients who join
                raise Killed
            return done

        patch.setattr(owner, name, killed_after)
        with pytest.raises(Killed):
            folder.train(recipe, out, quiet=True, deployed=deployed)
    folder.resume(out, quiet=True, deployed=deployed)
    entries = Ledger.read(out / "ledger.jsonl").entries
    charged = Counter(entry.step for entry in entries)
    assert set(charged) == set(range(4))
    assert all(charged[step] >= count for step, count in releases.items())
    assert len({(entry.step, entry.attempt) for entry in entries}) == len(entries)  # no noise twice


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_hostile_clients_reach_neither_model_nor_ledger_beyond_the_bound(data: st.DataObject) -> None:
    recipe = load("convex/quadratics", ["task.users=6", "task.dimension=4", "task.rank=2", "run.steps=2",
        "sampling={kind: fixed, cohort: 6}", "bounding={rule: clip, bound: 1}", "privacy.mechanism=none",
        "privacy.target_epsilon=null", "privacy.delta=null", "central={kind: sgd, learning_rate: 1}"])  # fmt: skip
    values = st.one_of(st.floats(width=32), st.sampled_from([float("nan"), float("inf"), 3e38]))

    class Hostile(TrainingClient):
        def answer(self, kind: str, parcel: Parcel) -> Parcel:
            made = super().answer(kind, parcel)
            if kind == JOIN:
                return made
            kind_of = data.draw(st.sampled_from(["values", "facts", "size"]))
            if kind_of == "size":
                return Parcel(made.facts, {"update": np.zeros(data.draw(st.integers(0, 9)), dtype=np.float32)})
            if kind_of == "facts":
                name = data.draw(st.sampled_from(sorted(made.facts)))
                return Parcel(
                    {**made.facts, name: data.draw(st.one_of(st.none(), values, st.text(max_size=3)))}, made.arrays
                )
            update = np.array([data.draw(values) for _ in range(4)]).astype(made.arrays["update"].dtype)
            return Parcel(made.facts, {"update": update})

    def make(recipe: Recipe, task: Any, plan: Any) -> Remote:
        from confide.deploy.deployment import remote_engine

        shares = {node: [node, node + 3] for node in range(3)}
        policy = lenient(Path("unused"))
        link = Local(
            {n: (Hostile if n else TrainingClient)(recipe, task, users, policy) for n, users in shares.items()}
        )
        return remote_engine(recipe, task, plan, link, shares, Terms(deadline=5, minimum=0.0))

    loop = loop_over(recipe, make)
    state = loop.start()
    for step in range(2):
        before = state.parameters.clone()
        loop.step(state)
        assert float((state.parameters - before).norm()) <= 1.0 + 1e-6  # a mean of six updates of norm 1
        assert bool(torch.isfinite(state.parameters).all())
        assert [entry.step for entry in loop.ledger.entries] == list(range(step + 1))


def test_clients_that_do_not_fit_are_refused_at_the_door_with_the_reason(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, [])
    task = make_task(recipe.task, 0)
    member = TrainingClient(recipe, task, [0, 1], lenient(tmp_path))
    door = Door(member.identity, {7: [0, 1], 8: [2]}, 12)
    facts = dict(member.answer(JOIN, Parcel({"population": 12, **member.identity.facts()})).facts)
    assert "refuses" not in facts
    assert door.answer(7, facts) is None
    assert door.users == {0: 7, 1: 7}
    assert "another version of confide: 0.0 there" in str(door.answer(8, facts | {"version": "0.0"}))
    assert "another recipe" in str(door.answer(8, facts | {"recipe": "x"}))
    assert "another model" in str(door.answer(8, facts | {"layout": "x"}))
    assert "its key is registered for [2]" in str(door.answer(8, facts))
    assert "its key is registered for []" in str(door.answer(9, facts))
    assert door.users == {0: 7, 1: 7}


def test_a_client_refuses_a_server_that_does_not_fit(tiny: str, tmp_path: Path) -> None:
    recipe, other = load(tiny, []), load(tiny, ["local.learning_rate=0.2"])
    member = TrainingClient(recipe, make_task(recipe.task, 0), [0], lenient(tmp_path))
    theirs = TrainingClient(other, make_task(other.task, 0), [0], lenient(tmp_path)).identity
    assert member.answer(JOIN, Parcel(theirs.facts())).facts["refuses"] == "other-recipe"
    model = {"model": torch.zeros(6, dtype=torch.float64).numpy()}
    good = {"run": "r", "step": 0, "nonce": "n", "user": 0, "weight": 0.1, "population": 12, **member.identity.facts()}
    for bad, reason in (
        (theirs.facts(), "another recipe"), ({"user": 3}, "asks for user 3"), ({"weight": 2.0}, "weight of 2.0"),
    ):  # fmt: skip
        with pytest.raises(RefusedByClient, match=reason):
            member.answer(TRAIN, Parcel({**good, **bad}, model))


def test_own_data_is_one_user_under_its_name_in_the_federation(tiny: str) -> None:
    recipe = load(tiny, [])
    task = make_task(recipe.task, 0)
    own: Any = OwnData(task, 5)
    assert len(own.examples) == 6
    assert own.examples[5] == task.examples[0]
    assert own.examples[:5].sum() == 0


def test_own_data_are_trained_on_whatever_the_user_is_called(tiny: str, tmp_path: Path) -> None:
    task = "task={kind: bench/mlp, users: 12, width: 20, hidden: 16, classes: 4, examples: 2}"
    wanted = load(tiny, [task])
    own = make_task(wanted.task.model_copy(update={"users": 1}), 0)
    own.rows = lambda user: {0: np.arange(2)}[user]  # type: ignore[attr-defined]  # there is one user
    found = []
    for user, data in ((0, own), (1, OwnData(own, 1))):
        member = TrainingClient(wanted, cast("Any", data), [user], lenient(tmp_path / str(user)))
        member.trainer.weights[user] = 1.0
        member.trainer.add_part(flatten(own.initial_parameters()), np.array([user]), 0, member.sum.zero_())
        found.append(member.sum)
    assert float(found[0].norm()) > 0
    assert float((found[0] - found[1]).norm()) <= 1e-5 * float(found[0].norm())


def test_a_federation_may_be_larger_than_the_servers_own_corpus(tiny: str) -> None:
    wanted = load(tiny, ["sampling.cohort=10"])
    known = make_task(wanted.task, 0)
    known.at_most = 9  # type: ignore[attr-defined]
    of_server: Any = Population(known, 40)
    built = make_loop(wanted, task=of_server, remote=lambda *given: cast("Any", None))
    assert built.plan.event.population == 40


@pytest.mark.parametrize("end", ["lost", "no memory"])
def test_a_client_that_did_not_join_in_time_is_asked_again(end: str, tiny: str) -> None:
    asked = list[Parcel]()

    def slow(kind: str, node: int, parcel: Parcel) -> str:
        if kind != JOIN or node != 102:
            return ""
        if not any(parcel is each for each in asked):
            asked.append(parcel)
        return end if parcel is asked[0] else ""

    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    terms = Terms(deadline=20, minimum=1.0, tries=1, greeting=0.2)
    loop = loop_over(recipe, engine(fate=slow, terms=terms))
    assert loop.step(loop.start()).tally.users == 12
    assert len(asked) == 2


def test_a_client_that_was_started_anew_without_a_recipe_is_told_it_again(tiny: str, tmp_path: Path) -> None:
    recipe = load(tiny, ["sampling={kind: fixed, cohort: 12}", "privacy.accountant=rdp"])
    loop = loop_over(recipe, engine())
    state = loop.start()
    assert loop.step(state).tally.users == 12
    members = loop.engine.link.members  # type: ignore[attr-defined]
    members[100] = Client(lenient(tmp_path), members[100].users)  # so quickly that nobody saw it gone
    assert [loop.step(state).tally.users for _ in range(2)] == [12, 12], "asked again in the same round"
