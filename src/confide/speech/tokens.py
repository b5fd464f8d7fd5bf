"""Text and tokens of PFL-ASR (appendix F, "Token Set" and "Data preprocessing").

English is written with 26 letters, hyphen and apostrophe; together with the word boundary that makes 29 tokens, and
the head has one output more, for the blank of CTC. French and German keep their own letters too. Text becomes lower
case, punctuation other than hyphen and apostrophe is removed, and letters outside the set are folded into it by
Unidecode. A target has one boundary token at both ends, as in the released code.

The blank is token 0 and the boundary token 1; apostrophe, hyphen and the letters in alphabetical order follow.

Differs from the paper, which leaves these open: a dash or a slash between words separates them instead of joining
them, typographic apostrophes and hyphens count as plain ones, and a word without a letter (a lone hyphen) is dropped.
What has no letters to be folded into (digits, symbols) is removed; `damage` says of a text what would be, and with
`spelled` digits become words first, by num2words. A year is read as a number.

A recipe may bring letters of its own, for any language that is written in letters; then these alone are the set.
"""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, get_args

from pydantic import AfterValidator

from confide.errors import UserError, require
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


def _check_letters(letters: str) -> str:
    if len(set(letters)) < len(letters) or letters != unicodedata.normalize("NFC", letters.lower()):
        raise ValueError("Input should be each letter once, in lower case")
    wrong = [letter for letter in letters if unicodedata.category(letter)[0] not in "LM" or letter in _APOSTROPHES]
    if wrong or not letters:
        raise ValueError(f"Input should be letters alone, without {''.join(wrong) or 'spaces'!r}")
    return letters


Letters = Annotated[str, AfterValidator(_check_letters)]
"""The letters of a token set in a recipe."""
# Digits, with the marks that stand between them, and what makes an ordinal of them in English.
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:(?:st|nd|rd|th)\b)?", re.IGNORECASE)


def has_letters(language: str) -> bool:
    """Whether a language has a token set here, without one of the recipe's."""
    return language in get_args(Language)


@dataclass(frozen=True)
class Tokens:
    """The token set of one language, which turns text into token numbers and back."""

    language: str
    letters: str = ""
    """Those of the recipe; none: the language's own."""
    spelled: bool = False
    """Whether numbers in digits become words."""

    def __post_init__(self) -> None:
        if not self.letters and not has_letters(self.language):
            raise UserError(
                f"there is no token set for the language {self.language!r}; expected one of "
                f"{', '.join(get_args(Language))}: correct the corpus's language, or give its letters in task.letters"
            )
        if self.spelled:
            require("formats", "task.numbers=spell")
            from num2words import CONVERTER_CLASSES  # type: ignore[import-untyped]

            if self.language not in CONVERTER_CLASSES:
                raise UserError(
                    f"task.numbers=spell: num2words cannot count in {self.language!r}; spell the numbers out in the "
                    "texts, or leave numbers out"
                )

    @cached_property
    def names(self) -> tuple[str, ...]:
        letters = self.letters or string.ascii_lowercase + _OWN_LETTERS[self.language]
        return ("<blank>", "|", "'", "-", *letters)

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
        spelled = f" numbers in {self.language}" if self.spelled else ""
        return hashlib.sha256(f"{_SCHEME} {' '.join(self.names)}{spelled}".encode()).hexdigest()[:16]

    def normalise(self, text: str) -> str:
        """Fold a text into words of the token set's characters, separated by single spaces."""
        spelled = _NUMBER.sub(self._spell, text) if self.spelled else text
        lowered = unicodedata.normalize("NFC", unicodedata.normalize("NFC", spelled).lower())
        letters = frozenset(self.names[4:])
        kept = letters | frozenset("'- ")
        folded = "".join(
            character if character in letters else "".join(c for c in _fold(character) if c in kept)
            for character in lowered
        )
        return " ".join(word for word in folded.split() if not letters.isdisjoint(word))

    def _spell(self, number: re.Match[str]) -> str:
        """A number in words: the last mark is a decimal point where the language writes it so."""
        from num2words import num2words

        text = number[0].lower()
        ordinal = text[-1].isalpha()
        if ordinal and self.language != "en":
            return text  # 3rd is English
        digits = text[:-2] if ordinal else text
        point, between = (".", ",") if self.language == "en" else (",", ".")
        digits = digits.replace(between, "")
        if digits.count(point) > 1:
            digits = digits.replace(point, " ")
        words = [
            num2words(part.replace(point, ".") if point in part else int(part), lang=self.language,
                      to="ordinal" if ordinal else "cardinal")
            for part in digits.split()
        ]  # fmt: skip
        return f" {' '.join(words)} "

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


def damage(tokens: Tokens, text: str) -> set[str]:
    """What normalising does to a text beyond case and punctuation: `digits removed`, `letters folded`, ..."""
    if tokens.spelled:
        text = _NUMBER.sub("", text)
    found: set[str] = set()
    for character in set(unicodedata.normalize("NFC", text).lower()) - set(tokens.names):
        category, folded = unicodedata.category(character)[0], tokens.normalise(character)
        if category == "N":
            found.add("digits removed")
        elif category == "S" and character not in _APOSTROPHES:
            found.add("symbols removed")
        elif category in "LM":
            found.add("letters folded" if folded else "letters removed")
    return found


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
