"""Hold what a server asks for against a client's policy, and say to the owner what it would cost.

What an answer costs is computed from the client's own point of view, never from what the server claims about others:

    local         a Gaussian of multiplier z / 2 on the message itself (any two data sets of the user are compared);
    distributed   a Gaussian on the sum, of half the variance: the server knows who is in a round, so nothing is
                  amplified, and less than a third of a round may be hostile and know the rest (`server_view`);
    central       what the server claims, with amplification by sampling. Nothing here enforces it: it is believed. It
                  is claimed for the whole run, so that is what a life pays when the client joins, asked or not.

So the number of users that a server claims enters the noise only where z follows from `target_epsilon`, and there the
policy's own bounds on the population and on z hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from confide.deploy import refusals
from confide.deploy.policy import TRUSTS, Policy
from confide.deploy.refusals import RefusedByClient
from confide.deploy.told import shape_digest
from confide.errors import UserError
from confide.federated.bounds import bounds_for
from confide.federated.parameters import Layout
from confide.privacy.accountant import epsilon, shown
from confide.privacy.events import Event
from confide.privacy.mechanisms import mechanism_of
from confide.privacy.plan import Plan, make_plan
from confide.privacy.trust.roster import UNSIGNED, Roster
from confide.privacy.trust.server_view import HONEST
from confide.recipe import Recipe

_NOTHING = "the run has no guarantee at all, which is for rehearsals"
MOST_STEPS = 1_000_000
"""Central steps of a run that a client works out."""


@dataclass(frozen=True)
class Request:
    """What a server asks of this client, and what an answer would cost the client."""

    recipe: Recipe
    population: int
    plan: Plan
    event: Event | None
    """What one answer costs; none where nothing protects it."""
    claimed: bool
    """Whether the server alone knows if it is so."""

    @property
    def multiplier(self) -> float:
        return self.plan.event.noise_multiplier if self.event else 0.0

    def cost(self, answers: int, delta: float) -> float:
        """Epsilon of so many answers."""
        if self.event is None:
            return math.inf
        charges = min(answers, 1) if self.event.whole_run else answers
        return epsilon(Counter({self.event: charges}), delta, "rdp" if self.event.sampler == "fixed" else "pld")

    def lines(self, delta: float) -> list[str]:
        """Say to the owner what is asked for."""
        recipe, privacy = self.recipe, self.recipe.privacy
        local = recipe.local
        length = f"{local.steps} steps" if local.steps else f"{local.epochs} epochs"
        length += "" if local.optimiser is None else f" of {local.optimiser.kind}"
        noise = "no noise" if self.event is None else f"noise multiplier {self.multiplier:.4g} ({privacy.source})"
        said = [
            f"asked for run {shape_digest(recipe)}: {recipe.task.kind}, {recipe.run.steps} central steps, "
            f"{length} each at rate {local.learning_rate:g}, updates bounded to {recipe.bounding.bound} "
            f"({recipe.bounding.rule})",
            f"  cohorts of {recipe.sampling.cohort} of {self.population} users ({recipe.sampling.kind}); trust "
            f"{privacy.trust}, {noise}",
        ]
        if self.event is not None:
            one, all_ = shown(self.cost(1, delta)), shown(self.cost(recipe.run.steps, delta))
            how = "claimed by the server, not enforced here" if self.claimed else "by this client's own noise"
            what = f"an answer costs epsilon {one}, one in every step {all_}"
            if self.claimed:
                what = f"the whole run costs epsilon {all_}, asked or not, and a step of it {one}"
            said.append(f"  {what}, at delta {delta:g} ({how})")
        return said


def look_ahead(policy: Policy, recipe: Recipe, population: object, roster: Roster = UNSIGNED) -> None:
    """Refuse what can be refused before anything is made of a recipe: no task, no data, no model."""
    _check_sizes(policy, recipe, population)
    if recipe.task.size > policy.most_numbers:
        raise RefusedByClient(
            refusals.RECIPE,
            f"the model (and made-up data) of the server's recipe have about {recipe.task.size:.3g} numbers, above "
            f"the policy's most_numbers: {policy.most_numbers}",
        )
    problems = list(_problems_ahead(policy, recipe, roster))
    if problems:
        raise RefusedByClient(problems[0][0], "\n".join(f"refused: {text}" for _, text in problems))


def judge(policy: Policy, recipe: Recipe, population: object, layout: Layout, roster: Roster = UNSIGNED) -> Request:
    """Work out what is asked for, and refuse what is below the policy."""
    users = _check_sizes(policy, recipe, population)
    try:
        request = _request(recipe, users, layout)
    except UserError as error:
        raise RefusedByClient(refusals.RECIPE, f"no run can be made of what the server asks for: {error}") from None
    problems = [*_problems_ahead(policy, recipe, roster), *_problems(policy, request)]
    if problems:
        said = "\n".join([*request.lines(policy.delta), *(f"refused: {text}" for _, text in problems)])
        raise RefusedByClient(problems[0][0], said)
    return request


def _check_sizes(policy: Policy, recipe: Recipe, population: object) -> int:
    """Refuse what is too large to work out; the number of users that is believed."""
    believed = policy.population
    if type(population) is not int or not believed.least <= population <= believed.most:
        raise RefusedByClient(
            refusals.POPULATION,
            f"the server speaks of {population!r:.40} users; this client's policy believes in {believed.least} to "
            f"{believed.most}",
        )
    if recipe.run.steps > MOST_STEPS:
        raise RefusedByClient(refusals.RECIPE, f"the server asks for {recipe.run.steps} steps, above {MOST_STEPS}")
    return population


def _request(recipe: Recipe, population: int, layout: Layout) -> Request:
    bounds, privacy = bounds_for(recipe.bounding, layout), recipe.privacy
    weights = np.full(population, 1 / population)
    plan = make_plan(
        privacy, recipe.sampling, weights, bounds.bounder.sensitivity, recipe.run.steps, recipe.run.seed,
        follows=bounds.follows, counters=bounds.counters, count_noise=bounds.count_noise, names=layout.names,
        sizes=layout.sizes,
    )  # fmt: skip
    event: Event | None = plan.event
    if not plan.event.private or not mechanism_of(privacy, bounds.follows).guaranteed:
        event = None
    elif privacy.trust == "distributed":
        event = own_event(plan.event)
    return Request(recipe, population, plan, event, claimed=privacy.trust == "central")


def own_event(event: Event) -> Event:
    """What a round of distributed trust costs one who is in it, against a server with hostile clients on its side."""
    return replace(
        event, sampler="local" if event.sampler == "fixed" else "everyone", rate=1.0, most=0,
        noise_multiplier=event.noise_multiplier * math.sqrt(HONEST),
    )  # fmt: skip


def _problems_ahead(policy: Policy, recipe: Recipe, roster: Roster) -> Iterator[tuple[str, str]]:
    """Give a code and a sentence for what is below the policy by the recipe's own words."""
    privacy = recipe.privacy
    if TRUSTS.index(privacy.trust) < TRUSTS.index(policy.trust):
        relied = ": this client would add no noise, and rely on the server to" if privacy.trust == "central" else ""
        yield refusals.TRUST, f"trust {privacy.trust} is less than the policy's trust {policy.trust}{relied}"
    if privacy.mechanism != "none" and privacy.source == "seeded" and not policy.rehearsal:
        yield refusals.REHEARSAL, "privacy.source=seeded: the server knows the seed and can take the noise off again"
    if privacy.mechanism == "none" and not policy.rehearsal:
        yield refusals.REHEARSAL, _NOTHING
    if privacy.trust == "distributed" and not roster.signed and not policy.rehearsal:
        yield (
            refusals.ROSTER, "the policy names no `roster`, without which the server could pose as all other clients",
        )  # fmt: skip


def _problems(policy: Policy, request: Request) -> Iterator[tuple[str, str]]:
    """Give a code and a sentence for what is below the policy by what it would cost."""
    least = policy.noise_multiplier
    if request.event is None:
        if not policy.rehearsal and request.recipe.privacy.mechanism != "none":
            yield refusals.REHEARSAL, _NOTHING
        return
    if least is not None and request.multiplier < least:
        yield refusals.NOISE, f"noise multiplier {request.multiplier:.4g} is below the policy's {least:.4g}"
    one = request.cost(1, policy.delta)
    if policy.epsilon_round is not None and one > policy.epsilon_round:
        yield refusals.ROUND, f"an answer costs epsilon {shown(one)}, above the policy's {policy.epsilon_round:g}"
    what, least_cost = "an answer", one
    if request.claimed:
        what, least_cost = "the whole run", request.cost(request.recipe.run.steps, policy.delta)
    if least_cost > policy.epsilon:
        yield refusals.LIFETIME, f"{what} costs epsilon {shown(least_cost)}, above the lifetime's {policy.epsilon:g}"
