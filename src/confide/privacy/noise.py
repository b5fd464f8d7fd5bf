"""The three places where Gaussian noise can be added (PFL-ASR appendix H.1).

With noise of standard deviation s C on the average, the same distribution of the result arises from s S C on the sum of
a cohort of S users, or from s_client C on every user. Here every scale is turned into z = noise on the sum divided by
the largest contribution to it, which is what an accountant takes.

With weights w_k the aggregate is g = (1/q) sum w_k Delta_k, one user moves it by at most C max(w) / q, and
s = z max(w) / q; uniform weights give the paper's z = s S.

Differs from the paper: its s_client = s sqrt(q / sum_k w_k^2) gives the right variance only on average over cohorts,
while a Poisson cohort that happens to be small would be under-protected. The sum over the realised cohort takes the
place of its expectation, so that the sum always carries exactly the noise that is accounted for.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Placement = Literal["sum", "average", "client"]


def average_scale(scale: float, placement: Placement, rate: float, weights: np.ndarray) -> float:
    """s_avg, in units of C, from the scale as given at one of the three places."""
    if placement == "average":
        return scale
    if placement == "sum":
        return scale / (rate * len(weights))
    return scale / float(np.sqrt(rate / np.square(weights).sum()))


def multiplier_of_average(scale: float, rate: float, weights: np.ndarray) -> float:
    """z from s_avg."""
    return scale * rate / float(weights.max())
