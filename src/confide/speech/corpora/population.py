"""A population to practise on: simulated people in any number, each with a few utterances (see `personas`).

It serves what no corpus at hand does: PFL-ASR's own regime, cohorts of hundreds out of tens of thousands of users. Only
the pool of base voices is kept on disk. People of different parts are other people and, unless `new_voices` is false,
have base voices of other accents and variants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from confide.errors import UserError
from confide.settings import LocalPath, Section
from confide.speech.corpora.shares import assign_at_random
from confide.speech.corpus import SAMPLE_RATE, Corpus, Language, Progress, Utterance
from confide.speech.grammar import DIGITS
from confide.speech.pool import Part, PoolSettings, open_pool
from confide.speech.tokens import Tokens

if TYPE_CHECKING:
    from confide.speech.corpus import Samples
    from confide.speech.personas import Crowd

# Part of every address: change it whenever the same settings would give other sound.
_SCHEME = 1


class PopulationSettings(Section):
    """Simulated people in any number, who say words; nothing is stored for any of them."""

    kind: Literal["population"] = "population"
    language: Language = Field("en", description="en, fr or de")
    part: Part = Field("train", description="seed, train, validation or test: other people each")
    people: int = Field(2_000, gt=0, le=1_000_000, description="how many people")
    utterances: int = Field(2, gt=0, le=9_999, description="how many utterances each")
    words: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=500, description="words or phrases to say; none: the digits"
    )
    count: tuple[int, int] = Field((1, 3), description="fewest and most of the words in an utterance")
    voices: int = Field(200, gt=0, le=2_000, description="base voices that the people of a part borrow from")
    telephones: float = Field(
        0.0, ge=0, le=1, exclude_if=lambda value: value == 0,
        description="share of the people whose recordings have nothing above 3.4 to 4 kHz, as over a telephone",
    )  # fmt: skip
    new_voices: bool = Field(True, description="base voices of the part's own; false: those of train")
    users: Literal["speakers", "iid"] = Field(
        "speakers", description="a user is a person, or (the control) each utterance gets a user drawn uniformly"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="another seed gives other people over the same base voices")
    cache: LocalPath | None = Field(None, description="where base voices are kept; none: the user's cache folder")

    @field_validator("count")
    @classmethod
    def _in_order(cls, count: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= count[0] <= count[1] <= 50:
            raise ValueError(f"count={count} must be two numbers from 1 to 50, the smaller one first")
        return count

    def read(self, progress: Progress | None = None) -> Corpus:
        """List what everybody says. The sound is made when it is read."""
        from confide.speech.personas import Crowd

        words = self._spelt()
        pool = PoolSettings(self.language, self.part if self.new_voices else "train", self.voices, words)
        purpose = f"population/{self.language}/{self.part}"
        crowd = Crowd(open_pool(pool, self.cache), self.seed, purpose, self.count, self.telephones)
        line = f"/{self.telephones}" if self.telephones else ""
        common = f"{_SCHEME}/{pool.digest}/{purpose}/{self.count}/{self.seed}{line}"
        speakers = {}
        for person, sayings in enumerate(crowd.sayings(self.people, self.utterances)):
            name = f"{self.language}-{self.part}-{person:06d}"
            speakers[name] = [
                Utterance(
                    f"{name}-{number:04d}", name, (), saying.length / SAMPLE_RATE,
                    " ".join(words[word] for word in saying.words),
                    Spoken(crowd, person, number, saying.length, common),
                )
                for number, saying in enumerate(sayings)
            ]  # fmt: skip
        corpus = Corpus(f"population-{self.part}", self.language, speakers, [])
        return assign_at_random(corpus, self.seed) if self.users == "iid" else corpus

    def _spelt(self) -> tuple[str, ...]:
        """The words as the tokens spell them, so that an utterance's text is what is said."""
        asked = self.words or DIGITS[self.language]
        tokens = Tokens(self.language)
        empty = [word for word in asked if not tokens.normalise(word)]
        if empty:
            raise UserError(f"words={', '.join(empty)}: no letter of {self.language!r} is in it; expected words to say")
        return tuple(dict.fromkeys(tokens.normalise(word) for word in asked))


@dataclass(frozen=True, slots=True)
class Spoken:
    """One utterance of one person, computed whenever it is read."""

    crowd: Crowd
    person: int
    utterance: int
    length: int
    common: str

    held = False

    @property
    def address(self) -> str:
        return f"{self.common}/{self.person}/{self.utterance}"

    def samples(self) -> Samples:
        return self.crowd.speak(self.person, self.utterance)
