# ruff: noqa: E501  (the lines of a page are as long as what is filled in)
"""What 70 million users, cohorts of 204,800 and 2,034 steps of the 255.8M model take, from what is measured here.

    python benchmarks/scale.py --out docs/scale.md

Measures the parts (sampler, addition, noise, optimiser, ledger, masks), runs the real loop at that population and
cohort with a small model, and writes the page. Assumptions that are no measurement are options, and stand in a table of
their own. About three minutes and 3 GB.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from confide.build import make_loop
from confide.federated import optimisers
from confide.federated.bounding import ROUNDING
from confide.federated.optimisers import Lamb
from confide.federated.parameters import Layout
from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.gaussian import Address, System
from confide.privacy.ledger import Ledger
from confide.privacy.sampling import draw_cohort
from confide.privacy.trust.neighbours import neighbourhood
from confide.privacy.trust.secure import ring_for, threshold
from confide.privacy.trust.secure_sum import make_ring, prg, sensitivity
from confide.recipe import parse

USERS, COHORT, STEPS, PARAMETERS, TENSORS = 70_000_000, 204_800, 2034, 255_800_000, 296
MULTIPLIER, DELTA, BOUND = 0.6144, 1e-9, 0.01
PROBE = 16_000_000  # parameters that are timed; every pass is linear in them
GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class Constants:
    """Seconds, measured on this machine."""

    sample: float  # one cohort of the whole population
    add: float  # one parameter of one update onto a sum
    noise: float  # one parameter
    optimiser: float  # one parameter
    line: float  # of the ledger, synced to disk
    mask: float  # one word of a mask
    bytes_a_line: float


def timed(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def event() -> Event:
    return Event("poisson", COHORT / USERS, COHORT, USERS, MULTIPLIER, BOUND / COHORT)


def measure(place: Path) -> Constants:
    torch.set_num_threads(1)
    total, update = torch.zeros(PROBE), torch.full((PROBE,), 1e-3)
    layout = Layout(("w",), ((PROBE,),))
    lamb, state = Lamb(learning_rate=1e-3), optimisers.init(Lamb(learning_rate=1e-3), layout.views(total))
    ring = make_ring(BOUND, COHORT, PROBE)
    ledger = Ledger.create(place / "ledger.jsonl", {"delta": DELTA})
    steps = iter(range(10**6))
    line = timed(lambda: ledger.record(next(steps), event(), "bench"), 30)
    return Constants(
        sample=timed(lambda: draw_cohort("poisson", COHORT, USERS, None, 0), 2),
        add=timed(lambda: layout.add_scaled(update, [0.5], total)) / PROBE,
        noise=timed(lambda: System().add(total, 1.0, Address(0))) / PROBE,
        optimiser=timed(lambda: optimisers.update(lamb, layout.views(total), layout.views(update), state, 1)) / PROBE,
        line=line,
        mask=timed(lambda: prg(ring, bytes(16), 1), 2) / PROBE,
        bytes_a_line=(place / "ledger.jsonl").stat().st_size / (ledger.count + 1),
    )


def real_run(place: Path, steps: int, workers: int) -> dict[str, Any]:
    """The real sampler, engine, bounding, ledger, noise and optimiser, with a small model and made-up users."""
    recipe = parse(
        {
            "task": {
                "kind": "bench/mlp", "users": USERS, "distinct": 1000, "examples": 4, "width": 32, "hidden": 16,
                "classes": 4,
            },
            "sampling": {"kind": "poisson", "cohort": COHORT},
            "local": {"epochs": 1, "learning_rate": 0.1},
            "bounding": {"rule": "clip", "bound": 0.5},
            "privacy": {
                "mechanism": "gaussian", "noise_multiplier": MULTIPLIER, "delta": DELTA, "accountant": "rdp",
                "source": "system",
            },
            "central": {"kind": "sgd", "learning_rate": 1.0},
            "evaluation": {"every": 10**9, "last": 1},
            "run": {"steps": steps},
        }
    )  # fmt: skip
    began = time.perf_counter()
    loop = make_loop(recipe, lambda header: Ledger.create(place / "run.jsonl", header), workers)
    state = loop.start()
    ready = time.perf_counter() - began
    cohorts, times = [], []
    for _ in range(steps):
        began = time.perf_counter()
        cohorts.append(loop.step(state).tally.users)
        times.append(time.perf_counter() - began)
    loop.engine.close()
    read = Ledger.read(place / "run.jsonl")
    return {
        "parameters": loop.layout.size, "ready": ready, "cohorts": cohorts, "seconds": times, "lines": read.count,
        "workers": workers, "epsilon": epsilon(read.charged(), DELTA, "rdp"),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def tree(given: argparse.Namespace, found: Constants) -> dict[str, float]:
    """How many leaves take in a cohort in the time for uploads, by network and by processor, and what the rest adds."""
    size = 4 * PARAMETERS
    rate = given.leaf_gigabits * 1e9 / 8
    by_network = COHORT * size / (rate * given.upload_minutes * 60)
    by_processor = COHORT * found.add * PARAMETERS / (given.upload_minutes * 60)
    leaves = math.ceil(max(by_network, by_processor))
    levels = max(1, math.ceil(math.log(leaves, given.fan_in)))
    hop = given.fan_in * (size / rate + found.add * PARAMETERS)
    return {
        "size": size, "leaves": leaves, "by_network": by_network, "by_processor": by_processor, "levels": levels,
        "inner": sum(math.ceil(leaves / given.fan_in**level) for level in range(1, levels + 1)), "hop": hop,
        "climb": levels * hop, "leaf_memory": 2 * size + size,
    }  # fmt: skip


def page(given: argparse.Namespace, found: Constants, run: dict[str, Any]) -> str:
    t = tree(given, found)
    size, root = t["size"], found.sample + PARAMETERS * (found.noise + found.optimiser) + found.line
    train = given.device_minutes * 60
    step = given.down_minutes * 60 + train + given.upload_minutes * 60 + t["climb"] + root
    weight, least = 1 / USERS, threshold(COHORT, 0)
    ring = ring_for(BOUND, weight, MULTIPLIER * BOUND * weight / math.sqrt(least), COHORT, PARAMETERS, ROUNDING)
    rounded = sensitivity(BOUND * weight * ROUNDING, ring.step, PARAMETERS) / (BOUND * weight * ROUNDING) - 1
    drawn = neighbourhood(COHORT)
    pairs = round(2 * (drawn - 1) - (drawn - 1) ** 2 / (COHORT - 1))  # whom a user drew, and who drew it
    unmask = round(pairs * (1 - given.dropout))
    plain, masked = size, PARAMETERS * ring.bits // 8
    spent = {each: epsilon([event()] * STEPS, DELTA, each) for each in ("rdp", "pld")}
    turns = STEPS * COHORT / USERS
    return (
        f"""# At the scale of the paper, on one page

{USERS:,} users, Poisson cohorts of {COHORT:,}, {STEPS:,} central steps, {PARAMETERS:,} parameters in {TENSORS} tensors
(PFL-ASR's extrapolation to a private recogniser). Everything below is written by `benchmarks/scale.py` from what it
measured on {os.cpu_count()} cores ({platform.machine()}, torch {torch.__version__}), at a load of {given.load:.1f} from
other work; nothing is typed in by hand. Network, deadlines and devices cannot be measured here and are assumptions, which
are options of the script.

| measured here | |
|---|---|
| a Poisson cohort out of {USERS:,} users, with bits from the operating system | {found.sample:.2f} s |
| adding one parameter of an update to a sum | {found.add * 1e9:.2f} ns |
| release noise, a parameter | {found.noise * 1e9:.2f} ns |
| LAMB, a parameter | {found.optimiser * 1e9:.2f} ns |
| a ledger line, synced | {found.line * 1e3:.2f} ms, {found.bytes_a_line:.0f} bytes |
| a word of a mask (AES in counter mode) | {found.mask * 1e9:.2f} ns |

| assumed | |
|---|---|
| time for downloads, local training, uploads | {given.down_minutes:g}, {given.device_minutes:g} and {given.upload_minutes:g} minutes |
| network of an aggregator | {given.leaf_gigabits:g} Gbit/s |
| sums that one aggregator takes from the level below | {given.fan_in} |
| users of a cohort that drop out | {given.dropout:.0%} |

## Sampling
A user is asked with probability {COHORT / USERS:.4g} at every step, independently, so it takes part {turns:.1f} times in
expectation. The cohort's size deviates by {math.sqrt(COHORT):,.0f} ({100 / math.sqrt(COHORT):.2f} %); the divisor stays
{COHORT:,}. Drawing all cohorts takes {STEPS * found.sample / 60:.0f} minutes in total. Noise multiplier {MULTIPLIER} gives
epsilon {spent["rdp"]:.3f} (RDP) or {spent["pld"]:.3f} (PLD) at delta {DELTA:g}. The ledger ends at
{STEPS * found.bytes_a_line / 1e6:.1f} MB.

## Bytes
| | a user, a step | the cohort, a step | the whole run |
|---|---|---|---|
| down, float32 | {size / GB:.2f} GB | {COHORT * size / 1e12:.0f} TB | {STEPS * COHORT * size / 1e18:.2f} EB |
| up, float32 | {size / GB:.2f} GB | {COHORT * size / 1e12:.0f} TB | {STEPS * COHORT * size / 1e18:.2f} EB |
| up, masked ({ring.bits}-bit ring) | {masked / GB:.2f} GB | {COHORT * masked / 1e12:.0f} TB | {STEPS * COHORT * masked / 1e18:.2f} EB |

The model goes down through a content network: its origin sends {size / GB:.2f} GB a step. Half precision halves both
directions before anything is bounded; bounding comes after, so the guarantee does not change. A user that takes part
{turns:.1f} times moves {2 * turns * size / GB:.1f} GB in all.

## Aggregation tree
Sums of bounded updates add up, so aggregators form a tree, and none keeps more than a sum, an update that is coming in,
and the one being added: {t["leaf_memory"] / GIB:.1f} GiB, whatever the cohort.

* Leaves: {COHORT * size / 1e12:.0f} TB in {given.upload_minutes:g} minutes are {t["by_network"]:.0f} aggregators' networks
  and {t["by_processor"]:.1f} cores' additions: **{t["leaves"]:,.0f} leaves**, bound by the
  {"network" if t["by_network"] > t["by_processor"] else "processor"}; {COHORT / t["leaves"]:,.0f} users each.
* {t["levels"]:.0f} levels above them with {t["inner"]:,.0f} aggregators; a level takes {given.fan_in} sums in
  {t["hop"]:.0f} s (one after the other), all of them {t["climb"]:.0f} s.
* To have the bytes of one process, sums are added in a fixed order at every aggregator; sums of float32 in another order
  differ by rounding only. The integers of secure aggregation add up exactly in any order.

## Server
| part of a step | seconds |
|---|---|
| sampling | {found.sample:.2f} |
| noise over {PARAMETERS:,} parameters | {PARAMETERS * found.noise:.2f} |
| LAMB | {PARAMETERS * found.optimiser:.2f} |
| ledger | {found.line:.3f} |
| **root, in all** | **{root:.2f}** |

Memory of the root: model, sum and two moments, {4 * size / GIB:.1f} GiB, and {USERS * 8 / GIB:.2f} GiB for the users'
weights. A step takes {step / 60:.1f} minutes of which the root is {100 * root / step:.1f} %; {STEPS:,} steps take
{STEPS * step / 86400:.0f} days. The deadlines decide that, not the server.

## What secure aggregation adds
This is the protocol that `confide deploy` runs, which withstands a server that lies ([deploy.md](deploy.md)): one round over the
whole cohort, since a share of the noise is made for t = {least:,} answers of it. Every user draws {drawn - 1} neighbours
(`privacy/trust/neighbours.py`), masks towards them and towards those who drew it, {pairs} in expectation, and adds a mask of its
own. It checks {pairs} signatures of keys and {drawn - 1} of the list of who arrived. Its masks grow with m, the number of neighbours, as 2 m + 1, and m grows slower
than the cohort: {neighbourhood(1000)} of 1,000, {neighbourhood(10_000)} of 10,000, {drawn} of {COHORT:,}.

* A ring of {ring.bits} bits: {masked / plain:.2f} times the bytes of float32. Rounding raises the sensitivity by
  {100 * rounded:.2g} %, for which bounding leaves room.
* A user draws {pairs + 1} masks: {(pairs + 1) * found.mask * PARAMETERS / 3600:.1f} hours on a core like this one. That is too long for a
  device, so a model of this size needs fewer parameters to be sent, or a server that is trusted: at a million parameters it
  is {(pairs + 1) * found.mask * 1e6:.0f} s.
* For every user that drops out after masking the server draws {unmask} masks; at {given.dropout:.0%} dropouts that is
  {COHORT * given.dropout * unmask * found.mask * PARAMETERS / 3600:,.0f} core hours a step, and one mask for each of the others
  {COHORT * (1 - given.dropout) * found.mask * PARAMETERS / 3600:,.0f}. Relays see single updates and are refused here, so the server
  does this alone.

## A real run at that population and cohort
The real sampler, engine, bounding, aggregator, ledger on disk, noise from the operating system and optimiser, with
{run["parameters"]:,} parameters and made-up users ({run["workers"]} workers): made ready in {run["ready"]:.1f} s, peak
memory {run["peak"]:.2f} GiB in the parent.

| step | cohort drawn | seconds |
|---|---|---|
"""
        + "".join(
            f"| {number} | {cohort:,} | {seconds:.1f} |\n"
            for number, (cohort, seconds) in enumerate(zip(run["cohorts"], run["seconds"], strict=True), start=1)
        )
        + f"""
The ledger has {run["lines"]} lines, and epsilon recomputed from them alone is {run["epsilon"]:.4f} at delta {DELTA:g}.
"""
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("docs/scale.md"))
    options.add_argument("--steps", type=int, default=3, help="of the real run")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--down-minutes", type=float, default=10.0)
    options.add_argument("--device-minutes", type=float, default=10.0)
    options.add_argument("--upload-minutes", type=float, default=20.0)
    options.add_argument("--leaf-gigabits", type=float, default=10.0)
    options.add_argument("--fan-in", type=int, default=16)
    options.add_argument("--dropout", type=float, default=0.05)
    given = options.parse_args()
    given.load = os.getloadavg()[0]
    np.seterr(all="raise", under="ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
        run = real_run(Path(folder), given.steps, given.workers)
    given.out.write_text(page(given, found, run))
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
