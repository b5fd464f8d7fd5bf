"""Error rates are corpus totals, and their intervals cover what they should."""

from __future__ import annotations

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import UserError
from confide.speech.scores import Transcribed, error_counts

sentences = st.lists(st.sampled_from(["one", "two", "three", "on", "to"]), max_size=6).map(" ".join)


def distance(a: list[str], b: list[str]) -> int:
    """Levenshtein's recursion, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row, before = [i], row
        for j, y in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
    return row[-1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(sentences, sentences), max_size=6))
def test_counts_are_edit_distances(pairs: list[tuple[str, str]]) -> None:
    references, hypotheses = [r for r, _ in pairs], [h for _, h in pairs]
    in_words = error_counts(references, hypotheses, characters=False)
    in_characters = error_counts(references, hypotheses, characters=True)
    assert in_words.tolist() == [[distance(r.split(), h.split()), len(r.split())] for r, h in pairs]
    assert in_characters.tolist() == [[distance(list(r), list(h)), len(r)] for r, h in pairs]


def test_rates_are_totals_not_means_of_utterances_and_agree_with_jiwer() -> None:
    references = ["one two three four five six", "one", "two two"]
    hypotheses = ["one two three four five six", "two", "two"]
    got = Transcribed(references, hypotheses, ["a", "b", "b"]).score()
    assert got.wer.value == jiwer.wer(references, hypotheses) == 2 / 9
    assert got.cer.value == jiwer.cer(references, hypotheses)
    assert (got.wer.errors, got.wer.total) == (2, 9)
    assert [(s.name, s.wer, s.words) for s in got.speakers] == [("b", 2 / 3, 3), ("a", 0.0, 6)]  # the worst first


def test_words_heard_in_an_empty_reference_are_insertions() -> None:
    got = Transcribed(["one two", ""], ["one two", "three four"], ["a", "b"]).score()
    assert got.wer.value == 1.0
    assert got.empty_references == 1
    assert [(speaker.name, speaker.wer) for speaker in got.speakers] == [("a", 0.0)]  # b has no word to divide by
    assert got.wer.high >= got.wer.value >= got.wer.low


def test_interval_repeats_and_widens_with_the_level() -> None:
    draw = np.random.default_rng(3)
    hypotheses = [("one two" if good else "one") for good in draw.random(60) < 0.7]
    found = Transcribed(["one two"] * 60, hypotheses, [str(i % 12) for i in range(60)])
    a = found.score()
    assert a == found.score()
    narrow = found.score(level=0.5)
    assert a.wer.low < narrow.wer.low < a.wer.value < narrow.wer.high < a.wer.high


def test_interval_is_over_speakers_not_utterances() -> None:
    # Half of the speakers are never understood, the others always: utterances of a speaker are one observation.
    speakers = [str(i // 20) for i in range(200)]
    hypotheses = ["one" if int(s) % 2 else "two" for s in speakers]
    by_speaker = Transcribed(["one"] * 200, hypotheses, speakers).score().wer
    by_utterance = Transcribed(["one"] * 200, hypotheses, [str(i) for i in range(200)]).score().wer
    expected = 2 * 1.96 * 0.5 / np.sqrt(10)
    assert by_speaker.high - by_speaker.low == pytest.approx(expected, rel=0.15)
    assert by_utterance.high - by_utterance.low == pytest.approx(expected / np.sqrt(20), rel=0.15)


def test_a_single_speaker_has_an_interval_from_its_utterances() -> None:
    got = Transcribed(["one"] * 50, ["one"] * 25 + ["two"] * 25, ["a"] * 50).score().wer
    assert 0.3 < got.low < 0.45
    assert 0.55 < got.high < 0.7


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        rates = draw.beta(2, 6, size=40)  # speakers differ; the mean is 0.25
        wrong = draw.random((40, 4)) < rates[:, None]
        hypotheses = np.where(wrong, "x", "one").ravel().tolist()
        speakers = np.repeat(np.arange(40), 4).astype(str).tolist()
        got = Transcribed(["one"] * 160, hypotheses, speakers).score(resamples=300)
        covered += got.wer.low <= 0.25 <= got.wer.high
    assert 86 <= covered <= 99


def test_nothing_to_score_against_and_unequal_lists_are_errors() -> None:
    with pytest.raises(UserError, match="none of 1 references has a word"):
        Transcribed([""], ["one"], ["a"])
    with pytest.raises(UserError, match="2 references, 1 hypotheses and 2 speakers"):
        Transcribed(["one", "two"], ["one"], ["a", "b"])
    with pytest.raises(UserError, match="level between 0 and 1"):
        Transcribed(["one"], ["one"], ["a"]).score(level=95)
