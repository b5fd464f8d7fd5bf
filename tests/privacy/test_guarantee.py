"""Claims about the statement: it names unit and adversaries, its figures are upper bounds, it holds no secret."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from confide.errors import UserError
from confide.privacy.accountant import epsilon, shown
from confide.privacy.events import NEIGHBOURS, Event
from confide.privacy.guarantee import EXAMPLES, STARTING_MODEL, Statement, statement
from confide.privacy.ledger import Ledger
from confide.privacy.profile import covering_mu, gaussian_delta
from confide.privacy.trust.neighbours import quorum
from confide.privacy.trust.server_view import HONEST, half, left_of_clients, left_of_server, most_draws, server_view
from confide.privacy.wording import text

DELTA = 1e-5
SPEAKER = {"name": "speaker", "person": True, "origin": "found"}
SHARE = {"name": "share of pooled utterances", "person": False, "origin": "dealt"}
POISSON = Event("poisson", 0.2, 20, 100, 2.0, 0.5)
EVERYONE = Event("everyone", 1.0, 100, 100, 4.0, 0.5)
FIXED = Event("fixed", 0.2, 20, 100, 6.0, 0.5)
LOCAL = Event("local", 0.2, 20, 100, 6.0, 0.5)
CYCLIC = Event("cyclic", 0.1, 10, 100, 2.0, 0.5, separation=10, rounds=20, bands=4)

SAMPLED_TURNS = Event("cyclic_poisson", 0.1, 10, 100, 2.0, 0.5, separation=4, rounds=20, bands=4)


def book_of(event: Event, steps: int = 10, **header: Any) -> Ledger:
    first = {
        "delta": DELTA, "accountant": "rdp" if event.sampler == "fixed" else "pld", "adjacency": event.adjacency,
        "noise_source": "system", "for_release": True, "fresh_cohorts": True, "unit": SPEAKER, "trust": "central",
    }  # fmt: skip
    book = Ledger.create(None, first | header)
    for step in range(steps):
        book.record(step, event, "here")
    return book


@pytest.mark.parametrize("event", [POISSON, EVERYONE, FIXED, LOCAL, CYCLIC])
def test_epsilon_is_that_of_the_accountant_and_every_accountant_with_a_proof_is_stated(event: Event) -> None:
    book = book_of(event)
    found = statement(book)
    kind = book.header["accountant"]
    assert found.epsilon == epsilon(book.charged(), DELTA, kind)
    assert found.epsilon_rdp == epsilon(book.charged(), DELTA, "rdp")
    assert (found.epsilon_pld is None) == (event.sampler == "fixed")
    assert found.adjacency == event.adjacency
    assert found.unit.name == "speaker"
    assert found.unit.person


@pytest.mark.parametrize("event", [POISSON, EVERYONE, FIXED, LOCAL, CYCLIC])
def test_the_profile_falls_and_every_point_is_the_accountants_bound(event: Event) -> None:
    book = book_of(event)
    points = statement(book).profile
    assert len(points) >= 11
    assert (points[0].delta, points[-1].delta) == (1e-9, 0.3)
    assert any(point.delta == DELTA for point in points)
    assert [p.delta for p in points] == sorted(p.delta for p in points)
    assert all(a.epsilon >= b.epsilon for a, b in pairwise(points))
    for point in points:
        assert point.epsilon == epsilon(book.charged(), point.delta, point.accountant)


@pytest.mark.parametrize(("event", "moves"), [(EVERYONE, 1.0), (LOCAL, 2.0), (CYCLIC, 1.0)])
def test_mu_is_exact_for_gaussians_without_sampling(event: Event, moves: float) -> None:
    book = book_of(event)
    found = statement(book).mu
    assert found is not None
    assert found.exact
    runs = len(book.charged())
    assert found.value == pytest.approx(moves * math.sqrt(runs) / event.noise_multiplier)
    # An upper bound of another library on the same curve never lies below it.
    for point in statement(book).profile:
        assert gaussian_delta(found.value, point.epsilon) <= point.delta * (1 + 1e-9)


def test_mu_of_the_grid_covers_every_point_and_no_smaller_one_does() -> None:
    found = statement(book_of(POISSON))
    assert found.mu is not None
    assert not found.mu.exact
    short = [gaussian_delta(found.mu.value, p.epsilon) - p.delta for p in found.profile if p.epsilon > 0]
    assert min(short) >= 0
    less = [gaussian_delta(found.mu.value * 0.999, p.epsilon) - p.delta for p in found.profile if p.epsilon > 0]
    assert min(less) < 0
    # It never says more than the releases without sampling, which are exactly Gaussian.
    assert found.mu.value < math.sqrt(10) / POISSON.noise_multiplier


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 8), st.floats(0.01, 10))
def test_gaussian_delta_is_the_largest_gap_between_two_gaussians(mu: float, eps: float) -> None:
    """By definition: the supremum over events of P(A) - e^eps Q(A), reached where the loss exceeds epsilon."""
    at = eps / mu - mu / 2  # of N(0, 1) against N(mu, 1), where the log ratio is epsilon
    by_definition = stats.norm.sf(at) - math.exp(eps) * stats.norm.sf(at + mu)
    assert gaussian_delta(mu, eps) == pytest.approx(by_definition, rel=1e-6, abs=1e-12)
    if by_definition > 1e-10:
        assert covering_mu(eps, by_definition) == pytest.approx(mu, rel=1e-4)


@pytest.mark.parametrize("event", [POISSON, EVERYONE, CYCLIC, SAMPLED_TURNS])
def test_central_trust_states_nothing_against_the_server_and_the_same_against_clients(event: Event) -> None:
    found = statement(book_of(event))
    assert found.against("models") == found.epsilon
    assert {found.against("clients", number) for number in (1, 2, 5, 10)} == {found.epsilon}
    assert found.against("server") is None
    assert found.against("server and clients", 1) is None
    assert all(each.because for each in found.adversaries)
    assert "nothing is stated, because it is trusted" in " ".join(text(found).split())


def test_clients_of_a_fixed_cohort_face_a_larger_rate() -> None:
    found = statement(book_of(FIXED))
    one, ten = found.against("clients", 1), found.against("clients", 10)
    assert found.epsilon is not None
    assert one is not None
    assert ten is not None
    assert found.epsilon < one < ten
    assert ten == epsilon([Event("fixed", 20 / 90, 20, 90, 6.0, 0.5)] * 10, DELTA, "rdp")


def test_a_sampler_without_a_proof_for_clients_states_nothing_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from confide.privacy import adversaries

    monkeypatch.setattr(adversaries, "_NOT_HIDDEN", ())
    assert statement(book_of(POISSON)).against("clients", 1) is None


def test_local_trust_holds_against_everybody() -> None:
    found = statement(book_of(LOCAL, trust="local"))
    assert {each.who for each in found.adversaries} == {"server", "models", "clients", "server and clients"}
    assert {each.epsilon for each in found.adversaries} == {found.epsilon}


def test_distributed_trust_states_every_adversary_without_amplification() -> None:
    book = book_of(POISSON, 30, trust="distributed")
    found = statement(book)
    seen = server_view(book.entries, DELTA, "pld")
    assert found.against("server") == seen.epsilon
    assert found.releases_of_a_user == seen.releases
    numbers = [each.epsilon for each in found.adversaries if each.who == "server and clients"]
    for who in ("clients", "server and clients"):
        assert [each.colluding for each in found.adversaries if each.who == who] == [1, 2, 5, 10]
    assert None not in numbers
    assert sorted(numbers) == numbers  # type: ignore[type-var]
    assert found.epsilon is not None
    assert found.epsilon < found.against("clients", 1) <= seen.epsilon < found.against("server and clients", 1)  # type: ignore[operator]


@pytest.mark.parametrize("least", [quorum, half])
@pytest.mark.parametrize("colluding", range(1, 12))
def test_what_colluding_clients_cannot_know_of_the_noise_is_never_less_than_stated(
    colluding: int, least: Callable[[int], int]
) -> None:
    """Every round of up to 60 users: who is in it, who answers, how many of those collude."""
    with_server, alone = [], []
    for cohort in range(2, 61):
        for threshold in range(least(cohort), cohort + 1):
            for arrived, known in product(range(threshold, cohort + 1), range(1, colluding + 1)):
                if known < arrived:  # the user itself is one of those whose shares are in the sum
                    with_server.append((arrived - known) / threshold)
                    alone.append(2 - known / threshold)
    assert min(with_server) >= left_of_server(colluding) - 1e-12
    assert min(alone) >= left_of_clients(colluding, least) - 1e-12
    assert min(with_server) == pytest.approx(left_of_server(colluding))  # and it is reached
    assert min(alone) == pytest.approx(left_of_clients(colluding, least))
    thirds, even = colluding // 3, colluding // 2 * 2
    said = (thirds + 2) / (2 * thirds + 1) if thirds else (colluding + 2) / (colluding + 1)
    if least is half:
        said = 4 / (even + 2) if even else 3 / 2
    assert left_of_clients(colluding, least) == pytest.approx(said), "as the documents say it"


def test_a_ledger_from_before_the_threshold_was_two_thirds_is_stated_as_it_was_made() -> None:
    old, new = (book_of(POISSON, 30, trust="distributed", **more) for more in ({}, {"threshold": "two thirds"}))
    for count in (2, 5, 10):
        before, now = (statement(book).against("clients", count) for book in (old, new))
        assert before is not None
        assert now is not None
        assert now < before
        seen = server_view(old.entries, DELTA, "pld", left_of_clients(count, half))
        assert before == seen.epsilon
    assert statement(old).against("server", 1) == statement(new).against("server", 1)


def test_more_than_half_of_the_noise_is_left_while_less_than_a_third_of_a_round_is_hostile() -> None:
    """What a client's own budget counts on, against a server that has them on its side."""
    for cohort in range(1, 400):
        for threshold in range(quorum(cohort), cohort + 1):
            hostile = -(-cohort // 3) - 1
            assert (threshold - hostile) / threshold > HONEST


def test_every_adversary_has_an_adjacency_of_its_own() -> None:
    """Who knows who is in a round can tell whether somebody was: for it a user sends zero, in the same rounds."""
    book = book_of(POISSON, 30, trust="distributed")
    found = statement(book)
    models = next(each for each in found.adversaries if each.who == "models")
    assert models.adjacency == found.adjacency == POISSON.adjacency
    assert models.epsilon_replaced is None, "there is no amplified bound for it here"
    for each in found.adversaries:
        if each.who == "models":
            continue
        assert each.adjacency == "one user sends zero, in the same rounds"
        assert each.epsilon is not None
        assert each.epsilon_replaced is not None
        assert each.epsilon_replaced > each.epsilon
    seen = server_view(book.entries, DELTA, "pld")
    moved_by_two = Event("everyone", 1.0, 100, 100, POISSON.noise_multiplier / 2, 0.5)
    _, unlikely = most_draws(30, POISSON.rate, DELTA / 2)
    server = next(each for each in found.adversaries if each.who == "server")
    assert server.epsilon_replaced == epsilon([moved_by_two] * seen.releases, DELTA - unlikely, "pld")
    said = " ".join(text(found).split())
    for each in found.adversaries:
        assert each.adjacency in said
        if each.epsilon_replaced is not None:
            assert f"{shown(each.epsilon_replaced)} for any other data" in said
    assert f"{shown(server.epsilon_replaced)} for any other data" in found.said


@pytest.mark.parametrize(
    ("event", "trust"), [(FIXED, "central"), (FIXED, "distributed"), (LOCAL, "local"), (CYCLIC, "central")]
)
def test_where_data_are_replaced_already_there_is_one_epsilon(event: Event, trust: str) -> None:
    for each in statement(book_of(event, trust=trust)).adversaries:
        assert each.adjacency
        if each.epsilon is not None and event is not CYCLIC:
            assert each.adjacency.startswith("replace one user")
            assert each.epsilon_replaced == each.epsilon


@pytest.mark.parametrize("event", [POISSON, EVERYONE, FIXED, LOCAL, CYCLIC, SAMPLED_TURNS])
def test_the_number_of_users_is_the_same_for_both_neighbours_and_the_statement_says_so(event: Event) -> None:
    found = statement(book_of(event))
    said = " ".join(text(found).split())
    assert found.neighbours == NEIGHBOURS[event.sampler]
    assert found.neighbours in said
    assert event is LOCAL or "the number of users is the same for both" in found.neighbours
    assert "empty" in found.neighbours or "any other" in found.neighbours
    assert any("the number of users, 100, which is the same for both neighbours" in what for what in found.public)


def test_the_statement_says_that_the_server_learns_who_answers() -> None:
    who = "who is asked and who answers"
    for trust in ("distributed", "local"):
        event = LOCAL if trust == "local" else POISSON
        assert any(who in what for what in statement(book_of(event, trust=trust)).public)
    assert not any(who in what for what in statement(book_of(POISSON)).public), "one process has no such server"
    deployed = statement(book_of(POISSON, deployed=True))
    assert any(who in what for what in deployed.public)
    assert any("watches the network" in what for what in deployed.not_covered)
    assert any("tried again" in what for what in deployed.not_covered)


def test_against_a_server_that_deviates_only_the_clients_own_budgets_are_said_to_hold() -> None:
    found = statement(book_of(POISSON, trust="distributed"))
    said = next(what for what in found.not_covered if "does not follow the protocol" in what)
    for part in ("own budget", "roster", "a third"):
        assert part in said
    assert not any("own budget" in what for what in statement(book_of(POISSON)).not_covered)


def test_a_release_without_noise_leaves_nothing_to_state() -> None:
    found = statement(book_of(Event("poisson", 0.2, 20, 100, 0.0, 0.5), words="No noise was added."))
    assert found.epsilon is None
    assert found.profile == []
    assert found.mu is None
    assert {each.epsilon for each in found.adversaries} == {None}
    assert found.said == "No noise was added"
    assert "epsilon is stated" in text(found)


def test_a_unit_that_is_not_a_person_promises_nothing_to_people() -> None:
    said = " ".join(text(statement(book_of(POISSON, unit=SHARE))).split())
    assert "share of pooled utterances" in said
    assert "nothing here is promised to people" in said
    assert "you took part" not in said
    person = " ".join(text(statement(book_of(POISSON))).split())
    assert "you took part" in person
    assert "promised to people" not in person


def test_an_old_ledger_without_a_unit_is_read_and_promises_nothing_to_people() -> None:
    book = Ledger.create(None, {"delta": DELTA, "accountant": "pld"})
    book.record(0, POISSON, "here")
    found = statement(book)
    assert found.epsilon is not None
    assert found.unit.origin == "unsaid"
    assert "does not say what a user is: nothing here is promised to people" in " ".join(text(found).split())
    assert found.sampler is not None
    assert found.sampler.done is None
    assert not found.noise.for_release


@pytest.mark.parametrize("unit", [{"name": "x"}, 3, SPEAKER | {"name": "<b>"}, {"name": "speaker"}])
def test_a_unit_that_is_none_is_refused_in_words(unit: Any) -> None:
    with pytest.raises(UserError, match="unit"):
        statement(book_of(POISSON, unit=unit))


def test_gaps_and_public_facts_are_listed() -> None:
    found = statement(book_of(POISSON, begins_elsewhere=True, public_weights=True, for_release=False, delta=0.02))
    said = " ".join(found.not_covered)
    assert STARTING_MODEL in found.not_covered
    assert EXAMPLES in found.public
    assert "seed" in said
    assert "publishing all data of one random user" in said
    assert f"it does not cover {STARTING_MODEL}" in found.said
    assert "chosen after a look at the models" in said
    plain = statement(book_of(POISSON))
    assert STARTING_MODEL not in plain.not_covered
    assert "publishing all data" not in " ".join(plain.not_covered)
    assert "seed" not in " ".join(plain.not_covered)


def test_the_statement_reads_back_from_its_own_json() -> None:
    for event in (POISSON, FIXED, LOCAL):
        found = statement(book_of(event))
        assert Statement.model_validate_json(json.dumps(found.model_dump(mode="json"), allow_nan=False)) == found


def test_every_epsilon_that_is_printed_is_rounded_up() -> None:
    book = book_of(POISSON, 30, trust="distributed")
    found, said = statement(book), " ".join(text(statement(book)).split())
    for value in [found.epsilon, found.epsilon_rdp, *(each.epsilon for each in found.adversaries)]:
        assert value is not None
        assert float(shown(value)) >= value
        assert shown(value) in said


def test_a_banded_step_that_was_made_twice_counts_the_run_twice() -> None:
    once, twice = book_of(CYCLIC), book_of(CYCLIC)
    twice.record(3, CYCLIC, "elsewhere")
    first, second = statement(once), statement(twice)
    assert first.mu is not None
    assert second.mu is not None
    assert second.mu.value == pytest.approx(math.sqrt(2) * first.mu.value)
    assert second.epsilon == epsilon([Event("everyone", 1.0, 100, 100, 2.0, 0.5)] * 2, DELTA, "pld")


def test_counts_and_figures_are_said_to_belong_to_each_release() -> None:
    plain = Event("poisson", 0.1, 10, 100, 1.0, 1.0)
    counted = replace(plain, counters=3, count_noise=20.0)
    assert "about the cohort" not in text(statement(book_of(plain)))
    found = statement(book_of(counted))
    assert found.noise.counts == 3
    assert "together with 3 numbers about the cohort" in " ".join(text(found).split())
    assert found.epsilon == statement(book_of(plain)).epsilon
