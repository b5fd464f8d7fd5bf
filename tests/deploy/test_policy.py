"""A client's policy decides: what is below it is refused, whatever a server asks for or claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.build import make_task
from confide.deploy import keys, refusals
from confide.deploy.client import TrainingClient
from confide.deploy.deployment import Client
from confide.deploy.judge import judge
from confide.deploy.parcels import Parcel
from confide.deploy.policy import read_policy, told_recipe, write_policy
from confide.deploy.refusals import RefusedByClient
from confide.deploy.remote import JOIN, TRAIN
from confide.errors import UserError
from confide.federated.parameters import Layout
from confide.privacy.accountant import epsilon
from confide.privacy.budget import Budget
from confide.privacy.events import Event
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import Spent
from confide.privacy.trust.roster import Roster
from confide.recipe import load
from confide.speech.model import ModelSettings, parameter_shapes
from support.rehearsal import lenient

STRICT: dict[str, Any] = {"trust": "local", "epsilon_round": 1.0, "epsilon": 8.0, "rehearsal": False}
PRIVATE = ["privacy.trust=local", "privacy.source=system", "privacy.noise_multiplier=20"]


def joined(tiny: str, place: Path, sets: list[str], claim: object = 12, **policy: Any) -> tuple[Any, list[str]]:
    """What a client without a recipe answers to a server that tells one, and what it says to its owner."""
    said = list[str]()
    client = Client(lenient(place / "state", **policy), [0], say=said.append)
    wanted = load(tiny, sets)
    server = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(place), say=said.append)
    facts = {"told": wanted.model_dump_json(), "population": claim, **server.identity.facts()}
    return client.answer(JOIN, Parcel(facts)).facts, said


def question(client: TrainingClient, step: int = 0, population: object = 12, **changed: Any) -> Parcel:
    facts = {"run": "r", "step": step, "nonce": "00" * 16, "user": 0, "weight": 1 / 12, "bounds": []}
    facts |= {"population": population, **client.identity.facts(), **changed}
    return Parcel(facts, {"model": np.zeros(6)})


@pytest.mark.parametrize(
    ("sets", "code", "said"),
    [
        (["privacy={mechanism: none}"], refusals.TRUST, "no guarantee at all"),
        (["privacy.source=system"], refusals.TRUST, "trust central is less than the policy's trust local"),
        (["privacy.trust=distributed", "privacy.source=system"], refusals.TRUST, "trust distributed is less"),
        (["privacy.trust=local", "privacy.noise_multiplier=20"], refusals.REHEARSAL, "take the noise off again"),
        ([*PRIVATE, "privacy.noise_multiplier=1e-6"], refusals.ROUND, "above the policy's 1"),
    ],
)
def test_a_server_that_asks_for_less_than_the_policy_gets_nothing(
    tiny: str, tmp_path: Path, sets: list[str], code: str, said: str
) -> None:
    """A client without a recipe of its own used to take noise and trust from the server, without a word."""
    answer, heard = joined(tiny, tmp_path, sets, **STRICT)
    assert answer["refuses"] == code
    assert said in "\n".join(heard)
    wanted = load(tiny, sets)
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(tmp_path, **STRICT), say=heard.append)
    with pytest.raises(RefusedByClient, match="refused"):
        client.answer(TRAIN, question(client))


def test_the_owner_is_shown_what_is_asked_for_and_what_it_costs(tiny: str, tmp_path: Path) -> None:
    answer, heard = joined(tiny, tmp_path, PRIVATE, **STRICT)
    assert "refuses" not in answer
    text = "\n".join(heard)
    for part in ("6 central steps", "cohorts of 6 of 12 users", "trust local, noise multiplier 20 (system)",
                 "an answer costs epsilon 0.3", "by this client's own noise"):  # fmt: skip
        assert part in text
    answer, heard = joined(
        tiny, tmp_path, ["privacy.source=system"], **(STRICT | {"trust": "central", "epsilon_round": 9, "epsilon": 40})
    )
    assert "refuses" not in answer
    assert "the whole run costs epsilon" in "\n".join(heard)
    assert "claimed by the server, not enforced here" in "\n".join(heard)


def test_the_least_noise_can_be_said_as_a_multiplier(tiny: str, tmp_path: Path) -> None:
    strict = STRICT | {"epsilon_round": None}
    assert joined(tiny, tmp_path, PRIVATE, **strict, noise_multiplier=20.1)[0]["refuses"] == refusals.NOISE
    assert "refuses" not in joined(tiny, tmp_path, PRIVATE, **strict, noise_multiplier=20)[0]


def test_distributed_trust_needs_a_roster_of_the_others_keys(tiny: str, tmp_path: Path) -> None:
    """Without one the server could pose as all of them, and take their masks off again."""
    sets = ["privacy.trust=distributed", "privacy.source=system"]
    policy: dict[str, Any] = {"trust": "distributed", "rehearsal": False}
    assert joined(tiny, tmp_path, sets, **policy)[0]["refuses"] == refusals.ROSTER
    assert "refuses" not in joined(tiny, tmp_path, sets, **policy | {"rehearsal": True})[0]


def test_a_clients_roster_follows_its_file(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", 3, ["127.0.0.1"], users=6)
    current = keys.roster_of(tmp_path / "keys" / keys.FEDERATION, tmp_path / "keys" / "client-1")
    roster = current()
    assert sorted(roster.keys or ()) == list(range(6))
    signature = roster.sign(b"message")
    assert [user for user in range(7) if roster.verify(user, signature, b"message")] == [1, 4]
    assert not roster.verify(1, signature, b"another")
    assert not roster.verify(1, "no bytes", b"message")
    keys.revoke(tmp_path / "keys", "client-1")
    assert not current().verify(1, signature, b"message")


def test_a_lying_number_of_users_does_not_lower_the_noise(tiny: str, tmp_path: Path) -> None:
    """Noise for a target epsilon falls with the population: a million users for 287 got less than half of it."""
    sets = ["privacy={mechanism: gaussian, target_epsilon: 5, delta: 1e-5, trust: distributed, source: system}"]
    policy: dict[str, Any] = {"trust": "distributed", "rehearsal": False, "population": {"least": 10, "most": 20}}
    multipliers = {}
    for population in (10, 12, 20):
        wanted = load(tiny, sets)
        client = TrainingClient(
            wanted, make_task(wanted.task, 0), [0], lenient(tmp_path, **policy), lambda text: None, lambda: Roster({})
        )
        assert "refuses" not in client.answer(JOIN, question(client, population=population)).facts
        assert client.request is not None
        multipliers[population] = client.request.multiplier
    assert multipliers[10] > multipliers[12] > multipliers[20]
    for claim in (9, 21, 1_000_000, 2**39, -1, True, "12", None, float("nan")):
        assert joined(tiny, tmp_path, sets, claim, **policy)[0]["refuses"] == refusals.POPULATION
    # An answer's cost does not rest on amplification, which the claim would enter.
    floor = policy | {"epsilon_round": 1.0}
    wanted, strict = load(tiny, sets), lenient(tmp_path, **floor)
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], strict, lambda text: None, lambda: Roster({}))
    assert client.answer(JOIN, question(client, population=20)).facts["refuses"] == refusals.ROUND


def test_a_number_of_users_that_changes_in_a_run_is_refused(tiny: str, tmp_path: Path) -> None:
    wanted = load(tiny, PRIVATE)
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(tmp_path, **STRICT), say=lambda text: None)
    client.answer(TRAIN, question(client))
    with pytest.raises(RefusedByClient, match="cannot stand for two populations"):
        client.answer(TRAIN, question(client, 1, population=13))
    assert len(Budget.read(tmp_path / "budget.jsonl").charges) == 1


def test_a_lifetime_ends(tiny: str, tmp_path: Path) -> None:
    wanted = load(tiny, [*PRIVATE, "run.steps=50"])
    policy = lenient(tmp_path, **(STRICT | {"epsilon": 1.0}))
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], policy, say=lambda text: None)

    def answer_all() -> None:
        for step in range(50):
            client.answer(TRAIN, question(client, step))

    with pytest.raises(Spent) as spent:
        answer_all()
    assert refusals.code_of(spent.value) == refusals.LIFETIME
    spent_lines = len(Budget.read(tmp_path / "budget.jsonl").charges)
    assert 1 < spent_lines < 50
    with pytest.raises(Spent):
        client.answer(TRAIN, question(client, 49))
    assert len(Budget.read(tmp_path / "budget.jsonl").charges) == spent_lines


def test_without_a_policy_a_client_does_nothing(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = command("deploy", "client", "--plain")
    assert code == 2
    assert "confide deploy client --init policy.yaml" in said
    assert command("deploy", "client", "--plain", "--policy", "none.yaml")[0] == 2
    assert command("deploy", "client", "--init", "policy.yaml")[0] == 0
    made = read_policy(Path("policy.yaml"))
    assert (made.trust, made.rehearsal, made.epsilon, made.state) == ("local", False, 8, tmp_path / "state")
    code, _, said = command("deploy", "client", "--init", "policy.yaml")
    assert code == 2
    assert "never overwritten" in said


def test_a_client_speaks_to_no_server_that_its_policy_does_not_name(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("ours", "theirs"):
        keys.make(tmp_path / name, 1, ["127.0.0.1"])
    policy = tmp_path / "policy.yaml"
    write_policy(policy, "127.0.0.1:1", keys.fingerprint(tmp_path / "ours" / "ca.pem"))
    for words, server in ((("--plain",), "127.0.0.1:1"), (("ours",), "127.0.0.1:2"), (("theirs",), "127.0.0.1:1")):
        given: tuple[object, ...] = words
        if words != ("--plain",):
            given = ("--ca", tmp_path / words[0] / "ca.pem", "--key", tmp_path / words[0] / "client-0")
        code, _, said = command("deploy", "client", "--policy", policy, "--server", server, *given)
        assert code == 2
        assert "the policy does not name the server" in said
    read_policy(policy).check_server("127.0.0.1:1", keys.fingerprint(tmp_path / "ours" / "ca.pem"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trust: none", "expected one of central, distributed, local"),
        ("epsilon: -1", "above 0"),
        ("epsilon: .inf", "above 0"),
        ("epsilon_round: null", "give noise_multiplier"),
        ("population: {least: 20, most: 10}", "least=20 is above most=10"),
        ("tust: local", "did you mean 'trust'"),
        ("servers: []", "servers"),
        ("data: {kind: tsv, file: x}", "expected one of"),
    ],
)
def test_a_policy_that_is_wrong_says_what_to_do(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    write_policy(path, "here:1", None)
    name = line.partition(":")[0]
    kept = [each for each in path.read_text().splitlines() if not each.startswith(f"{name}:")]
    if name == "servers":
        kept = [each for each in kept if not each.startswith("  ")]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(UserError, match=said):
        read_policy(path)


def test_a_life_is_counted_over_runs_and_servers_and_what_is_claimed_beside(tiny: str, tmp_path: Path) -> None:
    policy = lenient(tmp_path, epsilon=20.0)
    for seed, sets in enumerate((PRIVATE, [*PRIVATE, "run.seed=1"], ["privacy.source=system", "run.seed=2"])):
        wanted = load(tiny, sets)
        client = TrainingClient(wanted, make_task(wanted.task, 0), [0], policy, say=lambda text: None)
        client.answer(TRAIN, question(client, seed))
    charges = Budget.read(tmp_path / "budget.jsonl").charges
    assert [(charge.count, charge.claimed) for charge in charges] == [(1, False), (1, False), (6, True)]
    assert len({charge.run for charge in charges}) == 3
    again = TrainingClient(
        wanted, make_task(wanted.task, 0), [0], lenient(tmp_path, epsilon=30.0), say=lambda text: None
    )
    with pytest.raises(UserError, match="fixed before the first answer"):
        again.answer(TRAIN, question(again))


@pytest.mark.parametrize(
    "sets", [[], ["privacy.mechanism=banded", "sampling.kind=cyclic", "sampling.cohort=4", "privacy.bands=2"]]
)
def test_a_server_that_runs_a_recipe_again_is_charged_again(tiny: str, tmp_path: Path, sets: list[str]) -> None:
    """Two runs of one recipe are two runs: their noise and cohorts are not the same."""
    wanted = load(tiny, ["privacy.source=system", *sets])
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(tmp_path), say=lambda text: None)
    spent = list[int]()
    for run in ("first", "second"):
        client.answer(JOIN, question(client, run=run))
        for step in (2, 5):
            client.answer(TRAIN, question(client, step, run=run))
        spent.append(sum(charge.count for charge in Budget.read(tmp_path / "budget.jsonl").charges))
    assert spent == [1, 2] if sets else spent == [6, 12]


def test_a_run_that_a_life_cannot_pay_as_a_whole_is_not_joined(tiny: str, tmp_path: Path) -> None:
    """With central trust a client that is not asked any more cannot leave: later models rest on its coins too."""
    sets = ["privacy.source=system", "privacy.noise_multiplier=2", "run.steps=60"]
    strict: dict[str, Any] = {"trust": "central", "epsilon_round": 3.0, "rehearsal": False}
    answer, heard = joined(tiny, tmp_path, sets, **strict, epsilon=3.5)
    assert answer["refuses"] == refusals.LIFETIME
    assert "the whole run costs epsilon" in "\n".join(heard)
    assert not (tmp_path / "state").exists()
    assert "refuses" not in joined(tiny, tmp_path, sets, **strict, epsilon=16)[0]
    answer, heard = joined(tiny, tmp_path, [*sets, "run.seed=1"], **strict, epsilon=16)
    assert answer["refuses"] == refusals.LIFETIME, "what is left does not pay for another one"
    assert "would pass epsilon 16" in "\n".join(heard)


def test_clients_make_the_noise_that_the_server_states_where_cohorts_have_a_largest_size(tmp_path: Path) -> None:
    """A largest cohort takes a part of delta, so it raises the noise that a target needs: clients have to know it."""
    plans = list[Plan]()
    wanted = load("convex/digits", [
        "sampling.cohort=40", "sampling.most=75", "privacy.trust=distributed", "privacy.source=system",
        "privacy.target_epsilon=4", "privacy.delta=1e-5", "run.steps=10",
    ])  # fmt: skip
    layout = Layout.of(make_task(wanted.task, 0).initial_parameters())
    for recipe in (wanted, told_recipe(wanted.model_dump_json(), lenient(tmp_path))):
        request = judge(lenient(tmp_path), recipe, 287, layout)
        assert request.event is not None
        assert Event.from_json(request.event.to_json()) == request.event, "a budget can be read again"
        plans.append(request.plan)
    assert plans[1].event == plans[0].event


def test_two_clients_on_one_state_see_what_each_other_has_spent(tiny: str, tmp_path: Path) -> None:
    wanted, policy = load(tiny, PRIVATE), lenient(tmp_path)
    one, two = (TrainingClient(wanted, make_task(wanted.task, 0), [0], policy, say=lambda text: None) for _ in range(2))
    for step, client in enumerate((one, two, one, two)):
        client.answer(TRAIN, question(client, step))
    with (tmp_path / "budget.jsonl").open("ab") as file:
        file.write(b'{"torn')
    one.answer(TRAIN, question(one, 4))
    assert len(Budget.read(tmp_path / "budget.jsonl").charges) == 5


def test_a_step_beyond_the_run_is_refused(tiny: str, tmp_path: Path) -> None:
    wanted = load(tiny, ["privacy.source=system"])
    client = TrainingClient(wanted, make_task(wanted.task, 0), [0], lenient(tmp_path), say=lambda text: None)
    for step in (6, -1, 10**12, True, "0", None):
        with pytest.raises(RefusedByClient, match="asks for step"):
            client.answer(TRAIN, question(client, step))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sets", "policy", "claim", "code"),
    [
        (["task.dimension=1000000000"], {}, 12, refusals.RECIPE),
        (["task.users=90000", "task.dimension=9000", "task.rank=1"], {}, 12, refusals.RECIPE),
        (["run.steps=2000000000"], {}, 12, refusals.RECIPE),
        ([], {"most_numbers": 100}, 12, refusals.RECIPE),
        ([], {"trust": "local"}, 12, refusals.TRUST),
        ([], {"rehearsal": False}, 12, refusals.REHEARSAL),
        (["privacy={mechanism: none}"], {"rehearsal": False}, 12, refusals.REHEARSAL),
        (["privacy.trust=distributed", "privacy.source=system"], {"rehearsal": False}, 12, refusals.ROSTER),
        ([], {}, 2**40, refusals.POPULATION),
    ],
)  # fmt: skip
def test_nothing_is_made_of_a_recipe_before_it_was_judged(
    sets: list[str], policy: dict[str, Any], claim: int, code: str, tiny: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sixty million numbers once cost half a gigabyte before a word of refusal, and two billion the client."""
    wanted, said = load(tiny, sets), list[str]()
    monkeypatch.setattr("confide.deploy.deployment.make_task", lambda *_: pytest.fail("a task was made"))
    client = Client(lenient(tmp_path / "state", **policy), [0], say=said.append)
    answer = client.answer(JOIN, Parcel({"told": wanted.model_dump_json(), "population": claim}))
    assert answer.facts["refuses"] == code
    assert len(said) == 1


@pytest.mark.parametrize("recipe", ["convex/digits", "speech/words/private", "retrieval/sms-private"])
def test_the_usual_policy_takes_every_size_that_is_shipped(recipe: str) -> None:
    assert load(recipe).task.size < 500_000_000


@pytest.mark.parametrize("kind", ["convex/quadratics", "bench/mlp", "bench/speech", "bench/states", "bench/queries"])
def test_a_task_says_before_it_is_made_how_many_numbers_its_model_has_at_least(kind: str) -> None:
    wanted = load(
        "convex/quadratics",
        [f"task={{kind: {kind}}}", "sampling={kind: poisson, cohort: 2}", "privacy={mechanism: none}"],
    ).task
    assert Layout.of(make_task(wanted, 0).initial_parameters()).size <= wanted.size


def test_a_speech_model_says_before_it_is_made_how_many_numbers_it_has() -> None:
    model = ModelSettings.model_validate({"preset": "baseline"})
    size = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    assert model.size == pytest.approx(size, rel=0.01)


def test_what_many_answers_cost_takes_no_memory_for_each(tiny: str, tmp_path: Path) -> None:
    """A list of two billion events is 16 GB."""
    wanted = load(tiny, PRIVATE)
    layout = Layout.of(make_task(wanted.task, 0).initial_parameters())
    request = judge(lenient(tmp_path), wanted, 12, layout)
    assert request.cost(100, 1e-5) == pytest.approx(epsilon([request.event] * 100, 1e-5, "pld"))  # type: ignore[list-item]
    assert request.cost(2 * 10**9, 1e-5) > request.cost(100, 1e-5)
