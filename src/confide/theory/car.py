"""CAR Theorems 5.5 and C.5: federated adapters with local noise, for a fixed and for an adaptive clipping threshold.

m clients take one stochastic step of rate alpha on F_i, clip the difference to C, add noise of variance sigma_0^2 C^2
and average. With Gamma_1, Gamma_2 > 1 and alpha below `largest_rate`, Theorem 5.5 (eq. 14) says

    mean_t ||grad F||^2 <=   (F_0 - F*) / (omega (T + 1))                            FedAvg
                           + L C^2 (1 + sigma_0^2) / (2 omega)                       clipping and noise
                           + 3 L (rho_0^2 + zeta_0^2) alpha^2 / (2 omega)            variance of gradients

    omega = min(C / B (1 - 1/Gamma_1), alpha (1 - 1/Gamma_2)).

Theorem C.5 (eq. 59) is for C <- (1 - beta) C + beta gamma ||Delta|| with noise multiplier z_D, where clients clip with
probability p at most and omega = (1 - p)^m (1 - 1/Gamma):

    mean_t ||grad F||^2 <=   (F_0 - F*) / (omega alpha (T + 1))
                           + L/(2 omega) (1 + z_D^2 (1 - beta)^2) [ C_0^2 / ((1 - (1 - beta)^2) alpha (T + 1))
                                              + 2 gamma B C_0 / (beta (T + 1)) + gamma^2 B^2 alpha ]
                           + 3 L/(2 omega) (rho_0^2 + zeta_0^2) alpha (1 + 2 z_D^2 beta^2 gamma^2)

L is the mean of the clients' smoothness, B the largest stochastic gradient, rho and zeta the constants of the variance
within (Assumption 5.2) and between clients (5.3): variance <= rho_0^2 + rho_1^2 ||grad F||^2, and likewise zeta.

Differs from the paper, which is followed to the letter unless asked otherwise:

* Noise of variance sigma^2 in every one of d coordinates has d sigma^2 in all; Lemma B.4 counts it once. `dimension`
  says how many there are; 1 is the printed bound.
* Eq. 40 has the variance 2 z_D^2 (1 - beta)^2 C^2; eq. 60 drops the 2, and eq. 59 with it. `corrected=True` keeps it.
* The adaptive rule has no privacy guarantee (it reads the raw norm): the bound is about convergence alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Clients:
    """What both theorems need to know."""

    gap: float  # F(theta_0) - F*
    steps: int  # T: the mean is over T + 1 iterates
    learning_rate: float  # alpha
    smoothness: float  # L
    gradient: float  # B
    within: float = 0.0  # rho_0^2
    between: float = 0.0  # zeta_0^2
    growth: float = 0.0  # rho_1^2 + zeta_1^2: how the two variances grow with ||grad F||^2
    dimension: int = 1
    first_margin: float = 2.0  # Gamma_1 of Theorem 5.5
    second_margin: float = 2.0  # Gamma_2 of Theorem 5.5, Gamma of C.5


@dataclass(frozen=True)
class Bound:
    optimisation: float
    privacy: float  # Clipping and noise
    variance: float
    largest_rate: float  # The theorem holds for learning rates below this
    holds: bool

    @property
    def total(self) -> float:
        return self.optimisation + self.privacy + self.variance


def theorem_5_5(clients: Clients, bound: float, noise: float) -> Bound:
    """A fixed threshold C = `bound` and noise of deviation `noise` times C, sigma_0, on every message (eqs 13, 14)."""
    curvature = 3 * clients.smoothness * (clients.growth + 1)
    largest = min(
        math.sqrt(2 * bound / (curvature * clients.gradient * clients.first_margin)),
        2 / (curvature * clients.second_margin),
    )
    omega = min(
        bound / clients.gradient * (1 - 1 / clients.first_margin),
        clients.learning_rate * (1 - 1 / clients.second_margin),
    )
    smooth = clients.smoothness / (2 * omega)
    return Bound(
        clients.gap / (omega * (clients.steps + 1)),
        smooth * bound**2 * (1 + clients.dimension * noise**2),
        3 * smooth * (clients.within + clients.between) * clients.learning_rate**2,
        largest,
        clients.learning_rate < largest,
    )


def theorem_c5(
    clients: Clients,
    start: float,
    noise: float,
    rate: float,
    quantile: float,
    share_clipped: float,
    count: int,
    corrected: bool = False,
) -> Bound:
    """A moving threshold from C_0 = `start`: beta = `rate`, gamma = `quantile`, z_D = `noise`, p = `share_clipped`,
    m = `count` clients (eqs 58, 59)."""  # fmt: skip
    alpha, kept, d = clients.learning_rate, (1 - share_clipped) ** count, clients.dimension
    spread = 1 + 2 * d * noise**2 * rate**2 * quantile**2
    largest = 2 * kept / (3 * clients.smoothness * (clients.growth + 1) * clients.second_margin * spread)
    omega = kept * (1 - 1 / clients.second_margin)
    thresholds = (
        start**2 / ((1 - (1 - rate) ** 2) * alpha * (clients.steps + 1))
        + 2 * quantile * clients.gradient * start / (rate * (clients.steps + 1))
        + quantile**2 * clients.gradient**2 * alpha
    )
    smooth = clients.smoothness / (2 * omega)
    return Bound(
        clients.gap / (omega * alpha * (clients.steps + 1)),
        smooth * (1 + (2 if corrected else 1) * d * noise**2 * (1 - rate) ** 2) * thresholds,
        3 * smooth * (clients.within + clients.between) * alpha * spread,
        largest,
        alpha < largest,
    )
