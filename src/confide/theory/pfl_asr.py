"""PFL-ASR Theorems 2 and 3 and Corollary 1: what bounds the mean squared gradient over a private federated run.

With k = 1 - 8 (1 - eta_loc T_loc)^2 above 0, eta_glob L below 1, LAMB at the centre (beta_1 = 0, no weight decay, trust
ratio at most R_h, |1 - p_h| at most P_h) and SGD at the users, Theorem 2 (eq. 51) says of every user taking part

    k/T sum_t E ||grad L||^2  <=    2 (L_0 - L*) / (eta_glob T)                              optimisation
                                  + 16 H a^2 sigma_glob^2                                    global update noise
                                  + 32 H a^2 sigma_loc^2                                     local update noise
                                  + C^2 sigma_DP^2 / xi^2  sum_h R_h^2 d_h                   noise of privacy
                                  + 2 a^2 sum_h M_h^2 (16 L^2 a^2 + 1/C_h^2 + 4 P_h^2)       drift, clipping, scaling
                                  + 4 a^2 / xi^2  sum_h R_h^2 M_h^2 / C_h^2 (Psi_h)          spread of the clipping

where a = eta_loc T_loc and Psi_h = Psi_h^intra + Psi_h^inter, the variances of a user's update norm over batches and of
its expectation over users. Theorem 3 (eq. 68) is the same for users that join with probability q: constants 20, 40, 5
and 10 (1 - a)^2, clipping over q, and a sampling term M_h^2 (1 - q) / q. Corollary 1 (eq. 54) is Theorem 2 at
eta_glob = 1/sqrt(T) and eta_loc = 1/sqrt(T_loc T).

The fifth of the six terms has three causes with three remedies, so `Terms` keeps its parts.

Differs from the paper, which is followed to the letter unless asked otherwise:

* Eq. 40 uses Lemma 3, whose bound is U^4 / (4 C^2) with U = a M_h, but prints a^2 M_h^2 / (2 C_h^2): a factor a^2 M_h^2
  is lost, and the clipping term does not scale with the loss as all others do. `corrected=True` puts it back.
* Theorem 3's proof multiplies eq. 42 by 5/q, which gives 10 P_h^2 / q where eq. 68 prints 5; `corrected=True` has 10.
* k is above 0 only for eta_loc T_loc within 0.354 of 1. The rates of Corollary 1 have eta_loc T_loc = sqrt(T_loc / T),
  so its bound says nothing unless T_loc is at least 0.42 T. `Terms.bound` is infinite then.
* Any other optimiser than LAMB is the case of its own p_h: plain SGD is R_h = xi = 1, P_h = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Layer:
    """What the bound needs of one tensor."""

    dimension: int  # d_h
    gradient: float  # M_h: no gradient of the loss is longer
    bound: float  # C_h; infinity for no clipping
    trust: float = 1.0  # R_h: the trust ratio is at most this
    scaling: float = 0.0  # P_h: no factor p of the optimiser is further from 1
    intra: float = 0.0  # Psi_h^intra: variance of a user's update norm over its batches, mean over users and steps
    inter: float = 0.0  # Psi_h^inter: variance over users of that norm's expectation, mean over steps


@dataclass(frozen=True)
class Setting:
    """What the bound needs of a run."""

    gap: float  # L(theta_0) - L(theta*)
    central_rate: float  # eta_glob
    local_rate: float  # eta_loc
    steps: int  # T
    local_steps: int  # T_loc
    smoothness: float  # L
    global_variance: float = 0.0  # sigma_glob^2, of the users' gradients around their mean
    local_variance: float = 0.0  # sigma_loc^2, of a batch's gradient around its user's
    noise: float = 0.0  # sigma_DP, on the average, in units of C
    xi: float = 1.0  # LAMB's constant in the denominator
    bound: float | None = None  # C; none: the root of the sum of C_h^2

    @property
    def reach(self) -> float:
        """a = eta_loc T_loc"""
        return self.local_rate * self.local_steps


@dataclass(frozen=True)
class Terms:
    """The six terms of Corollary 1, the fifth in its three parts, and Theorem 3's sampling beside them."""

    kappa: float
    optimisation: float = 0.0
    global_noise: float = 0.0
    local_noise: float = 0.0
    privacy_noise: float = 0.0
    drift: float = 0.0
    clipping: float = 0.0
    scaling: float = 0.0
    clipping_spread: float = 0.0
    sampling: float = 0.0

    @property
    def total(self) -> float:
        """The right-hand side."""
        return math.fsum(getattr(self, each.name) for each in fields(self) if each.name != "kappa")

    @property
    def bound(self) -> float:
        """What the mean squared gradient is at most; infinite where the theorem does not apply."""
        return self.total / self.kappa if self.kappa > 0 else math.inf


def theorem2(setting: Setting, layers: Sequence[Layer], corrected: bool = False) -> Terms:
    """Eq. 51: every user takes part in every step."""
    return _terms(setting, layers, 1.0, 1.0, 8.0, corrected)


def theorem3(setting: Setting, layers: Sequence[Layer], rate: float, corrected: bool = False) -> Terms:
    """Eq. 68: each user joins a step with probability `rate`, q."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate} is not a probability above 0")
    return _terms(setting, layers, 1.25, rate, 10.0 if corrected else 5.0, corrected)


def _terms(
    setting: Setting, layers: Sequence[Layer], grow: float, rate: float, scaling: float, corrected: bool
) -> Terms:
    """Theorem 2 for `grow` and `rate` of 1; Theorem 3's constants are `grow` times as large."""
    square, count = setting.reach**2, len(layers)
    gradients = math.fsum(x.gradient**2 for x in layers)
    noise = 0.0
    if setting.noise != 0:  # without noise C may be infinite
        whole = setting.bound**2 if setting.bound is not None else math.fsum(x.bound**2 for x in layers)  # C^2
        noise = whole * setting.noise**2 / setting.xi**2 * math.fsum(x.trust**2 * x.dimension for x in layers)
    # sum_h M_h^2 / C_h^2, or with the factor that Lemma 3 gives
    clipping = math.fsum(x.gradient**2 * (square * x.gradient**2 if corrected else 1.0) / x.bound**2 for x in layers)
    spread = math.fsum(x.trust**2 * x.gradient**2 / x.bound**2 * (x.intra + x.inter) for x in layers)
    return Terms(
        1 - 8 * grow * (1 - setting.reach) ** 2,
        optimisation=2 * setting.gap / (setting.central_rate * setting.steps),
        global_noise=16 * grow * count * square * setting.global_variance,
        local_noise=32 * grow * count * square * setting.local_variance,
        privacy_noise=noise,
        drift=32 * grow * setting.smoothness**2 * square**2 * gradients,
        clipping=2 * grow * square / rate * clipping,
        scaling=scaling * square / rate * math.fsum((x.gradient * x.scaling) ** 2 for x in layers),
        clipping_spread=4 * grow * square / (rate * setting.xi**2) * spread,
        sampling=5 * square * (1 - rate) / rate * gradients,
    )


def corollary1(setting: Setting, layers: Sequence[Layer], corrected: bool = False) -> Terms:
    """Eq. 54: Theorem 2 at eta_glob = 1/sqrt(T) and eta_loc = 1/sqrt(T_loc T), whatever rates `setting` has."""
    central, local = 1 / math.sqrt(setting.steps), 1 / math.sqrt(setting.local_steps * setting.steps)
    return theorem2(replace(setting, central_rate=central, local_rate=local), layers, corrected)


def noise_for(epsilon: float, delta: float, steps: int, largest_weight: float, constant: float = 1.0) -> float:
    """sigma_DP that E.5 asks for: sqrt(const max w^2 T ln(1/delta)) / epsilon. The paper leaves the constant open.

    A run's own noise comes from an accountant; this is for the bound's dependence on epsilon.
    """
    return largest_weight * math.sqrt(constant * steps * math.log(1 / delta)) / epsilon
