"""What a client does with what the server sends: check it, train its own user, bound the update, answer.

The same task, local training and bounding code as in one process: a user's answer is what `PartTrainer` adds for it.
What the server asks for is held against the client's policy before anything is trained (`confide.deploy.judge`), once
for each run, and said to the owner. A server that runs another recipe, version or model is refused. Nothing that
arrives is code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.deploy import refusals
from confide.deploy.judge import Request, judge
from confide.deploy.parcels import Parcel, identity
from confide.deploy.policy import Policy
from confide.deploy.refusals import QUESTION, RefusedByClient, to_owner
from confide.deploy.remote import JOIN, TRAIN
from confide.federated.bounding import ROUNDING, bounder
from confide.federated.cohort import PartTrainer, Tally
from confide.federated.local import LocalTraining, Updates
from confide.federated.parameters import Layout, all_finite, flatten
from confide.federated.task import Task
from confide.privacy.events import Event
from confide.privacy.plan import Plan
from confide.privacy.trust.own_noise import OwnNoise, OwnTerms, Spent, noisy_share, share_scale
from confide.privacy.trust.roster import UNSIGNED, Roster
from confide.privacy.trust.secure import CONFIRM, KEYS, MASKED, SHARES, UNMASK, Distrust, Session, clamp, ring_for
from confide.privacy.trust.secure_sum import Vector
from confide.recipe import Recipe


class Elsewhere:
    """A task whose users are not those of its own data; everything else is the task's."""

    at_most: int | None = None

    def __init__(self, task: Task, examples: np.ndarray) -> None:
        self.task, self.examples = task, examples

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


class Population(Elsewhere):
    """The server's task where users' data are elsewhere: model and test data are real, the users are a number."""

    def __init__(self, task: Task, population: int) -> None:
        super().__init__(task, np.ones(population, dtype=np.int64))


class OwnData(Elsewhere):
    """A task whose one user, this client's own data, is called `user` in the federation."""

    def __init__(self, task: Task, user: int) -> None:
        super().__init__(task, np.zeros(user + 1, dtype=np.int64))
        self.examples[user] = task.examples[0]

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        return self.task.batch(0, examples, draw)

    def rows(self, user: int) -> np.ndarray:
        own: Any = self.task  # asked only if it is a chain
        return np.asarray(own.rows(0))

    def seconds(self, user: int) -> np.ndarray | None:
        return self.task.seconds(0)

    def fast_updates(
        self, parameters: Mapping[str, Tensor], users: np.ndarray, local: LocalTraining, learning_rate: float
    ) -> Updates | None:
        return self.task.fast_updates(parameters, np.zeros_like(users), local, learning_rate)


class TrainingClient:
    """A client's whole part in a run, without any network."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        users: Sequence[int],
        policy: Policy,
        say: Callable[[str], None] = to_owner,
        roster: Callable[[], Roster] = lambda: UNSIGNED,
    ) -> None:
        """`say` tells the owner what was asked for and what was refused. `roster`: whose keys its peers have."""
        parameters = task.initial_parameters()
        self.layout, like = Layout.of(parameters), flatten(parameters)
        self.users, self.identity = list(users), identity(recipe, task, self.layout, like)
        self.sum = torch.empty_like(like)
        rule = bounder(recipe.bounding, self.layout)
        self.adapts = recipe.bounding.adaptive is not None  # with central trust only, as the recipe ensures
        self.recipe, self.policy, self.begins_elsewhere = recipe, policy, task.begins_elsewhere
        self.trust, self.sessions, self.roster = recipe.privacy.trust, dict[int, Session](), roster
        self.say = say
        self.request: Request | None = None
        self.noise: OwnNoise | None = None
        weights = np.zeros(max(users) + 1)  # each user's comes with the question
        self.trainer = PartTrainer(task, self.layout, recipe.local, rule, weights, recipe.run.seed, like)

    @property
    def arrays(self) -> int:
        """Bytes of the model, which is all that a question may hold."""
        return self.sum.numel() * self.sum.element_size()

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        if kind == JOIN:
            return self._join(parcel.facts)
        self._check(parcel.facts)
        if kind == TRAIN and self.trust != "distributed":
            return self._train(parcel)
        if kind in (KEYS, SHARES, MASKED, CONFIRM, UNMASK) and self.trust == "distributed":
            return self._aggregate(kind, parcel)
        raise RefusedByClient(QUESTION, f"the server asks for {kind!r:.40}, which this client does not know")

    def _join(self, facts: Mapping[str, Any]) -> Parcel:
        said = {"users": self.users, **self.identity.facts()}
        try:
            self._check_identity(facts)
            self._accept(facts.get("population"))
            self._claim(facts)
        except (RefusedByClient, Spent) as refused:
            self.say(str(refused))
            said["refuses"] = refusals.code_of(refused)
        return Parcel(said)

    def _accept(self, population: object) -> Request:
        """What is asked for, once it was held against the policy; a number of users that changes is refused."""
        if self.request is None:
            self.request = judge(self.policy, self.recipe, population, self.layout, self.roster())
            self.say("\n".join(self.request.lines(self.policy.delta)))
            if self.request.event is not None:
                self.noise = self.own_noise(self.request.plan, self.request.event)
        if type(population) is not int or population != self.request.population:
            raise RefusedByClient(
                refusals.POPULATION,
                f"the server spoke of {self.request.population} users and now of {population!r:.40}; one guarantee "
                "cannot stand for two populations",
            )
        return self.request

    def _claim(self, facts: Mapping[str, Any]) -> None:
        """Pay for all that a server with central trust says that its run costs, before it can draw this client."""
        if self.noise is not None and self.trust == "central":
            for user in self.users:
                self.noise.claim(user, f"{facts.get('run')!s:.64}")

    def own_noise(self, plan: Plan, event: Event) -> OwnNoise:
        """Make what adds this client's noise, and keeps its ledgers."""
        policy = self.policy
        where = ", from a model made elsewhere" if self.begins_elsewhere else ""
        what = f"{self.recipe.task.kind}, trust {self.trust}{where}"
        terms = OwnTerms(policy.state, policy.epsilon, policy.delta, self.recipe.digest, what)
        return OwnNoise(plan, event, terms, self.users)

    def _check_identity(self, facts: Mapping[str, Any]) -> None:
        differs = self.identity.differs(facts)
        if differs:
            raise RefusedByClient(differs[0], f"the server has {differs[1]}")

    def _check(self, facts: Mapping[str, Any]) -> None:
        self._check_identity(facts)
        request, step = self._accept(facts.get("population")), facts.get("step")
        if type(step) is not int or not 0 <= step < request.recipe.run.steps:
            raise RefusedByClient(QUESTION, f"the server asks for step {step!r:.40} of {request.recipe.run.steps}")
        if facts.get("user") not in self.users:
            raise RefusedByClient(
                QUESTION, f"the server asks for user {facts.get('user')!r:.40}; this client has {self.users}"
            )

    def _train(self, parcel: Parcel) -> Parcel:
        facts, weight = parcel.facts, parcel.facts["weight"]
        if type(weight) is not float or not 0 < weight <= 1:
            raise RefusedByClient(QUESTION, f"the server gives user {facts['user']} a weight of {weight!r:.40}")
        self._claim(facts)
        tally = self._update(parcel, weight)
        loss = float("nan") if tally.not_finite else float(tally.loss)
        said: dict[str, Any] = {"loss": loss, "votes": tally.votes, "norms": tally.layer_norms}
        if self.noise is not None and self.trust == "local":
            # Norm and loss of a single user would tell what the noise hides.
            said |= {"loss": 0.0, "norms": [0.0] * len(tally.layer_norms)}
            self.noise.add_local(self.sum, weight, facts["user"], int(facts["step"]))
        return Parcel(self._back(facts) | said, {"update": self.sum.numpy()})

    def _update(self, parcel: Parcel, weight: float) -> Tally:
        """Train and leave w_k u_k in `sum`."""
        facts = parcel.facts
        model = torch.from_numpy(parcel.arrays["model"])
        if model.shape != self.sum.shape or model.dtype != self.sum.dtype or not all_finite(model):
            raise RefusedByClient(
                refusals.MODEL, f"the server's model is {model.dtype} {tuple(model.shape)} or not finite"
            )
        if facts.get("bounds") and not self.adapts:
            raise RefusedByClient(QUESTION, "the server sends bounds, but the recipe's bound is fixed")
        self.trainer.weights[facts["user"]] = weight
        bounds = torch.tensor(facts["bounds"], dtype=torch.float64) if facts.get("bounds") else None
        self.sum.zero_()
        return self.trainer.add_part(model, np.array([facts["user"]]), int(facts["step"]), self.sum, bounds)

    def _back(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: facts[name] for name in ("run", "step", "nonce", "user")} | self.identity.facts()

    def _aggregate(self, kind: str, parcel: Parcel) -> Parcel:
        """One of the exchanges of secure aggregation. What this client does not believe ends the round for it alone."""
        facts, user = parcel.facts, parcel.facts["user"]
        try:
            if kind == KEYS:
                self.sessions[user] = Session(
                    user, str(facts["nonce"]), int(facts["step"]), facts["cohort"], facts["least"], self.roster()
                )
            session = self.sessions.get(user)
            if session is None or (session.nonce, session.step) != (facts["nonce"], facts["step"]):
                raise RefusedByClient(QUESTION, "the server speaks of a round that this client has not begun")
            back = self._back(facts)
            if kind == KEYS:
                return Parcel(back | session.begin())
            if kind == SHARES:
                return Parcel(back | session.deal(facts["peers"]))
            if kind == CONFIRM:
                return Parcel(back | {"signature": session.confirm(facts["arrived"])})
            if kind == UNMASK:
                return Parcel(back | session.shares(facts["signatures"]))
            damaged = session.receive(facts["dealt"], facts["boxes"])
            return Parcel(back | {"damaged": damaged}, {"masked": self._masked(session, parcel)})
        except (Distrust, KeyError, TypeError, ValueError) as error:
            self.sessions.pop(user, None)
            raise RefusedByClient(refusals.PEERS, f"left the round: {error}") from None

    def _masked(self, session: Session, parcel: Parcel) -> Vector:
        if self.noise is None:
            raise RefusedByClient(refusals.REHEARSAL, "distributed trust without noise")
        step, plan = int(parcel.facts["step"]), self.noise.plan
        weight, bound = float(plan.weights.max()), self.trainer.bounder.sensitivity
        self._update(parcel, weight)
        scale = share_scale(plan, bound, session.least)
        ring = ring_for(bound, weight, scale, len(session.cohort), self.sum.numel(), ROUNDING)
        attempt = int.from_bytes(bytes.fromhex(session.nonce)[:7], "big")  # the server's own count may repeat, this not
        self.noise.charge(session.user, step)
        share = noisy_share(self.sum, ring.step, plan, scale, session.user, step, attempt)
        return clamp(ring, share) + session.mask(ring)
