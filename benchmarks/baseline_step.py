"""One private central step of the paper's 255.8M-parameter recogniser: time, memory, and what privacy costs a user.

    python benchmarks/baseline_step.py [--repeat 5]

Two users with twenty seconds of audio each (LibriSpeech where CONFIDE_DATA has it, synthetic voices otherwise), one
local step, per-layer clipping, noise, LAMB; in this process. Then the private part of a user's work by itself: the
difference from the central model, norms of its 296 tensors, bounding, and the addition to the sum.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np
import torch

from confide import recipe
from confide.build import make_loop
from confide.federated.bounding import bounder
from confide.federated.local import PlainUpdate
from confide.files import data_folder
from confide.privacy.mechanisms import Occasion

SYNTHETIC = {"kind": "synthetic", "population": "federated", "speakers": 2, "utterances": 12, "digits": [6, 6]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=5, help="how often the private part is timed")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument("--preset", default="baseline")
    given = options.parse_args()
    real = (data_folder() / "LibriSpeech").is_dir()
    corpus = {"kind": "librispeech", "subset": "train-clean-5"} if real else SYNTHETIC
    document = {
        "task": {
            "kind": "speech", "corpus": corpus, "test": corpus,
            "model": {"preset": given.preset, "dtype": given.dtype, "layer_drop": 0.0},
        },
        "sampling": {"kind": "fixed", "cohort": 2},
        "local": {"steps": 1, "learning_rate": 0.2, "batch_seconds": 20, "gradient_clip": 1.0},
        "bounding": {"rule": "per_layer_clip", "bound": 0.01, "split": "dim"},
        "privacy": {
            "mechanism": "gaussian", "noise_scale": 1e-5, "placement": "average", "delta": 1e-9, "accountant": "rdp",
        },
        "central": {"kind": "lamb", "learning_rate": 0.002},
        "evaluation": {"every": 1000, "last": 1},
        "run": {"steps": 1},
    }  # fmt: skip
    loop = make_loop(recipe.parse(document))
    print(f"{loop.layout.size:,} parameters in {len(loop.layout.names)} tensors, {given.dtype}, {corpus['kind']}")
    state = loop.start()
    began = time.perf_counter()
    made = loop.step(state)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"one central step with {made.tally.users} users: {time.perf_counter() - began:.1f} s, peak {peak:.1f} GiB")

    central, theta = state.parameters, state.parameters + 1e-4
    rule = bounder(loop.recipe.bounding, loop.layout)
    times = []
    for _ in range(given.repeat + 1):  # the first touches memory for the first time
        began = time.perf_counter()
        norms = loop.layout.difference(central, theta, theta)
        update = PlainUpdate(theta, loop.layout, norms.unsqueeze(0), torch.zeros(1))
        update.weighted_sum(rule.factors(update.norms) / 2, loop.total)
        times.append(time.perf_counter() - began)
    print(f"private part of a user's work: median {statistics.median(times[1:]):.3f} s, least {min(times):.3f} s")
    began = time.perf_counter()
    loop.plan.mechanism.release(loop.total, Occasion(loop.plan.event, np.arange(2), 0, 0))
    print(f"noise, once a step: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
