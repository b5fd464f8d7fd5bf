"""Does the noise of a run follow its cohorts? An exact test that needs no canary.

Amplification by sampling rests on a secret: who is in the cohort of a step. If the noise's variance depends on how many
are, whoever sees the models reads that number from a few hundred coordinates, and with it, for anybody whose fellow
users are known, in which steps this person took part. The epsilon with amplification is then not true, though there may
be more noise than was stated; canaries do not find that, so it is tested by itself.

Of step t the auditor knows the size of the cohort, n_t, and by subtraction the noise. Q_t is the noise's sum of squares
in units of the variance that is stated for a coordinate. If the mechanism is the one that is stated, all Q_t are
independent draws of chi squared with d degrees of freedom whatever the cohorts were, so that

    S = sum_t (n_t - mean n) Q_t

has a distribution that is known exactly, given the sizes. It is drawn many times; the share of draws that are at least
as far from 0, the observed one among them, is a p-value that is valid as it stands (Besag and Clifford 1989).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVEL = 0.001
"""A p-value below this fails an audit: an honest one does so once in a thousand."""
_DRAWS = 9999


def chance_of_following(squares: Sequence[float], sizes: Sequence[int], dimension: int, seed: int = 0) -> float | None:
    """The p-value of "the noise does not follow the cohort"; none where all cohorts were of one size.

    `squares` holds the noise's sum of squares for each step, in units of the stated variance of one coordinate.
    """
    weights = np.asarray(sizes, dtype=np.float64)
    if len(weights) == 0 or np.ptp(weights) == 0:
        return None
    weights -= weights.mean()
    draw, null = np.random.default_rng(seed), np.zeros(_DRAWS)
    for weight in weights:
        null += weight * draw.chisquare(dimension, _DRAWS)
    observed = abs(float(weights @ np.asarray(squares, dtype=np.float64)))
    return (1 + int((np.abs(null) >= observed).sum())) / (1 + _DRAWS)
