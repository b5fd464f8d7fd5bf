"""Intervals and comparisons of test scores by resampling (Efron and Tibshirani 1993; for speech Bisani and Ney 2004).

The only bootstrap of the package: a run's page, `confide compare` and `confide evaluate` all ask here.

The interval of a metric is the percentile bootstrap over the units that are independent: speakers for speech, because
utterances of one speaker resemble each other, else test items. Two models on one test set are compared in pairs: the
same units are drawn for both, so that what makes a unit hard for both cancels.

A paired randomisation test (Noreen 1989) decides whether a difference is real: if the models were alike, swapping their
answers on any unit would change nothing, so the observed difference is held against those after random swaps. With few
units the test cannot reject; the bootstrap alone would be too sure of itself there. Where several pairs are tested,
Holm's method raises the p-values, so that the chance of one false alarm in the whole table stays at 5 %.

Runs of one recipe with several seeds are another question: what would another seed give? There the values themselves
are the sample, and Student's t judges their mean (`interval_of_mean`, `difference_of_means`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from confide.errors import UserError
from confide.federated.items import Items
from confide.randomness import generator

RESAMPLES = 5000
LEVEL = 0.95
_AT_ONCE = 2_000_000  # numbers in one block of draws: 16 MB


@dataclass(frozen=True)
class Difference:
    """The second minus the first, in units of the metric."""

    value: float
    low: float
    high: float
    p: float
    """Of a difference at least as large if the two were alike."""
    units: int
    """How many test units, or seeds, it rests on."""


def interval(items: Items, level: float = LEVEL, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The metric's interval, in units of the metric.

    The draws do not depend on the run: every place that states an interval of the same answers states the same one.
    """
    _, units = np.unique(items.units, return_inverse=True)
    return _resampled_interval(*items.sums(units), items.scale, level, resamples)


def difference(first: Items, second: Items, level: float = LEVEL, resamples: int = RESAMPLES) -> Difference:
    """How two models differ on the same items."""
    if (first.test, first.metric) != (second.test, second.metric) or len(first.counts) != len(second.counts):
        raise UserError("two runs with different test sets or metrics cannot be compared; expected the same test set")
    _, units = np.unique(first.units, return_inverse=True)
    (one, sizes), (two, _) = first.sums(units), second.sums(units)
    gaps = two - one  # (units,)
    value = first.scale * gaps.sum() / sizes.sum()
    low, high = _resampled_interval(gaps, sizes, first.scale, level, resamples)
    return Difference(float(value), low, high, _share_of_swaps(gaps, resamples), len(gaps))


def holm(values: Sequence[float]) -> list[float]:
    """p-values raised so that all of them together keep the level (Holm 1979)."""
    order, given = np.argsort(values), np.asarray(values, dtype=np.float64)
    raised = np.empty(len(given))
    raised[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(given), 0, -1) * given[order]))
    return raised.tolist()


def interval_of_mean(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of two values or more."""
    given = np.asarray(values, dtype=np.float64)
    return _t_interval(float(given.mean()), _error_of_mean(given), len(given) - 1, level)


def difference_of_means(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Difference:
    """How the means of two recipes differ, from the values of two seeds or more of each.

    Recipes with the same seeds are paired by them; else it is Welch's test. Where all seeds agree to the last digit
    there is no spread to judge by, and the difference counts as not shown.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    one, two = (np.array([each[seed] for seed in sorted(each)], dtype=np.float64) for each in (first, second))
    value = float(two.mean() - one.mean())
    if first.keys() == second.keys():
        error, freedom = _error_of_mean(two - one), float(len(one) - 1)
    else:
        parts = [_error_of_mean(one) ** 2, _error_of_mean(two) ** 2]
        error = float(np.sqrt(sum(parts)))
        below = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, two), strict=True))
        freedom = sum(parts) ** 2 / below if below else 1.0
    units = min(len(one), len(two))
    if error <= 1e-12 * abs(value):  # rounding alone
        return Difference(value, value, value, 1.0, units)
    p = 2 * float(t.sf(abs(value) / error, freedom))
    return Difference(value, *_t_interval(value, error, freedom, level), p, units)


def _error_of_mean(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def _t_interval(mean: float, error: float, freedom: float, level: float) -> tuple[float, float]:
    from scipy.stats import t

    far = float(t.ppf((1 + level) / 2, freedom)) * error
    return mean - far, mean + far


def _resampled_interval(
    counts: np.ndarray, sizes: np.ndarray, scale: float, level: float, resamples: int
) -> tuple[float, float]:
    """Quantiles of scale * sum(counts) / sum(sizes) over units drawn with replacement.  counts, sizes: (units,)"""
    if resamples < 1 or not 0 < level < 1:
        raise UserError(f"resamples={resamples}, level={level}: give at least one resample and a level between 0 and 1")
    drawn = _resampled_sums(np.stack([counts, sizes], axis=1), resamples, generator(0, "interval"))
    drawn = drawn[drawn[:, 1] > 0]  # a resample of nothing but empty references has no rate
    if not len(drawn):
        drawn = np.array([[counts.sum(), sizes.sum()]])
    low, high = np.quantile(scale * drawn[:, 0] / drawn[:, 1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled_sums(columns: np.ndarray, resamples: int, draw: np.random.Generator) -> np.ndarray:
    """Sums of each column over units drawn with replacement.  (units, columns) -> (resamples, columns)

    Units with the same row are one kind, drawn as often as there are of them: thousands of right and wrong answers are
    two kinds.
    """
    kinds, many = np.unique(columns, axis=0, return_counts=True)
    block = max(1, _AT_ONCE // len(kinds))
    sizes = (min(block, resamples - start) for start in range(0, resamples, block))
    return np.concatenate([draw.multinomial(len(columns), many / many.sum(), size=size) @ kinds for size in sizes])


def _share_of_swaps(gaps: np.ndarray, resamples: int) -> float:
    """The share of random swaps of the two models that differ by as much; the observed one counts among them.

    Up to 12 units all swaps are made, which makes the test exact.
    """
    gaps = gaps[gaps != 0]
    if not len(gaps):
        return 1.0
    observed = abs(gaps.sum()) * (1 - 1e-12)
    if len(gaps) <= 12:
        signs = 1 - 2 * ((np.arange(2 ** len(gaps))[:, None] >> np.arange(len(gaps))) & 1)
        return float((np.abs(signs @ gaps) >= observed).mean())
    sizes, many = np.unique(np.abs(gaps), return_counts=True)  # equal gaps are swapped together
    kept = generator(0, "swaps").binomial(many, 0.5, size=(resamples, len(sizes)))
    hits = int((np.abs((2 * kept - many) @ sizes) >= observed).sum())
    return (hits + 1) / (resamples + 1)
