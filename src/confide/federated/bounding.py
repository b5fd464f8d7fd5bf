"""Bound one user's update to sensitivity C, which is split over the tensors of the model.

The rules are in `confide.federated.rules`; `confide.federated.bounds` moves the bounds from step to step. The factors
and the sensitivity come from the same object, and the noise takes its scale from nowhere else.

C_h is C / sqrt(H) ("uniform"), C sqrt(d_h / sum d) ("dim"), C sqrt(a_h d_h / sum a d) ("weighted"), or one of two that
the papers do not have; every split has the same noise and the same guarantee, since the squares sum to C^2:

* "root", C_h proportional to d_h^(1/4). The noise on tensor h has norm sqrt(d_h) s C, whatever the split, and an update
  that is clipped has norm C_h; under an optimiser with a trust ratio per tensor (LAMB, LARS) it is each tensor's own
  ratio of the two that counts. sum_h d_h / C_h^2 at fixed sum_h C_h^2 has its least where d_h / C_h^4 is the same for
  all h.
* "learned": as root, but no tensor gets more than its updates use. With q_h a quantile of the users' norms of tensor h,
  what is sent has norm min(C_h, q_h), and sum_h d_h / min(C_h, q_h)^2 is least (it is convex in C_h^2 up to q_h^2) at

      C_h = min(q_h, m d_h^(1/4)),  with m such that sum_h C_h^2 = C^2;

  if C is more than all q_h together, C_h = C q_h / ||q||. For an optimiser without trust ratios the whole ratio
  sum_h d_h / sum_h min(C_h, q_h)^2 counts, and this split makes it least too: nothing of C is left unused. The q_h are
  private estimates as above, one counter a tensor, with `adaptive` saying how; C itself stays.

Differs from the paper: PFL-ASR section 3 once prints C_h = C d_h / sum d; Definition 3's square root is used, which
is what keeps the whole at C. All factors are smaller by one part in a million, which covers the rounding of
float32 arithmetic, so the bound holds for the numbers that are really sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from confide.federated.car_adaptive import CarAdaptive
from confide.federated.parameters import Layout
from confide.federated.rules import NONE, PYTHON, RULES, factors_of_function, ratio
from confide.settings import FunctionName, Section, imported

ROUNDING = 1.0 - 1e-6
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(RULES)]


class Adaptive(Section):
    """The bound follows a quantile of the users' norms, which is estimated privately."""

    kind: Literal["quantile"] = "quantile"
    quantile: float = Field(0.5, ge=0, le=1, description="gamma: this share of users should be within the bound")
    learning_rate: float = Field(0.2, gt=0, le=10, description="eta_C: how fast the bound moves, in its logarithm")
    count_noise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="deviation of the noise on each count of users; none: a twentieth of the cohort, or more"
    )


class Bounding(Section):
    """How each user's update is bounded before it leaves the user.

    Examples:
        >>> from confide.federated.bounding import Bounding
        >>> Bounding(rule="per_layer_clip", bound=0.5, split="dim").problems()
        []
        >>> Bounding(rule="clip").problems()
        ['bounding.bound: required with rule clip, a number above 0']
    """

    rule: Name = Field(
        "clip", description="which rule bounds a user's update; python: a function of yours, held to the bound"
    )
    function: FunctionName | None = Field(
        None, description="for python: module:function, from a user's norms and C_h (both per tensor) to factors"
    )
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="C, the largest norm of what a user sends; required by every rule but none"
    )
    split: Literal["uniform", "dim", "root", "weighted", "learned"] = Field(
        "uniform",
        description="how the per-layer rules split C over the tensors: the same for all, by size (dim), by the fourth "
        "root of the size (root), by layer_weights (weighted), or by private quantiles of the norms (learned, for "
        "per_layer_clip with adaptive)",
    )
    layer_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="for split weighted: pattern of tensor names to a_h; the first match counts, others are 1",
    )
    balance: bool = Field(
        False, exclude_if=lambda value: not value,
        description="begin with the model of the least norm that computes the same as the start: no tensor takes up "
        "the bound for want of a scale (confide.federated.symmetry); it looks at no data and costs no privacy",
    )  # fmt: skip
    adaptive: Annotated[Adaptive | CarAdaptive, Field(discriminator="kind")] | None = Field(
        None,
        description="for clip and per_layer_clip: let the bound follow a private quantile; `bound` is its start. With "
        "split: learned, `bound` stays and its split follows the quantiles. For clip also kind car, CAR's moving "
        "average, with noise of its own and no formal guarantee",
    )

    @field_validator("adaptive", mode="before")
    @classmethod
    def _quantile_unless_said(cls, given: Any) -> Any:
        return {"kind": "quantile", **given} if isinstance(given, dict) else given

    @property
    def per_layer(self) -> bool:
        return RULES[self.rule].per_layer

    @property
    def follows(self) -> str | None:
        """What the bound follows from step to step; none if it stays."""
        return None if self.adaptive is None else self.adaptive.kind

    def problems(self) -> list[str]:
        """What contradicts itself in this section."""
        problems, follows = [], self.follows
        if self.rule != NONE and self.bound is None:
            problems.append(f"bounding.bound: required with rule {self.rule}, a number above 0")
        if (self.rule == PYTHON) != (self.function is not None):
            problems.append("bounding.function: required by rule python, module:function, and only used by it")
        if follows is not None and follows not in RULES[self.rule].follows:
            problems.append(
                f"bounding.adaptive.kind=car: a client has one bound; use rule: clip, not {self.rule}"
                if follows == "car"
                else f"bounding.adaptive: only clip and per_layer_clip can follow a quantile, not {self.rule}"
            )
        if self.split == "learned" and (self.rule != "per_layer_clip" or self.adaptive is None):
            problems.append(
                "bounding.split=learned: needs rule: per_layer_clip and adaptive, which says how the quantiles are "
                "estimated, for example adaptive: {quantile: 0.8}"
            )
        if self.layer_weights and not (self.per_layer and self.split == "weighted"):
            problems.append("bounding.layer_weights: only used by the per-layer rules with split: weighted")
        return problems


@dataclass(frozen=True)
class Bounder:
    """A rule made ready for a model: it turns norms into factors, and knows the sensitivity that they ensure.

    `bounder(settings, layout)` makes one.

    Examples:
        >>> import torch
        >>> from confide.federated.bounding import Bounding, bounder
        >>> from confide.federated.parameters import Layout
        >>> layout = Layout.of({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
        >>> rule = bounder(Bounding(rule="clip", bound=1.0), layout)
        >>> norms = torch.tensor([[3.0, 4.0]])  # (users, tensors): one user whose update has norm 5
        >>> rule.sensitivity, round(float((norms * rule.factors(norms)).norm()), 4)
        (1.0, 1.0)
    """

    rule: str
    sensitivity: float
    layer_bounds: Tensor  # (layers,) C_h, with sum of squares C^2
    roots: Tensor | None = None  # (layers,) d_h^(1/4), where the split is learned
    quantiles: Tensor | None = None  # (layers,) q_h, where the split is learned
    per_user: bool = False
    """Whether every user has a bound of its own (CAR's adaptive rule)."""
    own: Tensor | None = None  # (users,) C_i, where every user has its own
    function: Callable[[Tensor, Tensor], Tensor] | None = None
    """For the rule python: from one user's norms and C_h, both (layers,), to factors (layers,)."""
    told: Tensor | None = None
    """What users have to be told to have the same rule, where it changes from step to step."""

    @property
    def bounds(self) -> Tensor:
        """What adapts: the one bound of `clip`, each tensor's own, or the quantiles."""  # (1,) or (layers,)
        if self.quantiles is not None:
            return self.quantiles
        return self.layer_bounds if self.per_layer else torch.tensor([self.sensitivity], dtype=torch.float64)

    @property
    def per_layer(self) -> bool:
        return RULES[self.rule].per_layer

    def at(self, bounds: Tensor | None) -> Bounder:
        """The same rule with other bounds."""
        if bounds is None:
            return self
        if self.per_user:
            return replace(self, own=bounds, told=bounds)
        if self.roots is not None:
            split = allocate(self.sensitivity, bounds, self.roots)
            return replace(self, layer_bounds=split, quantiles=bounds, told=bounds)
        total = float(torch.linalg.vector_norm(bounds))
        layers = bounds if self.per_layer else self.layer_bounds * (total / self.sensitivity)
        return Bounder(self.rule, total, layers, told=bounds)

    def votes(self, norms: Tensor) -> Tensor:
        """+1/2 where a user is within a bound and -1/2 where not."""  # (users, layers) -> (users, 1 or layers)
        found = norms if self.per_layer else torch.linalg.vector_norm(norms, dim=1, keepdim=True)
        return torch.where(found <= self.bounds, 0.5, -0.5).double()

    def of(self, users: Tensor) -> Bounder:
        """The rule for these users alone, where each has a bound of its own."""
        return self if self.own is None else replace(self, own=self.own[users])

    def factors(self, norms: Tensor) -> Tensor:
        """Factor per user and tensor from the norms of the users' tensors."""  # (users, layers) -> (users, layers)
        if self.rule == NONE:
            return torch.ones_like(norms)
        total = torch.linalg.vector_norm(norms, dim=1, keepdim=True)  # (users, 1)
        if self.own is not None:
            return torch.clamp(self.own[:, None] / total, max=1.0).expand_as(norms) * ROUNDING
        found = RULES[self.rule].factors if self.function is None else factors_of_function(self.function)
        return found(norms, total, self.sensitivity, self.layer_bounds).expand_as(norms) * ROUNDING

    def held(self, norms: Tensor, slack: float = 0.0) -> Tensor:
        """Factors for an update that should be bounded already: 1 where it is, else what brings it to its bounds.

        `slack` is what the sender's own noise may have added to each norm.
        """  # (users, layers) -> (users, layers)
        if self.rule == NONE:
            return torch.ones_like(norms)
        total = torch.linalg.vector_norm(norms, dim=1, keepdim=True).expand_as(norms)
        limits, found = (self.layer_bounds, norms) if self.rule == "per_layer_clip" else (self.sensitivity, total)
        return torch.where(found <= limits + slack, 1.0, ratio(limits + slack, found) * ROUNDING)


def bounder(settings: Bounding, layout: Layout) -> Bounder:
    """Make the rule of a recipe ready for a model with these tensors."""
    if settings.rule == NONE or settings.bound is None:
        return Bounder(NONE, float("inf"), torch.full((len(layout.names),), float("inf"), dtype=torch.float64))
    shares = torch.tensor(_shares(settings, layout), dtype=torch.float64)
    layer_bounds = settings.bound * torch.sqrt(shares / shares.sum())
    learned = settings.split == "learned"  # begins with dim: q_h = C_h
    made = Bounder(
        settings.rule,
        settings.bound,
        layer_bounds,
        roots=torch.tensor(layout.sizes, dtype=torch.float64).pow(0.25) if learned else None,
        quantiles=layer_bounds if learned else None,
        per_user=isinstance(settings.adaptive, CarAdaptive),
        function=None if settings.function is None else imported(settings.function, "bounding.function"),
    )
    if made.function is not None:
        made.factors(layer_bounds[None])  # a function that breaks is refused before anything is trained
    return made


def allocate(total: float, quantiles: Tensor, roots: Tensor) -> Tensor:
    """Split `total`: C_h = min(q_h, m d_h^(1/4)), from quantiles and fourth roots of sizes."""  # all (layers,)
    whole = float(torch.linalg.vector_norm(quantiles))
    if whole <= total:
        return quantiles * (total / whole)
    ratios, order = torch.sort(quantiles / roots)  # tensors reach their quantile in this order as m grows
    squares, sizes = quantiles[order].square(), roots[order].square()
    used = torch.cat([squares.new_zeros(1), squares.cumsum(0)[:-1]])  # by the tensors before
    levels = ((total**2 - used) / sizes.flip(0).cumsum(0).flip(0)).clamp(min=0).sqrt()
    reached = torch.nonzero(levels <= ratios)
    first = (
        int(reached[0]) if len(reached) else len(levels) - 1
    )  # none where rounding alone made the quantiles exceed C
    split = torch.minimum(quantiles, levels[first] * roots)
    return split * min(1.0, total / float(torch.linalg.vector_norm(split)))


def _shares(settings: Bounding, layout: Layout) -> list[float]:
    """Each tensor's share of C squared, up to a common factor."""
    if settings.split == "uniform":
        return [1.0] * len(layout.names)
    if settings.split == "root":
        return [math.sqrt(size) for size in layout.sizes]
    return [  # by size; `layer_weights` are only given for the split weighted
        size * next((a for p, a in settings.layer_weights.items() if fnmatchcase(name, p)), 1.0)
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
