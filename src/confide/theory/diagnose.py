"""Which term holds a run back, tensor by tensor, and what to change: the papers' theory as advice (docs/theory.md)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from confide.build import make_loop, make_task
from confide.errors import UserError
from confide.federated.bounding import Bounder
from confide.federated.state import State
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.randomness import generator
from confide.recipe import Recipe
from confide.runs import checkpoint, folder
from confide.runs.records import json_safe
from confide.speech.model import kind_of
from confide.theory import norm, pfl_asr
from confide.theory.advice import Advice, Case, advise
from confide.theory.measure import Measured, measure, per_layer
from confide.theory.rehearse import MOST_STEPS, rehearse
from confide.theory.terms import CAUSES, Centre, Parts, aggregate, central_step, dominant, noise_squares, split_error

WARNING = (
    "This reads users' data at a checkpoint and shows numbers from it. They are not covered by the run's epsilon: for "
    "simulations and research, not for publishing about real users."
)
MANY = 50_000
"""Numbers of a model above which a frozen encoder with a head is worth a thought."""
MEANING = {
    "optimisation": "the gradient that no error explains: the run is not at its floor yet",
    "drift": "users move while they take local steps, each towards its own minimum",
    "clipping": "the bound changes users' lengths by different factors and bends their mean",
    "users": "a cohort is not the population",
    "batches": "a batch is not a user's data",
    "noise": "the noise of privacy",
}


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, what it means, and what to do."""

    step: int
    measured: Measured
    parts: Parts
    centre: Centre
    bounds: torch.Tensor  # (layers,) C_h
    bound: pfl_asr.Terms
    rho: float
    advice: list[Advice]

    @property
    def cause(self) -> str:
        """The cause with the largest term over the whole model."""
        return dominant(self.parts.sums)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """The terms summed over the tensors of each kind."""
        found: dict[str, dict[str, float]] = {}
        for name, row in zip(self.measured.layout.names, self.parts.terms.tolist(), strict=True):
            sums = found.setdefault(_kind(name), dict.fromkeys(CAUSES, 0.0))
            for cause, value in zip(CAUSES, row, strict=True):
                sums[cause] += value
        return found

    def to_json(self) -> dict[str, Any]:
        m, p = self.measured, self.parts
        columns = {
            "trust_ratio": self.centre.trust,
            "bound": self.bounds,
            "update_norm": per_layer(m.layout, m.moving).sqrt().mean(dim=(0, 1)),
            "largest_gradient": m.largest,
            "variance_between_users": m.user_variance(),
            "variance_within_users": m.batch_variance,
            "curvature": m.noise_curvature,
            "share_clipped": p.clipped,
            "shortened": p.shortened,
        }
        layers = []
        for h, (name, size, row) in enumerate(zip(m.layout.names, m.layout.sizes, p.terms.tolist(), strict=True)):
            terms = dict(zip(CAUSES, row, strict=True))
            own = {key: float(column[h]) for key, column in columns.items()}
            layers.append(
                {"name": name, "kind": _kind(name), "size": size, "dominant": dominant(terms), "terms": terms, **own}
            )
        document: dict[str, Any] = json_safe({
            "warning": WARNING, "step": self.step, "users": len(m.users), "dominant": self.cause, "terms": p.sums,
            "squared_gradient": float(p.signal.sum()), "loss": m.loss, "smoothness": m.smoothness, "reach": m.reach,
            "local_steps": m.local_steps, "rho": self.rho, "layers": layers,
            "bound": {**asdict(self.bound), "total": self.bound.total, "bound": self.bound.bound},
            "advice": [asdict(each) for each in self.advice],
        })  # fmt: skip
        return document

    def to_text(self) -> str:
        m, kinds = self.measured, self.by_kind()
        width = max(len("whole model"), *map(len, kinds))
        lines = [
            WARNING, "",
            f"step {self.step}, {len(m.users)} users probed: what is left of the squared gradient, by cause", "",
            f"{'':<{width}}  {'total':>9}  " + "  ".join(f"{cause:>12}" for cause in CAUSES),
            *(_row(name, sums, width) for name, sums in kinds.items()),
            *([_row("whole model", self.parts.sums, width)] if len(kinds) > 1 else []), "",
            f"{self.cause} dominates: {MEANING[self.cause]}.",
            f"M {float(m.largest.max()):.3g} (longest gradient of a batch and tensor), trust ratios "
            f"{float(self.centre.trust.min()):.3g} to {float(self.centre.trust.max()):.3g}, "
            f"L at least {m.smoothness:.3g}, variance between users {float(m.user_variance().sum()):.3g}, within users "
            f"{float(m.batch_variance.sum()):.3g}, rho {self.rho:.3g}",
            self._bound_text(), "", "What to change:",
        ]  # fmt: skip
        if not self.advice:
            lines.append("nothing: none of the changes that were rehearsed made it clearly better.")
        for number, each in enumerate(self.advice, 1):
            times = "" if each.gain is None else f"{each.gain:.2g}" if each.gain < 100 else "over 100"
            gain = f" (floor {times} times lower, if the probe is right)" if times and each.loss is None else ""
            lines.append(f"{number}. {each.what}{gain}: {each.why}.")
            lines += [f"     --set '{setting}'" for setting in each.settings]
            lines.append(f"     cost in privacy: {each.privacy}")
        return "\n".join(lines)

    def _bound_text(self) -> str:
        terms = {k: v for k, v in asdict(self.bound).items() if k != "kappa"}
        largest = dominant(terms)
        named = f"{largest.replace('_', ' ')}, {terms[largest]:.3g}"
        if self.bound.kappa <= 0:
            return (
                f"PFL-ASR Theorem 3 says nothing here: its kappa is {self.bound.kappa:.3g}, since eta_loc T_loc is "
                f"{self.measured.reach:.3g} and not near 1. Its largest term would be {named}"
            )
        bound = f"{self.bound.bound:.3g}"
        return f"PFL-ASR Theorem 3 bounds the mean squared gradient by {bound}; its largest term is {named}"


def diagnose_run(run: Path, users: int = 16, draws: int = 2, seed: int = 0, steps: int = MOST_STEPS) -> Diagnosis:
    """Diagnose the run in a folder at its last checkpoint; advise what rehearsals of so many steps show to help."""
    wanted = folder.held_recipe(run)
    if not (run / checkpoint.FILE).exists():
        raise UserError(
            f"{run} has no {checkpoint.FILE}: a diagnosis probes the model that a run was at. Let it reach its first "
            f"checkpoint with `confide resume {run}`"
        )
    saved = checkpoint.load(run)
    if saved.recipe_digest != wanted.digest:
        raise UserError(f"{run / folder.RECIPE} was changed after the run began; put it back first")
    task = make_task(wanted.task, wanted.run.seed)
    found = diagnose(wanted, saved.state, users, draws, seed, task, first_loss=_first_loss(run / folder.METRICS))
    if steps == 0:
        return found
    return replace(found, advice=[*rehearse(wanted, task, found.advice, seed, steps), *train_less(wanted, found)])


def train_less(recipe: Recipe, found: Diagnosis) -> list[Advice]:
    """Advise a frozen encoder where much noise is on many numbers; that is another task, which nobody rehearses."""
    size, encoder = found.measured.layout.size, getattr(getattr(recipe.task, "model", None), "encoder", None)
    if found.cause != "noise" or size < MANY or encoder is not None:
        return []
    why = f"noise is on {size:,} numbers, and its length grows with the root of how many are trained"
    what = "train less: a small head on a frozen encoder (`confide encoder list`, task.model.encoder)"
    return [Advice(what, why, (), None)]


def diagnose(
    recipe: Recipe,
    state: State,
    users: int = 16,
    draws: int = 2,
    seed: int = 0,
    task: Task | None = None,
    first_loss: float | None = None,
) -> Diagnosis:
    """Probe users from a state of a run and split what holds it back into its causes. Nothing is released."""
    loop = make_loop(recipe, task=task)
    step = min(state.step, recipe.run.steps - 1)
    rule, plan, layout = loop.bounds.rule(state), loop.plan, loop.layout
    measured = measure(loop.task, recipe.local, layout, plan.weights, state.parameters, step, users, draws, seed)
    if float(per_layer(layout, measured.still).sum()) == 0:
        raise UserError("every probed user's gradient is zero at this checkpoint; there is nothing to diagnose")
    gradient = aggregate(measured, rule)
    noise = noise_squares(plan, rule, layout)
    draw = generator(seed, "diagnose noise")
    for piece, square, size in zip(layout.pieces(gradient), noise.tolist(), layout.sizes, strict=True):
        piece.add_(torch.from_numpy(draw.standard_normal(size)).to(piece.dtype), alpha=math.sqrt(square / size))
    centre = central_step(recipe.central, layout, state.parameters, state.optimiser, gradient, step)
    parts = split_error(measured, rule, plan, centre)
    deviation = float(noise.sum()) ** 0.5 / layout.size**0.5
    sigma = deviation / rule.sensitivity if math.isfinite(rule.sensitivity) else 0.0
    return Diagnosis(
        state.step, measured, parts, centre, rule.layer_bounds,
        _bound(recipe, measured, rule, plan, centre, step, sigma, first_loss),
        norm.rho_of_noise(sigma, layout.size, recipe.run.steps),
        advise(Case(recipe, measured, rule, plan, centre, parts)),
    )  # fmt: skip


def _bound(
    recipe: Recipe, measured: Measured, rule: Bounder, plan: Plan, centre: Centre, step: int, sigma: float,
    first_loss: float | None,
) -> pfl_asr.Terms:  # fmt: skip
    """Put what was measured into Theorem 3, corrected; L* is taken as 0, below which none of our losses goes."""
    norms = per_layer(measured.layout, measured.moving).sqrt()  # (users, draws, layers)
    intra = norms.var(dim=1, correction=1 if norms.shape[1] > 1 else 0).mean(dim=0)
    inter = norms.mean(dim=1).var(dim=0)
    bounds = rule.layer_bounds if rule.per_layer else torch.full_like(intra, rule.sensitivity)
    layers = [
        pfl_asr.Layer(size, *map(float, rest))
        for size, *rest in zip(
            measured.layout.sizes, measured.largest, bounds, centre.trust, centre.scaling, intra, inter, strict=True
        )
    ]
    steps = max(round(measured.local_steps), 1)
    setting = pfl_asr.Setting(
        gap=first_loss if first_loss is not None else measured.loss,
        central_rate=recipe.central.learning_rate * recipe.central.schedule(step),
        local_rate=measured.reach / steps, steps=recipe.run.steps, local_steps=steps, smoothness=measured.smoothness,
        global_variance=float(measured.user_variance().sum()), local_variance=float(measured.batch_variance.sum()),
        noise=sigma, xi=centre.xi, bound=rule.sensitivity if sigma else None,
    )  # fmt: skip
    return pfl_asr.theorem3(setting, layers, plan.rate, corrected=True)


def _first_loss(path: Path) -> float | None:
    try:
        with path.open() as lines:
            value = json.loads(next(lines))["loss"]
        return float(value) if value is not None else None
    except (OSError, StopIteration, ValueError, KeyError):
        return None


def _kind(name: str) -> str:
    return kind_of(name) if "." in name else name


def _row(name: str, sums: dict[str, float], width: int) -> str:
    total = sum(sums.values()) or 1.0
    top = dominant(sums)
    cells = (f"{'*' if cause == top else ''}{value / total:.1%}" for cause, value in sums.items())
    return f"{name:<{width}}  {total:>9.3g}  " + "  ".join(f"{cell:>12}" for cell in cells)
