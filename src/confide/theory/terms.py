"""Split the error of a central step as the proofs of PFL-ASR do (eqs 28 and 34), with measured numbers.

The theorems bound ||grad L_h - p_h * Delta_h||^2 by worst cases; here each part is what it is at a checkpoint. Of a
tensor h, with F_k what user k would send if it did not move, G_k what it sends before bounding and S_k after,

    G_k = s_1 F_k + r_k,   S_k = s_2 G_k + r'_k        (least squares over users)

so that s = s_1 s_2 is by how much local steps and clipping shorten every user's update alike, which costs nothing but
the same factor of the learning rate, and the rests are what bends the aggregate. In units of the squared gradient, with
a = eta_loc T_loc and q, w_k, d_h, C, sigma as in the papers,

| cause        | term                                                   | in the bound                              |
|--------------|--------------------------------------------------------|-------------------------------------------|
| drift        | ||mean r||^2 / (s_1 a)^2                               | 40 L^2 a^4 M_h^2                          |
| clipping     | ||mean r'||^2 / (s a)^2                                | a^2 M_h^2 / C_h^2, and with Psi_h         |
| users        | x/(2-x) (1-q)/q sum_k w_k^2 ||E S_k||^2 / (s a)^2      | sampling, global update noise             |
| batches      | x/(2-x) 1/q sum_k w_k^2 Var(S_k) / (s a)^2             | local update noise                        |
| noise        | x/(2-x) d_h C^2 sigma^2 / (s a)^2                      | C^2 sigma_DP^2 R_h^2 d_h / xi^2           |
| optimisation | ||mean S||^2 / (s a)^2 or ||mean F||^2 / a^2, if less, | 2 (L_0 - L*) / (eta_glob T)               |
|              | less twice the three above                             |                                           |

Each term is the squared gradient that a long run would be left with for this cause alone: a bias moves the point where
the run comes to rest, and an error of mean zero and variance V keeps it in motion around that point, with
||grad||^2 = x/(2-x) V for steps that contract by x = eta s a lambda, lambda being the curvature that the error meets
and eta the central optimiser's own step for a unit of aggregate in this tensor. Where there is a gradient and the mean
of what is sent is not zero either, the run is still on its way: that is optimisation, but for what errors of mean zero
explain (up to twice their term: a checkpoint is one draw of their motion). A run that a bias brought to rest has a
gradient and no such mean, and one that a bias pulls away from a minimum has such a mean and no gradient.

Differs from the paper: the theorem has no factor x/(2-x) on errors of mean zero (it drops ||p Delta||^2 where
eta_glob L is below 1), and its global update noise does not vanish with everybody taking part; the measured terms do
what a run does. The bound itself, with its own constants, is reported beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from confide.federated import optimisers
from confide.federated.bounding import Bounder
from confide.federated.optimisers import Adam, Lamb, Lars, Optimiser, Sgd
from confide.federated.parameters import Layout
from confide.privacy.plan import Plan
from confide.theory.measure import Measured, per_layer

CAUSES = ("optimisation", "drift", "clipping", "users", "batches", "noise")
_TINY = 1e-12


@dataclass(frozen=True)
class Centre:
    """How the central optimiser turns an aggregate into a step, tensor by tensor."""

    rates: Tensor  # (layers,) length of the step for an aggregate of length 1, momentum included
    trust: Tensor  # (layers,) R_h
    scaling: Tensor  # (layers,) P_h
    xi: float


@dataclass(frozen=True)
class Parts:
    """The terms of every tensor, and what they were made of."""

    terms: Tensor  # (layers, causes)
    signal: Tensor  # (layers,) ||mean F||^2 / a^2, the squared gradient now
    shortened: Tensor  # (layers,) s
    clipped: Tensor  # (layers,) share of users whose tensor is shortened by the bound

    @property
    def sums(self) -> dict[str, float]:
        """Each cause's term in the whole model."""
        return dict(zip(CAUSES, self.terms.sum(dim=0).tolist(), strict=True))

    @property
    def floor(self) -> float:
        """What is left of the squared gradient however long the run: everything but optimisation."""
        return float(self.terms[:, 1:].sum())

    @property
    def fluctuation(self) -> float:
        """The part of the floor that errors of mean zero make: users, batches and noise."""
        return float(self.terms[:, 3:].sum())


def dominant(terms: dict[str, float]) -> str:
    """The cause with the largest term."""
    return max(terms, key=lambda each: terms[each])


def split_error(measured: Measured, rule: Bounder, plan: Plan, centre: Centre, extra_noise: float = 1.0) -> Parts:
    """The terms at a checkpoint under a bounding rule; `extra_noise` multiplies the noise's deviation."""
    layout, a = measured.layout, measured.reach
    factors, noise = _factors(measured, rule), noise_squares(plan, rule, layout) * extra_noise**2
    pairs = [torch.split(updates, layout.sizes, dim=2) for updates in (measured.still, measured.moving)]
    rows = []
    for h, (still, moving) in enumerate(zip(*([piece.double() for piece in each] for each in pairs), strict=True)):
        sent = moving * factors[:, :, h, None]
        first, second = _slope(still, moving), _slope(moving, sent)
        s = max(first * second, _TINY)
        drift, bend = (moving - first * still).mean(dim=1), (sent - second * moving).mean(dim=1)
        users, batches = _sampling(sent, measured, plan)
        unit = float(centre.rates[h]) * s * a
        quiet, lively = (_share_left(unit * float(c[h])) for c in (measured.noise_curvature, measured.user_curvature))
        signal = _square(still.mean(dim=1), measured) / a**2
        row = [
            0.0,
            _square(drift, measured) / (max(first, _TINY) * a) ** 2,
            _square(bend, measured) / (s * a) ** 2,
            lively * users / (s * a) ** 2,
            lively * batches / (s * a) ** 2,
            quiet * float(noise[h]) / (s * a) ** 2,
        ]
        # A checkpoint is one draw of a gradient that its errors keep in motion: up to twice the mean is theirs.
        going = _square(sent.mean(dim=1), measured) / (s * a) ** 2
        row[0] = max(min(going, signal) - 2 * sum(row[3:]), 0.0)
        rows.append([*row, signal, s])
    table = torch.tensor(rows, dtype=torch.float64)
    return Parts(table[:, :-2], table[:, -2], table[:, -1], (factors < 1 - 1e-5).double().mean(dim=(0, 1)))


def aggregate(measured: Measured, rule: Bounder) -> Tensor:
    """The mean of the users' bounded updates."""  # (parameters,)
    spread = torch.repeat_interleave(_factors(measured, rule), torch.tensor(measured.layout.sizes), dim=2)
    means = (measured.moving * spread.to(measured.moving.dtype)).mean(dim=1)
    return measured.weights.to(means.dtype) @ means


def central_step(
    settings: Optimiser, layout: Layout, parameters: Tensor, memory: dict[str, Tensor], gradient: Tensor, step: int
) -> Centre:
    """Take one step on copies, without first moments and weight decay, as the theorems have it (beta_1 = lambda = 0).

    Momentum m makes every step 1 / (1 - m) times as long in the end; a mean of gradients (Adam, LAMB) does not.
    """
    plain, lasting = settings.model_copy(update={"weight_decay": 0.0}), 1.0
    if isinstance(settings, Sgd | Lars):
        plain, lasting = plain.model_copy(update={"momentum": 0.0}), 1 / (1 - settings.momentum)
        memory = {}
    if isinstance(settings, Adam | Lamb):
        plain = plain.model_copy(update={"betas": (0.0, settings.betas[1])})
    own = {name: tensor.clone() for name, tensor in memory.items()}
    after = parameters.clone()
    optimisers.update(plain, layout.views(after), layout.views(gradient), own, step)
    taken = (parameters - after).double()
    rate = settings.learning_rate * settings.schedule(step)
    scales = torch.where(gradient != 0, taken / (rate * gradient.double()), 1.0)  # p_h, coordinate by coordinate
    lengths = [per_layer(layout, each).sqrt() for each in (taken, gradient)]
    rates = lasting * lengths[0] / lengths[1].clamp(min=1e-300)
    gaps = torch.stack([(1 - piece).abs().max() for piece in layout.pieces(scales)])
    if isinstance(settings, Lamb):
        return Centre(rates, _trust(settings, layout, parameters, gradient, own), gaps, settings.epsilon)
    return Centre(rates, torch.stack([piece.abs().max() for piece in layout.pieces(scales)]), gaps, 1.0)


def _trust(settings: Lamb, layout: Layout, parameters: Tensor, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """r_h of eq. 10."""
    found = []
    for name, g, w in zip(layout.names, layout.pieces(gradient), layout.pieces(parameters), strict=True):
        u = g.double() / (memory[f"second_moment/{name}"].reshape(-1).double().sqrt() + settings.epsilon)
        length, weight = float(u.norm()), float(w.double().norm())
        found.append(weight / length if length > 0 and weight > 0 else 1.0)
    return torch.tensor(found, dtype=torch.float64)


def _factors(measured: Measured, rule: Bounder) -> Tensor:
    """What the rule multiplies each tensor of each update with."""  # (users, draws, layers)
    norms = per_layer(measured.layout, measured.moving).sqrt()
    return rule.factors(norms.flatten(0, 1)).view(norms.shape)


def _slope(before: Tensor, after: Tensor) -> float:
    """Return the factor s for which s times `before` comes closest to `after`, by least squares."""
    below = float(before.square().sum())
    return float((before * after).sum()) / below if below > 0 else 1.0


def _square(vectors: Tensor, measured: Measured) -> float:
    """||mean over users||^2, less what the probe's own choice of users adds to it."""  # vectors (users, size)
    w = measured.weights[:, None]
    mean = (w * vectors).sum(dim=0)
    spread = float((w.square() * (vectors - mean).square()).sum()) * len(vectors) / max(len(vectors) - 1, 1)
    return max(float(mean.square().sum()) - (1 - measured.share) * spread, 0.0)


def _sampling(sent: Tensor, measured: Measured, plan: Plan) -> tuple[float, float]:
    """Variances of the aggregate because of which users, and which batches, were drawn."""  # sent (users, draws, size)
    # A share `turns` of the users is dealt without replacement, and each of these is in with probability `coin`. Fixed
    # cohorts and public turns have no coins, Poisson cohorts nothing but coins, and cyclic_poisson has both.
    q, draws = plan.rate, sent.shape[1]
    weights = torch.from_numpy(plan.weights[measured.users])
    grow = len(plan.weights) / len(sent)  # from the probed to all
    own = sent.mean(dim=1)
    within = (sent - own[:, None]).square().sum(dim=(1, 2)) / max(draws - 1, 1)  # (users,)
    batches = grow * float((weights.square() * within).sum()) / q
    coin = plan.event.turn_rate if plan.sampler in ("poisson", "cyclic_poisson") else 1.0
    turns = q / coin
    centre = (measured.weights[:, None] * own).sum(dim=0)
    around, apart = (
        (each.square().sum(dim=1) - within / draws).clamp(min=0) for each in (own, own - centre)
    )  # (users,)
    if plan.mechanism.centred:  # as far as cohorts are above `privacy.least`
        around = apart
    users = weights.square() * ((1 - coin) / q * around + (1 - turns) / turns * apart)
    return grow * float(users.sum()), batches


def noise_squares(plan: Plan, rule: Bounder, layout: Layout) -> Tensor:
    """Expected squared norm of the noise on each tensor of the aggregate."""  # (layers,)
    kind = plan.mechanism
    sizes = torch.tensor(kind.noisy_sizes(layout.sizes), dtype=torch.float64)
    return sizes * kind.variance(kind.event_at(0, rule.sensitivity))


def _share_left(x: float) -> float:
    """x / (2 - x), the squared gradient that an error of variance 1 leaves; 1 where steps are too long to settle."""
    x = min(max(x, 0.0), 1.0)
    return x / (2 - x)
