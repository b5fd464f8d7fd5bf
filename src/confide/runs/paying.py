"""How a run charges the lifetime budget of its population (`privacy.budget`): before each line of its own ledger."""

from __future__ import annotations

import sys

from confide.errors import UserError
from confide.privacy.budget import Budget, BudgetSpent, percent
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.run import Loop


def paying(book: Ledger, people: Budget | None) -> Ledger:
    """Have a ledger charge the budget of its population, under the name that its first line has."""
    if people is None:
        return book
    own = book.header.get("budget") or {}
    if own.get("id") != people.header["id"]:
        raise UserError(f"{people.path} is not the budget that this run began with; put that back. Nothing was done")
    run, what = str(own["run"]), str(book.header["recipe"])

    def pay(step: int, attempt: int, event: Event, environment: str | None) -> None:
        if event.whole_run:
            key = f"whole run, attempt {attempt}"
        else:
            key = "" if environment is None else f"step {step}, attempt {attempt}, {environment}"
        people.charge(run, event, key, what)

    book.pay = pay
    return book


def check_budget(loop: Loop) -> None:
    """Refuse, before anything is trained, a run whose first step cannot be paid; say if not all of them can."""
    path, plan = loop.recipe.privacy.budget, loop.plan
    if path is None or loop.ledger.count > 0:
        return
    people, wanted, bound = Budget.read(path), plan.charges(plan.steps), loop.bounds.bounder.sensitivity
    events = [plan.mechanism.event_at(step, bound) for step in range(plan.steps)]
    if not people.filter.takes(events[0]):
        raise BudgetSpent(
            f"{path} ({people.header['population']}) has not enough left for one step of this run: "
            f"{percent(people.filter.used)} of its epsilon {people.header['epsilon']:g} is used. More noise or smaller "
            "cohorts cost less"
        )
    room = people.filter.room(min(events, key=lambda event: event.noise_multiplier), wanted)
    if room < wanted:
        print(f"{path} pays for {room} of {wanted} releases; the run will stop there", file=sys.stderr, flush=True)
