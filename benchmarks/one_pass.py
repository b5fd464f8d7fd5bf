"""Users in one pass against one user after the other, on one thread.

    python benchmarks/one_pass.py                                    # tiny, 64 users, 2 utterances of 1 to 3 s
    python benchmarks/one_pass.py --preset small --seconds 1.4 1.6

Every repeat trains each part both ways, in turn, and processor time is taken, so that whatever else the machine does
falls on both alike; what is printed is the least of the repeats, summed over the parts. Both ways end with the bounded
sum. Dropout is off, as one pass asks for.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from confide.federated.bounding import Bounding, bounder
from confide.federated.cohort import PartTrainer, parts
from confide.federated.local import LocalTraining
from confide.federated.parameters import Layout, flatten
from confide.speech.model import FRAME_SECONDS, ModelSettings
from support.utterances import Utterances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--utterances", type=int, default=2)
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 3.0))
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    low, high = (round(seconds / FRAME_SECONDS) for seconds in given.seconds)
    frames = np.random.default_rng(0).integers(low, high, (given.users, given.utterances), endpoint=True)
    task = Utterances(ModelSettings(preset=given.preset, dropout=0.0), frames.tolist())
    layout, central = Layout.of(task.initial_parameters()), flatten(task.initial_parameters())
    local = LocalTraining(steps=1, learning_rate=0.1, gradient_clip=1.0)
    rule = bounder(Bounding(rule="clip", bound=0.01), layout)
    plain, fast = (PartTrainer(task, layout, local, rule, np.ones(given.users), 0, central) for _ in range(2))
    if fast.one_pass is None:
        raise SystemExit("these users are not trained in one pass")
    plain.one_pass = None
    total, cohort = torch.zeros_like(central), np.arange(given.users)
    taken = np.empty((given.repeats, 2, len(list(parts(cohort, fast.part_size)))))
    for repeat in taken:
        for part, users in enumerate(parts(cohort, fast.part_size)):
            for way, trainer in enumerate((plain, fast)):
                begin = time.thread_time()
                trainer.add_part(central, users, 0, total)
                repeat[way, part] = time.thread_time() - begin
    slow, quick = taken.min(axis=0).sum(axis=1)
    each = 1000 / given.users
    print(f"{given.preset}, {layout.size / 1e6:.2f}M parameters, {given.users} users in parts of {fast.part_size}")
    print(f"one by one {slow * each:.2f} ms a user, one pass {quick * each:.2f} ms a user, ratio {slow / quick:.2f}")
    seconds = [500 * took / given.users for took in (quick, slow)]
    print(f"500 users take {seconds[0]:.2f} s of one core in one pass, {seconds[1]:.2f} s one by one")


if __name__ == "__main__":
    main()
