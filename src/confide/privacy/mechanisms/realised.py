"""`realised`: the sum over the cohort that was drawn, divided by that cohort's own weight (PFL-ASR eq. 75).

    f(S) = (sum over k in S of w_k Delta_k) / max(m, W(S)),    W(S) = sum over k in S of w_k,    |Delta_k| <= C.

The paper calls m q_min, takes the estimator from McMahan et al. 2018 and leaves its sensitivity open. Here m is the
weight of `privacy.least` users, least / K.

Sensitivity. Let S be any cohort, a = W(S), s its sum (so |s| <= a C), and let a user of weight w and update v join it.
With D = max(m, a) and D' = max(m, a + w),

    f(S + user) - f(S) = w v / D' - s (1 / D - 1 / D'),    of norm at most    C (w / D' + a (D' - D) / (D D')).

* a + w <= m: D = D' = m, which leaves C w / m. This case needs w <= m, where w / m <= 2 w / (m + w).
* a >= m: D = a and D' = a + w give 2 C w / (a + w), at most 2 C w / (m + w).
* a < m < a + w: D = m and D' = a + w give C (a / m + 2 w / (a + w) - 1), which is convex in a and so largest at an
  end: at a = m it is 2 C w / (m + w), and at the other end C w / m (a = m - w, if w <= m) or C (a = 0, if w > m),
  neither of which is more.

2 w / (m + w) grows with w, so one user moves f by at most 2 C w_max / (m + w_max); users at weight m who all send the
same, and one who sends the opposite, reach it. For equal weights that is 2 C / (least + 1), against C / S for the
expected cohort of S: this estimator costs about twice the noise, whatever `least` is.

Amplification. Whatever the function f of the cohort is, a run with the user and one without it draw the same S of the
others, and the user joins with probability q: N(f(S), s^2) stands against (1 - q) N(f(S), s^2) + q N(f(S + user), s^2).
Mixing over S cannot raise a divergence that is jointly convex, and f(S + user) is never farther from f(S) than the
sensitivity. So the sampled Gaussian of Mironov et al. 2019, and the pair that PLD takes for Poisson sampling (Zhu et
al. 2022), cover it as they cover the plain sum. Nothing else is needed of f, but the noise must not depend on S.

Differs from the paper: eq. 75 divides the users' noise too, so that its deviation tells how large the cohort was, and
no accountant has a proof for that. Here the noise comes once, after the division, with one deviation. What the argument
does not cover is refused: cohorts of a fixed size (which have one divisor anyway), turns, noise of the users, and
deployments, where users who do not answer would have to leave the divisor.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from confide.privacy.mechanisms.base import Asked, CommonSettings, Mechanism, Setting


class RealisedSettings(CommonSettings):
    least: Annotated[int, Field(ge=1)] | None = Field(
        None, exclude_if=lambda value: value is None,
        description="for realised: the sum is never divided by less than so many users (q_min of PFL-ASR's eq. 75)",
    )  # fmt: skip


class Realised(Mechanism):
    name = "realised"
    summary = "independent noise on the mean over the cohort that was drawn (PFL-ASR eq. 75), about twice as much of it"
    keys = ("least",)
    samplers: ClassVar[tuple[str, ...]] = ("poisson", "everyone")
    centred: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        if not isinstance(setting.privacy, RealisedSettings) or setting.privacy.least is None:
            raise TypeError("the realised mechanism needs privacy.least")
        self.least_weight = setting.privacy.least / len(setting.weights)
        super().__init__(setting)

    @classmethod
    def refusals(cls, asked: Asked) -> list[str]:
        privacy, problems = asked.privacy, super().refusals(asked)
        least = privacy.least if isinstance(privacy, RealisedSettings) else None
        if least is None:
            problems.append(
                "privacy.least: required with mechanism realised, the least number of users to divide by, for example "
                f"{max(1, asked.sampling.cohort // 2)}"
            )
        elif least > asked.sampling.cohort:
            problems.append(
                f"privacy.least={least} is above sampling.cohort={asked.sampling.cohort}: most cohorts would be "
                "divided by too much; lower it, or use privacy.mechanism: gaussian"
            )
        if asked.sampling.kind == "fixed":
            problems.append(
                "sampling.kind=fixed: cohorts of one size have one divisor; use privacy.mechanism: gaussian, or "
                "sampling.kind: poisson"
            )
        if privacy.placement == "client":
            problems.append(
                "privacy.placement=client: divided by the realised cohort, the users' noise would tell how large that "
                "was; leave it out (noise_scale: placement: average)"
            )
        elif privacy.noise_scale is not None and privacy.placement != "average":
            problems.append(
                f"privacy.placement={privacy.placement}: noise_scale on a sum has no meaning where the divisor "
                "changes; use placement: average, or noise_multiplier"
            )
        return problems

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        return [
            "privacy.mechanism=realised: users who do not answer would have to leave the divisor, which is not "
            "accounted for; a deployment needs privacy.mechanism: gaussian"
        ]

    def largest_contribution(self) -> float:
        """2 w_max / (m + w_max), by the proof above."""
        most = float(self.setting.weights.max())
        return 2 * most / (self.least_weight + most)

    def multiplier_of_scale(self, scale: float, rate: float, weights: np.ndarray) -> float:
        return scale / self.reach

    def divisor(self, cohort: np.ndarray) -> float:
        return max(self.least_weight, float(self.setting.weights[cohort].sum()))

    @classmethod
    def words(cls, privacy: Any) -> str:
        return (
            "The sum over a cohort was divided by the weight of the users who were drawn, and of at least "
            f"{privacy.least} users. A user moves that more than a sum with a fixed divisor, and the noise is for that."
        )

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return "Not extrapolated for a divisor that follows the cohort; `confide plan` answers for a fixed one."
