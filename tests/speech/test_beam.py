"""Beam search with an n-gram model says what greedy decoding cannot know."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from confide.errors import UserError
from confide.speech.beam import BeamSearch, BeamSettings, equal_words
from confide.speech.decode import greedy_words

pytest.importorskip("flashlight.lib.text.decoder", reason="flashlight-text is not installed")

NAMES = ("<blank>", "|", "'", "-", *"abcdefghijklmnopqrstuvwxyz")
# "two" follows "one", "too" follows "me"; upper case, as in LibriSpeech's published models.
ARPA = """\
\\data\\
ngram 1=8
ngram 2=5

\\1-grams:
-2.0\t<unk>
-99\t<s>\t-0.3
-0.9\t</s>
-0.8\tONE\t-0.3
-0.8\tME\t-0.3
-0.9\tTWO\t-0.3
-0.9\tTOO\t-0.3
-0.9\tÆON\t-0.3

\\2-grams:
-0.3\t<s> ONE
-0.3\tONE TWO
-2.5\tONE TOO
-0.3\tME TOO
-2.5\tME TWO

\\end\\
"""


@pytest.fixture
def arpa(tmp_path: Path) -> Path:
    path = tmp_path / "words.arpa"
    path.write_text(ARPA, encoding="utf-8")
    return path


def emissions(spoken: list[dict[str, float]]) -> np.ndarray:
    """Logits whose probabilities are those given, with a blank after every frame."""  # (frames, tokens)
    rows = []
    for frame in spoken:
        row = np.full(len(NAMES), 1e-6)
        for letter, share in frame.items():
            row[NAMES.index(letter)] = share
        rows += [row, np.where(np.arange(len(NAMES)) == 0, 1.0, 1e-6)]
    logits: np.ndarray = np.log(np.array(rows)) + 3.0  # a softmax does not care
    return logits.astype(np.float32)


def spoken(first: str, *, last_boundary: bool = True) -> np.ndarray:
    """`first`, then t, something between w and o (o a little more likely), then o."""
    ends = [{"|": 0.99}] if last_boundary else []
    word = [{letter: 0.99} for letter in first]
    return emissions([{"|": 0.9}, *word, {"|": 0.99}, {"t": 0.99}, {"w": 0.45, "o": 0.55}, {"o": 0.99}, *ends])


def plain(logits: np.ndarray) -> str:
    heard = greedy_words(logits, lambda ids: "".join(NAMES[i] for i in ids), boundary=1)
    return " ".join(word.text for word in heard)


def test_the_language_model_decides_an_ambiguous_word_by_its_context(arpa: Path) -> None:
    search = BeamSearch(BeamSettings(language_model=arpa), NAMES)
    assert plain(spoken("one")) == "one too"
    assert search.text(spoken("one")) == "one two"
    assert search.text(spoken("me")) == "me too"
    assert search.skipped == 1  # a letter outside the token set


def test_without_weight_the_sound_decides(arpa: Path) -> None:
    search = BeamSearch(BeamSettings(language_model=arpa, weight=0.0), NAMES)
    assert search.text(spoken("one")) == "one too"


def test_last_word_is_heard_without_a_boundary_behind_it(arpa: Path) -> None:
    search = BeamSearch(BeamSettings(language_model=arpa), NAMES)
    assert search.text(spoken("one", last_boundary=False)) == "one two"


def test_words_are_timed_as_greedy_decoding_times_them(arpa: Path) -> None:
    logits = spoken("me")
    search = BeamSearch(BeamSettings(language_model=arpa), NAMES)
    expected = greedy_words(logits, lambda ids: "".join(NAMES[i] for i in ids), boundary=1)
    assert search.words(logits) == expected


def test_a_decoder_can_be_used_again_and_on_nothing(arpa: Path) -> None:
    search = BeamSearch(BeamSettings(language_model=arpa), NAMES)
    first = search.text(spoken("one"))
    assert search.text(np.zeros((0, len(NAMES)), dtype=np.float32)) == ""
    silence = np.full((12, len(NAMES)), -20.0, dtype=np.float32)
    silence[:, 0] = 0.0
    assert search.text(silence) == ""
    assert search.text(spoken("one")) == first


def test_a_word_list_restricts_what_can_be_heard(arpa: Path, tmp_path: Path) -> None:
    listed = tmp_path / "words.txt"
    listed.write_text("ME\nTWO\n\nME\n")
    search = BeamSearch(BeamSettings(language_model=arpa, words=listed), NAMES)
    assert search.text(spoken("me")) == "me two"


def test_a_model_of_equal_words_hears_each_of_them_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "equal.arpa"
    path.write_text(equal_words(["one", "two", "me"]))
    search = BeamSearch(BeamSettings(language_model=path), NAMES)
    assert search.text(spoken("one")) == "one two"
    assert search.text(spoken("me")) == "me two"
    assert plain(spoken("on")) == "on too"
    assert search.text(spoken("on")) == "one two"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no ARPA file"),
        (b"hello\n", "no ARPA file"),
        (ARPA[:120].encode(), "truncated"),
        (ARPA.replace("ngram 2=5", "ngram 2=6").encode(), "cannot be read as an n-gram model"),
        (ARPA.replace("-0.9\tTWO\t-0.3", "-0.9").encode(), "1-gram without a word"),
        (b"mmap lm http://kheafield.com/code format version\xff\xfe\x80", "is not text"),
        ("\\1-grams:\n-1\tÆØ\n\\end\\\n".encode(), "can be spelt"),
    ],
)
def test_a_broken_model_is_named_with_what_to_do(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.arpa"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        BeamSearch(BeamSettings(language_model=path), NAMES)
    assert str(path) in str(caught.value)


def test_missing_files_and_wrong_shapes_are_named(arpa: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        BeamSearch(BeamSettings(language_model=tmp_path / "none.arpa"), NAMES)
    with pytest.raises(UserError, match=r"expected \(frames, 30\)"):
        BeamSearch(BeamSettings(language_model=arpa), NAMES).words(np.zeros((4, 29), dtype=np.float32))


def test_without_the_library_the_message_says_what_to_install(arpa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("flashlight")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'confide\[beam\]'"):
        BeamSearch(BeamSettings(language_model=arpa), NAMES)
