"""CAR's adaptive local noise: a bound that follows each client's own norms (CAR appendix C and Algorithm 1).

With m clients, noise multiplier z, update rate b and quantile g:

    sigma_b = m / 20,    z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2),
    sent_i  = min(1, C_i / ||D_i||) D_i + N(0, v_i I),
    v_i     = 2 z_D^2 (1 - b)^2 C_i^2 + 2 z_D^2 b^2 g^2 ||D_i||^2        (eqs 7 and 40),
    C_i    <- (1 - b) C_i + b g ||D_i||                                   (eq. 39).

The bound is per client (C_i in eqs 3, 6 and 38 and in Algorithm 1, lines 16-36): it stays with the client from round
to round and is never sent. v_i is the upper bound that the paper puts in the place of z_D^2 C_i^2 of the next round.

**No formal guarantee.** Bound and noise are functions of the raw norm ||D_i||, which nothing protects: two data sets of
one client give noises of different scales, so no epsilon can be stated, and none is. The rules with a guarantee are the
private quantile (`bounding.adaptive: {kind: quantile}`) and a fixed bound with `privacy.trust: local`.

Differs from the paper: D_i is the update of a whole round, not of one gradient step, as in section 3.4. The
experiments name an "EMA decay of 0.9" beside the update rate, which no equation has; `decay` smooths the norms that
enter eqs 39 and 40, from the first one on, and 0 gives the equations as printed. In the first `warm_up` rounds nothing
is bounded, no noise is added and the bound stays where it began (section 6.4 enables the rule after three rounds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from confide.errors import UserError
from confide.settings import Section


class CarAdaptive(Section):
    """CAR's moving average of raw norms; it has no formal guarantee. Defaults are the paper's experiment."""

    kind: Literal["car"] = "car"
    noise_multiplier: float = Field(0.1, gt=0, allow_inf_nan=False, description="z, the paper's noise scale")
    update_rate: float = Field(0.05, gt=0, le=1, description="b: how far the bound moves in a round")
    quantile: float = Field(0.9, gt=0, le=1, description="g: the bound tends to this multiple of the norms")
    decay: float = Field(0.9, ge=0, lt=1, description="of the moving average of norms; 0: each round's own norm")
    warm_up: int = Field(0, ge=0, description="rounds without bound and noise at the beginning")


@dataclass(frozen=True)
class Clients:
    """What the clients remember from round to round. Each number is its client's own and is not released."""

    bounds: Tensor  # (population,) float64, C_i
    norms: Tensor  # (population,) float64, moving average of ||D_i||; 0 before the first


def multiplier(settings: CarAdaptive, clients: int) -> float:
    """z_D, what is left of z once the count of clipped clients has had its share."""
    spread = 2 * clients / 20
    if settings.noise_multiplier >= spread:
        raise UserError(
            f"noise_multiplier={settings.noise_multiplier:g} with {clients} client{'s' if clients != 1 else ''}: the "
            f"adaptive rule needs it below 2 sigma_b = {clients}/10 = {spread:g}; lower it or use more clients"
        )
    return 1 / math.sqrt(settings.noise_multiplier**-2 - spread**-2)


def start(bound: float, clients: int) -> Clients:
    """Everybody begins at the same bound."""
    return Clients(torch.full((clients,), bound, dtype=torch.float64), torch.zeros(clients, dtype=torch.float64))


def bounds_at(settings: CarAdaptive, clients: Clients, step: int) -> Tensor:
    """C_i of a central step, counted from 0; infinite in the warm-up."""  # (population,)
    return torch.full_like(clients.bounds, math.inf) if step < settings.warm_up else clients.bounds


def average_norms(settings: CarAdaptive, before: Tensor, norms: Tensor) -> Tensor:
    """Take these norms into the moving average; the first norm is its own average."""  # (users,) each
    return torch.where(before > 0, settings.decay * before + (1 - settings.decay) * norms, norms)


def noise_scales(settings: CarAdaptive, clients: Clients, users: Tensor, norms: Tensor, step: int) -> Tensor:
    """sqrt(v_i), the deviation of the noise on each message of this round; where nothing is sent, as before."""
    # users, norms (users,) -> (users,)
    if step < settings.warm_up:
        return torch.zeros_like(norms)
    z, b, g = multiplier(settings, len(clients.bounds)), settings.update_rate, settings.quantile
    own, average = clients.bounds[users], average_norms(settings, clients.norms[users], norms)
    average = torch.where(torch.isfinite(norms), average, clients.norms[users])
    return z * torch.sqrt(2 * ((1 - b) * own).square() + 2 * (b * g * average).square())


def next_clients(settings: CarAdaptive, clients: Clients, users: Tensor, norms: Tensor, step: int) -> Clients:
    """What the clients remember after a round in which `users` took part with these raw norms.

    A norm that is not finite is not remembered, as the update itself is not sent.
    """
    if step < settings.warm_up:
        return clients
    finite = torch.isfinite(norms)
    users, norms = users[finite], norms[finite]
    b, g = settings.update_rate, settings.quantile
    average = average_norms(settings, clients.norms[users], norms)
    bounds, kept = clients.bounds.clone(), clients.norms.clone()
    bounds[users] = (1 - b) * bounds[users] + b * g * average
    kept[users] = average
    return Clients(bounds, kept)
