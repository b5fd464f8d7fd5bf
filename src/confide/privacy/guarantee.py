"""The statement: what a run promises, to whom, against whom, and what not; made from its ledger alone.

`statement(ledger)` gives the one object that every sentence of the program about a guarantee is made from: the command
`confide guarantee`, the summary, the page, `confide ledger`, and a client's own ledger. Nothing in it depends on a
secret: who took part is in no ledger.

A ledger from before a key of its first line existed is read as what is least: without a unit nothing is promised to
people, without a sampler nothing is said of how cohorts were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from confide.errors import UserError
from confide.privacy import accountant
from confide.privacy.accountant import Accountant, Strength, accountant_used, protection, shown, strength
from confide.privacy.adversaries import Adversary, adversaries
from confide.privacy.events import NEIGHBOURS, Event
from confide.privacy.ledger import Ledger
from confide.privacy.profile import Mu, Point, epsilon_by, gaussian_mu, profile
from confide.privacy.trust.server_view import server_view
from confide.settings import UNSAID, Section, Unit

NO_GUARANTEE = "This run gives no privacy guarantee."
STARTING_MODEL = "what the starting model was trained on"
EXAMPLES = "how many examples each user has"
ASSUMED = {
    "poisson": "every user independently, with probability {rate:.6g}; who took part stays secret",
    "fixed": "{cohort:g} of {population} users, drawn without replacement; who took part stays secret",
    "everyone": "all users in every step",
    "cyclic": "a public schedule: a user's turns are {separation} steps apart",
    "cyclic_poisson": "groups that are public and take turns, {separation} steps apart; every user of the group "
    "independently, with probability {turn_rate:.6g}; who took part stays secret",
    "local": "nothing: a user is charged as if it had been in every step",
}


class Sampled(Section):
    """How users got into a step."""

    assumed: str = Field(description="the sampler that epsilon was computed for")
    assumed_said: str
    done: str | None = Field(description="the sampler that drew the cohorts; none: the ledger does not say")
    drawn_from: str | None = Field(description="seeded or system: where the coins came from")
    rate: float = Field(description="the expected share of the population in a step")
    population: int


class Noise(Section):
    """What was added."""

    least_multiplier: float = Field(description="z of the release with the least noise; 0: a release without any")
    counts: int = Field(0, description="noisy counts and figures that belong to a release, beside the update")
    source: str | None
    for_release: bool = Field(description="false: seeded, repeatable, for research; whoever knows the seed knows it")


class Statement(Section):
    """What a run promises. `said` is its sentence, `lines()` the whole text.

    Examples:
        >>> from confide.privacy.events import Event
        >>> from confide.privacy.guarantee import statement
        >>> from confide.privacy.ledger import Ledger
        >>> ledger = Ledger.create(None, {"delta": 1e-5, "accountant": "pld", "unit": {
        ...     "name": "speaker", "person": True, "origin": "found"}})
        >>> ledger.record(0, Event("everyone", 1.0, 10, 10, 2.0, 1.0), environment="here")
        0
        >>> found = statement(ledger)
        >>> found.unit.name, found.mu.value, [each.who for each in found.adversaries if each.epsilon is None]
        ('speaker', 0.5000000000005, ['server', 'server and clients'])
    """

    version: Literal[2] = 2
    recipe: str | None = Field(description="digest of the recipe")
    ledger_head: str = Field(description="hash of the ledger's last line, which this was made from")
    unit: Unit
    adjacency: str | None = Field(description="which two data sets are neighbours, for whoever sees the models")
    neighbours: str = Field(description="the same in full: what of the two differs, and what does not")
    epsilon: float | None = Field(description="against whoever sees the models, an upper bound; none: no guarantee")
    delta: float | None
    accountant: Accountant = Field(description="which accountant `epsilon` is by")
    epsilon_pld: float | None = Field(description="by privacy-loss distributions; none: no proof")
    epsilon_rdp: float | None = Field(description="by Renyi differential privacy; none: no proof")
    profile: list[Point] = Field(description="epsilon over delta, every point an upper bound")
    mu: Mu | None = Field(description="Gaussian differential privacy")
    trust: str
    adversaries: list[Adversary]
    sampler: Sampled | None = Field(description="none: nothing was released")
    releases: int = Field(description="lines of the ledger")
    steps: int
    releases_of_a_user: int | None = Field(
        None, description="distributed trust: in how many releases a user was at most, but for a part of delta"
    )
    noise: Noise
    words: str = Field("", description="what the mechanism says of itself")
    public: list[str] = Field(description="what the guarantee takes as known to everybody")
    not_covered: list[str]

    def against(self, who: str, colluding: int | None = None) -> float | None:
        """Epsilon against one adversary; none where nothing is stated."""
        for each in self.adversaries:
            if each.who == who and each.colluding in (None, colluding):
                return each.epsilon
        return None

    @property
    def said(self) -> str:
        """The promise in a sentence, without a full stop; where there is none, that there is none."""
        if self.epsilon is None or self.delta is None:
            return (self.words or NO_GUARANTEE).rstrip(".")
        said = f"epsilon {shown(self.epsilon)} at delta {self.delta:g} for every {self.unit.name}"
        if not self.unit.person:
            said += " (not a person)" if self.unit.origin != "unsaid" else ""
        if self.trust == "distributed":
            said += f" against whoever sees the models alone; {self.said_of_others}"
        said += "".join(f"; it does not cover {what}" for what in self.own_gaps)
        return said + "".join(f"; it takes as public {what}" for what in self.own_public)

    @property
    def strength(self) -> Strength:
        """The word for it on the one scale of words."""
        return strength(self.epsilon, self.delta, self.population)

    @property
    def protection(self) -> str:
        return protection(self.epsilon, self.delta, self.population)

    @property
    def population(self) -> int | None:
        return None if self.sampler is None else self.sampler.population

    @property
    def own_gaps(self) -> list[str]:
        """What this run does not cover and others may."""
        return [what for what in self.not_covered if what == STARTING_MODEL]

    @property
    def own_public(self) -> list[str]:
        """What this run takes as public and others may not."""
        return [what for what in self.public if what == EXAMPLES]

    @property
    def said_of_others(self) -> str:
        """Distributed trust: what holds against those who know who is in a round."""
        most = f"a user in at most {self.releases_of_a_user} of {self.releases} releases, but for a part of delta"
        server = next(each for each in self.adversaries if each.who == "server")
        return (
            f"epsilon {shown(server.epsilon)} against the server, who knows who is in a round "
            f"({server.adjacency}; {shown(server.epsilon_replaced)} for any other data): no "
            f"amplification, {most}; {shown(self.against('clients', 1))} against a client of the round; "
            f"{shown(self.against('server and clients', 1))} against the two together"
        )


def statement(book: Ledger, curve: bool = True) -> Statement:
    """Make the statement of a ledger. Without `curve` its profile is empty and mu is none, which is quicker."""
    header, events = book.header, book.charged()
    delta, kind = _delta(header.get("delta")), header.get("accountant", "pld")
    unit, spent, points = _unit(header.get("unit")), math.inf, list[Point]()
    by_pld = by_rdp = most = None
    if delta is not None:
        spent = accountant.epsilon(events, delta, kind) if events else 0.0
    if delta is not None and math.isfinite(spent):
        by_pld, by_rdp = (epsilon_by(events, delta, each) for each in ("pld", "rdp"))
        points = profile(events, delta, kind) if curve and events else []
        most = _most(book, delta, kind)
    return Statement(
        recipe=header.get("recipe"), ledger_head=book.head, unit=unit, adjacency=header.get("adjacency"),
        neighbours=NEIGHBOURS[events[0].sampler] if events else "nothing was released",
        epsilon=spent if math.isfinite(spent) else None, delta=delta,
        accountant=kind if delta is None else accountant_used(kind, delta), epsilon_pld=by_pld, epsilon_rdp=by_rdp,
        profile=points, mu=gaussian_mu(events, points) if points else None, trust=_trust(header, events),
        adversaries=adversaries(book, spent, delta, kind), sampler=_sampled(header, events), releases=book.count,
        steps=len(book.latest), releases_of_a_user=most, noise=_noise(header, events),
        words=str(header.get("words", "")), public=_public(header, events),
        not_covered=_not_covered(header, events, unit, delta),
    )  # fmt: skip


def _delta(found: Any) -> float | None:
    if found is None or (isinstance(found, float) and 0 < found < 1):
        return found
    raise UserError(f"the ledger's delta is {found!r}; expected a number between 0 and 1")


def _unit(found: Any) -> Unit:
    if found is None:
        return UNSAID
    try:
        return Unit.model_validate(found)
    except ValidationError:
        raise UserError(f"the ledger's unit is {found!r}; expected name, person and origin") from None


def _trust(header: dict[str, Any], events: Sequence[Event]) -> str:
    if any(event.sampler == "local" for event in events):
        return "local"
    return str(header.get("trust", "central"))


def _most(book: Ledger, delta: float, kind: Accountant) -> int | None:
    return server_view(book.entries, delta, kind).releases if book.header.get("trust") == "distributed" else None


def _sampled(header: dict[str, Any], events: Sequence[Event]) -> Sampled | None:
    if not events:
        return None
    event = max(events, key=lambda each: each.rate)
    words = ASSUMED.get(event.sampler, event.sampler)
    said = words.format(
        rate=event.rate, cohort=event.cohort, population=event.population, separation=event.separation,
        turn_rate=event.turn_rate,
    )  # fmt: skip
    if event.most:
        said += f"; of more than {event.most} a random part of so many was kept, which is part of delta"
    return Sampled(
        assumed=event.sampler, assumed_said=said, done=header.get("sampler"), drawn_from=header.get("noise_source"),
        rate=event.rate, population=event.population,
    )  # fmt: skip


def _noise(header: dict[str, Any], events: Sequence[Event]) -> Noise:
    least = min((event.noise_multiplier if event.private else 0.0 for event in events), default=0.0)
    return Noise(
        least_multiplier=least, counts=max((event.counters for event in events), default=0),
        source=header.get("noise_source"), for_release=bool(header.get("for_release")),
    )  # fmt: skip


def _public(header: dict[str, Any], events: Sequence[Event]) -> list[str]:
    users = max((event.population for event in events), default=header.get("population"))
    found = [
        f"the recipe, and the number of users, {users}, which is the same for both neighbours: rate, divisor and noise "
        "are computed with it"
    ]
    if any(event.whole_run for event in events):
        found.append("the schedule: whose turn it is in which step")
    if _trust(header, events) == "distributed":
        found.append("to the clients of a round: who else is in it")
    if _trust(header, events) != "central" or header.get("deployed"):
        found.append("to the server: who is asked and who answers, in every round")
    return [*found, EXAMPLES] if header.get("public_weights") else found


def _not_covered(header: dict[str, Any], events: Sequence[Event], unit: Unit, delta: float | None) -> list[str]:
    found = [STARTING_MODEL] if header.get("begins_elsewhere") else []
    if not header.get("for_release"):
        found.append("anything, against whoever knows the seed: the noise was seeded, for research and not for release")
    users = max((event.population for event in events), default=0)
    if delta is not None and delta * users >= 1:
        found.append(
            f"publishing all data of one random user, which a delta of {delta:g} among {users} users would allow"
        )
    if unit.person:
        found.append("a person who is more than one user, or whose data lie with other users too")
    else:
        found.append("people, since nobody has said that a user is a person")
    if _trust(header, events) == "distributed":
        found.append(
            "a server that does not follow the protocol: what holds against it is what each client counts in its own "
            "budget, if the client has a roster of the others' keys and less than a third of each round is hostile"
        )
    if header.get("deployed"):
        found.append("whoever watches the network and sees who takes part: sampling hides nobody from them")
        found.append("that a round was tried again because too few answered, and how many did: that has no noise")
    return [
        *found,
        "losses, norms and evaluations that were computed from users' data without noise",
        "the choice of hyper-parameters, if they were tuned on the same users",
        "a number of steps that was chosen after a look at the models: then the epsilon of all planned steps holds",
        "other runs over the same users, whose epsilons come on top",
        "the computers' memory, and timing, while the run was going on",
    ]
