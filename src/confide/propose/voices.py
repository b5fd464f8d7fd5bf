"""A start for recordings of few words: simulated people say the same words, and a head learns from them first.

That costs no privacy, since nobody's recordings are in it. What it needs is the list of words, which is read from the
texts. Nothing adds noise to that list, so only what `_LEAST` people, and one person in `_ONE_IN`, say is on it, and
whoever uses the recipe has to look at it. The settings are those of `speech/words/seed`, which were chosen for three
words; more words get more utterances, and fewer base voices, since each voice says every word once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from confide.propose.writing import Draft, quoted
from confide.speech.corpus import Corpus, Language
from confide.speech.tokens import Tokens

MOST_WORDS = 100
_LEAST, _ONE_IN = 5, 100
_COVERED = 0.95  # of what is said
_VOICES, _SAYINGS = (40, 200), 6_000  # base voices, and how often they say a word in all: about a minute of one core
_PEOPLE, _EACH, _STEPS = 400, 40, 100  # simulated people, utterances of each word, central steps


@dataclass(frozen=True)
class Sayings:
    """What people say: words or phrases, and the fewest and most of them in an utterance."""

    words: tuple[str, ...]
    count: tuple[int, int]


def sayings(corpus: Corpus, tokens: Tokens) -> Sayings | str:
    """The few words that nearly everything consists of; or why there is no such list."""
    if corpus.language not in get_args(Language) or tokens.letters:
        return f"the voices speak {', '.join(get_args(Language))}, in their own letters"
    said = {
        person: [text for utterance in own if (text := tokens.normalise(utterance.text))]
        for person, own in corpus.speakers.items()
    }
    whole = _common(said)
    if whole is not None:
        return Sayings(whole, (1, 1))
    words = _common({person: [word for text in own for word in text.split()] for person, own in said.items()})
    if words is not None:
        lengths = sorted(len(text.split()) for own in said.values() for text in own)
        few, many = lengths[len(lengths) // 20], lengths[-1 - len(lengths) // 20]
        return Sayings(words, (min(few, 50), min(many, 50)))
    return (
        f"{_COVERED:.0%} of what is said would have to be at most {MOST_WORDS} words or phrases, each said by "
        f"{_least(len(said))} people or more"
    )


def _least(people: int) -> int:
    return max(_LEAST, math.ceil(people / _ONE_IN))


def _common(said: dict[str, list[str]]) -> tuple[str, ...] | None:
    """What enough people say, if it is not much and nearly everything."""
    people = Counter(each for own in said.values() for each in set(own))
    times = Counter(each for own in said.values() for each in own)
    common = sorted(each for each, many in people.items() if many >= _least(len(said)))
    covered = sum(times[each] for each in common)
    return tuple(common) if 0 < len(common) <= MOST_WORDS and covered >= _COVERED * times.total() else None


def write_start(name: str, found: Sayings, language: str, model: dict[str, Any]) -> str:
    """The recipe of the start."""
    many = len(found.words)
    voices = max(_VOICES[0], min(_VOICES[1], _SAYINGS // many))
    each = max(3, math.ceil(_EACH * many / (_PEOPLE * sum(found.count) / 2)))
    common = {"words": list(found.words), "count": list(found.count), "voices": voices}
    common |= {} if language == "en" else {"language": language}

    def people(part: str, count: int, utterances: int) -> dict[str, Any]:
        return {"kind": "population", "part": part, "people": count, "utterances": utterances, **common}

    draft = Draft()
    draft.lines.append(f"description: {quoted(f'{name}: a start, from simulated people who say the same words')}")
    draft.comment(
        f"Written by `confide init`. The words were read from the recordings' texts without noise: {many} that "
        "several people say. No guarantee covers this list: take out what nobody may see."
    )
    fields: Sequence[tuple[str, Any, str]] = (
        ("kind", "speech", ""),
        ("corpus", people("seed", _PEOPLE, each), "Synthetic voices; nobody's recordings are in this run."),
        ("test", people("validation", _PEOPLE // 4, 3), ""),
        ("model", model, ""),
    )
    draft.block("task", fields)
    draft.section("sampling", kind="fixed", cohort=_PEOPLE)
    draft.section("local", steps=1, learning_rate=1.0)
    draft.section("bounding", rule="normalise", bound=1.0)
    schedule = {"kind": "linear", "steps": _STEPS}
    draft.section("central", kind="sgd", learning_rate=1.0, momentum=0.9, schedule=schedule)
    draft.section("evaluation", every=_STEPS // 2)
    draft.section("run", steps=_STEPS, checkpoint_every=_STEPS // 2)
    draft.check(f"{name}-start")
    return draft.text


def run_of(name: str) -> Path:
    """Where the start is trained to, as the recipe that begins with it says."""
    return Path("runs") / f"{name}-start"
