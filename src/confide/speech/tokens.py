"""Text and tokens of PFL-ASR (appendix F, "Token Set" and "Data preprocessing").

English is written with 26 letters, hyphen and apostrophe; together with the word boundary that makes 29 tokens, and
the head has one output more, for the blank of CTC. French and German keep their own letters too. Text becomes lower
case, punctuation other than hyphen and apostrophe is removed, and letters outside the set are folded into it by
Unidecode. A target has one boundary token at both ends, as in the released code.

The blank is token 0 and the boundary token 1; apostrophe, hyphen and the letters in alphabetical order follow.

Differs from the paper, which leaves these open: a dash or a slash between words separates them instead of joining
them, typographic apostrophes and hyphens count as plain ones, and a word without a letter (a lone hyphen) is dropped.
What has no letters to be folded into (digits, symbols) is removed: a corpus that spells numbers in digits has to be
spelt out before.
"""

from __future__ import annotations

import hashlib
import string
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args

from confide.errors import UserError
from confide.speech.corpus import Language

BLANK = 0
BOUNDARY = 1

# Part of every cache's key: change it whenever the same text would give other tokens.
_SCHEME = 1
_OWN_LETTERS = {"en": "", "fr": "àâæçèéêëîïôùûüÿœ", "de": "ßäöü"}
_APOSTROPHES = "'’‘‛ʼʹ′`´＇"
_HYPHENS = "-‐‑－"
# A word ends at these: white space is handled by itself, the other dashes by their category.
_SEPARATORS = "/\\_…|"


@dataclass(frozen=True)
class Tokens:
    """The token set of one language, which turns text into token numbers and back."""

    language: Language

    def __post_init__(self) -> None:
        if self.language not in get_args(Language):
            raise UserError(
                f"there is no token set for the language {self.language!r}; expected one of "
                f"{', '.join(get_args(Language))}: correct the corpus's language"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        return ("<blank>", "|", "'", "-", *string.ascii_lowercase, *_OWN_LETTERS[self.language])

    @property
    def size(self) -> int:
        """How many outputs a model needs, the blank among them."""
        return len(self.names)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {" ": BOUNDARY} | {name: number for number, name in enumerate(self.names) if len(name) == 1}

    @property
    def version(self) -> str:
        """A digest that changes whenever the same text would give other tokens."""
        return hashlib.sha256(f"{_SCHEME} {' '.join(self.names)}".encode()).hexdigest()[:16]

    def normalise(self, text: str) -> str:
        """Fold a text into words of the token set's characters, separated by single spaces."""
        lowered = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
        letters = frozenset(self.names[4:])
        folded = "".join(character if character in letters else _fold(character) for character in lowered)
        return " ".join(word for word in folded.split() if not letters.isdisjoint(word))

    def encode(self, text: str) -> list[int]:
        """Token numbers with one boundary at both ends; an empty list if folding leaves no word."""
        words = self.normalise(text)
        return [BOUNDARY, *(self._numbers[character] for character in words), BOUNDARY] if words else []

    def decode(self, ids: Iterable[int]) -> str:
        """The words of a label sequence: blanks are left out, runs of boundaries become single spaces.

        Repeated labels stay, since the decoder has merged those of CTC.
        """
        characters = ("" if i == BLANK else " " if i == BOUNDARY else self.names[i] for i in map(int, ids))
        return " ".join("".join(characters).split())


@cache
def _fold(character: str) -> str:
    """Replace a character that is no letter of the language by plain letters, a space, or nothing."""
    if character in _APOSTROPHES:
        return "'"
    if character in _HYPHENS:
        return "-"
    category = unicodedata.category(character)
    if character.isspace() or character in _SEPARATORS or category == "Pd":
        return " "
    if category.startswith(("P", "C")):
        return ""
    from unidecode import unidecode

    plain: str = unidecode(character).lower()
    # Folding into anything but letters ("1/2", "(c)") is no spelling of a word.
    return plain if all(c == " " or c in string.ascii_lowercase for c in plain) else ""
