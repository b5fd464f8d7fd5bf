"""The cells of PFL-ASR's tables at a small scale: what each changes in a recipe, and what the paper has in its place.

Noise is given as s, its deviation on the average in units of C: the paper's sigma_DP. A model with d numbers meets
noise of norm s C sqrt(d) and an average of norm C at most, so 1 / (s sqrt(d)) is the signal over noise of a whole
update. The paper's models hold hundreds of times as many numbers. `scaled_noise` gives the s at which ours has the same
ratio, and LAMB's xi grows by the same factor, so that it stays where it is against C / sqrt(d), the size of a
coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from confide.speech.model import ModelSettings, parameter_shapes

CLIPPING = {
    "global": "bounding={rule: clip, bound: 0.01}",
    "uniform": "bounding={rule: per_layer_clip, bound: 0.01, split: uniform}",
    "dim": "bounding={rule: per_layer_clip, bound: 0.01, split: dim}",
}
FRESH = "none"
SEED = "seed"
WEAK = "seed-20%"
TRAINED_HEAD = "head"
LARS_SEEDS = {"seed-lars": 1, "seed-lars-long": 3}
"""Seeds by LARS at the paper's rate, and how many times as long as ours they are trained."""
BEHIND = "seed-post"
POST = "task.model={preset: tiny, norm: post, cape_shift: 0.5}"
"""A seed of the model that has its LayerNorms behind each half of a block."""
SMALL = ("sampling.cohort=6", "run.steps=40", "evaluation.every=40")
"""A cell of some twelve processor seconds: 40 steps of 6 users who take three local steps each."""
DRIFT = (
    "sampling.cohort=4", "local={epochs: 10, learning_rate: 0.5, batch_seconds: 12, gradient_clip: 1.0}",
    "run.steps=15", "evaluation.every=15", "final={kind: last}",
    "central={kind: lamb, learning_rate: 0.04, bias_correction: true}",
)  # fmt: skip
"""Where users drift: ten local epochs, cohorts of 4, few steps."""
XI = 1e-6
PAPERS_XI = "central.epsilon=2.4e-5"
"""At the place that it has against the coordinates of the paper's updates at C = 1e-2."""
GROUP_NOISE = 1e-2
LORA_NOISE = 5e-3
WHISPER_NOISE = 5e-4
"""On 8 million numbers it is as long as the noise of `LORA_NOISE` on 67 thousand."""
TRANSFER = {"lamb": (0.01, 0.03, 0.09), "adam": (0.006, 0.018, 0.054), "lars": (10.0, 30.0, 90.0)}
"""Central learning rates, three for each optimiser and each three times the last."""
_FALLING = "schedule: {kind: exponential, rate: 0.5, start: 20, transition: 16}"
_OWN = {"lamb": ", bias_correction: true"}  # as Adam has it: these updates are of the size of LAMB's xi
TUNED = {  # central learning rates, of which the best is reported as the paper does
    "lamb": (0.01, 0.02, 0.04, 0.08), "adam": (0.002, 0.004, 0.008, 0.016), "lars": (3.0, 10.0, 30.0, 60.0),
    "sgd": (30.0, 100.0, 300.0, 1000.0),
}  # fmt: skip
SIZES = {
    "narrow": "{preset: tiny, width: 64, mlp: 256, cape_shift: 0.5}",
    "shallow": "{preset: tiny, layers: 2, cape_shift: 0.5}",
    "baseline": "{preset: tiny, cape_shift: 0.5}",
    "wide": "{preset: tiny, width: 144, mlp: 576, cape_shift: 0.5}",
    "deep": "{preset: tiny, layers: 6, cape_shift: 0.5}",
}
_SHAPES = {
    "narrow": {"width": 64, "mlp": 256}, "shallow": {"layers": 2}, "baseline": {}, "wide": {"width": 144, "mlp": 576},
    "deep": {"layers": 6},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One row of a table: what identifies it, what it changes, which seed model it begins from, what the paper has."""

    row: dict[str, Any]
    changes: tuple[str, ...] = ()
    start: str = SEED
    paper: str = ""
    best_of: tuple[tuple[str, ...], ...] = ((),)
    """Further changes of which the best is used, tried once on people who are neither trained nor tested on."""
    chosen_by: str = ""
    """Of which row the choice is, where it is not this row's own: `tuned` of that row."""
    recipe: str = "federated"
    """Which of the dataset's recipes is changed."""

    @property
    def tuned(self) -> str:
        """The name under which others take over this row's choice."""
        return f"{self.row.get('optimiser')} for {self.row.get('blocks')} and {self.row.get('cohort')}"


def noisy(s: float) -> tuple[str, ...]:
    """Noise of deviation s C on the average."""
    if s == 0:
        return ("privacy.mechanism=none",)
    return ("privacy.mechanism=gaussian", f"privacy.noise_scale={s}", "privacy.placement=average", "privacy.delta=1e-9")


def growth(size: str = "baseline") -> float:
    """How much larger s has to be here for the same signal over noise: the root of the paper's numbers over ours."""
    theirs, ours = ModelSettings(preset=size), ModelSettings(preset="tiny", **_SHAPES[size])
    counts = [sum(math.prod(shape) for shape in parameter_shapes(each).values()) for each in (theirs, ours)]
    return math.sqrt(counts[0] / counts[1])


def scaled_noise(sigma: float, size: str = "baseline") -> tuple[str, ...]:
    """The noise that does to our model what the paper's sigma does to its own, with LAMB's xi in its place."""
    s, xi = (float(f"{each * growth(size):.3g}") for each in (sigma, XI))
    return (*noisy(s), f"central.epsilon={xi}")


def table1() -> list[Cell]:
    """Noise by kind of clipping; sigma is the paper's, its rows are test WERs on Common Voice."""
    paper = {
        ("global", 0): 18.9, ("global", 1): 26.7, ("global", 3): 31.1, ("global", 10): 35.2, ("uniform", 0): 19.1,
        ("uniform", 1): 19.5, ("uniform", 3): 21.2, ("uniform", 10): 25.0, ("uniform", 30): 29.3,
        ("uniform", 100): 33.9, ("dim", 1): 19.3, ("dim", 3): 20.4, ("dim", 10): 23.7, ("dim", 30): 28.2,
    }  # fmt: skip
    return [
        Cell({"sigma": sigma * 1e-6, "clipping": rule}, (*SMALL, CLIPPING[rule], *scaled_noise(sigma * 1e-6)),
             paper=str(paper.get((rule, sigma), "")))
        for sigma, rule in product((0, 1, 3, 10, 30, 100), CLIPPING)
    ]  # fmt: skip


def imbalance() -> list[Cell]:
    """Starts that compute the same with longer and longer updates of the LayerNorms; not a table of the paper.

    The start is constructed (`confide.speech.symmetry`). LayerNorms get updates 4.8 times as long as those of the
    attention at c = 3 and 15 times at c = 5; the paper's Figure 5 has about ten. `balanced` is c = 5, balanced.
    """
    cells = [
        Cell({"c": c, "noise": s, "clipping": rule}, (*SMALL, CLIPPING[rule], *noisy(s)), f"seed-c{c}")
        for c, s, rule in product((1, 3, 5), (0.0, 3e-4, 1e-3), CLIPPING)
    ]
    return cells + [
        Cell({"c": "balanced", "noise": s, "clipping": rule},
             (*SMALL, CLIPPING[rule].replace("}", ", balance: true}"), *noisy(s)), "seed-c5")
        for s, rule in product((0.0, 3e-4, 1e-3), CLIPPING)
    ]  # fmt: skip


def natural() -> list[Cell]:
    """Starts that nobody constructed, under noise: seeds by LARS, a long one, and LayerNorms behind; not in the paper.

    The seed by Adam is c = 1 of `imbalance`.
    """
    starts: dict[str, tuple[str, ...]] = {**dict.fromkeys(LARS_SEEDS, ()), BEHIND: (POST,)}
    return [
        Cell({"seed": start, "noise": s, "clipping": rule}, (*SMALL, *model, CLIPPING[rule], *noisy(s)), start)
        for start, model in starts.items()
        for s, rule in ((0.0, "global"), *product([1e-3], CLIPPING))
    ]


def table4() -> list[Cell]:
    """Cohort size with and without a seed model."""
    paper = {(SEED, 4): "28.8 at 8", (SEED, 8): "26.3 at 16", (SEED, 16): "23.9 at 32", (SEED, 32): "22.0 at 64"}
    fresh = {(FRESH, 4): "66.7 at 8", (FRESH, 8): "56.5 at 16", (FRESH, 16): "46.3 at 32", (FRESH, 32): "38.0 at 64"}
    return [
        Cell({"seed": start, "cohort": size}, (f"sampling.cohort={size}",), start, (paper | fresh)[start, size])
        for start, size in product((FRESH, SEED), (4, 8, 16, 32))
    ]


def table6() -> list[Cell]:
    """Each utterance to a random user, in place of its speaker."""
    paper = {
        (FRESH, 8, "speakers"): "56.5 at 16", (FRESH, 8, "iid"): "55.0 at 16", (FRESH, 16, "speakers"): "46.3 at 32",
        (FRESH, 16, "iid"): "45.8 at 32", (SEED, 8, "speakers"): "26.3 at 16", (SEED, 8, "iid"): "25.0 at 16",
        (SEED, 16, "speakers"): "23.9 at 32", (SEED, 16, "iid"): "22.7 at 32",
    }  # fmt: skip
    return [
        Cell({"seed": start, "cohort": size, "users": users}, (f"sampling.cohort={size}", f"task.users={users}"), start,
             paper[start, size, users])
        for start, size, users in product((FRESH, SEED), (8, 16), ("speakers", "iid"))
    ]  # fmt: skip


def table8() -> list[Cell]:
    """Central optimisers under one schedule, each at its best rate; a weak seed stands for the paper's "no seed"."""
    paper = {
        (WEAK, "lamb"): "17.5 (LibriSpeech, cohort 8, no seed)", (WEAK, "lars"): "31.6", (WEAK, "adam"): "31.0",
        (SEED, "lamb"): "10.3", (SEED, "lars"): "10.6", (SEED, "adam"): "10.5",
    }  # fmt: skip
    return [
        Cell({"seed": start, "optimiser": kind}, (), start, paper.get((start, kind), ""),
             _rates(kind, rates))
        for start, (kind, rates) in product((WEAK, SEED), TUNED.items())
    ]  # fmt: skip


def table13() -> list[Cell]:
    """FedProx."""
    paper = {0.0: "17.5 (LibriSpeech, cohort 8)", 0.1: "17.5"}
    return [Cell({"mu": mu}, (f"local.proximal={mu}",), paper=paper.get(mu, "")) for mu in (0.0, 1e-3, 1e-2, 0.1, 1.0)]


def table15() -> list[Cell]:
    """Seed models that were stopped early."""
    paper = {"none": "100.0 to 44.7", "seed-5%": "87.8 to 37.8", "seed-20%": "81.1 to 38.2", "seed": "61.2 to 23.9"}
    return [Cell({"seed": start}, (), start, paper[start]) for start in paper]


def table21() -> list[Cell]:
    """Sizes of the model, with and without the noise of sigma = 10e-6."""
    paper = {
        ("narrow", 0): "18.2", ("narrow", "global"): "31.7", ("narrow", "uniform"): "23.2", ("baseline", 0): "17.6",
        ("baseline", "global"): "34.6", ("baseline", "uniform"): "23.3", ("wide", 0): "16.6",
        ("wide", "global"): "24.7", ("wide", "uniform"): "23.7", ("shallow", 0): "19.8", ("shallow", "global"): "35.1",
        ("shallow", "uniform"): "24.8", ("deep", 0): "17.2", ("deep", "global"): "25.7", ("deep", "uniform"): "26.4",
    }  # fmt: skip
    cells = []
    for size, model in SIZES.items():
        for rule, sigma in (("global", 0.0), ("global", 1e-5), ("uniform", 1e-5)):
            key = (size, rule if sigma else 0)
            changes = (f"task.model={model}", *SMALL, CLIPPING[rule], *scaled_noise(sigma, size))
            cells.append(Cell({"model": size, "sigma": sigma, "clipping": rule}, changes, f"seed-{size}", paper[key]))
    return cells


GROUPS = {"mlp": ["*.mlp.*"], "wqkv": ["*.wqkv"], "wf": ["*.wf"], "norms": ["*.ln1.*", "*.ln2.*"]}


def groups() -> list[Cell]:
    """Noise on one group of tensors, on all but the MLPs, and half of it on the MLPs (Figures 15 and 16).

    At s = 1e-2, where noise costs about as much here as sigma = 10e-6 does in the paper. No guarantee holds.
    """
    partial = f"privacy={{mechanism: partial, noise_scale: {GROUP_NOISE}, placement: average, "
    kinds = {"none": noisy(0), "all": noisy(GROUP_NOISE)}
    kinds |= {name: (f"{partial}tensors: {_listed(patterns)}}}",) for name, patterns in GROUPS.items()}
    mlp = f"tensors: {_listed(GROUPS['mlp'])}, all_but: true"
    kinds["all but mlp"] = (f"{partial}{mlp}}}",)
    kinds["mlp at half"] = (f"{partial}{mlp}, elsewhere: 0.5}}",)
    return [
        Cell({"noise on": name, "clipping": rule}, (*SMALL, CLIPPING[rule], *changes))
        for rule, (name, changes) in product(("global", "dim"), kinds.items())
    ]


def weighted() -> list[Cell]:
    """More of the bound for the MLPs (appendix H.5): a_h is beta for them and 1 elsewhere; beta = 1 is dim."""
    more = "bounding={{rule: per_layer_clip, bound: 0.01, split: weighted, layer_weights: {{'*.mlp.*': {}}}}}"
    rules = {1.0: CLIPPING["dim"]} | {beta: more.format(beta) for beta in (1.5, 2.0, 3.0, 10.0)}
    return [Cell({"beta": beta}, (*SMALL, rule, *noisy(GROUP_NOISE))) for beta, rule in rules.items()]


def figure13() -> list[Cell]:
    """How norms go over training, with global clipping (Figure 13) and dim (Figure 14), at noises of Table 1."""
    watched = ("evaluation.every=8", "local.gradient_norms=true")
    return [
        Cell({"sigma": sigma * 1e-6, "clipping": rule}, (*SMALL, *watched, CLIPPING[rule], *scaled_noise(sigma * 1e-6)))
        for rule, sigma in product(("global", "dim"), (0, 10, 100))
    ]


def local_clip() -> list[Cell]:
    """Local gradients clipped to a norm of 1 and as they are, without noise (appendix H.3)."""
    kinds = {"1": "local.gradient_clip=1.0", "none": "local.gradient_clip=null"}
    return [
        Cell({"local clip": name}, (*SMALL, CLIPPING["global"], *noisy(0), change)) for name, change in kinds.items()
    ]


def local_optimisers() -> list[Cell]:
    """Local steps by other rules (appendix G.4), each at its best rate of three; the state ends with a turn."""
    rates = {"sgd": (0.25, 0.5, 1.0), "adam": (1e-3, 3e-3, 1e-2), "lars": (0.01, 0.03, 0.1), "lamb": (1e-3, 3e-3, 1e-2)}
    return [
        Cell({"local": kind}, (*SMALL, CLIPPING["global"], *noisy(0)), SEED, "", tuple(
            (f"local.learning_rate={rate}", *([] if kind == "sgd" else [f"local.optimiser={{kind: {kind}}}"]))
            for rate in own))
        for kind, own in rates.items()
    ]  # fmt: skip


def bounds() -> list[Cell]:
    """The bound C without noise (section 4.3): nothing should depend on it, because LAMB scales updates anew."""
    cells = [
        Cell({"C": bound, "clipping": rule}, (*SMALL, CLIPPING[rule].replace("0.01", bound), *noisy(0)))
        for rule, found in (("global", ("1e-4", "1e-3", "0.01", "0.1", "1.0")), ("dim", ("1e-4", "0.01", "1.0")))
        for bound in found
    ]
    return [replace(cell, changes=(*cell.changes, PAPERS_XI)) for cell in cells]


def optimisers() -> list[Cell]:
    """LAMB and Adam as central optimisers under noise (section 3), each at its best rate of three in each cell.

    At s = 1e-2, where noise costs about as much here as sigma = 10e-6 does in the paper.
    """
    rates = {"lamb": (0.01, 0.02, 0.04), "adam": (0.002, 0.004, 0.008)}
    return [
        Cell({"noise": GROUP_NOISE, "clipping": rule, "optimiser": kind},
             (*SMALL, CLIPPING[rule], *noisy(GROUP_NOISE)), SEED, "", _rates(kind, own))
        for rule, (kind, own) in product(("global", "dim"), rates.items())
    ]  # fmt: skip


def product_of_bound_and_noise() -> list[Cell]:
    """Half the bound with twice sigma and with the same (appendix H.3); noise has the deviation C sigma.

    The paper says that models are alike as long as C times sigma is. That keeps the noise, beside half of the signal
    where updates are longer than C; the same sigma keeps the two in proportion.
    """
    kinds = (("0.01", 1), ("0.005", 2), ("0.005", 1))
    return [
        Cell({"C": bound, "sigma": times * GROUP_NOISE},
             (*SMALL, CLIPPING["global"].replace("0.01", bound), *noisy(times * GROUP_NOISE), PAPERS_XI))
        for bound, times in kinds
    ]  # fmt: skip


def local() -> list[Cell]:
    """Ten epochs against ten steps, and updates that are bounded against updates as they are, where users drift.

    C is so small that it shortens every update, so these are normalised (appendices G.7 and H.2).
    """
    rest = "learning_rate: 0.5, batch_seconds: 12, gradient_clip: 1.0}"
    kinds = {
        ("10 epochs", "normalised"): (),
        ("10 steps", "normalised"): (f"local={{steps: 10, {rest}",),
        ("10 epochs", "as they are"): ("bounding={rule: none}",),
    }
    return [
        Cell({"local": work, "updates": kind}, (*DRIFT, "task.users=speakers", "local.proximal=0.0", *changes), FRESH)
        for (work, kind), changes in kinds.items()
    ]


def central() -> list[Cell]:
    """Gradients of central training by kind of tensor, from the seed and from nothing, by LARS (Figures 8 and 9).

    The users' speech is pooled, and each of two turns takes one batch of it and sends its gradient, as the seed's does.
    """
    pooled = ("task.pool=2", "sampling={kind: fixed, cohort: 2}", "bounding={rule: none}", "run.steps=60",
              "local={steps: 1, learning_rate: 1.0, batch_seconds: 30}", "evaluation.every=6", "final={kind: last}",
              "central={kind: lars, learning_rate: 0.5}")  # fmt: skip
    return [Cell({"seed": start}, pooled, start) for start in (SEED, FRESH)]


def precision() -> list[Cell]:
    """bfloat16 and float32 (appendix H.3)."""
    model = "task.model={{preset: tiny, cape_shift: 0.5{}}}"
    kinds = {"float32": "", "bfloat16": ", dtype: bfloat16"}
    return [Cell({"numbers": name}, (*SMALL, model.format(more))) for name, more in kinds.items()]


def clients() -> list[Cell]:
    """Speakers against utterances dealt at random, and FedProx, where users drift: ten local epochs, cohort 4, no seed.

    The paper's figures are those of Common Voice with cohorts of 16 (Table 6) and of LibriSpeech with 8 (Table 13).
    """
    rows = {("speakers", 0.0): "56.5", ("iid", 0.0): "55.0", ("speakers", 0.1): ""}
    return [
        Cell({"users": users, "mu": mu}, (*DRIFT, f"task.users={users}", f"local.proximal={mu}"), FRESH, paper)
        for (users, mu), paper in rows.items()
    ]


def table7() -> list[Cell]:
    """LayerNorms in front of each half of a block or behind it, without and with a warm-up of the central rate.

    The paper has cohorts of one, 64,000 steps and no seed; its rates are tuned for each row, and so are these.
    """
    paper = {("pre", 0): "17.9", ("post", 0): "could not train", ("post", 15): "18.0"}
    return [
        Cell({"norm": norm, "warmup": warm}, (*SMALL, f"task.model={{preset: tiny, norm: {norm}, cape_shift: 0.5}}"),
             FRESH, found, _rates("lamb", (0.02, 0.06), f"{_FALLING[:-1]}, warmup: {warm}}}"))
        for (norm, warm), found in paper.items()
    ]  # fmt: skip


def pretrained() -> list[Cell]:
    """Head and low-rank updates of a pretrained encoder's last block under the three rules; not a table of the paper.

    The encoder is Whisper's, a transformer that others trained for long. Cells begin with a head trained alone.
    """
    model = "task.model={encoder: {source: whisper-tiny.en, train: [head, lora], first: 3, edges: false}}"
    changes = (model, "sampling.cohort=6", "local={steps: 1, batch_size: 8, learning_rate: 1.0}", "run.steps=30",
               "evaluation.every=30", "central={kind: adam, learning_rate: 0.1, rates: {'*.lora_?': 0.1}, schedule: "
               "{kind: linear, steps: 30}}")  # fmt: skip
    rules = {name: text.replace("0.01", "0.1") for name, text in CLIPPING.items()}
    return [
        Cell({"noise": s, "clipping": rule}, (*changes, rules[rule], *noisy(s)), TRAINED_HEAD, recipe="pretrained")
        for s, rule in ((0.0, "global"), *product([LORA_NOISE], CLIPPING))
    ]


def whisper() -> list[Cell]:
    """All of Whisper's encoder and a head under the three rules; not a table of the paper.

    Every block is trained, from the head that `pretrained` begins with, in few steps: one takes some minutes. Each rule
    has the better of two rates for the blocks.
    """
    model = "task.model={encoder: {source: whisper-tiny.en, train: [head, all], first: 0, edges: false}}"
    changes = (model, "sampling.cohort=6", "local={steps: 1, batch_size: 8, learning_rate: 1.0}", "run.steps=12",
               "evaluation.every=12", "task.test.passes=1")  # fmt: skip
    rates = tuple(
        (f"central={{kind: adam, learning_rate: 0.1, rates: {{'layers.*': {rate}}}, "
         "schedule: {kind: linear, steps: 12}}",) for rate in (0.0003, 0.003)
    )  # fmt: skip
    rules = {name: text.replace("0.01", "0.1") for name, text in CLIPPING.items()}
    return [
        Cell({"noise": s, "clipping": rule}, (*changes, rules[rule], *noisy(s)), TRAINED_HEAD, "", rates,
             recipe="pretrained")
        for s, rule in ((0.0, "global"), *product([WHISPER_NOISE], CLIPPING))
    ]  # fmt: skip


def transfer() -> list[Cell]:
    """Whether LAMB needs no new rate: no seed, 3 and 12 blocks, cohorts of 4 and 16 (Tables 8 and 9).

    Every optimiser has the rate that is best for 3 blocks and cohorts of 16 ("transferred") and the best of each cell.
    Half as wide as the tiny model, and 12 s of speech of each user in each of 30 steps: 12 blocks then take seconds.
    """
    cells = []
    for (kind, rates), layers, cohort in product(TRANSFER.items(), (3, 12), (4, 16)):
        model = f"task.model={{preset: tiny, layers: {layers}, width: 48, mlp: 192, cape_shift: 0.5}}"
        changes = (model, f"sampling.cohort={cohort}", "run.steps=30", "evaluation.every=30", "local.steps=2",
                   "local.batch_seconds=6")  # fmt: skip
        tried = _rates(kind, rates)
        row = {"blocks": layers, "cohort": cohort, "optimiser": kind}
        cells.append(Cell({**row, "rate": "best"}, changes, FRESH, "", tried))
        cells.append(Cell({**row, "rate": "transferred"}, changes, FRESH, "", tried, chosen_by=f"{kind} for 3 and 16"))
    return cells


def _rates(kind: str, rates: tuple[float, ...], schedule: str = _FALLING) -> tuple[tuple[str, ...], ...]:
    """A central optimiser at each of these rates, all with the same schedule."""
    rest = f"{schedule}{_OWN.get(kind, '')}"
    return tuple((f"central={{kind: {kind}, learning_rate: {rate}, {rest}}}",) for rate in rates)


def _listed(patterns: list[str]) -> str:
    return "[" + ", ".join(f"'{pattern}'" for pattern in patterns) + "]"


TABLES = {
    "table1": table1, "imbalance": imbalance, "table4": table4, "table6": table6, "table7": table7, "table8": table8,
    "table13": table13, "table15": table15, "table21": table21, "groups": groups, "bounds": bounds, "clients": clients,
    "transfer": transfer, "pretrained": pretrained, "weighted": weighted, "figure13": figure13,
    "optimisers": optimisers, "product": product_of_bound_and_noise, "local": local, "central": central,
    "precision": precision, "natural": natural, "local-clip": local_clip, "local-optimisers": local_optimisers,
    "whisper": whisper,
}  # fmt: skip
