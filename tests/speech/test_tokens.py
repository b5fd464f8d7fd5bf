"""Text and tokens: sizes, spelling rules per language, and that no text can break them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import UserError
from confide.speech.corpus import Language
from confide.speech.tokens import BLANK, BOUNDARY, Tokens

LANGUAGES = st.sampled_from(get_args(Language))
# Letters, marks, punctuation and symbols of many scripts, and the traps among them.
TEXT = st.text(max_size=60) | st.text(alphabet="aZ é'’-–— .,!/İßŒǅ½€北\u00ad\u0301\ud7ff\n\t0", max_size=40)


def test_english_has_29_tokens_and_the_blank() -> None:
    names = Tokens("en").names
    assert len(names) == 30
    assert (names[BLANK], names[BOUNDARY]) == ("<blank>", "|")
    assert set(names[2:]) == set("'-abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize(("language", "letters"), [("fr", "àâæçéèêëîïôœùûüÿ"), ("de", "äöüß")])
def test_french_and_german_keep_their_letters(language: Any, letters: str) -> None:
    tokens = Tokens(language)
    assert tokens.size == 30 + len(letters)
    assert tokens.normalise(letters.upper().replace("SS", "ß")) == letters
    assert tokens.decode(tokens.encode(letters)) == letters


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "HE HOPED THERE WOULD BE STEW", "he hoped there would be stew"),
        ("en", "“Don’t!”, she said…  then left.", "don't she said then left"),
        ("en", "A well-known café – naïve façade", "a well-known cafe naive facade"),
        ("en", "one—two and/or three - four", "one two and or three four"),
        ("en", "5 o'clock, 3.5 %", "o'clock"),
        ("en", "e.g. U.S.A.", "eg usa"),
        ("en", "Łódź, Ærø, straße", "lodz aero strasse"),
        ("en", "zero\u200bwidth soft\u00adhyphen", "zerowidth softhyphen"),
        ("en", "cafe\u0301", "cafe"),
        ("fr", "L’été, ÇA va-t-il ? Œuvre, señor", "l'été ça va-t-il œuvre senor"),
        ("fr", "e\u0301te\u0301", "été"),
        ("de", "GRÖẞE und Übermut, café", "größe und übermut cafe"),
    ],
)  # fmt: skip
def test_text_is_spelt_as_the_paper_has_it(language: Any, text: str, expected: str) -> None:
    assert Tokens(language).normalise(text) == expected


def test_a_target_has_one_boundary_at_both_ends() -> None:
    tokens = Tokens("en")
    ids = tokens.encode("  Go  on ")
    assert [tokens.names[i] for i in ids] == ["|", "g", "o", "|", "o", "n", "|"]
    assert tokens.encode("?! 12 -") == []


def test_decoding_joins_runs_of_boundaries_and_leaves_blanks_out() -> None:
    tokens = Tokens("en")
    a, b = tokens.names.index("a"), tokens.names.index("b")
    assert tokens.decode([BOUNDARY, BOUNDARY, a, BLANK, a, BOUNDARY, BLANK, BOUNDARY, b, BOUNDARY]) == "aa b"
    assert tokens.decode([]) == ""


@given(LANGUAGES, TEXT)
def test_any_text_becomes_words_of_the_token_set(language: Any, text: str) -> None:
    tokens = Tokens(language)
    words = tokens.normalise(text)
    assert set(words) <= {" ", *tokens.names[2:]}
    assert words == " ".join(words.split())
    assert tokens.normalise(words) == words


@given(LANGUAGES, TEXT)
def test_decoding_undoes_encoding(language: Any, text: str) -> None:
    tokens = Tokens(language)
    ids = tokens.encode(text)
    assert BLANK not in ids
    assert all(0 < i < tokens.size for i in ids)
    assert tokens.decode(ids) == tokens.normalise(text)


def test_versions_tell_token_sets_apart() -> None:
    assert len({Tokens(language).version for language in get_args(Language)}) == 3
    assert Tokens("en").version == Tokens("en").version


def test_an_unknown_language_is_a_users_mistake() -> None:
    unknown: Any = "tlh"
    with pytest.raises(UserError, match=r"'tlh'; expected one of en, fr, de"):
        Tokens(unknown)
