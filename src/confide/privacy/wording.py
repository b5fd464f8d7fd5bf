"""The statement as text: for somebody who has to judge a guarantee, and does not know the program."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from confide.privacy.accountant import SCALE, shown
from confide.privacy.adversaries import Adversary
from confide.privacy.gaussian import SEEDED_END
from confide.privacy.guarantee import NO_GUARANTEE, Statement
from confide.settings import UNSAID, Unit

WIDTH = 100
NOT_FOR_RELEASE = "For research, not for a release to others."
SEEDED = f"the noise was seeded, and so is repeatable. {NOT_FOR_RELEASE}"


def text(found: Statement) -> str:
    """The whole statement, in lines of at most 100 letters."""
    paragraphs = []
    for title, lines in sections(found):
        wrapped = [
            textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
            for line in lines
        ]
        paragraphs.append("\n".join([title, *wrapped]))
    return "\n\n".join(paragraphs)


def sections(found: Statement) -> Iterator[tuple[str, list[str]]]:
    """Titles, each with its sentences."""
    yield "What is promised", [promise(found), *scaled(found)]
    yield "What a user is", [f"A user is: {found.unit.name}. {found.unit.said}"]
    if found.epsilon is not None:
        yield "How the number arises", list(_accounting(found))
        yield "Against whom", [against(found, place) for place in range(len(found.adversaries))]
    yield "The noise", [noise(found)]
    yield "What is taken as public", found.public
    yield "What is not covered", found.not_covered
    made = f"the ledger whose last line has the hash {found.ledger_head}"
    yield "Where this comes from", [f"It was computed from {made}, {found.releases} releases, recipe {found.recipe}."]


def promise(found: Statement) -> str:
    """The promise, with what epsilon means in a sentence of its own."""
    if found.epsilon is None or found.delta is None:
        return f"{found.words or NO_GUARANTEE}".rstrip(".") + ". No epsilon is stated."
    return (
        f"The models are ({shown(found.epsilon)}, {found.delta:g})-differentially private for every "
        f"{found.unit.name} ({found.adjacency}: {found.neighbours}). "
        f"{meaning(found.epsilon, found.delta, found.unit, found.adjacency)}"
    )


def scaled(found: Statement) -> list[str]:
    """The promise on the one scale of words; nothing where nothing is promised."""
    if found.epsilon is None or found.delta is None:
        return []
    limits = ", ".join(f"up to {most:g} {word}" for word, most in SCALE.items())
    return [f"That is {found.protection}. (The scale is one of words for epsilon: {limits}, above that none.)"]


def meaning(epsilon: float, delta: float, unit: Unit = UNSAID, adjacency: str | None = None) -> str:
    """Epsilon in one sentence, rounded to the unsafe side; "you" only where a user is a person."""
    whom = "you" if unit.person else "a given user"
    what = f"whether {whom} took part"
    if (adjacency or "").startswith("replace"):
        what = f"which of two given sets of data {whom} had"
    right = math.ceil(1000 * guess(epsilon, delta)) / 10
    if right >= 99.95:
        return (
            f"In the worst case that this allows, whoever sees the model and guesses {what} is right practically "
            "always; a coin is right 50 %."
        )
    return (
        f"Whoever sees the model and guesses {what} is right at most {right:.4g} % of the time; a coin is right 50 %."
    )


def guess(epsilon: float, delta: float) -> float:
    """How often a guess about one user's part in it can be right at best; a coin is right half of the time.

    (e^epsilon + delta) / (1 + e^epsilon), by the definition of differential privacy for two hypotheses of equal weight
    (Kairouz, Oh and Viswanath 2015).
    """
    if epsilon > 700:
        return 1.0
    return min(1.0, (math.exp(epsilon) + delta) / (1 + math.exp(epsilon)))


def against(found: Statement, place: int) -> str:
    """One adversary, with its epsilon or the reason why it has none."""
    each = found.adversaries[place]
    stated = f"nothing is stated, because {each.because}"
    if each.epsilon is not None:
        stated = f"epsilon {shown(each.epsilon)} ({each.adjacency}{other_data(each)}); {each.because}"
    return f"{each.said[0].upper()}{each.said[1:]}: {stated}."


def other_data(each: Adversary) -> str:
    """Epsilon for any two data sets of a user, where it is another one."""
    if each.epsilon_replaced in (None, each.epsilon):
        return ""
    return f"; {shown(each.epsilon_replaced)} for any other data"


def sampling(found: Statement) -> str:
    """The sampler that was accounted for, and the one that drew the cohorts."""
    if found.sampler is None:
        return "Nothing was released."
    done = "this ledger does not say how" if found.sampler.done is None else found.sampler.done
    coins = {"seeded": ", from the run's seed", "system": ", from the operating system"}
    return (
        f"Accounted for: {found.sampler.assumed_said}. Cohorts were drawn: {done}"
        f"{coins.get(found.sampler.drawn_from or '', '')}."
    )


def noise(found: Statement) -> str:
    """What was added, and whether it may be released."""
    if found.epsilon is None:
        return "None that a guarantee could be stated from."
    least = f"{found.noise.least_multiplier:.4g} times what one user can add"
    said = f"At least {least}, in each of {found.releases} releases."
    if found.noise.counts:
        numbers = "a number" if found.noise.counts == 1 else f"{found.noise.counts} numbers"
        said += (
            f" A release is the update together with {numbers} about the cohort (counts of an adaptive bound, "
            "figures), which have noise of their own: epsilon is for all of it."
        )
    if found.noise.for_release:
        return f"{said} The noise came from the operating system and is stored nowhere: the models can be released."
    return f"{said} {seeded(found.noise.least_multiplier)}"


def seeded(multiplier: float) -> str:
    """What seeded noise does not promise; in double precision it ends later, so that this holds there as well."""
    beyond = math.erfc((SEEDED_END - 1 / multiplier) / math.sqrt(2)) / 2 if multiplier > 0 else 1.0
    return (
        "The noise was seeded, which makes the run repeatable: whoever knows the seed can subtract it. In single "
        f"precision it also ends at {SEEDED_END:.3g} deviations, which delta does not count: an update on one "
        f"coordinate shows beyond that end with probability {beyond:.1e} in a step. {NOT_FOR_RELEASE}"
    )


def gaussian(found: Statement) -> str:
    """mu, and what it is."""
    if found.mu is None:
        return ""
    if found.mu.exact:
        return f"Gaussian-DP: mu {shown(found.mu.value)}, exactly (Gaussian releases without sampling)."
    return (
        f"Gaussian-DP: mu {shown(found.mu.value)} covers every point of the curve with an epsilon above 0; "
        "between and beyond these points it is no proof."
    )


def _accounting(found: Statement) -> Iterator[str]:
    both = {"PLD": found.epsilon_pld, "RDP": found.epsilon_rdp}
    stated = ", ".join(f"{shown(value)} by {name}" for name, value in both.items() if value is not None)
    none = " and ".join(name for name, value in both.items() if value is None)
    missing = f"; {none} has no proof here" if none else ""
    yield f"Epsilon at delta {found.delta:g}: {stated}{missing}. Every one is an upper bound."
    yield sampling(found)
    yield f"{found.releases} releases over {found.steps} central steps."
    if found.mu is not None:
        yield gaussian(found)
    if found.profile:
        points = ", ".join(f"{shown(point.epsilon)} at {point.delta:g}" for point in found.profile)
        yield f"The curve, epsilon at delta: {points}."
