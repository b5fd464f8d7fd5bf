"""Intervals cover what they say they cover; real differences are found, and alike models are told alike."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import UserError
from confide.federated.intervals import difference, difference_of_means, holm, interval, interval_of_mean
from confide.federated.items import Items, number_names
from confide.files import digest


def answers(right: np.ndarray, test: str = "t") -> Items:
    size = len(right)
    return Items("accuracy", "higher", 1.0, "class", False, ("a",), np.zeros(size, np.int64), right.astype(float),
                 np.ones(size), test)  # fmt: skip


def speakers(errors: np.ndarray, words: np.ndarray, owner: np.ndarray) -> Items:
    names = tuple(map(str, range(int(owner.max()) + 1)))
    return Items("wer", "lower", 100.0, "speaker", True, names, owner, errors.astype(float), words.astype(float), "t")


def test_an_interval_of_an_accuracy_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, inside = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval(answers(draw.random(300) < 0.8), resamples=500)
        inside += low <= 0.8 <= high
    assert 180 <= inside <= 199  # 95 % of 200 is 190, with a deviation of 3


def test_an_interval_over_speakers_is_wider_than_one_that_takes_utterances_for_independent() -> None:
    draw = np.random.default_rng(1)
    owner, words = np.repeat(np.arange(20), 30), np.full(600, 10)
    errors = draw.binomial(10, np.repeat(draw.random(20), 30))
    grouped_items = speakers(errors, words, owner)
    loose = Items("wer", "lower", 100.0, "utterance", False, ("a",), np.zeros(600, np.int64), errors.astype(float),
                  words.astype(float), "t")  # fmt: skip
    (a, b), (c, d) = interval(grouped_items), interval(loose)
    assert b - a > 2 * (d - c)


def test_alike_models_are_called_different_in_about_one_of_twenty_cases() -> None:
    draw = np.random.default_rng(2)
    found = [
        difference(answers(draw.random(200) < 0.7), answers(draw.random(200) < 0.7), resamples=400).p
        for _ in range(200)
    ]
    assert 2 <= sum(p < 0.05 for p in found) <= 20


def test_a_paired_difference_finds_what_two_separate_intervals_would_miss() -> None:
    draw = np.random.default_rng(3)
    words, hard = np.full(24, 100), draw.integers(5, 95, 24)
    first = speakers(hard, words, np.arange(24))
    second = speakers(np.maximum(hard - draw.integers(1, 5, 24), 0), words, np.arange(24))
    (low, _), (_, high) = interval(first), interval(second)
    found = difference(first, second)
    assert low < high  # the intervals overlap
    assert found.p < 0.001
    assert found.low < found.value < found.high < 0
    assert found.value == pytest.approx(second.value - first.value)


def test_three_speakers_are_too_few_to_tell_whatever_they_say() -> None:
    words = np.full(3, 100)
    one, two = (speakers(np.array(e), words, np.arange(3)) for e in ([90, 80, 95], [1, 2, 3]))
    assert difference(one, two).p == pytest.approx(2 / 8)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=8))
def test_the_exact_test_is_the_share_of_all_swaps(gaps: list[int]) -> None:
    size = len(gaps)
    base = np.full(size, 20)
    one, two = (speakers(e, np.full(size, 50), np.arange(size)) for e in (base, base + np.array(gaps)))
    swaps = [abs(sum(s * g for s, g in zip(signs, gaps, strict=True))) for signs in product((1, -1), repeat=size)]
    assert difference(one, two).p == pytest.approx(np.mean([s >= abs(sum(gaps)) for s in swaps]))


def test_models_on_other_test_sets_are_refused() -> None:
    with pytest.raises(UserError, match="different test sets"):
        difference(answers(np.ones(5)), answers(np.ones(5), "other"))


def test_holm_raises_p_values_in_steps_and_keeps_their_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_items_come_back_from_json_as_they_were_and_names_of_test_sets_depend_on_content() -> None:
    names, places = number_names(["b", "a", "b"])
    items = Items("wer", "lower", 100.0, "speaker", True, names, places, np.array([1.0, 0.5, 2]), np.ones(3), "t")
    again = Items.from_json(items.to_json())
    assert again.to_json() == items.to_json()
    assert again.value == items.value == pytest.approx(100 * 3.5 / 3)
    assert [row[:3] for row in items.table()] == [("b", 150.0, 2), ("a", 50.0, 1)]
    assert digest(["ab", "c"]) != digest(["a", "bc"]) != digest(["a", "cb"])


def test_means_over_seeds_are_judged_as_scipy_judges_them() -> None:
    from scipy import stats  # type: ignore[import-untyped]

    draw = np.random.default_rng(0)
    one, two = draw.normal(10, 1, 5), draw.normal(11, 2, 5)
    low, high = interval_of_mean(one.tolist())
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 4, one.mean(), stats.sem(one)))
    paired = difference_of_means(dict(enumerate(one)), dict(enumerate(two)))
    expected = stats.ttest_rel(two, one)
    assert (paired.value, paired.p) == pytest.approx((two.mean() - one.mean(), expected.pvalue))
    assert (paired.low, paired.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    welch = difference_of_means(dict(enumerate(one)), {seed + 1: value for seed, value in enumerate(two)})
    expected = stats.ttest_ind(two, one, equal_var=False)
    assert welch.p == pytest.approx(expected.pvalue)
    assert (welch.low, welch.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_alike_recipes_are_called_different_in_about_one_of_twenty_cases() -> None:
    draw = np.random.default_rng(1)
    for seeds in ((range(3), range(3)), (range(3), range(5, 9))):
        draws = [[{seed: float(draw.normal()) for seed in own} for own in seeds] for _ in range(1000)]
        found = [difference_of_means(one, two).p < 0.05 for one, two in draws]
        assert 0.02 < np.mean(found) < 0.08


def test_seeds_that_agree_to_the_last_digit_are_no_proof() -> None:
    """Figures of few test items are often equal; a spread of nothing would make any difference certain."""
    assert difference_of_means({0: 1.0, 1: 1.1}, {0: 2.0, 1: 2.1}).p == 1.0
    assert difference_of_means({0: 1.0, 1: 1.0}, {2: 2.0, 3: 2.0}).p == 1.0
