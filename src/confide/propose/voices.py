"""A start for recordings of a few words that everybody may know: simulated people say them first.

A head that begins so costs no privacy, since nobody's recordings are in it. Its words are given, and never read from
the texts: such a list would change with one person's text, the start and so the model with it, and no noise would hide
that. The settings are those of `speech/words/seed`, which were chosen for three words; more words get more utterances,
and fewer base voices, since each voice says every word once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from confide.errors import UserError
from confide.propose.writing import Draft, quoted
from confide.speech.corpus import Corpus, Language
from confide.speech.tokens import Tokens

MOST_WORDS = 100
_VOICES, _SAYINGS = (40, 200), 6_000  # base voices, and how often they say a word in all: about a minute of one core
_PEOPLE, _EACH, _STEPS = 400, 40, 100  # simulated people, utterances of each word, central steps


@dataclass(frozen=True)
class Sayings:
    """Words or phrases that everybody may know, and how many of them an utterance has at most."""

    words: tuple[str, ...]
    in_a_row: int = 1


def read_words(given: str) -> tuple[str, ...]:
    """Words with commas between them, or a file with one word or phrase a line."""
    path = Path(given)
    if "," not in given and path.is_file():
        try:
            listed = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--words {given}: cannot be read as text: {error}") from None
    else:
        listed = given.split(",")
    return tuple(dict.fromkeys(word for each in listed if (word := each.strip())))


def spelled(found: Sayings, corpus: Corpus, tokens: Tokens) -> Sayings:
    """The words as the voices say them and the model writes them."""
    if corpus.language not in get_args(Language) or tokens.letters:
        raise UserError(
            f"--words: the voices speak {', '.join(get_args(Language))}, in their own letters; leave it out"
        )
    words = {word: tokens.normalise(word) for word in found.words}
    unsaid = [word for word, text in words.items() if not text]
    if unsaid or not 0 < len(words) <= MOST_WORDS:
        given = f"{unsaid[0]!r} has no letters" if unsaid else f"there are {len(words)}"
        raise UserError(
            f"--words: {given}; expected 1 to {MOST_WORDS} words or phrases that people say, as in --words yes,no,stop"
        )
    return Sayings(tuple(dict.fromkeys(words.values())), found.in_a_row)


def share_said(found: Sayings, corpus: Corpus, tokens: Tokens) -> float:
    """The share of all utterances that is one of these, or consists of their words."""
    whole, parts = set(found.words), {part for word in found.words for part in word.split()}
    texts = [tokens.normalise(utterance.text) for utterance in corpus.utterances()]
    return sum(text in whole or parts.issuperset(text.split()) for text in texts) / len(texts)


def write_start(name: str, found: Sayings, language: str, model: dict[str, Any]) -> str:
    """The recipe of the start."""
    many = len(found.words)
    voices = max(_VOICES[0], min(_VOICES[1], _SAYINGS // many))
    each = max(3, math.ceil(_EACH * many / (_PEOPLE * (1 + found.in_a_row) / 2)))
    common = {"words": list(found.words), "count": [1, found.in_a_row], "voices": voices}
    common |= {} if language == "en" else {"language": language}

    def people(part: str, count: int, utterances: int) -> dict[str, Any]:
        return {"kind": "population", "part": part, "people": count, "utterances": utterances, **common}

    draft = Draft()
    draft.lines.append(f"description: {quoted(f'{name}: a start, from simulated people who say the same words')}")
    draft.comment(
        f"Written by `confide init`, for {many} words that were given to it. No guarantee covers this list, "
        "which is public with the model: take out what nobody may see."
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
