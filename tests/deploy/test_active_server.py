"""Secure aggregation against a server that lies: what it says is believed only as far as peers have signed it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from confide.deploy.masked import Masked
from confide.deploy.parcels import Parcel
from confide.deploy.remote import Terms
from confide.deploy.wire import frames
from confide.engines.engine import Abandoned
from confide.privacy.trust import neighbours
from confide.privacy.trust.opening import Deal, Opening, Unopened
from confide.privacy.trust.roster import Roster
from confide.privacy.trust.secure import CONFIRM, KEYS, MASKED, SHARES, UNMASK, Distrust, Session, seed_hash, share_hash
from confide.privacy.trust.secure_sum import make_ring
from confide.recipe import load
from confide.run import Loop
from support.rehearsal import engine, loop_over

NONCE, RING = "00" * 16, make_ring(1.0, 8, 4)


def crowd(size: int = 6, least: int | None = None) -> dict[int, Session]:
    secrets = {user: ec.generate_private_key(ec.SECP256R1()) for user in range(size)}
    public = {user: key.public_key() for user, key in secrets.items()}
    users, enough = list(range(size)), least or 2 * size // 3 + 1
    return {user: Session(user, NONCE, 0, users, enough, Roster(public, secrets[user])) for user in users}


def peers_of(sessions: dict[int, Session], user: int) -> list[list[Any]]:
    return [[other, *sessions[other].begin()["public"]] for other in sessions if other != user]


def up_to_masks(sessions: dict[int, Session]) -> None:
    deals = {user: session.deal(peers_of(sessions, user)) for user, session in sessions.items()}
    for user, session in sessions.items():
        boxes = [[v, deals[v]["hashes"][user], deals[v]["boxes"][user]] for v in sessions if v != user]
        assert session.receive([v for v in sessions if v != user], boxes) == []
        session.mask(RING)


def test_keys_that_the_server_has_replaced_are_not_believed() -> None:
    sessions = crowd()
    own = X25519PrivateKey.generate().public_key().public_bytes_raw()
    peers = peers_of(sessions, 0)
    peers[2][1] = own
    with pytest.raises(Distrust, match="user 3 are not signed"):
        sessions[0].deal(peers)


def test_keys_of_another_round_or_another_user_are_not_believed() -> None:
    sessions, others = crowd(), crowd()
    with pytest.raises(Distrust, match="not signed"):
        sessions[0].deal(peers_of(others, 0))
    swapped = peers_of(sessions, 1)
    swapped[0][0], swapped[1][0] = swapped[1][0], swapped[0][0]
    with pytest.raises(Distrust, match="not signed"):
        sessions[1].deal(swapped)


def test_two_rounds_announced_under_one_name_are_told_apart() -> None:
    sessions = crowd()
    victim = Session(0, NONCE, 0, [0, 1, 2], 3, sessions[0].roster)
    with pytest.raises(Distrust, match="user 1 are not signed"):
        victim.deal([peer for peer in peers_of(sessions, 0) if peer[0] < 3])


def test_users_that_the_roster_has_not_are_not_believed() -> None:
    with pytest.raises(Distrust, match="roster has not"):
        Session(0, NONCE, 0, [0, 1, 9], 3, crowd(3)[0].roster)


@pytest.mark.parametrize("least", [0, 2, 4, 7])
def test_a_threshold_of_two_thirds_or_less_is_refused(least: int) -> None:
    with pytest.raises(Distrust, match="more than two thirds"):
        crowd(6, least or 1)


def test_a_server_that_drops_the_neighbours_of_a_client_gets_nothing_from_it() -> None:
    sessions = crowd()
    with pytest.raises(Distrust, match="neighbours are in the round"):
        sessions[0].deal(peers_of(sessions, 0)[:3])
    sessions = crowd()
    sessions[0].deal(peers_of(sessions, 0))
    with pytest.raises(Distrust, match="neighbours have dealt"):
        sessions[0].receive([1, 2, 3], [])


def test_two_lists_of_who_arrived_open_nothing() -> None:
    """Half of the clients is told that user 5 vanished: its key and its seed would both be had."""
    sessions = crowd()
    up_to_masks(sessions)
    views = {user: [0, 1, 2, 3, 4, 5] if user < 3 or user == 5 else [0, 1, 2, 3, 4] for user in sessions}
    signatures = {user: session.confirm(views[user]) for user, session in sessions.items()}
    for session in sessions.values():
        with pytest.raises(Distrust, match="have signed the same list"):
            session.shares([[user, signature] for user, signature in signatures.items()])


def test_a_client_signs_one_list_and_gives_its_shares_once() -> None:
    sessions = crowd()
    up_to_masks(sessions)
    with pytest.raises(Distrust, match="not enough"):
        sessions[0].confirm([0, 1, 2, 3])
    signatures = [[user, session.confirm([0, 1, 2, 3, 4])] for user, session in sessions.items() if user < 5]
    with pytest.raises(Distrust, match="has signed"):
        sessions[0].confirm([0, 1, 2, 3, 4, 5])
    with pytest.raises(Distrust, match="signed no list"):
        sessions[5].shares(signatures)
    given = sessions[0].shares(signatures)
    kept = sessions[0].held
    assert given["shares"] == [kept[u][0] for u in range(5)] + [kept[5][1]]
    with pytest.raises(Distrust, match="has given"):
        sessions[0].shares(signatures)


def test_a_client_masks_one_update_in_a_round() -> None:
    sessions = crowd()
    up_to_masks(sessions)
    with pytest.raises(Distrust, match="has sent its masked update"):
        sessions[0].receive([1, 2, 3, 4, 5], [])


def test_damaged_shares_are_named_and_the_rest_is_kept() -> None:
    sessions = crowd()
    deals = {user: session.deal(peers_of(sessions, user)) for user, session in sessions.items()}
    boxes = [[v, deals[v]["hashes"][0], deals[v]["boxes"][0]] for v in range(1, 6)]
    boxes[1][2] = bytes(len(boxes[1][2]))
    boxes[3][1] = bytes(32)
    assert sessions[0].receive([1, 2, 3, 4, 5], boxes) == [2, 4]
    assert sorted(sessions[0].held) == [0, 1, 3, 5]


def test_a_client_that_leaves_one_round_answers_in_the_next(tiny: str) -> None:
    loop, said = masked_loop(tiny, 6)
    once = iter([True])

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        if kind == SHARES and node == 102 and next(once, False):
            parcel.facts["peers"][0][1] = bytes(32)
        return ""

    loop.engine.link.fate = fate  # type: ignore[attr-defined]
    state = loop.start()
    counts = [loop.engine.train(state.parameters, np.arange(6), 0, loop.total).users for _ in range(2)]
    assert counts == [5, 6]
    assert any("does not fit its roster" in text for text in said)


def masked_loop(
    tiny: str, users: int, signed: bool = True, dimension: int = 20, tries: int = 3
) -> tuple[Loop, list[str]]:
    task = f"task={{kind: convex/quadratics, users: {users}, dimension: {dimension}, rank: 2}}"
    fixed = f"sampling={{kind: fixed, cohort: {users}}}"
    wanted = load(tiny, [task, fixed, "privacy.accountant=rdp", "privacy.noise_multiplier=2",
                         "privacy.trust=distributed"])  # fmt: skip
    loop, said = loop_over(wanted, engine(users, terms=Terms(deadline=300, tries=tries), signed=signed)), list[str]()
    loop.engine.say = said.append  # type: ignore[attr-defined]
    return loop, said


def behave(loop: Loop, node: int, change: Callable[[str, Parcel], Parcel]) -> None:
    """Let a client's answers be changed on their way out."""
    member = loop.engine.link.members[node]  # type: ignore[attr-defined]
    inner = member.answer
    member.answer = lambda kind, parcel: change(kind, inner(kind, parcel))


def changed(what: str, **facts: Callable[[Any], Any]) -> Callable[[str, Parcel], Parcel]:
    def change(kind: str, answer: Parcel) -> Parcel:
        if kind != what:
            return answer
        return Parcel(
            {**answer.facts, **{name: make(answer.facts[name]) for name, make in facts.items()}}, answer.arrays
        )

    return change


def wrong(value: list[bytes]) -> list[bytes]:
    return [bytes(len(each)) for each in value]


def garbled_dealer(kind: str, answer: Parcel) -> Parcel:
    """One whose shares are what it says of them, and whose seed is not what they open."""
    return changed(SHARES, commitment=lambda value: bytes(32))(kind, answer)


def huge(value: list[bytes]) -> list[bytes]:
    """One box that makes the question to its receiver longer than any message."""
    return [bytes(2_080_000) if place == 5 else each for place, each in enumerate(value)]


def of_another_length(kind: str, answer: Parcel) -> Parcel:
    """Shares of a seed of 16 bytes: all that is said of them fits."""
    if kind != SHARES:
        return answer
    cut = [box[:-16] if box else box for box in answer.facts["boxes"]]
    return Parcel({**answer.facts, "boxes": cut, "commitment": seed_hash(bytes(16))}, answer.arrays)


def withholding(*dealers: int) -> Callable[[str, Parcel], Parcel]:
    """Give all shares but those of some, which were not damaged."""

    def change(kind: str, answer: Parcel) -> Parcel:
        if kind != UNMASK:
            return answer
        given = zip(answer.facts["of"], answer.facts["shares"], strict=True)
        kept = [(of, share) for of, share in given if of not in dealers]
        return Parcel({**answer.facts, "of": [of for of, _ in kept], "shares": [share for _, share in kept]}, {})

    return change


def accusing(*dealers: int) -> Callable[[str, Parcel], Parcel]:
    """Say that shares are damaged which are not, and do not give them either."""
    accuse, withhold = changed(MASKED, damaged=lambda value: list(dealers)), withholding(*dealers)
    return lambda kind, answer: withhold(kind, accuse(kind, answer))


HOSTILE: dict[str, tuple[Callable[[str, Parcel], Parcel], str]] = {
    "unsigned": (changed(KEYS, public=lambda value: [*value[:2], b"x" * 70]), "not signed by it"),
    "keys of order one": (changed(KEYS, public=lambda value: [bytes(32), *value[1:]]), "malformed"),
    "damaged boxes": (changed(SHARES, boxes=wrong), "say that its shares are damaged"),
    "a false commitment": (garbled_dealer, "do not open its secret"),
    "a huge box": (changed(SHARES, boxes=huge), "its shares are malformed"),
    "a box for itself": (changed(SHARES, boxes=lambda value: [each or bytes(82) for each in value]), "malformed"),
    "an empty box": (changed(SHARES, boxes=lambda value: [b"", *value[1:]]), "its shares are malformed"),
    "a seed of another length": (of_another_length, "its shares are malformed"),
    "a long commitment": (changed(SHARES, commitment=lambda value: value + value), "its shares are malformed"),
    "hardly enough damaged boxes": (changed(SHARES, boxes=lambda value: [*wrong(value[:3]), *value[3:]]), "damaged"),
    "false shares": (changed(UNMASK, shares=wrong), "not those that were dealt to it"),
    "a share that is withheld": (withholding(6), "not those that were dealt to it"),
    "a share that it called damaged": (changed(MASKED, damaged=lambda value: [6]), "not those that were dealt to it"),
    "a share twice": (changed(UNMASK, of=lambda value: [value[0], *value[:-1]]), "not those that were dealt to it"),
    "no signature": (changed(CONFIRM, signature=lambda value: b""), "has not signed the list"),
    "no holders": (changed(SHARES, holders=lambda value: value[1:]), "its shares are malformed"),
    "another shape": (lambda kind, answer: Parcel(answer.facts, {}) if kind == MASKED else answer, "malformed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_client_is_named_and_the_step_ends_without_it(tiny: str, kind: str) -> None:
    loop, said = masked_loop(tiny, 8)
    change, name = HOSTILE[kind]
    behave(loop, 103, change)
    state = loop.start()
    tally = loop.step(state).tally
    assert tally.users >= 7
    assert any(text.startswith("user 3, node 103") and name in text for text in said), said
    assert loop.engine.excluded.keys() == ({3} if kind != "unsigned" else set())  # type: ignore[attr-defined]


def silent(users: set[int], what: str) -> Callable[[str, Any, Parcel], str]:
    return lambda kind, node, parcel: "gone" if kind == what and node - 100 in users else ""


@pytest.mark.parametrize("lost", [set(), {6, 7}])
def test_one_accuser_excludes_nobody_but_itself(tiny: str, lost: set[int]) -> None:
    """With two of eight silent every share counted, and the word of one client excluded five honest ones."""
    loop, said = masked_loop(tiny, 8)
    loop.engine.link.fate = silent(lost, KEYS)  # type: ignore[attr-defined]
    behave(loop, 105, accusing(0, 1, 2, 3, 4, 6, 7))
    with contextlib.suppress(Abandoned):
        loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total)
    assert loop.engine.excluded.keys() == {5}  # type: ignore[attr-defined]
    assert any(text.startswith("user 5, node 105: it says that the shares of") for text in said)


@pytest.mark.parametrize("lost", [set(), {6, 7}])
@pytest.mark.parametrize("accusers", [{0, 1}, {2}])
def test_accusations_of_less_than_a_third_are_said_and_exclude_nobody(
    tiny: str, accusers: set[int], lost: set[int]
) -> None:
    loop, said = masked_loop(tiny, 8)
    loop.engine.link.fate = silent(lost, KEYS)  # type: ignore[attr-defined]
    for user in accusers:
        behave(loop, 100 + user, accusing(4, 5))
    with contextlib.suppress(Abandoned):
        loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total)
    assert loop.engine.excluded == {}  # type: ignore[attr-defined]
    for user in (4, 5):
        assert f"user {user}, node 10{user}: users {sorted(accusers)} say that its shares are damaged" in said


def test_who_damages_fewer_shares_than_a_third_is_named_and_can_lose_a_round_in_which_others_drop_out(
    tiny: str,
) -> None:
    """What is left to a hostile client: nobody can tell whether it lies or those who accuse it do."""
    loop, said = masked_loop(tiny, 8, tries=1)
    behave(loop, 103, changed(SHARES, boxes=lambda value: [*wrong(value[:2]), *value[2:]]))
    assert loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total).users == 8
    loop.engine.link.fate = silent({7}, UNMASK)  # type: ignore[attr-defined]
    with pytest.raises(Abandoned, match="the shares of 1 users do not open"):
        loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total)
    assert said.count("user 3, node 103: users [0, 1] say that its shares are damaged") == 2
    assert loop.engine.excluded == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("signed", [True, False])
def test_nothing_that_one_client_says_makes_a_question_to_another_long(tiny: str, signed: bool) -> None:
    loop, _ = masked_loop(tiny, 8, signed)
    longest, much = [0], bytes(60_000)

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        longest[0] = max(longest[0], len(next(iter(frames(1, kind, parcel)))))
        return ""

    loop.engine.link.fate = fate  # type: ignore[attr-defined]
    behave(loop, 101, changed(KEYS, public=lambda value: [*value[:2], much]))
    behave(loop, 102, changed(SHARES, boxes=lambda value: [much] * 8))
    with contextlib.suppress(Abandoned):
        loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total)
    behave(loop, 103, changed(CONFIRM, signature=lambda value: much))
    with contextlib.suppress(Abandoned):
        loop.engine.train(loop.start().parameters, np.arange(8), 0, loop.total)
    assert longest[0] < 10_000


def test_shares_of_another_length_name_who_dealt_them_though_others_give_them() -> None:
    """Dealer and holders who are in league: the hashes fit."""
    short = {holder: bytes([holder]) * 17 for holder in range(3)}
    said = [share_hash(share) * 2 for share in short.values()]
    deal = Deal(bytes(32), [0, 1, 2], [b""] * 3, said, seed_hash(bytes(16)))
    opening = Opening(RING, NONCE, 0, {0: deal}, {0: set()})
    opening.arrived.add(0)
    deal.shares.update(short)
    with pytest.raises(Unopened) as caught:
        opening.open(3)
    assert caught.value.culprits == {0: "the shares that it dealt do not open its secret"}


def test_an_honest_client_is_not_excluded_by_the_false_accusations_of_a_few(tiny: str) -> None:
    loop, said = masked_loop(tiny, 9)
    for node in (100, 101):
        behave(loop, node, accusing(4, 5))
    assert loop.engine.train(loop.start().parameters, np.arange(9), 0, loop.total).users == 9
    assert loop.engine.excluded == {}  # type: ignore[attr-defined]
    assert any("say that its shares are damaged" in text for text in said)


def test_neighbourhoods_grow_slowly_and_keep_their_promises() -> None:
    sizes = {cohort: neighbours.neighbourhood(cohort) for cohort in (1, 2, 64, 65, 200, 1000, 10_000)}
    assert sizes[1] == 1
    assert sizes[2] == 2
    assert sizes[64] == sizes[65] == sizes[200] == 64
    assert sizes[10_000] < 160
    for cohort, size in sizes.items():
        if size < cohort:
            assert neighbours.insecure(cohort, size) <= 2**-40
            assert neighbours.lost(cohort, size) <= 2**-10
    draw = np.random.default_rng(0)
    found = (draw.hypergeometric(50, 149, 63, 200_000) >= 22).mean()  # the tail, by drawing
    assert found * 200 == pytest.approx(neighbours.lost(200, 64, 0.25), rel=0.05)


def test_no_two_parts_of_a_cohort_can_both_agree() -> None:
    """A bound over all ways to part the honest: each of them has a quorum of its neighbours in its own part."""
    from scipy import stats  # type: ignore[import-untyped]
    from scipy.special import gammaln  # type: ignore[import-untyped]

    for cohort in (65, 200, 1000, 10_000):
        size = neighbours.neighbourhood(cohort)
        hostile = int(neighbours.HOSTILE * cohort)
        honest, need = cohort - hostile, neighbours.quorum(size) - 1
        parts = np.arange(1, honest // 2 + 1)
        ways = (gammaln(honest + 1) - gammaln(parts + 1) - gammaln(honest - parts + 1)) / np.log(2)

        def agree(
            part: np.ndarray, need: int = need, cohort: int = cohort, hostile: int = hostile, size: int = size
        ) -> np.ndarray:
            inside = stats.hypergeom.logsf(need - 1, cohort - 1, part - 1 + hostile, size - 1) / np.log(2)
            return np.asarray(part * inside)

        total = ways + agree(parts) + agree(honest - parts)
        assert total.max() < -40, cohort


class Counted:
    """How many messages and bytes of facts go to and from each client."""

    def __init__(self) -> None:
        self.messages, self.bytes = 0, 0

    def __call__(self, kind: str, parcel: Parcel) -> Parcel:
        import msgpack

        self.messages += 1
        self.bytes += len(msgpack.packb(dict(parcel.facts)))
        return parcel


def cost(tiny: str, users: int) -> tuple[float, float]:
    """Messages and bytes of one client in a round."""
    loop, _ = masked_loop(tiny, users)
    counted = Counted()

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        counted(kind, parcel)
        return ""

    for node in list(loop.engine.link.members):  # type: ignore[attr-defined]
        behave(loop, node, counted)
    loop.engine.link.fate = fate  # type: ignore[attr-defined]
    loop.engine.train(loop.start().parameters, np.arange(users), 0, loop.total)
    return counted.messages / users, counted.bytes / users


def test_what_a_round_costs_a_client_follows_its_neighbourhood(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_EVERYBODY", 8)
    monkeypatch.setattr(neighbours, "_INSECURE", 1.0)
    neighbours.neighbourhood.cache_clear()
    try:
        assert neighbours.neighbourhood(20) < 12
        (_, small), (messages, large) = cost(tiny, 20), cost(tiny, 60)
        ratio = neighbours.neighbourhood(60) / neighbours.neighbourhood(20)
    finally:
        neighbours.neighbourhood.cache_clear()
    assert messages == 10
    assert large < 1.5 * ratio * small, "thrice the cohort"


@pytest.mark.slow
def test_a_cohort_of_200_with_dropouts_and_five_hostile_clients_ends_and_names_them(tiny: str) -> None:
    loop, said = masked_loop(tiny, 200)
    assert isinstance(loop.engine, Masked)
    kinds = ["unsigned", "damaged boxes", "a false commitment", "false shares", "no signature"]
    for user, kind in zip((3, 50, 77, 120, 199), kinds, strict=True):
        behave(loop, 100 + user, HOSTILE[kind][0])

    def fate(kind: str, node: int, parcel: Parcel) -> str:
        return "gone" if kind == MASKED and node in (110, 111) else ""

    loop.engine.link.fate = fate  # type: ignore[attr-defined]
    tally = loop.step(loop.start()).tally
    assert tally.users >= 190
    for user in (3, 50, 77, 120, 199):
        assert any(text.startswith(f"user {user}, node") for text in said), user
    assert loop.engine.excluded.keys() <= {3, 50, 77, 120, 199}
    assert loop.ledger.count <= 3


def test_without_enough_honest_neighbours_nothing_is_released(tiny: str) -> None:
    loop, _ = masked_loop(tiny, 8, tries=1)
    for node in (100, 101, 102):
        behave(loop, node, changed(UNMASK, shares=wrong))
    with pytest.raises(Abandoned, match="do not open"):
        loop.step(loop.start())
