"""What a release was, in the words that an accountant understands.

An event is everything that decides the privacy loss of one central step: who could have been in the sum, how likely,
and how much noise there was for the largest possible contribution. It is written into the ledger as JSON and read
back from there, so what is accounted for is what was written before the release.

| sampler  | who is in a step                             | adjacency                 | a run of T steps costs        |
|----------|----------------------------------------------|---------------------------|-------------------------------|
| poisson  | each user with probability `rate`            | add or remove a user      | T sampled Gaussians           |
| everyone | all users                                    | add or remove a user      | T Gaussians                   |
| fixed    | exactly `cohort` users                       | replace a user            | T sampled Gaussians of z / 2  |
| cyclic   | one of `separation` fixed groups, in turn    | leave out a user          | one Gaussian (factorisation)  |
| local    | any; every message is protected by itself    | replace a user's data     | T Gaussians of z / 2          |

A sampler `cyclic_poisson` takes each user of the group whose turn it is with probability `turn_rate`. Its adjacency is
that of cyclic, and a run costs `turns` = T / `separation`, rounded up, sampled Gaussians (`factorisation`).

For a cohort of fixed size, adding or removing a user does not apply (the size would change); a user's data are
replaced by another's, and the sum can move by twice the bound. For local noise the server knows who sent what, so
nothing is gained from sampling and any two data sets of a user are compared. The event carries its adjacency, so
that nobody compares them by mistake. With `most`, Poisson cohorts are cut down to that many users (`overflow`).

Counters (Andrew et al. 2021). When the bound is adapted, or figures are released (`confide.privacy.metrics`), a step
also releases `counters` noisy sums, to each of which a user adds a number from -1/2 to +1/2, with noise `count_noise`
on each. Scaled by their noise, update and sums are one vector in which a user moves by at most
sqrt(1 / z_u^2 + counters / (2 count_noise)^2): one Gaussian of multiplier z with

    z^-2 = z_u^-2 + counters (2 count_noise)^-2,

so that an accountant takes `noise_multiplier` = z and the update gets the larger `update_multiplier` = z_u.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from confide.errors import UserError

Sampler = Literal["poisson", "fixed", "everyone", "cyclic", "cyclic_poisson", "local"]
ADJACENCY: dict[Sampler, str] = {
    "poisson": "add-or-remove one user",
    "everyone": "add-or-remove one user",
    "fixed": "replace one user",
    "cyclic": "leave out one user, with a public schedule",
    "cyclic_poisson": "leave out one user, with public groups",
    "local": "replace one user's data, against the server itself",
}
_EMPTY = "the data of one user are there or are empty; the number of users is the same for both"
NEIGHBOURS: dict[Sampler, str] = {
    "poisson": f"{_EMPTY}, and with it rate, divisor and noise",
    "everyone": f"{_EMPTY}, and with it divisor and noise",
    "fixed": "the data of one user are any other data, or empty; the number of users is the same for both, and so is "
    "that of a cohort",
    "cyclic": f"{_EMPTY}, and so is whose turn it is in which step",
    "cyclic_poisson": f"{_EMPTY}, and so are the groups, rate, divisor and noise",
    "local": "the data of one user are any other data, or empty; who sends in which step is the same for both",
}
"""The same in full: what of two neighbouring data sets differs, and what does not."""


@dataclass(frozen=True)
class Event:
    """What one noisy sum over a sampled cohort costs. A noise multiplier of 0 is a release without any guarantee.

    Examples:
        >>> from confide.privacy.accountant import epsilon
        >>> from confide.privacy.events import Event
        >>> step = Event("poisson", rate=0.01, cohort=100, population=10_000, noise_multiplier=1.0, sensitivity=0.5)
        >>> step.adjacency
        'add-or-remove one user'
        >>> round(epsilon([step] * 100, delta=1e-6, accountant="pld"), 2)
        0.95
    """

    sampler: Sampler
    rate: float
    cohort: float
    population: int
    noise_multiplier: float
    """z: the noise's standard deviation divided by the largest norm that one user adds to what is released."""
    sensitivity: float | None
    """That largest norm, in the model's units; none where nothing bounds it."""
    counters: int = 0
    count_noise: float = 0.0
    separation: int = 0
    """Cyclic: central steps from one turn of a user to the next."""
    rounds: int = 0
    """Cyclic: for how many steps the noise is made; a release beyond them is not covered."""
    bands: int = 0
    """Cyclic: how many steps the noise is correlated over."""
    most: int = 0
    """Poisson: the largest cohort, to which larger draws are cut down; 0 where there is none."""

    @property
    def adjacency(self) -> str:
        return ADJACENCY[self.sampler]

    @property
    def private(self) -> bool:
        return self.noise_multiplier > 0 and self.sensitivity is not None

    @property
    def whole_run(self) -> bool:
        """Whether all steps together are one release, as with noise that is correlated over them."""
        return self.sampler in ("cyclic", "cyclic_poisson")

    @property
    def turns(self) -> int:
        """How many sampled releases of a user's group the event stands for."""
        return -(-self.rounds // self.separation) if self.sampler == "cyclic_poisson" else 1

    @property
    def turn_rate(self) -> float:
        """With which probability a user is in a step that it can be in."""
        return turn_rate(self.rate, self.separation) if self.sampler == "cyclic_poisson" else self.rate

    @property
    def cost(self) -> Event:
        """The same release in units of its sensitivity: all that an accountant asks for, however the bound moves."""
        return self if self.sensitivity in (None, 1.0) else replace(self, sensitivity=1.0)

    @property
    def overflow(self) -> float:
        """At most how likely it is that a cohort of this event had to be cut down to `most` users.

        One user more than there are is counted, for the data set with one more.
        """
        if self.most == 0:
            return 0.0
        from scipy import stats  # type: ignore[import-untyped]

        grouped = self.sampler == "cyclic_poisson"
        users = -(-self.population // self.separation) if grouped else self.population
        one = float(stats.binom.sf(self.most, users + 1, self.turn_rate))
        return min(1.0, one * (self.rounds if grouped else 1))

    @property
    def update_multiplier(self) -> float:
        """z_u, what is left for the update when the counters have had their share."""
        if not self.counters or not self.private:
            return self.noise_multiplier
        left = self.noise_multiplier**-2 - self.counters / (2 * self.count_noise) ** 2
        if left <= 0:
            raise UserError(
                f"{self.counters} counters with noise {self.count_noise:g} spend more than the noise multiplier "
                f"{self.noise_multiplier:.4g} allows; raise bounding.adaptive.count_noise or privacy.metrics.noise "
                f"above {self.noise_multiplier * math.sqrt(self.counters) / 2:.4g}, or lower the noise multiplier"
            )
        return 1 / math.sqrt(left)

    def to_json(self) -> dict[str, Any]:
        """Write the event down; `most` only where it is used, as in ledgers from before it was there."""
        return {name: value for name, value in asdict(self).items() if name != "most" or value}

    @staticmethod
    def from_json(document: object) -> Event:
        """Read an event back; anything that is not exactly an event is refused."""
        try:
            complete = isinstance(document, dict) and document.keys() | {"most"} == _NAMES
            if isinstance(document, dict) and complete and _is_known(event := Event(**document)):
                return event
        except (TypeError, UserError):
            pass
        raise UserError(f"event {document!r} is not one that the accountant knows; it is refused")


_NAMES = {each.name for each in fields(Event)}


def turn_rate(rate: float, groups: int) -> float:
    """With which probability a user is drawn in the turn of its group, where a share `rate` of all users is drawn."""
    return min(1.0, rate * groups)


def _is_known(event: Event) -> bool:
    numbers = (event.rate, event.cohort, event.population, event.noise_multiplier, event.count_noise)
    counts = (event.counters, event.separation, event.rounds, event.bands, event.most)
    columns_overlap = event.whole_run and event.private and not 0 < event.bands <= event.separation
    return (
        event.sampler in get_args(Sampler)
        and all(map(_is_number, numbers))
        and all(type(count) is int and count >= 0 for count in counts)
        and (event.sensitivity is None or (_is_number(event.sensitivity) and event.sensitivity > 0))
        and (0 < event.rate <= 1 and 0 < event.cohort <= event.population and event.noise_multiplier >= 0)
        and not (event.counters > 0 and event.private and event.count_noise <= 0)
        and not columns_overlap
        and (event.sampler != "cyclic_poisson" or 0 < event.rate * event.separation <= 1 + 1e-9)
        and (event.most == 0 or event.sampler in ("poisson", "cyclic_poisson"))
        and event.update_multiplier >= event.noise_multiplier
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
